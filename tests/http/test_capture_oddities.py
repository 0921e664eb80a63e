"""Answers and requests that no well-behaved peer sends, and what must come of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from capture_server.stores.memory import MemoryCaptureStore
from middleware.asgi import CaptureMiddleware
from middleware.records import TokenEntry
from tests.http.capture_rig import CHAT, HELLO, STREAM, R, sidecar
from tests.http.upstream import (
    CLOSE,
    DONE,
    STREAM_END,
    STREAM_HEAD,
    chat,
    chunk,
    delta,
    frame,
    scripted_engine,
    stream,
    usage,
    whole,
)

ROLE = delta(prompt=[1, 2])


async def test_a_stream_s_token_count_is_always_asked_for() -> None:
    """06b 0.11: a lost chunk shows only in the usage, which the agent need not see."""
    lost = stream(ROLE, delta("A", [11]), delta("", [15], finish="stop"), usage(4, 2), DONE)
    async with scripted_engine([lost]) as engine, sidecar(engine.url) as car:
        body = STREAM | {"stream_options": {"continuous_usage_stats": False}}
        response = await car.http.post(CHAT, json=body)
        assert await car.reasons() == ["usage_mismatch"]

    assert engine.seen[0].json["stream_options"] == {
        "continuous_usage_stats": False,
        "include_usage": True,
    }
    assert b"usage" not in response.content


async def test_an_agent_that_asks_for_usage_gets_it() -> None:
    """The separate chunk passes as it came."""
    answer = stream(ROLE, delta("A", [11], finish="stop"), usage(1, 2), DONE)
    async with scripted_engine([answer]) as engine, sidecar(engine.url) as car:
        body = STREAM | {"stream_options": {"include_usage": True}}
        response = await car.http.post(CHAT, json=body)

    assert frame(usage(1, 2)) + DONE in response.content


async def test_the_fingerprint_stays_on_the_last_chunk_that_the_agent_sees() -> None:
    """vLLM prints it on the last chunk; without the usage chunk that is the finish chunk."""
    count = usage(1, 2) | {"system_fingerprint": "vllm-x"}
    answer = stream(ROLE, delta("A", [11], finish="stop"), count, DONE)
    async with scripted_engine([answer]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=STREAM)

    last = response.content.removesuffix(DONE).split(b"data: ")[-1]
    assert json.loads(last)["system_fingerprint"] == "vllm-x"
    assert b"usage" not in response.content


@pytest.mark.parametrize(
    ("answer", "reasons", "finish"),
    [
        (chat(finish=None), [], "truncated"),  # type: ignore[arg-type]
        (chat(finish=None, usage={"completion_tokens": 9}), ["usage_mismatch"], None),  # type: ignore[arg-type]
        (chat(error={}), [], "stop"),
        (chat(error={"message": "broke"}), [], "stop, undelivered"),
        (chat() | {"choices": ["x"]}, ["unparsable_answer"], None),
        (chat() | {"choices": {"a": 1}}, ["unparsable_answer"], None),
    ],
)
async def test_whole_answers_of_odd_shape(
    answer: dict[str, Any], reasons: list[str], finish: str | None
) -> None:
    """No finish reason is never a finished turn; an error beside text does not hide the text."""
    async with scripted_engine([whole(answer)]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=HELLO)
        entries = await car.entries()
        assert await car.reasons() == reasons

    assert response.status_code == 200
    delivered = finish == "stop"
    expected = [((finish or "").partition(",")[0], delivered)] if finish else []
    assert [(entry.finish_reason, entry.delivered) for entry in entries] == expected


@pytest.mark.parametrize(
    "body",
    [json.dumps(chat()).encode(), b"\n".join([json.dumps(chat()).encode()] * 2), b"plain text"],
)
async def test_text_that_is_no_event_under_an_event_stream_s_name(body: bytes) -> None:
    """It reaches the client, so it must not be lost without a trace."""
    answer = STREAM_HEAD + chunk(body) + STREAM_END
    async with scripted_engine([answer]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=STREAM)
        assert response.content == body
        assert await car.reasons() == ["unparsable_answer"]


async def test_frames_of_several_data_lines_stay_frames_when_something_is_hidden() -> None:
    """C24: each line of the edited data is a field of its own."""
    pretty = json.dumps(delta("x", [11], finish="stop"), indent=1).encode()
    lines = b"".join(b"data: " + line + b"\n" for line in pretty.split(b"\n")) + b"\n"
    answer = STREAM_HEAD + chunk(frame(ROLE)) + chunk(lines) + chunk(DONE) + STREAM_END
    async with scripted_engine([answer]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=STREAM)
        (entry,) = await car.entries()

    assert entry.generation_token_ids == [11]
    shown = response.content.removesuffix(DONE).split(b"\n\n")[1]
    assert all(line.startswith(b"data: ") for line in shown.split(b"\n"))
    text = b"\n".join(line[6:] for line in shown.split(b"\n"))
    assert json.loads(text)["choices"][0]["delta"] == {"content": "x"}
    assert b"token_ids" not in response.content


@pytest.mark.parametrize(
    "odd",
    [
        delta("x", [11]) | {"choices": [{"index": 0, "delta": {"tool_calls": 5}}]},
        delta("x", [11], [10**400]),
        delta("x", [11]) | {"choices": 7},
    ],
)
async def test_an_odd_chunk_never_breaks_the_call(odd: dict[str, Any]) -> None:
    """Whatever the engine says, the agent gets it all."""
    answer = stream(ROLE, odd, delta("y", [12], finish="stop"), DONE)
    async with scripted_engine([answer]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=STREAM)
        await car.freeze()

    assert response.status_code == 200
    assert response.content.endswith(DONE)


async def test_text_of_the_last_chunk_without_ids_needs_a_count() -> None:
    """With a usage that agrees it is buffered text; without one it is a hole."""
    tail = delta("tail", finish="stop")
    counted = stream(ROLE, delta("A", [11]), tail, usage(1, 2), DONE)
    blind = stream(ROLE, delta("A", [11]), tail, DONE)
    async with scripted_engine([counted], [blind]) as engine, sidecar(engine.url) as car:
        await car.http.post(CHAT, json=STREAM)
        assert not (await car.status()).incomplete
        await car.http.post(CHAT, json=STREAM)
        assert await car.reasons() == ["missing_token_ids"]


async def test_echo_does_not_switch_the_checks_off() -> None:
    """An engine that reports no ids is one with echo too."""
    answer = chat()
    del answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"], answer["usage"]
    async with scripted_engine([whole(answer)]) as engine, sidecar(engine.url) as car:
        await car.http.post(CHAT, json=HELLO | {"echo": True})
        assert await car.reasons() == ["missing_token_ids"]


async def test_a_request_with_a_byte_order_mark_and_one_in_another_encoding() -> None:
    """The mark stays where it is; UTF-16 is refused, since its text cannot be edited."""
    body = json.dumps(HELLO)
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        marked = await car.http.post(CHAT, content=b"\xef\xbb\xbf" + body.encode())
        other = await car.http.post(CHAT, content=body.encode("utf-16"))

    assert marked.status_code == 200
    assert json.loads(engine.seen[0].body.decode("utf-8-sig"))["return_token_ids"] is True
    assert (other.status_code, other.json()["error"]["code"]) == (400, "invalid_body")


async def test_dot_segments_do_not_pass_as_a_route_that_makes_no_text() -> None:
    """Somebody behind us may resolve them to a model call."""
    async with scripted_engine([whole({})]) as engine, sidecar(engine.url) as car:
        for path in ("/v1/event_logging/%2e%2e/chat/completions", "/api/event_logging/%2E%2E/x"):
            await car.http.post(httpx.URL(car.url + R + path), json={})
        assert set(await car.reasons()) == {"unobserved_path"}


@pytest.mark.parametrize("target", ["*", "*@127.0.0.1:9/x", "foo"])
async def test_a_request_target_that_is_no_path_is_refused(target: str) -> None:
    """It would name another host behind our base URL."""
    async with scripted_engine([whole({})]) as engine, sidecar(engine.url) as car:
        host = httpx.URL(car.url)
        reader, writer = await asyncio.open_connection(host.host, host.port)
        writer.write(f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        status = (await reader.readline()).split()[1]
        writer.close()

    assert status == b"400"
    assert engine.seen == []


async def test_what_an_engine_sends_unasked_never_answers_another_call() -> None:
    """A second response on a kept connection is thrown away with the connection."""
    stale = whole(chat("STALE", [99]))
    script = [whole(chat()), 0.05, stale]
    async with scripted_engine(script, [whole(chat("fresh", [13]))]) as engine:
        async with sidecar(engine.url) as car:
            await car.http.post(CHAT, json=HELLO)
            await asyncio.sleep(0.3)
            second = await car.http.post(CHAT, json=HELLO)

    assert second.json()["choices"][0]["message"]["content"] == "fresh"


async def test_a_model_call_on_a_fresh_connection_is_not_sent_twice() -> None:
    """Only a pooled connection that the engine closed is worth a second try."""
    async with scripted_engine([CLOSE]) as engine, sidecar(engine.url) as car:
        response = await car.http.post("/v1/anything", json={})
        assert response.status_code == 502
        num_seen = len(engine.seen)

    assert num_seen == 1


async def test_header_bytes_reach_the_engine() -> None:
    """UTF-8 in a header value is not encoded twice."""
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        await car.http.post(CHAT, json=HELLO, headers={"x-title": "caf\xc3\xa9".encode("latin-1")})

    assert engine.seen[0].header("x-title") == "caf\xc3\xa9"


async def test_an_engine_that_does_not_name_its_models_slows_no_call() -> None:
    """The probe is asked once in a while, not once per call."""
    hung = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if b"/v1/models" in line:
            await hung.wait()
        else:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(whole(chat()))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with sidecar(url) as car:
        began = asyncio.get_running_loop().time()
        calls = [car.http.post(CHAT, json=HELLO | {"seed": seed}) for seed in range(20)]
        answers = await asyncio.gather(*calls)
        took = asyncio.get_running_loop().time() - began
    hung.set()
    server.close()

    assert {answer.status_code for answer in answers} == {200}
    assert took < 10  # 20 calls that each waited would take 40 s


async def test_a_client_that_leaves_while_a_freeze_waits_for_it() -> None:
    """Draining ends for a call whose client is gone: the rollout stays usable."""
    script = [STREAM_HEAD + chunk(frame(ROLE)) + chunk(frame(delta("one", [11]))), 30]
    async with scripted_engine(script) as engine:
        async with sidecar(engine.url, on_disconnect="drain", freeze_grace_s=5.0) as car:
            async with car.http.stream("POST", CHAT, json=STREAM) as response:
                async for piece in response.aiter_raw():
                    if b"one" in piece:
                        break
                freezing = asyncio.create_task(car.freeze())
                await asyncio.sleep(0.3)
            summary = await freezing

    assert (summary["incomplete"], summary["calls"]) == (False, 1)


async def test_an_explicit_parent() -> None:
    """The named call is the parent; an unknown id resolves to nothing; a bad one is refused."""
    second = chat("more", [13], prompt=[1, 2, 11, 12, 5], response_id="resp-2")
    async with scripted_engine([whole(chat())], [whole(second)]) as engine:
        async with sidecar(engine.url) as car:
            first = await car.http.post(CHAT, json=HELLO)
            named = {"x-parent-model-call-id": first.headers["x-model-call-id"]}
            await car.http.post(CHAT, json=HELLO | {"seed": 1}, headers=named)
            unknown = {"x-parent-model-call-id": "nobody"}
            await car.http.post(CHAT, json=HELLO | {"seed": 2}, headers=unknown)
            bad = await car.http.post(CHAT, json=HELLO, headers={"x-parent-model-call-id": "a/b"})
            root, child, stranger = await car.entries()

    assert (child.parent_call_id, child.prompt_is_delta) == (root.model_call_id, True)
    assert stranger.parent_resolution_reason == "no_match"
    assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_call_id")


class HangingStore(MemoryCaptureStore):
    """A third party's store whose methods never return."""

    async def put(self, entry: TokenEntry) -> None:
        """Hangs."""
        await asyncio.Event().wait()


