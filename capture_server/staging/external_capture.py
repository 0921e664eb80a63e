"""The middleware's side of one admitted call: what is sent to the worker, kept, and recorded.

A handler puts the admission into the engine-bound request, takes coordinates and token fields out
of the answer, and, when the answer has its final form, validates the coordinates against the
admission and writes the ledger row. It works on the current ``CaptureContext``; without one
nothing happens. Invariants: an agent never sees coordinates or tokens, and never smuggles an
admission in; an admitted call ends as a row or as a failure; no failure fails the model call.
Source: spec 07 "A call".

Streams are refused before dispatch (``middleware.staging_call``): the coordinates of a call exist
only when its whole delta is staged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final, cast

from capture_server.seed_config import ExternalStagingBackend
from capture_server.staging.deltas import checked
from capture_server.staging.ledger import open_ledger
from capture_server.staging.records import (
    INVALID_COMMIT_COORDS_REASON,
    UNCOMMITTED_CALL_REASON,
    WORKER_CAPTURE_FAILED_REASON,
    WORKER_MISSING_COMMIT_COORDS_REASON,
    CallRecord,
    CaptureAdmission,
    CaptureLedgerCommit,
    CommitCoords,
)
from middleware.capture import (
    NG_CAPTURE_FIELD,
    NG_COMMIT_COORDS_FIELD,
    mark_external_staging_committed,
    mark_hole,
)
from middleware.context import CaptureContext, current_capture_context
from middleware.errors import UnsupportedParameterError
from middleware.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint
from middleware.json_edit import EditTree
from middleware.lineage.matching import hash_request
from middleware.lineage.threads import is_large_request, run_sized
from middleware.normalise import normalise_items
from middleware.records import TOKEN_FIELDS, response_to_output_items
from middleware.staging_admission import ledger_of
from middleware.staging_call import ExternalCaptureHandler, StagedCalls

__all__ = [
    "INVALID_COMMIT_COORDS_REASON",
    "NG_CAPTURE_FIELD",
    "NG_COMMIT_COORDS_FIELD",
    "TOKEN_FIELDS",
    "WORKER_CAPTURE_FAILED_REASON",
    "WORKER_MISSING_COMMIT_COORDS_REASON",
    "ExternalCaptureHandler",
    "MegatronWorkerCaptureHandler",
    "VLLMWorkerCaptureHandler",
    "make_external_capture_handler",
    "open_staged_calls",
]

logger = logging.getLogger(__name__)

_RECORD_TIMEOUT_S: Final = 60.0  # the answer waits for it
_FAILURE_TIMEOUT_S: Final = 10.0  # then a mark of the store takes over

_PREFIX_FIELD: Final = "required_prefix_token_ids"
_OFFLOAD_FIELD: Final = "offload_params"
_ANSWER_FIELDS: Final = ("prompt_token_ids", "compact_prompt_token_ids", "token_ids", "logprobs")
_GENERATION_FIELDS: Final = ("generated_token_ids", "generated_log_probs")
_HIDDEN: Final = (
    NG_COMMIT_COORDS_FIELD,
    *TOKEN_FIELDS,
    *_ANSWER_FIELDS,
    *_GENERATION_FIELDS,
)


def _dropped(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, "drop")


_RESPONSE_EDITS: Final[EditTree] = {
    **_dropped(*_HIDDEN),
    "choices": {"*": {**_dropped(*_HIDDEN), "message": _dropped(*_HIDDEN)}},
    "output": {"*": _dropped(*_HIDDEN)},
}


class _WorkerCaptureHandler:
    """What the backends share; they differ in where the admission rides."""

    #: What ``prepare_response`` removes, for a caller that edits the answer's text instead.
    response_edits: EditTree = _RESPONSE_EDITS

    def prepare_request(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        """The engine-bound form of a request (a new dictionary).

        Raises:
            UnsupportedParameterError: the backend cannot capture such a call.
        """
        context = current_capture_context()
        if context is None:
            return request_payload
        admission = context.capture_admission
        cleaned = self._without_admission(request_payload)
        return cleaned if admission is None else self._admitted(cleaned, admission)

    def _without_admission(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Only the middleware admits calls and says what their prefix is, for every backend."""
        own = (NG_CAPTURE_FIELD, _PREFIX_FIELD)
        cleaned = {name: value for name, value in payload.items() if name not in own}
        offload = cleaned.get(_OFFLOAD_FIELD)
        if isinstance(offload, dict) and NG_CAPTURE_FIELD in offload:
            cleaned[_OFFLOAD_FIELD] = {k: v for k, v in offload.items() if k != NG_CAPTURE_FIELD}
        return cleaned

    def _admitted(self, payload: dict[str, Any], admission: CaptureAdmission) -> dict[str, Any]:
        raise NotImplementedError

    def prepare_response(self, response_payload: dict[str, Any]) -> None:
        """Keep the coordinates, and remove them and every token field, in place."""
        context = current_capture_context()
        if context is None:
            return
        context.external_worker_response_seen = True
        context.external_commit_coords = response_payload.get(NG_COMMIT_COORDS_FIELD)
        _edit(response_payload, self.response_edits)

    async def finalize_response(self, served_payload: dict[str, Any]) -> None:
        """Write the call's row, or its failure; the served payload is what the agent gets."""
        context = current_capture_context()
        if context is None or context.capture_admission is None or context.committed:
            return
        coords, reason = _judged(context)
        if coords is None:
            await _fail(context, reason)
            return
        try:
            await _commit(context, coords, served_payload)
        except ValueError as error:
            logger.exception("a ledger row cannot be made", extra=_ids(context))
            await _fail(context, INVALID_COMMIT_COORDS_REASON, str(error))
        except Exception as error:
            # A fence, another row of this call, the store, or its time was up.
            logger.exception("a ledger row was not written", extra=_ids(context))
            await _fail(context, UNCOMMITTED_CALL_REASON, f"{type(error).__name__}: {error}")


