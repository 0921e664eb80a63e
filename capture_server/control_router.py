"""The table of the control routes: paths, methods, documented answers, and what is refused.

Handlers are in ``control_routes``; every route passes the guard first. Source: spec 05.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Request, Security
from fastapi.security import HTTPBearer
from starlette.responses import JSONResponse, Response

from capture_server.auth import ControlGuard
from capture_server.control_models import (
    ErrorBody,
    SnapshotBody,
    StaleSnapshotBody,
    StatusBody,
    TrajectoriesBody,
)
from capture_server.errors import MethodNotAllowedError, UnknownRouteError
from capture_server.guarded_route import guarded_route_class
from capture_server.staging.control import MANIFEST_PATH
from middleware.paths import CAPTURE_SEGMENT, ROLLOUT_SEGMENT, validate_rollout_id

if TYPE_CHECKING:
    from capture_server.control_routes import ControlRoutes

LISTING_PATH: Final = f"/{ROLLOUT_SEGMENT}"
ROLLOUT_PATH: Final = f"/{ROLLOUT_SEGMENT}/{{rollout_id}}/{CAPTURE_SEGMENT}"
JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
ARROW: Final = "application/vnd.apache.arrow.stream"
_BYTES: Final = {"schema": {"type": "string", "format": "binary"}}

_Responses = dict[int | str, dict[str, Any]]


def _errors(*statuses: int, **models: type[ErrorBody]) -> _Responses:
    """Documented error answers; ``default`` keeps the framework's 422 out of the document."""
    documented: _Responses = {"default": {"model": ErrorBody, "description": "any other error"}}
    for status in (401, *statuses):
        documented[status] = {"model": models.get(f"m{status}", ErrorBody)}
    return documented


def control_router(routes: ControlRoutes, guard: ControlGuard) -> APIRouter:
    """Every control route, bound to ``routes`` and guarded by ``guard``."""
    # For the document only: the guard has decided by then.
    scheme = Security(HTTPBearer(auto_error=False, scheme_name="control_token"))
    router = APIRouter(
        route_class=guarded_route_class(guard),
        tags=["control"],
        generate_unique_id_function=lambda route: route.name,
        dependencies=[scheme] if guard.needs_token else [],
    )
    methods_of: dict[str, list[str]] = {}

    def add(
        method: str, path: str, handler: Callable[..., Any], responses: _Responses, **extra: Any
    ) -> None:
        methods_of.setdefault(path, []).append(method)
        # The form with a trailing slash answers too, without a redirect.
        for form, shown in ((path, True), (f"{path}/", False)):
            router.add_api_route(
                form,
                handler,
                methods=[method],
                responses=responses,
                include_in_schema=shown,
                **extra,
            )

    bad_id, store_down = 400, 503
    usual = (bad_id, store_down)
    add("GET", ROLLOUT_PATH, routes.status, _errors(*usual))
    add(
        "PUT",
        ROLLOUT_PATH,
        routes.register,
        {**_errors(*usual, 409), 201: {"model": StatusBody, "description": "registered"}},
        status_code=201,
    )
    add("DELETE", ROLLOUT_PATH, routes.delete, _errors(*usual))
    add("POST", f"{ROLLOUT_PATH}/freeze", routes.freeze, _errors(*usual, 410))
    add(
        "GET",
        f"{ROLLOUT_PATH}/snapshot",
        routes.snapshot,
        {
            **_errors(*usual, 406, 409, 410),
            200: {
                "model": SnapshotBody,
                "content": {NDJSON: {"schema": {"type": "string"}}, ARROW: _BYTES},
                "description": "JSON; as NDJSON the first line has everything but the entries; "
                "as an Arrow stream one table row per entry",
            },
            304: {"description": "the snapshot that the client has is current"},
        },
        response_class=JSONResponse,
    )
    built: _Responses = {
        **_errors(*usual, 406, 409, 410),
        200: {
            "model": TrajectoriesBody,
            "content": {ARROW: _BYTES},
            "description": "JSON; format traces also as an Arrow stream, one table row per row",
        },
    }
    add("GET", f"{ROLLOUT_PATH}/trajectories", routes.get_trajectories, built)
    add("POST", f"{ROLLOUT_PATH}/trajectories", routes.post_trajectories, built)
    add("GET", f"{ROLLOUT_PATH}/manifest", routes.manifest, _errors(*usual, 410))
    # The same for clients of the seed's API.
    add("GET", MANIFEST_PATH, routes.manifest, _errors(*usual, 410), name="control_manifest")
    stale = _errors(*usual, 409, m409=StaleSnapshotBody)
    add("POST", f"{ROLLOUT_PATH}/retire", routes.retire, stale)
    add("GET", LISTING_PATH, routes.list_rollouts, _errors(*usual))
    add("POST", f"{LISTING_PATH}:batch", routes.batch, _errors(*usual))
    add("POST", f"{LISTING_PATH}:sweep", routes.sweep, _errors(*usual))
    _refuse_the_rest(router, methods_of)
    return router


_ALL_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def _refuse_the_rest(router: APIRouter, methods_of: dict[str, list[str]]) -> None:
    """Known names with a wrong method: 405; any other segment under R: 404."""

    def refuse_method(allowed: tuple[str, ...]) -> Callable[[Request], Awaitable[Response]]:
        async def wrong_method(request: Request) -> Response:
            raise MethodNotAllowedError(
                f"{request.url.path} takes {' or '.join(allowed)}, not {request.method}",
                allowed=allowed,
            )

        return wrong_method

    async def unknown_route(request: Request) -> Response:
        if "rollout_id" in request.path_params:
            validate_rollout_id(request.path_params["rollout_id"])
        raise UnknownRouteError(
            f"no route {request.url.path}; model calls go to .../{CAPTURE_SEGMENT}/v1/..., "
            "control routes are listed in /openapi.json"
        )

    # Plain routes, not guarded ones: an agent's mistake is answered without a control token.
    for path, methods in methods_of.items():
        others = [method for method in _ALL_METHODS if method not in methods]
        handler = refuse_method(tuple(methods))
        for form in (path, f"{path}/"):
            router.add_route(form, handler, methods=others, include_in_schema=False)
    router.add_route(
        ROLLOUT_PATH + "/{rest:path}",
        unknown_route,
        methods=list(_ALL_METHODS),
        include_in_schema=False,
    )
