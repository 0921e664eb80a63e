"""What the clients return beyond the stores' and the builder's own types, and how it is read.

Token data arrives as read-only numpy arrays of equal length per row. Unknown keys of newer
servers are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from capture_server.trajectories.rows import CallSpan, RolloutTraces, TraceRow
from middleware.arrays import LogProbs, TokenIds
from middleware.protocols import RolloutStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPage:
    """One page of a listing; ``next_cursor`` None: the last."""

    rollouts: tuple[RolloutStatus, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltResponse:
    """The main chain as one Responses object; None where nothing could be built."""

    rollout_id: str
    builder: str
    mask_sample: bool
    rebuilt_response: dict[str, Any] | None
    metrics: dict[str, Any]
    snapshot_id: str
    version: int
    error: str | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """From the JSON answer."""
        return cls(
            rollout_id=body["rollout_id"],
            builder=body["builder"],
            mask_sample=body["mask_sample"],
            rebuilt_response=body.get("rebuilt_response"),
            metrics=body["metrics"],
            snapshot_id=body["snapshot_id"],
            version=body["version"],
            error=body.get("error"),
        )


_SPAN_FIELDS: Final = frozenset(field.name for field in fields(CallSpan))
_UNNAMED_REASON: Final = "masked_by_server"


def traces_of(body: Mapping[str, Any]) -> RolloutTraces:
    """Training rows from the JSON answer.

    Raises:
        ValueError: a row whose arrays differ in length, or a main row that is not there.
    """
    rows = [_row_of(row) for row in body["rows"]]
    main_row = body["main_row"]
    if main_row is not None and not 0 <= main_row < len(rows):
        raise ValueError(f"main_row {main_row} of {len(rows)} rows")
    return RolloutTraces(
        rollout_id=body["rollout_id"],
        builder=body["builder"],
        mask_sample=body["mask_sample"],
        rows=rows,
        main_row=main_row,
        metrics=body.get("metrics", {}),
        snapshot_id=body["snapshot_id"],
        version=body["version"],
    )


def _row_of(row: Mapping[str, Any]) -> TraceRow:
    tokens = TokenIds.of(row["token_ids"]).array
    mask = _read_only(np.asarray(row["loss_mask"], dtype=np.uint8))
    log_probs = LogProbs.of(row["log_probs"]).array
    if not len(tokens) == len(mask) == len(log_probs):
        raise ValueError(
            f"row {row['row_id']}: {len(tokens)} tokens, {len(mask)} mask values and "
            f"{len(log_probs)} log-probs"
        )
    reasons = list(row.get("mask_reasons", ()))
    if row["mask_sample"] and not reasons:
        reasons = [_UNNAMED_REASON]  # the row's own mask_sample follows from its reasons
    return TraceRow(
        row_id=row["row_id"],
        model_call_ids=list(row["model_call_ids"]),
        token_ids=tokens,
        loss_mask=mask,
        log_probs=log_probs,
        call_spans=[_span_of(span) for span in row["call_spans"]],
        starts=row["starts"],
        ends=row["ends"],
        cut=row.get("cut"),
        mask_reasons=reasons,
    )


def _span_of(span: Mapping[str, Any]) -> CallSpan:
    return CallSpan(**{name: value for name, value in span.items() if name in _SPAN_FIELDS})


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.setflags(write=False)
    return array
