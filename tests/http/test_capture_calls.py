"""Captured calls that do not stream, refusals, and everything around a call."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
from typing import Any

import httpx
import pytest

from capture_server.stores.memory import MemoryCaptureStore
from middleware.errors import StoreUnavailableError
from middleware.protocols import CallIntent, IntentTicket
from middleware.records import TokenEntry, compute_digest
from tests.http.capture_rig import CHAT, HELLO, STREAM, R, sidecar
from tests.http.upstream import RESET, chat, scripted_engine, stream, whole

COMPLETIONS = R + "/v1/completions"


async def test_a_whole_answer_is_captured_and_stripped() -> None:
    """Same status, headers and body minus the token members; the record is complete."""
    shown = chat("hällo", usage=None)
    for name in ("prompt_token_ids",):
        del shown[name]
    for name in ("token_ids", "logprobs"):
        del shown["choices"][0][name]
    answer = whole(
        chat("hällo", usage=None), headers=[("content-type", "application/json"), ("x-e", "1")]
    )
    async with scripted_engine([answer]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=HELLO, headers={"x-agent-id": "sub"})
        (entry,) = await car.entries()

    assert response.json() == shown
    assert response.headers["x-e"] == "1"
    assert entry.prompt_token_ids == [1, 2]
    assert entry.generation_token_ids == [11, 12]
    assert entry.digest == compute_digest([1, 2, 11, 12])
    assert (entry.response_id, entry.model, entry.agent_id) == ("resp-1", "m", "sub")
    assert (entry.delivered, entry.first_call, entry.engine) == (True, True, "openai")
    assert entry.parent_resolution is not None
    assert entry.parent_resolution.value == "root"


async def test_what_the_agent_sent_reaches_the_engine_byte_for_byte() -> None:
    """C43: unknown members, big integers, number spelling and order survive; only ours differ."""
    body = (
        b'{"model":"m", "zzz":[1,{"k":null}],"big":123456789012345678901234567890,"x":1.0e5,\n'
        b' "messages":[{"role":"user","content":"h\\u00e9"}],"logprobs":false,"top_logprobs":null}'
    )
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        headers = {
            "content-type": "application/json",
            "authorization": "Bearer agent",
            "x-q": "1, 2",
        }
        await car.http.post(CHAT + "?beta=true&a=%2F", content=body, headers=headers)
        (seen,) = engine.seen

    expected = body.replace(b'"logprobs":false', b'"logprobs":true')
    expected = expected.replace(b'"top_logprobs":null', b'"top_logprobs":0')
    assert seen.body == expected[:-1] + b',"return_token_ids":true}'
    assert seen.line == "POST /v1/chat/completions?beta=true&a=%2F HTTP/1.1"
    assert seen.header("authorization") == "Bearer agent"
    assert seen.header("accept-encoding") == "identity"


@pytest.mark.parametrize(
    ("asked", "sent", "kept"),
    [
        ({"top_logprobs": None}, 0, set()),
        ({"logprobs": False}, 0, set()),
        ({"logprobs": None, "return_token_ids": False}, 0, set()),
        ({"top_logprobs": 3}, 3, set()),
        ({"logprobs": True}, 0, {"logprobs"}),
        ({"return_token_ids": True}, 0, {"token_ids"}),
        ({"return_token_ids": True, "logprobs": True}, 0, {"token_ids", "logprobs"}),
    ],
)
async def test_no_request_field_turns_capture_off(
    asked: dict[str, Any], sent: int, kept: set[str]
) -> None:
    """C19: the engine is always asked; the agent's own view is kept."""
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=HELLO | asked)
        body = engine.seen[0].json
        assert len(await car.entries()) == 1

    assert (body["logprobs"], body["return_token_ids"], body["top_logprobs"]) == (True, True, sent)
    assert {"token_ids", "logprobs"} & set(response.json()["choices"][0]) == kept
    assert ("prompt_token_ids" in response.json()) == ("token_ids" in kept)


