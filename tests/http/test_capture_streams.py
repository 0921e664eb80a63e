"""Captured streams against a scripted engine: what the agent sees, and what is recorded."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from capture_server.stores.memory import MemoryCaptureStore
from middleware.records import TokenEntry
from tests.http.capture_rig import CHAT, STREAM, sidecar
from tests.http.upstream import (
    CLOSE,
    DONE,
    RESET,
    STREAM_END,
    STREAM_HEAD,
    chunk,
    delta,
    frame,
    scripted_engine,
    stream,
    usage,
    whole,
)

ROLE = delta(prompt=[1, 2])
PARSED = (
    ROLE,
    delta("A", [11]),
    delta(None, [12], [-0.2]),
    delta("b", [13, 14], [-0.3, -0.4]),
    delta(None, [15], [-0.5], finish="tool_calls"),
)


def tokens(entry: TokenEntry) -> tuple[list[int], list[float]]:
    return entry.generation_token_ids.tolist(), entry.generation_log_probs.tolist()


async def test_tokens_that_ride_on_empty_deltas_are_kept() -> None:
    """C01: chunks without text carry tokens too; ids and log-probs stay aligned."""
    answer = stream(*PARSED, usage(5, 2), DONE)
    async with scripted_engine([answer]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=STREAM)
        (entry,) = await car.entries()

    assert tokens(entry) == ([11, 12, 13, 14, 15], [-0.1, -0.2, -0.3, -0.4, -0.5])
    assert entry.prompt_token_ids == [1, 2]
    assert (entry.finish_reason, entry.delivered, entry.dialect) == ("tool_calls", True, "chat")
    assert response.headers["x-model-call-id"] == entry.model_call_id
    assert response.headers["x-rollout-id"] == "r1"


async def test_a_lost_chunk_is_found_by_the_usage_count() -> None:
    """C01 B: four tokens seen, usage says five: served unchanged, rollout incomplete."""
    lost = [payload for payload in PARSED if payload is not PARSED[2]]
    async with scripted_engine([stream(*lost, usage(5, 2), DONE)]) as engine:
        async with sidecar(engine.url) as car:
            response = await car.http.post(CHAT, json=STREAM)

            assert response.text.endswith("data: [DONE]\n\n")
            assert await car.reasons() == ["usage_mismatch"]
            assert await car.entries() == []


async def test_the_agent_does_not_see_what_only_we_asked_for() -> None:
    """Token members and token-only chunks are gone; everything else is byte for byte."""
    text = delta("好🙂é  ", [11, 12, 13], finish="stop", stop_reason=None)
    odd = b': ping\n\nevent: x\ndata: {"id":"resp-1", "n":1.0e5,"choices":[]}\n\n'
    async with scripted_engine([stream(ROLE, odd, delta(None, [10]), text, DONE)]) as engine:
        async with sidecar(engine.url) as car:
            response = await car.http.post(CHAT, json=STREAM)

    shown_role = {key: value for key, value in ROLE.items() if key != "prompt_token_ids"}
    del (shown_text := json.loads(json.dumps(text)))["choices"][0]["token_ids"]
    for shown in (shown_role, shown_text):
        del shown["choices"][0]["logprobs"]
    assert response.content == frame(shown_role) + odd + frame(shown_text) + DONE
    assert response.headers["server"] == "engine"
    sent = engine.seen[0].json
    assert sent == STREAM | {
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }


async def test_an_agent_that_asks_for_tokens_gets_the_engine_s_bytes() -> None:
    """Nothing to strip: the body passes as it came."""
    wanted = STREAM | {"logprobs": True, "return_token_ids": True, "top_logprobs": 3}
    wanted["stream_options"] = {"include_usage": True}
    pieces = b"".join(frame(payload) for payload in PARSED) + DONE
    async with scripted_engine([stream(*PARSED, DONE)]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=wanted)
        sent = engine.seen[0].body

    assert response.content == pieces
    assert json.loads(sent) == wanted


@pytest.mark.parametrize("step", [1, 7, 64])
async def test_network_chunks_may_fall_anywhere(step: int) -> None:
    """C22: characters, lines and frames cut by chunk borders change nothing."""
    raw = b"".join(
        frame(p) for p in (ROLE, delta("好🙂é", [11, 12]), delta("", [2], finish="stop"))
    )
    raw = (raw + DONE).replace(b"\n", b"\r\n")
    cut = [chunk(raw[i : i + step]) for i in range(0, len(raw), step)]
    async with scripted_engine([STREAM_HEAD + b"".join(cut) + STREAM_END]) as engine:
        async with sidecar(engine.url) as car:
            response = await car.http.post(CHAT, json=STREAM)
            (entry,) = await car.entries()

    assert tokens(entry)[0] == [11, 12, 2]
    assert "好🙂é" in response.text
    assert entry.output_items[0]["content"] == "好🙂é"


class GatedStore(MemoryCaptureStore):
    """A store whose ``put`` waits until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.reached = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    async def put(self, entry: TokenEntry) -> None:
        """``put`` after the gate, which lives on the test's loop."""
        self.loop.call_soon_threadsafe(self.reached.set)
        waiting = asyncio.run_coroutine_threadsafe(self.gate.wait(), self.loop)
        await asyncio.wrap_future(waiting)
        await super().put(entry)


