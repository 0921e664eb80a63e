"""The client's side of the sink/resolver RPC without I/O: requests to send, answers to parse.

The other side is ``capture_server.store_rpc``. Every request is idempotent and may be sent again
after a lost answer; ``stores.remote_link`` does so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import orjson

from capture_server.client_requests import Call
from capture_server.errors import error_from_body
from capture_server.store_rpc_models import RPC_VERSION
from middleware.errors import TokenCaptureError
from middleware.paths import CAPTURE_SEGMENT, ROLLOUT_SEGMENT, validate_call_id, validate_rollout_id
from middleware.protocols import CallIntent, LineageMatch, LineageQuery, LineageResolution
from middleware.records import ParentResolutionStatus, TokenEntry, TokenIds, pack_entry


def _path(rollout_id: str, *segments: str) -> str:
    validate_rollout_id(rollout_id)
    return "/".join(("", ROLLOUT_SEGMENT, rollout_id, CAPTURE_SEGMENT, *segments))


def encodable(text: str) -> str:
    """The text with lone surrogates (which no UTF-8 body or URL holds) as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def open_intent(intent: CallIntent, *, durable: bool = False) -> Call[tuple[bool, bool]]:
    """Write an intent: (first call?, on disk already?)."""
    return Call(
        method="PUT",
        path=_path(intent.rollout_id, "intents", validate_call_id(intent.model_call_id)),
        query={"durable": "true"} if durable else {},
        body={
            "v": RPC_VERSION,
            "request_digest": intent.request_digest,
            "created_at": intent.created_at,
            "observed": intent.observed,
            "holder": intent.holder,
            "attempt": intent.attempt,
        },
        parse=lambda body: (bool(body["first_call"]), bool(body["durable"])),
    )


def cancel_intent(
    rollout_id: str, call_id: str, reason: str, attempt: str | None = None
) -> Call[bool]:
    """Close an intent of which nothing was generated; with ``attempt`` that one or none."""
    query = {} if attempt is None else {"attempt": attempt}
    return Call(
        method="DELETE",
        path=_path(rollout_id, "intents", validate_call_id(call_id)),
        query=query | ({"reason": reason} if reason else {}),
        parse=lambda body: bool(body["cancelled"]),
    )


def records_form(entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """The value that ``put_entries`` sends, token arrays packed."""
    return {"v": RPC_VERSION, "entries": [pack_entry(entry) for entry in entries]}


def encode(form: Mapping[str, Any]) -> bytes:
    """Its bytes. Content may hold what orjson refuses: big integers, lone surrogates."""
    try:
        return orjson.dumps(form)
    except orjson.JSONEncodeError:
        return json.dumps(form, separators=(",", ":")).encode("ascii")


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """What became of the records. The form was right, or there would be no such answer."""

    is_stored: bool
    error: TokenCaptureError | None

    @classmethod
    def of(cls, body: Any) -> Self:
        """From the JSON answer."""
        refused = body.get("error")
        error = error_from_body(400, body, fallback="put of a record") if refused else None
        return cls(bool(body["stored"]), error)

    def outcome(self) -> bool:
        """True: durable and visible. False: ``if_open``, and the intent was not.

        Raises:
            TokenCaptureError: what the records lack.
        """
        if self.error is not None:
            raise self.error
        return self.is_stored


def put_entries(
    rollout_id: str, call_id: str, encoded: bytes, *, if_open: bool = False
) -> Call[StoredAnswer]:
    """Store the records of one request; ask the answer for its ``outcome``."""
    return Call(
        method="PUT",
        path=_path(rollout_id, "entries", validate_call_id(call_id)),
        query={"if_open": "true"} if if_open else {},
        body=orjson.Fragment(encoded),
        parse=StoredAnswer.of,
    )


def note_delivery(rollout_id: str, call_id: str, notes: Mapping[str, Any]) -> Call[bool]:
    """Merge later notes into a stored record."""
    return Call(
        method="PATCH",
        path=_path(rollout_id, "entries", validate_call_id(call_id)),
        body={"v": RPC_VERSION, "notes": dict(notes)},
        parse=lambda body: bool(body["noted"]),
    )


def mark_incomplete(rollout_id: str, call_id: str, reason: str, detail: str) -> Call[bool]:
    """Durably mask the rollout."""
    if call_id:
        validate_call_id(call_id)
    return Call(
        method="POST",
        path=_path(rollout_id, "incomplete"),
        body={"v": RPC_VERSION, "model_call_id": call_id, "reason": reason, "detail": detail},
        parse=lambda body: bool(body["incomplete"]),
    )


def fence(rollout_id: str) -> Call[list[str]]:
    """Refuse new calls; the open intents."""
    return Call(
        method="POST",
        path=_path(rollout_id, "fence"),
        parse=lambda body: [str(call_id) for call_id in body["open_intents"]],
    )


# --- resolving ---------------------------------------------------------------------------------


def resolve_query(rollout_id: str, query: LineageQuery) -> Call[LineageResolution]:
    """By the hashes of a request."""
    form = {
        "is_root": query.is_root,
        "fingerprint": query.fingerprint,
        "context_digests": [
            {"num_items": n, "digest": digest} for n, digest in query.context_digests.items()
        ],
        "prompt_config_digest": query.prompt_config_digest,
    }
    return _resolve(rollout_id, by="query", query=form)


def resolve_tokens(
    rollout_id: str, prompt_token_ids: TokenIds, dispatched_at: float
) -> Call[LineageResolution]:
    """By a token prompt."""
    packed = prompt_token_ids.pack()
    return _resolve(rollout_id, by="tokens", prompt_token_ids=packed, dispatched_at=dispatched_at)


def resolve_response_id(rollout_id: str, response_id: str) -> Call[LineageResolution]:
    """By the id of a served response."""
    return _resolve(rollout_id, by="response_id", response_id=response_id)


def resolve_call_id(rollout_id: str, call_id: str) -> Call[LineageResolution]:
    """By the id of a call."""
    return _resolve(rollout_id, by="model_call_id", model_call_id=validate_call_id(call_id))


def _resolve(rollout_id: str, **question: Any) -> Call[LineageResolution]:
    return Call(
        method="POST",
        path=_path(rollout_id, "resolve"),
        body={"v": RPC_VERSION, **question},
        parse=_resolution,
    )


def _resolution(body: Any) -> LineageResolution:
    match = body["match"]
    return LineageResolution(
        ParentResolutionStatus(body["status"]),
        None if match is None else _match(match),
        body["reason"],
    )


def _match(form: Mapping[str, Any]) -> LineageMatch:
    return LineageMatch(
        model_call_id=form["model_call_id"],
        cumulative_token_ids=TokenIds.unpack(form["cumulative_token_ids"]),
        digest=form["digest"],
        staging_chain=tuple(form["staging_chain"]),
        prev_len=form["prev_len"],
        chain_hash=form["chain_hash"],
        prompt_config_digest=form["prompt_config_digest"],
        system_digest=form["system_digest"],
        finish_reason=form["finish_reason"],
    )
