"""Token sequences as cells for a page: window, colours, drift. Pure; numpy in, small lists out.

A page shows at most ``WINDOW`` tokens: a sequence of 200,000 is looked at in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

WINDOW: Final = 1000
_SHADES: Final = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)  # -log-prob below which a shade ends
_AROUND_DRIFT: Final = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """One token: ``kind`` is ``context``, ``trained`` or ``elsewhere``; ``shade`` 0 (likely) to 7.

    ``elsewhere``: sampled, but not trained in this row.
    """

    at: int
    token_id: int
    kind: str
    shade: int | None = None
    log_prob: float | None = None
    starts: str = ""  # the call whose generation begins here


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Part of a sequence of ``total`` tokens; ``before`` and ``after`` are starts of neighbours."""

    cells: Sequence[Cell]
    start: int
    total: int
    before: int | None
    after: int | None

    @property
    def end(self) -> int:
        """Half-open."""
        return self.start + len(self.cells)


def shade(log_prob: float) -> int:
    """How unlikely a sampled token was: 0 for certain, 7 for below e^-8."""
    return int(np.searchsorted(_SHADES, -log_prob, side="right"))


def token_window(
    token_ids: npt.NDArray[np.integer],
    loss_mask: npt.NDArray[np.uint8],
    log_probs: npt.NDArray[np.float64],
    generated: Sequence[tuple[int, int, str]],
    start: int,
) -> TokenWindow:
    """The cells from ``start`` on. All arrays have one length T.

    ``generated``: (start, end, call id) of every sampled stretch, in order.
    """
    total = len(token_ids)
    start = max(0, min(start, max(0, total - 1)))
    end = min(total, start + WINDOW)
    sampled = np.zeros(end - start, dtype=bool)
    starts = {}
    for first, last, call_id in generated:
        sampled[max(0, first - start) : max(0, last - start)] = True
        starts[first] = call_id
    cells = []
    for at in range(start, end):
        trained = bool(loss_mask[at])
        log_prob = float(log_probs[at]) if trained else None
        kind = "trained" if trained else "elsewhere" if sampled[at - start] else "context"
        cells.append(
            Cell(
                at,
                int(token_ids[at]),
                kind,
                None if log_prob is None else shade(log_prob),
                log_prob,
                starts.get(at, ""),
            )
        )
    return TokenWindow(
        cells,
        start,
        total,
        max(0, start - WINDOW) if start else None,
        end if end < total else None,
    )


@dataclass(frozen=True, slots=True)
class DriftView:
    """Both sequences around the place where they part; a None is past the end of one."""

    at: int
    rows: Sequence[tuple[int, int | None, int | None]]  # position, the parent's, this prompt's


def drift_view(
    parent: npt.NDArray[np.integer], prompt: npt.NDArray[np.integer], at: int
) -> DriftView:
    """A few tokens before and after ``at``, the first position that differs."""

    def token(tokens: npt.NDArray[np.integer], position: int) -> int | None:
        return int(tokens[position]) if position < len(tokens) else None

    last = min(max(len(parent), len(prompt)), at + _AROUND_DRIFT)
    rows = [
        (position, token(parent, position), token(prompt, position))
        for position in range(max(0, at - _AROUND_DRIFT), last)
    ]
    return DriftView(at, rows)