async def test_completions_ask_and_read_their_own_shape() -> None:
    """``logprobs: 0`` is a request here; prompt ids and arrays stand in the choice."""
    choice = {
        "index": 0,
        "text": "ab",
        "logprobs": {"token_logprobs": [-0.3, -0.4], "tokens": ["a", "b"]},
        "finish_reason": "length",
        "token_ids": [10, 11],
        "prompt_token_ids": [1, 20],
    }
    answer = {"id": "cmpl-1", "model": "m", "choices": [choice]}
    request = {"model": "m", "prompt": [1, 20]}
    async with scripted_engine([whole(answer)]) as engine, sidecar(engine.url) as car:
        plain = await car.http.post(COMPLETIONS, json=request)
        asked = await car.http.post(COMPLETIONS, json=request | {"logprobs": 0})
        entries = await car.entries()

    assert [seen.json["logprobs"] for seen in engine.seen] == [0, 0]
    assert set(plain.json()["choices"][0]) == {"index", "text", "finish_reason"}
    assert "logprobs" in asked.json()["choices"][0]
    assert [e.generation_token_ids.tolist() for e in entries] == [[10, 11], [10, 11]]
    assert {e.dialect for e in entries} == {"completions"}


async def test_echo_never_mixes_the_prompt_into_the_generation() -> None:
    """echo reports the prompt's log-probs first; ``max_tokens: 0`` only scores: no record."""
    choice = {
        "index": 0,
        "text": "xab",
        "logprobs": {"token_logprobs": [None, -0.9, -0.3, -0.4]},
        "finish_reason": "length",
        "token_ids": [10, 11],
        "prompt_token_ids": [1, 20],
    }
    answer = whole({"id": "cmpl-1", "choices": [choice]})
    request = {"model": "m", "prompt": "x", "echo": True}
    async with scripted_engine([answer]) as engine, sidecar(engine.url) as car:
        await car.http.post(COMPLETIONS, json=request | {"max_tokens": 0})
        await car.http.post(COMPLETIONS, json=request)
        (entry,) = await car.entries()

    assert engine.seen[0].json == request | {"max_tokens": 0}
    assert entry.generation_log_probs == [-0.3, -0.4]


async def test_the_shape_that_carries_tokens_on_the_message() -> None:
    """NeMo-RL: the bundle on the message, ids as ``token_id:`` strings."""
    message = {
        "role": "assistant",
        "content": "ab",
        "prompt_token_ids": [1, 7, 9],
        "generation_token_ids": ["token_id:11", "token_id:2"],
        "generation_log_probs": [-0.3, -0.1],
    }
    answer = {"id": "c", "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
    async with (
        scripted_engine([whole(answer)]) as engine,
        sidecar(engine.url, engine="nemo_rl") as car,
    ):
        response = await car.http.post(CHAT, json=HELLO)
        (entry,) = await car.entries()

    assert response.json()["choices"][0]["message"] == {"role": "assistant", "content": "ab"}
    assert entry.prompt_token_ids == [1, 7, 9]
    assert entry.generation_token_ids == [11, 2]
    assert "return_token_ids" not in engine.seen[0].json
    assert entry.output_items[0]["content"] == "ab"
    assert "generation_token_ids" not in entry.output_items[0]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (chat(ids=[1, 2, 3], log_probs=[-0.1] * 4), "length_mismatch"),
        (chat(log_probs=[-0.1, float("nan")]), "non_finite_log_probs"),
        (chat(log_probs=[-0.1, float("-inf")]), "non_finite_log_probs"),
        (chat(log_probs=[-0.1, None]), "non_finite_log_probs"),
        (chat(usage={"completion_tokens": 3, "prompt_tokens": 2}), "usage_mismatch"),
        (chat(usage={"completion_tokens": 2, "prompt_tokens": 9}), "usage_mismatch"),
        ({"id": "x", "choices": [{"index": 0, "message": {"content": "hi"}}]}, "missing_token_ids"),
        (b"{broken", "unparsable_answer"),
        (b"[1]", "unparsable_answer"),
    ],
)
async def test_an_answer_whose_tokens_cannot_be_trusted(answer: Any, code: str) -> None:
    """C16, C18, an engine that reports no tokens: served, and the rollout is incomplete."""
    async with scripted_engine([whole(answer)]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=HELLO)

        assert response.status_code == 200
        assert await car.reasons() == [code]
        assert await car.entries() == []


