"""The record of one model call: its tokens, its content, and the digests that prove both.

Invariant: an entry that exists is trainable in shape (equal lengths, valid ids, finite
log-probs) and its lineage fields agree with each other. Digest bytes are a wire contract: other
implementations hash the same bytes.

It does not decide who the parent is (``middleware.lineage``), nor where entries are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, Generic, Self, TypeVar, cast, overload

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from middleware.arrays import NO_LOG_PROB_SENTINEL, LogProbs, TokenIds
from middleware.canonical import loads_exact
from middleware.errors import InvalidRecordError
from middleware.served import (
    TOKEN_FIELDS,
    extract_token_fields,
    response_to_output_items,
    strip_token_fields,
)

__all__ = [
    "DIGEST_VERSION",
    "LEDGER_ROW_MISSING_CHAIN_HASH_REASON",
    "LEDGER_ROW_MISSING_RESPONSE_ID_REASON",
    "NO_LOG_PROB_SENTINEL",
    "TOKEN_ENTRY_MIN_SCHEMA_VERSION",
    "TOKEN_ENTRY_RECORD_SCHEMA_VERSION",
    "TOKEN_FIELDS",
    "UNCOMMITTED_CALL_REASON",
    "UNRESOLVED_PARENT_REASON",
    "LogProbs",
    "ParentResolutionStatus",
    "TokenEntry",
    "TokenIds",
    "canonical_bytes",
    "compute_digest",
    "compute_log_probs_digest",
    "cumulative_tokens",
    "encode_token_ids",
    "entry_from_json_bytes",
    "entry_to_json_bytes",
    "extract_token_fields",
    "pack_entry",
    "payload_digest",
    "response_to_output_items",
    "stamp_lineage",
    "strip_token_fields",
    "unpack_entry",
]

TOKEN_ENTRY_RECORD_SCHEMA_VERSION: Final = 1
TOKEN_ENTRY_MIN_SCHEMA_VERSION: Final = 1
DIGEST_VERSION: Final = 1
UNRESOLVED_PARENT_REASON: Final = "unresolved_parent"
UNCOMMITTED_CALL_REASON: Final = "request_finished_without_staged_coordinates"
LEDGER_ROW_MISSING_CHAIN_HASH_REASON: Final = "ledger_row_missing_chain_hash"
LEDGER_ROW_MISSING_RESPONSE_ID_REASON: Final = "ledger_row_missing_response_id"

_DIGEST_DOMAIN: Final = b"nemo-gym-tokens"
_LOG_PROBS_DOMAIN: Final = b"token-capture-log-probs"
_EMPTY_DIGEST: Final = hashlib.sha256(_DIGEST_DOMAIN).hexdigest()
_ARRAY_FIELDS: Final[dict[str, type[TokenIds] | type[LogProbs]]] = {
    "prompt_token_ids": TokenIds,
    "generation_token_ids": TokenIds,
    "generation_log_probs": LogProbs,
}
_ARRAY_NAMES: Final = set(_ARRAY_FIELDS)

T = TypeVar("T")


class ParentResolutionStatus(Enum):
    """Whether a call has a proven captured predecessor."""

    ROOT = "root"
    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"


class _Extra(Generic[T]):
    """Typed access to an optional extra: None while absent, and absent is not written.

    A declared field would put a null into the JSON of every entry that lacks it, and so change
    the canonical bytes of records that other writers made.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, entry: None, owner: type) -> Self: ...
    @overload
    def __get__(self, entry: BaseModel, owner: type) -> T | None: ...
    def __get__(self, entry: BaseModel | None, owner: type) -> T | Self | None:
        if entry is None:
            return self
        extras = entry.__pydantic_extra__ or {}
        return cast("T | None", extras.get(self._name))

    def __set__(self, entry: BaseModel, value: T | None) -> None:
        extras = entry.__pydantic_extra__
        assert extras is not None  # extra="allow"
        if value is None:
            extras.pop(self._name, None)
        else:
            extras[self._name] = value


