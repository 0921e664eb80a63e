"""The hook inside vLLM against a small engine client of its shape; the real one: tests/engine."""

from __future__ import annotations

import asyncio
import enum
import json
import sys
import types
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from capture_server.stores.memory import MemoryCaptureStore
from capture_server.stores.registry import open_resolver
from middleware import vllm as hook
from middleware.records import TokenEntry
from middleware.vllm import TokenCapture

R = "/ng-rollout/r1/training-token-capture/v1"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class RequestOutputKind(enum.Enum):
    """As vLLM's."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    """As vLLM's, as far as it is read."""

    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    logprobs: int | None = None
    temperature: float = 0.7
    structured_outputs: Any = None


@dataclass
class Logprob:
    """As vLLM's."""

    logprob: float


@dataclass
class Span:
    """Weights that sampled some tokens."""

    version: str
    start: int
    end: int


@dataclass
class CompletionOutput:
    """As vLLM's."""

    index: int
    token_ids: list[int]
    logprobs: Any
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


class RequestOutput:
    """As vLLM's."""

    def __init__(self, prompt_token_ids: Any, outputs: list[CompletionOutput]) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.outputs = outputs


def choice(ids: list[int], *, index: int = 0, end: str | None = None, **more: Any) -> Any:
    """One choice of an output; the log-prob of token ``t`` is ``-t``."""
    positions = [{i: Logprob(-float(i)), 0: Logprob(-9.0)} for i in ids]
    return CompletionOutput(index, ids, positions, end, **more)


Script = list[list[CompletionOutput]]


class Renderer:
    """Renders a conversation as a start token, then 100 + role length, content length, 2."""

    async def render_chat_async(
        self, conversations: Any, chat_params: Any, tok_params: Any = None, **more: Any
    ) -> Any:
        prompts = []
        for conversation in conversations:
            ids = [1]
            for message in conversation:
                ids += [100 + len(message["role"]), *message["content"].encode(), 2]
            prompts.append({"type": "token", "prompt_token_ids": [*ids, 109]})
        return conversations, prompts

    def get_eos_token_id(self) -> int:
        return 2


class ModelConfig:
    """As vLLM's, as far as it is read."""

    max_model_len = 10_000
    logprobs_mode = "raw_logprobs"

    def try_get_generation_config(self) -> dict[str, Any]:
        return {"eos_token_id": [2, 3]}


@dataclass
class EngineClient:
    """Plays scripts, one per call of ``generate``."""

    scripts: list[Script] = field(default_factory=list)
    echo_prompt: bool = True
    asked: list[tuple[Any, Any]] = field(default_factory=list)
    closed: int = 0
    renderer: Any = field(default_factory=Renderer)
    model_config: Any = field(default_factory=ModelConfig)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        self.asked.append((prompt, sampling_params))
        script = self.scripts[len(self.asked) - 1]
        ids = prompt["prompt_token_ids"] if self.echo_prompt else [7, 7]
        try:
            for outputs in script:
                await asyncio.sleep(0)
                if sampling_params.logprobs is None:
                    outputs = [
                        CompletionOutput(o.index, o.token_ids, None, o.finish_reason)
                        for o in outputs
                    ]
                yield RequestOutput(ids, outputs)
        finally:
            self.closed += 1


def text_of(ids: list[int]) -> str:
    """What the fake engine says for tokens; end tokens say nothing."""
    return "".join(f"w{i} " for i in ids if i > 3)