class VLLMWorkerCaptureHandler(_WorkerCaptureHandler):
    """vLLM workers: the admission is a top-level field of the chat request."""

    def _admitted(self, payload: dict[str, Any], admission: CaptureAdmission) -> dict[str, Any]:
        prepared = {
            **payload,
            "logprobs": True,
            "top_logprobs": 0,
            "return_tokens_as_token_ids": True,
            NG_CAPTURE_FIELD: admission.model_dump(mode="json"),
        }
        if admission.required_prefix_token_ids:
            # Without: the staging chain says what the prefix is.
            prepared[_PREFIX_FIELD] = list(admission.required_prefix_token_ids)
        return prepared


class MegatronWorkerCaptureHandler(_WorkerCaptureHandler):
    """Megatron workers: the admission rides in ``offload_params``."""

    def _admitted(self, payload: dict[str, Any], admission: CaptureAdmission) -> dict[str, Any]:
        num = payload.get("n")
        if num is not None and (type(num) is not int or num != 1):
            raise UnsupportedParameterError("a Megatron worker captures one choice: send n: 1")
        offload = payload.get(_OFFLOAD_FIELD)
        offload = offload if isinstance(offload, dict) else {}
        wire = admission.model_dump(mode="json")
        return {**payload, _OFFLOAD_FIELD: {**offload, NG_CAPTURE_FIELD: wire}}


_HANDLERS: Final[Mapping[str, type[_WorkerCaptureHandler]]] = {
    "vllm_worker": VLLMWorkerCaptureHandler,
    "megatron_worker": MegatronWorkerCaptureHandler,
}


def make_external_capture_handler(backend: ExternalStagingBackend) -> ExternalCaptureHandler:
    """The handler of a configured backend.

    Raises:
        ValueError: unknown backend.
    """
    if backend not in _HANDLERS:
        raise ValueError(f"unknown external staging backend {backend!r}: {', '.join(_HANDLERS)}")
    return _HANDLERS[backend]()


def open_staged_calls(backend: str, store: Any, *, workers: int = 1) -> StagedCalls | None:
    """What the middleware needs for external staging over an open store; None: ``off``.

    Raises:
        ConfigurationError: the store cannot keep a ledger that all workers see.
    """
    if backend == "off":
        return None
    handler = make_external_capture_handler(cast("ExternalStagingBackend", backend))
    return StagedCalls(ledger=open_ledger(store, workers=workers), handler=handler, backend=backend)


# --- steps ---------------------------------------------------------------------------------------


