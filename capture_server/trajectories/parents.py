"""Step 4 of a build: which call does each call continue? Proven by tokens and digests, or not.

A link that cannot be proven is never crossed: the call starts a fragment and the reason is kept.
Parents are shorter than their children, so the result is a forest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from capture_server.trajectories.calls import Call, linked_id
from capture_server.trajectories.digests import check_digests, length_fits
from capture_server.trajectories.prefix_index import PrefixIndex, prompt_only, whole_sequence
from middleware.records import ParentResolutionStatus

PARENT_UNRESOLVED: Final = "parent_unresolved"
PARENT_MISMATCH: Final = "parent_digest_mismatch"
PARENT_MISSING: Final = "parent_call_id_missing"
PARENT_RECOVERED: Final = "parent_call_id_missing_recovered"
MISSING_RESOLUTION: Final = "missing_resolution"
UNRECOGNISED_TEXT: Final = "prompt_holds_unrecognised_text"


def link_parents(
    calls: Mapping[str, Call], empty: Mapping[str, Call], *, decided: bool
) -> dict[str, int]:
    """Set ``parent`` or ``failure`` of every call that generated something.

    ``empty`` holds the calls set aside because they generated nothing; ``decided`` says whether
    any record of the snapshot carries a parent decision.

    Returns:
        For calls whose prompt leaves their named parent's sequence: the index where it does.
    """
    drift: dict[str, int] = {}
    inferring: list[Call] = []
    for call in calls.values():
        entry = call.entry
        if entry.parent_resolution is ParentResolutionStatus.ROOT:
            continue
        if entry.parent_resolution is ParentResolutionStatus.UNRESOLVED:
            if entry.parent_resolution_reason == "no_match" and entry.first_call is True:
                call.given_history = True
            else:
                call.failure = PARENT_UNRESOLVED
        elif linked_id(entry) is not None:
            _follow(call, calls, empty, drift)
        elif decided:
            call.failure = MISSING_RESOLUTION
        else:
            inferring.append(call)
    if inferring:
        _infer(inferring, calls.values())
    _check_parents(calls.values())
    _check_completions(calls.values(), [*calls.values(), *empty.values()])
    for call in calls.values():
        if call.parent is not None:
            call.parent.children.append(call)
    return drift


def _follow(
    call: Call, calls: Mapping[str, Call], empty: Mapping[str, Call], drift: dict[str, int]
) -> None:
    """Try the parent that the record names, or what that one continues if it said nothing."""
    named = linked_id(call.entry) or ""
    seen: set[str] = set()
    while named in empty and named not in seen:
        seen.add(named)
        named = linked_id(empty[named].entry) or ""
    parent = calls.get(named)
    if parent is None:
        call.failure = PARENT_MISSING
        return
    if _extends(call, parent):
        if not length_fits(parent):
            call.failure = PARENT_MISMATCH
            return
        call.parent = parent
        call.recovered = bool(seen)
        return
    call.failure = PARENT_MISMATCH
    at = call.entry.drift_at
    drift[call.call_id] = at if isinstance(at, int) else first_difference(call, parent)


def _extends(call: Call, parent: Call) -> bool:
    base = call.base
    while base is not None and base is not parent and not base.generated:
        base = base.base
    return base is parent or parent.is_prefix_of(call.full_prompt())


def first_difference(call: Call, parent: Call) -> int:
    """How many leading tokens of the call's prompt are those of the parent's full sequence."""
    prompt = call.full_prompt()
    common = prompt.common_prefix_len(parent.full_prompt())
    if common == parent.prompt_len:
        common += prompt[common:].common_prefix_len(parent.generated)
    return common


def _infer(inferring: list[Call], all_calls: Collection[Call]) -> None:
    """Snapshots of writers that decided nothing: the longest sequence that is a prefix."""
    index = PrefixIndex(list(all_calls), whole_sequence)
    for call in inferring:
        found = index.longest(call.full_prompt())
        if found:
            call.parent = min(found, key=lambda candidate: candidate.call_id)
            call.ambiguous = call.quarantined = len(found) > 1


def _check_parents(calls: Collection[Call]) -> None:
    linked = [call for call in calls if call.parent is not None]
    check_digests({call.parent for call in linked if call.parent}, lambda c: c.base or c.parent)
    refused = [call for call in linked if call.parent and call.parent.digest_fits is False]
    for call in refused:
        _refuse(call, PARENT_MISMATCH)


def _check_completions(calls: Collection[Call], others: list[Call]) -> None:
    """Text prompts may hold policy text that nobody recognised. Source: spec 02.6."""
    texts = [call for call in calls if call.entry.dialect == "completions" and not call.failure]
    if not texts:
        return
    index = PrefixIndex(others, prompt_only)
    refused = [call for call in texts if _holds_unrecognised_text(call, index)]
    for call in refused:
        _refuse(call, UNRECOGNISED_TEXT)


def _holds_unrecognised_text(call: Call, index: PrefixIndex) -> bool:
    prompt = call.full_prompt()
    shortest = call.parent.cum_len if call.parent is not None else 0
    return any(
        _dispatched_earlier(other, call)
        # Where the other's generation goes on, its text was recognised as its own tokens.
        and prompt[other.prompt_len : other.cum_len] != other.generated
        and prompt[: other.prompt_len] == other.full_prompt()
        for other in index.candidates(prompt, shortest, len(prompt) - 1)
    )


def _dispatched_earlier(other: Call, call: Call) -> bool:
    theirs, ours = other.entry.created_at, call.entry.created_at
    return not theirs or not ours or theirs < ours


def _refuse(call: Call, reason: str) -> None:
    call.parent = None
    call.recovered = call.ambiguous = call.quarantined = call.given_history = False
    call.failure = reason