async def test_text_streams_while_the_end_waits_for_the_record() -> None:
    """Chunks go out as they come; from the finish chunk on nothing leaves before ``put`` ends."""
    store = GatedStore()
    answer = stream(ROLE, delta("one", [11]), delta(" two", [12], finish="stop"), usage(2, 2), DONE)
    async with scripted_engine([answer]) as engine, sidecar(engine.url, store=store) as car:
        async with car.http.stream("POST", CHAT, json=STREAM) as response:
            received = b""
            pieces = response.aiter_raw()
            while b"one" not in received:
                received += await anext(pieces)
            await store.reached.wait()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(
                    asyncio.shield(nxt := asyncio.ensure_future(anext(pieces))), 0.2
                )
            before = received
            store.gate.set()
            received += await nxt
            async for piece in pieces:
                received += piece

    assert b" two" not in before
    assert received.endswith(DONE)
    assert b" two" in received


@pytest.mark.parametrize(
    ("tail", "delivered", "finish"),
    [
        ((delta("x", [12], finish="stop"), DONE), True, "stop"),
        ((delta("x", [12], finish="stop"),), True, "stop"),  # clean end without [DONE]
        ((delta("x", [12]), DONE), False, "truncated"),  # [DONE] without a finish reason
        ((delta("x", [12]),), False, "truncated"),
        ((delta("x", [12], finish="abort"), DONE), True, "abort"),
    ],
)
async def test_when_a_stream_is_complete(
    tail: tuple[object, ...], delivered: bool, finish: str
) -> None:
    """A finish reason and a clean end, with or without [DONE]; never without a finish reason."""
    async with scripted_engine([stream(ROLE, delta("w", [11]), *tail)]) as engine:
        async with sidecar(engine.url) as car:
            await car.http.post(CHAT, json=STREAM)
            (entry,) = await car.entries()
            assert not (await car.status()).incomplete

    assert (tokens(entry)[0], entry.delivered, entry.finish_reason) == ([11, 12], delivered, finish)


@pytest.mark.parametrize("ending", [RESET, CLOSE])
@pytest.mark.parametrize(
    ("payloads", "ids", "finish"),
    [
        ((delta("w", [11]),), [11], "upstream_error"),
        ((delta("w", [11]), delta("x", [12], finish="stop")), [11, 12], "stop"),
    ],
)
async def test_an_engine_that_breaks_off(
    payloads: tuple[object, ...], ids: list[int], finish: str, ending: object
) -> None:
    """The client sees the break; what it may hold is recorded, as not delivered."""
    pieces = [chunk(frame(payload)) for payload in (ROLE, *payloads)]
    script = [STREAM_HEAD + b"".join(pieces), 0.05, ending]
    async with scripted_engine(script) as engine, sidecar(engine.url) as car:
        with pytest.raises(httpx.RemoteProtocolError):
            await car.http.post(CHAT, json=STREAM)
        (entry,) = await car.entries()
        assert not (await car.status()).incomplete

    assert (tokens(entry)[0], entry.delivered, entry.finish_reason) == (ids, False, finish)


