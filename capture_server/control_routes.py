"""The control side of the HTTP API: status, freeze, snapshot, trajectories, retire, listing.

Handlers only translate: the state machine is the store's, waiting is ``capture_server.freezing``,
building is ``capture_server.trajectories``. Building and serialising run in a bounded number of
threads, so that a large rollout delays no model call. ``R`` is
``/ng-rollout/{rollout_id}/training-token-capture``. Source: spec 05.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Final

import anyio
import anyio.to_thread
from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from capture_server import snapshot_body as body_of
from capture_server.arrow_body import arrow_is_installed, rows_pieces, snapshot_pieces
from capture_server.auth import ControlGuard
from capture_server.config import Settings
from capture_server.control_models import (
    ID_PATTERN,
    BatchBody,
    BatchRequest,
    DeletedBody,
    ListBody,
    ListQuery,
    RegisterRequest,
    RetiredBody,
    RetireRequest,
    SnapshotQuery,
    StatusBody,
    SweepBody,
    SweepRequest,
    TrajectoriesQuery,
    TrajectoriesRequest,
)
from capture_server.control_router import ARROW, JSON, NDJSON, control_router
from capture_server.errors import (
    NotAcceptableError,
    UnknownRouteError,
    error_body,
)
from capture_server.errors_http import install_error_handlers
from capture_server.freezing import (
    NOBODY,
    Lifecycle,
    OpenCalls,
    freeze_rollout,
    retire_current,
    retire_rollout,
)
from capture_server.health_routes import ReadinessCheck, health_router
from capture_server.negotiation import etag_matches, preferred_encoding, preferred_type
from capture_server.registration import register_rollout, settle_all, settled
from capture_server.staging.control import (
    CONTROL_ROUTE_PREFIX,
    RolloutControlClient,
    install_rollout_control_routes,
)
from capture_server.staging.ledger import LedgerBackend, StoreLedger
from capture_server.staging.records import RolloutManifest
from capture_server.trajectories_body import build_trajectories
from middleware.errors import TokenCaptureError, TokenCaptureRetiredError
from middleware.paths import MAX_ID_LENGTH, validate_rollout_id
from middleware.protocols import CaptureStore

__all__ = [
    "CONTROL_ROUTE_PREFIX",
    "OpenCalls",
    "RolloutControlClient",
    "install_control_routes",
    "install_rollout_control_routes",
]

_BATCH_CONCURRENCY: Final = 64
_ARROW_OFFER: Final = (ARROW,) if arrow_is_installed() else ()
_NO_ARROW: Final = "Arrow needs pyarrow in the server: pip install 'token-capture[arrow]'"
_SNAPSHOT_WRITERS: Final = {
    JSON: body_of.json_pieces,
    NDJSON: body_of.ndjson_pieces,
    ARROW: snapshot_pieces,
}

RolloutId = Annotated[
    str,
    Path(
        min_length=1,
        max_length=MAX_ID_LENGTH,
        pattern=ID_PATTERN,
        description="id of one attempt of one agent at one task",
    ),
]


class ControlRoutes:
    """The handlers, bound to one store."""

    def __init__(
        self,
        store: CaptureStore,
        settings: Settings,
        calls: OpenCalls | None,
        told: Lifecycle,
    ) -> None:
        self._store = store
        self._told = told
        self._grace_s = settings.freeze_grace_s
        self._has_external_staging = settings.external_staging != "off"
        self._calls = calls
        # Half the cores: the event loop that proxies model calls keeps the others.
        self._threads = anyio.CapacityLimiter(max(2, (os.cpu_count() or 2) // 2))

    async def status(self, rollout_id: RolloutId) -> StatusBody:
        """Counts and state of a rollout, without token arrays."""
        return StatusBody.of(await settled(self._store, await self._store.status(rollout_id)))

    async def register(
        self, rollout_id: RolloutId, body: RegisterRequest | None = None
    ) -> StatusBody:
        """Give an unused id budgets, an expiry and labels, before its first call."""
        status = await register_rollout(
            self._store,
            rollout_id,
            body or RegisterRequest(),
            external_staging=self._has_external_staging,
        )
        return StatusBody.of(status)

    async def freeze(self, rollout_id: RolloutId) -> StatusBody:
        """Refuse new calls, wait a bounded time for running ones, and fix the snapshot."""
        return StatusBody.of(
            await freeze_rollout(
                self._store, self._calls, rollout_id, grace_s=self._grace_s, told=self._told
            )
        )

    async def snapshot(
        self, rollout_id: RolloutId, query: Annotated[SnapshotQuery, Query()], request: Request
    ) -> Response:
        """The immutable view of a frozen rollout: JSON, NDJSON with the header first, or Arrow."""
        media_type = _negotiated(request, (JSON, NDJSON, *_ARROW_OFFER))
        status = await settled(self._store, await self._store.status(rollout_id))
        asked_etag = request.headers.get("if-none-match", "")
        if status.state == "frozen" and asked_etag:
            etag = _etag(status.snapshot_id or "", status.version)
            if etag_matches(asked_etag, etag):
                return Response(status_code=304, headers=_snapshot_headers(etag))
        snapshot = await self._store.snapshot(rollout_id)
        view = body_of.EntryView(fields=query.field_names, full_prompts=query.full_prompts)
        pieces = await anyio.to_thread.run_sync(
            _SNAPSHOT_WRITERS[media_type], snapshot, view, limiter=self._threads
        )
        headers = _snapshot_headers(_etag(snapshot.snapshot_id, snapshot.version))
        return self._stream(request, pieces, media_type, headers)

    async def get_trajectories(
        self,
        rollout_id: RolloutId,
        query: Annotated[TrajectoriesQuery, Query()],
        request: Request,
    ) -> Response:
        """Training rows or a rebuilt response, built from the frozen snapshot."""
        asked = TrajectoriesRequest.model_validate(query.model_dump(exclude_unset=True))
        return await self._trajectories(rollout_id, asked, request)

    async def post_trajectories(
        self,
        rollout_id: RolloutId,
        request: Request,
        body: TrajectoriesRequest | None = None,
    ) -> Response:
        """As GET, with the response that the verifier scored."""
        return await self._trajectories(rollout_id, body or TrajectoriesRequest(), request)

    async def _trajectories(
        self, rollout_id: str, asked: TrajectoriesRequest, request: Request
    ) -> Response:
        # Only rows have an Arrow form: who asks for Arrow and no format means them.
        rows = asked.format == "traces" or "format" not in asked.model_fields_set
        media_type = _negotiated(request, (JSON, *(_ARROW_OFFER if rows else ())))
        await settled(self._store, await self._store.status(rollout_id))
        snapshot = await self._store.snapshot(rollout_id)
        headers = {"vary": "accept, accept-encoding"}
        if media_type == ARROW:
            pieces = await anyio.to_thread.run_sync(
                rows_pieces, snapshot, asked, limiter=self._threads
            )
            return self._stream(request, pieces, ARROW, headers)
        body = await anyio.to_thread.run_sync(
            build_trajectories, snapshot, asked, limiter=self._threads
        )
        return self._stream(request, iter((body,)), JSON, headers)

    async def manifest(self, rollout_id: RolloutId) -> RolloutManifest:
        """The token-free ledger of external staging; empty where nothing was staged."""
        if not isinstance(self._store, LedgerBackend):
            raise UnknownRouteError("this store keeps no ledger of external staging")
        if (await self._store.status(rollout_id)).state == "retired":
            raise TokenCaptureRetiredError(f"rollout {rollout_id} is retired: its ledger is gone")
        return RolloutManifest.model_validate(await StoreLedger(self._store).manifest(rollout_id))

    async def retire(self, rollout_id: RolloutId, body: RetireRequest) -> RetiredBody:
        """Remove exactly the snapshot that was consumed; a tombstone stays."""
        await retire_rollout(
            self._store,
            rollout_id,
            snapshot_id=body.snapshot_id,
            version=body.version,
            told=self._told,
        )
        return RetiredBody()

    async def delete(self, rollout_id: RolloutId) -> DeletedBody:
        """Clear a rollout unconditionally, before its id is used again."""
        return DeletedBody(existed=await self._store.delete(rollout_id))

    async def list_rollouts(self, query: Annotated[ListQuery, Query()]) -> ListBody:
        """Rollouts in id order, page by page."""
        rows, next_cursor = await self._store.list_rollouts(
            state=query.state, prefix=query.prefix, limit=query.limit, cursor=query.cursor
        )
        found = [await settled(self._store, row) for row in rows]
        shown = [StatusBody.of(row) for row in found if query.state in (None, row.state)]
        return ListBody(rollouts=shown, next_cursor=next_cursor)

    async def batch(self, body: BatchRequest) -> BatchBody:
        """One operation on many rollouts; each has its own result or error."""
        results: dict[str, dict[str, Any]] = {rollout_id: {} for rollout_id in body.ids}
        limiter = anyio.CapacityLimiter(_BATCH_CONCURRENCY)

        async def one(rollout_id: str) -> None:
            async with limiter:
                try:
                    validate_rollout_id(rollout_id)
                    results[rollout_id] = await self._batch_item(body, rollout_id)
                except TokenCaptureError as exc:
                    results[rollout_id] = error_body(exc)

        async with anyio.create_task_group() as group:
            for rollout_id in results:
                group.start_soon(one, rollout_id)
        return BatchBody(results=results)

    async def _batch_item(self, body: BatchRequest, rollout_id: str) -> dict[str, Any]:
        if body.op == "freeze":
            return (await self.freeze(rollout_id)).model_dump()
        if body.op == "delete":
            return (await self.delete(rollout_id)).model_dump()
        consumed = body.snapshots.get(rollout_id)
        if consumed is not None:
            return (await self.retire(rollout_id, consumed)).model_dump()
        await retire_current(self._store, rollout_id, self._told)
        return RetiredBody().model_dump()

    async def sweep(self, body: SweepRequest | None = None) -> SweepBody:
        """Remove old tombstones; freeze the open rollouts whose time is up."""
        await settle_all(self._store)
        age_s = (body or SweepRequest()).older_than_seconds
        return SweepBody(removed=await self._store.sweep_retired(age_s))

    def _stream(
        self, request: Request, pieces: Iterator[bytes], media_type: str, headers: dict[str, str]
    ) -> Response:
        encoding = preferred_encoding(request.headers.get("accept-encoding", ""), body_of.ENCODINGS)
        if encoding is not None:
            headers = {**headers, "content-encoding": encoding}
        produced = body_of.batched(body_of.encoded(pieces, encoding))
        return StreamingResponse(
            _in_threads(produced, self._threads), media_type=media_type, headers=headers
        )


async def _in_threads(
    pieces: Iterator[bytes], limiter: anyio.CapacityLimiter
) -> AsyncIterator[bytes]:
    while (
        piece := await anyio.to_thread.run_sync(next, pieces, None, limiter=limiter)
    ) is not None:
        yield piece


def _negotiated(request: Request, offers: Sequence[str]) -> str:
    accept = request.headers.get("accept", "")
    chosen = preferred_type(accept, offers)
    if chosen is None:
        hint = ""
        if ARROW in accept:
            hint = f"; {_NO_ARROW}" if not _ARROW_OFFER else "; Arrow carries format=traces"
        raise NotAcceptableError(f"this route answers {' or '.join(offers)}{hint}")
    return chosen


def _etag(snapshot_id: str, version: int) -> str:
    return f'"{snapshot_id}:{version}"'


def _snapshot_headers(etag: str) -> dict[str, str]:
    return {
        "etag": etag,
        "vary": "accept, accept-encoding",
        "cache-control": "private, no-cache",
    }


def install_control_routes(
    app: FastAPI,
    store: CaptureStore,
    settings: Settings,
    calls: OpenCalls | None = None,
    *,
    readiness_checks: Sequence[ReadinessCheck] = (),
    told: Lifecycle = NOBODY,
) -> None:
    """Add the control and health routes and the error shape to the application.

    ``calls`` is whoever serves model calls in this process (None: nobody does). Each readiness
    check returns None, or the reason why ``/readyz`` must be red. ``told`` hears of freezes and
    retirements. The caller keeps the store.
    """
    install_error_handlers(app)
    app.include_router(health_router(store, readiness_checks))
    routes = ControlRoutes(store, settings, calls, told)
    app.include_router(control_router(routes, ControlGuard(settings)))
