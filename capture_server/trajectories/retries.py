"""Steps 5 and 6 of a build: leaves that nobody kept, and calls that are each other's retry.

Which of several answers to one request the agent went on with is read off what continues them,
off the terminal and off delivery notes. Where nothing says it, one is kept for diagnosis and
named as undecided; whoever builds samples must not train on it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from capture_server.trajectories.calls import Call
from capture_server.trajectories.soundness import as_finite
from middleware.records import TokenIds

_CHOICE_SUFFIX = re.compile(r"\.([0-9]+)$")  # choices of one request: <call id>.<index>


@dataclass(slots=True)
class RetryFindings:
    """What step 6 could not decide. Ids are sorted."""

    unresolved: list[str] = field(default_factory=list)
    parallel_attempts: bool = False  # two roots that are siblings, both continued


def set_aside_leaves(calls: Collection[Call], terminal: Call | None) -> None:
    """Step 5: set aside, repeatedly, leaves known as undelivered or aborted.

    Also sets ``extended``; a call set aside still extends its parent.
    """
    left = {call: len(call.children) for call in calls}
    for call in calls:
        call.extended = any(not child.ambiguous for child in call.children)
    leaves = [call for call, children in left.items() if not children]
    while leaves:
        call = leaves.pop()
        if call is terminal or not (call.delivered is False or call.aborted):
            continue
        call.set_aside = "undelivered" if call.delivered is False else "aborted"
        parent = call.parent
        if parent is not None:
            left[parent] -= 1
            if not left[parent]:
                leaves.append(parent)


def judge_retries(
    calls: Iterable[Call], terminal_path: Collection[Call], *, terminal_spares: bool
) -> RetryFindings:
    """Step 6, from the root down: keep one of each group of siblings, or several that go on.

    ``terminal_spares``: the terminal is delivered, or broken only because its path begins at a
    fragment.
    """
    findings = RetryFindings()
    on_path = set(terminal_path)
    roots = [call for call in calls if call.parent is None]
    levels: list[list[Call]] = [roots]
    while levels:
        siblings = [call for call in levels.pop() if not call.ambiguous]
        for group in _groups(siblings):
            kept = _judge_group(group, on_path, findings)
            _judge_repeats(group, kept, on_path if terminal_spares else set(), findings)
            if kept and kept[0].parent is None and sum(call.extended for call in kept) > 1:
                findings.parallel_attempts = True
        levels += [call.children for call in siblings if call.children and not call.quarantined]
    findings.unresolved = sorted(set(findings.unresolved))
    return findings


def _judge_group(group: list[Call], on_path: set[Call], findings: RetryFindings) -> list[Call]:
    """Quarantine what was not kept; return what is left of the group."""
    rest = [call for call in group if not call.set_aside]
    if len(rest) < 2:
        return rest
    kept = [call for call in rest if call in on_path] or [call for call in rest if call.extended]
    if not kept:
        kept = [min(rest, key=lambda call: call.call_id)]
        findings.unresolved += [call.call_id for call in rest]
        for call in rest:
            call.undecided = True
    chosen = set(kept)
    for call in rest:
        call.quarantined = call not in chosen
    return kept


def _judge_repeats(
    group: list[Call], kept: list[Call], spared: set[Call], findings: RetryFindings
) -> None:
    """The agent asked again after an answer had ended, so it may not hold that answer."""
    begun = max(
        (call.entry.created_at for call in group if call.set_aside == "undelivered"), default=0.0
    )
    for call in kept:
        ended = _ended_at(call)
        if ended is None or begun <= ended or call.extended or call in spared:
            continue
        call.undecided = True
        findings.unresolved.append(call.call_id)


def _ended_at(call: Call) -> float | None:
    timings = call.entry.timings
    total_ms = as_finite(timings.get("total_ms")) if isinstance(timings, dict) else None
    if not call.entry.created_at or total_ms is None:
        return None
    return call.entry.created_at + total_ms / 1000.0


def _groups(siblings: list[Call]) -> list[list[Call]]:
    """Split calls of one parent into retry groups. Being a retry of one another is transitive."""
    if len(siblings) < 2:
        return [siblings] if siblings else []
    first_with: dict[tuple[object, ...], int] = {}
    leader = list(range(len(siblings)))

    def find(at: int) -> int:
        while leader[at] != at:
            leader[at] = leader[leader[at]]
            at = leader[at]
        return at

    by_length: dict[int, int] = {}
    for call in siblings:
        by_length[call.prompt_len] = by_length.get(call.prompt_len, 0) + 1
    for at, call in enumerate(siblings):
        keys: list[tuple[object, ...]] = []
        if by_length[call.prompt_len] > 1:
            keys.append(("prompt", call.prompt_len, _content(call.interstitial)))
        if call.entry.request_digest:
            keys.append(("body", call.entry.request_digest, _choice_suffix(call.call_id)))
        for key in keys:
            leader[find(at)] = find(first_with.setdefault(key, at))
    groups: dict[int, list[Call]] = {}
    for at, call in enumerate(siblings):
        groups.setdefault(find(at), []).append(call)
    return list(groups.values())


def _choice_suffix(call_id: str) -> str:
    match = _CHOICE_SUFFIX.search(call_id)
    return match[1] if match else ""


def _content(ids: TokenIds) -> bytes:
    """Equal exactly for equal ids, whatever the width of the arrays that hold them."""
    return hashlib.sha256(np.ascontiguousarray(ids.array, dtype="<u8").data).digest()
