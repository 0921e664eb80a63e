"""Which call of a ledger ends the trained chain, and the receipt that says so.

``select_terminal_call`` judges by parent links alone. ``make_receipt`` asks better witnesses
first: the response id that the harness declares, then the scored response's id and content; the
links decide only where those saw nothing. Invariant: a doubt (witnesses that disagree, several
candidates, a row that hangs in the air) names no call; the rollout is poisoned with the reason.
Everything is linear in the number of rows. Source: spec 07 "Terminal".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from capture_server.staging.records import (
    TERMINAL_AMBIGUOUS,
    TERMINAL_DUPLICATE_CALL_ID,
    TERMINAL_NO_RECORDS,
    TERMINAL_NO_ROOT,
    TERMINAL_ORPHANED_ROW,
    TERMINAL_SELECTED,
    CallRecord,
    RolloutManifest,
    RolloutReceipt,
)
from capture_server.trajectories.terminal import TerminalAttribution, resolve_terminal

__all__ = [
    "AMBIGUOUS_TERMINAL",
    "DUPLICATE_CALL_ID",
    "NO_RECORDS",
    "NO_ROOT",
    "ORPHANED_ROW",
    "SELECTED",
    "TERMINAL_AMBIGUOUS",
    "TERMINAL_DUPLICATE_CALL_ID",
    "TERMINAL_NO_RECORDS",
    "TERMINAL_NO_ROOT",
    "TERMINAL_ORPHANED_ROW",
    "TERMINAL_SELECTED",
    "TerminalSelection",
    "make_receipt",
    "select_terminal_call",
]

SELECTED: Final = TERMINAL_SELECTED
NO_RECORDS: Final = TERMINAL_NO_RECORDS
DUPLICATE_CALL_ID: Final = TERMINAL_DUPLICATE_CALL_ID
ORPHANED_ROW: Final = TERMINAL_ORPHANED_ROW
NO_ROOT: Final = TERMINAL_NO_ROOT
AMBIGUOUS_TERMINAL: Final = TERMINAL_AMBIGUOUS

# Reasons of an attribution that say "nothing seen", as opposed to "seen, but contradictory".
_NOTHING_SEEN: Final = frozenset(
    {
        "no_response_object",
        "response_has_no_id",
        "response_id_no_match",
        "response_has_no_output",
        "no_model_authored_output",
        "no_content_match",
        "response_output_unfingerprintable",
    }
)


@dataclass(frozen=True, slots=True)
class TerminalSelection:
    """``terminal_model_call_id`` is set exactly when ``reason`` is ``selected``."""

    terminal_model_call_id: str | None
    reason: str


def select_terminal_call(records: Sequence[CallRecord]) -> TerminalSelection:
    """The end of the chain that the rollout followed, by parent links.

    Starts at the earliest admitted root (one that was continued beats an abandoned one) and
    follows the children; of several, the one that was continued itself. Refuses where the links
    do not single one out, or do not form a forest.
    """
    if not records:
        return TerminalSelection(None, NO_RECORDS)
    known = {row.model_call_id for row in records}
    if len(known) != len(records):
        return TerminalSelection(None, DUPLICATE_CALL_ID)
    children: dict[str | None, list[CallRecord]] = defaultdict(list)
    for row in records:
        if row.parent_call_id is not None and row.parent_call_id not in known:
            return TerminalSelection(None, ORPHANED_ROW)
        children[row.parent_call_id].append(row)
    roots = children.pop(None, [])
    if not roots:
        return TerminalSelection(None, NO_ROOT)
    if _num_reachable(roots, children) != len(records):
        return TerminalSelection(None, ORPHANED_ROW)  # a cycle beside the roots
    extended = [row for row in roots if row.model_call_id in children]
    end = min(extended or roots, key=_admission_order)  # min keeps manifest order in ties
    while end.model_call_id in children:
        following = children[end.model_call_id]
        if len(following) > 1:
            following = [row for row in following if row.model_call_id in children]
        if len(following) != 1:
            return TerminalSelection(None, AMBIGUOUS_TERMINAL)
        end = following[0]
    return TerminalSelection(end.model_call_id, SELECTED)


def _num_reachable(
    roots: Sequence[CallRecord], children: Mapping[str | None, Sequence[CallRecord]]
) -> int:
    waiting, count = list(roots), 0
    while waiting:
        row = waiting.pop()
        count += 1
        waiting += children.get(row.model_call_id, ())
    return count


def _admission_order(row: CallRecord) -> tuple[bool, float]:
    return row.admitted_at is None, row.admitted_at or 0.0


def make_receipt(
    manifest: RolloutManifest,
    *,
    reward: float | None = None,
    response: Mapping[str, Any] | None = None,
    declared_response_id: str | None = None,
) -> RolloutReceipt:
    """The verdict over a finished rollout.

    Args:
        manifest: the rollout's ledger; any failure in it poisons the receipt.
        reward: handed on.
        response: the response that the verifier scored.
        declared_response_id: the response id that the harness says it kept; unknown: poisoned.
    """
    if manifest.failures:
        return _poisoned(manifest, reward, manifest.failures[0].reason)
    attribution = resolve_terminal(
        manifest.records, response, declared_response_id=declared_response_id
    )
    if attribution.attributed:
        return _receipt(
            manifest, reward, attribution.model_call_id, attribution.method, attribution.reason
        )
    if not _saw_nothing(attribution):
        return _poisoned(manifest, reward, attribution.reason, attribution.reason)
    selection = select_terminal_call(manifest.records)
    if selection.reason != SELECTED:
        return _poisoned(manifest, reward, selection.reason, attribution.reason)
    return _receipt(
        manifest, reward, selection.terminal_model_call_id, "heuristic", attribution.reason
    )


def _saw_nothing(attribution: TerminalAttribution) -> bool:
    return set(attribution.reason.split(",")) <= _NOTHING_SEEN


def _receipt(
    manifest: RolloutManifest, reward: float | None, call_id: str | None, method: str, reason: str
) -> RolloutReceipt:
    selection = cast("Literal['declared', 'response_id', 'content', 'heuristic']", method)
    return RolloutReceipt(
        rollout_id=manifest.rollout_id,
        reward=reward,
        terminal_model_call_id=call_id,
        manifest=manifest.records,
        terminal_selection=selection,
        terminal_attribution_reason=reason or None,
    )


def _poisoned(
    manifest: RolloutManifest, reward: float | None, reason: str, attribution: str = ""
) -> RolloutReceipt:
    rows = {row.model_call_id: row for row in manifest.records}  # a receipt names each call once
    return RolloutReceipt(
        rollout_id=manifest.rollout_id,
        reward=reward,
        manifest=list(rows.values()),
        capture_poisoned=True,
        failure_reason=reason,
        terminal_attribution_reason=attribution or None,
    )
