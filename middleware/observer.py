"""Who is told what became of calls: metrics and traces, without knowing either of them.

Observers run on the event loop inside the call: they must be quick and must not wait. One that
raises is logged and costs nothing else. Source: spec 08, "Metrics".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from middleware.context import CaptureContext
    from middleware.records import TokenEntry

logger = logging.getLogger(__name__)

CallOutcome = Literal["entry", "cut", "cancelled", "incomplete"]
"""Recorded whole; recorded up to where it broke off; no model text; its rollout is masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """One captured call that was dispatched, after its end. Times in seconds; None: not reached."""

    context: CaptureContext
    outcome: CallOutcome
    reason: str  # why it was cancelled, cut or incomplete; "" for a whole entry
    started_at: float  # Unix time
    total_s: float
    before_dispatch_s: float  # from the request's last byte to its dispatch
    first_token_s: float | None  # from dispatch
    put_s: float | None  # building and storing the record, until durable
    held_s: float | None  # from the engine's end to the release of what completes the answer
    delivered: bool | None


class CaptureObserver:
    """Told about calls; every method may be left as it is, which does nothing."""

    def recorded(self, entries: Sequence[TokenEntry]) -> None:
        """These records of one call are durable."""

    def hole(self, code: str) -> None:
        """A rollout was marked incomplete for this reason (or that was tried)."""

    def late_write(self) -> None:
        """The store refused a record or a cancel that came after the freeze."""

    def refused(self, code: str) -> None:
        """A tagged request was refused by us before it reached the engine."""

    def ended(self, report: CallReport) -> None:
        """A dispatched call has ended and its outcome is recorded."""


NO_OBSERVER: Final = CaptureObserver()


class Observers(CaptureObserver):
    """Tells each of several; the failure of one is logged and kept from the call."""

    def __init__(self, observers: Sequence[CaptureObserver]) -> None:
        self._observers = tuple(observers)

    def recorded(self, entries: Sequence[TokenEntry]) -> None:
        """See ``CaptureObserver``."""
        self._tell(lambda observer: observer.recorded(entries))

    def hole(self, code: str) -> None:
        """See ``CaptureObserver``."""
        self._tell(lambda observer: observer.hole(code))

    def late_write(self) -> None:
        """See ``CaptureObserver``."""
        self._tell(lambda observer: observer.late_write())

    def refused(self, code: str) -> None:
        """See ``CaptureObserver``."""
        self._tell(lambda observer: observer.refused(code))

    def ended(self, report: CallReport) -> None:
        """See ``CaptureObserver``."""
        self._tell(lambda observer: observer.ended(report))

    def _tell(self, what: Callable[[CaptureObserver], None]) -> None:
        for observer in self._observers:
            try:
                what(observer)
            except Exception:
                logger.exception("an observer of calls failed", extra={"action": "observer_failed"})
