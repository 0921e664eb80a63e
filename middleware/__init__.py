"""One model call, from the tagged request to the finished record.

The public names. Nothing here imports a web framework, an HTTP client or a database driver, so
that it can ride inside an engine's own process.

Imported when first asked for, so that reading the version does not load numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from middleware._lazy import lazy_attributes
from middleware._version import __version__

if TYPE_CHECKING:
    from middleware.asgi import CaptureMiddleware, CaptureOptions
    from middleware.capture import (
        capture_health_snapshot,
        capture_tokens,
        commit_entry,
        register_call_intent,
        resolve_parent,
    )
    from middleware.context import (
        CaptureContext,
        current_capture_context,
        reset_token_sink,
        set_token_sink,
    )
    from middleware.errors import TokenCaptureError
    from middleware.fingerprint import (
        FINGERPRINT_VERSION,
        assistant_fingerprint,
        canonicalize_tool_arguments,
        conversation_digest,
    )
    from middleware.lineage import (
        IncrementalLineageStore,
        InMemoryLineageStore,
        LineageIndex,
        RolloutLineage,
        stamp_continuation,
    )
    from middleware.paths import capture_base_url, validate_call_id, validate_rollout_id
    from middleware.protocols import (
        CaptureStore,
        LineageMatch,
        LineageResolution,
        LineageResolver,
        TokenCaptureSnapshot,
        TokenSink,
        TokenSource,
        install_lineage_store,
        install_token_sink,
        install_token_source,
        installed_lineage_store,
        installed_token_sink,
        installed_token_source,
    )
    from middleware.records import (
        LogProbs,
        ParentResolutionStatus,
        TokenEntry,
        TokenIds,
        compute_digest,
        cumulative_tokens,
        encode_token_ids,
        extract_token_fields,
        response_to_output_items,
        stamp_lineage,
        strip_token_fields,
    )

__getattr__ = lazy_attributes(
    __name__,
    {
        "CaptureContext": "middleware.context",
        "CaptureMiddleware": "middleware.asgi",
        "CaptureOptions": "middleware.asgi",
        "CaptureStore": "middleware.protocols",
        "FINGERPRINT_VERSION": "middleware.fingerprint",
        "InMemoryLineageStore": "middleware.lineage",
        "IncrementalLineageStore": "middleware.lineage",
        "LineageIndex": "middleware.lineage",
        "LineageMatch": "middleware.protocols",
        "LineageResolution": "middleware.protocols",
        "LineageResolver": "middleware.protocols",
        "LogProbs": "middleware.records",
        "ParentResolutionStatus": "middleware.records",
        "RolloutLineage": "middleware.lineage",
        "TokenCaptureError": "middleware.errors",
        "TokenCaptureSnapshot": "middleware.protocols",
        "TokenEntry": "middleware.records",
        "TokenIds": "middleware.records",
        "TokenSink": "middleware.protocols",
        "TokenSource": "middleware.protocols",
        "assistant_fingerprint": "middleware.fingerprint",
        "canonicalize_tool_arguments": "middleware.fingerprint",
        "capture_base_url": "middleware.paths",
        "capture_health_snapshot": "middleware.capture",
        "capture_tokens": "middleware.capture",
        "commit_entry": "middleware.capture",
        "compute_digest": "middleware.records",
        "conversation_digest": "middleware.fingerprint",
        "cumulative_tokens": "middleware.records",
        "current_capture_context": "middleware.context",
        "encode_token_ids": "middleware.records",
        "extract_token_fields": "middleware.records",
        "install_lineage_store": "middleware.protocols",
        "install_token_sink": "middleware.protocols",
        "install_token_source": "middleware.protocols",
        "installed_lineage_store": "middleware.protocols",
        "installed_token_sink": "middleware.protocols",
        "installed_token_source": "middleware.protocols",
        "register_call_intent": "middleware.capture",
        "reset_token_sink": "middleware.context",
        "resolve_parent": "middleware.capture",
        "response_to_output_items": "middleware.records",
        "set_token_sink": "middleware.context",
        "stamp_continuation": "middleware.lineage",
        "stamp_lineage": "middleware.records",
        "strip_token_fields": "middleware.records",
        "validate_call_id": "middleware.paths",
        "validate_rollout_id": "middleware.paths",
    },
)

__all__ = [
    "FINGERPRINT_VERSION",
    "CaptureContext",
    "CaptureMiddleware",
    "CaptureOptions",
    "CaptureStore",
    "InMemoryLineageStore",
    "IncrementalLineageStore",
    "LineageIndex",
    "LineageMatch",
    "LineageResolution",
    "LineageResolver",
    "LogProbs",
    "ParentResolutionStatus",
    "RolloutLineage",
    "TokenCaptureError",
    "TokenCaptureSnapshot",
    "TokenEntry",
    "TokenIds",
    "TokenSink",
    "TokenSource",
    "__version__",
    "assistant_fingerprint",
    "canonicalize_tool_arguments",
    "capture_base_url",
    "capture_health_snapshot",
    "capture_tokens",
    "commit_entry",
    "compute_digest",
    "conversation_digest",
    "cumulative_tokens",
    "current_capture_context",
    "encode_token_ids",
    "extract_token_fields",
    "install_lineage_store",
    "install_token_sink",
    "install_token_source",
    "installed_lineage_store",
    "installed_token_sink",
    "installed_token_source",
    "register_call_intent",
    "reset_token_sink",
    "resolve_parent",
    "response_to_output_items",
    "set_token_sink",
    "stamp_continuation",
    "stamp_lineage",
    "strip_token_fields",
    "validate_call_id",
    "validate_rollout_id",
]
