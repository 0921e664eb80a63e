"""Cumulative token sequences that parents and children share.

A call's sequence is its parent's plus a few tokens. Keeping each as its own array would cost the
square of the conversation; here the calls of one chain are prefixes of one growing buffer.

Invariant: an element below a sequence's length is never written again, so views that were handed
out stay true while the buffer grows. Not thread-safe: the owner's lock guards extension.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from middleware.arrays import TokenIds


class _Buffer:
    """An array with room at its end; ``used`` elements are taken."""

    __slots__ = ("array", "used")

    def __init__(self, first: TokenIds, room: int) -> None:
        self.array: npt.NDArray[Any] = np.empty(len(first) + room, first.array.dtype)
        self.array[: len(first)] = first.array
        self.used = len(first)

    def append(self, part: TokenIds) -> None:
        needed = self.used + len(part)
        if needed > self.array.size:
            grown = np.empty(max(needed, self.array.size * 2), self.array.dtype)
            grown[: self.used] = self.array[: self.used]
            self.array = grown  # views of the old array keep it alive, unchanged
        self.array[self.used : needed] = part.array
        self.used = needed


class SharedTokens:
    """One call's cumulative tokens: the first ``len`` elements of a buffer it shares."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, buffer: _Buffer, length: int) -> None:
        self._buffer = buffer
        self._length = length

    @classmethod
    def start(cls, *parts: TokenIds) -> SharedTokens:
        """A sequence of its own."""
        first = TokenIds.concat(*parts)
        return cls(_Buffer(first, room=0), len(first))

    def extended(self, *parts: TokenIds) -> tuple[SharedTokens, int]:
        """This sequence plus ``parts``, and how many tokens had to be stored anew for it.

        In place where this sequence is its buffer's last; else (a fork) in a new buffer.
        """
        added = TokenIds.concat(*parts)
        fits = added.array.dtype == self._buffer.array.dtype
        if self._length != self._buffer.used or not fits:
            fork = SharedTokens.start(self.ids, added)
            return fork, len(fork)
        self._buffer.append(added)
        return SharedTokens(self._buffer, self._buffer.used), len(added)

    @property
    def ids(self) -> TokenIds:
        """The sequence as a view; nothing is copied."""
        return TokenIds.sharing(self._buffer.array[: self._length])

    def __len__(self) -> int:
        return self._length
