"""Step 2 of a build: give delta prompts their place behind the parent's sequence.

A delta is believed only if its own digest covers the rebuilt sequence and no record on the way
failed its digest. Nothing is concatenated here: a delta gets a reference to its base.
"""

from __future__ import annotations

from capture_server.trajectories.calls import Call, linked_id
from capture_server.trajectories.digests import check_digests


def place_deltas(calls: dict[str, Call]) -> list[str]:
    """Set ``prompt_len`` and ``base`` of every call that can be rebuilt; return the other ids."""
    children: dict[str, list[Call]] = {}
    placed: list[Call] = []
    for call in calls.values():
        if not call.entry.prompt_is_delta:
            call.prompt_len = len(call.stored_prompt)
            placed.append(call)
        elif call.entry.digest and (parent := linked_id(call.entry)) is not None:
            children.setdefault(parent, []).append(call)
    # Breadth first from the full records: what is never reached has lost its anchor.
    for base in placed:
        for delta in children.get(base.call_id, ()):
            delta.base = base
            delta.prompt_len = base.cum_len + len(delta.stored_prompt)
            placed.append(delta)
    rebuilt = _believed(placed, children)
    return [call_id for call_id in calls if call_id not in rebuilt]


def _believed(placed: list[Call], children: dict[str, list[Call]]) -> set[str]:
    check_digests(call for call in placed if call.base is not None or call.call_id in children)
    sound: set[str] = set()  # nothing on the way here failed its digest
    kept: set[str] = set()
    for call in placed:
        if call.base is None:
            kept.add(call.call_id)  # a full record stands for itself, whatever its digest says
            way_is_sound = True
        else:
            way_is_sound = call.base.call_id in sound
        if way_is_sound and call.digest_fits is not False:
            sound.add(call.call_id)
            kept.add(call.call_id)
    return kept
