"""The worker's side: from an admission to a staged delta and its commit coordinates.

``begin_call`` before generating, ``complete_call_from_response`` (or ``complete_call``) after,
and only then answer, with the coordinates in ``ng_commit_coords``. Invariants: nothing is
acknowledged before the sink has it; a call completes once; what is staged is exactly prompt and
generation of one whole answer behind the admitted prefix.

A failing or lying sink and a failing adapter give coordinates with ``capture_failed`` and a log
line: the engine's answer goes out all the same. Wrong use by the caller raises ``CaptureError``,
and so does ``complete_call`` for arrays that contradict the admission; ``fail_call`` then ends
the call. Streams are refused: coordinates exist only when the whole delta is staged.

Importable without a web framework; one instance may be used from several threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capture_server.staging.deltas import (
    checked,
    resolved_prefix,
    staged_coords,
    staged_record,
    told,
)
from capture_server.staging.digest import EXTRAS_DIGEST_VERSION, STAGING_DIGEST_VERSION
from capture_server.staging.protocols import CaptureAdapter, StagingSink, WeightVersionProvider
from capture_server.staging.records import CaptureAdmission, CommitCoords, StagedCallRecord
from middleware.errors import TokenCaptureError

__all__ = [
    "EXTRAS_DIGEST_VERSION",
    "STAGING_DIGEST_VERSION",
    "ActiveCall",
    "CaptureError",
    "CaptureHost",
    "RolloutTokenCapture",
    "StreamingUnsupportedError",
    "install_capture",
]

logger = logging.getLogger(__name__)


class CaptureError(TokenCaptureError):
    """The worker library was used wrongly, or given arrays that contradict the admission."""

    code = "staging_capture_error"


class StreamingUnsupportedError(CaptureError):
    """A streamed call cannot be captured: send the answer whole."""

    code = "staging_streaming_unsupported"


@dataclass(slots=True, eq=False)
class ActiveCall:
    """An admitted call between ``begin_call`` and its completion.

    ``prefix_token_ids`` are its ancestors' tokens (``admission.prev_len`` of them);
    ``weight_version`` is the one it was begun under.
    """

    admission: CaptureAdmission
    weight_version: int
    prefix_token_ids: list[int]
    completed: bool = False

    @property
    def rollout_id(self) -> str:
        """Whose call it is."""
        return self.admission.rollout_id

    @property
    def model_call_id(self) -> str:
        """The call's id."""
        return self.admission.model_call_id


