"""The wire models of external staging: what workers, ledger and finalizer hand to each other.

Invariant: a validated model is consistent in itself: lengths add up, mode and position fit the
parent, a staged call hashes to the digest it carries. What ties several of them together is
checked by ``rebuild``. Unknown versions and undeclared keys are refused. Source: spec 07 and 10.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, StrictInt, model_validator

from capture_server.staging.digest import (
    EMPTY_EXTRAS_DIGEST,
    EXTRAS_DIGEST_VERSION,
    STAGING_DIGEST_VERSION,
    STAGING_SCHEMA_VERSION,
    compute_extras_digest,
    compute_staging_digest,
)
from middleware.records import (
    LEDGER_ROW_MISSING_CHAIN_HASH_REASON,
    LEDGER_ROW_MISSING_RESPONSE_ID_REASON,
    UNCOMMITTED_CALL_REASON,
    UNRESOLVED_PARENT_REASON,
)
from middleware.staging_wire import (
    CaptureAdmission,
    CaptureMode,
    DigestHex,
    ExactFloat,
    FloatList,
    Identifier,
    NonNegativeInt,
    Version1,
    Version2,
    WireModel,
    check_placement,
)

__all__ = [
    "EMPTY_EXTRAS_DIGEST",
    "EXTRAS_DIGEST_VERSION",
    "INVALID_COMMIT_COORDS_REASON",
    "LEDGER_ROW_MISSING_CHAIN_HASH_REASON",
    "LEDGER_ROW_MISSING_RESPONSE_ID_REASON",
    "STAGING_DIGEST_VERSION",
    "STAGING_SCHEMA_VERSION",
    "TERMINAL_AMBIGUOUS",
    "TERMINAL_DUPLICATE_CALL_ID",
    "TERMINAL_NO_RECORDS",
    "TERMINAL_NO_ROOT",
    "TERMINAL_ORPHANED_ROW",
    "TERMINAL_SELECTED",
    "UNCOMMITTED_CALL_REASON",
    "UNRESOLVED_PARENT_REASON",
    "WORKER_CAPTURE_FAILED_REASON",
    "WORKER_MISSING_COMMIT_COORDS_REASON",
    "CallRecord",
    "CaptureAdmission",
    "CaptureDisposition",
    "CaptureLedgerCommit",
    "CaptureMode",
    "CommitCoords",
    "ManifestFailure",
    "RolloutManifest",
    "RolloutReceipt",
    "StageResult",
    "StagedCallBaseSnapshot",
    "StagedCallRecord",
    "StagedCallSnapshot",
    "staging_key",
]

WORKER_MISSING_COMMIT_COORDS_REASON: Final = "worker_response_missing_commit_coordinates"
WORKER_CAPTURE_FAILED_REASON: Final = "worker_capture_failed"
INVALID_COMMIT_COORDS_REASON: Final = "invalid_worker_commit_coordinates"

TERMINAL_SELECTED: Final = "selected"
TERMINAL_NO_RECORDS: Final = "no_records"
TERMINAL_DUPLICATE_CALL_ID: Final = "duplicate_call_id"
TERMINAL_ORPHANED_ROW: Final = "orphaned_row"
TERMINAL_NO_ROOT: Final = "no_root"
TERMINAL_AMBIGUOUS: Final = "ambiguous_terminal"

CaptureDisposition = Literal["staged", "capture_failed"]


def staging_key(rollout_id: str, model_call_id: str) -> str:
    """The name under which a delta is staged, unless a sink mints names of its own."""
    return f"{rollout_id}/{model_call_id}"


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class _DigestWireModel(WireModel):
    """Models that carry hashes name the rules that made them."""

    schema_version: Version2 = STAGING_SCHEMA_VERSION
    digest_version: Version2 = STAGING_DIGEST_VERSION
    extras_digest_version: Version1 = EXTRAS_DIGEST_VERSION


def _check_sum(prev_len: int, delta_len: int, cum_len: int) -> None:
    if cum_len != prev_len + delta_len:
        raise ValueError(f"cum_len {cum_len} is not prev_len {prev_len} + delta_len {delta_len}")


# --- a call -------------------------------------------------------------------------------------


class CommitCoords(_DigestWireModel):
    """A worker's answer for one call: where its delta is staged and what it hashes to.

    The hashes and the key are there when it was staged; a failed capture may lack them.
    """

    rollout_id: Identifier
    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    prev_len: NonNegativeInt
    delta_len: NonNegativeInt
    cum_len: NonNegativeInt
    weight_version: NonNegativeInt
    disposition: CaptureDisposition = "staged"
    digest: DigestHex | None = None
    extras_digest: DigestHex | None = None
    staging_key: Identifier | None = None
    chain_hash: DigestHex | None = None
    cumulative_hash: DigestHex | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_sum(self.prev_len, self.delta_len, self.cum_len)
        if (self.parent_call_id is None) != (self.prev_len == 0):
            raise ValueError("a root starts at 0, a child behind its parent's tokens")
        if self.disposition == "capture_failed":
            return self
        if self.delta_len == 0:
            raise ValueError("a staged call has at least one token")
        names = ("digest", "extras_digest", "staging_key", "chain_hash", "cumulative_hash")
        if missing := [name for name in names if getattr(self, name) is None]:
            raise ValueError(f"staged coordinates lack {', '.join(missing)}")
        return self


class CallRecord(_DigestWireModel):
    """One token-free row of a rollout's ledger.

    ``response_id`` is the id that the agent was served, ``admitted_at`` Unix time;
    ``output_fingerprint`` is of the served answer, ``continuation_fingerprint`` of the
    conversation with it, both by the rules of ``fingerprint_version``.
    """

    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    prev_len: NonNegativeInt
    delta_len: NonNegativeInt
    cum_len: NonNegativeInt
    weight_version: NonNegativeInt
    digest: DigestHex
    extras_digest: DigestHex
    staging_key: Identifier
    mode: CaptureMode = "token_in"
    chain_hash: DigestHex
    cumulative_hash: DigestHex
    response_id: Identifier
    admitted_at: ExactFloat | None = None
    output_fingerprint: DigestHex | None = None
    continuation_fingerprint: DigestHex | None = None
    fingerprint_version: NonNegativeInt = 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_placement(self.parent_call_id, self.mode, self.prev_len)
        _check_sum(self.prev_len, self.delta_len, self.cum_len)
        if self.delta_len == 0:
            raise ValueError("a ledger row stands for at least one token")
        return self


class CaptureLedgerCommit(WireModel):
    """A staged call on its way into the ledger.

    ``record`` is the manifest row; the items (as served, no tokens) and ``staging_chain`` (the
    ancestors' keys, with or without the call's own at the end) feed parent resolution only.
    """

    schema_version: Version2 = STAGING_SCHEMA_VERSION
    rollout_id: Identifier
    record: CallRecord
    staging_chain: Annotated[tuple[Identifier, ...], BeforeValidator(_as_tuple)] = ()
    request_items: list[dict[str, Any]]
    response_items: list[dict[str, Any]]


# --- what is staged -----------------------------------------------------------------------------


class StagedCallBaseSnapshot(_DigestWireModel):
    """A staged call without its extras: all that verifying and linearizing read.

    The three deltas are parallel, ``delta_len`` long. Building one recomputes ``digest``.
    """

    rollout_id: Identifier
    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    mode: CaptureMode
    prev_len: NonNegativeInt
    delta_len: NonNegativeInt
    cum_len: NonNegativeInt
    weight_version: NonNegativeInt
    digest: DigestHex
    token_ids_delta: list[StrictInt]
    token_mask_delta: FloatList
    generation_log_probs_delta: FloatList
    extras_digest: DigestHex = EMPTY_EXTRAS_DIGEST
    chain_hash: DigestHex
    cumulative_hash: DigestHex

    @property
    def staging_key(self) -> str:
        """The key that ``staging_key`` gives this call."""
        return staging_key(self.rollout_id, self.model_call_id)

    @model_validator(mode="after")
    def _hashes_to_digest(self) -> Self:
        if staging_digest_of(self) != self.digest:
            raise ValueError("the digest is not that of the content")
        return self


class StagedCallSnapshot(StagedCallBaseSnapshot):
    """A staged call with its extras, which must be those that the digest commits to."""

    extras: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _extras_hash(self) -> Self:
        if compute_extras_digest(self.extras) != self.extras_digest:
            raise ValueError("the extras are not those of extras_digest")
        return self


class StagedCallRecord(StagedCallSnapshot):
    """What a worker hands to its sink."""


_DIGEST_FIELDS: Final = (
    "schema_version",
    "digest_version",
    "extras_digest_version",
    "rollout_id",
    "model_call_id",
    "parent_call_id",
    "mode",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "token_ids_delta",
    "token_mask_delta",
    "generation_log_probs_delta",
    "extras_digest",
    "chain_hash",
    "cumulative_hash",
)


def staging_digest_of(staged: StagedCallBaseSnapshot) -> str:
    """The digest that a staged call's own fields give.

    Raises:
        ValueError: the fields contradict each other.
    """
    return compute_staging_digest(**{name: getattr(staged, name) for name in _DIGEST_FIELDS})


class StageResult(WireModel):
    """A sink's answer: staged durably under ``staging_key``, or not and why."""

    schema_version: Version2 = STAGING_SCHEMA_VERSION
    ok: bool
    staging_key: Identifier | None = None
    error: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.ok and (self.staging_key is None or self.error is not None):
            raise ValueError("a staged call has a staging key and no error")
        return self