class _KnownExtras:
    """What this project writes beyond the seed's fields; all optional. Source: spec 01."""

    dialect = _Extra[str]()
    engine = _Extra[str]()
    finish_reason = _Extra[str]()
    delivered = _Extra[bool]()
    sampling = _Extra[dict[str, Any]]()
    weight_version = _Extra[int | str]()
    weight_version_end = _Extra[int | str]()
    choice_index = _Extra[int]()
    guided = _Extra[Any]()
    agent_id = _Extra[str]()
    request_digest = _Extra[str]()
    prompt_config_digest = _Extra[str]()
    system_digest = _Extra[str]()
    first_call = _Extra[bool]()
    usage = _Extra[dict[str, Any]]()
    drift_at = _Extra[int]()
    prefix_reason = _Extra[str]()
    weight_versions = _Extra[list[dict[str, Any]]]()
    timings = _Extra[dict[str, Any]]()
    log_probs_digest = _Extra[str]()  # see ``compute_log_probs_digest``; absent from other writers


class TokenEntry(BaseModel, _KnownExtras):
    """One model call. Token arrays are held once, at the top level.

    ``generation_log_probs[i]`` belongs to ``generation_token_ids[i]``; ``token_item_index`` says
    which of ``output_items`` carried the arrays. ``prompt_is_delta``: ``prompt_token_ids`` is
    only what follows the resolved parent's cumulative tokens. ``created_at`` is the Unix time of
    dispatch. Source of the fields: spec 01.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    schema_version: int = TOKEN_ENTRY_RECORD_SCHEMA_VERSION
    rollout_id: str
    model_call_id: str
    model: str = ""
    prompt_token_ids: TokenIds
    generation_token_ids: TokenIds
    generation_log_probs: LogProbs
    routed_experts: Any | None = None
    output_items: list[dict[str, Any]] = Field(default_factory=list)
    token_item_index: int | None = None
    response_id: str | None = None
    created_at: float = 0.0
    parent_call_id: str | None = None
    cum_len: int | None = None
    digest: str | None = None
    parent_resolution: ParentResolutionStatus | None = None
    continuation_fingerprint: str = ""
    continuation_context_len: int = 0
    continuation_context_digest: str = ""
    parent_resolution_reason: str = ""
    fingerprint_version: int | None = None
    prompt_is_delta: bool = False
    prefix_requested: bool = False
    prefix_supplied: bool = False

    @field_validator("schema_version", mode="before")
    @classmethod
    def _refuse_other_schemas(cls, value: Any) -> int:
        if type(value) is not int or value != TOKEN_ENTRY_RECORD_SCHEMA_VERSION:
            raise ValueError(
                f"token entry schema_version {value!r} is not supported; this version reads and "
                f"writes {TOKEN_ENTRY_RECORD_SCHEMA_VERSION} (fields may mean something else)"
            )
        return value

    @field_validator(
        "token_item_index", "cum_len", "continuation_context_len", "fingerprint_version",
        "created_at", mode="before",
    )  # fmt: skip
    @classmethod
    def _refuse_no_numbers(cls, value: Any) -> Any:
        # Lenient reading would make numbers of these: a silent repair of a broken record.
        if isinstance(value, (bool, str, bytes)):
            raise ValueError(f"{type(value).__name__} is no number")  # noqa: TRY004 - pydantic collects these
        return value

    @field_validator("prompt_is_delta", "prefix_requested", "prefix_supplied", mode="before")
    @classmethod
    def _refuse_no_flags(cls, value: Any) -> Any:
        if not isinstance(value, bool):
            raise ValueError(f"{type(value).__name__} is no boolean")  # noqa: TRY004 - pydantic collects these
        return value

    @model_validator(mode="after")
    def _check_agreement(self) -> Self:
        ids, log_probs = len(self.generation_token_ids), len(self.generation_log_probs)
        if ids != log_probs:
            raise ValueError(
                f"{ids} generation_token_ids but {log_probs} generation_log_probs: each sampled "
                "token needs exactly one log-prob"
            )
        index = self.token_item_index
        if index is not None and not 0 <= index < len(self.output_items):
            raise ValueError(
                f"token_item_index {index} is no index into {len(self.output_items)} output_items"
            )
        _check_parent(self.parent_resolution, self.parent_call_id)
        if self.prompt_is_delta and self.parent_resolution is not ParentResolutionStatus.RESOLVED:
            raise ValueError("prompt_is_delta needs parent_resolution 'resolved'")
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        known = getattr(_KnownExtras, name, None)
        if isinstance(known, _Extra):
            known.__set__(self, value)
        else:
            super().__setattr__(name, _as_array(name, value))

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """As pydantic's. ``mode="json"`` alone gives plain lists several times faster."""
        if options != {"mode": "json"}:
            return super().model_dump(**options)
        form = _with_arrays(self)
        for name in _ARRAY_FIELDS:
            form[name] = form[name].tolist()
        return {name: form[name] for name in type(self).model_fields} | form  # declared order

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's; token arrays given as lists are checked and packed like everywhere."""
        packed = {name: _as_array(name, value) for name, value in (update or {}).items()}
        return super().model_copy(update=packed, deep=deep)