class Server:
    """The routes of a vLLM-shaped server on an engine client."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.params: list[SamplingParams] = []
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)
        self.app.state.engine_client = client

    def sampling(self, body: dict[str, Any]) -> SamplingParams:
        kind = RequestOutputKind[body.get("kind", "DELTA" if body.get("stream") else "FINAL_ONLY")]
        self.params.append(SamplingParams(kind, 0 if body.get("logprobs") else None))
        return self.params[-1]

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        _, (prompt,) = await self.client.renderer.render_chat_async([body["messages"]], None)
        outputs = self.client.generate(prompt, self.sampling(body), "id", priority=1)
        if body.get("stream"):
            return StreamingResponse(self.chunks(outputs), media_type="text/event-stream")
        said: dict[int, tuple[list[int], str]] = {}
        async for output in outputs:
            for part in output.outputs:
                said[part.index] = (part.token_ids, part.finish_reason or "")
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text_of(ids)},
                "finish_reason": end,
            }
            for index, (ids, end) in said.items()
        ]
        return JSONResponse({"id": "x1", "model": "m", "choices": choices})

    async def chunks(self, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[str]:
        async for output in outputs:
            for part in output.outputs:
                delta = {"content": text_of(part.token_ids)}
                shown = {"index": part.index, "delta": delta, "finish_reason": part.finish_reason}
                yield f"data: {json.dumps({'id': 'x1', 'choices': [shown]})}\n\n"
        yield "data: [DONE]\n\n"

    async def responses(self, request: Request) -> Response:
        """Two generations behind one answer, as with built-in tools."""
        body = await request.json()
        said: list[int] = []
        prompt = [1, 50]
        for _ in range(len(self.client.scripts)):
            outputs = self.client.generate(
                {"type": "token", "prompt_token_ids": prompt}, self.sampling(body), "id"
            )
            async for output in outputs:
                said += output.outputs[0].token_ids
                prompt = [*prompt, *output.outputs[0].token_ids, 60]
        content = [{"type": "output_text", "text": text_of(said)}]
        message = {"type": "message", "role": "assistant", "content": content, "id": "msg_1"}
        usage = {"output_tokens": len(said)}
        return JSONResponse({"id": "resp_1", "model": "m", "output": [message], "usage": usage})


@pytest.fixture(autouse=True)
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of vLLM's names."""
    for name, members in {
        "vllm": {},
        "vllm.sampling_params": {
            "SamplingParams": SamplingParams,
            "RequestOutputKind": RequestOutputKind,
        },
        "vllm.outputs": {"RequestOutput": RequestOutput, "CompletionOutput": CompletionOutput},
        "vllm.logprobs": {"Logprob": Logprob},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


@dataclass
class Running:
    """A started application and its store."""

    http: httpx.AsyncClient
    store: MemoryCaptureStore
    server: Server

    async def entries(self) -> dict[str, TokenEntry]:
        """The frozen rollout's entries by call id."""
        snapshot = await self.store.freeze("r1")
        assert snapshot.incomplete is False, snapshot.incomplete_reasons
        return {entry.model_call_id: entry for entry in snapshot.entries}


async def lifespan(app: Any) -> tuple[list[dict[str, Any]], asyncio.Queue[Any], Any]:
    """Start an application's lifespan; its messages, the way to end it, and its task."""
    said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    await told.put({"type": "lifespan.startup"})
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    task = asyncio.create_task(app(scope, told.get, said.put))
    return [await said.get()], told, task


@asynccontextmanager
async def running(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch, **settings: str
) -> AsyncIterator[Running]:
    """The server with capture inside, on a store in memory."""
    for name, value in settings.items():
        monkeypatch.setenv(f"TOKEN_CAPTURE_{name}", value)
    store = MemoryCaptureStore()
    monkeypatch.setattr(
        hook, "open_shared_store", lambda url: (store, open_resolver("memory:", store))
    )
    server = Server(client)
    server.app.add_middleware(TokenCapture)
    messages, told, task = await lifespan(server.app)
    assert messages[0]["type"] == "lifespan.startup.complete", messages
    transport = httpx.ASGITransport(server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        yield Running(http, store, server)
    await told.put({"type": "lifespan.shutdown"})
    await task


@pytest.mark.parametrize(
    ("kind", "script"),
    [
        ("DELTA", [[choice([5])], [choice([6, 7])], [choice([2], end="stop")]]),
        ("CUMULATIVE", [[choice([5])], [choice([5, 6, 7])], [choice([5, 6, 7, 2], end="stop")]]),
        ("FINAL_ONLY", [[choice([5, 6, 7, 2], end="stop")]]),
    ],
)
async def test_outputs_are_accumulated_by_their_kind(
    monkeypatch: pytest.MonkeyPatch, kind: str, script: Script
) -> None:
    """The kind of output says what is new, never a guess from lengths."""
    async with running(EngineClient([script]), monkeypatch) as up:
        answer = await up.http.post(f"{R}/chat/completions", json=HELLO | {"kind": kind})
        (entry,) = (await up.entries()).values()
    assert answer.status_code == 200
    assert entry.generation_token_ids == [5, 6, 7, 2]
    assert entry.generation_log_probs == [-5.0, -6.0, -7.0, -2.0]
    assert entry.prompt_token_ids == [1, 104, *b"hi", 2, 109]
    assert entry.finish_reason == "stop"
    assert entry.sampling == {"temperature": 0.7, "logprobs_mode": "raw_logprobs"}


async def test_the_callers_parameters_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some endpoints report them to the agent: log-probs are asked for on a copy, where needed."""
    scripts: list[Script] = [[[choice([5, 2], end="stop")]] for _ in range(3)]
    client = EngineClient(scripts)
    async with running(client, monkeypatch) as up:
        for url, more in ((f"{R}/chat/completions", {}), (f"{R}/chat/completions", {"logprobs": 1}),
                          ("/v1/chat/completions", {})):  # fmt: skip
            await up.http.post(url, json=HELLO | more)
    assert [params.logprobs for params in up.server.params] == [None, 0, None]
    assert [asked.logprobs for _, asked in client.asked] == [0, 0, None]
    assert client.asked[1][1] is up.server.params[1]
    assert client.asked[2][1] is up.server.params[2], "untagged traffic passes as it is"


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_may_interleave(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """One output may hold several choices, in any order."""
    script: Script = [
        [choice([9], index=1), choice([5], index=0)],
        [choice([6, 2], index=0, end="stop")],
        [choice([8], index=1, end="length")],
    ]
    if not stream:
        both = [choice([5, 6, 2], end="stop"), choice([9, 8], index=1, end="length")]
        script = [both]
    async with running(EngineClient([script]), monkeypatch) as up:
        body = HELLO | {"n": 2, "stream": stream}
        answer = await up.http.post(f"{R}/chat/completions", json=body)
        entries = await up.entries()
    base = answer.headers["x-model-call-id"]
    assert entries[f"{base}.0"].generation_token_ids == [5, 6, 2]
    assert entries[f"{base}.1"].generation_token_ids == [9, 8]
    assert entries[f"{base}.1"].finish_reason == "length"


async def test_generations_behind_one_answer_are_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built-in tools: each generation is an entry; only the last ends the answer."""
    scripts: list[Script] = [[[choice([5, 2], end="stop")]], [[choice([6, 2], end="stop")]]]
    async with running(EngineClient(scripts), monkeypatch) as up:
        answer = await up.http.post(f"{R}/responses", json={"model": "m", "input": "hi"})
        entries = await up.entries()
    base = answer.headers["x-model-call-id"]
    first, second = entries[f"{base}.0"], entries[f"{base}.1"]
    assert first.parent_resolution is not None
    assert first.parent_resolution.value == "root"
    assert second.parent_call_id == first.model_call_id
    assert second.prompt_token_ids == [1, 50, 5, 2, 60]
    assert (first.output_items, len(second.output_items)) == ([], 1)
    assert first.continuation_fingerprint == ""
    assert second.continuation_fingerprint


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda o: setattr(o, "logprobs", None), "missing_log_probs"),
        (lambda o: o.logprobs.pop(), "length_mismatch"),
        (lambda o: o.logprobs.__setitem__(0, {}), "unreadable_output"),
        (lambda o: o.logprobs[0].__setitem__(5, Logprob(float("-inf"))), "non_finite_log_probs"),
    ],
)
async def test_what_cannot_be_recorded_never_fails_the_call(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], Any], code: str
) -> None:
    """The agent gets its answer; the rollout is incomplete, with the reason."""
    bad = choice([5, 6])
    spoil(bad)
    client = EngineClient([[[bad], [choice([2], end="stop")]]])
    async with running(client, monkeypatch) as up:
        answer = await up.http.post(f"{R}/chat/completions", json=HELLO | {"stream": True})
        snapshot = await up.store.freeze("r1")
    assert answer.text.endswith("data: [DONE]\n\n")
    assert [reason.code for reason in snapshot.incomplete_reasons] == [code]
    assert snapshot.entries == []


