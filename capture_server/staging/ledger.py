"""The token-free ledger of external staging, over any of our stores.

Rows are records of the rollout's own journal, failures are its incomplete marks: freeze, retire,
delete and status cover them without a second file or table. Invariants: a row is durable and
visible to every worker when ``record`` returns; one call id has one row; whatever masks a rollout
is a failure in its manifest, whoever noted it. Source: spec 07 "Ledger".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from capture_server.staging.records import UNCOMMITTED_CALL_REASON, CaptureLedgerCommit
from capture_server.stores.decisions import Decision, decide_ledger_row
from capture_server.stores.fold import DANGLING_INTENT, STORE_FAILURE, RolloutFold
from capture_server.stores.journal import Incomplete, LedgerRow, Record
from middleware.errors import ConfigurationError
from middleware.lineage.ledger import NO_CALL, LedgerRows, StampedRow, manifest_body, stamped_row
from middleware.lineage.matching import RolloutLineage, Verdict, hash_request
from middleware.lineage.threads import is_large_request, run_sized
from middleware.protocols import LineageQuery, LineageResolution, RolloutStatus
from middleware.records import ParentResolutionStatus

__all__ = ["LedgerBackend", "StoreLedger", "open_ledger"]

_STAMP_FIELDS: Final = tuple(StampedRow.__dataclass_fields__)

T = TypeVar("T")


@runtime_checkable
class LedgerBackend(Protocol):
    """What a store must offer to keep a ledger; all of ours that fold records do."""

    async def apply_rule(
        self,
        rollout_id: str,
        rule: Callable[[RolloutFold], Decision],
        *,
        call: str = "",
        owed: Sequence[Record] = (),
    ) -> None:
        """Append what the rule decides; durable and visible on return."""

    async def look(self, rollout_id: str, view: Callable[[RolloutFold], T]) -> T:
        """What a view makes of the current state."""

    async def retire_now(self, rollout_id: str) -> None:
        """Leave only a tombstone."""

    async def mark_incomplete(
        self, rollout_id: str, model_call_id: str = "", reason: str = "", detail: str = ""
    ) -> None:
        """See ``CaptureStore``."""

    async def status(self, rollout_id: str) -> RolloutStatus:
        """See ``CaptureStore``."""

    def is_process_shared(self) -> bool:
        """See ``CaptureStore``."""


class StoreLedger:
    """``CaptureLedger`` and ``QueryResolver`` in the journals of a store (which its owner closes).

    ``closes_intents``: a row or a failure also closes the call's intent in that store.
    """

    closes_intents: Final = True

    def __init__(self, store: Any) -> None:
        self._store = store

    # --- rows ------------------------------------------------------------------------------------

    async def record(self, commit: CaptureLedgerCommit) -> None:
        """Add a staged call's row. The same again is a no-op; after retire it is discarded.

        Raises:
            CallIdConflictError: another row has this call id; the rollout is masked.
            TokenCaptureFrozenError: the rollout is frozen.
            InvalidInputError: (a ``ValueError``) its items cannot be hashed.
            StoreUnavailableError: the row is not durable.
        """
        items = [*commit.request_items, *commit.response_items]
        stamped = await run_sized(is_large_request(items), lambda: stamped_row(commit))
        row = LedgerRow(**{name: getattr(stamped, name) for name in _STAMP_FIELDS})
        at = time.time()
        lost = "the ledger row of this call could not be made durable"
        await self._store.apply_rule(
            commit.rollout_id,
            lambda fold: decide_ledger_row(fold, row, at),
            call=row.call,
            owed=[Incomplete(code=STORE_FAILURE, call=row.call, detail=lost, at=at)],
        )

    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        """Note a call that did not commit: its rollout is masked with this reason. Idempotent.

        Raises:
            StoreUnavailableError: not durable yet.
        """
        await self._store.mark_incomplete(rollout_id, model_call_id, reason=reason)

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        """The wire form of ``RolloutManifest``; empty for an unknown or retired rollout."""

        def view(fold: RolloutFold) -> dict[str, Any]:
            return (fold.ledger or LedgerRows(rollout_id)).manifest()

        found: dict[str, Any] = await self._store.look(rollout_id, view)
        # Asked second: a failure that comes meanwhile is in, and marks that are only owed too.
        status: RolloutStatus = await self._store.status(rollout_id)
        failures: dict[str, str] = {}
        for reason in status.incomplete_reasons:
            code = UNCOMMITTED_CALL_REASON if reason.code == DANGLING_INTENT else reason.code
            failures.setdefault(reason.model_call_id or NO_CALL, code)
        for failure in found["failures"]:
            failures.setdefault(failure["model_call_id"], failure["reason"])
        return manifest_body(rollout_id, found["records"], failures)

    async def has_rows(self, rollout_id: str) -> bool:
        """Whether any row, committed or failed, exists."""
        held: bool = await self._store.look(
            rollout_id, lambda fold: bool(fold.ledger) or bool(fold.reasons())
        )
        return held

    async def retire(self, rollout_id: str) -> None:
        """Drop the rollout's rows and discard later ones. Idempotent."""
        await self._store.retire_now(rollout_id)

    async def delete(self, rollout_id: str) -> None:
        """Drop the rollout's rows and their fence."""
        await self._store.delete(rollout_id)

    # --- parents ---------------------------------------------------------------------------------

    async def resolve(
        self, rollout_id: str, request_items: list[dict[str, Any]]
    ) -> LineageResolution:
        """See ``LineageResolver``; a match names the staging chain, its tokens are elsewhere."""
        query = await run_sized(
            is_large_request(request_items), lambda: hash_request(request_items).query()
        )
        return await self.resolve_query(rollout_id, query)

    async def resolve_query(self, rollout_id: str, query: LineageQuery) -> LineageResolution:
        """See ``QueryResolver``."""
        if query.is_root:
            return LineageResolution(ParentResolutionStatus.ROOT)
        return await self._decide(rollout_id, lambda lineage: lineage.decide(query))

    async def _decide(
        self, rollout_id: str, decision: Callable[[RolloutLineage], Verdict]
    ) -> LineageResolution:
        def view(fold: RolloutFold) -> LineageResolution:
            return (fold.ledger or LedgerRows(rollout_id)).decide(decision)

        found: LineageResolution = await self._store.look(rollout_id, view)
        return found

    def is_process_shared(self) -> bool:
        """As the store."""
        shared: bool = self._store.is_process_shared()
        return shared

    async def close(self) -> None:
        """Nothing: the store is its owner's."""


def open_ledger(store: Any, *, workers: int = 1) -> StoreLedger:
    """The ledger of an open store.

    Raises:
        ConfigurationError: the store cannot keep one, or not one that all workers see.
    """
    if not isinstance(store, LedgerBackend):
        raise ConfigurationError(
            f"{type(store).__name__} cannot keep the ledger of external staging: use a file or "
            "PostgreSQL store, or give it apply_rule, look and retire_now"
        )
    if workers > 1 and not store.is_process_shared():
        raise ConfigurationError(
            "external staging with several workers needs a ledger that all of them see: use a "
            "file or PostgreSQL store in place of memory:"
        )
    return StoreLedger(store)
