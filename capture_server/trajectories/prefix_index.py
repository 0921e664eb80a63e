"""Which of many recorded sequences are a prefix of this prompt?

Answered by length and two probe tokens per sequence, vectorised over all of them; what survives is
compared in full, longest first. No tree, no Python object per token. When several comparisons
fail (retries that share their ends), a running CRC over the prompt sorts the rest out in one pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from capture_server.trajectories.calls import Call
from middleware.records import TokenIds

_COMPARISONS: Final = 3  # so many failed ones cost more than a checksum pass over the prompt
_ID_BYTES: Final = 8
Parts = Callable[[Call], tuple[TokenIds, TokenIds]]


def whole_sequence(call: Call) -> tuple[TokenIds, TokenIds]:
    """Index prompt + generation."""
    return call.full_prompt(), call.generated


def prompt_only(call: Call) -> tuple[TokenIds, TokenIds]:
    """Index the prompt alone."""
    return call.full_prompt(), TokenIds(())


class PrefixIndex:
    """Sequences of ``calls``, by length. Immutable; a query costs one pass over the prompt."""

    def __init__(self, calls: Sequence[Call], parts: Parts) -> None:
        # Longest first: a rebuilt delta prompt is then shared by all shorter ones on its path.
        deepest_first = sorted(calls, key=lambda call: -call.prompt_len)
        sized = [(sum(map(len, parts(call))), call) for call in deepest_first]
        sized.sort(key=lambda pair: (pair[0], pair[1].call_id))
        self._calls = [call for _, call in sized]
        self._parts = parts
        self._lengths = np.array([length for length, _ in sized], dtype=np.int64)
        self._last = np.array(
            [_token(parts(call), length - 1) for length, call in sized], dtype=np.uint64
        )
        self._middle = np.array(
            [_token(parts(call), length // 2) for length, call in sized], dtype=np.uint64
        )
        self._checksums: dict[str, int] = {}

    def longest(self, prompt: TokenIds) -> list[Call]:
        """The calls with the longest sequence that is a prefix; several: identical sequences."""
        best: list[Call] = []
        left = self._survivors(prompt, 0, len(prompt))
        failed = 0
        while left.size:
            at, left = int(left[-1]), left[:-1]
            call = self._calls[at]
            if best and call.cum_len < best[0].cum_len:
                break
            if call.is_prefix_of(prompt):
                best.append(call)
            else:
                failed += 1
                if failed == _COMPARISONS:
                    left = self._same_checksum(prompt.array, left)
        return best

    def candidates(self, prompt: TokenIds, shortest: int, longest: int) -> list[Call]:
        """Calls of such a length whose probes fit; the caller compares in full."""
        found = self._survivors(prompt, shortest, longest)
        return [self._calls[at] for at in found.tolist()]

    def _survivors(self, prompt: TokenIds, shortest: int, longest: int) -> npt.NDArray[np.int64]:
        start = int(np.searchsorted(self._lengths, shortest, "left"))
        stop = int(np.searchsorted(self._lengths, longest, "right"))
        lengths = self._lengths[start:stop]
        ids = prompt.array
        if not ids.size or not lengths.size:  # without a token only empty sequences are left
            return np.arange(start, stop)
        fits = (ids[np.maximum(lengths - 1, 0)].astype(np.uint64) == self._last[start:stop]) & (
            ids[np.minimum(lengths // 2, ids.size - 1)].astype(np.uint64)
            == self._middle[start:stop]
        )
        return np.flatnonzero(fits | (lengths == 0)) + start

    def _same_checksum(
        self, ids: npt.NDArray[np.integer], found: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        data = _wire(ids)
        kept, checksum, position = [], 0, 0
        for at in found.tolist():  # by increasing length
            end = int(self._lengths[at]) * _ID_BYTES
            checksum = zlib.crc32(data[position:end], checksum)
            position = end
            if self._checksum(self._calls[at]) == checksum:
                kept.append(at)
        return np.array(kept, dtype=np.int64)

    def _checksum(self, call: Call) -> int:
        known = self._checksums.get(call.call_id)
        if known is None:
            known = 0
            for part in self._parts(call):
                known = zlib.crc32(_wire(part.array), known)
            self._checksums[call.call_id] = known
        return known


def _token(parts: tuple[TokenIds, TokenIds], at: int) -> int:
    prompt, generated = parts
    if at < 0:
        return 0
    if at < len(prompt):
        return prompt[at]
    return generated[at - len(prompt)] if at - len(prompt) < len(generated) else 0


def _wire(ids: npt.NDArray[np.integer]) -> memoryview:
    """One width for all, so that equal ids are equal bytes."""
    return np.ascontiguousarray(ids, dtype="<u8").data.cast("B")
