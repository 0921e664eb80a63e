"""Measuring two ways of doing one thing side by side, and what a measured row is.

Figures from different moments do not compare on a shared machine, so the two sides run in turn
(A B A B ...) in one process run, without the garbage collector, and what is judged is the ratio
of their medians. Nothing here judges an absolute time.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SLACK = 2.0
"""The short form lets a ratio be so many times worse than its bound: kinds, not percents."""

ROUNDS = 5

Clock = Callable[[], float]
Work = Callable[[], object]
Pair = tuple[float, float]
"""(ours, baseline), in seconds or bytes."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured ratio.

    ``ours`` and ``baseline`` are medians in ``unit``; ``ratio`` is what the target is about.
    ``target`` is the specification's bound (None: it has none for this row); ``bound`` is what
    the short form asserts, with slack: the target, or what can be reached where the target
    cannot (docs/performance.md says why).
    """

    name: str
    work: str
    ours: float
    baseline: float
    unit: str
    ratio: float
    target: float | None
    bound: float
    sense: Literal["at most", "at least"] = "at most"
    against: str = ""
    notes: dict[str, Any] = field(default_factory=dict)

    def within(self, bound: float, slack: float = 1.0) -> bool:
        """Whether the ratio keeps ``bound``, worse by ``slack`` at most."""
        if self.sense == "at most":
            return self.ratio <= bound * slack
        return self.ratio >= bound / slack

    @property
    def meets_target(self) -> bool | None:
        """Whether the specification's target is met; None where it has none."""
        return None if self.target is None else self.within(self.target)

    @property
    def holds(self) -> bool:
        """What the short form asserts."""
        return self.within(self.bound, SLACK)

    def to_json(self) -> dict[str, Any]:
        """One JSON line."""
        return asdict(self) | {"meets_target": self.meets_target, "holds": self.holds}


def compare(
    name: str,
    work: str,
    measured: Pair,
    *,
    unit: str,
    target: float | None,
    bound: float | None = None,
    sense: Literal["at most", "at least"] = "at most",
    inverse: bool = False,
    against: str = "",
    scale: float = 1.0,
    **notes: Any,
) -> Row:
    """A row from (ours, baseline). ``inverse``: the ratio is baseline / ours ("n times faster")."""
    mine, theirs = measured
    assert target is not None or bound is not None
    return Row(
        name=name,
        work=work,
        ours=mine * scale,
        baseline=theirs * scale,
        unit=unit,
        ratio=theirs / mine if inverse else mine / theirs,
        target=target,
        bound=bound if bound is not None else float(target or 0),
        sense=sense,
        against=against,
        notes=notes,
    )


@contextmanager
def without_gc() -> Iterator[None]:
    """Collect now, and not again until the end."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def timed(work: Work, clock: Clock = time.process_time) -> float:
    """Seconds of one run."""
    with without_gc():
        began = clock()
        kept = work()  # freed after the clock was read
        took = clock() - began
    del kept
    return took


def side_by_side(
    ours: Work, baseline: Work, *, rounds: int = ROUNDS, clock: Clock = time.process_time
) -> Pair:
    """Median seconds of each, run in turn after one unmeasured run of both.

    The default clock is the processor time of all threads: on a busy machine it means more than
    the time on the wall, and work that is spread over threads gains nothing by it.
    """
    ours()
    baseline()
    taken = [(timed(ours, clock), timed(baseline, clock)) for _ in range(rounds)]
    return medians(taken)


def medians(taken: list[Pair]) -> Pair:
    """The medians of both sides."""
    mine, theirs = zip(*taken, strict=True)
    return statistics.median(mine), statistics.median(theirs)


def peak_bytes(work: Work) -> int:
    """Most bytes that were allocated at once while ``work`` ran, beyond what was there before."""
    with without_gc():
        tracemalloc.start()
        try:
            kept = work()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    del kept
    return peak