def _as_array(name: str, value: Any) -> Any:
    kind = _ARRAY_FIELDS.get(name)
    return value if kind is None else kind.of(value)


def _check_parent(status: ParentResolutionStatus | None, parent_call_id: str | None) -> None:
    if status is ParentResolutionStatus.RESOLVED:
        if not parent_call_id:
            raise InvalidRecordError("parent_resolution 'resolved' needs a parent_call_id")
    elif status is not None and parent_call_id is not None:
        raise InvalidRecordError(
            f"parent_resolution {status.value!r} must not have a parent_call_id "
            f"({parent_call_id!r})"
        )


# --- digests ---------------------------------------------------------------------------------


def encode_token_ids(token_ids: object) -> bytes:
    """1 byte version, 8 bytes big-endian count, then 8 bytes big-endian unsigned per id.

    Raises:
        InvalidRecordError: (a ``ValueError``) an id is no integer in ``0 <= id < 2**64``.
    """
    ids = TokenIds.of(token_ids).array
    return bytes([DIGEST_VERSION]) + ids.size.to_bytes(8, "big") + ids.astype(">u8").tobytes()


def compute_digest(token_ids: object) -> str:
    """sha256 hex over the digest domain and ``encode_token_ids``.

    The empty sequence's digest is that of the domain alone.

    Raises:
        InvalidRecordError: as ``encode_token_ids``.
    """
    ids = TokenIds.of(token_ids).array
    if not ids.size:
        return _EMPTY_DIGEST
    hasher = hashlib.sha256(_DIGEST_DOMAIN + bytes([DIGEST_VERSION]) + ids.size.to_bytes(8, "big"))
    hasher.update(ids.astype(">u8").data)
    return hasher.hexdigest()


def compute_log_probs_digest(log_probs: object) -> str:
    """sha256 hex over the log-probs as little-endian float64, behind a domain.

    The contract's digest covers tokens only; with this one a changed log-prob is noticed, too.
    """
    values = LogProbs.of(log_probs).array.astype("<f8", copy=False)
    return hashlib.sha256(_LOG_PROBS_DOMAIN + values.tobytes()).hexdigest()


def cumulative_tokens(entry: TokenEntry) -> TokenIds:
    """Prompt + generation: what a child's prompt must start with.

    Raises:
        InvalidRecordError: a delta entry needs its parent chain to be rebuilt first.
    """
    if entry.prompt_is_delta:
        raise InvalidRecordError(
            f"call {entry.model_call_id!r} stores a delta prompt; rebuild it through its parent"
        )
    return TokenIds.concat(entry.prompt_token_ids, entry.generation_token_ids)


def stamp_lineage(
    entry: TokenEntry,
    parent_call_id: str | None,
    *,
    parent_resolution: ParentResolutionStatus | None = None,
    cumulative: object = None,
) -> TokenEntry:
    """Set ``cum_len``, ``digest`` (both of the full sequence) and the parent fields.

    The entry is changed in place and returned. ``parent_resolution=None`` leaves the recorded
    status alone where it agrees with ``parent_call_id`` (callers of the seed's older form).

    Raises:
        InvalidRecordError: a delta entry without ``cumulative``; a ``cumulative`` that disagrees
            with a full entry or cannot be this delta's; a status without its parent.
    """
    status = parent_resolution if parent_resolution is not None else entry.parent_resolution
    _check_parent(status, parent_call_id)
    full = _full_sequence(entry, cumulative)
    entry.parent_call_id = parent_call_id
    entry.parent_resolution = status
    entry.cum_len = len(full)
    entry.digest = compute_digest(full)
    return entry


