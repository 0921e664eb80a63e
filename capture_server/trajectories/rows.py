"""One training row as numpy arrays, and its JSON form.

All arrays of a row have one length T: entry t is about token t. They are read-only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from capture_server.trajectories.calls import Call
from middleware.records import TokenEntry, TokenIds

WeightVersion = int | str | None


@dataclass(slots=True, eq=False)
class RowDraft:
    """A row in the making. ``calls``: the whole chain; ``contained``: what the row may hold."""

    row_id: str
    calls: list[Call]
    contained: list[Call]
    cut: bool = False
    doubts: list[str] = field(default_factory=list)
    first: Call | None = None  # where the row's history begins; default: its first call
    is_main: bool = False
    is_scored: bool = False
    trained: set[Call] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpan:
    """Where one call's generated tokens stand in the row: half-open, ``start <= t < end``.

    ``trained`` is False where the call is trained in another row (its mask is 0 here).
    ``mixed``: weights changed from ``weight_version`` to ``weight_version_end`` within the call
    and the engine did not say where.
    """

    model_call_id: str
    start: int
    end: int
    weight_version: WeightVersion = None
    weight_version_end: WeightVersion = None
    mixed: bool = False
    agent_id: str | None = None
    sampling: dict[str, Any] | None = None
    logprobs_mode: str | None = None
    guided: bool = False
    finish_reason: str | None = None
    trained: bool = True

    def to_json(self) -> dict[str, Any]:
        """The span's keys in the HTTP API."""
        shown: dict[str, Any] = {
            "model_call_id": self.model_call_id,
            "start": self.start,
            "end": self.end,
            "weight_version": self.weight_version,
            "agent_id": self.agent_id,
            "sampling": self.sampling,
            "logprobs_mode": self.logprobs_mode,
            "guided": self.guided,
            "finish_reason": self.finish_reason,
            "trained": self.trained,
        }
        if self.weight_version_end is not None:
            shown["weight_version_end"] = self.weight_version_end
        if self.mixed:
            shown["mixed"] = True
        return shown


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceRow:
    """One training row of T tokens.

    ``token_ids`` is int32[T] (wider where an id needs it), ``loss_mask`` uint8[T] with 1 on
    sampled tokens that are trained here, ``log_probs`` float64[T] with the captured log-prob
    there and 0.0 elsewhere. ``mask_sample``: do not train on this row; ``mask_reasons`` says why.
    """

    row_id: str
    model_call_ids: list[str]
    token_ids: npt.NDArray[np.integer[Any]]
    loss_mask: npt.NDArray[np.uint8]
    log_probs: npt.NDArray[np.float64]
    call_spans: list[CallSpan]
    starts: dict[str, Any]
    ends: str | None
    cut: str | None = None
    mask_reasons: list[str] = field(default_factory=list)

    @property
    def mask_sample(self) -> bool:
        """Whether this row must not be trained on."""
        return bool(self.mask_reasons)

    @property
    def weight_versions(self) -> list[int | str]:
        """The weight versions of the tokens trained here, in order of appearance."""
        found: dict[int | str, None] = {}
        for span in self.call_spans:
            for version in (span.weight_version, span.weight_version_end):
                if span.trained and version is not None:
                    found[version] = None
        return list(found)

    def to_json(self, *, arrays: bool = False) -> dict[str, Any]:
        """The row's keys in the HTTP API; ``arrays`` leaves numpy arrays (orjson writes them)."""
        versions = self.weight_versions
        comparable = versions if all(isinstance(v, int) for v in versions) else []
        shown: dict[str, Any] = {
            "row_id": self.row_id,
            "model_call_ids": list(self.model_call_ids),
            "token_ids": self.token_ids if arrays else self.token_ids.tolist(),
            "loss_mask": self.loss_mask if arrays else self.loss_mask.tolist(),
            "log_probs": self.log_probs if arrays else self.log_probs.tolist(),
            "call_spans": [span.to_json() for span in self.call_spans],
            "starts": dict(self.starts),
            "ends": self.ends,
            "mask_sample": self.mask_sample,
            "mask_reasons": list(self.mask_reasons),
            "weight_version_min": min(comparable, default=None),
            "weight_version_max": max(comparable, default=None),
        }
        if self.cut is not None:
            shown["cut"] = self.cut
        return shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTraces:
    """All rows of a rollout.

    ``main_row`` indexes the row of the scored response; None when that is not known or cannot be
    shown. ``mask_sample``: train on none of them. Metrics keys: spec 04.
    """

    rollout_id: str
    builder: str
    mask_sample: bool
    rows: list[TraceRow]
    main_row: int | None
    metrics: dict[str, Any]
    snapshot_id: str | None = None
    version: int | None = None

    def to_json(self, *, arrays: bool = False) -> dict[str, Any]:
        """The answer of ``POST R/trajectories``, format ``traces``."""
        return {
            "rollout_id": self.rollout_id,
            "builder": self.builder,
            "mask_sample": self.mask_sample,
            "rows": [row.to_json(arrays=arrays) for row in self.rows],
            "main_row": self.main_row,
            "metrics": dict(self.metrics),
            "snapshot_id": self.snapshot_id,
            "version": self.version,
        }


def make_row(draft: RowDraft) -> TraceRow:
    """Lay the draft's calls out in arrays: one pass over its tokens."""
    calls = draft.contained
    pieces = [calls[0].full_prompt(), calls[0].generated]
    for call in calls[1:]:
        pieces += [call.interstitial, call.generated]
    token_ids = TokenIds.concat(*pieces).array
    loss_mask = np.zeros(token_ids.size, np.uint8)
    log_probs = np.zeros(token_ids.size, np.float64)
    spans = []
    for call in calls:
        place = slice(call.prompt_len, call.cum_len)
        trained = call in draft.trained
        if trained:
            loss_mask[place] = 1
            log_probs[place] = call.entry.generation_log_probs.array
        spans.append(_span(call, trained=trained))
    for array in (loss_mask, log_probs):
        array.setflags(write=False)
    return TraceRow(
        row_id=draft.row_id,
        model_call_ids=[call.call_id for call in calls],
        token_ids=token_ids,
        loss_mask=loss_mask,
        log_probs=log_probs,
        call_spans=spans,
        starts=_starts(draft.first or calls[0]),
        ends=calls[-1].entry.finish_reason,
        cut="undecided" if draft.cut else None,
        mask_reasons=list(draft.doubts),
    )


def _starts(first: Call) -> dict[str, Any]:
    if not first.is_fragment:
        return {"kind": "root"}
    starts: dict[str, Any] = {"kind": "fragment", "reason": first.failure}
    if first.entry.parent_resolution_reason:
        starts["resolution_reason"] = first.entry.parent_resolution_reason
    return starts


def _span(call: Call, *, trained: bool) -> CallSpan:
    entry: TokenEntry = call.entry
    sampling = dict(entry.sampling) if isinstance(entry.sampling, dict) else None
    ended_at = entry.weight_version_end
    return CallSpan(
        model_call_id=call.call_id,
        start=call.prompt_len,
        end=call.cum_len,
        weight_version=entry.weight_version,
        weight_version_end=ended_at,
        mixed=ended_at is not None and ended_at != entry.weight_version,
        agent_id=entry.agent_id,
        sampling=sampling,
        logprobs_mode=(sampling or {}).get("logprobs_mode"),
        guided=bool(entry.guided),
        finish_reason=entry.finish_reason,
        trained=trained,
    )
