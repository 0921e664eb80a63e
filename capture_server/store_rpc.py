"""The sink/resolver RPC: a store and its resolver for capture that runs in another process.

``stores.remote`` is the other end. Every route is idempotent, so that a lost answer can be asked
for again, and guarded like the control routes. Handlers only translate; the store decides.
Source: spec 05 "Control", spec 03 "Remote".
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final, Protocol, runtime_checkable

import anyio.to_thread
from fastapi import APIRouter, FastAPI, Path, Query, Request, Security
from fastapi.security import HTTPBearer
from starlette.responses import Response

from capture_server.auth import ControlGuard
from capture_server.config import Settings
from capture_server.control_models import ID_PATTERN, ErrorBody, ErrorDetail
from capture_server.errors import MethodNotAllowedError, error_body
from capture_server.guarded_route import guarded_route_class
from capture_server.store_rpc_models import (
    RPC_VERSION,
    ByCall,
    ByQuery,
    ByResponse,
    ByTokens,
    CancelledBody,
    EntriesRequest,
    FenceBody,
    IncompleteRequest,
    IntentBody,
    IntentRequest,
    MarkedBody,
    MatchBody,
    NotedBody,
    NotesRequest,
    PackedIds,
    QueryForm,
    ResolveBody,
    ResolveRequest,
    StoredBody,
)
from capture_server.stores.fold import RolloutFold
from middleware.canonical import loads_exact
from middleware.errors import InvalidInputError, InvalidRecordError, StoreError
from middleware.lineage.matching import LOOKUP_ERROR
from middleware.paths import CAPTURE_SEGMENT, MAX_ID_LENGTH, ROLLOUT_SEGMENT, validate_call_id
from middleware.protocols import (
    CallIntent,
    CaptureStore,
    IntentTicket,
    LineageMatch,
    LineageQuery,
    LineageResolution,
    QueryResolver,
)
from middleware.records import ParentResolutionStatus, TokenEntry, TokenIds, unpack_entry

__all__ = ["install_store_rpc"]

_ROLLOUT: Final = f"/{ROLLOUT_SEGMENT}/{{rollout_id}}/{CAPTURE_SEGMENT}"
_ALL_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
_BIG_BODY: Final = 65_536  # bytes; above this decoding leaves the event loop
_NUMBER: Final = re.compile(r"[0-9]+")
_ARRAYS: Final = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")

_Identifier = Annotated[str, Path(min_length=1, max_length=MAX_ID_LENGTH, pattern=ID_PATTERN)]
_Durable = Annotated[bool, Query(description="answer when the intent is on disk")]
_Reason = Annotated[str, Query(max_length=1000, description="why nothing was generated")]
_Attempt = Annotated[
    str | None,
    Query(max_length=200, description="close the intent of this attempt or none (a late cancel)"),
]
_IfOpen = Annotated[
    bool, Query(description="store only while the intent of this call is open (a late replay)")
]


@runtime_checkable
class _CancelsAttempts(Protocol):
    async def cancel_attempt(
        self, rollout_id: str, model_call_id: str, attempt: str, reason: str = ""
    ) -> None: ...


@runtime_checkable
class _CanLook(Protocol):
    async def look(self, rollout_id: str, view: Callable[[RolloutFold], bool]) -> bool: ...


class _StoreRpc:
    """The handlers, bound to one store and its resolver."""

    def __init__(self, store: CaptureStore, resolver: QueryResolver) -> None:
        self._store = store
        self._resolver = resolver

    async def put_intent(
        self,
        rollout_id: _Identifier,
        model_call_id: _Identifier,
        body: IntentRequest,
        durable: _Durable = False,
    ) -> IntentBody:
        """Write a call's intent; it is visible and survives a kill when this answers."""
        ticket = await self._store.open_intent(
            CallIntent(
                rollout_id=rollout_id,
                model_call_id=model_call_id,
                request_digest=body.request_digest,
                created_at=body.created_at,
                observed=body.observed,
                holder=body.holder,
                attempt=body.attempt,
            )
        )
        if durable:
            await ticket.wait_durable()
        is_durable = durable or await _is_durable_by_now(ticket)
        return IntentBody(first_call=ticket.first_call, durable=is_durable)

    async def cancel_intent(
        self,
        rollout_id: _Identifier,
        model_call_id: _Identifier,
        reason: _Reason = "",
        attempt: _Attempt = None,
    ) -> CancelledBody:
        """Close the intent of a call of which nothing generated reached the client."""
        if attempt is None:
            await self._store.cancel_call(rollout_id, model_call_id, reason)
        elif isinstance(self._store, _CancelsAttempts):
            await self._store.cancel_attempt(rollout_id, model_call_id, attempt, reason)
        # Else it stays open: masked without need rather than another attempt's call lost.
        return CancelledBody()

    async def put_entries(
        self,
        rollout_id: _Identifier,
        model_call_id: _Identifier,
        request: Request,
        if_open: _IfOpen = False,
    ) -> StoredBody:
        """Store the records of one request; durable and visible when this answers."""
        raw = await request.body()

        def decode() -> list[TokenEntry]:
            return _entries_of(_parsed(raw), rollout_id, model_call_id)

        # Judged first: a body that is not understood must not depend on the rollout's state.
        try:
            entries = await anyio.to_thread.run_sync(decode) if len(raw) > _BIG_BODY else decode()
        except InvalidRecordError as exc:
            return StoredBody(stored=False, error=ErrorDetail(**error_body(exc)["error"]))
        if if_open:
            status = await self._store.status(rollout_id)
            is_open = model_call_id in status.open_intents
            if status.state in ("open", "unknown") and not is_open:
                # A record of that id is compared: the same is a no-op, another one masks.
                ids = [entry.model_call_id for entry in entries]
                if not await self._is_any_stored(rollout_id, ids):
                    return StoredBody(stored=False)
        if [entry.model_call_id for entry in entries] == [model_call_id]:
            await self._store.put(entries[0])
        else:
            await self._store.put_choices(entries, model_call_id)
        return StoredBody(stored=True)

    async def _is_any_stored(self, rollout_id: str, ids: Sequence[str]) -> bool:
        def view(fold: RolloutFold) -> bool:
            known = (fold.calls.get(each) for each in ids)
            return any(call is not None and call.payload is not None for call in known)

        if not isinstance(self._store, _CanLook):
            return False
        return await self._store.look(rollout_id, view)

    async def note_delivery(
        self, rollout_id: _Identifier, model_call_id: _Identifier, body: NotesRequest
    ) -> NotedBody:
        """Merge later notes into a stored record."""
        await self._store.note_delivery(rollout_id, model_call_id, body.notes)
        return NotedBody()

    async def mark_incomplete(self, rollout_id: _Identifier, body: IncompleteRequest) -> MarkedBody:
        """Durably mask the rollout."""
        if body.model_call_id:
            validate_call_id(body.model_call_id)
        await self._store.mark_incomplete(
            rollout_id, body.model_call_id, reason=body.reason, detail=body.detail
        )
        return MarkedBody()

    async def fence(self, rollout_id: _Identifier) -> FenceBody:
        """Refuse new calls from now on; the first half of a freeze."""
        return FenceBody(open_intents=list(await self._store.fence(rollout_id)))

    async def resolve(self, rollout_id: _Identifier, body: ResolveRequest) -> ResolveBody:
        """Which recorded call does this request continue? Takes hashes, not the conversation."""
        return _resolve_body(await self._ask(rollout_id, body))

    async def _ask(self, rollout_id: str, asked: ResolveRequest) -> LineageResolution:
        resolver = self._resolver
        match asked:
            case ByQuery():
                return await resolver.resolve_query(rollout_id, _query_of(asked.query))
            case ByResponse():
                return await resolver.resolve_response_id(rollout_id, asked.response_id)
            case ByCall():
                return await resolver.resolve_call_id(rollout_id, asked.model_call_id)
            case ByTokens():
                try:
                    ids = TokenIds.unpack(asked.prompt_token_ids.model_dump())
                except InvalidRecordError:
                    status = ParentResolutionStatus.UNRESOLVED
                    return LineageResolution(status, reason=LOOKUP_ERROR)
                return await resolver.resolve_tokens(
                    rollout_id, ids, dispatched_at=asked.dispatched_at
                )


