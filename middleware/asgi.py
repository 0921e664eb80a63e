"""CaptureMiddleware: finds tagged requests and turns them into captured calls. Pure ASGI.

Invariant: everything that is not tagged passes untouched; a tagged request that cannot be
captured is refused before the engine sees it, or makes its rollout incomplete, never passed on
silently. Works around any ASGI application: the sidecar's proxy, or an engine's own app.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from middleware.agent_tokens import AgentTokens
from middleware.asgi_messages import ClientGone, changed_headers, json_messages, read_body
from middleware.capture import (
    cancel_intent,
    decide_named_parent,
    decide_parent,
    decide_parent_by_response,
    health,
    mark_hole,
    open_intent,
)
from middleware.codings import decode_body
from middleware.context import SAMPLING_KEYS, CaptureContext
from middleware.dialects.base import Dialect
from middleware.dialects.choices import openai_error
from middleware.engines import EngineProfile, engine_profile
from middleware.errors import (
    InvalidIdError,
    InvalidInputError,
    TokenCaptureError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
    UnauthorizedError,
    UnknownRouteError,
    UpstreamError,
)
from middleware.exchange import CallPlan, CapturedExchange
from middleware.http_status import RETRY_AFTER_S, status_of
from middleware.json_edit import loads, set_members
from middleware.observer import NO_OBSERVER, CaptureObserver
from middleware.open_calls import OpenCallRegistry
from middleware.paths import (
    CAPTURE_SEGMENT,
    ROLLOUT_SEGMENT,
    TaggedPath,
    parse_tagged_path,
    validate_call_id,
)
from middleware.prompt_shape import prompt_config_digest
from middleware.protocols import LineageResolver, TokenSink, installed_token_sink
from middleware.routes import NON_GENERATING, Kind, Route, classify, dialect_of_path
from middleware.staging_call import StagedCalls, StagedExchange, StagedPlan
from middleware.token_origin import EngineProvider, ReportedTokens, TokenOrigin

logger = logging.getLogger(__name__)

CALL_SCOPE_KEY: Final = "token_capture.context"
"""In the inner scope of a captured call: its ``CaptureContext``."""

_GUIDE_KEYS: Final = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_BIG_REQUEST: Final = 262_144  # bytes; above this decoding and parsing leave the event loop
_CHOICE_SUFFIX: Final = re.compile(r".*\.[0-9]+")
_MAX_BASE_ID: Final = 180  # leaves room for ".<choice>"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """How calls are captured; the names are those of the settings."""

    max_body_bytes: int | None = None
    max_decoded_body_bytes: int = 1 << 30
    drain_on_disconnect: bool = False
    delta_records: bool = True
    non_generating: tuple[str, ...] = NON_GENERATING


class CaptureMiddleware:
    """Captures the calls of tagged rollouts.

    Args:
        app: what serves the requests.
        engine_app: what serves model traffic, when that is not ``app`` (the sidecar's proxy).
        sink: where records go; default the installed one.
        resolver: decides parents; default the installed one.
        engine: how the engine behind ``app`` reports tokens, or an async function that finds
            out (asked per call; it should remember).
        tokens: where tokens come from, when it is not the engine's answers.
        control_app: what serves the control routes, when that is not ``app``.
        agent_tokens: set where the rollout id in an agent's URL must be signed; control routes
            take plain ids.
        takes_calls: whether a connection may carry model calls (another port is for control).
        staging: set where tokens stay with a framework's workers (external staging).
        options: see ``CaptureOptions``.
        calls: registry of running calls, shared with the control routes.
        observer: told what became of calls (metrics, traces).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        engine_app: ASGIApp | None = None,
        sink: TokenSink | None = None,
        resolver: LineageResolver | None = None,
        engine: EngineProfile | EngineProvider | None = None,
        tokens: TokenOrigin | None = None,
        control_app: ASGIApp | None = None,
        agent_tokens: AgentTokens | None = None,
        takes_calls: Callable[[Scope], bool] = lambda _: True,
        staging: StagedCalls | None = None,
        options: CaptureOptions | None = None,
        calls: OpenCallRegistry | None = None,
        observer: CaptureObserver = NO_OBSERVER,
    ) -> None:
        self.app = app
        self._engine_app = engine_app if engine_app is not None else app
        self.calls = calls if calls is not None else OpenCallRegistry()
        self._sink = sink
        self._resolver = resolver
        self._control_app = control_app if control_app is not None else app
        self._agent_tokens = agent_tokens
        self._takes_calls = takes_calls
        self._tokens = tokens or ReportedTokens(engine or engine_profile("vllm"))
        self._staging = staging
        self._options = options or CaptureOptions()
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = _with_single_root(scope)
        try:
            root_path = scope.get("root_path", "").encode()
            tagged = parse_tagged_path(raw_path_of(scope), root_path, self._agent_tokens)
        except (InvalidIdError, UnauthorizedError) as error:
            await self._refuse(send, dialect_of_path(scope["path"]), error)
            return
        if tagged is None:
            await self.app(scope, receive, send)
        elif tagged.captured:
            await self._serve_tagged(scope, receive, send, tagged)
        elif (refusal := self._not_an_agent(scope, tagged)) is not None:
            await self._refuse(send, dialect_of_path(scope["path"]), refusal)
        else:
            path = tagged.rest or b"/"
            await self._engine_app(_inner_scope(scope, tagged, path), receive, send)

    def _not_an_agent(self, scope: Scope, tagged: TaggedPath) -> TokenCaptureError | None:
        """Why this is no place for model traffic; None: it is."""
        if not self._takes_calls(scope):
            return UnknownRouteError("this port is for control routes: send model calls to --port")
        if self._agent_tokens is not None and not tagged.signed:
            return UnauthorizedError(
                "the rollout id in an agent's URL must be signed here: give the agent the base "
                "URL that `token-capture url ROLLOUT` prints"
            )
        return None

    async def _serve_tagged(
        self, scope: Scope, receive: Receive, send: Send, tagged: TaggedPath
    ) -> None:
        route = classify(
            scope["method"], tagged.rest, self._options.non_generating, self._tokens.routes
        )
        inner = _inner_scope(scope, tagged, route.raw_path)
        refusal = None if route.kind is Kind.CONTROL else self._not_an_agent(scope, tagged)
        if route.kind is Kind.CONTROL and tagged.signed:
            refusal = UnauthorizedError("control routes take the plain rollout id and a token")
        if refusal is not None:
            await self._refuse(send, dialect_of_path(scope["path"]), refusal)
        elif route.kind is Kind.HEAD:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif route.kind is Kind.CONTROL:
            await self._control_app(_control_scope(scope, tagged, route), receive, send)
        elif route.kind is Kind.FORWARD:
            await self._engine_app(inner, receive, send)
        elif route.kind is Kind.UNKNOWN:
            await _send_json(send, 404, _unknown_route(tagged))
        elif route.kind is Kind.CAPTURED:
            await self._serve_call(inner, receive, send, tagged, route)
        else:
            await self._serve_unobserved(inner, receive, send, tagged, route)

    # --- captured calls ------------------------------------------------------------------------

    async def _serve_call(
        self, scope: Scope, receive: Receive, send: Send, tagged: TaggedPath, route: Route
    ) -> None:
        dialect = route.dialect
        assert dialect is not None  # by classify
        try:
            request = await self._read_request(scope, receive)
            dialect.check(request.body)
            if not dialect.generates(request.body):
                await self._engine_app(*request.replayed(scope, receive), send)
                return
            plan = await self._plan(scope, tagged, dialect, request)
        except ClientGone:
            return
        except TokenCaptureError as error:
            await self._refuse(send, dialect, error)
            return
        exchange = self._exchange(plan, receive, send)
        self.calls.add(tagged.rollout_id, exchange)
        try:
            await exchange.run(_call_scope(scope, plan))
        finally:
            self.calls.remove(tagged.rollout_id, exchange)

    def _exchange(self, plan: CallPlan, receive: Receive, send: Send) -> CapturedExchange:
        if isinstance(plan, StagedPlan):
            return StagedExchange(plan, self._engine_app, receive, send)
        return CapturedExchange(plan, self._engine_app, receive, send)

    async def _read_request(self, scope: Scope, receive: Receive) -> _Request:
        """The body, decoded and parsed.

        Raises:
            BodyTooLargeError, UnsupportedEncodingError, InvalidInputError: see their codes.
        """
        options = self._options
        raw = await read_body(receive, options.max_body_bytes)
        coding = Headers(raw=scope["headers"]).get("content-encoding", "")
        limit = options.max_decoded_body_bytes
        if coding or len(raw) > _BIG_REQUEST:
            return await asyncio.to_thread(_parsed_request, raw, coding, limit)
        return _parsed_request(raw, coding, limit)

    async def _plan(
        self, scope: Scope, tagged: TaggedPath, dialect: Dialect, request: _Request
    ) -> CallPlan:
        """Decide everything that is decided before dispatch, and write the intent.

        Raises:
            TokenCaptureError: the call is refused; nothing was sent to the engine.
        """
        body = request.body
        num_choices = dialect.num_choices(body)
        context = self._context(scope, tagged, dialect, request, num_choices)
        if self._staging is not None:
            return await self._staging.plan(
                context,
                dialect,
                body,
                request.decoded,
                drain=self._options.drain_on_disconnect,
                max_decoded_body_bytes=self._options.max_decoded_body_bytes,
            )
        items = dialect.request_items(body)
        previous = dialect.previous_response(body)
        if previous is not None:
            await decide_parent_by_response(context, items or [], previous)
        elif items is not None:
            await decide_parent(context, items, size_hint=len(request.decoded))
        if context.explicit_parent_call_id is not None:
            await decide_named_parent(context)
        prepared = await self._tokens.prepare(context, dialect, body)
        context.created_at = time.time()
        ticket = await open_intent(context)
        health.calls += 1
        return CallPlan(
            context=context,
            dialect=dialect,
            ask=prepared.ask,
            reader=prepared.reader,
            body=await _edited(request.decoded, prepared.ask.members),
            ticket=ticket,
            drain=self._options.drain_on_disconnect,
            max_decoded_body_bytes=self._options.max_decoded_body_bytes,
        )

    def _context(
        self,
        scope: Scope,
        tagged: TaggedPath,
        dialect: Dialect,
        request: _Request,
        num_choices: int,
    ) -> CaptureContext:
        headers = Headers(raw=scope["headers"])
        body = request.body
        model = body.get("model")
        return CaptureContext(
            rollout_id=tagged.rollout_id,
            model_call_id=_call_id(headers.get("x-model-call-id"), num_choices),
            token_sink=self._sink,
            lineage_store=self._resolver,
            model=model if isinstance(model, str) else "",
            delta_records=self._options.delta_records,
            dialect=dialect.name,
            agent_id=headers.get("x-agent-id"),
            trace_parent=headers.get("traceparent", ""),
            explicit_parent_call_id=_explicit_parent(headers),
            request_digest=request.digest,
            prompt_config_digest=_prompt_config(body),
            sampling=_sampling(body),
            guided=_is_guided(body),
            num_choices=num_choices,
            observer=self._observer,
        )

    # --- requests whose answer cannot be read --------------------------------------------------

    async def _serve_unobserved(
        self, scope: Scope, receive: Receive, send: Send, tagged: TaggedPath, route: Route
    ) -> None:
        """Forward with an intent: its answer may feed a later prompt, and we cannot read it."""
        context = CaptureContext(
            rollout_id=tagged.rollout_id,
            model_call_id=uuid.uuid4().hex,
            token_sink=self._sink,
            created_at=time.time(),
            observer=self._observer,
        )
        try:
            if route.kind is Kind.DELETE:
                await self._require_open(tagged.rollout_id)
                await self._engine_app(scope, receive, send)
                return
            await open_intent(context, observed=False)
        except TokenCaptureError as error:
            await self._refuse(send, None, error)
            return
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if 200 <= status < 300:
                    detail = f"{scope['method']} {route.raw_path.decode('latin-1')}"
                    await mark_hole(context, "unobserved_path", detail)
            await send(message)

        try:
            await self._engine_app({**scope, CALL_SCOPE_KEY: context}, receive, send_and_note)
        except UpstreamError as error:
            if status == 0:
                await self._refuse(send, None, error)
        finally:
            if not 200 <= status < 300:
                await cancel_intent(context, f"status_{status}" if status else "no_answer")

    async def _refuse(self, send: Send, dialect: Dialect | None, error: TokenCaptureError) -> None:
        self._observer.refused(error.code)
        await _refuse(send, dialect, error)

    async def _require_open(self, rollout_id: str) -> None:
        status = getattr(self._sink or installed_token_sink(), "status", None)
        if status is None:
            return
        state = (await status(rollout_id)).state
        if state == "frozen":
            raise TokenCaptureFrozenError(f"rollout {rollout_id} is frozen")
        if state == "retired":
            raise TokenCaptureRetiredError(f"rollout {rollout_id} is retired")


