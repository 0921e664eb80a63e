"""The contracts between capture and custody: sinks, sources, resolvers and their value types.

Every store passes ``capture_server.conformance``. The protocols come in two sizes: the seed's
minimum (``TokenSink``, ``TokenSource``, ``LineageResolver``) that a framework's own transport
must have, and ``CaptureStore``, which our stores offer on top and which the HTTP layer uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from middleware.records import ParentResolutionStatus, TokenEntry, TokenIds

RolloutState = Literal["unknown", "open", "frozen", "retired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncompleteReason:
    """Why a rollout must be masked. One durable row per cause."""

    code: str  # e.g. "missing_token_ids", "dangling_intent", "store_failure"
    model_call_id: str = ""
    detail: str = ""
    at: float = 0.0  # Unix time


@dataclass(frozen=True, slots=True)
class TokenCaptureSnapshot:
    """An immutable view of one frozen rollout.

    ``entries`` are unique per call id and in no meaningful order. ``snapshot_id`` names the
    freeze; ``version`` grows with every later durable change (``mark_incomplete``).
    """

    rollout_id: str
    entries: Sequence[TokenEntry]
    incomplete: bool
    snapshot_id: str
    version: int
    incomplete_reasons: Sequence[IncompleteReason] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatus:
    """What ``GET R`` answers; keys as in the HTTP API. No token arrays."""

    rollout_id: str
    state: RolloutState
    calls: int = 0
    open_intents: Sequence[str] = ()
    prompt_tokens: int = 0  # sum of the calls' full prompt lengths
    generated_tokens: int = 0
    incomplete: bool = False
    incomplete_reasons: Sequence[IncompleteReason] = ()
    resolutions: Mapping[str, int] = field(
        default_factory=lambda: {"root": 0, "resolved": 0, "unresolved": 0}
    )
    drifted_calls: int = 0
    # per drifted call: model_call_id, drift_at (tokens kept of the parent's), parent_call_id
    drifted: Sequence[Mapping[str, Any]] = ()
    first_call_at: float | None = None
    last_call_at: float | None = None
    snapshot_id: str | None = None
    version: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    # as registered; None: no limit
    max_calls: int | None = None
    max_generated_tokens: int | None = None
    expires_at: float | None = None  # Unix time


@dataclass(frozen=True, slots=True, kw_only=True)
class CallIntent:
    """The note that a call is about to generate, written before dispatch.

    ``request_digest`` is the sha256 hex of the body the agent sent ("" = unknown);
    ``observed`` is False for a request whose answer we cannot read (``unobserved_path``).
    ``holder`` names the process that serves the call ("" = the one that writes the intent).
    ``attempt``: the same id with the same non-empty attempt is the same intent sent again after
    a lost answer, and changes nothing; if it was cancelled meanwhile it is open again. "" = the
    store makes one. Whoever names it cancels it himself when he gives up after a failure.
    """

    rollout_id: str
    model_call_id: str
    request_digest: str = ""
    created_at: float = 0.0
    observed: bool = True
    holder: str = ""
    attempt: str = ""


class IntentTicket(Protocol):
    """What ``open_intent`` returns: the intent is visible and survives a kill from now on."""

    @property
    def first_call(self) -> bool:
        """No call with another request body was held when the intent was written."""

    async def wait_durable(self) -> None:
        """Return when the intent is on disk; raise ``StoreUnavailableError`` if that failed."""


@runtime_checkable
class TokenSink(Protocol):
    """Where finished records go."""

    async def put(self, entry: TokenEntry) -> None:
        """Store one record; return when it is durable and visible to every worker's resolver.

        The same call id with the same canonical bytes is a no-op.

        Raises:
            CallIdConflictError: same call id, other payload (the rollout turns incomplete).
            TokenCaptureFrozenError: after freeze.
            TokenCaptureRetiredError: after retire.
            StoreUnavailableError: the record is not durable.
        """

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Durably note that a call was lost. Works after freeze and bumps the version."""

    async def close(self) -> None:
        """Release resources. Idempotent; nothing is buffered by then."""