async def _is_durable_by_now(ticket: IntentTicket) -> bool:
    """Without waiting: stores that are durable at once save their clients the second request."""
    try:
        async with asyncio.timeout(0):
            await ticket.wait_durable()
    except (TimeoutError, StoreError):
        return False
    return True


def _parsed(raw: bytes) -> EntriesRequest:
    try:
        return EntriesRequest.model_validate(loads_exact(raw))
    except ValueError as exc:  # pydantic's, too
        raise InvalidInputError(f"the body is not of version {RPC_VERSION}: {exc}") from exc


def _entries_of(body: EntriesRequest, rollout_id: str, call_id: str) -> list[TokenEntry]:
    """The records of a body.

    Raises:
        InvalidRecordError: one is no record, or belongs elsewhere.
    """
    try:
        entries = [_entry_of(form) for form in body.entries]
    except ValueError as exc:  # pydantic's and our own errors alike
        raise InvalidRecordError(f"this is no record: {exc}") from exc
    ids = [entry.model_call_id for entry in entries]
    if any(entry.rollout_id != rollout_id for entry in entries):
        raise InvalidRecordError(f"a record does not belong to rollout {rollout_id!r}")
    for choice in ids:
        number = choice.removeprefix(f"{call_id}.")
        if ids != [call_id] and (number == choice or not _NUMBER.fullmatch(number)):
            raise InvalidRecordError(f"record {choice!r} is no choice of call {call_id!r}")
    return entries


