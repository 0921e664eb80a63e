"""The state of one rollout as a fold over its records.

Invariant: it depends on the records and their order only, so every worker that read the same
bytes knows the same state, version and reasons. No I/O, no token arrays; what may be appended is
decided elsewhere (``decisions``).

The version counts the records that changed the state (notes and torn marks do not).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from capture_server.stores.holders import is_known_dead
from capture_server.stores.journal import (
    Cancel,
    Closing,
    Entry,
    Frozen,
    Header,
    Incomplete,
    Intent,
    LedgerRow,
    Note,
    Record,
    Registered,
    Retired,
    Torn,
)
from middleware.lineage.ledger import LedgerRows
from middleware.protocols import IncompleteReason, RolloutState, RolloutStatus
from middleware.records import TokenEntry

CALL_ID_CONFLICT: Final = "call_id_conflict"
CORRUPT_JOURNAL: Final = "corrupt_journal"
DANGLING_INTENT: Final = "dangling_intent"
EXPIRED: Final = "rollout_expired"
MARKED_INCOMPLETE: Final = "marked_incomplete"  # mark_incomplete without a reason
STORE_FAILURE: Final = "store_failure"
UNOBSERVED_PATH: Final = "unobserved_path"

_CHOICE_ID = re.compile(r"(.+)\.[0-9]+")


@dataclass(slots=True)
class Call:
    """What the fold knows of one call id: its intent, its record, or both."""

    request_digest: str = ""
    observed: bool = True
    holder: str = ""
    attempt: str = ""
    open: bool = False  # an intent that nothing closed
    cancelled: bool = False  # and no record came after all
    payload: str | None = None  # sha256 of the stored record's canonical bytes; None: no record


@dataclass(slots=True)
class RolloutFold:
    """One rollout's state. Change it with ``apply`` and ``apply_damage`` only."""

    rollout_id: str
    version: int = 0
    closing: bool = False
    frozen: Frozen | None = None
    retired: Retired | None = None
    registered: Registered | None = None
    num_started: int = 0  # intents that were not cancelled
    calls: dict[str, Call] = field(default_factory=dict)
    choices: dict[str, list[str]] = field(default_factory=dict)  # base id -> its choices' ids
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    ledger: LedgerRows | None = None  # external staging; failures are marks like any other
    _reasons: list[Incomplete] = field(default_factory=list)
    _marks: set[tuple[str, str, bool]] = field(default_factory=set)  # code, call, after freeze?
    _num_live: int = 0  # calls that are not cancelled, and below: by request digest
    _live_digests: Counter[str] = field(default_factory=Counter)
    _resolutions: Counter[str] = field(default_factory=Counter)
    _num_entries: int = 0
    _drifted: list[dict[str, Any]] = field(default_factory=list)
    _prompt_tokens: int = 0
    _generated_tokens: int = 0
    _first_at: float | None = None
    _last_at: float | None = None

    @property
    def state(self) -> RolloutState:
        """``unknown`` until the first record that means something."""
        if self.retired is not None:
            return "retired"
        if self.frozen is not None:
            return "frozen"
        return "open" if self.version else "unknown"

    @property
    def open_intents(self) -> list[str]:
        """Ids of the calls that may still generate, oldest first."""
        return [call_id for call_id, call in self.calls.items() if call.open]

    def awaited_intents(self) -> list[str]:
        """The open intents that a freeze should wait for: not those of dead processes.

        None once it is frozen: what was open then dangles.
        """
        if self.frozen is not None:
            return []
        alive: dict[str, bool] = {"": True}
        waited = []
        for call_id in self.open_intents:
            holder = self.calls[call_id].holder
            if holder not in alive:
                alive[holder] = not is_known_dead(holder)
            if alive[holder]:
                waited.append(call_id)
        return waited

    def reasons(self) -> list[IncompleteReason]:
        """Why the rollout must be masked; dangling intents count once it is frozen."""
        found = list(self._reasons)
        if self.frozen is not None:
            found += [self._dangling(call_id, self.frozen.at) for call_id in self.open_intents]
        recorded = {(r.code, r.call, r.detail): r for r in reversed(found)}  # the first one wins
        return [
            IncompleteReason(code=r.code, model_call_id=r.call, detail=r.detail, at=r.at)
            for r in sorted(recorded.values(), key=lambda r: (r.at, r.code, r.call))
        ]

    def status(self) -> RolloutStatus:
        """The token-free summary."""
        reasons = self.reasons()
        counted = {name: self._resolutions[name] for name in ("root", "resolved", "unresolved")}
        ended = self.retired or self.frozen
        return RolloutStatus(
            rollout_id=self.rollout_id,
            state=self.state,
            calls=self._num_entries,
            open_intents=self.open_intents,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            incomplete=bool(reasons),
            incomplete_reasons=reasons,
            resolutions=counted,
            drifted_calls=len(self._drifted),
            drifted=tuple(self._drifted),
            first_call_at=self._first_at,
            last_call_at=self._last_at,
            snapshot_id=ended.snapshot_id if ended else None,
            version=self.version,
            **registration_status(self.registered),
        )

    @property
    def generated_tokens(self) -> int:
        """Of the stored records."""
        return self._generated_tokens

    def first_call(self, request_digest: str) -> bool:
        """Whether no call with another (or unknown) request body is held, cancelled ones apart.

        Asked before the intent in question is applied.
        """
        same = self._live_digests[request_digest] if request_digest else 0
        return self._num_live == same

    def apply(self, record: Record) -> None:
        """Take in the next record."""
        match record:
            case Header() | Torn():
                return
            case Note():
                self._apply_note(record)
                return
            case Registered():
                self.registered = record
            case Intent():
                self._apply_intent(record)
            case Cancel():
                self._apply_cancel(record)
            case Entry():
                self._apply_entry(record)
            case LedgerRow():
                self._apply_ledger_row(record)
            case Incomplete():
                self._apply_incomplete(record)
            case Closing():
                self.closing = True
            case Frozen():
                self.frozen = record
            case Retired():
                self.retired = record
                self.version = record.version
                return
        self.version += 1

    def apply_damage(self, detail: str, num_lines: int) -> None:
        """Take in a damaged place with whole records behind it: masked for good."""
        self._reasons.append(Incomplete(code=CORRUPT_JOURNAL, detail=detail))
        # One more than the lines could have counted: damage after a snapshot makes it stale.
        self.version += num_lines + 1

    def is_marked(self, code: str, call: str) -> bool:
        """Whether this mark stands already (marks made after the freeze count apart).

        The first repetition after a freeze is recorded: a mark must show in the version of the
        snapshot that a trainer may hold.
        """
        return (code, call, self.frozen is not None) in self._marks

    def _dangling(self, call_id: str, at: float) -> Incomplete:
        if self.calls[call_id].observed:
            detail = "the call began to generate, and neither a record nor an end is known"
            return Incomplete(code=DANGLING_INTENT, call=call_id, detail=detail, at=at)
        detail = "a request whose answer is not recorded may feed later prompts"
        return Incomplete(code=UNOBSERVED_PATH, call=call_id, detail=detail, at=at)

    def _apply_intent(self, record: Intent) -> None:
        self.calls[record.call] = Call(
            request_digest=record.request_digest,
            observed=record.observed,
            holder=record.holder,
            attempt=record.attempt,
            open=True,
        )
        self.num_started += 1
        self._count_live(record.request_digest, 1)
        self._seen_at(record.at)

    def _apply_cancel(self, record: Cancel) -> None:
        call = self.calls.get(record.call)
        if call is not None and call.open:
            call.open, call.cancelled = False, True
            self.num_started -= 1
            self._count_live(call.request_digest, -1)

    def _apply_entry(self, record: Entry) -> None:
        if record.closes in self.calls:
            self.calls[record.closes].open = False
        call = self.calls.get(record.call)
        if call is None:
            call = self.calls[record.call] = Call(request_digest=record.request_digest)
            self._count_live(record.request_digest, 1)
        elif call.cancelled:
            call.cancelled = False
            self._count_live(call.request_digest, 1)
        if call.payload is not None:  # no writer of ours does this: damage of another kind
            self._reasons.append(Incomplete(code=CALL_ID_CONFLICT, call=record.call))
            return
        call.open = False
        call.payload = record.payload
        if choice := _CHOICE_ID.fullmatch(record.call):
            self.choices.setdefault(choice[1], []).append(record.call)
        self._count_entry(record)

    def _apply_ledger_row(self, record: LedgerRow) -> None:
        if self.ledger is None:
            self.ledger = LedgerRows(self.rollout_id)
        if record.call in self.ledger.committed:  # no writer of ours does this
            self._reasons.append(Incomplete(code=CALL_ID_CONFLICT, call=record.call))
            return
        self.ledger.add(record)
        if (call := self.calls.get(record.call)) is not None:
            call.open = False
        self._num_entries += 1
        self._resolutions["resolved" if record.row.get("parent_call_id") else "root"] += 1
        self._seen_at(record.row.get("admitted_at") or 0.0)

    def _count_live(self, request_digest: str, change: int) -> None:
        self._num_live += change
        self._live_digests[request_digest] += change

    def _count_entry(self, record: Entry) -> None:
        self._num_entries += 1
        if record.is_drifted:
            at, parent = record.entry["drift_at"], record.entry.get("parent_call_id")
            self._drifted.append(
                {
                    "model_call_id": record.call,
                    "drift_at": at if type(at) is int else None,  # nothing validated it
                    "parent_call_id": parent,
                }
            )
        self._prompt_tokens += record.prompt_len
        self._generated_tokens += record.gen_len
        self._resolutions[record.resolution] += 1
        self._seen_at(record.at)

    def _apply_incomplete(self, record: Incomplete) -> None:
        self._reasons.append(record)
        self._marks.add((record.code, record.call, self.frozen is not None))
        call = self.calls.get(record.call)
        if call is not None:
            call.open = False  # the mark says more than a dangling intent would

    def _apply_note(self, record: Note) -> None:
        self.notes[record.call] = merged_notes(self.notes.get(record.call, {}), record.notes)

    def _seen_at(self, at: float) -> None:
        if at:
            self._first_at = at if self._first_at is None else min(self._first_at, at)
            self._last_at = at if self._last_at is None else max(self._last_at, at)