async def test_whatever_follows_done_is_a_clean_end() -> None:
    """A reset after [DONE] is no error for anybody."""
    pieces = [chunk(frame(ROLE)), chunk(frame(delta("w", [11], finish="stop"))), chunk(DONE)]
    script = [STREAM_HEAD + b"".join(pieces), 0.05, RESET]
    async with scripted_engine(script) as engine, sidecar(engine.url) as car:
        async with car.http.stream("POST", CHAT, json=STREAM) as response:
            received = b""
            async for piece in response.aiter_raw():
                received += piece
                if received.endswith(DONE):
                    break  # as the official clients do
        (entry,) = await car.entries()

    assert (entry.delivered, entry.finish_reason) == (True, "stop")


async def test_an_error_inside_the_stream() -> None:
    """C08: tokens seen are kept with ``upstream_error``; an error alone cancels the intent."""
    error = {"error": {"message": "engine stopped", "code": 500}}
    partly = stream(ROLE, delta("w", [1]), delta("x", [2]), error, DONE)
    alone = stream(error, DONE)
    async with scripted_engine([partly], [alone]) as engine, sidecar(engine.url) as car:
        first = await car.http.post(CHAT, json=STREAM)
        second = await car.http.post(CHAT, json=STREAM)
        (entry,) = await car.entries()
        status = await car.status()

    assert first.content.endswith(frame(error) + DONE)
    assert second.content == frame(error) + DONE
    assert (tokens(entry)[0], entry.delivered, entry.finish_reason) == (
        [1, 2],
        False,
        "upstream_error",
    )
    assert (status.incomplete, list(status.open_intents)) == (False, [])


async def test_a_client_that_leaves_mid_stream() -> None:
    """C07: the engine's request ends within a second; the tokens seen are kept, undelivered."""
    script = [STREAM_HEAD + chunk(frame(ROLE)) + chunk(frame(delta("one", [11]))), 30]
    async with scripted_engine(script) as engine, sidecar(engine.url) as car:
        async with car.http.stream("POST", CHAT, json=STREAM) as response:
            async for piece in response.aiter_raw():
                if b"one" in piece:
                    break
        await asyncio.wait_for(engine.hung_up.wait(), 1)
        (entry,) = await car.entries()
        assert not (await car.status()).incomplete

    assert (tokens(entry)[0], entry.delivered) == ([11], False)
    assert entry.finish_reason == "client_disconnect"


async def test_a_client_that_leaves_mid_stream_while_we_drain() -> None:
    """With ``on_disconnect=drain`` the whole answer is recorded, undelivered."""
    go = asyncio.Event()
    rest = [go, chunk(frame(delta("two", [12], finish="stop"))) + chunk(DONE) + STREAM_END]
    script = [STREAM_HEAD + chunk(frame(ROLE)) + chunk(frame(delta("one", [11]))), *rest]
    async with scripted_engine(script) as engine:
        async with sidecar(engine.url, on_disconnect="drain", freeze_grace_s=5.0) as car:
            async with car.http.stream("POST", CHAT, json=STREAM) as response:
                async for piece in response.aiter_raw():
                    if b"one" in piece:
                        break
            await asyncio.sleep(0.1)  # the server sees the disconnect
            go.set()
            while not (await car.status()).calls:
                await asyncio.sleep(0.01)
            (entry,) = await car.entries()

    assert (tokens(entry)[0], entry.delivered, entry.finish_reason) == ([11, 12], False, "stop")


@pytest.mark.parametrize("body", [STREAM, {**STREAM, "stream": False}])
async def test_a_client_that_leaves_before_the_first_byte(body: dict[str, object]) -> None:
    """C40: the engine is told within a second, the intent is cancelled, nothing is recorded."""
    async with scripted_engine([30, whole({})]) as engine, sidecar(engine.url) as car:
        with pytest.raises(httpx.ReadTimeout):
            await car.http.post(CHAT, json=body, timeout=0.3)
        await asyncio.wait_for(engine.hung_up.wait(), 1)
        assert await car.entries() == []
        status = await car.status()

    assert (status.incomplete, list(status.open_intents)) == (False, [])


async def test_a_client_that_leaves_during_the_held_tail() -> None:
    """The answer had ended: a whole entry, not delivered."""
    store = GatedStore()
    answer = stream(ROLE, delta("one", [11]), delta("two", [12], finish="stop"), DONE)
    async with scripted_engine([answer]) as engine, sidecar(engine.url, store=store) as car:
        async with car.http.stream("POST", CHAT, json=STREAM) as response:
            async for piece in response.aiter_raw():
                if b"one" in piece:
                    await store.reached.wait()
                    break
        await asyncio.sleep(0.1)  # the server sees the disconnect
        store.gate.set()
        (entry,) = await car.entries()

    assert (tokens(entry)[0], entry.delivered, entry.finish_reason) == ([11, 12], False, "stop")


