"""Which connections reach which routes when control has a port of its own.

Decided by the local port that took the connection, which no header can change. The port for
agents serves model traffic and the probes, and knows no control route; the control port serves
control routes and the probes, and passes nothing on to the engine. Without ``control_port``
both are one. Source: spec 05 "Who may do what".
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from capture_server.errors import UnknownRouteError
from capture_server.errors_http import error_response
from middleware.paths import ROLLOUT_SEGMENT

PROBES: Final = frozenset({"/healthz", "/readyz", "/metrics", "/version"})
"""Token-free routes that both ports serve."""

_CLOSED: Final = "control routes are not served on this port; use the server's control port"
_NO_CALLS: Final = "this port serves control routes only (see /openapi.json)"
_CONTROL_ROOTS: Final = frozenset({ROLLOUT_SEGMENT, "training-token-capture", "ui"})


class ControlDoor:
    """``control_port``: the bound port of the control routes; None: they have none."""

    def __init__(self, control_port: int | None) -> None:
        self._port = control_port

    def takes_calls(self, scope: Scope) -> bool:
        """Whether this connection may carry model traffic."""
        return self._port is None or not self._is_control(scope)

    def default_app(self, engine_app: ASGIApp) -> ASGIApp:
        """What serves a path that no route has."""

        async def default(scope: Scope, receive: Receive, send: Send) -> None:
            app = (
                engine_app
                if self.takes_calls(scope)
                else error_response(UnknownRouteError(_NO_CALLS))
            )
            await app(scope, receive, send)

        return default

    def middleware(self, app: ASGIApp, *, engine_app: ASGIApp) -> ASGIApp:
        """In front of the routes: lets through what this connection's port is for."""

        async def split(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or self._port is None or self._is_control(scope):
                await app(scope, receive, send)
                return
            path = _own_path(scope)
            if path in PROBES:
                await app(scope, receive, send)
            elif _first_segment(path) in _CONTROL_ROOTS:
                await error_response(UnknownRouteError(_CLOSED))(scope, receive, send)
            else:
                await engine_app(scope, receive, send)

        return split

    def _is_control(self, scope: Scope) -> bool:
        # A server that does not say where it took the connection gets the closed side.
        server = scope.get("server")
        return server is not None and server[1] == self._port


def _own_path(scope: Scope) -> str:
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _first_segment(path: str) -> str:
    """Decoded once more than the server did: in doubt a path is closed, not passed on."""
    return unquote(path).strip("/").partition("/")[0].partition(":")[0]