async def test_weight_versions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans where the weights changed within a call; vLLM's placeholder is no version."""
    changed = [Span("7", 0, 1), Span("8", 1, 2)]
    scripts: list[Script] = [
        [[choice([5, 2], end="stop", weight_versions=spans)]]
        for spans in ([Span("default", 0, 2)], [Span("step-3", 0, 2)], changed)
    ]
    found = []
    async with running(EngineClient(scripts), monkeypatch) as up:
        for _ in scripts:
            answer = await up.http.post(f"{R}/chat/completions", json=HELLO)
            found.append(answer.headers["x-model-call-id"])
        entries = await up.entries()
    kept = [(entries[i].weight_version, entries[i].weight_version_end) for i in found]
    assert kept == [(None, None), ("step-3", None), (7, 8)]
    assert entries[found[2]].weight_versions == [
        {"version": 7, "start": 0, "end": 1},
        {"version": 8, "start": 1, "end": 2},
    ]


async def test_a_client_that_leaves_closes_the_engines_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closed at once, in its own task; what was seen is recorded as cut."""
    script: Script = [[choice([5])], [choice([6])], *[[choice([7])] for _ in range(500)]]
    client = EngineClient([script])
    async with running(client, monkeypatch) as up:
        sent: list[bytes] = []
        left = asyncio.Event()
        body = json.dumps(HELLO | {"stream": True}).encode()
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            for message in messages:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if len(sent) == 3:
                left.set()

        path = f"{R}/chat/completions"
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "root_path": "",
            "http_version": "1.1",
        }
        await up.server.app(scope, receive, send)
        assert client.closed == 1
        (entry,) = (await up.entries()).values()
    assert entry.finish_reason == "client_disconnect"
    assert entry.delivered is False
    assert 0 < len(entry.generation_token_ids) < 500


async def continued(up: Running, answer: str, **system: Any) -> httpx.Response:
    """The turn after ``hi`` was answered."""
    messages = [*HELLO["messages"], {"role": "assistant", "content": answer}]  # type: ignore[misc]
    body = HELLO | {"messages": [*messages, {"role": "user", "content": "go on"}], **system}
    return await up.http.post(f"{R}/chat/completions", json=body)


SCRIPTS: list[Script] = [[[choice([5, 6, 2], end="stop")]], [[choice([8, 2], end="stop")]]]


async def test_the_exact_prefix_is_supplied_and_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is given the parent's tokens and the template's for what is new."""
    async with running(EngineClient(SCRIPTS), monkeypatch) as up:
        await up.http.post(f"{R}/chat/completions", json=HELLO)
        answer = await continued(up, "w5 w6 ")
        entries = await up.entries()
    child = entries[answer.headers["x-model-call-id"]]
    assert child.prefix_supplied is True
    asked = up.server.client.asked[1][0]["prompt_token_ids"]
    assert asked == [1, 104, *b"hi", 2, 109, 5, 6, 2, 104, *b"go on", 2, 109]