def registration_status(registered: Registered | None) -> dict[str, Any]:
    """The fields of a status that come from the registration."""
    if registered is None:
        return {}
    return {
        "labels": dict(registered.labels),
        "max_calls": registered.max_calls,
        "max_generated_tokens": registered.max_generated_tokens,
        "expires_at": registered.expires_at,
    }


def merged_notes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Later values win, except that a record once known as delivered stays delivered."""
    merged = {**old, **new}
    if old.get("delivered") is True:
        merged["delivered"] = True
    return merged


def with_notes(entry: TokenEntry, notes: Mapping[str, Any]) -> TokenEntry:
    """The entry as it is read: ``delivered`` and ``timings.sink_ms`` merged in, in place."""
    if "delivered" in notes:
        entry.delivered = bool(notes["delivered"]) or entry.delivered is True
    if "sink_ms" in notes:
        entry.timings = {**(entry.timings or {}), "sink_ms": notes["sink_ms"]}
    return entry


def entry_record(
    entry: TokenEntry, *, payload: str, closes: str, packed: Mapping[str, Any]
) -> Entry:
    """The journal's record of an entry."""
    prompt_len = len(entry.prompt_token_ids)
    if entry.prompt_is_delta and entry.cum_len is not None:
        prompt_len = entry.cum_len - len(entry.generation_token_ids)
    return Entry(
        call=entry.model_call_id,
        closes=closes,
        payload=payload,
        prompt_len=prompt_len,
        gen_len=len(entry.generation_token_ids),
        entry=packed,
    )
