"""Bodies of the control routes, as they stand in the OpenAPI document.

Field names are the wire contract (spec 05 "Shapes"). Requests refuse wrong types rather than
converting them; only where a typing error in a name would change the result are unknown names
refused too. Snapshot and trajectory bodies are written by their own modules; their models here
describe them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    field_validator,
)

from middleware.paths import MAX_ID_LENGTH
from middleware.protocols import IncompleteReason, RolloutStatus
from middleware.records import TokenEntry

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
MAX_BATCH = 10_000
MAX_PAGE = 1000

MAX_BUDGET = 2**53 - 1
MAX_TTL_S = 366 * 86_400.0
MAX_LABELS = 64
LabelName = Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]
LabelValue = Annotated[str, Field(max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*$")]

Identifier = Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH, pattern=ID_PATTERN)]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": True})


class ErrorDetail(_Answer):
    """Who has to act (``type``), what it is (``code``), and what to do (``message``)."""

    type: str
    code: str
    message: str


class ErrorBody(_Answer):
    """The one shape of every error."""

    error: ErrorDetail


class StaleSnapshotBody(ErrorBody):
    """A refused retire, with the state to read next. Nothing was removed."""

    snapshot_id: str | None = None
    version: int | None = None


class ReasonBody(BaseModel):
    """One cause for which a rollout must be masked."""

    code: str
    model_call_id: str
    detail: str
    at: float

    @classmethod
    def of(cls, reason: IncompleteReason) -> ReasonBody:
        """The wire form of a stored reason."""
        return cls(
            code=reason.code, model_call_id=reason.model_call_id, detail=reason.detail, at=reason.at
        )


class DriftBody(BaseModel):
    """A call whose prompt leaves its parent's tokens after the first ``drift_at``."""

    model_call_id: str
    drift_at: int | None
    parent_call_id: str | None


class StatusBody(BaseModel):
    """Counts and state of one rollout; no token arrays."""

    rollout_id: str
    state: Literal["unknown", "open", "frozen", "retired"]
    calls: int
    open_intents: list[str]
    prompt_tokens: int
    generated_tokens: int
    incomplete: bool
    incomplete_reasons: list[ReasonBody]
    resolutions: dict[str, int]
    drifted_calls: int
    drifted: list[DriftBody]
    first_call_at: float | None
    last_call_at: float | None
    snapshot_id: str | None
    version: int
    labels: dict[str, str]
    max_calls: int | None
    max_generated_tokens: int | None
    expires_at: float | None

    @classmethod
    def of(cls, status: RolloutStatus) -> StatusBody:
        """The wire form of a store's status."""
        return cls(
            rollout_id=status.rollout_id,
            state=status.state,
            calls=status.calls,
            open_intents=list(status.open_intents),
            prompt_tokens=status.prompt_tokens,
            generated_tokens=status.generated_tokens,
            incomplete=status.incomplete,
            incomplete_reasons=[ReasonBody.of(reason) for reason in status.incomplete_reasons],
            resolutions={"root": 0, "resolved": 0, "unresolved": 0, **status.resolutions},
            drifted_calls=status.drifted_calls,
            drifted=[DriftBody.model_validate(one) for one in status.drifted],
            first_call_at=status.first_call_at,
            last_call_at=status.last_call_at,
            snapshot_id=status.snapshot_id,
            version=status.version,
            labels=dict(status.labels),
            max_calls=status.max_calls,
            max_generated_tokens=status.max_generated_tokens,
            expires_at=status.expires_at,
        )


class EntryBody(_Answer):
    """One recorded call; see ``middleware.records.TokenEntry``. With ``fields``: only those."""

    model_call_id: str | None = None
    prompt_token_ids: list[int] | None = None
    generation_token_ids: list[int] | None = None
    generation_log_probs: list[float] | None = None


class SnapshotBody(_Answer):
    """The immutable view of a frozen rollout. ``calls`` is the number of entries."""

    rollout_id: str
    snapshot_id: str
    version: int
    incomplete: bool
    incomplete_reasons: list[ReasonBody]
    calls: int
    entries: list[EntryBody]


class TrajectoriesBody(_Answer):
    """What was built: ``rebuilt_response`` (format responses) or ``rows`` (format traces)."""

    rollout_id: str
    builder: str
    mask_sample: bool
    metrics: dict[str, Any]
    snapshot_id: str
    version: int
    rebuilt_response: dict[str, Any] | None = None
    rows: list[dict[str, Any]] | None = None
    main_row: int | None = None
    error: str | None = None


def _entry_fields() -> tuple[str, ...]:
    # The optional fields are typed descriptors on the bases of TokenEntry.
    optional = {
        name
        for base in TokenEntry.__mro__
        if base.__module__ == TokenEntry.__module__ and base is not TokenEntry
        for name in vars(base)
        if not name.startswith("_")
    }
    return tuple(sorted(optional | set(TokenEntry.model_fields)))


ENTRY_FIELDS = _entry_fields()
_FIELD = f"({'|'.join(ENTRY_FIELDS)})"