async def test_a_store_that_hangs_does_not_hang_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded: the call is served, the rollout incomplete."""
    monkeypatch.setattr("middleware.capture._PUT_TIMEOUT_S", 0.2)
    async with scripted_engine([whole(chat())]) as engine:
        async with sidecar(engine.url, store=HangingStore()) as car:
            response = await car.http.post(CHAT, json=HELLO)
            assert response.status_code == 200
            assert await car.reasons() == ["store_failure"]


class BareSink:
    """Only what a framework must have; ``begin_call`` fails with what it likes."""

    def __init__(self) -> None:
        self.entries: list[TokenEntry] = []

    async def put(self, entry: TokenEntry) -> None:
        self.entries.append(entry)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None: ...

    async def close(self) -> None: ...


class RefusingSink(BareSink):
    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        raise OSError("disk gone")


@pytest.mark.parametrize(("sink", "status"), [(BareSink(), 200), (RefusingSink(), 503)])
async def test_a_framework_s_own_sink(sink: BareSink, status: int) -> None:
    """Works with three methods, in front of any application; a failing intent is a 503."""

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        body = json.dumps(chat()).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    app = CaptureMiddleware(engine, sink=sink)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        response = await http.post(CHAT, json=HELLO)
        plain = await http.get("/v1/models")

    assert (response.status_code, plain.status_code) == (status, 200)
    assert len(sink.entries) == (1 if status == 200 else 0)


async def test_hidden_reasoning_costs_no_tokens() -> None:
    """``include_reasoning: false`` would suppress ids: overridden upstream, dropped below."""
    answer = chat()
    answer["choices"][0]["message"]["reasoning"] = "hm"
    async with scripted_engine([whole(answer)]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=HELLO | {"include_reasoning": False})
        (entry,) = await car.entries()

    assert engine.seen[0].json["include_reasoning"] is True
    assert "reasoning" not in response.json()["choices"][0]["message"]
    assert entry.output_items[0]["reasoning"] == "hm"


async def test_no_prompt_text_in_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Neither from requests that cannot be hashed nor from odd token ids."""
    caplog.set_level("DEBUG")
    message = {"role": "assistant", "tool_calls": [{"id": {"s": "SECRET"}, "function": {}}]}
    body = HELLO | {"messages": [*HELLO["messages"], message]}
    answer = chat(ids=["SECRET-ID", 2])
    async with scripted_engine([whole(answer)]) as engine, sidecar(engine.url) as car:
        await car.http.post(CHAT, json=body)
        status = await car.freeze()

    assert "SECRET" not in caplog.text
    assert "SECRET" not in json.dumps(status)
