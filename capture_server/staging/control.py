"""The manifest over HTTP: the seed-compatible route, and the client that reads it.

The sidecar serves both ``R/manifest`` and the path below; ``install_rollout_control_routes`` is
for an application of a framework's own that holds a ledger. Invariant: nothing is answered
without the bearer token, which is compared in constant time. No token ids pass here.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from capture_server.client import RolloutClient
from capture_server.client_requests import Call
from capture_server.errors import UnauthorizedError
from capture_server.errors_http import error_response
from capture_server.staging.records import RolloutManifest
from middleware.errors import ConfigurationError, TokenCaptureError
from middleware.paths import validate_rollout_id
from middleware.protocols import CaptureLedger

__all__ = [
    "CONTROL_ROUTE_PREFIX",
    "MANIFEST_PATH",
    "RolloutControlClient",
    "install_rollout_control_routes",
]

CONTROL_ROUTE_PREFIX: Final = "/training-token-capture/control"
MANIFEST_PATH: Final = f"{CONTROL_ROUTE_PREFIX}/rollouts/{{rollout_id}}/manifest"


def install_rollout_control_routes(
    app: Any, lineage_store: CaptureLedger, *, auth_token: str
) -> None:
    """Serve a ledger's manifests on a FastAPI application, behind a bearer token.

    Raises:
        ConfigurationError: the token is empty.
    """
    if not auth_token.strip():
        raise ConfigurationError("the control routes need a token that is not empty")
    known = _digest(auth_token.strip())
    router = APIRouter(tags=["control"])

    @router.get(MANIFEST_PATH, response_model=RolloutManifest)
    async def manifest(rollout_id: str, request: Request) -> Response:
        """The token-free ledger of a rollout."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(_digest(token.strip()), known)
        try:
            if scheme.lower() != "bearer" or not right:
                raise UnauthorizedError("send 'Authorization: Bearer <control token>'")
            validate_rollout_id(rollout_id)
            return JSONResponse(await lineage_store.manifest(rollout_id))
        except TokenCaptureError as error:
            return error_response(error)

    app.include_router(router)


def _digest(token: str) -> bytes:
    # Equal length for the comparison, whatever was sent.
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


class RolloutControlClient(RolloutClient):
    """Reads manifests from a sidecar or a framework's own server.

    Args:
        base_url: the server's address.
        auth_token: its control token.
        request_timeout_s: for one attempt; a lost answer is asked for again.
    """

    def __init__(self, base_url: str, *, auth_token: str, request_timeout_s: float) -> None:
        super().__init__(base_url, control_token=auth_token, timeout_s=request_timeout_s)

    async def manifest(self, rollout_id: str) -> RolloutManifest:
        """The rollout's token-free ledger, validated.

        Raises:
            TokenCaptureError: the error that the server answered, or none was reached.
        """
        validate_rollout_id(rollout_id)

        def parse(body: Any) -> RolloutManifest:
            manifest = RolloutManifest.model_validate(body)
            if manifest.rollout_id != rollout_id:
                raise ValueError("it is the manifest of another rollout")
            return manifest

        path = MANIFEST_PATH.format(rollout_id=rollout_id)
        return await self._send(Call(method="GET", path=path, parse=parse))