@dataclass(frozen=True, slots=True)
class _Request:
    raw: bytes
    decoded: bytes
    body: dict[str, Any]
    digest: str  # sha256 hex of ``decoded``

    def replayed(self, scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
        """The request as it came, for the inner application to read again."""
        taken = False

        async def receive_again() -> Message:
            nonlocal taken
            if taken:
                return await receive()
            taken = True
            return {"type": "http.request", "body": self.raw, "more_body": False}

        return scope, receive_again


def _parsed_request(raw: bytes, coding: str, limit: int) -> _Request:
    decoded = decode_body(raw, coding, limit=limit)
    try:
        body = loads(decoded)
    except ValueError as error:
        raise InvalidInputError(f"the request body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidInputError("the request body must be a JSON object")
    return _Request(raw, decoded, body, hashlib.sha256(decoded).hexdigest())


def raw_path_of(scope: Scope) -> bytes:
    """The path as it came over the wire, without the query."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.partition(b"?")[0]


def _with_single_root(scope: Scope) -> Scope:
    """Servers put ``root_path`` before the path; where the client sent it too, it is doubled."""
    root = scope.get("root_path", "").rstrip("/")
    if not root or not scope["path"].startswith(f"{root}{root}/"):
        return scope
    raw_path = raw_path_of(scope).removeprefix(root.encode())
    return {**scope, "path": scope["path"].removeprefix(root), "raw_path": raw_path}


def _inner_scope(scope: Scope, tagged: TaggedPath, path: bytes) -> Scope:
    raw_path = tagged.prefix + path
    return {
        **scope,
        "raw_path": raw_path,
        "path": unquote_to_bytes(raw_path).decode("utf-8", "replace"),
    }


def _control_scope(scope: Scope, tagged: TaggedPath, route: Route) -> Scope:
    """The control routes see the tag and the name without doubled slashes."""
    tag = f"/{ROLLOUT_SEGMENT}/{tagged.rollout_id}/{CAPTURE_SEGMENT}"
    return _inner_scope(scope, tagged, tag.encode() + route.raw_path)


def _call_scope(scope: Scope, plan: CallPlan) -> Scope:
    """The inner scope of a captured call: plain body, identity answer, right length."""
    headers = changed_headers(
        {"headers": scope["headers"]},
        remove=("content-encoding", "transfer-encoding"),
        put={"content-length": str(len(plan.body)), "accept-encoding": "identity"},
    )["headers"]
    return {**scope, "headers": headers, CALL_SCOPE_KEY: plan.context}


def _call_id(given: str | None, num_choices: int) -> str:
    if given is None:
        return uuid.uuid4().hex
    validate_call_id(given)
    if num_choices > 1 and (len(given) > _MAX_BASE_ID or _CHOICE_SUFFIX.fullmatch(given)):
        raise InvalidIdError(
            "with several choices x-model-call-id may have at most 180 characters and must not "
            "end in '.' and digits: the choices are recorded as <id>.<i>",
            code="invalid_call_id",
        )
    return given


def _explicit_parent(headers: Headers) -> str | None:
    given = headers.get("x-parent-model-call-id")
    return None if given is None else validate_call_id(given)


async def _edited(body: bytes, members: Mapping[str, Any]) -> bytes:
    if len(body) > _BIG_REQUEST:
        return await asyncio.to_thread(set_members, body, members)
    return set_members(body, members)


def _sampling(body: Mapping[str, Any]) -> dict[str, float]:
    """The sampling settings that are numbers; anything else is the engine's to refuse."""
    values = {key: body.get(key) for key in SAMPLING_KEYS}
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63
    }


def _prompt_config(body: Mapping[str, Any]) -> str:
    try:
        return prompt_config_digest(body)
    except ValueError:
        return ""  # cannot be hashed: no digest, so it decides nothing


def _is_guided(body: Mapping[str, Any]) -> bool:
    """Whether a grammar restricts what can be sampled (log-probs are then those after it)."""
    choice = body.get("tool_choice")
    response_format = body.get("response_format")
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    steers = isinstance(choice, dict) and choice.get("type") not in ("auto", "none")
    return (
        choice == "required"
        or steers
        or kind not in (None, "text")
        or any(body.get(key) for key in _GUIDE_KEYS)
    )


# --- refusals ------------------------------------------------------------------------------------


async def _refuse(send: Send, dialect: Dialect | None, error: TokenCaptureError) -> None:
    status = status_of(error)
    shape = dialect.error_body if dialect is not None else openai_error
    logger.info("call refused: %s", error, extra={"action": "call_refused", "code": error.code})
    headers = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else None
    await _send_json(send, status, shape(status, error.code, str(error)), headers)


async def _send_json(
    send: Send, status: int, content: Any, headers: Mapping[str, str] | None = None
) -> None:
    for message in json_messages(status, content, headers):
        await send(message)


def _unknown_route(tagged: TaggedPath) -> dict[str, Any]:
    name = tagged.rest.decode("latin-1")
    return openai_error(
        404,
        "unknown_route",
        f"there is no route {name!r} below a rollout: model calls go to /v1/..., control "
        "requests to freeze, snapshot, trajectories, retire",
    )
