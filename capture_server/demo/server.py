"""The demo engine over HTTP: routes, errors and a server for tests and the demo.

Invariant: statuses, headers and bodies are vLLM 0.32's; what is ours is below ``/demo``. A client
that leaves stops its generation within one token, streaming or not.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar, cast
from uuid import uuid4

import anyio
import anyio.to_thread
import orjson
import uvicorn
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Send

from capture_server.demo import chat, completions
from capture_server.demo.engine import VERSION, DemoEngine
from capture_server.demo.errors import EngineRequestError
from capture_server.demo.tokenizer import TokenNamer
from capture_server.demo.wire_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    check_model,
    parse_body,
)
from capture_server.in_thread import served_in_thread

_Body = TypeVar("_Body", bound=BaseModel)
_Data = TypeVar("_Data", bytes, str)
_Result = TypeVar("_Result")

_BIG_BODY_BYTES = 16_384  # above it, reading and rendering the body leaves the event loop
_START_TIMEOUT_S = 10.0
_SCALE_OUT_PATHS = (
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions/render",
    "/inference/v1/generate",
)


def create_engine_app(engine: DemoEngine) -> Starlette:
    """The ASGI app around one engine."""
    routes = _Routes(engine)
    app = Starlette(
        routes=[
            _route("/v1/chat/completions", routes.post_chat, "POST"),
            _route("/v1/completions", routes.post_completions, "POST"),
            _route("/tokenize", routes.post_tokenize, "POST"),
            _route("/detokenize", routes.post_detokenize, "POST"),
            _route("/v1/models", routes.get_models, "GET"),
            _route("/health", routes.get_empty, "GET"),
            _route("/ping", routes.get_empty, "GET"),
            _route("/version", routes.get_version, "GET"),
            _route("/pause", routes.post_pause, "POST"),
            _route("/resume", routes.post_resume, "POST"),
            _route("/demo/generations", routes.get_generations, "GET"),
            _route("/demo/generations/{response_id}", routes.get_generation, "GET"),
            *(_route(path, routes.post_scale_out, "POST") for path in _SCALE_OUT_PATHS),
        ],
        middleware=[
            Middleware(
                CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]
            )
        ],
        exception_handlers={
            HTTPException: _http_error,
            EngineRequestError: _engine_error,
            UnicodeDecodeError: _unreadable_body,
        },
    )
    app.state.engine = engine
    return app


@asynccontextmanager
async def running_engine(
    engine: DemoEngine | None = None, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[str]:
    """Serve ``engine`` (a default one if None) from a thread of this process; gives its base URL.

    ``port=0`` takes a free one. On the way out running answers are aborted and the thread ends.
    """
    engine = engine or DemoEngine()
    async with served_in_thread(create_engine_app(engine), host=host, port=port) as url:
        try:
            yield url
        finally:
            engine.abort_all()


class _Routes:
    """The handlers; they hold nothing but the engine."""

    def __init__(self, engine: DemoEngine) -> None:
        self._engine = engine

    async def post_chat(self, request: Request) -> Response:
        response_id = _response_id("chatcmpl", request)
        call = await _off_loop_if_big(
            await request.body(), lambda body: self._chat_call(body, request, response_id)
        )
        if call.request.stream:
            return _EventStream(chat.event_stream(call))
        return await _unless_disconnected(request, lambda: chat.whole_answer(call))

    async def post_completions(self, request: Request) -> Response:
        response_id = _response_id("cmpl", request)
        parsed = await _parsed(CompletionRequest, request)
        call = await completions.CompletionCall.prepare(self._engine, parsed, response_id)
        if parsed.stream:
            return _EventStream(completions.event_stream(call))
        return await _unless_disconnected(request, lambda: completions.whole_answer(call))

    async def post_tokenize(self, request: Request) -> Response:
        parsed = await _parsed(TokenizeRequest, request)
        check_model(self._engine, parsed.model)
        text = self._text_to_tokenize(parsed)
        tokens = await _off_loop_if_big(text, self._engine.tokenizer.encode)
        names: list[str] | None = None
        if parsed.return_token_strs:
            names = list(map(TokenNamer(self._engine.tokenizer).push, tokens))
        answer = {"count": len(tokens), "max_model_len": self._engine.max_model_len}
        return _json({**answer, "tokens": tokens, "token_strs": names})

    async def post_detokenize(self, request: Request) -> Response:
        parsed = await _parsed(DetokenizeRequest, request)
        check_model(self._engine, parsed.model)
        for token_id in parsed.tokens:
            if not 0 <= token_id < self._engine.tokenizer.vocab_size:
                raise EngineRequestError(f"Token id {token_id} is out of vocabulary")
        return _json({"prompt": self._engine.tokenizer.decode(parsed.tokens)})

    async def get_models(self, request: Request) -> Response:
        del request
        now = int(time.time())
        permission = {
            "id": f"modelperm-{uuid4().hex[:16]}",
            "object": "model_permission",
            "created": now,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        model = {
            "id": self._engine.model_name,
            "object": "model",
            "created": now,
            "owned_by": "token-capture-demo",
            "root": self._engine.model_name,
            "parent": None,
            "max_model_len": self._engine.max_model_len,
            "permission": [permission],
        }
        return _json({"object": "list", "data": [model]})

    async def get_empty(self, request: Request) -> Response:
        del request
        return Response()

    async def get_version(self, request: Request) -> Response:
        del request
        return _json({"version": VERSION})

    async def post_pause(self, request: Request) -> Response:
        del request
        self._engine.pause()
        return _json({"status": "paused"})

    async def post_resume(self, request: Request) -> Response:
        del request
        self._engine.resume()
        return _json({"status": "resumed"})

    async def post_scale_out(self, request: Request) -> Response:
        del request
        raise EngineRequestError(
            "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to "
            "enable them.",
            kind="PermissionDeniedError",
            status=403,
        )

    async def get_generations(self, request: Request) -> Response:
        del request
        found = [self._recorded(response_id) for response_id in self._engine.response_ids()]
        return _json(
            {
                "object": "list",
                "data": found,
                "num_running": self._engine.num_running,
                "tokens_generated": self._engine.tokens_generated,
            }
        )

    async def get_generation(self, request: Request) -> Response:
        return _json(self._recorded(request.path_params["response_id"]))

    def _recorded(self, response_id: str) -> dict[str, Any]:
        records = self._engine.records(response_id)
        if records is None:
            raise HTTPException(404)
        return {"response_id": response_id, "choices": records}

    def _chat_call(self, body: bytes, request: Request, response_id: str) -> chat.ChatCall:
        parsed = parse_body(ChatRequest, body, _content_type(request))
        return chat.ChatCall.prepare(self._engine, parsed, response_id)

    def _text_to_tokenize(self, parsed: TokenizeRequest) -> str:
        if parsed.messages is None:
            return parsed.prompt or ""
        fields = parsed.model_dump(exclude={"prompt", "return_token_strs", "model"})
        return chat.chat_prompt(self._engine, ChatRequest.model_validate(fields))


class _EventStream(StreamingResponse):
    """A stream that closes its source also when the client leaves in the middle of a send."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        async with aclosing(cast(Any, self.body_iterator)):
            await super().stream_response(send)