class RolloutTokenCapture:
    """Stages a worker's calls. See the module for the order of calls.

    Args:
        sink: where deltas are staged.
        weight_version_fn: tells the current weight version, asked once per call.
        adapter: reads the engine's payloads, for ``complete_call_from_response``.
    """

    def __init__(
        self,
        *,
        sink: StagingSink,
        weight_version_fn: WeightVersionProvider,
        adapter: CaptureAdapter | None = None,
    ) -> None:
        self._sink = sink
        self._weight_version_fn = weight_version_fn
        self._adapter = adapter
        self._lock = threading.Lock()  # guards every call's ``completed``

    @property
    def adapter(self) -> CaptureAdapter | None:
        """Reads the engine's payloads."""
        return self._adapter

    def begin_call(
        self,
        admission: CaptureAdmission,
        *,
        prefix_token_ids: list[int] | None = None,
        stream: bool = False,
        weight_version: int | None = None,
    ) -> ActiveCall:
        """Take an admitted call in, before the engine starts.

        Args:
            admission: as it came in ``ng_capture``.
            prefix_token_ids: the tokens behind ``admission.staging_chain``, fetched and joined.
            stream: whether the client asked for a stream.
            weight_version: in place of asking ``weight_version_fn``.

        Raises:
            StreamingUnsupportedError: ``stream``.
            CaptureError: no valid admission; the prefix is missing, no token ids, not
                ``prev_len`` long or contradicts the inline one; no valid weight version.
        """
        if stream:
            raise StreamingUnsupportedError(
                "an admitted call cannot be streamed: its coordinates exist only when the whole "
                "answer is staged; send stream: false"
            )
        try:
            admission = checked(CaptureAdmission, admission)
            prefix = resolved_prefix(admission, prefix_token_ids)
        except (ValueError, TypeError) as error:
            raise CaptureError(f"the call cannot be begun: {error}") from error
        return ActiveCall(admission, self._checked_version(weight_version), prefix)

    def _checked_version(self, given: int | None) -> int:
        if given is None:
            try:
                given = self._weight_version_fn()
            except Exception as error:
                raise CaptureError(f"the weight version is not known: {told(error)}") from error
        if type(given) is not int or not 0 <= given < 1 << 64:
            raise CaptureError("a weight version is an integer in 0 <= n < 2**64")
        return given

    def complete_call(
        self,
        call: ActiveCall,
        *,
        prompt_token_ids: list[int],
        generated_token_ids: list[int],
        generated_logprobs: list[float],
        extras: dict[str, Any] | None = None,
        attachments: Mapping[str, Any] | None = None,
    ) -> CommitCoords:
        """Stage a finished call; the coordinates say whether that worked.

        Raises:
            CaptureError: completed before, or the arrays cannot be this call's: the prompt does
                not start with the prefix, counts differ, a value is invalid. Not completed then.
        """
        record = self._record(
            call, prompt_token_ids, generated_token_ids, generated_logprobs, extras
        )
        self._complete(call)
        return self._staged(call, record, attachments)

    def complete_call_from_response(
        self,
        call: ActiveCall,
        response_payload: Any,
        *,
        attachments: Mapping[str, Any] | None = None,
    ) -> CommitCoords:
        """``complete_call`` with what the adapter reads off the engine's answer.

        An answer that cannot be read, or is not this call's, gives ``capture_failed``.

        Raises:
            CaptureError: there is no adapter, or the call was completed before.
        """
        adapter = self._adapter
        if adapter is None:
            raise CaptureError(
                "there is no adapter: give RolloutTokenCapture one, or use complete_call"
            )
        self._complete(call)
        try:
            generated, log_probs = adapter.extract_generation(response_payload)
            record = self._record(
                call,
                adapter.extract_prompt_ids(response_payload),
                generated,
                log_probs,
                adapter.extract_extras(response_payload),
                completing=True,
            )
        except Exception as error:  # noqa: BLE001 - the engine's answer must go out whatever this is
            return self._failed(call, f"the answer cannot be captured: {told(error)}")
        return self._staged(call, record, attachments)

    def fail_call(self, call: ActiveCall, *, reason: str) -> CommitCoords:
        """End a call whose capture failed; its rollout will be masked.

        Raises:
            CaptureError: completed before.
        """
        self._complete(call)
        return self._failed(call, reason)

    # --- steps -----------------------------------------------------------------------------------

    def _complete(self, call: ActiveCall) -> None:
        _check_begun(call)
        with self._lock:
            if call.completed:
                raise CaptureError(f"call {call.model_call_id} was completed before")
            call.completed = True

    def _record(
        self,
        call: ActiveCall,
        prompt: list[int],
        generated: list[int],
        log_probs: list[float],
        extras: dict[str, Any] | None,
        *,
        completing: bool = False,
    ) -> StagedCallRecord:
        _check_begun(call)
        if call.completed and not completing:
            raise CaptureError(f"call {call.model_call_id} was completed before")
        try:
            return staged_record(
                call.admission,
                call.prefix_token_ids,
                call.weight_version,
                prompt,
                generated,
                log_probs,
                extras,
            )
        except (ValueError, TypeError) as error:
            raise CaptureError(f"call {call.model_call_id}: {error}") from error

    def _staged(
        self, call: ActiveCall, record: StagedCallRecord, attachments: Mapping[str, Any] | None
    ) -> CommitCoords:
        try:
            return staged_coords(record, self._sink.stage(record, attachments=attachments))
        except Exception as error:  # noqa: BLE001 - a framework's sink may raise and answer anything
            return self._failed(call, f"the sink failed: {told(error)}")

    def _failed(self, call: ActiveCall, reason: str) -> CommitCoords:
        logger.error(
            "capture failed, the rollout will be masked: %s",
            reason,
            extra={
                "action": "staging_failed",
                "rollout_id": call.rollout_id,
                "model_call_id": call.model_call_id,
            },
        )
        admission = call.admission
        return CommitCoords(
            rollout_id=admission.rollout_id,
            model_call_id=admission.model_call_id,
            parent_call_id=admission.parent_call_id,
            prev_len=admission.prev_len,
            delta_len=0,
            cum_len=admission.prev_len,
            weight_version=call.weight_version,
            disposition="capture_failed",
        )


def _check_begun(call: Any) -> None:
    if not isinstance(call, ActiveCall):
        raise CaptureError(f"give what begin_call returned, not a {type(call).__name__}")


# --- installing ----------------------------------------------------------------------------------


class CaptureHost:
    """A serving layer that has a place for a capture; a base class or a member."""

    def __init__(self) -> None:
        self._token_capture: RolloutTokenCapture | None = None

    @property
    def token_capture(self) -> RolloutTokenCapture | None:
        """The installed capture; None: calls are served without."""
        return self._token_capture

    def install_token_capture(self, capture: RolloutTokenCapture) -> None:
        """Use this capture from now on.

        Raises:
            CaptureError: another one is installed: two would split the custody of one worker.
        """
        if self._token_capture is not None and self._token_capture is not capture:
            raise CaptureError("this serving layer has a token capture already")
        self._token_capture = capture


def install_capture(
    serving_layer: Any,
    *,
    sink: StagingSink,
    weight_version_fn: WeightVersionProvider,
    adapter: CaptureAdapter | None = None,
) -> RolloutTokenCapture:
    """Make a capture and hand it to the serving layer's ``install_token_capture``.

    Raises:
        CaptureError: the serving layer has no such method, or a capture already.
    """
    install = getattr(serving_layer, "install_token_capture", None)
    if not callable(install):
        raise CaptureError(
            f"{type(serving_layer).__name__} has no install_token_capture(capture); derive it "
            "from CaptureHost"
        )
    capture = RolloutTokenCapture(sink=sink, weight_version_fn=weight_version_fn, adapter=adapter)
    install(capture)
    return capture