@pytest.mark.parametrize(
    "answer",
    [
        whole({"error": {"message": "no"}}),
        whole({"object": "error", "message": "no"}),
        whole({"id": "x", "choices": []}),
        whole(b""),
        whole(b"", status="204 No Content"),
        whole(b"", status="307 Temporary Redirect", headers=[("location", "/x")]),
        whole({"error": {"message": "slow down"}}, "429 Too Many Requests", [("retry-after", "7")]),
        whole({"error": {"message": "context length"}}, "400 Bad Request"),
        whole(b"<html>bad gateway</html>", "502 Bad Gateway", [("content-type", "text/html")]),
        whole({"error": {}}, "500 Internal Server Error"),
    ],
)
async def test_answers_without_model_text_cancel_the_intent(answer: bytes) -> None:
    """They reach the agent as they are; nothing is recorded and nothing is missing."""
    async with scripted_engine([answer]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=HELLO)
        await car.freeze()
        status = await car.status()

    head, _, body = answer.partition(b"\r\n\r\n")
    assert response.status_code == int(head.split()[1])
    assert response.content == body
    assert response.headers.get("retry-after") == ("7" if response.status_code == 429 else None)
    assert "x-model-call-id" in response.headers
    assert (status.calls, status.incomplete, list(status.open_intents)) == (0, False, [])


async def test_a_body_cut_short_is_never_passed_on() -> None:
    """A non-streaming answer that breaks off: 502 in the dialect's shape, intent cancelled."""
    cut = whole(chat())[:-30]
    async with scripted_engine([cut, 0.05, RESET]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=HELLO)
        assert await car.entries() == []
        status = await car.status()

    assert response.status_code == 502
    assert response.json()["error"]["code"] == "upstream_unreachable"
    assert not status.incomplete


async def test_an_engine_that_is_down() -> None:
    """502 with what to do, for captured calls and for everything else; no open intent stays."""
    async with sidecar("http://127.0.0.1:9") as car:
        captured = await car.http.post(CHAT, json=HELLO)
        plain = await car.http.get("/v1/models")
        await car.freeze()
        status = await car.status()

    for response in (captured, plain):
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "upstream_unreachable"
    assert captured.headers["x-rollout-id"] == "r1"
    assert (status.incomplete, list(status.open_intents)) == (False, [])