async def test_an_engine_that_ignores_the_prompt_is_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``prefix_supplied`` is what the engine's own report proves, nothing else."""
    client = EngineClient(SCRIPTS, echo_prompt=False)
    async with running(client, monkeypatch) as up:
        await up.http.post(f"{R}/chat/completions", json=HELLO)
        answer = await continued(up, "w5 w6 ")
        entries = await up.entries()
    child = entries[answer.headers["x-model-call-id"]]
    assert (child.prefix_requested, child.prefix_supplied) == (True, False)
    assert child.prefix_reason == "engine_ignored_it"
    assert child.prompt_token_ids == [7, 7]


async def test_off_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the renderer nor the prompt is touched."""
    client = EngineClient(SCRIPTS)
    async with running(client, monkeypatch, PREFIX_SUPPLY="off") as up:
        await up.http.post(f"{R}/chat/completions", json=HELLO)
        answer = await continued(up, "w5 w6 ")
        entries = await up.entries()
    child = entries[answer.headers["x-model-call-id"]]
    assert (child.prefix_requested, child.prefix_supplied) == (False, False)
    assert child.drift_at is not None
    assert "render_chat_async" not in vars(client.renderer)


async def test_require_refuses_before_anything_is_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """409 in the dialect's shape in place of the engine's answer, and the intent is closed."""
    client = EngineClient(SCRIPTS)
    client.model_config.max_model_len = 12
    async with running(client, monkeypatch, PREFIX_SUPPLY="require") as up:
        await up.http.post(f"{R}/chat/completions", json=HELLO)
        answer = await continued(up, "w5 w6 ")
        entries = await up.entries()
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "prefix_unavailable"
    assert "too_long" in answer.json()["error"]["message"]
    assert len(entries) == len(client.asked) == 1


class OtherGenerate(EngineClient):
    """Its ``generate`` takes other names."""

    async def generate(self, request: Any, params: Any) -> AsyncGenerator[Any, None]:  # type: ignore[override]
        yield request


class OtherRenderer(Renderer):
    """Renders synchronously."""

    def render_chat_async(self, conversations: Any) -> Any:  # type: ignore[override]
        return conversations


def other_outputs(client: EngineClient) -> None:
    """The outputs have no ``token_ids`` any more."""

    @dataclass
    class Other:
        index: int
        tokens: list[int]

    sys.modules["vllm.outputs"].CompletionOutput = Other  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "setting", "says"),
    [
        (lambda: None, "auto", "engine client in app.state.engine_client"),
        (OtherGenerate, "auto", "engine_client.generate(prompt, sampling_params, request_id"),
        (lambda: EngineClient(renderer=OtherRenderer()), "auto", "render_chat_async"),
        (lambda: EngineClient(renderer=None), "require", "engine_client.renderer"),
        (lambda: EngineClient(model_config=object()), "auto", "max_model_len"),
    ],
)
async def test_another_vllm_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], setting: str, says: str
) -> None:
    """The start fails with one line that names what was expected; nothing is half hooked."""
    monkeypatch.setenv("TOKEN_CAPTURE_PREFIX_SUPPLY", setting)
    message = await refused_start(make())
    assert says in message
    assert "not shaped as expected" in message


async def test_other_outputs_are_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hook reads from is checked too."""
    client = EngineClient()
    other_outputs(client)
    message = await refused_start(client)
    assert "vllm.outputs.CompletionOutput with index, token_ids" in message
    assert "generate" not in vars(client)


async def test_without_a_renderer_auto_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases before the renderer capture all the same."""
    client = EngineClient(SCRIPTS[:1])
    rendering, client.renderer = client.renderer, None
    async with running(client, monkeypatch) as up:
        client.renderer = rendering
        await up.http.post(f"{R}/chat/completions", json=HELLO)
        assert len(await up.entries()) == 1


async def test_wrong_settings_are_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, from the settings."""
    monkeypatch.setenv("TOKEN_CAPTURE_STORE", "memory:")
    assert "TOKEN_CAPTURE_STORE: a memory store" in await refused_start(EngineClient())


async def refused_start(client: Any) -> str:
    """The message with which the application refuses to start."""
    app = Starlette()
    app.state.engine_client = client
    app.add_middleware(TokenCapture)
    messages, _, task = await lifespan(app)
    await task
    assert messages[0]["type"] == "lifespan.startup.failed"
    message: str = messages[0]["message"]
    assert "\n" not in message
    return message


async def test_control_routes_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's process serves model traffic only, and says where to go."""
    async with running(EngineClient(), monkeypatch) as up:
        answer = await up.http.post(R.removesuffix("/v1") + "/freeze")
    assert answer.status_code == 404
    assert "token-capture serve" in answer.json()["error"]["message"]
