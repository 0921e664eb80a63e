"""Bodies of the sink/resolver RPC, as they stand in the OpenAPI document.

Internal: they change together with ``stores.remote``, which speaks them. Every request carries
the version ``v``; a server refuses one that it does not know, and unknown keys, so that a newer
client is never half understood. Token arrays travel packed (``{"dtype", "b64"}``).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from capture_server.control_models import ID_PATTERN, ErrorDetail, Identifier
from middleware.paths import MAX_ID_LENGTH

RPC_VERSION: Final = 1
_MAX_NAME: Final = 200
_MAX_DETAIL: Final = 20_000


def _integral(value: Any) -> Any:
    """JSON has one kind of number: 3.0 is an integer there."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, Field(ge=0), BeforeValidator(_integral)]
Version = Annotated[int, Field(ge=RPC_VERSION, le=RPC_VERSION), BeforeValidator(_integral)]
UnixTime = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    v: Version = Field(description="version of this body")


class IntentRequest(_Request):
    """A call is about to generate. ``attempt`` makes a second delivery a no-op."""

    request_digest: str = Field("", max_length=_MAX_NAME)
    created_at: UnixTime = 0.0
    observed: bool = True
    holder: str = Field("", max_length=_MAX_NAME, description="the process that serves the call")
    attempt: str = Field(min_length=1, max_length=_MAX_NAME)


class IntentBody(BaseModel):
    """``durable``: on disk already; if not, ask again with ``durable=true`` to wait for it."""

    first_call: bool
    durable: bool


class CancelledBody(BaseModel):
    """The intent is closed, or was not open."""

    cancelled: Literal[True] = True


class EntriesRequest(_Request):
    """The records of one request: its own, or its choices ``<call>.<i>``.

    Each is a ``TokenEntry`` in its JSON form; token arrays are lists or packed.
    """

    entries: list[dict[str, Any]] = Field(min_length=1)


class StoredBody(BaseModel):
    """Whether the records are durable and visible.

    False: ``if_open``, the intent was closed and no record is there; or ``error`` says what
    the records lack (a body of the right form can still hold no record, or one that belongs
    elsewhere).
    """

    stored: bool
    error: ErrorDetail | None = None


class NotesRequest(_Request):
    """Later notes on a stored record."""

    notes: dict[str, bool | Annotated[float, Field(allow_inf_nan=False)] | str]


class NotedBody(BaseModel):
    """The notes are taken in, or came after the freeze and are dropped."""

    noted: Literal[True] = True


class IncompleteRequest(_Request):
    """Why the rollout must be masked; the call id may be empty."""

    model_call_id: str = Field("", max_length=MAX_ID_LENGTH, pattern=f"^$|{ID_PATTERN}")
    reason: str = Field("", max_length=_MAX_NAME)
    detail: str = Field("", max_length=_MAX_DETAIL)


class MarkedBody(BaseModel):
    """The mark is durable."""

    incomplete: Literal[True] = True


class FenceBody(BaseModel):
    """New calls are refused; ``open_intents`` may still be closed by their records."""

    open_intents: list[str]


class ContextForm(BaseModel):
    """The digest of a request's first ``num_items`` items."""

    model_config = ConfigDict(extra="forbid", strict=True)

    num_items: Count
    digest: str


class QueryForm(BaseModel):
    """See ``middleware.protocols.LineageQuery``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    is_root: bool
    fingerprint: str = ""
    context_digests: list[ContextForm] = Field(default_factory=list)
    prompt_config_digest: str = ""


class PackedIds(BaseModel):
    """Token ids, little-endian, base64."""

    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: Literal["<i4", "<i8", "<u8"]
    b64: str


class ByQuery(_Request):
    """By the hashes of a request."""

    by: Literal["query"]
    query: QueryForm


class ByTokens(_Request):
    """By a token prompt; ids that cannot be read are ``unresolved``/``lookup_error``."""

    by: Literal["tokens"]
    prompt_token_ids: PackedIds
    dispatched_at: UnixTime = 0.0


class ByResponse(_Request):
    """By the id of a served response (``previous_response_id``)."""

    by: Literal["response_id"]
    response_id: str


class ByCall(_Request):
    """By the id of a call (``x-parent-model-call-id``)."""

    by: Literal["model_call_id"]
    model_call_id: Identifier


ResolveRequest = Annotated[ByQuery | ByTokens | ByResponse | ByCall, Field(discriminator="by")]


class MatchBody(BaseModel):
    """The proven parent; see ``middleware.protocols.LineageMatch``."""

    model_call_id: str
    cumulative_token_ids: PackedIds
    digest: str
    staging_chain: list[str]
    prev_len: int
    chain_hash: str
    prompt_config_digest: str
    system_digest: str
    finish_reason: str


class ResolveBody(BaseModel):
    """The decision; ``match`` is set exactly when ``resolved``."""

    status: Literal["root", "resolved", "unresolved"]
    reason: str
    match: MatchBody | None