@runtime_checkable
class TokenSource(Protocol):
    """Where a trainer freezes, reads and retires."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Fence the rollout and return its snapshot. Idempotent; an unknown id is fenced too."""

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Retire exactly this snapshot; False if the state changed since (nothing is removed)."""

    async def close(self) -> None:
        """Release resources. Idempotent."""


@runtime_checkable
class CaptureStore(TokenSink, TokenSource, Protocol):
    """What our stores offer: sink and source plus intents, notes, fences and listing."""

    async def open_intent(self, intent: CallIntent) -> IntentTicket:
        """Write the intent before dispatch (visible and kill-safe on return; disk: the ticket).

        Raises:
            CallIdConflictError: the call id already has an intent or an entry.
            TokenCaptureFrozenError: the rollout is frozen or being frozen.
            TokenCaptureRetiredError: the rollout is retired.
            StoreUnavailableError: nothing was written; the call must be refused.
        """

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """``open_intent`` and wait until it is on disk (the seed's form)."""

    async def cancel_call(self, rollout_id: str, model_call_id: str, reason: str = "") -> None:
        """Close an intent of which nothing generated reached the client."""

    async def put_choices(self, entries: Sequence[TokenEntry], intent_id: str) -> None:
        """``put`` for the choices of one request (ids ``<intent_id>.<i>``); the last closes it."""

    async def note_delivery(
        self, rollout_id: str, model_call_id: str, notes: Mapping[str, Any]
    ) -> None:
        """Merge later notes into a stored record: ``delivered``, ``sink_ms``.

        Not waited for on the way out and not fsynced; dropped (version unchanged) after freeze.
        """

    async def mark_incomplete(
        self, rollout_id: str, model_call_id: str = "", reason: str = "", detail: str = ""
    ) -> None:
        """As in ``TokenSink``, with the reason's code and a detail for humans."""

    async def fence(self, rollout_id: str) -> Sequence[str]:
        """Refuse new intents from now on (durable); return the ids of the open intents.

        First half of a freeze: open calls may still be put. The state stays ``open``.
        """

    async def snapshot(self, rollout_id: str) -> TokenCaptureSnapshot:
        """The snapshot of a frozen rollout, without freezing.

        Raises:
            NotFrozenError: open or unknown.
            TokenCaptureRetiredError: retired.
        """

    async def status(self, rollout_id: str) -> RolloutStatus:
        """Counts and state; ``unknown`` for an id never seen."""

    async def list_rollouts(
        self, *, state: str | None = None, prefix: str = "", limit: int = 100, cursor: str = ""
    ) -> tuple[Sequence[RolloutStatus], str | None]:
        """One page of rollouts in id order, and the cursor of the next (None: the last)."""

    async def delete(self, rollout_id: str) -> bool:
        """Clear a rollout unconditionally, before its id is reused."""

    async def sweep_retired(self, older_than_seconds: float) -> int:
        """Remove tombstones older than that; return how many."""

    async def healthy(self) -> str | None:
        """None when writes work, else the reason (``/readyz``)."""

    def is_process_shared(self) -> bool:
        """Whether other processes see what this one writes."""


@dataclass(frozen=True, slots=True)
class LineageMatch:
    """The uniquely proven parent.

    ``cumulative_token_ids`` is the parent's prompt + generation as one shared compact array;
    do not write to it. The staging fields serve token custody outside this process (spec 07).
    The last three say what prefix supply asks of the parent (spec 06); "" = not recorded.
    """

    model_call_id: str
    cumulative_token_ids: TokenIds
    digest: str = ""
    staging_chain: tuple[str, ...] = ()
    prev_len: int = 0
    chain_hash: str = ""
    prompt_config_digest: str = ""
    system_digest: str = ""
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class LineageResolution:
    """One immutable request-time decision. ``match`` is set exactly when ``resolved``."""

    status: ParentResolutionStatus
    match: LineageMatch | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageQuery:
    """What a request says about its history, as hashes (small enough for an RPC).

    ``context_digests`` maps every item count at which the parent's context may end to the
    digest of that many leading items: the positions inside the last run of model-authored items.
    """

    is_root: bool
    fingerprint: str = ""
    context_digests: Mapping[int, str] = field(default_factory=dict)
    prompt_config_digest: str = ""


@runtime_checkable
class LineageResolver(Protocol):
    """Decides which recorded call a request continues; never guesses."""

    async def resolve(
        self, rollout_id: str, request_items: list[dict[str, Any]]
    ) -> LineageResolution:
        """Hash and match the request's items.

        Raises:
            ValueError: the items cannot be hashed (the caller records ``lookup_error``).
        """

    def is_process_shared(self) -> bool:
        """Whether several workers see the same committed entries."""

    async def close(self) -> None:
        """Release resources. Idempotent."""


@runtime_checkable
class QueryResolver(LineageResolver, Protocol):
    """What our resolvers offer on top: hashes in place of conversations, and token prompts."""

    async def resolve_query(self, rollout_id: str, query: LineageQuery) -> LineageResolution:
        """``resolve`` for a request that was hashed already."""

    async def resolve_tokens(
        self, rollout_id: str, prompt_token_ids: TokenIds, *, dispatched_at: float
    ) -> LineageResolution:
        """The parent of a token prompt (dialect ``completions``), by longest exact prefix."""

    async def resolve_response_id(self, rollout_id: str, response_id: str) -> LineageResolution:
        """The committed call that served ``response_id`` (``previous_response_id``).

        The caller keeps the link only if the new prompt starts with its cumulative tokens.
        """

    async def resolve_call_id(self, rollout_id: str, model_call_id: str) -> LineageResolution:
        """The committed call of that id (``x-parent-model-call-id``), to be verified likewise."""


class CaptureLedger(LineageResolver, Protocol):
    """Resolver plus the token-free ledger of external staging (spec 07)."""

    async def record(self, commit: Any) -> None: ...  # a staging CaptureLedgerCommit
    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None: ...
    async def manifest(self, rollout_id: str) -> dict[str, Any]: ...
    async def has_rows(self, rollout_id: str) -> bool: ...
    async def retire(self, rollout_id: str) -> None: ...
    async def delete(self, rollout_id: str) -> None: ...


_installed: dict[str, Any] = {}


def install_token_sink(sink: TokenSink | None) -> None:
    """Set (or clear with None) this process's default sink."""
    _installed["sink"] = sink


def installed_token_sink() -> TokenSink | None:
    """The process-wide sink, if one was installed."""
    sink: TokenSink | None = _installed.get("sink")
    return sink


def install_token_source(source: TokenSource | None) -> None:
    """Set (or clear with None) this process's source. The caller keeps ownership."""
    _installed["source"] = source


def installed_token_source() -> TokenSource | None:
    """The process-wide source, if one was installed."""
    source: TokenSource | None = _installed.get("source")
    return source


def install_lineage_store(store: LineageResolver | None) -> None:
    """Set (or clear with None) this process's request-time resolver."""
    _installed["lineage"] = store


def installed_lineage_store() -> LineageResolver | None:
    """The process-wide resolver, if one was installed."""
    store: LineageResolver | None = _installed.get("lineage")
    return store
