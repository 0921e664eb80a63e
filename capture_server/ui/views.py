"""What the pages show of a rollout, computed from its records. Blocking; run in a thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from capture_server.call_tree import CallNode, CallTree, call_tree
from capture_server.trajectories.calls import Call
from capture_server.trajectories.graph import build_graph
from capture_server.trajectories.rows import RolloutTraces, TraceRow
from capture_server.trajectories.traces import build_traces
from capture_server.ui.tokens import DriftView, TokenWindow, drift_view, token_window
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import TokenEntry

_SHOWN_JSON: int = 100_000  # characters of an answer's items


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """One call: its place in the tree, its record's facts and its tokens."""

    node: CallNode
    facts: dict[str, Any]
    window: TokenWindow | None  # None: its prompt cannot be rebuilt
    new_from: int  # where the prompt goes beyond its proven parent
    generated_from: int
    drift: DriftView | None
    output: str
    output_is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """One training row as it will be trained."""

    row: TraceRow
    index: int
    traces: RolloutTraces
    window: TokenWindow


def tree_of(snapshot: TokenCaptureSnapshot) -> CallTree:
    """The call tree."""
    return call_tree(snapshot)


def call_view(snapshot: TokenCaptureSnapshot, call_id: str, start: int | None) -> CallView | None:
    """One call; None if it is not recorded. ``start`` None: at what the call added."""
    entry = next((e for e in snapshot.entries if e.model_call_id == call_id), None)
    node = next((n for n in call_tree(snapshot).calls if n.model_call_id == call_id), None)
    if entry is None or node is None:
        return None
    graph = build_graph(snapshot.entries)
    call = graph.calls.get(call_id) or graph.empty.get(call_id)
    output = orjson.dumps(entry.output_items, option=orjson.OPT_INDENT_2).decode()
    new_from = call.parent.cum_len if call is not None and call.parent is not None else 0
    return CallView(
        node=node,
        facts=_facts(entry),
        window=None if call is None else _call_window(call, new_from if start is None else start),
        new_from=new_from,
        generated_from=call.prompt_len if call is not None else 0,
        drift=_drift(graph.calls | graph.empty, node, call),
        output=output[:_SHOWN_JSON],
        output_is_cut=len(output) > _SHOWN_JSON,
    )


def row_view(snapshot: TokenCaptureSnapshot, index: int | None, start: int) -> RowView | None:
    """One row; ``index`` None: the main row, or the first. None: there is no such row."""
    traces = build_traces(snapshot)
    if index is None:
        index = traces.main_row or 0
    if not 0 <= index < len(traces.rows):
        return None
    row = traces.rows[index]
    generated = [(span.start, span.end, span.model_call_id) for span in row.call_spans]
    window = token_window(row.token_ids, row.loss_mask, row.log_probs, generated, start)
    return RowView(row=row, index=index, traces=traces, window=window)


def _call_window(call: Call, start: int) -> TokenWindow:
    tokens = np.concatenate([call.full_prompt().array, call.generated.array])
    mask = np.zeros(len(tokens), dtype=np.uint8)
    log_probs = np.zeros(len(tokens))
    # Sampled by this call: shown with its log-probs, whatever a row makes of it.
    mask[call.prompt_len :] = 1
    log_probs[call.prompt_len :] = np.asarray(call.entry.generation_log_probs)
    generated = [(call.prompt_len, len(tokens), call.call_id)]
    return token_window(tokens, mask, log_probs, generated, start)


def _drift(calls: dict[str, Call], node: CallNode, call: Call | None) -> DriftView | None:
    parent = calls.get(node.parent_call_id or "")
    if node.drift_at is None or call is None or parent is None:
        return None
    before = np.concatenate([parent.full_prompt().array, parent.generated.array])
    return drift_view(before, call.full_prompt().array, node.drift_at)


def _facts(entry: TokenEntry) -> dict[str, Any]:
    """The record's members that are no arrays and no text, in a fixed order."""
    timings = entry.timings if isinstance(entry.timings, dict) else {}
    facts: dict[str, Any] = {
        "model": entry.model,
        "engine": entry.engine,
        "dialect": entry.dialect,
        "agent": entry.agent_id,
        "response id": entry.response_id,
        "finish reason": entry.finish_reason,
        "delivered": entry.delivered,
        "prefix requested": entry.prefix_requested or None,
        "prefix supplied": entry.prefix_supplied or None,
        "prefix not supplied because": entry.prefix_reason,
        "weight version": entry.weight_version,
        "weight version at its end": entry.weight_version_end,
        "guided by a grammar": entry.guided or None,
        "sampling": entry.sampling or None,
        "usage": entry.usage or None,
        **{name.replace("_ms", " (ms)"): value for name, value in sorted(timings.items())},
        "digest": entry.digest,
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}