def _entry_of(form: dict[str, Any]) -> TokenEntry:
    if all(isinstance(form.get(name), dict) for name in _ARRAYS):
        return unpack_entry(form)
    return TokenEntry.model_validate(form)


def _query_of(form: QueryForm) -> LineageQuery:
    return LineageQuery(
        is_root=form.is_root,
        fingerprint=form.fingerprint,
        context_digests={context.num_items: context.digest for context in form.context_digests},
        prompt_config_digest=form.prompt_config_digest,
    )


def _resolve_body(resolution: LineageResolution) -> ResolveBody:
    return ResolveBody(
        status=resolution.status.value,
        reason=resolution.reason,
        match=None if resolution.match is None else _match_body(resolution.match),
    )


def _match_body(match: LineageMatch) -> MatchBody:
    ids = PackedIds.model_validate(match.cumulative_token_ids.pack())
    return MatchBody(
        model_call_id=match.model_call_id,
        cumulative_token_ids=ids,
        digest=match.digest,
        staging_chain=list(match.staging_chain),
        prev_len=match.prev_len,
        chain_hash=match.chain_hash,
        prompt_config_digest=match.prompt_config_digest,
        system_digest=match.system_digest,
        finish_reason=match.finish_reason,
    )


# --- wiring ------------------------------------------------------------------------------------


def _documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    errors: dict[int | str, dict[str, Any]] = {
        "default": {"model": ErrorBody, "description": "any other error"}
    }
    return errors | {status: {"model": ErrorBody} for status in (400, 401, 503, *statuses)}


# The body is parsed by hand, off the event loop where it is large.
_ENTRIES_OPTIONS: Final[dict[str, Any]] = {
    "response_model_exclude_none": True,
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": EntriesRequest.model_json_schema()}},
        }
    },
}


def _router(routes: _StoreRpc, settings: Settings) -> APIRouter:
    guard = ControlGuard(settings)
    # For the document only: the guard has decided by then.
    scheme = Security(HTTPBearer(auto_error=False, scheme_name="control_token"))
    router = APIRouter(
        route_class=guarded_route_class(guard, max_body_bytes=settings.max_decoded_body_bytes),
        tags=["store"],
        generate_unique_id_function=lambda route: route.name,
        dependencies=[scheme] if guard.needs_token else [],
    )
    intent, entries = (
        f"{_ROLLOUT}/intents/{{model_call_id}}",
        f"{_ROLLOUT}/entries/{{model_call_id}}",
    )
    table: list[tuple[str, str, Callable[..., Any], tuple[int, ...], dict[str, Any]]] = [
        ("PUT", intent, routes.put_intent, (409, 410, 413), {}),
        ("DELETE", intent, routes.cancel_intent, (), {}),
        ("PUT", entries, routes.put_entries, (409, 410, 413), _ENTRIES_OPTIONS),
        ("PATCH", entries, routes.note_delivery, (413,), {}),
        ("POST", f"{_ROLLOUT}/incomplete", routes.mark_incomplete, (413,), {}),
        ("POST", f"{_ROLLOUT}/fence", routes.fence, (410,), {}),
        ("POST", f"{_ROLLOUT}/resolve", routes.resolve, (413,), {}),
    ]
    for method, path, handler, statuses, extra in table:
        for form, shown in ((path, True), (f"{path}/", False)):
            router.add_api_route(
                form,
                handler,
                methods=[method],
                responses=_documented(*statuses),
                include_in_schema=shown,
                **extra,
            )
    for path in dict.fromkeys(row[1] for row in table):
        methods = tuple(row[0] for row in table if row[1] == path)
        _refuse_other_methods(router, path, methods)
    return router


def _refuse_other_methods(router: APIRouter, path: str, allowed: tuple[str, ...]) -> None:
    """Not guarded: an agent's mistake is answered without a control token."""

    async def wrong_method(request: Request) -> Response:
        raise MethodNotAllowedError(
            f"{request.url.path} takes {' or '.join(allowed)}, not {request.method}",
            allowed=allowed,
        )

    handler: Callable[[Request], Awaitable[Response]] = wrong_method
    others = [method for method in _ALL_METHODS if method not in allowed]
    for form in (path, f"{path}/"):
        router.add_route(form, handler, methods=others, include_in_schema=False)


def install_store_rpc(
    app: FastAPI, store: CaptureStore, resolver: QueryResolver, settings: Settings
) -> None:
    """Add the RPC routes. Call it before the control routes, whose last route takes the rest."""
    app.include_router(_router(_StoreRpc(store, resolver), settings))
