"""Training rows, recomputed: masks, spans, log-probs, who is trained where; and against entries.

Invariant: rows that pass train every sampled token that they show exactly once, with a finite
log-prob, and nothing else; rows that pass against their snapshot do so with exactly the recorded
tokens and log-probs, behind exactly the recorded prompts. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from capture_server.trajectories.builder import BUILDERS
from capture_server.trajectories.calls import Call
from capture_server.trajectories.rows import CallSpan, RolloutTraces, TraceRow
from capture_server.trajectories.traces import build_traces
from capture_server.verify.entries import RecordedCalls
from capture_server.verify.findings import Violation
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import NO_LOG_PROB_SENTINEL, TokenIds

# The harness named a response, and no call could be attributed to it (see ``terminal``).
_DECLARED_UNMATCHED: Final = re.compile(r"(?:^|,)declared_|[\[;]declared=")


def check_rows(traces: RolloutTraces) -> Iterator[Violation]:
    """What the rows say about themselves."""
    rollout_id = traces.rollout_id
    if traces.main_row is not None and not 0 <= traces.main_row < len(traces.rows):
        message = f"main_row is {traces.main_row} of {len(traces.rows)} rows"
        yield Violation(code="main_row_missing", message=message, rollout_id=rollout_id)
    if traces.mask_sample != all(row.mask_sample for row in traces.rows):
        message = f"mask_sample is {traces.mask_sample}, its rows say otherwise"
        yield Violation(code="mask_sample_mismatch", message=message, rollout_id=rollout_id)
    names: set[str] = set()
    for row in traces.rows:
        if row.row_id in names:
            yield _at(traces, row, "duplicate_row_id", "a second row of this name")
        names.add(row.row_id)
        yield from _check_row(traces, row)
    yield from _trained_once(traces)


def _check_row(traces: RolloutTraces, row: TraceRow) -> Iterator[Violation]:
    size = row.token_ids.size
    if not size == row.loss_mask.size == row.log_probs.size:
        message = f"{size} tokens, {row.loss_mask.size} masks, {row.log_probs.size} log-probs"
        yield _at(traces, row, "length_mismatch", message)
        return
    spans_hold = True
    end = 0
    for span in row.call_spans:
        if not end <= span.start < span.end <= size:
            spans_hold = False
            message = f"the span {span.start}..{span.end} has no place after {end} in {size} tokens"
            yield _at(traces, row, "span_misplaced", message, span.model_call_id, span.start)
        end = max(end, span.end)
    if [span.model_call_id for span in row.call_spans] != row.model_call_ids:
        yield _at(traces, row, "span_calls_mismatch", "spans and model_call_ids name other calls")
    if row.call_spans and row.ends != row.call_spans[-1].finish_reason:
        yield _at(traces, row, "end_mismatch", f"it ends with {row.ends!r}, its last call does not")
    if row.starts.get("kind") not in ("root", "fragment"):
        yield _at(traces, row, "start_malformed", "starts.kind is neither root nor fragment")
    if spans_hold:
        yield from _check_mask(traces, row)
    yield from _check_log_probs(traces, row)


def _check_mask(traces: RolloutTraces, row: TraceRow) -> Iterator[Violation]:
    expected = np.zeros(row.token_ids.size, np.uint8)
    for span in row.call_spans:
        if span.trained:
            expected[span.start : span.end] = 1
    at = _first(row.loss_mask != expected)
    if at is not None:
        message = f"the mask is {int(row.loss_mask[at])}, the spans say {int(expected[at])}"
        yield _at(traces, row, "mask_mismatch", message, _call_at(row, at), at)
    if not expected.any():
        yield _at(traces, row, "nothing_trained", "the row trains nothing")


def _check_log_probs(traces: RolloutTraces, row: TraceRow) -> Iterator[Violation]:
    usable = (row.log_probs > NO_LOG_PROB_SENTINEL) & (row.log_probs < np.inf)
    at = _first(~usable)
    if at is not None:
        message = f"the log-prob is {float(row.log_probs[at])!r}"
        yield _at(traces, row, "log_prob_unusable", message, _call_at(row, at), at)
    at = _first((row.loss_mask == 0) & (row.log_probs.view(np.uint64) != 0))
    if at is not None:
        message = f"the log-prob of a masked token is {float(row.log_probs[at])!r}, not 0.0"
        yield _at(traces, row, "log_prob_of_masked", message, _call_at(row, at), at)


def _trained_once(traces: RolloutTraces) -> Iterator[Violation]:
    """Every call that some row shows is trained in exactly one, and the same in all."""
    first: dict[str, tuple[TraceRow, CallSpan]] = {}
    owner: dict[str, TraceRow] = {}
    for row in traces.rows:
        for span in row.call_spans:
            call_id = span.model_call_id
            if span.trained and call_id in owner:
                message = f"it is trained in row {owner[call_id].row_id!r} already"
                yield _at(traces, row, "trained_twice", message, call_id, span.start)
            elif span.trained:
                owner[call_id] = row
            other, known = first.setdefault(call_id, (row, span))
            if other is not row:
                yield from _same_history(traces, row, span, other, known)
    for call_id, (row, span) in first.items():
        if call_id not in owner:
            yield _at(traces, row, "never_trained", "no row trains this call", call_id, span.start)


def _same_history(
    traces: RolloutTraces, row: TraceRow, span: CallSpan, other: TraceRow, known: CallSpan
) -> Iterator[Violation]:
    mine, theirs = row.token_ids[: span.end], other.token_ids[: known.end]
    if (span.start, span.end) != (known.start, known.end):
        message = f"row {other.row_id!r} has it at {known.start}..{known.end}"
    elif not np.array_equal(mine, theirs):
        message = f"row {other.row_id!r} has other tokens up to it"
    else:
        return
    at = TokenIds.of(mine).common_prefix_len(TokenIds.of(theirs))
    yield _at(traces, row, "shared_call_differs", message, span.model_call_id, at)


def check_rows_against(
    traces: RolloutTraces, snapshot: TokenCaptureSnapshot, calls: RecordedCalls
) -> Iterator[Violation]:
    """What the rows say against what was recorded (``calls`` are the snapshot's)."""
    if traces.snapshot_id is not None and (traces.snapshot_id, traces.version) != (
        snapshot.snapshot_id,
        snapshot.version,
    ):
        message = "the rows were built from another snapshot, or another version of it"
        yield Violation(code="other_snapshot", message=message, rollout_id=traces.rollout_id)
    if snapshot.incomplete and not traces.mask_sample:
        message = "the rollout is incomplete, but its rows are not masked"
        yield Violation(code="incomplete_not_masked", message=message, rollout_id=traces.rollout_id)
    for row in traces.rows:
        for span in row.call_spans:
            call = calls.rebuilt.get(span.model_call_id)
            if call is None:
                message = "the snapshot has no such call, or it cannot be rebuilt"
                yield _at(traces, row, "call_not_recorded", message, span.model_call_id, span.start)
            else:
                yield from _check_span(traces, row, span, call)
    yield from _check_choice(traces, snapshot)


def _check_choice(traces: RolloutTraces, snapshot: TokenCaptureSnapshot) -> Iterator[Violation]:
    """What is trained, left out and called main is what a build of the snapshot says."""
    if traces.builder not in BUILDERS:
        message = f"unknown builder {traces.builder!r}"
        yield Violation(code="builder_unknown", message=message, rollout_id=traces.rollout_id)
        return
    given = traces.metrics.get("terminal_attribution")
    attribution = given if isinstance(given, dict) else {}
    terminal = attribution.get("call_id")
    rebuilt = build_traces(
        snapshot,
        builder=traces.builder,
        fragments="exclude" if traces.metrics.get("fragments") == "exclude" else "include",
        explicit_terminal_call_id=terminal,
    )
    unmatched = terminal is None and bool(
        _DECLARED_UNMATCHED.search(str(attribution.get("reason") or ""))
    )
    if unmatched and not all(row.mask_sample for row in traces.rows):
        message = "the declared response matches no call, but not all rows are masked"
        yield Violation(code="declared_not_masked", message=message, rollout_id=traces.rollout_id)
    yield from _check_main(traces, None if unmatched else _main_call(rebuilt))
    trainable = _trained_calls(rebuilt)
    for row in traces.rows:
        for span in row.call_spans:
            if span.trained and not row.mask_sample and span.model_call_id not in trainable:
                message = "a build of the snapshot masks this call or leaves it out"
                yield _at(
                    traces, row, "call_not_trainable", message, span.model_call_id, span.start
                )

    standing = {span.model_call_id for row in traces.rows for span in row.call_spans}
    for call_id in sorted(trainable - standing):
        message = "a build of the snapshot trains this call, no row shows it"
        yield Violation(
            code="call_left_out", message=message, rollout_id=traces.rollout_id, call_id=call_id
        )


def _check_main(traces: RolloutTraces, expected: str | None) -> Iterator[Violation]:
    """The main row ends at the attributed call, or is the only chain's, or there is none."""
    found = _main_call(traces)
    if found != expected:
        message = f"the main row ends at call {found!r}, by the entries it is {expected!r}"
        yield Violation(code="main_row_mismatch", message=message, rollout_id=traces.rollout_id)


def _main_call(traces: RolloutTraces) -> str | None:
    """The last call of the main row; None without one."""
    if traces.main_row is None or not 0 <= traces.main_row < len(traces.rows):
        return None
    spans = traces.rows[traces.main_row].call_spans
    return spans[-1].model_call_id if spans else None


def _trained_calls(traces: RolloutTraces) -> set[str]:
    return {
        span.model_call_id
        for row in traces.rows
        if not row.mask_sample
        for span in row.call_spans
        if span.trained
    }


def _check_span(
    traces: RolloutTraces, row: TraceRow, span: CallSpan, call: Call
) -> Iterator[Violation]:
    def found(code: str, message: str, at: int | None = None) -> Violation:
        return _at(traces, row, code, message, span.model_call_id, at)

    if (span.start, span.end) != (call.prompt_len, call.cum_len):
        message = (
            f"the span is {span.start}..{span.end}, recorded is {call.prompt_len}..{call.cum_len}"
        )
        yield found("span_mismatch", message, span.start)
        return
    tokens = TokenIds.of(row.token_ids[: span.end])
    prompt = call.full_prompt()
    if (at := tokens.common_prefix_len(prompt)) < span.start:
        yield found("prompt_mismatch", "not the token of the recorded prompt", at)
    generated = tokens[span.start :]
    if (at := generated.common_prefix_len(call.generated)) < len(generated):
        yield found("token_mismatch", "not the sampled token", span.start + at)
    if span.trained:
        ours = row.log_probs[span.start : span.end].view(np.uint64)
        theirs = call.entry.generation_log_probs.array.view(np.uint64)
        differs = _first(ours != theirs)
        if differs is not None:
            yield found("log_prob_mismatch", "not the recorded log-prob", span.start + differs)
    for name, recorded in _labels(call).items():
        if getattr(span, name) != recorded:
            message = f"{name} is {getattr(span, name)!r}, recorded is {recorded!r}"
            yield found("label_mismatch", message)


def _labels(call: Call) -> dict[str, Any]:
    entry = call.entry
    return {
        "weight_version": entry.weight_version,
        "weight_version_end": entry.weight_version_end,
        "agent_id": entry.agent_id,
        "finish_reason": entry.finish_reason,
        "sampling": entry.sampling if isinstance(entry.sampling, dict) else None,
    }


def _at(
    traces: RolloutTraces,
    row: TraceRow,
    code: str,
    message: str,
    call_id: str = "",
    position: int | None = None,
) -> Violation:
    return Violation(
        code=code,
        message=message,
        rollout_id=traces.rollout_id,
        row_id=row.row_id,
        call_id=call_id,
        position=position,
    )


def _first(wrong: npt.NDArray[np.bool_]) -> int | None:
    at = int(wrong.argmax()) if wrong.size else 0
    return at if wrong.size and wrong[at] else None


def _call_at(row: TraceRow, at: int) -> str:
    return next((s.model_call_id for s in row.call_spans if s.start <= at < s.end), "")
