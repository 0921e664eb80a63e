"""The call tree of a rollout: what each call continues, why, and what became of it.

Built from a snapshot by the builder's own judgement (``trajectories.graph``), so the tree says
what training would use. A call hangs under the parent that its record names; where that link is
not proven by tokens it is drawn as broken, with the reason and, for drift, the position.
Counts, ids, reasons and times only; never tokens or text. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from capture_server.trajectories.calls import Call, linked_id
from capture_server.trajectories.graph import LineageGraph, build_graph
from capture_server.trajectories.soundness import INVALID_RECORD, as_finite
from capture_server.trajectories.traces import build_traces
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import ParentResolutionStatus, TokenEntry

if TYPE_CHECKING:
    from rich.tree import Tree


@dataclass(slots=True, kw_only=True)
class CallNode:
    """One call. Token counts of a prompt that cannot be rebuilt are those of its stored part.

    ``standing``: ``trained``, ``masked`` (its row must not be trained on), ``left_out`` (in no
    row), or why the build set it aside: ``quarantined``, ``undecided``, ``undelivered``,
    ``aborted``, ``empty``, ``invalid_record``, ``duplicate_call_id_conflict``,
    ``delta_chain_unreconstructable``.
    ``extends`` is None without a named parent. ``drift_at``: how many tokens of the parent's
    sequence this prompt kept, of ``parent_tokens``.
    """

    model_call_id: str
    parent_call_id: str | None
    depth: int = 0
    resolution: str
    reason: str
    extends: bool | None
    drift_at: int | None = None
    parent_tokens: int | None = None
    standing: str
    mask_reasons: list[str] = field(default_factory=list)
    prompt_tokens: int
    new_prompt_tokens: int  # after the proven parent's sequence
    generated_tokens: int
    finish_reason: str | None
    delivered: bool | None
    dialect: str | None
    agent_id: str | None
    weight_version: int | str | None
    created_at: float
    ttft_ms: float | None
    total_ms: float | None
    is_terminal: bool = False


@dataclass(slots=True, kw_only=True)
class CallTree:
    """A rollout's calls in the order of drawing: each parent before its children.

    ``survived``: share of the sampled tokens that some unmasked row trains, of all captured.
    """

    rollout_id: str
    incomplete: bool
    incomplete_reasons: list[dict[str, Any]]
    mask_sample: bool
    generated_tokens: int
    trained_tokens: int
    survived: float
    drifted_calls: list[str]
    metrics: dict[str, Any]
    calls: list[CallNode]

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return dataclasses.asdict(self)


def call_tree(snapshot: TokenCaptureSnapshot, *, terminal_call_id: str | None = None) -> CallTree:
    """The tree of a rollout's recorded calls.

    ``terminal_call_id`` names the call that was scored, where that is known.
    """
    traces = build_traces(snapshot, explicit_terminal_call_id=terminal_call_id)
    graph = build_graph(snapshot.entries, terminal_call_id)
    rows = {
        span.model_call_id: row for row in traces.rows for span in row.call_spans if span.trained
    }
    entries: dict[str, TokenEntry] = {}
    for entry in snapshot.entries:
        entries.setdefault(entry.model_call_id, entry)
    nodes = {}
    for call_id, entry in entries.items():
        node = _node(graph, entry, entries)
        row = rows.get(call_id)
        if node.standing == "left_out" and row is not None:
            node.standing = "masked" if row.mask_sample else "trained"
            node.mask_reasons = list(row.mask_reasons)
        node.is_terminal = call_id == terminal_call_id
        nodes[call_id] = node
    generated = sum(node.generated_tokens for node in nodes.values())
    trained = traces.metrics["trained_tokens"]
    return CallTree(
        rollout_id=snapshot.rollout_id,
        incomplete=snapshot.incomplete,
        incomplete_reasons=[dataclasses.asdict(r) for r in snapshot.incomplete_reasons],
        mask_sample=traces.mask_sample,
        generated_tokens=generated,
        trained_tokens=trained,
        survived=round(trained / generated, 4) if generated else 0.0,
        drifted_calls=sorted(graph.drift),
        metrics=traces.metrics,
        calls=list(_in_order(nodes)),
    )


def _node(graph: LineageGraph, entry: TokenEntry, entries: dict[str, TokenEntry]) -> CallNode:
    call_id = entry.model_call_id
    if graph.lost.get(call_id) == INVALID_RECORD:
        return _unbelievable(call_id)
    parent_id = linked_id(entry)
    call = graph.calls.get(call_id) or graph.empty.get(call_id)
    timings = entry.timings if isinstance(entry.timings, dict) else {}
    drift_at = graph.drift.get(call_id)
    prompt_tokens = call.prompt_len if call is not None else len(entry.prompt_token_ids)
    parent = call.parent if call is not None else None
    return CallNode(
        model_call_id=call_id,
        parent_call_id=parent_id,
        resolution=entry.parent_resolution.value if entry.parent_resolution else "undecided",
        reason=_reason(graph, entry, call),
        extends=None if parent_id is None else parent is not None,
        drift_at=drift_at,
        parent_tokens=_parent_tokens(graph, parent_id) if drift_at is not None else None,
        standing=_standing(graph, call_id, call),
        prompt_tokens=prompt_tokens,
        new_prompt_tokens=prompt_tokens - (parent.cum_len if parent is not None else 0),
        generated_tokens=len(entry.generation_token_ids),
        finish_reason=entry.finish_reason,
        delivered=entry.delivered,
        dialect=entry.dialect,
        agent_id=entry.agent_id,
        weight_version=entry.weight_version,
        created_at=entry.created_at,
        ttft_ms=as_finite(timings.get("ttft_ms")),
        total_ms=as_finite(timings.get("total_ms")),
    )


def _unbelievable(call_id: str) -> CallNode:
    """A record of which nothing but the id can be believed."""
    return CallNode(
        model_call_id=call_id,
        parent_call_id=None,
        resolution="undecided",
        reason="",
        extends=None,
        standing=INVALID_RECORD,
        prompt_tokens=0,
        new_prompt_tokens=0,
        generated_tokens=0,
        finish_reason=None,
        delivered=None,
        dialect=None,
        agent_id=None,
        weight_version=None,
        created_at=0.0,
        ttft_ms=None,
        total_ms=None,
    )


def _parent_tokens(graph: LineageGraph, parent_id: str | None) -> int | None:
    parent = graph.calls.get(parent_id or "") or graph.empty.get(parent_id or "")
    return parent.cum_len if parent is not None else None


def _reason(graph: LineageGraph, entry: TokenEntry, call: Call | None) -> str:
    """Why it stands where it stands: the resolver's word, then the build's."""
    reasons = [entry.parent_resolution_reason]
    if call is not None:
        reasons.append(call.failure)
        reasons.append("parent_call_id_missing_recovered" if call.recovered else "")
        reasons.append("given_history" if call.given_history else "")
    return ", ".join(dict.fromkeys(reason for reason in reasons if reason))


def _standing(graph: LineageGraph, call_id: str, call: Call | None) -> str:
    if call_id in graph.lost:
        return graph.lost[call_id]
    if call_id in graph.empty or call is None:
        return "empty"
    if call.set_aside:
        return call.set_aside
    if call.quarantined:
        return "quarantined"
    return "undecided" if call.undecided else "left_out"


def _in_order(nodes: dict[str, CallNode]) -> Iterator[CallNode]:
    """Parents before children, earlier calls first; a cycle of links is cut where it is met.

    ``depth`` grows with branchings, not with turns: the calls of one line of conversation stand
    below its first, all at one depth.
    """
    children: dict[str, list[CallNode]] = {}
    tops: list[CallNode] = []
    for node in sorted(nodes.values(), key=lambda node: (node.created_at, node.model_call_id)):
        parent = node.parent_call_id
        if parent is None or parent not in nodes or parent == node.model_call_id:
            tops.append(node)
        else:
            children.setdefault(parent, []).append(node)
    drawn: set[str] = set()
    # What hangs in a cycle is reached from no top: its calls are taken as tops, in turn.
    for top in [*tops, *nodes.values()]:
        open_nodes = [(top, 0, True)]
        while open_nodes:
            node, depth, opens = open_nodes.pop()
            if node.model_call_id in drawn:
                continue
            drawn.add(node.model_call_id)
            node.depth = depth
            yield node
            later = children.get(node.model_call_id, [])
            branches = len(later) > 1
            deeper = depth + 1 if branches or opens else depth
            open_nodes += [(child, deeper, branches) for child in reversed(later)]


# --- for humans --------------------------------------------------------------------------------


def drawn(tree: CallTree) -> Tree:
    """The tree as rich draws it."""
    from rich.text import Text
    from rich.tree import Tree as RichTree

    root = RichTree(Text("\n".join(_title(tree))))
    open_at: list[Tree] = [root]
    for node in tree.calls:
        del open_at[node.depth + 1 :]
        open_at.append(open_at[-1].add(Text("  ".join(_words(node)), style=_style(node))))
    return root


def _title(tree: CallTree) -> Iterator[str]:
    yield (
        f"rollout {tree.rollout_id}: {len(tree.calls)} calls, {tree.trained_tokens} of "
        f"{tree.generated_tokens} sampled tokens can be trained ({tree.survived:.1%})"
    )
    if tree.incomplete:
        codes = sorted({reason["code"] for reason in tree.incomplete_reasons})
        yield f"incomplete: {', '.join(codes) or 'marked'}"
    if tree.mask_sample:
        yield "masked: do not train on this rollout"


def _words(node: CallNode) -> Iterator[str]:
    yield f"{node.model_call_id}{' (scored)' if node.is_terminal else ''}"
    yield f"[{node.resolution}{f': {node.reason}' if node.reason else ''}]"
    if node.drift_at is not None:
        yield f"drift at {node.drift_at} of {node.parent_tokens or '?'} tokens"
    yield f"{node.new_prompt_tokens} new + {node.generated_tokens} sampled"
    if node.finish_reason:
        yield node.finish_reason
    if node.total_ms is not None:
        yield f"{node.total_ms:.0f} ms"
    if node.agent_id:
        yield f"agent {node.agent_id}"
    why = f" ({', '.join(node.mask_reasons)})" if node.mask_reasons else ""
    yield f"{node.standing}{why}"


def _style(node: CallNode) -> str:
    if node.standing == "trained":
        return "" if node.drift_at is None else "yellow"
    return "red" if node.resolution == ParentResolutionStatus.RESOLVED.value else "dim"
