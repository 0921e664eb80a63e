"""Exception handlers: every error of the control side leaves as one JSON shape.

``{"error": {"type", "code", "message", ...}}``. What is not one of ours is logged where it
happens and answered as ``internal_error`` without its text, which may quote data.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from capture_server.errors import (
    MethodNotAllowedError,
    UnknownRouteError,
    error_body,
    error_headers,
    status_of,
    type_of_status,
)
from middleware.errors import (
    InvalidInputError,
    TokenCaptureError,
    UnsupportedParameterError,
)


def error_response(error: TokenCaptureError) -> JSONResponse:
    """The answer for one of our errors."""
    return JSONResponse(error_body(error), status_of(error), headers=error_headers(error))


def install_error_handlers(app: FastAPI) -> None:
    """Make the app answer its own errors, framework errors and bugs in the one shape."""
    app.add_exception_handler(TokenCaptureError, _on_own_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)


async def _on_own_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, TokenCaptureError)
    return error_response(exc)


async def _on_validation_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    return error_response(validation_error(exc))


def validation_error(exc: RequestValidationError) -> InvalidInputError:
    """Our error for a request that does not fit its route's schema; every problem is named."""
    problems = [_problem(error) for error in exc.errors()]
    message = "; ".join(text for _, text in problems)
    if all(where == "query" for where, _ in problems):
        return UnsupportedParameterError(message)
    return InvalidInputError(message)


def _problem(error: dict[str, Any]) -> tuple[str, str]:
    location = [str(part) for part in error.get("loc", ())]
    where, path = (location[0], ".".join(location[1:])) if location else ("body", "")
    if error.get("type") == "json_invalid":
        detail = error.get("ctx", {}).get("error", "syntax error")
        return where, f"the body is not valid JSON: {detail} at character {path}"
    name = f"{where}.{path}" if path else where
    return where, f"{name}: {error.get('msg', 'invalid')}"


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    """Errors that the framework raises itself (routing, a body that cannot be read)."""
    assert isinstance(exc, HTTPException)
    path = request.url.path
    if exc.status_code == 404:
        return error_response(UnknownRouteError(f"no route {path}; see /openapi.json"))
    if exc.status_code == 405:
        allowed = tuple((exc.headers or {}).get("Allow", "").replace(" ", "").split(","))
        return error_response(
            MethodNotAllowedError(
                f"{path} takes {', '.join(allowed)}, not {request.method}", allowed=allowed
            )
        )
    if exc.status_code == 400:
        return error_response(InvalidInputError(f"the body is not valid JSON: {exc.detail}"))
    error = {
        "type": type_of_status(exc.status_code),
        "code": "http_error",
        "message": str(exc.detail),
    }
    return JSONResponse({"error": error}, exc.status_code, headers=exc.headers)


async def _on_bug(request: Request, exc: Exception) -> Response:
    # The server logs the traceback: Starlette re-raises after this answer.
    return error_response(
        TokenCaptureError("an unexpected error; the server's log has the details")
    )
