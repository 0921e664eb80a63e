"""The exceptions of both packages: one small tree, grouped by what the caller can do.

Every error carries ``code``, the machine-readable name that the HTTP API answers with, and a
message that says what happened and what to do. HTTP statuses live in the HTTP layer, not here.
"""

from __future__ import annotations


class TokenCaptureError(Exception):
    """Base of every error that this product raises on purpose."""

    code = "internal_error"


class InvalidInputError(TokenCaptureError, ValueError):
    """The caller's input is wrong; sending it again unchanged cannot work."""

    code = "invalid_body"


class InvalidIdError(InvalidInputError):
    """A rollout or model call id breaks the id rule (see ``middleware.paths``)."""

    code = "invalid_rollout_id"

    def __init__(self, message: str, *, code: str = "invalid_rollout_id") -> None:
        super().__init__(message)
        self.code = code


class InvalidRecordError(InvalidInputError):
    """Token data that cannot be trained on: lengths that disagree, non-finite log-probs..."""

    code = "invalid_record"


class UnsupportedParameterError(InvalidInputError):
    """The request asks for something that cannot be captured (beam search, ``best_of``...)."""

    code = "unsupported_parameter"


class UnsupportedEncodingError(InvalidInputError):
    """A content-encoding that this build cannot decode."""

    code = "unsupported_encoding"


class BodyTooLargeError(InvalidInputError):
    """A request body above the configured limit."""

    code = "body_too_large"


class UnauthorizedError(TokenCaptureError):
    """The control token, or the signature of an agent's URL, is missing or wrong."""

    code = "unauthorized"


class UnknownRouteError(TokenCaptureError):
    """No such route here."""

    code = "unknown_route"


class BudgetExhaustedError(TokenCaptureError):
    """The rollout has used up what it was registered with."""

    code = "rollout_budget_exhausted"


class ConflictError(TokenCaptureError):
    """The request contradicts recorded state."""

    code = "conflict"


class CallIdConflictError(ConflictError):
    """A model call id is already taken by another request or another payload."""

    code = "call_id_conflict"


class RolloutExistsError(ConflictError):
    """Registration of a rollout id that already has records."""

    code = "rollout_exists"


class StaleSnapshotError(ConflictError):
    """The rollout changed after the snapshot that the caller consumed."""

    code = "stale_snapshot"

    def __init__(self, message: str, *, snapshot_id: str | None, version: int) -> None:
        super().__init__(message)
        self.snapshot_id = snapshot_id
        self.version = version


class NotFrozenError(ConflictError):
    """The operation needs a frozen rollout."""

    code = "not_frozen"


class TokenCaptureFrozenError(ConflictError):
    """The rollout is frozen: no new calls, no new records."""

    code = "rollout_frozen"


class TokenCaptureRetiredError(ConflictError):
    """The rollout was retired; only its tombstone is left."""

    code = "rollout_retired"


class PrefixUnavailableError(ConflictError):
    """The call continues a recorded one, and its exact prefix cannot be given to the engine."""

    code = "prefix_unavailable"


class StoreError(TokenCaptureError):
    """The store cannot do what it promises."""

    code = "capture_unavailable"


class StoreUnavailableError(StoreError):
    """The store failed (disk full, EIO, database away); retry later."""


class StoreClosedError(StoreError):
    """The store was closed; this process is shutting down."""


class UnsupportedSchemaError(StoreError):
    """A record or journal written by a newer (or unknown) version of this software."""

    code = "unsupported_schema"


class ConfigurationError(TokenCaptureError):
    """The process cannot start with these settings."""

    code = "invalid_configuration"


class UpstreamError(TokenCaptureError):
    """The engine could not be reached or broke off its answer."""

    code = "upstream_unreachable"