def _judged(context: CaptureContext) -> tuple[CommitCoords | None, str]:
    """The worker's coordinates if they are this call's and staged, else the failure's reason."""
    raw = context.external_commit_coords
    if raw is None:
        return None, WORKER_MISSING_COMMIT_COORDS_REASON
    try:
        if isinstance(raw, CommitCoords):
            coords = checked(CommitCoords, raw)
        else:
            coords = CommitCoords.model_validate(raw)
    except ValueError as error:
        logger.warning("invalid coordinates: %s", error, extra=_ids(context))
        return None, INVALID_COMMIT_COORDS_REASON
    admission: CaptureAdmission = context.capture_admission
    for name in ("rollout_id", "model_call_id", "parent_call_id", "prev_len"):
        if getattr(coords, name) != getattr(admission, name):
            logger.warning("coordinates are another call's: %s", name, extra=_ids(context))
            return None, INVALID_COMMIT_COORDS_REASON
    # A worker's hash cannot cover more, so they are of no call.
    if max(coords.weight_version, coords.cum_len) >= 1 << 64:
        logger.warning("coordinates are beyond 64 bit", extra=_ids(context))
        return None, INVALID_COMMIT_COORDS_REASON
    if coords.disposition == "capture_failed":
        return None, WORKER_CAPTURE_FAILED_REASON
    return coords, ""


async def _commit(
    context: CaptureContext, coords: CommitCoords, served_payload: dict[str, Any]
) -> None:
    """Write the row.

    Raises:
        ValueError: the served answer has no id, or cannot be hashed.
        StoreError, ConflictError: from the ledger.
        TimeoutError: the ledger did not answer; the row may still come, its failure masks it.
    """
    response_id = served_payload.get("id")
    if not isinstance(response_id, str) or not response_id:
        raise ValueError("the served answer has no id")
    request_items = context.request_items or []
    response_items = response_to_output_items(served_payload)
    output, continuation = await run_sized(
        is_large_request(request_items),
        lambda: _fingerprints(request_items, response_items),
    )
    shared = coords.model_dump(exclude={"rollout_id", "disposition"})
    record = CallRecord(
        **shared,
        mode=context.capture_admission.mode,
        response_id=response_id,
        admitted_at=context.admitted_at,
        output_fingerprint=output or None,
        continuation_fingerprint=continuation or None,
        fingerprint_version=FINGERPRINT_VERSION,
    )
    commit = CaptureLedgerCommit(
        rollout_id=context.rollout_id,
        record=record,
        staging_chain=context.parent_staging_chain,
        request_items=request_items,
        response_items=response_items,
    )
    async with asyncio.timeout(_RECORD_TIMEOUT_S):
        await ledger_of(context).record(commit)
    mark_external_staging_committed(
        rollout_id=context.rollout_id, model_call_id=context.model_call_id
    )


def _fingerprints(
    request_items: list[dict[str, Any]], response_items: list[dict[str, Any]]
) -> tuple[str, str]:
    """Of the answer, and of the conversation with it."""
    answer = normalise_items(response_items)
    return assistant_fingerprint(answer), hash_request(request_items).continuation(answer)[0]


async def _fail(context: CaptureContext, reason: str, detail: str = "") -> None:
    """Poison the rollout; loud when even that fails."""
    logger.warning("call not committed: %s", reason, extra=_ids(context))
    try:
        async with asyncio.timeout(_FAILURE_TIMEOUT_S):
            await ledger_of(context).record_failure(
                context.rollout_id, context.model_call_id, reason
            )
    except Exception:
        logger.exception("a ledger failure was not written", extra=_ids(context))
        await mark_hole(context, reason, detail)


def _edit(value: Any, tree: EditTree) -> None:
    """Apply an edit tree to a parsed answer, in place."""
    if isinstance(value, list):
        below = tree.get("*")
        for element in value if isinstance(below, Mapping) else ():
            _edit(element, below)  # type: ignore[arg-type]
    elif isinstance(value, dict):
        for name, action in tree.items():
            if isinstance(action, Mapping):
                _edit(value.get(name), action)
            elif action == "drop":
                value.pop(name, None)


def _ids(context: CaptureContext) -> dict[str, str]:
    return {
        "action": "staging_not_committed",
        "rollout_id": context.rollout_id,
        "model_call_id": context.model_call_id,
    }
