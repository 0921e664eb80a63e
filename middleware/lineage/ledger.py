"""The rows of one rollout's token-free ledger, and the index over them (external staging).

Invariant: write-once per call id; failure rows never resolve; a retired rollout takes no rows.
A row keeps hashes of its conversation, not the conversation, and names its parent, not its whole
chain, so a rollout's ledger grows linearly. The wire models live in ``capture_server.staging``
and are used by their attributes only. Source: spec 07. Not thread-safe: its owner locks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from middleware.arrays import TokenIds
from middleware.canonical import canonical_json
from middleware.errors import CallIdConflictError
from middleware.lineage.matching import (
    LineageNode,
    RolloutLineage,
    Verdict,
    hash_request,
    resolution,
)
from middleware.lineage.tokens import SharedTokens
from middleware.normalise import normalise_items
from middleware.protocols import LineageResolution
from middleware.records import (
    LEDGER_ROW_MISSING_CHAIN_HASH_REASON,
    LEDGER_ROW_MISSING_RESPONSE_ID_REASON,
)

NO_CALL: Final = "unknown"
"""In a manifest: the failure is not one call's."""
NO_REASON: Final = "marked_incomplete"
"""In a manifest: whoever noted the failure did not say why."""

_STAGING_SCHEMA_VERSION: Final = 2

RowT = TypeVar("RowT", bound="StampedRow")


@dataclass(frozen=True, slots=True, kw_only=True)
class StampedRow:
    """A committed call as a ledger keeps it.

    ``row`` is the manifest row in wire form; fingerprint and context are what a child is matched
    by. ``chain``: the ancestors' staging keys, root first, where they are not simply those of the
    parent's row (None). ``payload`` is the sha256 of the whole commit.
    """

    call: str
    row: Mapping[str, Any]
    fingerprint: str
    context_len: int
    context_digest: str
    payload: str
    chain: Sequence[str] | None = None


def stamped_row(commit: Any) -> StampedRow:
    """Hash a ``CaptureLedgerCommit``. Linear in its items; large ones belong off the loop.

    Raises:
        InvalidInputError: (a ``ValueError``) its items cannot be hashed.
    """
    row = commit.record
    stamp = hash_request(commit.request_items).continuation(normalise_items(commit.response_items))
    chain = tuple(commit.staging_chain)
    values = row.model_dump(mode="json")
    content = canonical_json(
        [commit.rollout_id, values, list(chain), commit.request_items, commit.response_items]
    )
    return StampedRow(
        call=row.model_call_id,
        row=values,
        fingerprint=stamp[0],
        context_len=stamp[1],
        context_digest=stamp[2],
        payload=hashlib.sha256(content).hexdigest(),
        # With or without the call's own key at the end: both are in use.
        chain=chain[:-1] if chain[-1:] == (row.staging_key,) else chain,
    )


@dataclass(slots=True)
class LedgerRows:
    """Committed and failed calls of one rollout, in the order in which they came."""

    rollout_id: str
    committed: dict[str, StampedRow] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    lineage: RolloutLineage = field(default_factory=RolloutLineage)
    retired: bool = False

    def __bool__(self) -> bool:
        return bool(self.committed or self.failures)

    # --- rows ------------------------------------------------------------------------------------

    def record(self, commit: Any) -> None:
        """Add a staged call (a ``CaptureLedgerCommit``); the same again is a no-op.

        Raises:
            CallIdConflictError: another row has this call id.
            InvalidInputError: (a ``ValueError``) its items cannot be hashed.
        """
        if self.retired:
            return
        row = stamped_row(commit)
        if not self.holds(row):
            self.add(self.slim(row))

    def holds(self, row: StampedRow) -> bool:
        """Whether exactly this row is there.

        Raises:
            CallIdConflictError: another row has this call id.
        """
        known = self.committed.get(row.call)
        if known is not None and known.payload != row.payload:
            raise CallIdConflictError(
                f"call {row.call!r} of rollout {self.rollout_id!r} already has another ledger row"
            )
        return known is not None

    def slim(self, row: RowT) -> RowT:
        """The row without a chain that its parent's row gives anyway."""
        parent = row.row.get("parent_call_id")
        if row.chain is None or (parent is not None and parent not in self.committed):
            return row
        derived = [] if parent is None else self.chain_of(parent)
        return replace(row, chain=None) if list(row.chain) == derived else row

    def add(self, row: StampedRow) -> None:
        """Index a row that is known to be new."""
        values = row.row
        self.committed[row.call] = row
        self.lineage.add_node(
            LineageNode(
                call_id=row.call,
                cum_len=values["cum_len"],
                digest=values.get("cumulative_hash") or "",
                fingerprint=row.fingerprint,
                context_len=row.context_len,
                context_digest=row.context_digest,
                parent_call_id=values.get("parent_call_id"),
                staging_key=values.get("staging_key") or "",
                chain_hash=values.get("chain_hash") or "",
                created_at=values.get("admitted_at") or 0.0,
                response_id=values.get("response_id") or "",
                payload_digest=row.payload,
                tokens=SharedTokens.start(TokenIds()),  # the tokens are elsewhere
            )
        )

    def record_failure(self, model_call_id: str, reason: str) -> None:
        """Add a call that did not commit. The first reason stays; neither is ever empty."""
        if not self.retired:
            self.failures.setdefault(model_call_id or NO_CALL, reason or NO_REASON)

    # --- reading ---------------------------------------------------------------------------------

    def decide(self, decision: Callable[[RolloutLineage], Verdict]) -> LineageResolution:
        """A decision over the committed rows; the match carries its whole staging chain."""
        found = resolution(decision(self.lineage))
        if found.match is None:
            return found
        chain = tuple(self.chain_of(found.match.model_call_id))
        return replace(found, match=replace(found.match, staging_chain=chain))

    def chain_of(self, model_call_id: str) -> list[str]:
        """The staging keys from the root to this committed call."""
        keys: list[str] = []
        call: str | None = model_call_id
        visited: set[str] = set()
        while call is not None and call in self.committed and call not in visited:
            visited.add(call)  # rows are not verified here: they may name each other
            row = self.committed[call]
            keys.append(row.row["staging_key"])
            if row.chain is not None:
                keys.extend(reversed(row.chain))
                break
            call = row.row.get("parent_call_id")
        return keys[::-1]

    def manifest(self) -> dict[str, Any]:
        """The wire form of ``RolloutManifest``; an incomplete row counts as a failure."""
        failures = dict(self.failures)
        records = []
        for call_id, stamped in self.committed.items():
            reason = _incomplete(stamped.row)
            if reason:
                failures.setdefault(call_id, reason)
            else:
                records.append(dict(stamped.row))
        return manifest_body(self.rollout_id, records, failures)


def manifest_body(
    rollout_id: str, records: list[dict[str, Any]], failures: Mapping[str, str]
) -> dict[str, Any]:
    """The wire form of ``RolloutManifest``."""
    return {
        "schema_version": _STAGING_SCHEMA_VERSION,
        "rollout_id": rollout_id,
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


def _incomplete(row: Mapping[str, Any]) -> str:
    if not row.get("response_id"):
        return LEDGER_ROW_MISSING_RESPONSE_ID_REASON
    if not row.get("chain_hash") or not row.get("cumulative_hash"):
        return LEDGER_ROW_MISSING_CHAIN_HASH_REASON
    return ""