async def test_an_engine_that_ignores_n() -> None:
    """Fewer choices than asked for, all ended: a whole answer, not a cut one."""
    answer = stream(ROLE, delta("a", [11]), delta("", [2], finish="stop"), DONE)
    async with scripted_engine([answer]) as engine, sidecar(engine.url) as car:
        await car.http.post(CHAT, json=STREAM | {"n": 2})
        (entry,) = await car.entries()

    assert (entry.finish_reason, entry.delivered) == ("stop", True)


async def test_a_line_of_megabytes_passes() -> None:
    """C25: the first chunk of a long context is one line of megabytes."""
    prompt = list(range(400_000))
    answer = stream(delta(prompt=prompt), delta("w", [11], finish="stop"), usage(1, 400_000), DONE)
    async with scripted_engine([answer]) as engine, sidecar(engine.url) as car:
        await car.http.post(CHAT, json=STREAM)
        (entry,) = await car.entries()

    assert len(entry.prompt_token_ids) == 400_000
    assert entry.cum_len == 400_001


async def test_every_choice_of_a_stream_is_an_entry() -> None:
    """n = 2: interleaved choices, held until both have ended, ids ``<id>.<i>``, one intent."""
    answer = stream(
        ROLE,
        delta(prompt=[1, 2], index=1),
        delta("a", [11]),
        delta("b", [21], index=1),
        delta("", [2], finish="stop"),
        delta("c", [22], index=1, finish="length"),
        usage(4, 2),
        DONE,
    )
    async with scripted_engine([answer]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(
            CHAT, json=STREAM | {"n": 2}, headers={"x-model-call-id": "call-a"}
        )
        entries = await car.entries()
        status = await car.status()

    assert response.headers["x-model-call-id"] == "call-a"
    assert [(e.model_call_id, tokens(e)[0], e.finish_reason) for e in entries] == [
        ("call-a.0", [11, 2], "stop"),
        ("call-a.1", [21, 22], "length"),
    ]
    assert list(status.open_intents) == []


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (delta("w", [1, 2, 3], [-0.1] * 4, finish="stop"), "length_mismatch"),
        (delta("w", [1, 2, 3, 4], [-0.1] * 3, finish="stop"), "length_mismatch"),
        (delta("w", [1, None, 3], finish="stop"), "invalid_token_ids"),
        (delta("w", [1, "2"], finish="stop"), "invalid_token_ids"),
        (delta("w", [1, True], finish="stop"), "invalid_token_ids"),
        (delta("w", [1, -2], finish="stop"), "invalid_token_ids"),
        (delta("w", finish="stop"), "missing_token_ids"),
        (delta("w", [1, 2], [-0.1, None], finish="stop"), "non_finite_log_probs"),
        (delta("w", [1, 2], [-0.1, -9999.0], finish="stop"), "non_finite_log_probs"),
        (delta("w", [1, 2], [-0.1, float("nan")], finish="stop"), "non_finite_log_probs"),
        (delta("w", [1, 2], [-0.1, float("-inf")], finish="stop"), "non_finite_log_probs"),
    ],
)
async def test_token_data_that_does_not_add_up(payload: dict[str, object], code: str) -> None:
    """C16, C18: served as it came, recorded as a hole with a named reason; the store lives on."""
    bad = stream(ROLE, payload, DONE)
    async with scripted_engine([bad]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=STREAM)

        assert response.status_code == 200
        assert response.content.endswith(DONE)
        assert await car.reasons() == [code]
        assert await car.entries() == []


async def test_id_zero_and_log_prob_zero_are_values() -> None:
    """C16: falsy is not missing."""
    answer = stream(ROLE, delta("w", [0, 0], [0.0, -0.0], finish="stop"), usage(2, 2), DONE)
    async with scripted_engine([answer]) as engine, sidecar(engine.url) as car:
        await car.http.post(CHAT, json=STREAM)
        (entry,) = await car.entries()

    assert tokens(entry) == ([0, 0], [0.0, 0.0])
