"""Training rows of one rollout: the compact form that trainers should use.

Invariant: every sampled token of a call that is fit for training has mask 1 in at most one row,
with its own captured log-prob, behind exactly the tokens that the engine saw before it; all else
has mask 0 and log-prob 0.0. A doubt masks rows and is named in ``mask_reasons``. Which calls may
stand in a row is decided by the graph; source of the rules: spec 04, "Traces".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from capture_server.trajectories.builder import BuildOutput, merged_chains, single_chains
from capture_server.trajectories.calls import Call
from capture_server.trajectories.chains import chain_ids
from capture_server.trajectories.digests import DIGEST_MISMATCH, contradicting
from capture_server.trajectories.graph import LineageGraph, build_graph
from capture_server.trajectories.rows import CallSpan, RolloutTraces, RowDraft, TraceRow, make_row
from capture_server.trajectories.soundness import require_entries
from capture_server.trajectories.summary import build_metrics
from capture_server.trajectories.terminal import TerminalAttribution, resolve_terminal
from middleware.errors import InvalidInputError
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import TokenEntry

__all__ = ["CallSpan", "RolloutTraces", "TraceRow", "build_traces"]

Fragments = Literal["include", "exclude"]

INCOMPLETE: Final = "capture_incomplete"
TERMINAL_LOST: Final = "terminal_not_delivered"
DECLARED_UNMATCHED: Final = "declared_terminal_not_matched"
PARALLEL_ATTEMPTS: Final = "parallel_attempts"
UNDECIDED: Final = "undecided"
NO_MAIN_CHAIN: Final = "no_main_chain"
FOREIGN_ROLLOUT: Final = "foreign_rollout_id"


def build_traces(
    source: TokenCaptureSnapshot | Sequence[TokenEntry],
    *,
    builder: str = "prefix_merging",
    fragments: Fragments = "include",
    verified_response: Mapping[str, Any] | None = None,
    explicit_terminal_call_id: str | None = None,
    declared_response_id: str | None = None,
) -> RolloutTraces:
    """All training rows of a frozen rollout, given as its snapshot or as bare entries.

    ``verified_response``, ``explicit_terminal_call_id`` and ``declared_response_id`` say which
    response was scored (see ``resolve_terminal``). ``fragments="exclude"`` leaves out rows that
    start at an unproven place, except the scored one.

    Raises:
        InvalidInputError: unknown ``builder`` or ``fragments``; an element is no entry.
    """
    _check_choice("builder", builder, ("prefix_merging", "per_request"))
    _check_choice("fragments", fragments, ("include", "exclude"))
    snapshot = source if isinstance(source, TokenCaptureSnapshot) else None
    entries = snapshot.entries if snapshot is not None else source
    assert not isinstance(entries, TokenCaptureSnapshot)
    incomplete = snapshot.incomplete if snapshot is not None else False
    require_entries(entries)
    attribution = resolve_terminal(
        entries,
        verified_response,
        explicit_terminal_call_id,
        declared_response_id=declared_response_id,
    )
    graph = build_graph(entries, attribution.model_call_id)
    rollout_id = snapshot.rollout_id if snapshot is not None else _smallest_rollout_id(entries)
    is_foreign = any(entry.rollout_id != rollout_id for entry in entries)
    out = merged_chains(graph) if builder == "prefix_merging" else single_chains(graph)
    unmatched = declared_response_id is not None and not attribution.attributed
    doubts = _rollout_doubts(graph, incomplete, unmatched)
    drafts = _draft_rows(graph, [FOREIGN_ROLLOUT, *doubts] if is_foreign else doubts)
    main = _main_draft(graph, drafts, attribution, declared=declared_response_id is not None)
    if fragments == "exclude":
        drafts = [d for d in drafts if not d.calls[0].is_fragment or d.is_scored]
    _assign_calls(drafts)
    if builder == "per_request":
        drafts, main = _one_row_per_call(drafts, main, out)
    kept = [draft for draft in drafts if draft.trained]
    rows = [make_row(draft) for draft in kept]
    main_row = next((at for at, draft in enumerate(kept) if draft is main), None)
    return RolloutTraces(
        rollout_id=rollout_id,
        builder=builder,
        mask_sample=incomplete or all(row.mask_sample for row in rows),
        rows=rows,
        main_row=main_row,
        metrics=_metrics(graph, out, attribution, incomplete, rows, main_row)
        | {"fragments": fragments},
        snapshot_id=snapshot.snapshot_id if snapshot is not None else None,
        version=snapshot.version if snapshot is not None else None,
    )


def _check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidInputError(f"unknown {what} {value!r}; use one of {', '.join(choices)}")


def _smallest_rollout_id(entries: Sequence[TokenEntry]) -> str:
    return min((str(entry.rollout_id) for entry in entries), default="")


# --- which calls stand in which row -----------------------------------------------------------


def _rollout_doubts(graph: LineageGraph, incomplete: bool, unmatched: bool) -> list[str]:
    """Why no row of this rollout may be trained on."""
    doubts = [INCOMPLETE] if incomplete else []
    if graph.delivered_terminal(fragments_deliver=True) is not None:
        return doubts
    if unmatched:
        doubts.append(DECLARED_UNMATCHED)
    if graph.terminal_chain:
        doubts.append(TERMINAL_LOST)
    if graph.parallel_attempts:
        doubts.append(PARALLEL_ATTEMPTS)
    return doubts


def _draft_rows(graph: LineageGraph, doubts: list[str]) -> list[RowDraft]:
    """One draft per chain; one without any call stays in the list until calls are assigned."""
    terminal = graph.delivered_terminal(fragments_deliver=True)
    paths = graph.paths(fragments_deliver=True)
    names = chain_ids(paths, first_is_main=terminal is not None)
    drafts = []
    for name, path in zip(names, paths, strict=True):
        stop = next((at for at, call in enumerate(path) if call.undecided), len(path))
        draft = RowDraft(name, path, path[:stop], cut=stop < len(path), doubts=list(doubts))
        draft.is_main = name == "main"
        draft.is_scored = terminal is not None and path[-1] is terminal
        if draft.cut and terminal is None:
            draft.doubts.append(UNDECIDED)
        drafts.append(draft)
    _doubt_digests(drafts)
    return drafts


def _doubt_digests(drafts: list[RowDraft]) -> None:
    """A record that contradicts its own digest or length is no ground for training."""
    wrong = contradicting({call for draft in drafts for call in draft.contained})
    for draft in drafts:
        if not wrong.isdisjoint(draft.contained):
            draft.doubts.append(DIGEST_MISMATCH)


def _main_draft(
    graph: LineageGraph,
    drafts: list[RowDraft],
    attribution: TerminalAttribution,
    *,
    declared: bool,
) -> RowDraft | None:
    """The row of the scored response, or of the only chain where nobody says what was scored."""
    scored = next((draft for draft in drafts if draft.is_scored), None)
    if scored is not None or attribution.attributed or declared or graph.terminal_chain:
        return scored
    return drafts[0] if len(drafts) == 1 else None


def _assign_calls(drafts: list[RowDraft]) -> None:
    """Train each call in exactly one row: main, else the first unmasked, else the first."""
    owner: dict[Call, RowDraft] = {}
    by_preference = sorted(drafts, key=lambda d: (bool(d.doubts), not (d.is_main and not d.doubts)))
    for draft in by_preference:
        for call in draft.contained:
            owner.setdefault(call, draft)
    for call, draft in owner.items():
        draft.trained.add(call)


def _one_row_per_call(
    drafts: list[RowDraft], main: RowDraft | None, out: BuildOutput
) -> tuple[list[RowDraft], RowDraft | None]:
    """``per_request``: split the merged rows, so that the same calls are left out or masked."""
    owners = {call.call_id: (draft, call) for draft in drafts for call in draft.trained}
    split: list[RowDraft] = []
    scored: RowDraft | None = None
    for chain in out.chains:
        if (found := owners.get(chain.call_ids[0])) is None:
            continue
        owner, call = found
        single = RowDraft(chain.chain_id, [call], [call], doubts=owner.doubts, first=owner.calls[0])
        single.trained.add(call)
        split.append(single)
        if owner.is_scored and call is owner.calls[-1]:
            scored = single
    if main is not None and not main.is_scored:
        scored = split[0] if len(out.chains) == len(split) == 1 else None
    return split, scored


# --- metrics ----------------------------------------------------------------------------------


def _metrics(
    graph: LineageGraph,
    out: BuildOutput,
    attribution: TerminalAttribution,
    incomplete: bool,
    rows: list[TraceRow],
    main_row: int | None,
) -> dict[str, Any]:
    notes = out.notes
    metrics = build_metrics(out, attribution, n_calls=graph.n_calls, incomplete=incomplete)
    metrics |= {
        "rows": len(rows),
        "masked_rows": sum(row.mask_sample for row in rows),
        "fragment_rows": sum(row.starts["kind"] == "fragment" for row in rows),
        "trained_tokens": sum(int(row.loss_mask.sum()) for row in rows if not row.mask_sample),
        "undelivered_calls": notes.undelivered_calls,
        "aborted_calls": notes.aborted_calls,
        "given_history": notes.given_history,
        "undecided_calls": sorted(c.call_id for c in graph.calls.values() if c.undecided),
        "drift": [
            {
                "model_call_id": call_id,
                "drift_at": at,
                "parent_call_id": graph.calls[call_id].entry.parent_call_id,
            }
            for call_id, at in notes.drift.items()
        ],
        PARALLEL_ATTEMPTS: graph.parallel_attempts,
        NO_MAIN_CHAIN: main_row is None,
    }
    return metrics
