"""The rows of one rollout's token-free ledger, and the index over them (external staging).

Invariant: write-once per call id; failure rows never resolve; a retired rollout takes no rows.
The wire models live in ``capture_server.staging`` and are used by their attributes only.
Source: spec 07. Not thread-safe: its owner locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from middleware.errors import CallIdConflictError
from middleware.lineage.matching import RolloutLineage
from middleware.records import (
    LEDGER_ROW_MISSING_CHAIN_HASH_REASON,
    LEDGER_ROW_MISSING_RESPONSE_ID_REASON,
)

_STAGING_SCHEMA_VERSION: Final = 2


@dataclass(slots=True)
class LedgerRows:
    """Committed and failed calls of one rollout, in the order in which they came."""

    rollout_id: str
    committed: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    lineage: RolloutLineage = field(default_factory=RolloutLineage)
    retired: bool = False

    def __bool__(self) -> bool:
        return bool(self.committed or self.failures)

    def record(self, commit: Any) -> None:
        """Add a staged call (a ``CaptureLedgerCommit``); the same again is a no-op.

        Raises:
            CallIdConflictError: another row has this call id.
            InvalidInputError: (a ``ValueError``) its items cannot be hashed.
        """
        row = commit.record
        if self.retired:
            return
        known = self.committed.get(row.model_call_id)
        if known is not None and known != commit:
            raise CallIdConflictError(
                f"call {row.model_call_id!r} of rollout {self.rollout_id!r} already has another "
                "ledger row"
            )
        if known is not None:
            return
        self.lineage.record(
            row.model_call_id,
            [*commit.request_items, *commit.response_items],
            [],
            row.cumulative_hash,
            len(commit.request_items),
            staging_key=row.staging_key,
            parent_staging_chain=_above(commit.staging_chain, row.staging_key),
            cum_len=row.cum_len,
            chain_hash=row.chain_hash or "",
        )
        self.committed[row.model_call_id] = commit

    def record_failure(self, model_call_id: str, reason: str) -> None:
        """Add a call that did not commit. The first reason stays."""
        if not self.retired:
            self.failures.setdefault(model_call_id, reason)

    def manifest(self) -> dict[str, Any]:
        """The wire form of ``RolloutManifest``; an incomplete row counts as a failure."""
        failures = dict(self.failures)
        records = []
        for call_id, commit in self.committed.items():
            reason = _incomplete(commit.record)
            if reason:
                failures.setdefault(call_id, reason)
            else:
                records.append(commit.record.model_dump(mode="json"))
        return {
            "schema_version": _STAGING_SCHEMA_VERSION,
            "rollout_id": self.rollout_id,
            "records": records,
            "failures": [
                {
                    "schema_version": _STAGING_SCHEMA_VERSION,
                    "model_call_id": call_id,
                    "reason": reason,
                }
                for call_id, reason in failures.items()
            ],
        }


def _above(staging_chain: Sequence[str], staging_key: str) -> tuple[str, ...]:
    """The parent's chain, whether or not the given one ends in the call's own key."""
    chain = tuple(staging_chain)
    return chain[:-1] if chain[-1:] == (staging_key,) else chain


def _incomplete(row: Any) -> str:
    if not row.response_id:
        return LEDGER_ROW_MISSING_RESPONSE_ID_REASON
    if not row.chain_hash or not row.cumulative_hash:
        return LEDGER_ROW_MISSING_CHAIN_HASH_REASON
    return ""
