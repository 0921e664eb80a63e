"""The HTTP face of the error tree: which status and ``type`` each error class has.

Adds the errors that exist only at the HTTP edge to ``middleware.http_status``. No web
framework is imported, so that clients can use it. Source: spec 05 "Errors".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from middleware import http_status
from middleware.errors import (
    InvalidInputError,
    StaleSnapshotError,
    StoreClosedError,
    StoreUnavailableError,
    TokenCaptureError,
)
from middleware.errors import UnauthorizedError as UnauthorizedError
from middleware.errors import UnknownRouteError as UnknownRouteError
from middleware.http_status import RETRY_AFTER_S


class MethodNotAllowedError(TokenCaptureError):
    """The route exists, with other methods.

    ``allowed`` are the methods that it has.
    """

    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.allowed = allowed


class NotAcceptableError(InvalidInputError):
    """None of the media types in ``Accept`` can be served."""

    code = "not_acceptable"


class SidecarUnreachableError(TokenCaptureError):
    """The sidecar did not answer: not running, another address, or a network failure."""

    code = "sidecar_unreachable"


class SidecarResponseError(TokenCaptureError):
    """The sidecar answered something that this client does not understand.

    ``status`` is the HTTP status, ``code`` the answer's own code where it had one.
    """

    def __init__(self, message: str, *, status: int, code: str = "internal_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


STATUS_OF: Final[http_status.StatusTable] = (
    (NotAcceptableError, 406),
    (MethodNotAllowedError, 405),
    *http_status.STATUS_OF,
)

_TYPE_OF_STATUS: Final[Mapping[int, str]] = MappingProxyType(
    {
        401: "authentication_error",
        404: "not_found_error",
        409: "conflict_error",
        410: "gone_error",
        429: "rate_limit_error",
    }
)


def status_of(error: TokenCaptureError) -> int:
    """The HTTP status of an error."""
    return http_status.status_of(error, STATUS_OF)


def type_of_status(status: int) -> str:
    """The coarse ``type`` of the error body, by who has to act."""
    if status in _TYPE_OF_STATUS:
        return _TYPE_OF_STATUS[status]
    return "invalid_request_error" if status < 500 else "server_error"


def error_body(error: TokenCaptureError) -> dict[str, Any]:
    """The JSON body of an error: ``{"error": {...}}`` plus what the shape fixes beside it."""
    body: dict[str, Any] = {
        "error": {
            "type": type_of_status(status_of(error)),
            "code": error.code,
            "message": str(error),
        }
    }
    if isinstance(error, StaleSnapshotError):
        body["snapshot_id"] = error.snapshot_id
        body["version"] = error.version
    return body


def error_headers(error: TokenCaptureError) -> dict[str, str]:
    """The headers that belong to an error's status."""
    if isinstance(error, MethodNotAllowedError):
        return {"allow": ", ".join(error.allowed)}
    if isinstance(error, UnauthorizedError):
        return {"www-authenticate": 'Bearer realm="token-capture"'}
    if status_of(error) == 503:
        return {"retry-after": str(RETRY_AFTER_S)}
    return {}


def error_from_body(status: int, body: Any, *, fallback: str) -> TokenCaptureError:
    """The typed error that a server's answer stands for.

    ``fallback`` describes the request, for answers that are not ours (a gateway's HTML page).
    """
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return SidecarResponseError(
            f"{fallback}: HTTP {status} without an error body", status=status
        )
    code, message = str(error.get("code", "")), str(error.get("message", ""))
    if code == StaleSnapshotError.code:
        version = body.get("version")
        return StaleSnapshotError(
            message,
            snapshot_id=body.get("snapshot_id"),
            version=version if isinstance(version, int) else 0,
        )
    cls = _CLASS_OF_CODE.get(code)
    if cls is None:
        return SidecarResponseError(
            message or f"{fallback}: HTTP {status}", status=status, code=code or "internal_error"
        )
    exc = cls(message)
    exc.code = code
    return exc


def _classes(root: type[TokenCaptureError]) -> Iterator[type[TokenCaptureError]]:
    yield root
    for child in root.__subclasses__():
        yield from _classes(child)


def _class_of_code() -> dict[str, type[TokenCaptureError]]:
    table: dict[str, type[TokenCaptureError]] = {}
    for cls in _classes(TokenCaptureError):
        if cls.__module__ not in (TokenCaptureError.__module__, __name__):
            continue
        table.setdefault(cls.code, cls)  # parents first: a shared code means the parent
    special: dict[str, type[TokenCaptureError]] = {
        "capture_unavailable": StoreUnavailableError,  # not StoreError: "retry later" is the point
        "invalid_call_id": table["invalid_rollout_id"],
    }
    table.update(special)
    del table[TokenCaptureError.code]
    return table


_CLASS_OF_CODE: Final[Mapping[str, type[TokenCaptureError]]] = MappingProxyType(_class_of_code())
assert StoreClosedError.code == StoreUnavailableError.code