async def _unless_disconnected(
    request: Request, answer: Callable[[], Awaitable[dict[str, Any]]]
) -> Response:
    """The answer as JSON; generation is cancelled when the client leaves before."""
    found: list[dict[str, Any]] = []
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        found.append(await answer())
        tasks.cancel_scope.cancel()
    return _json(found[0] if found else None)  # null goes to nobody


async def _parsed(kind: type[_Body], request: Request) -> _Body:
    body = await request.body()
    return await _off_loop_if_big(body, lambda data: parse_body(kind, data, _content_type(request)))


async def _off_loop_if_big(data: _Data, work: Callable[[_Data], _Result]) -> _Result:
    if len(data) < _BIG_BODY_BYTES:
        return work(data)
    return await anyio.to_thread.run_sync(work, data)


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "")


def _response_id(prefix: str, request: Request) -> str:
    return f"{prefix}-{request.headers.get('x-request-id') or uuid4().hex[:16]}"


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)
    return Response(body, status, headers, media_type="application/json")


def _route(path: str, endpoint: Callable[[Request], Awaitable[Response]], method: str) -> Route:
    route = Route(path, endpoint, methods=[method])
    # Starlette answers HEAD wherever it answers GET; FastAPI, and so vLLM, says 405.
    route.methods = {method}
    return route


async def _http_error(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    headers = {name.lower(): value for name, value in (exc.headers or {}).items()}
    return _json({"detail": exc.detail}, exc.status_code, headers)


async def _engine_error(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, EngineRequestError)
    return _json(exc.body(), exc.status)


async def _unreadable_body(_request: Request, _exc: Exception) -> Response:
    return _json({"detail": "There was an error parsing the body"}, 400)


def serve(engine: DemoEngine, *, host: str, port: int) -> None:
    """Serve ``engine`` until the process is told to stop."""
    app: ASGIApp = create_engine_app(engine)
    uvicorn.run(app, host=host, port=port, log_level="info", timeout_graceful_shutdown=5)
