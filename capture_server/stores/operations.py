"""One request to a store on its way through a lane, and the handles that callers wait on.

Invariant: both futures of an operation are completed exactly once, ``visible`` never after
``done``. They cannot be cancelled: a caller that gave up may find its record durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from capture_server.stores.journal import Record
from capture_server.stores.journal_file import JournalFile

T = TypeVar("T")


def _running_future() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from here on cancel() is refused
    return future


@dataclass(slots=True, kw_only=True)
class Operation:
    """What to do with one rollout.

    ``prepare`` runs before the lock is taken (packing); ``step`` under the lock, on the caught-up
    journal; ``finish`` after lock and sync, on the step's value (unpacking).
    ``owed_unwritten``/``owed_unsynced``: records that the rollout must get later if the write or
    the sync fails; ``owed_refused``: those that came with the step's error (a conflict's mark).
    The step may fill them. An operation with neither ``writes`` nor ``creates`` reads only; one
    that ``removes`` may take the file (and its lock) away, so it is the last of its batch.
    """

    step: Callable[[JournalFile], Any]
    prepare: Callable[[], None] | None = None
    finish: Callable[[Any], Any] | None = None
    creates: bool = False
    writes: bool = True
    syncs: bool = True
    removes: bool = False
    # An intent is visible before its sync, unless the disk is known to be in trouble.
    visible_early: bool = False
    owed_unwritten: Sequence[Record] = ()
    owed_unsynced: Sequence[Record] = ()
    owed_refused: Sequence[Record] = ()
    visible: Future[Any] = field(default_factory=_running_future)
    done: Future[Any] = field(default_factory=_running_future)
    value: Any = None
    error: Exception | None = None

    def show(self) -> None:
        """Complete ``visible``."""
        if self.visible.done():
            return
        if self.error is not None:
            self.visible.set_exception(self.error)
        else:
            self.visible.set_result(self.value)

    def complete(self) -> None:
        """Complete both."""
        if self.finish is not None and self.error is None:
            try:
                self.value = self.finish(self.value)
            except Exception as exc:  # noqa: BLE001 - whatever it is, the caller must hear of it
                self.error = exc
        self.show()
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.value)


@dataclass(frozen=True, slots=True)
class FileIntentTicket:
    """See ``middleware.protocols.IntentTicket``."""

    first_call: bool
    _done: Future[Any]

    async def wait_durable(self) -> None:
        """Return when the intent is on disk.

        Raises:
            StoreUnavailableError: it is not; the rollout is incomplete.
        """
        await asyncio.wrap_future(self._done)


class Outcome(Generic[T]):
    """A result under way: ``await`` it, or use it like its value (which waits for it).

    The seed's ``delete`` and ``sweep_retired`` are plain functions, our protocol's are
    coroutines. The work starts at the call either way, in order with the rollout's other
    operations; without a running event loop it has ended when the call returns.
    """

    def __init__(self, future: Future[T]) -> None:
        self._future = future
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            future.result()

    def result(self) -> T:
        """The value; waits for it."""
        return self._future.result()

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._future).__await__()

    def __bool__(self) -> bool:
        return bool(self.result())

    def __int__(self) -> int:
        return int(self.result())  # type: ignore[call-overload, no-any-return]

    __index__ = __int__

    def __eq__(self, other: object) -> bool:
        return self.result() == (other.result() if isinstance(other, Outcome) else other)

    def __hash__(self) -> int:
        return hash(self.result())

    def __repr__(self) -> str:
        return f"Outcome({self._future.result()!r})" if self._future.done() else "Outcome(...)"
