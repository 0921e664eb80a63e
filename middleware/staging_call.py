"""One tagged call whose tokens stay with a framework's worker: intent, admission, ledger row.

Replaces capture of the answer's tokens by custody of coordinates (``StagedCalls`` in place of a
``TokenOrigin``); watching the client, cancelling and holding the answer are ``CapturedExchange``'s.
Invariants: the answer is released only after the call's row or failure was written; an admitted
call that ends without a row leaves a failure, unless the worker refused it (4xx: nothing was
generated). What streams is refused before dispatch. Source: spec 07.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Send

from middleware.capture import cancel_intent, health, mark_hole, open_intent
from middleware.codings import decode_body
from middleware.context import CaptureContext, reset_token_sink, set_token_sink
from middleware.dialects.base import Answer, Dialect
from middleware.engines.base import AnswerDefect, TokenAsk
from middleware.errors import InvalidInputError, UnsupportedParameterError
from middleware.exchange import CallPlan, CapturedExchange, _Mode, _Whole
from middleware.json_edit import edit_members, loads, set_members
from middleware.outcome import Nothing, Outcome
from middleware.protocols import CaptureLedger
from middleware.records import UNCOMMITTED_CALL_REASON
from middleware.staging_admission import admit_call

logger = logging.getLogger(__name__)

_FAILURE_TIMEOUT_S: Final = 10.0  # then a mark of the store takes over


class ExternalCaptureHandler(Protocol):
    """Speaks with one kind of worker; works on the current ``CaptureContext``."""

    def prepare_request(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        """The engine-bound form of a request, with the admission."""

    def prepare_response(self, response_payload: dict[str, Any]) -> None:
        """Keep the worker's coordinates, and take them and every token field out, in place."""

    async def finalize_response(self, served_payload: dict[str, Any]) -> None:
        """Record the call from the answer in the form in which it is served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPlan(CallPlan):
    """A plan with the two that custody needs."""

    ledger: CaptureLedger
    handler: ExternalCaptureHandler


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCalls:
    """External staging as the middleware sees it. ``backend`` names the kind of worker."""

    ledger: CaptureLedger
    handler: ExternalCaptureHandler
    backend: str

    async def plan(
        self,
        context: CaptureContext,
        dialect: Dialect,
        body: dict[str, Any],
        raw: bytes,
        *,
        drain: bool,
        max_decoded_body_bytes: int,
    ) -> StagedPlan:
        """Write the intent, admit the call, and prepare what goes to the worker.

        Raises:
            UnsupportedParameterError: it cannot be captured (a stream, several choices).
            TokenCaptureError: the rollout takes no calls, or store or ledger failed; refuse it.
        """
        _check(dialect, body)
        context.external_staging = self.backend
        context.lineage_store = self.ledger
        context.created_at = time.time()
        ticket = await open_intent(context)
        try:
            await admit_call(context, dialect.request_items(body) or [])
            sent = self._prepared(context, body, raw)
        except BaseException:
            # Nothing was dispatched; also when this task is being cancelled.
            await asyncio.shield(cancel_intent(context, "not_admitted"))
            raise
        health.calls += 1
        return StagedPlan(
            context=context,
            dialect=dialect,
            ask=TokenAsk(),
            reader=_NoTokens(),
            body=sent,
            ticket=ticket,
            drain=drain,
            max_decoded_body_bytes=max_decoded_body_bytes,
            ledger=self.ledger,
            handler=self.handler,
        )

    def _prepared(self, context: CaptureContext, body: dict[str, Any], raw: bytes) -> bytes:
        token = set_token_sink(context)
        try:
            prepared = self.handler.prepare_request(body)
        finally:
            reset_token_sink(token)
        gone: dict[str, Any] = dict.fromkeys(body.keys() - prepared.keys(), "drop")
        changed = {
            name: value
            for name, value in prepared.items()
            if name not in body or value is not body[name]
        }
        return set_members(edit_members(raw, gone), changed)


def _check(dialect: Dialect, body: Mapping[str, Any]) -> None:
    if dialect.name != "chat":
        raise UnsupportedParameterError(
            f"external staging captures /v1/chat/completions only, not {dialect.name}"
        )
    if body.get("stream"):
        raise UnsupportedParameterError(
            "with external staging an answer comes whole, after its tokens are staged: send "
            "stream: false"
        )
    if dialect.num_choices(body) != 1:
        raise UnsupportedParameterError("external staging captures one choice: send n: 1")


class _NoTokens:
    """The reader of a call whose tokens are not in its answer."""

    defect: AnswerDefect | None = None
    num_tokens = 0
    saw_text = False
    error_seen = False
    complete = False
    all_finished = False
    refusal = None

    def feed(self, payload: Mapping[str, Any]) -> None:
        """Nothing is read."""

    def feed_whole(self, payload: Mapping[str, Any]) -> bool:
        """Nothing is read."""
        return True

    def answer(self) -> Answer:
        """Never asked."""
        raise AnswerDefect("external_staging", "the tokens are with the worker")


class StagedExchange(CapturedExchange):
    """Runs one staged call against the worker."""

    def __init__(self, plan: StagedPlan, app: ASGIApp, receive: Receive, send: Send) -> None:
        super().__init__(plan, app, receive, send)
        self._staged = plan
        self._status = 0
        self.served: dict[str, Any] | None = None  # the answer as the agent gets it

    def _choose_mode(self, start: Message) -> _Mode:
        self._status = start["status"]
        if 200 <= self._status < 300 and self._status != 204:
            return _StagedAnswer(self, self._staged, start)
        return super()._choose_mode(start)

    async def _record(self, outcome: Outcome, timings: dict[str, float]) -> None:
        """In place of an entry: the row, or the failure, and the intent closed."""
        context, ledger = self._staged.context, self._staged.ledger
        reason = outcome.reason if isinstance(outcome, Nothing) else "staged_externally"
        refused = 400 <= self._status < 500
        token = set_token_sink(context)
        try:
            if self.served is not None:
                await self._staged.handler.finalize_response(self.served)
            elif context.capture_admission is not None and not refused:
                async with asyncio.timeout(_FAILURE_TIMEOUT_S):
                    await ledger.record_failure(
                        context.rollout_id, context.model_call_id, UNCOMMITTED_CALL_REASON
                    )
        except Exception as error:
            logger.exception("a staged call was not recorded", extra=_ids(context))
            await mark_hole(context, UNCOMMITTED_CALL_REASON, f"{type(error).__name__}: {error}")
        finally:
            reset_token_sink(token)
        if refused or not getattr(ledger, "closes_intents", False):
            await cancel_intent(context, reason)


class _StagedAnswer(_Whole):
    """A worker's 2xx answer: held until its row is written, then served without tokens."""

    def __init__(self, exchange: StagedExchange, plan: StagedPlan, start: Message) -> None:
        super().__init__(exchange, start, is_stream=False)
        self._staged_exchange = exchange
        self._plan = plan

    def _outcome(self, raw: bytes) -> tuple[Outcome, bytes]:
        """What becomes of the call, and the agent's body (``raw`` itself: nothing to change)."""
        coding = Headers(raw=self._start["headers"]).get("content-encoding", "")
        served: dict[str, Any] = {}
        reply = raw
        try:
            decoded = decode_body(raw, coding, limit=self._plan.max_decoded_body_bytes)
            payload = loads(decoded)
            if isinstance(payload, dict):
                served, reply = payload, self._stripped(payload, decoded)
        except (InvalidInputError, ValueError) as error:
            # Served as it is; without coordinates it becomes a failure of its rollout.
            logger.warning("the answer cannot be read: %s", error, extra=_ids(self._plan.context))
        self._staged_exchange.served = served
        return Nothing("staged_externally"), reply

    def _stripped(self, payload: dict[str, Any], decoded: bytes) -> bytes:
        handler = self._plan.handler
        token = set_token_sink(self._plan.context)
        try:
            handler.prepare_response(payload)
        finally:
            reset_token_sink(token)
        # The text is edited where the handler says how, so that all else stays byte for byte.
        edits = getattr(handler, "response_edits", None)
        return orjson.dumps(payload) if edits is None else edit_members(decoded, edits)


def _ids(context: CaptureContext) -> dict[str, str]:
    return {
        "action": "staging_not_recorded",
        "rollout_id": context.rollout_id,
        "model_call_id": context.model_call_id,
    }