@pytest.mark.parametrize(
    ("path", "content", "headers", "status", "code"),
    [
        (
            "/ng-rollout/a%2Fb/training-token-capture/v1/chat/completions",
            b"{}",
            {},
            400,
            "invalid_rollout_id",
        ),
        (
            "/ng-rollout/%2e%2e/training-token-capture/v1/chat/completions",
            b"{}",
            {},
            400,
            "invalid_rollout_id",
        ),
        ("/ng-rollout/.x/v1/chat/completions", b"{}", {}, 400, "invalid_rollout_id"),
        (CHAT, b"{}", {"x-model-call-id": "a/b"}, 400, "invalid_call_id"),
        (CHAT, b'{"n":2}', {"x-model-call-id": "c.1"}, 400, "invalid_call_id"),
        (CHAT, b'{"n":2}', {"x-model-call-id": "c" * 181}, 400, "invalid_call_id"),
        (CHAT, b"not json", {}, 400, "invalid_body"),
        (CHAT, b"", {}, 400, "invalid_body"),
        (CHAT, b"[1]", {}, 400, "invalid_body"),
        (CHAT, b"\xff", {}, 400, "invalid_body"),
        (CHAT, b"[" * 100_000, {}, 400, "invalid_body"),
        (CHAT, b'{"use_beam_search":true}', {}, 400, "unsupported_parameter"),
        (COMPLETIONS, b'{"prompt":"x","best_of":3}', {}, 400, "unsupported_parameter"),
        (CHAT, b"{}", {"content-encoding": "snappy"}, 415, "unsupported_encoding"),
        (CHAT, b"no gzip", {"content-encoding": "gzip"}, 400, "invalid_body"),
        (CHAT, b" " * 2000 + b"{}", {}, 413, "body_too_large"),
        (CHAT, gzip.compress(b" " * 9000), {"content-encoding": "gzip"}, 413, "body_too_large"),
        (R + "/frieze", b"{}", {}, 404, "unknown_route"),
    ],
)
async def test_bad_input_is_refused_before_the_engine_is_asked(
    path: str, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    """A clear error with what to do, nothing sent, no hole."""
    limits = {"max_body_bytes": 1000 if b"  " in content else None, "max_decoded_body_bytes": 8000}
    async with scripted_engine([whole(chat())]) as engine:
        async with sidecar(engine.url, **limits if len(content) < 3000 else {}) as car:
            response = await car.http.post(path, content=content, headers=headers)
            status_after = await car.status()

    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert len(response.json()["error"]["message"]) > 20
    assert engine.seen == []
    assert (status_after.incomplete, list(status_after.open_intents)) == (False, [])


async def test_compressed_bodies_are_understood_in_both_directions() -> None:
    """gzip requests are sent on plain; an answer that is compressed although not asked is read."""
    packed = whole(
        gzip.compress(json.dumps(chat()).encode()),
        headers=[("content-type", "application/json"), ("content-encoding", "gzip")],
    )
    async with scripted_engine([packed]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(
            CHAT,
            content=gzip.compress(json.dumps(HELLO).encode()),
            headers={"content-encoding": "gzip", "content-type": "application/json"},
        )
        (entry,) = await car.entries()
        (seen,) = engine.seen

    assert seen.header("content-encoding") is None
    assert seen.json["messages"] == HELLO["messages"]
    assert response.json()["choices"][0]["message"]["content"] == "hi"
    assert "token_ids" not in response.json()["choices"][0]
    assert entry.generation_token_ids == [11, 12]


async def test_an_answer_in_an_unknown_coding_makes_the_rollout_incomplete() -> None:
    """It is passed on as it came."""
    answer = whole(
        b"\x01\x02", headers=[("content-type", "application/json"), ("content-encoding", "snappy")]
    )
    async with scripted_engine([answer]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=HELLO)

        assert response.content == b"\x01\x02"
        assert response.headers["content-encoding"] == "snappy"
        assert await car.reasons() == ["undecodable_answer"]


async def test_calls_after_freeze_and_after_retire() -> None:
    """409 and 410 before compute is spent; a second freeze is the same freeze."""
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        await car.http.post(CHAT, json=HELLO)
        first, second = await car.freeze(), await car.freeze()
        frozen = await car.http.post(CHAT, json=HELLO)
        stale = await car.http.post(
            R + "/retire", json={"snapshot_id": first["snapshot_id"], "version": 999}
        )
        answer = {"snapshot_id": first["snapshot_id"], "version": first["version"]}
        retired = await car.http.post(R + "/retire", json=answer)
        again = await car.http.post(R + "/retire", json=answer)
        gone = await car.http.post(CHAT, json=HELLO)

    assert first == second
    assert (frozen.status_code, frozen.json()["error"]["code"]) == (409, "rollout_frozen")
    assert (stale.status_code, stale.json()["error"]["code"]) == (409, "stale_snapshot")
    assert (stale.json()["snapshot_id"], stale.json()["version"]) == tuple(answer.values())
    assert retired.json() == again.json() == {"retired": True}
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "rollout_retired")
    assert len(engine.seen) == 1


async def test_a_reused_call_id_is_refused() -> None:
    """The id stays with its first call."""
    headers = {"x-model-call-id": "mine"}
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        first = await car.http.post(CHAT, json=HELLO, headers=headers)
        second = await car.http.post(CHAT, json=STREAM, headers=headers)
        (entry,) = await car.entries()
        assert not (await car.status()).incomplete

    assert first.headers["x-model-call-id"] == entry.model_call_id == "mine"
    assert (second.status_code, second.json()["error"]["code"]) == (409, "call_id_conflict")


class BrokenStore(MemoryCaptureStore):
    """Fails where told."""

    def __init__(self, *broken: str) -> None:
        super().__init__()
        self.broken = set(broken)

    async def open_intent(self, intent: CallIntent) -> IntentTicket:
        """Disk full at the intent, or at its sync."""
        if "intent" in self.broken:
            raise StoreUnavailableError("no space left on device; free some, then retry")
        ticket = await super().open_intent(intent)
        return _LostSync(ticket) if "sync" in self.broken else ticket

    async def put(self, entry: TokenEntry) -> None:
        """Disk full at the record."""
        if "put" in self.broken:
            raise OSError(errno.ENOSPC, "no space left on device")
        await super().put(entry)

    async def mark_incomplete(
        self, rollout_id: str, model_call_id: str = "", reason: str = "", detail: str = ""
    ) -> None:
        """Not even the mark."""
        if "mark" in self.broken:
            raise OSError(errno.ENOSPC, "no space left on device")
        await super().mark_incomplete(rollout_id, model_call_id, reason, detail)


class _LostSync:
    def __init__(self, ticket: IntentTicket) -> None:
        self.first_call = ticket.first_call

    async def wait_durable(self) -> None:
        raise StoreUnavailableError("input/output error")


async def test_a_store_that_fails_at_the_intent_refuses_the_call() -> None:
    """503 with Retry-After, the engine is not asked."""
    async with scripted_engine([whole(chat())]) as engine:
        async with sidecar(engine.url, store=BrokenStore("intent")) as car:
            response = await car.http.post(CHAT, json=HELLO)

    assert (response.status_code, response.json()["error"]["code"]) == (503, "capture_unavailable")
    assert int(response.headers["retry-after"]) > 0
    assert engine.seen == []


@pytest.mark.parametrize(
    ("broken", "reasons"),
    [
        (("put",), ["store_failure"]),
        (("sync",), ["intent_not_durable"]),
        (("put", "mark"), ["dangling_intent"]),
    ],
)
async def test_a_store_that_fails_later_never_fails_the_call(
    broken: tuple[str, ...], reasons: list[str]
) -> None:
    """C35: served; the rollout is incomplete, even when not even the mark could be written."""
    store = BrokenStore(*broken)
    async with scripted_engine([whole(chat())]) as engine:
        async with sidecar(engine.url, store=store, freeze_grace_s=0.1) as car:
            response = await car.http.post(CHAT, json=HELLO)

            assert response.json()["choices"][0]["message"]["content"] == "hi"
            assert await car.reasons() == reasons


async def test_multi_turn_calls_resolve_and_store_deltas() -> None:
    """Turn 2 extends turn 1: resolved, stored as a delta; a changed history resolves to nothing."""
    second = whole(chat("more", [13], prompt=[1, 2, 11, 12, 5], response_id="resp-2"))
    async with scripted_engine([whole(chat())], [second]) as engine, sidecar(engine.url) as car:
        first = await car.http.post(CHAT, json=HELLO)
        turn = [*HELLO["messages"], first.json()["choices"][0]["message"]]
        await car.http.post(
            CHAT, json={**HELLO, "messages": [*turn, {"role": "user", "content": "?"}]}
        )
        turn[0] = {"role": "user", "content": "another question"}
        await car.http.post(
            CHAT, json={**HELLO, "messages": [*turn, {"role": "user", "content": "?"}]}
        )
        root, child, stranger = await car.entries()

    assert (child.parent_call_id, child.prompt_is_delta) == (root.model_call_id, True)
    assert child.prompt_token_ids == [5]
    assert child.digest == compute_digest([1, 2, 11, 12, 5, 13])
    assert stranger.parent_resolution is not None
    assert (stranger.parent_resolution.value, stranger.parent_resolution_reason) == (
        "unresolved",
        "no_match",
    )


async def test_drift_is_recorded_where_it_starts() -> None:
    """A resolved child whose prompt leaves the parent's tokens: full prompt, ``drift_at``."""
    drifted = whole(chat("more", [13], prompt=[1, 2, 11, 99, 5]))
    async with scripted_engine([whole(chat())], [drifted]) as engine, sidecar(engine.url) as car:
        first = await car.http.post(CHAT, json=HELLO)
        turn = [*HELLO["messages"], first.json()["choices"][0]["message"]]
        await car.http.post(
            CHAT, json={**HELLO, "messages": [*turn, {"role": "user", "content": "?"}]}
        )
        root, child = await car.entries()
        assert (await car.status()).drifted_calls == 1

    assert (child.parent_call_id, child.prompt_is_delta, child.drift_at) == (
        root.model_call_id,
        False,
        3,
    )


async def test_paths_that_cannot_be_read_make_the_rollout_incomplete_only_if_they_succeed() -> None:
    """unobserved_path: 2xx marks, an error cancels; on a frozen rollout 409."""
    path = R + "/v1/audio/speech"
    scripts = [[whole({}, "404 Not Found")], [whole(b"sound")]]
    async with scripted_engine(*scripts) as engine, sidecar(engine.url) as car:
        assert (await car.http.post(path, json={})).status_code == 404
        assert not (await car.status()).incomplete
        assert (await car.http.post(path, json={})).content == b"sound"
        assert await car.reasons() == ["unobserved_path"]
        frozen = await car.http.post(path, json={})
        deleted = await car.http.delete(path)

    assert [seen.line.split()[1] for seen in engine.seen] == ["/v1/audio/speech"] * 2
    assert frozen.status_code == deleted.status_code == 409


async def test_requests_that_make_no_call() -> None:
    """HEAD is ours, reads and token counting are forwarded; none leaves an intent."""
    async with scripted_engine([whole({"ok": 1})]) as engine, sidecar(engine.url) as car:
        head = await car.http.head(CHAT)
        root_head = await car.http.head(R)
        options = await car.http.options(CHAT)
        counted = await car.http.post(R + "/v1/messages/count_tokens?beta=true", json={})
        tokenized = await car.http.post(R + "/tokenize", json={})
        models = await car.http.get(R + "/models")
        untagged = await car.http.post("/v1/chat/completions", json=HELLO)
        stripped = await car.http.get("/ng-rollout/r1/v1/x%2Fy?q=%20")
        status = await car.status()

    assert (head.status_code, head.content, root_head.status_code) == (200, b"", 200)
    assert {r.status_code for r in (options, counted, tokenized, models, untagged, stripped)} == {
        200
    }
    assert models.json()["data"][0]["id"] == "m"
    assert [seen.line.rsplit(" ", 1)[0] for seen in engine.seen] == [
        "OPTIONS /v1/chat/completions",
        "POST /v1/messages/count_tokens?beta=true",
        "POST /tokenize",
        "POST /v1/chat/completions",
        "GET /v1/x%2Fy?q=%20",
    ]
    assert engine.seen[3].json == HELLO
    assert status.state == "unknown"


@pytest.mark.parametrize("prefix", ["", "/gw"])
async def test_behind_a_root_path_both_forms_are_captured(prefix: str) -> None:
    """C37: ``--root-path /gw``; the engine sees the plain path either way."""
    async with (
        scripted_engine([whole(chat())]) as engine,
        sidecar(engine.url, root_path="/gw") as car,
    ):
        response = await car.http.post(prefix + CHAT, json=HELLO)
        status = await car.http.get(prefix + R)
        (entry,) = await car.entries()

    assert response.headers["x-model-call-id"] == entry.model_call_id
    assert engine.seen[0].line.startswith("POST /v1/chat/completions ")
    assert status.json()["calls"] == 1


async def test_freeze_waits_for_running_calls() -> None:
    """C34: new calls are refused at once, the running one ends and is in the snapshot."""
    go = asyncio.Event()
    async with scripted_engine([go, whole(chat())], [whole(chat())]) as engine:
        async with sidecar(engine.url, freeze_grace_s=10) as car:
            running = asyncio.create_task(car.http.post(CHAT, json=HELLO))
            while not engine.seen:
                await asyncio.sleep(0.01)
            freezing = asyncio.create_task(car.freeze())
            while (await car.http.post(CHAT, json=HELLO)).status_code != 409:
                await asyncio.sleep(0.01)
            assert (await car.status()).state == "open"
            go.set()
            assert (await running).status_code == 200
            summary = await freezing

    assert (summary["incomplete"], summary["state"]) == (False, "frozen")
    assert summary["calls"] == len(engine.seen)


async def test_freeze_gives_up_on_a_call_that_does_not_end() -> None:
    """After the grace what is still open dangles: the rollout is incomplete."""
    async with scripted_engine([30]) as engine, sidecar(engine.url, freeze_grace_s=0.2) as car:
        running = asyncio.create_task(car.http.post(CHAT, json=HELLO))
        while not engine.seen:
            await asyncio.sleep(0.01)
        assert await car.reasons() == ["dangling_intent"]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_proxy_settings_of_the_environment_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C47: HTTP_PROXY must not divert model traffic."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        assert (await car.http.post(CHAT, json=HELLO)).status_code == 200


async def test_many_slow_streams_at_once() -> None:
    """C47: no pool limit stands in the way of 200 concurrent calls."""
    answer = [0.3, stream(*[])]
    async with scripted_engine(answer) as engine, sidecar(engine.url) as car:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=car.url, limits=limits, timeout=30) as http:
            responses = await asyncio.gather(*(http.post(CHAT, json=STREAM) for _ in range(200)))

    assert {response.status_code for response in responses} == {200}
    assert len(engine.seen) == 200
