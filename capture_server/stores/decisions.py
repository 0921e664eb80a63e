"""Every rule that adds records to a rollout: pure functions from its fold to a ``Decision``.

Invariant: a decision changes nothing; it returns the records to append, an error, or both. The
file and the memory store append what these say and nothing else, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from capture_server.stores.fold import CALL_ID_CONFLICT, EXPIRED, RolloutFold, merged_notes
from capture_server.stores.journal import (
    Cancel,
    Closing,
    Entry,
    Frozen,
    Incomplete,
    Intent,
    LedgerRow,
    Note,
    Record,
    Registered,
    Retired,
)
from middleware.errors import (
    BudgetExhaustedError,
    CallIdConflictError,
    NotFrozenError,
    RolloutExistsError,
    TokenCaptureError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
)
from middleware.lineage.ledger import LedgerRows
from middleware.records import TokenEntry


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from a request: records to append, then ``error`` is raised if set.

    ``late`` counts a record that came after the fence and changed nothing.
    """

    records: Sequence[Record] = ()
    error: TokenCaptureError | None = None
    late: bool = False


def decide_register(fold: RolloutFold, registered: Registered) -> Decision:
    """Register a rollout of which nothing is known: a reused id must not mix two attempts."""
    if fold.state != "unknown":
        return Decision(
            error=RolloutExistsError(
                f"rollout {fold.rollout_id!r} has records already (it is {fold.state}): delete it "
                "first, or use a new id for a new attempt"
            )
        )
    return Decision([registered])


def decide_intent(fold: RolloutFold, intent: Intent) -> Decision:
    """Open a call, unless its id is taken or the rollout takes no calls any more."""
    if (refusal := _refused_after_fence(fold, "new calls")) is not None:
        return Decision(error=refusal)
    known = fold.calls.get(intent.call)
    if known is not None and known.attempt and known.attempt == intent.attempt:
        if not known.cancelled:
            return Decision()  # sent again after a lost answer: written before any fence
        if not fold.closing:
            return Decision([intent])  # closed meanwhile, but its call is made after all
    if fold.closing:
        return Decision(
            error=TokenCaptureFrozenError(
                f"rollout {fold.rollout_id!r} is being frozen: it takes no new calls"
            )
        )
    if intent.call in fold.calls or intent.call in fold.choices:
        return Decision(
            error=CallIdConflictError(
                f"model call id {intent.call!r} was used before in rollout {fold.rollout_id!r}; "
                "mint a new id"
            )
        )
    if (refusal := _refused_by_registration(fold, intent.at)) is not None:
        return Decision(error=refusal)
    return Decision([intent])


def _refused_by_registration(fold: RolloutFold, at: float) -> TokenCaptureError | None:
    """Why a registered rollout takes no further call; decided under its lock, so exactly."""
    registered = fold.registered
    if registered is None:
        return None
    if registered.expires_at is not None and at >= registered.expires_at:
        return TokenCaptureFrozenError(
            f"rollout {fold.rollout_id!r} has outlived its ttl_s: it takes no new calls"
        )
    what, used, limit = "calls", fold.num_started, registered.max_calls
    if limit is None or used < limit:
        what, used = "generated tokens", fold.generated_tokens
        limit = registered.max_generated_tokens
    if limit is None or used < limit:
        return None
    return BudgetExhaustedError(
        f"rollout {fold.rollout_id!r} has used {used} of its {limit} {what}: end this attempt"
    )


def _expiry(fold: RolloutFold, at: float) -> list[Record]:
    """The mark of a rollout that nobody began to freeze within its time."""
    registered = fold.registered
    if registered is None or registered.expires_at is None or fold.closing:
        return []
    if at < registered.expires_at:
        return []
    detail = "the rollout was still open when its ttl_s had passed"
    return list(decide_incomplete(fold, Incomplete(code=EXPIRED, detail=detail, at=at)).records)


def decide_cancel(fold: RolloutFold, cancel: Cancel, *, exact: bool = False) -> Decision:
    """Close an open intent; anything else leaves the state as it is.

    A cancel that names an attempt closes no other one. ``exact``: it comes late (owed or
    spilled), so that without a name it may close only an intent that has none either.
    """
    if fold.frozen is not None or fold.retired is not None:
        return Decision(late=True)
    call = fold.calls.get(cancel.call)
    if call is None or not call.open:
        return Decision()
    is_meant = call.attempt == cancel.attempt or not (exact or cancel.attempt)
    return Decision([cancel] if is_meant else [])


def decide_put(fold: RolloutFold, entries: Sequence[Entry], at: float) -> Decision:
    """Take in the records of one request: all that are new, or none and a mark on conflict."""
    if (refusal := _refused_after_fence(fold, "late records")) is not None:
        return Decision(error=refusal, late=True)
    fresh: dict[str, Entry] = {}
    for entry in entries:
        call = fold.calls.get(entry.call)
        stored = call.payload if call is not None else None
        if entry.call in fresh:
            stored = fresh[entry.call].payload
        if stored is None:
            fresh[entry.call] = entry
        elif stored != entry.payload:
            return _conflict(fold, entry.call, at)
    return Decision(list(fresh.values()))