class SnapshotQuery(BaseModel):
    """Query of ``GET R/snapshot``."""

    model_config = ConfigDict(extra="forbid")

    fields: str | None = Field(
        None,
        description="comma-separated entry fields to return",
        json_schema_extra={"pattern": f"^{_FIELD}(,{_FIELD})*$"},
    )
    full_prompts: bool = Field(False, description="rebuild delta prompts")

    @field_validator("fields")
    @classmethod
    def _known_fields(cls, value: str | None) -> str | None:
        unknown = [name for name in (value or "").split(",") if name not in ENTRY_FIELDS]
        if value is not None and unknown:
            raise ValueError(f"no entry field {unknown[0]!r}; known are {', '.join(ENTRY_FIELDS)}")
        return value

    @property
    def field_names(self) -> tuple[str, ...] | None:
        """The fields asked for, each once; None: all of them."""
        return None if self.fields is None else tuple(dict.fromkeys(self.fields.split(",")))


class TrajectoriesQuery(BaseModel):
    """Query of ``GET R/trajectories``."""

    model_config = ConfigDict(extra="forbid")

    builder: Literal["prefix_merging", "per_request"] = "prefix_merging"
    format: Literal["responses", "traces"] = "responses"
    fragments: Literal["include", "exclude"] = Field(
        "include", description="format traces: whether rows may start at a fragment"
    )
    terminal_call_id: Identifier | None = Field(None, description="the call that was scored")
    terminal_response_id: str | None = Field(
        None, min_length=1, description="the response id that the harness says it kept"
    )


class TrajectoriesRequest(TrajectoriesQuery):
    """Body of ``POST R/trajectories``."""

    verified_response: dict[str, Any] | None = Field(
        None, description="the response that the verifier scored"
    )


def _whole_number(value: Any) -> Any:
    """JSON knows no integers: 3.0 is 3, but neither "3" nor true is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Budget = Annotated[int, Field(ge=0, le=MAX_BUDGET, strict=True), BeforeValidator(_whole_number)]


class RegisterRequest(BaseModel):
    """Body of ``PUT R``; what is left out is not limited."""

    model_config = ConfigDict(extra="forbid")

    max_calls: Budget | None = None
    max_generated_tokens: Budget | None = None
    ttl_s: float | None = Field(
        None,
        gt=0,
        le=MAX_TTL_S,
        strict=True,
        allow_inf_nan=False,
        description="seconds from now, after which an open rollout is frozen incomplete",
    )
    labels: dict[LabelName, LabelValue] = Field(
        default_factory=dict,
        max_length=MAX_LABELS,
        json_schema_extra={"additionalProperties": False},  # other names are refused
    )


class RetireRequest(BaseModel):
    """The snapshot that was consumed, as freeze or snapshot named it."""

    snapshot_id: StrictStr
    version: StrictInt


class RetiredBody(BaseModel):
    """The rollout is gone but for its tombstone."""

    retired: Literal[True] = True


class DeletedBody(BaseModel):
    """The id is free again. ``existed``: whether there was anything to clear."""

    deleted: Literal[True] = True
    existed: bool


class ListQuery(BaseModel):
    """Query of ``GET /ng-rollout``."""

    model_config = ConfigDict(extra="forbid")

    state: Literal["open", "frozen", "retired"] | None = None
    prefix: str = Field("", max_length=MAX_ID_LENGTH, description="ids that start with this")
    limit: int = Field(100, ge=1, le=MAX_PAGE)
    cursor: str = Field("", description="next_cursor of the page before")


class ListBody(BaseModel):
    """One page of rollouts in id order."""

    rollouts: list[StatusBody]
    next_cursor: str | None


class BatchRequest(BaseModel):
    """One operation on many rollouts. Each id has its own result or error.

    Retire takes the consumed snapshots from ``snapshots``; an id without one is retired at the
    state that it is frozen in now.
    """

    model_config = ConfigDict(extra="forbid")

    op: Literal["freeze", "retire", "delete"]
    ids: list[StrictStr] = Field(max_length=MAX_BATCH)
    snapshots: dict[str, RetireRequest] = Field(default_factory=dict)


class BatchBody(BaseModel):
    """Per id: what the single route answers, or its error body."""

    results: dict[str, dict[str, Any]]


class SweepRequest(BaseModel):
    """Tombstones older than this are removed; a late writer of theirs is no longer fenced."""

    model_config = ConfigDict(extra="forbid")

    older_than_seconds: float = Field(86_400.0, ge=0, strict=True, allow_inf_nan=False)


class SweepBody(BaseModel):
    """How many tombstones were removed."""

    removed: int


class HealthBody(BaseModel):
    """The process answers."""

    status: Literal["ok", "ready"]


class VersionBody(BaseModel):
    """What runs here, and which record formats it speaks."""

    name: Literal["token-capture"] = "token-capture"
    version: str
    record_schema_version: int
    digest_version: int
    fingerprint_version: int
