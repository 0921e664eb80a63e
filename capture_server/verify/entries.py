"""Recorded calls, recomputed: digests, lengths, deltas, parent links, drift, stamps.

Invariant: what this passes is what the builders may rely on. It shares the arrays and the hashing
with the builder, none of its decisions: the builder leaves out what it cannot prove, this names
it. Pure; the entries are not changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from capture_server.trajectories.calls import Call, linked_id
from capture_server.trajectories.digests import check_digests, log_probs_fit
from capture_server.trajectories.parents import first_difference
from capture_server.trajectories.soundness import split_sound
from capture_server.verify.findings import Violation
from middleware.errors import InvalidIdError
from middleware.paths import validate_call_id
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import TokenEntry

_HEX: Final = re.compile(r"[0-9a-f]{64}")
_STAMPS: Final = (
    "continuation_fingerprint",
    "continuation_context_digest",
    "request_digest",
    "prompt_config_digest",
    "system_digest",
)


class RecordedCalls:
    """The calls of one rollout, each with its full sequence where that can be rebuilt."""

    def __init__(self, snapshot: TokenCaptureSnapshot) -> None:
        self._snapshot = snapshot
        self._calls: dict[str, Call] = {}
        sound, self._broken = split_sound(snapshot.entries)
        for entry in sound:
            self._calls.setdefault(entry.model_call_id, Call(entry))
        self._cyclic = self._find_cycles()
        self.rebuilt = self._rebuild()
        for call in self.rebuilt.values():
            parent = self.rebuilt.get(linked_id(call.entry) or "")
            if parent is not None and (call.base is parent or _extends(call, parent)):
                call.parent = parent
        check_digests(self.rebuilt.values(), lambda call: call.base or call.parent)

    @property
    def num_tokens(self) -> int:
        """Tokens of all full sequences."""
        return sum(call.cum_len for call in self.rebuilt.values())

    def _find_cycles(self) -> set[str]:
        """Ids of calls whose parent links lead back to themselves."""
        cyclic: set[str] = set()
        done: set[str] = set()
        for start in self._calls:
            path: dict[str, int] = {}
            call_id: str | None = start
            while call_id in self._calls and call_id not in done and call_id not in path:
                path[call_id] = len(path)
                call_id = linked_id(self._calls[call_id].entry)
            if call_id in path:
                cyclic |= {one for one, at in path.items() if at >= path[call_id]}
            done |= path.keys()
        return cyclic

    def _rebuild(self) -> dict[str, Call]:
        """Place every delta behind its parent, breadth first from the full records."""
        deltas: dict[str, list[Call]] = {}
        placed: list[Call] = []
        for call in self._calls.values():
            if call.entry.prompt_is_delta:
                deltas.setdefault(linked_id(call.entry) or "", []).append(call)
            else:
                call.prompt_len = len(call.stored_prompt)
                placed.append(call)
        for base in placed:
            for call in deltas.get(base.call_id, ()):
                call.base = base
                call.prompt_len = base.cum_len + len(call.stored_prompt)
                placed.append(call)
        # Deepest first: one array then serves all shorter prompts on its path.
        for call in sorted(placed, key=lambda call: -call.prompt_len):
            call.full_prompt()
        return {call.call_id: call for call in placed}

    def violations(self) -> Iterator[Violation]:
        """Everything that does not hold, call by call in the order of the entries."""
        seen: set[str] = set()
        for entry in self._snapshot.entries:
            for found in self._of_entry(entry, entry.model_call_id in seen):
                yield Violation(
                    code=found[0],
                    message=found[1],
                    rollout_id=self._snapshot.rollout_id,
                    call_id=entry.model_call_id,
                    position=found[2],
                )
            seen.add(entry.model_call_id)

    def _of_entry(self, entry: TokenEntry, repeated: bool) -> Iterator[_Found]:
        if entry.rollout_id != self._snapshot.rollout_id:
            yield "foreign_rollout_id", f"the record is of rollout {entry.rollout_id!r}", None
        if repeated:
            yield "duplicate_call_id", "a second record of this call", None
            return
        if problem := self._broken.get(entry.model_call_id):
            yield "record_invalid", problem, None
            return
        yield from _stamps(entry)
        parent_id = linked_id(entry)
        if entry.model_call_id in self._cyclic:
            yield "parent_cycle", f"its parents, from {parent_id!r} on, lead back to it", None
        elif parent_id is not None and parent_id not in self._calls:
            yield "parent_missing", f"its parent {parent_id!r} is not recorded", None
        call = self.rebuilt.get(entry.model_call_id)
        if call is None:
            message = f"its prompt cannot be rebuilt through {parent_id!r}"
            yield "delta_not_rebuilt", message, None
            return
        yield from _own_digest(call)
        parent = self.rebuilt.get(parent_id or "")
        if parent is not None and parent is not call:
            yield from _link(call, parent)
        elif entry.drift_at is not None and parent_id is None:
            yield "drift_mismatch", "drift is recorded, but no parent", None


_Found = tuple[str, str, int | None]


def _own_digest(call: Call) -> Iterator[_Found]:
    entry = call.entry
    if entry.cum_len is not None and entry.cum_len != call.cum_len:
        message = f"cum_len is {entry.cum_len}, the sequence has {call.cum_len} tokens"
        yield "length_mismatch", message, min(entry.cum_len, call.cum_len)
    if not log_probs_fit(call):
        yield "log_probs_mismatch", "the log-probs are not those of their recorded digest", None
    if call.digest_fits is False:
        message = f"the recorded digest is not that of its {call.cum_len} tokens"
        yield "digest_mismatch", message, None
    elif not entry.digest and (entry.cum_len is not None or entry.parent_resolution is not None):
        # Writers that decide nothing stamp nothing; all others stamp both.
        yield "digest_missing", "the record is stamped, but has no digest", None
    elif entry.digest and entry.cum_len is None:
        yield "length_missing", "the record has a digest, but no cum_len", None


def _link(call: Call, parent: Call) -> Iterator[_Found]:
    drift_at = call.entry.drift_at
    if call.parent is parent:
        if drift_at is not None:
            message = f"drift at {drift_at!r} is recorded, but it extends {parent.call_id!r}"
            yield "drift_mismatch", message, None
        return
    at = first_difference(call, parent)
    if drift_at is None:
        message = (
            f"its prompt leaves the {parent.cum_len} tokens of its parent {parent.call_id!r}, "
            "and no drift is recorded"
        )
        yield "parent_mismatch", message, at
    elif type(drift_at) is not int or drift_at != at:
        yield "drift_mismatch", f"drift is recorded at {drift_at!r}", at


def _extends(call: Call, parent: Call) -> bool:
    return parent is not call and parent.is_prefix_of(call.full_prompt())


def _stamps(entry: TokenEntry) -> Iterator[_Found]:
    try:
        validate_call_id(entry.model_call_id)
    except InvalidIdError as error:
        yield "invalid_call_id", str(error), None
    for name in _STAMPS:
        value = getattr(entry, name)
        if value and not (isinstance(value, str) and _HEX.fullmatch(value)):
            yield "stamp_malformed", f"{name} is no sha256 in hex", None
    if entry.digest and not _HEX.fullmatch(entry.digest):
        yield "stamp_malformed", "digest is no sha256 in hex", None
    if entry.continuation_context_len < 0:
        yield "stamp_malformed", "continuation_context_len is negative", None
    if entry.continuation_fingerprint and not entry.continuation_context_digest:
        yield "stamp_malformed", "a continuation_fingerprint without its context digest", None