def _full_sequence(entry: TokenEntry, cumulative: object) -> TokenIds:
    if cumulative is None:
        return cumulative_tokens(entry)
    given = TokenIds.of(cumulative)
    own = TokenIds.concat(entry.prompt_token_ids, entry.generation_token_ids)
    start = len(given) - len(own)
    fits = start >= 0 if entry.prompt_is_delta else start == 0
    if not fits or given[start:] != own:
        raise InvalidRecordError(
            f"the cumulative tokens given for call {entry.model_call_id!r} do not agree with its "
            "own prompt and generation"
        )
    return given


# --- JSON and packed forms -------------------------------------------------------------------


def _without_arrays(entry: TokenEntry) -> dict[str, Any]:
    return BaseModel.model_dump(entry, mode="json", exclude=_ARRAY_NAMES)


def _with_arrays(entry: TokenEntry) -> dict[str, Any]:
    """The JSON form with numpy arrays in place of lists (orjson writes both alike)."""
    form = _without_arrays(entry)
    for name in _ARRAY_FIELDS:
        form[name] = getattr(entry, name).array
    return form


def _dumps(form: dict[str, Any], *, sort_keys: bool = False) -> bytes:
    option = orjson.OPT_SERIALIZE_NUMPY | (orjson.OPT_SORT_KEYS if sort_keys else 0)
    try:
        return orjson.dumps(form, option=option)
    except orjson.JSONEncodeError:
        # Content may hold what orjson refuses: integers beyond 64 bits, lone surrogates.
        plain = {k: v.tolist() if k in _ARRAY_FIELDS else v for k, v in form.items()}
        return json.dumps(plain, sort_keys=sort_keys, separators=(",", ":")).encode("ascii")


def entry_to_json_bytes(entry: TokenEntry) -> bytes:
    """The JSON form (``model_dump(mode="json")``) as bytes, without a Python object per token."""
    return _dumps(_with_arrays(entry))


def entry_from_json_bytes(data: bytes | str) -> TokenEntry:
    """Read the JSON form back.

    Raises:
        ValueError: no JSON, or no valid entry (pydantic's ``ValidationError``).
    """
    return TokenEntry.model_validate(loads_exact(data))


def canonical_bytes(entry: TokenEntry) -> bytes:
    """The bytes that decide whether two puts of one call id carry the same payload.

    orjson with sorted keys over the JSON form, without the notes that are added after the put
    (``delivered``, ``timings.sink_ms``). A ``timings`` that holds nothing else counts as absent.
    """
    form = _with_arrays(entry)
    form.pop("delivered", None)
    timings = form.get("timings")
    if isinstance(timings, dict):
        kept = {key: value for key, value in timings.items() if key != "sink_ms"}
        if kept:
            form["timings"] = kept
        else:
            del form["timings"]
    return _dumps(form, sort_keys=True)


def payload_digest(entry: TokenEntry) -> str:
    """sha256 hex of ``canonical_bytes``: equal exactly when the payload is the same."""
    return hashlib.sha256(canonical_bytes(entry)).hexdigest()


def pack_entry(entry: TokenEntry) -> dict[str, Any]:
    """The JSON form with token arrays as ``{"dtype": ..., "b64": ...}``, little-endian.

    Ids are int32, wider only where one does not fit; log-probs float32 where every value
    survives exactly, else float64. ``unpack_entry`` gives the same canonical bytes back.
    """
    form = _without_arrays(entry)
    for name in _ARRAY_FIELDS:
        form[name] = getattr(entry, name).pack()
    return form


def unpack_entry(form: dict[str, Any]) -> TokenEntry:
    """Read the packed form back; the given dict is left alone.

    Raises:
        ValueError: an array is no packed array (unknown dtype, broken base64, a length that is
            no whole number of elements) or the entry is not valid.
    """
    plain = dict(form)
    for name, kind in _ARRAY_FIELDS.items():
        plain[name] = kind.unpack(form.get(name))
    return TokenEntry.model_validate(plain)