def _conflict(fold: RolloutFold, call_id: str, at: float) -> Decision:
    detail = "two different payloads were put under one call id; the first is kept"
    mark = decide_incomplete(
        fold, Incomplete(code=CALL_ID_CONFLICT, call=call_id, detail=detail, at=at)
    )
    return Decision(
        mark.records,
        CallIdConflictError(
            f"call {call_id!r} of rollout {fold.rollout_id!r} is stored with another payload; "
            "a retry must send the identical record (the rollout is now incomplete)"
        ),
    )


def decide_ledger_row(fold: RolloutFold, row: LedgerRow, at: float) -> Decision:
    """Take in a row of external staging, once; a retired rollout discards it."""
    if fold.retired is not None:
        return Decision(late=True)
    known = fold.ledger.committed.get(row.call) if fold.ledger is not None else None
    if known is not None:
        return Decision() if known.payload == row.payload else _conflict(fold, row.call, at)
    if (refusal := _refused_after_fence(fold, "late rows")) is not None:
        return Decision(error=refusal, late=True)
    return Decision([(fold.ledger or LedgerRows(fold.rollout_id)).slim(row)])


def decide_incomplete(fold: RolloutFold, mark: Incomplete) -> Decision:
    """Mark the rollout; works after freeze. A tombstone has nothing left to mask."""
    if fold.retired is not None:
        return Decision(late=True)
    return Decision([] if fold.is_marked(mark.code, mark.call) else [mark])


def decide_note(fold: RolloutFold, note: Note) -> Decision:
    """Attach notes to a stored record, or to all choices of one request."""
    if fold.frozen is not None or fold.retired is not None:
        return Decision(late=True)
    call = fold.calls.get(note.call)
    targets = fold.choices.get(note.call, [])
    if call is not None and call.payload is not None:
        targets = [note.call, *targets]
    return Decision(
        [
            Note(call=target, notes=note.notes)
            for target in targets
            if merged_notes(fold.notes.get(target, {}), note.notes) != fold.notes.get(target)
        ]
    )


def decide_fence(fold: RolloutFold, at: float) -> Decision:
    """Refuse new intents from now on."""
    if fold.retired is not None:
        return Decision(error=retired_error(fold))
    if fold.closing or fold.frozen is not None:
        return Decision()
    return Decision([*_expiry(fold, at), Closing(at=at)])


def decide_freeze(fold: RolloutFold, snapshot_id: str, at: float) -> Decision:
    """Fence the rollout; a frozen one keeps its snapshot."""
    if fold.retired is not None:
        return Decision(error=retired_error(fold))
    if fold.frozen is not None:
        return Decision()
    return Decision([*_expiry(fold, at), Frozen(snapshot_id=snapshot_id, at=at)])


def decide_retire(fold: RolloutFold, snapshot_id: str, version: int, at: float) -> Retired | None:
    """The tombstone, if exactly this frozen state still stands (or was retired already)."""
    ended = fold.retired or fold.frozen
    if ended is None or (ended.snapshot_id, fold.version) != (snapshot_id, version):
        return None
    return fold.retired or Retired(snapshot_id=snapshot_id, version=version, at=at)


def decide_retire_now(fold: RolloutFold, at: float) -> Retired | None:
    """The tombstone of a rollout in whatever state; None where it stands already."""
    if fold.retired is not None:
        return None
    snapshot_id = fold.frozen.snapshot_id if fold.frozen is not None else ""
    return Retired(snapshot_id=snapshot_id, version=fold.version, at=at)


def require_frozen(fold: RolloutFold) -> Frozen:
    """The fence of a rollout whose snapshot can be read.

    Raises:
        NotFrozenError: open or unknown.
        TokenCaptureRetiredError: retired.
    """
    if fold.retired is not None:
        raise retired_error(fold)
    if fold.frozen is None:
        raise NotFrozenError(f"rollout {fold.rollout_id!r} is not frozen; freeze it first")
    return fold.frozen


def retired_error(fold: RolloutFold) -> TokenCaptureRetiredError:
    """The error for any use of a tombstone."""
    return TokenCaptureRetiredError(
        f"rollout {fold.rollout_id!r} was retired; delete it before its id is used again"
    )


def _refused_after_fence(fold: RolloutFold, what: str) -> TokenCaptureError | None:
    if fold.retired is not None:
        return retired_error(fold)
    if fold.frozen is not None:
        return TokenCaptureFrozenError(f"rollout {fold.rollout_id!r} is frozen: no {what}")
    return None


def choice_groups(
    entries: Sequence[TokenEntry], intent_id: str
) -> Iterator[tuple[TokenEntry, str]]:
    """Each entry with the intent that it closes: the last one closes the request's intent."""
    last = len(entries) - 1
    for index, entry in enumerate(entries):
        yield entry, intent_id if index == last else ""
