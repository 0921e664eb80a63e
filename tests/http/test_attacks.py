"""An agent that wants more than its own rollout, over real HTTP."""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import urlsplit

import pytest

from middleware.agent_tokens import AgentTokens
from tests.http.capture_rig import CHAT, HELLO, Sidecar, sidecar
from tests.http.upstream import chat, scripted_engine, whole

KEY = "s3cret-" + "k" * 40
SIGNED = {"agent_tokens": "signed", "agent_token_key": KEY}


def chat_path(segment: str) -> str:
    return f"/ng-rollout/{segment}/training-token-capture/v1/chat/completions"


def signed(rollout_id: str) -> str:
    return AgentTokens([KEY]).sign(rollout_id)


async def raw(car: Sidecar, request: bytes) -> bytes:
    """Bytes as they are, without a client that repairs them."""
    address = urlsplit(car.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(request)
        await writer.drain()
        return await asyncio.wait_for(reader.read(65_536), 10)
    finally:
        writer.close()


async def test_a_signed_url_is_captured_under_the_plain_id() -> None:
    """The agent's URL is signed; trainer, store and engine know the plain id."""
    async with (
        scripted_engine([whole(chat())]) as engine,
        sidecar(engine.url, **SIGNED) as car,
    ):
        answer = await car.http.post(chat_path(signed("r1")), json=HELLO)

        assert answer.status_code == 200
        assert answer.headers["x-rollout-id"] == "r1"
        assert "~" not in engine.seen[0].line
        assert len(await car.entries()) == 1


@pytest.mark.parametrize(
    "segment",
    [
        "r1",
        "r1~",
        f"r1~{'A' * 43}",
        "r2~" + signed("r1").partition("~")[2],
        signed("r1") + "A",
        signed("r1")[:-1],
        signed("r1") + "~" + signed("r1"),
    ],
)
async def test_unsigned_and_wrongly_signed_calls_are_401(segment: str) -> None:
    """In the dialect's shape, before the engine or the store hears of it."""
    async with (
        scripted_engine([whole(chat())]) as engine,
        sidecar(engine.url, **SIGNED) as car,
    ):
        answer = await car.http.post(chat_path(segment), json=HELLO)
        messages = await car.http.post(
            chat_path(segment).replace("chat/completions", "messages"), json=HELLO
        )
        plain = await car.http.get(f"/ng-rollout/{segment}/v1/models")

        assert answer.status_code == messages.status_code == plain.status_code == 401
        assert answer.json()["error"]["code"] == "unauthorized"
        assert messages.json()["type"] == "error"
        assert not engine.seen
        assert (await car.status()).state == "unknown"


async def test_a_signed_url_is_no_way_to_control() -> None:
    """Control takes plain ids and the token; a signature replaces neither."""
    async with (
        scripted_engine([whole(chat())]) as engine,
        sidecar(engine.url, control_token="operator", **SIGNED) as car,
    ):
        path = f"/ng-rollout/{signed('r1')}/training-token-capture"
        bearer = {"authorization": "Bearer operator"}

        for verb in ("", "/freeze", "/snapshot"):
            assert (await car.http.post(path + verb, headers=bearer)).status_code == 401
        assert (await car.http.post(CHAT.partition("/v1")[0] + "/freeze")).status_code == 401
        assert (await car.status()).state == "unknown"


async def test_a_replayed_url_after_retire_reaches_nothing() -> None:
    """The signature does not expire, the rollout does."""
    async with (
        scripted_engine([whole(chat())]) as engine,
        sidecar(engine.url, **SIGNED) as car,
    ):
        await car.http.post(chat_path(signed("r1")), json=HELLO)
        frozen = await car.freeze()
        assert (await car.http.post(chat_path(signed("r1")), json=HELLO)).status_code == 409
        await car.store.drop("r1", snapshot_id=frozen["snapshot_id"], version=frozen["version"])

        assert (await car.http.post(chat_path(signed("r1")), json=HELLO)).status_code == 410
        assert len(engine.seen) == 1


@pytest.mark.parametrize(
    "segment",
    ["%2e%2e", "..%2f..", "%252e%252e", "a%2fb", "r1%00", "r1%0d%0aX-A:%201", "%ff", "ʀ1"],
)
async def test_traversal_and_odd_ids_are_refused(segment: str) -> None:
    """Invalid after one decoding is 400, whether ids are signed or not."""
    for settings in ({}, SIGNED):
        async with (
            scripted_engine([whole(chat())]) as engine,
            sidecar(engine.url, **settings) as car,
        ):
            path = chat_path(segment).encode()
            answer = await raw(
                car,
                b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
                % path,
            )

            assert answer.startswith(b"HTTP/1.1 400")
            assert not engine.seen


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 2\r\ncontent-length: 3\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 2\r\n",
        b"content-length: 2\r\nx-agent-id: a\r\n b\r\n",
    ],
)
async def test_smuggled_framing_never_becomes_two_requests(head: bytes) -> None:
    """Ambiguous framing is refused, or read as one request by us and by the engine alike."""
    inner = b"POST /v1/evil HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        request = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n%b\r\n{}%b"
        answer = await raw(car, request % (CHAT.encode(), head, inner))

        assert answer.startswith(b"HTTP/1.1 400")
        assert not any("evil" in seen.line for seen in engine.seen)


@pytest.mark.parametrize("value", ["a\tb", "../x", "a b", "a%0d%0ab", "é"])
async def test_echoed_call_ids_cannot_carry_headers(value: str) -> None:
    """What is echoed as x-model-call-id obeys the id rule."""
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        headers = {"x-model-call-id": value.encode("latin-1")}
        answer = await car.http.post(CHAT, json=HELLO, headers=headers)

        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_call_id"
        assert not engine.seen


async def test_secrets_show_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    """Neither keys nor signatures are in logs, answers or the OpenAPI document."""
    with caplog.at_level(logging.DEBUG):
        async with (
            scripted_engine([whole(chat())]) as engine,
            sidecar(engine.url, control_token="operator", **SIGNED) as car,
        ):
            shown = [
                (await car.http.post(chat_path(signed("r1")), json=HELLO)).text,
                (await car.http.post(chat_path(f"r1~{'A' * 43}"), json=HELLO)).text,
                (await car.http.get("/openapi.json")).text,
            ]

    for secret in (KEY, "operator", signed("r1").partition("~")[2], "A" * 43):
        assert not any(secret in text for text in shown)
        ours = [r.getMessage() for r in caplog.records if r.name.startswith(("middle", "capture"))]
        assert not any(secret in text for text in ours)
