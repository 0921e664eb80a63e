"""What every control route has in common, in the order in which a request meets it.

The rollout id is checked first, then the caller, then the body (size, encoding); only then does
FastAPI parse and validate. A body is JSON whatever its declared type: ``curl -d`` works.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from capture_server.auth import ControlGuard
from middleware.errors import BodyTooLargeError, InvalidInputError, UnsupportedEncodingError
from middleware.paths import validate_call_id, validate_rollout_id

#: A verified response with its content is the largest thing that is sent here.
MAX_CONTROL_BODY_BYTES: Final = 64 << 20

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def guarded_route_class(
    guard: ControlGuard, *, max_body_bytes: int | None = None
) -> type[APIRoute]:
    """A route class whose requests pass ``guard`` before anything of them is read.

    ``max_body_bytes``: None is ``MAX_CONTROL_BODY_BYTES``.
    """

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Handler:
            handler = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                if "rollout_id" in request.path_params:
                    validate_rollout_id(request.path_params["rollout_id"])
                if "model_call_id" in request.path_params:
                    validate_call_id(request.path_params["model_call_id"])
                guard.check(request.scope)
                if request.method in ("POST", "PUT", "PATCH"):
                    limit = MAX_CONTROL_BODY_BYTES if max_body_bytes is None else max_body_bytes
                    request = await _with_json_body(request, limit)
                return await handler(request)

            return guarded

    return GuardedRoute


async def _with_json_body(request: Request, max_body_bytes: int) -> Request:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedEncodingError(
            f"control routes take plain JSON, not content-encoding {encoding!r}"
        )
    body = await _read(request, max_body_bytes)
    headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
    headers.append((b"content-type", b"application/json"))
    return Request({**request.scope, "headers": headers}, _replay(body, request.receive))


async def _read(request: Request, max_body_bytes: int) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_body_bytes:
                raise BodyTooLargeError(f"control bodies are limited to {max_body_bytes} bytes")
    except ClientDisconnect as exc:
        raise InvalidInputError("the client left before its body was whole") from exc
    return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
