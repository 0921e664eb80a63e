"""One captured call on the wire: passes the engine's answer on, watches it, holds its end.

Invariants: bytes go out as they come; what completes the answer goes out only after the record
is durable; exactly one outcome is recorded per call, also when the client leaves, the engine
breaks off or this task is cancelled. "Complete" is read from the payload, never from a normal
return; a ``send`` that returned is not a delivery.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from middleware.asgi_messages import changed_headers, json_messages
from middleware.capture import health, mark_hole, note_delivery, record_outcome
from middleware.codings import codings_of, decode_body
from middleware.context import CaptureContext, reset_token_sink, set_token_sink
from middleware.dialects.base import AnswerReader, Dialect
from middleware.engines.base import TokenAsk
from middleware.errors import InvalidInputError, StoreError, TokenCaptureError, UpstreamError
from middleware.http_status import status_of
from middleware.json_edit import edit_members, loads
from middleware.observer import CallOutcome, CallReport
from middleware.outcome import Captured, Ending, Hole, Nothing, Outcome, judge_body
from middleware.protocols import IntentTicket
from middleware.stream_filter import StreamFilter

logger = logging.getLogger(__name__)

_MAX_VERSION_DIGITS: Final = 18
_BIG_BODY: Final = 262_144  # bytes; above this parsing and editing leave the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """All that was decided about a call before dispatch."""

    context: CaptureContext
    dialect: Dialect
    ask: TokenAsk
    reader: AnswerReader
    body: bytes  # as it goes to the engine
    ticket: IntentTicket | None
    drain: bool  # read the answer to its end when the client leaves
    max_decoded_body_bytes: int


class CapturedExchange:
    """Runs one call against the inner application. Use once: ``await exchange.run()``."""

    def __init__(self, plan: CallPlan, app: ASGIApp, receive: Receive, send: Send) -> None:
        self._plan = plan
        self._app = app
        self._receive = receive
        self._send = send
        self._gone = asyncio.Event()  # the client left
        self._abandoned = asyncio.Event()  # the engine's work is to be stopped
        self._request_taken = False
        self._mode: _Mode | None = None
        self._intent_safe = plan.ticket is None
        self._outcome: Outcome | None = None
        self._entry_ids: list[str] = []
        self._delivered: bool | None = None
        self._ended = False  # the last body message went out
        self._began = time.monotonic()
        self._concluded_at: float | None = None
        self._released_at: float | None = None
        self._first_token_at: float | None = None
        self._sink_s = 0.0

    @property
    def client_gone(self) -> bool:
        """Whether the client left before the end."""
        return self._gone.is_set()

    def abandon(self) -> None:
        """Stop the engine's work; what was seen is recorded."""
        self._abandoned.set()

    async def run(self, scope: Scope) -> None:
        """Serve the call to its end, and record it."""
        watcher = asyncio.create_task(self._watch_client(), name="token-capture-client-watch")
        token = set_token_sink(self._plan.context)
        failure: UpstreamError | None = None
        crashed = True
        try:
            await self._app(scope, self._inner_receive, self._inner_send)
            crashed = False
        except UpstreamError as error:
            failure, crashed = error, False
        finally:
            reset_token_sink(token)
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
            # Also when this task is being cancelled (shutdown): the outcome must not be lost.
            await self._finish(failure, crashed=crashed)

    # --- the client's side ---------------------------------------------------------------------

    async def _watch_client(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                # After the end servers report a disconnect too; that one means nothing.
                if not self._ended:
                    self._gone.set()
                    if not self._plan.drain:
                        self._abandoned.set()
                return

    async def _inner_receive(self) -> Message:
        if not self._request_taken:
            self._request_taken = True
            return {"type": "http.request", "body": self._plan.body, "more_body": False}
        await self._abandoned.wait()
        return {"type": "http.disconnect"}

    async def _out(self, message: Message) -> None:
        if self._gone.is_set():
            return
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._ended = True
        try:
            await self._send(message)
        except OSError:
            self._gone.set()
            if not self._plan.drain:
                self._abandoned.set()

    async def _out_body(self, body: bytes, *, more: bool) -> None:
        if body or not more:
            await self._out({"type": "http.response.body", "body": body, "more_body": more})

    # --- the engine's side ---------------------------------------------------------------------

    async def _inner_send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._mode = self._choose_mode(message)
            await self._mode.start(message)
        elif message["type"] == "http.response.body" and self._mode is not None:
            await self._mode.body(message.get("body", b""), more=message.get("more_body", False))
        else:
            await self._out(message)

    def _choose_mode(self, start: Message) -> _Mode:
        if (refusal := self._plan.reader.refusal) is not None:
            return _Refused(self, refusal)
        status = start["status"]
        headers = Headers(raw=start["headers"])
        if status < 200 or status >= 300 or status == 204:
            return _PassThrough(self, status)
        version = headers.get("x-weight-version")
        if version is not None:
            is_number = version.isdecimal() and len(version) <= _MAX_VERSION_DIGITS
            self._plan.context.weight_version = int(version) if is_number else version
        if headers.get("content-type", "").lower().startswith("text/event-stream"):
            if not codings_of(headers.get("content-encoding", "")):
                return _Stream(self)
            return _Whole(self, start, is_stream=True)
        return _Whole(self, start, is_stream=False)

    async def release_allowed(self) -> None:
        """Return when the intent is on disk: before that no model text may go out."""
        if self._intent_safe or self._plan.ticket is None:
            return
        self._intent_safe = True
        try:
            await self._plan.ticket.wait_durable()
        except StoreError as error:
            # The call is served, but a crash could now lose it unseen.
            health.intent_sync_failures += 1
            await mark_hole(self._plan.context, "intent_not_durable", str(error))

    def note_progress(self) -> None:
        """Take the time of the first generated token."""
        if self._first_token_at is None and self._plan.reader.num_tokens:
            self._first_token_at = time.monotonic()

    @property
    def plan(self) -> CallPlan:
        """What was decided before dispatch."""
        return self._plan

    @property
    def concluded(self) -> bool:
        """Whether the outcome is recorded."""
        return self._outcome is not None

    async def conclude(self, outcome: Outcome) -> None:
        """Record the outcome, once; survives the cancellation of this task."""
        if self._outcome is not None:
            return
        self._outcome = outcome
        self._concluded_at = now = time.monotonic()
        timings = {"total_ms": round((now - self._began) * 1000, 3)}
        if self._first_token_at is not None:
            timings["ttft_ms"] = round((self._first_token_at - self._began) * 1000, 3)
        recording = asyncio.create_task(self._record(outcome, timings), name="token-capture-record")
        await _uninterrupted(recording)

    async def _record(self, outcome: Outcome, timings: dict[str, float]) -> None:
        began = time.monotonic()
        self._entry_ids = await record_outcome(self._plan.context, outcome, timings=timings)
        self._sink_s = time.monotonic() - began

    async def release(self, held: bytes, *, more: bool) -> None:
        """Send what completes the answer; note whether the connection took it."""
        await self._out_body(held, more=True)
        # Judged before the last message: afterwards servers report a disconnect to everybody.
        self._delivered = not self._gone.is_set()
        self._released_at = time.monotonic()
        if not more:
            await self._out_body(b"", more=False)

    async def send_start(self, start: Message, *, changed: bool) -> None:
        """The engine's head plus our two headers; framing goes when the body may change."""
        context = self._plan.context
        await self._out(
            changed_headers(
                start,
                remove=("content-length", "content-encoding") if changed else (),
                put={"x-model-call-id": context.model_call_id, "x-rollout-id": context.rollout_id},
            )
        )

    async def pass_body(self, body: bytes, *, more: bool) -> None:
        """Send bytes that do not complete the answer."""
        await self._out_body(body, more=more)

    async def refuse(self, status: int, code: str, message: str) -> None:
        """Our own refusal in the dialect's shape."""
        body = self._plan.dialect.error_body(status, code, message)
        start, content = json_messages(status, body)
        await self.send_start(start, changed=False)
        await self._out(content)

    # --- the end -------------------------------------------------------------------------------

    async def _finish(self, failure: UpstreamError | None, *, crashed: bool) -> None:
        """``crashed``: an exception is on its way to the server, which answers for it."""
        if not self.concluded:
            ending = Ending.CLIENT_GONE if self._gone.is_set() else Ending.RESET
            if self._mode is None:
                reason = "client_disconnect" if self._gone.is_set() else "upstream_unreachable"
                await self.conclude(Nothing(reason))
                if not crashed:
                    await self.refuse(502, "upstream_unreachable", _unreachable(failure))
            else:
                await self._mode.broke_off(ending, failure, crashed=crashed)
        if isinstance(self._outcome, Captured) and self._outcome.delivered is None:
            await note_delivery(self._plan.context, self._entry_ids, self._notes())
        self._plan.context.observer.ended(self._report())

    def _report(self) -> CallReport:
        now = time.monotonic()
        outcome, reason = self._verdict()
        captured = isinstance(self._outcome, Captured)
        first, concluded, released = self._first_token_at, self._concluded_at, self._released_at
        return CallReport(
            context=self._plan.context,
            outcome=outcome,
            reason=reason,
            started_at=time.time() - (now - self._plan.context.arrived_at),
            total_s=now - self._plan.context.arrived_at,
            before_dispatch_s=self._began - self._plan.context.arrived_at,
            first_token_s=None if first is None else first - self._began,
            put_s=self._sink_s if captured else None,
            held_s=None if released is None or concluded is None else released - concluded,
            delivered=self._delivered,
        )

    def _verdict(self) -> tuple[CallOutcome, str]:
        match self._outcome:
            case Captured(whole=whole, cut=cut) if self._plan.context.committed:
                return ("entry" if whole else "cut"), cut
            case _ if self._plan.context.committed:
                return "entry", ""  # staged: its tokens stay with the framework's worker
            case Captured():
                return "incomplete", "not_stored"
            case Hole(code=code):
                return "incomplete", code
            case Nothing(reason=reason):
                return "cancelled", reason
        return "incomplete", "not_recorded"

    def _notes(self) -> dict[str, Any]:
        notes: dict[str, Any] = {"sink_ms": round(self._sink_s * 1000, 3)}
        if self._delivered is not None:
            notes["delivered"] = self._delivered
        elif self._gone.is_set():
            notes["delivered"] = False  # it left while its end was held
        return notes


class _Mode:
    """How one kind of response is handled. ``broke_off`` is called when it ended early."""

    def __init__(self, exchange: CapturedExchange) -> None:
        self._exchange = exchange

    async def start(self, message: Message) -> None:
        raise NotImplementedError

    async def body(self, chunk: bytes, *, more: bool) -> None:
        raise NotImplementedError

    async def broke_off(
        self, ending: Ending, failure: UpstreamError | None, *, crashed: bool
    ) -> None:
        raise NotImplementedError


class _PassThrough(_Mode):
    """Redirects, errors, 204: no model text; the intent is cancelled before the end goes out."""

    def __init__(self, exchange: CapturedExchange, status: int) -> None:
        super().__init__(exchange)
        self._reason = f"status_{status}"

    async def start(self, message: Message) -> None:
        await self._exchange.send_start(message, changed=False)

    async def body(self, chunk: bytes, *, more: bool) -> None:
        if not more:
            await self._exchange.conclude(Nothing(self._reason))
        await self._exchange.pass_body(chunk, more=more)

    async def broke_off(
        self, ending: Ending, failure: UpstreamError | None, *, crashed: bool
    ) -> None:
        await self._exchange.conclude(Nothing(self._reason))


class _Refused(_Mode):
    """Refused by us after dispatch, before anything was generated: our answer, not the engine's."""

    def __init__(self, exchange: CapturedExchange, error: TokenCaptureError) -> None:
        super().__init__(exchange)
        self._error = error

    async def start(self, message: Message) -> None:
        await self._exchange.conclude(Nothing(self._error.code))
        status = status_of(self._error)
        await self._exchange.refuse(status, self._error.code, str(self._error))

    async def body(self, chunk: bytes, *, more: bool) -> None:
        """The engine's words about it are dropped."""

    async def broke_off(
        self, ending: Ending, failure: UpstreamError | None, *, crashed: bool
    ) -> None:
        """Concluded at its start."""


class _Stream(_Mode):
    """An event stream: frames go out as they are complete, the tail is held."""

    def __init__(self, exchange: CapturedExchange) -> None:
        super().__init__(exchange)
        self._filter = StreamFilter(exchange.plan.reader, exchange.plan.ask)

    async def start(self, message: Message) -> None:
        await self._exchange.send_start(message, changed=True)

    async def body(self, chunk: bytes, *, more: bool) -> None:
        exchange = self._exchange
        if exchange.concluded:
            # Only what follows [DONE] comes here; it changes nothing any more.
            await exchange.pass_body(chunk, more=more)
            return
        ready = self._filter.feed(chunk, last=not more)
        exchange.note_progress()
        if ready:
            await exchange.release_allowed()
            await exchange.pass_body(ready, more=True)
        if self._filter.done_seen or not more:
            await exchange.release_allowed()
            await exchange.conclude(self._filter.judge(Ending.CLEAN))
            await exchange.release(self._filter.held, more=more)

    async def broke_off(
        self, ending: Ending, failure: UpstreamError | None, *, crashed: bool
    ) -> None:
        await self._exchange.conclude(self._filter.judge(ending))
        # The client gets what was held, then sees the connection break as it would without us.
        await self._exchange.pass_body(self._filter.held, more=True)


class _Whole(_Mode):
    """A whole answer (or a compressed stream): it waits for its end and for the record."""

    def __init__(self, exchange: CapturedExchange, start: Message, *, is_stream: bool) -> None:
        super().__init__(exchange)
        self._start = start
        self._read = self._read_stream if is_stream else self._read_json
        self._body = bytearray()

    async def start(self, message: Message) -> None:
        """Nothing goes out before the record is durable."""

    async def body(self, chunk: bytes, *, more: bool) -> None:
        self._body += chunk
        if more:
            return
        exchange = self._exchange
        raw = bytes(self._body)
        if len(raw) > _BIG_BODY:
            outcome, reply = await asyncio.to_thread(self._outcome, raw)
        else:
            outcome, reply = self._outcome(raw)
        exchange.note_progress()
        if isinstance(outcome, Hole) and exchange.client_gone:
            # Engines answer a client that left with anything; nothing of it was passed on.
            outcome = Nothing("client_disconnect")
        await exchange.release_allowed()
        await exchange.conclude(outcome)
        start = self._start
        if reply is not raw:
            start = changed_headers(
                start,
                remove=("content-length", "content-encoding"),
                put={"content-length": str(len(reply))},
            )
        await exchange.send_start(start, changed=False)
        await exchange.release(reply, more=False)

    def _outcome(self, raw: bytes) -> tuple[Outcome, bytes]:
        """The outcome, and the body for the agent (``raw`` itself when nothing changes)."""
        coding = Headers(raw=self._start["headers"]).get("content-encoding", "")
        limit = self._exchange.plan.max_decoded_body_bytes
        try:
            decoded = decode_body(raw, coding, limit=limit)
        except InvalidInputError as error:
            return Hole("undecodable_answer", str(error)), raw
        outcome, reply = self._read(decoded)
        return outcome, raw if reply is decoded else reply

    def _read_json(self, decoded: bytes) -> tuple[Outcome, bytes]:
        if not decoded.strip():
            return Nothing("empty_answer"), decoded
        try:
            payload = loads(decoded)
        except ValueError as error:
            return Hole("unparsable_answer", str(error)), decoded
        plan = self._exchange.plan
        outcome = judge_body(payload, plan.reader)
        return outcome, edit_members(decoded, plan.ask.hide)

    def _read_stream(self, decoded: bytes) -> tuple[Outcome, bytes]:
        stream = StreamFilter(self._exchange.plan.reader, self._exchange.plan.ask)
        ready = stream.feed(decoded, last=True)
        return stream.judge(Ending.CLEAN), ready + stream.held

    async def broke_off(
        self, ending: Ending, failure: UpstreamError | None, *, crashed: bool
    ) -> None:
        gone = ending is Ending.CLIENT_GONE
        # Nothing was passed on yet, so nothing can be lost.
        await self._exchange.conclude(Nothing("client_disconnect" if gone else "upstream_error"))
        if not gone and not crashed:
            await self._exchange.refuse(502, "upstream_unreachable", _unreachable(failure))


def _unreachable(failure: UpstreamError | None) -> str:
    reason = str(failure) if failure else "it ended its answer early"
    return f"the engine did not answer: {reason}; check that it runs, then retry"


async def _uninterrupted(task: asyncio.Task[None]) -> None:
    """Await a task to its end even if this one is cancelled meanwhile; then re-raise."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
