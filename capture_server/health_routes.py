"""Unauthenticated, token-free routes for probes: alive, ready, which version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from fastapi import APIRouter
from starlette.responses import JSONResponse

from capture_server.control_models import ErrorBody, HealthBody, VersionBody
from capture_server.errors_http import error_response
from middleware._version import __version__
from middleware.errors import StoreUnavailableError
from middleware.fingerprint import FINGERPRINT_VERSION
from middleware.protocols import CaptureStore
from middleware.records import DIGEST_VERSION, TOKEN_ENTRY_RECORD_SCHEMA_VERSION

ReadinessCheck = Callable[[], Awaitable[str | None]]


def health_router(store: CaptureStore, checks: Sequence[ReadinessCheck]) -> APIRouter:
    """``/healthz``, ``/readyz``, ``/version``; each check gives None or why it is not ready."""
    router = APIRouter(tags=["operations"], generate_unique_id_function=lambda route: route.name)

    @router.get("/healthz")
    async def healthz() -> HealthBody:
        """The process is alive."""
        return HealthBody(status="ok")

    @router.get("/readyz", responses={503: {"model": ErrorBody}}, response_model=HealthBody)
    async def readyz() -> HealthBody | JSONResponse:
        """The store takes writes: model calls can be captured."""
        for check in (store.healthy, *checks):
            reason = await check()
            if reason is not None:
                return error_response(StoreUnavailableError(f"not ready: {reason}"))
        return HealthBody(status="ready")

    @router.get("/version")
    async def version() -> VersionBody:
        """Release and record formats."""
        return VersionBody(
            version=__version__,
            record_schema_version=TOKEN_ENTRY_RECORD_SCHEMA_VERSION,
            digest_version=DIGEST_VERSION,
            fingerprint_version=FINGERPRINT_VERSION,
        )

    return router