# --- a rollout ----------------------------------------------------------------------------------


class ManifestFailure(WireModel):
    """A call that poisons its rollout, with the reason (wire contract, spec 07)."""

    schema_version: Version2 = STAGING_SCHEMA_VERSION
    model_call_id: Identifier
    reason: Identifier


class RolloutManifest(WireModel):
    """A rollout's ledger: committed rows in commit order, and failures."""

    schema_version: Version2 = STAGING_SCHEMA_VERSION
    rollout_id: Identifier
    records: list[CallRecord] = Field(default_factory=list)
    failures: list[ManifestFailure] = Field(default_factory=list)


class RolloutReceipt(_DigestWireModel):
    """A finalizer's verdict over a rollout: trainable from one terminal call, or poisoned.

    ``terminal_selection`` says what named the terminal; ``reward`` is not interpreted here.
    """

    rollout_id: Identifier
    reward: ExactFloat | None = None
    terminal_model_call_id: Identifier | None = None
    manifest: list[CallRecord] = Field(default_factory=list)
    capture_poisoned: bool = False
    failure_reason: str | None = None
    terminal_selection: Literal["declared", "response_id", "content", "heuristic"] | None = None
    terminal_attribution_reason: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        known = {row.model_call_id for row in self.manifest}
        if len(known) != len(self.manifest):
            raise ValueError("two manifest rows have one call id")
        if self.capture_poisoned:
            return self
        if self.failure_reason is not None:
            raise ValueError("a receipt with a failure reason is poisoned")
        if self.terminal_model_call_id not in known:
            raise ValueError("the terminal is no row of the manifest")
        if self.terminal_selection is None:
            raise ValueError("the receipt does not say how its terminal was selected")
        return self
