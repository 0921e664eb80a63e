"""Which HTTP status each error class has: the one table, used by the middleware and the server.

Source: spec 05 "Errors".
"""

from __future__ import annotations

from typing import Final

from middleware.errors import (
    BodyTooLargeError,
    BudgetExhaustedError,
    ConflictError,
    InvalidInputError,
    StoreError,
    TokenCaptureError,
    TokenCaptureRetiredError,
    UnauthorizedError,
    UnknownRouteError,
    UnsupportedEncodingError,
    UpstreamError,
)

StatusTable = tuple[tuple[type[TokenCaptureError], int], ...]

STATUS_OF: Final[StatusTable] = (
    (BodyTooLargeError, 413),
    (UnsupportedEncodingError, 415),
    (InvalidInputError, 400),
    (UnauthorizedError, 401),
    (UnknownRouteError, 404),
    (BudgetExhaustedError, 429),
    (TokenCaptureRetiredError, 410),
    (ConflictError, 409),
    (StoreError, 503),
    (UpstreamError, 502),
    (TokenCaptureError, 500),
)
"""The first row that an error is an instance of counts: subclasses before their parents."""

RETRY_AFTER_S: Final = 1
"""Seconds after which trying again makes sense, sent as Retry-After with every 503."""


def status_of(error: TokenCaptureError, table: StatusTable = STATUS_OF) -> int:
    """The HTTP status of an error."""
    return next(status for kind, status in table if isinstance(error, kind))
