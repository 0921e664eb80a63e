"""The resolver of a single worker: everything in this process's memory.

For tests, in-process frameworks and single-worker set-ups. A restart or an eviction leaves later
calls ``unresolved``, which is safe. It doubles as an in-memory ledger of external staging
(spec 07), whose rows are never evicted: a ledger must be complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from middleware.lineage.index import LineageIndex
from middleware.lineage.ledger import LedgerRows
from middleware.lineage.matching import RolloutLineage, Verdict, hash_request, resolution
from middleware.lineage.threads import LARGE_TOKENS, is_large_request, run_sized
from middleware.paths import validate_call_id, validate_rollout_id
from middleware.protocols import LineageQuery, LineageResolution
from middleware.records import TokenEntry, TokenIds, payload_digest


class InMemoryLineageStore:
    """``QueryResolver`` and ``CaptureLedger`` over this process's memory."""

    def __init__(self, max_rollouts: int = 512, max_tokens: int = 8_000_000) -> None:
        self._index = LineageIndex(max_rollouts, max_tokens)
        self._ledger: dict[str, LedgerRows] = {}
        self._lock = threading.Lock()

    async def put(self, entry: TokenEntry) -> None:
        """Publish one committed entry; a ``resolve`` that starts afterwards sees it."""
        size = len(entry.prompt_token_ids) + len(entry.generation_token_ids)
        await run_sized(size > LARGE_TOKENS, lambda: self._add(entry))

    def _add(self, entry: TokenEntry) -> None:
        payload = payload_digest(entry)
        with self._lock:
            self._index.for_rollout(entry.rollout_id).add_entry(entry, payload=payload)
            self._index.trim()

    def note_delivery(self, rollout_id: str, model_call_id: str, delivered: bool) -> None:
        """Whether the client got that call's answer, learnt after ``put``."""
        with self._lock:
            lineage = self._index.get(rollout_id)
            if lineage is not None:
                lineage.note_delivery(model_call_id, delivered)

    def drop(self, rollout_id: str) -> None:
        """Forget a retired rollout's entries."""
        with self._lock:
            self._index.drop(rollout_id)

    async def resolve(
        self, rollout_id: str, request_items: list[dict[str, Any]]
    ) -> LineageResolution:
        """See ``LineageResolver``."""
        query = await run_sized(
            is_large_request(request_items), lambda: hash_request(request_items).query()
        )
        return await self.resolve_query(rollout_id, query)

    async def resolve_query(self, rollout_id: str, query: LineageQuery) -> LineageResolution:
        """See ``QueryResolver``."""
        return self._decide(rollout_id, lambda lineage: lineage.decide(query))

    async def resolve_tokens(
        self, rollout_id: str, prompt_token_ids: TokenIds, *, dispatched_at: float
    ) -> LineageResolution:
        """See ``QueryResolver``."""
        return await run_sized(
            len(prompt_token_ids) > LARGE_TOKENS,
            lambda: self._decide(
                rollout_id,
                lambda lineage: lineage.decide_by_tokens(prompt_token_ids, dispatched_at),
            ),
        )

    async def resolve_response_id(self, rollout_id: str, response_id: str) -> LineageResolution:
        """See ``QueryResolver``."""
        return self._decide(rollout_id, lambda lineage: lineage.find_by_response_id(response_id))

    async def resolve_call_id(self, rollout_id: str, model_call_id: str) -> LineageResolution:
        """See ``QueryResolver``."""
        return self._decide(rollout_id, lambda lineage: lineage.find_by_call_id(model_call_id))

    def find_by_response_id(self, rollout_id: str, response_id: str) -> Verdict:
        """The call that served this response id: (status, node, reason); no tokens."""
        with self._lock:
            return self._lineage(rollout_id).find_by_response_id(response_id)

    def _decide(
        self, rollout_id: str, decision: Callable[[RolloutLineage], Verdict]
    ) -> LineageResolution:
        with self._lock:
            rows = self._ledger.get(rollout_id)
            if rows:
                return rows.decide(decision)
            return resolution(decision(self._lineage(rollout_id)))

    def _lineage(self, rollout_id: str) -> RolloutLineage:
        return self._index.get(rollout_id) or RolloutLineage()

    def is_process_shared(self) -> bool:
        """False: other workers do not see these entries."""
        return False

    async def close(self) -> None:
        """Nothing to release."""

    # --- the ledger of external staging ------------------------------------------------------

    async def record(self, commit: Any) -> None:
        """Add a staged call's row (see ``LedgerRows.record``).

        Raises:
            InvalidIdError: (a ``ValueError``) of the rollout; so do all below.
        """
        with self._lock:
            self._rows(commit.rollout_id).record(commit)

    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        """Add a row for a call that did not commit; it never resolves. Idempotent."""
        if model_call_id:
            validate_call_id(model_call_id)
        with self._lock:
            self._rows(rollout_id).record_failure(model_call_id, reason)

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        """The rollout's token-free ledger in the wire form of ``RolloutManifest``."""
        with self._lock:
            return self._ledger.get(
                validate_rollout_id(rollout_id), LedgerRows(rollout_id)
            ).manifest()

    async def has_rows(self, rollout_id: str) -> bool:
        """Whether any row, committed or failed, exists."""
        with self._lock:
            return bool(self._ledger.get(validate_rollout_id(rollout_id)))

    async def retire(self, rollout_id: str) -> None:
        """Drop the rollout's rows and discard later ones."""
        with self._lock:
            self._ledger[validate_rollout_id(rollout_id)] = LedgerRows(rollout_id, retired=True)

    async def delete(self, rollout_id: str) -> None:
        """Drop the rollout's rows and their fence."""
        with self._lock:
            self._ledger.pop(validate_rollout_id(rollout_id), None)

    def _rows(self, rollout_id: str) -> LedgerRows:
        return self._ledger.setdefault(validate_rollout_id(rollout_id), LedgerRows(rollout_id))
