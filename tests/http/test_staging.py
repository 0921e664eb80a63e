"""External staging over HTTP: admissions, coordinates, failures, and what the agent sees."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from capture_server.control_routes import (
    CONTROL_ROUTE_PREFIX,
    RolloutControlClient,
    install_rollout_control_routes,
)
from capture_server.errors import UnauthorizedError
from capture_server.in_thread import served_in_thread
from capture_server.staging.rebuild import verify_and_linearize
from capture_server.staging.terminal import make_receipt
from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.memory import MemoryCaptureStore
from middleware import staging_call
from middleware.errors import ConfigurationError, StoreUnavailableError
from tests.http.capture_rig import CHAT, R
from tests.http.staging_rig import Rig, staging_rig

UNCOMMITTED = "request_finished_without_staged_coordinates"
INVALID = "invalid_worker_commit_coordinates"
MISSING = "worker_response_missing_commit_coordinates"


def sent(rig: Rig, number: int = -1) -> dict[str, Any]:
    """What the worker got."""
    body: dict[str, Any] = json.loads(rig.worker.requests[number])
    return body


async def test_a_conversation_is_staged_and_linearized() -> None:
    """Three turns: admissions chain, rows follow, the row is what was generated."""
    async with staging_rig() as rig:
        for text in ("a", "b", "c"):
            assert (await rig.say(text)).status_code == 200
        manifest = await rig.manifest()
        first, second, third = (sent(rig, n)["ng_capture"] for n in range(3))

        assert (first["mode"], first["prev_len"], first["staging_chain"]) == ("text", 0, [])
        keys = [row.staging_key for row in manifest.records]
        assert (second["mode"], second["prev_len"]) == ("token_in", 4)
        assert second["parent_chain_hash"] == manifest.records[0].chain_hash
        assert (second["staging_chain"], third["staging_chain"]) == (keys[:1], keys[:2])
        row = verify_and_linearize(make_receipt(manifest), rig.worker.staging.fetch(keys))
    assert row.token_ids == [10, 11, 1001, 2001, 20, 21, 1002, 2002, 30, 31, 1003, 2003]
    assert row.link_spans == [(r.model_call_id, 2, 2) for r in manifest.records]


async def test_the_worker_gets_the_request_as_it_was_sent() -> None:
    """Only what capture needs is spliced in; an admission of the agent's own is taken out."""
    raw = (
        b'{ "messages": [{"role":"user","content":"x"}], "big": 12345678901234567890123,'
        b' "temperature": 1.50, "ng_capture": {"rollout_id": "stolen"},'
        b' "required_prefix_token_ids": [1], "logprobs": false }'
    )
    async with staging_rig() as rig:
        assert (await rig.sidecar.http.post(CHAT, content=raw)).status_code == 200
        got = rig.worker.requests[0]
    assert b'"big": 12345678901234567890123, "temperature": 1.50' in got
    body = json.loads(got)
    assert body["ng_capture"]["rollout_id"] == "r1"
    assert "required_prefix_token_ids" not in body
    asked = {
        name: body[name] for name in ("logprobs", "top_logprobs", "return_tokens_as_token_ids")
    }
    assert asked == {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}


async def test_the_agent_sees_neither_coordinates_nor_tokens() -> None:
    """Everything else of the answer is byte for byte the worker's; both ids are in the head."""
    async with staging_rig() as rig:
        response = await rig.say("a")
        (row,) = (await rig.manifest()).records
    assert (
        response.content
        == json.dumps(
            {
                "id": "resp-1",
                "object": "chat.completion",
                "model": "m",
                "created": 1.0,
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "answer 1"},
                        "finish_reason": "stop",
                    }
                ],
            },
            separators=(",", ":"),
        ).encode()
    )
    assert response.headers["x-model-call-id"] == row.model_call_id
    assert (row.response_id, row.fingerprint_version) == ("resp-1", 3)
    assert row.output_fingerprint == row.continuation_fingerprint is not None


async def test_megatron_rides_in_offload_params() -> None:
    """The admission is in ``offload_params``, beside what the agent put there."""
    async with staging_rig(backend="megatron_worker") as rig:
        assert (await rig.say("a", offload_params={"x": 1, "ng_capture": "no"})).status_code == 200
        assert (await rig.say("b")).status_code == 200
        assert await rig.failures() == []
    assert sent(rig, 0)["offload_params"]["x"] == 1
    assert sent(rig, 1)["offload_params"]["ng_capture"]["mode"] == "token_in"
    assert "ng_capture" not in sent(rig, 1)


def without(answer: dict[str, Any]) -> None:
    del answer["ng_commit_coords"]


def with_coords(**changes: Any) -> Any:
    def change(answer: dict[str, Any]) -> None:
        answer["ng_commit_coords"] |= changes

    return change


def failed(answer: dict[str, Any]) -> None:
    coords = answer["ng_commit_coords"]
    coords |= {"disposition": "capture_failed", "delta_len": 0, "cum_len": coords["prev_len"]}


def nested(answer: dict[str, Any]) -> None:
    coords = answer.pop("ng_commit_coords")
    choice = answer["choices"][0]
    choice["ng_commit_coords"] = choice["message"]["ng_commit_coords"] = coords


def unserved(answer: dict[str, Any]) -> None:
    answer["id"] = ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without, MISSING),
        (lambda answer: {"id": "x"}, MISSING),
        (lambda answer: {"error": {"message": "in band"}}, MISSING),
        (lambda answer: [1, 2], MISSING),
        (failed, "worker_capture_failed"),
        (unserved, INVALID),
        (with_coords(model_call_id="other"), INVALID),
        (with_coords(rollout_id="other"), INVALID),
        (with_coords(parent_call_id="other", prev_len=4, cum_len=8), INVALID),
        (with_coords(digest="short"), INVALID),
        (with_coords(schema_version=3), INVALID),
        (with_coords(surprise=1), INVALID),
        (with_coords(prev_len=1.0), INVALID),
        (with_coords(staging_key=None), INVALID),
        (with_coords(weight_version=2**64), INVALID),
        (nested, MISSING),
        (lambda answer: answer | {"ng_commit_coords": "text"}, INVALID),
    ],
)
async def test_an_answer_without_valid_coordinates_is_served_and_poisons(
    change: Any, reason: str
) -> None:
    """The model call succeeds; the failure has its reason; the rollout is incomplete."""
    async with staging_rig() as rig:
        rig.worker.change = change
        response = await rig.say("a")
        assert response.status_code == 200
        assert b"ng_commit_coords" not in response.content
        assert await rig.failures() == [reason]
        status = (await rig.sidecar.http.post(R + "/freeze")).json()
    assert (status["incomplete"], status["open_intents"]) == (True, [])
    assert [r["code"] for r in status["incomplete_reasons"]] == [reason]


async def test_a_refusal_leaves_no_trace() -> None:
    """4xx: nothing was generated; the rollout goes on and stays trainable."""
    async with staging_rig() as rig:
        await rig.say("a")
        rig.worker.status = 429
        assert (await rig.say("b")).status_code == 429
        rig.worker.status = 200
        assert (await rig.ask()).status_code == 200
        manifest = await rig.manifest()
        status = (await rig.sidecar.http.post(R + "/freeze")).json()
    assert (len(manifest.records), manifest.failures) == (2, [])
    assert (status["incomplete"], status["calls"]) == (False, 2)


@pytest.mark.parametrize("how", ["status", "break_off", "unreachable"])
async def test_an_admitted_call_that_never_commits_is_a_failure(how: str) -> None:
    """5xx or no answer at all: the agent hears of it, and so does the finalizer."""
    async with staging_rig() as rig:
        await rig.say("a")
        rig.worker.status = 500 if how == "status" else 200
        rig.worker.break_off = how != "status"
        assert (await rig.say("b")).status_code in (500, 502)
        assert await rig.failures() == [UNCOMMITTED]


async def test_a_client_that_leaves_makes_its_call_a_failure() -> None:
    """The worker is told to stop; whether it had staged already is not known."""
    async with staging_rig() as rig:
        await rig.say("a")
        rig.worker.hang = True
        with pytest.raises(httpx.ReadTimeout):
            rig.messages.append({"role": "user", "content": "b"})
            body = {"model": "m", "messages": rig.messages}
            await rig.sidecar.http.post(CHAT, json=body, timeout=0.3)
        status = (await rig.sidecar.http.post(R + "/freeze")).json()
        assert await rig.failures() == [UNCOMMITTED]
    assert (status["incomplete"], status["open_intents"]) == (True, [])


async def test_an_unresolved_continuation_is_served_but_never_a_root() -> None:
    """Its history is not in the ledger: no admission, a failure, and no row."""
    async with staging_rig() as rig:
        await rig.say("a")
        rig.messages[1]["content"] = "words that the model never said"
        assert (await rig.say("b")).status_code == 200
        assert "ng_capture" not in sent(rig)
        manifest = await rig.manifest()
    assert [failure.reason for failure in manifest.failures] == ["unresolved_parent"]
    assert len(manifest.records) == 1


async def test_a_given_history_is_a_root_while_the_ledger_is_empty() -> None:
    """A dataset's dialogue starts a rollout; the second such call is not admitted."""
    async with staging_rig() as rig:
        rig.messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "from the dataset"},
        ]
        await rig.say("a")
        assert sent(rig)["ng_capture"]["mode"] == "text"
        assert await rig.failures() == []


@pytest.mark.parametrize(
    ("path", "more", "word"),
    [
        (CHAT, {"stream": True}, "stream"),
        (CHAT, {"n": 2}, "n: 1"),
        (R + "/v1/completions", {"prompt": "x"}, "chat"),
    ],
)
async def test_what_cannot_be_staged_is_refused_before_dispatch(
    path: str, more: dict[str, Any], word: str
) -> None:
    """A stream, several choices, another dialect: 400 with what to do, and no mark."""
    async with staging_rig() as rig:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **more}
        response = await rig.sidecar.http.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "unsupported_parameter"
        assert word in response.json()["error"]["message"]
        assert rig.worker.requests == []
        assert await rig.failures() == []


class _BrokenStore(MemoryCaptureStore):
    """A ledger that cannot be asked."""

    broken = ""

    async def look(self, rollout_id: str, view: Any) -> Any:
        if self.broken == "look":
            raise StoreUnavailableError("told to")
        return await super().look(rollout_id, view)

    async def apply_rule(self, rollout_id: str, rule: Any, **more: Any) -> None:
        if self.broken == "apply_rule":
            raise StoreUnavailableError("told to")
        await super().apply_rule(rollout_id, rule, **more)


async def test_a_ledger_that_cannot_be_asked_fails_the_call_before_dispatch() -> None:
    """Fail closed: 503 with Retry-After, nothing reaches the worker, nothing dangles."""
    store = _BrokenStore()
    async with staging_rig(store=store) as rig:
        await rig.say("a")
        store.broken = "look"
        response = await rig.say("b")
        assert response.status_code == 503
        assert response.headers["retry-after"]
        store.broken = ""
        assert len(rig.worker.requests) == 1
        assert (await rig.sidecar.status()).open_intents == []
        assert (await rig.ask()).status_code == 200
        assert await rig.failures() == []


async def test_a_ledger_that_cannot_be_written_never_fails_the_call() -> None:
    """After generation the answer is served; the rollout is poisoned."""
    store = _BrokenStore()
    async with staging_rig(store=store) as rig:
        store.broken = "apply_rule"
        assert (await rig.say("a")).status_code == 200
        assert await rig.failures() == [UNCOMMITTED]


class _HangsOnce(MemoryCaptureStore):
    """The first mark is never written."""

    hung = False

    async def mark_incomplete(self, *args: Any, **more: Any) -> None:
        if not self.hung:
            self.hung = True
            await asyncio.Event().wait()
        await super().mark_incomplete(*args, **more)


async def test_a_failure_that_hangs_becomes_a_mark_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent hears of the broken worker, and the rollout is masked all the same."""
    monkeypatch.setattr(staging_call, "_FAILURE_TIMEOUT_S", 0.05)
    store = _HangsOnce()
    async with staging_rig(store=store) as rig:
        rig.worker.break_off = True
        assert (await rig.say("a")).status_code in (500, 502)
        assert await rig.failures() == [UNCOMMITTED]
    assert store.hung


async def test_fences_hold_for_staged_calls() -> None:
    """Frozen: 409. Retired: 410, and no ledger. Deleted: a new rollout."""
    async with staging_rig() as rig:
        http = rig.sidecar.http
        await rig.say("a")
        frozen = (await http.post(R + "/freeze")).json()
        assert (await rig.say("b")).status_code == 409
        assert len((await rig.manifest()).records) == 1
        consumed = {name: frozen[name] for name in ("snapshot_id", "version")}
        assert (await http.post(R + "/retire", json=consumed)).json() == {"retired": True}
        assert (await rig.ask()).status_code == 410
        assert (await http.get(R + "/manifest")).json()["error"]["code"] == "rollout_retired"
        await http.delete(R)
        rig.messages = []
        assert (await rig.say("again")).status_code == 200
        assert len((await rig.manifest()).records) == 1


async def test_the_file_store_keeps_the_ledger(tmp_path: Path) -> None:
    """The same over the default store; a store opened afterwards has the rows."""
    store = TokenCaptureStore(tmp_path)
    async with staging_rig(store=store) as rig:
        await rig.say("a")
        await rig.say("b")
        manifest = await rig.manifest()
    async with staging_rig(store=TokenCaptureStore(tmp_path)) as later:
        assert await later.manifest() == manifest


# --- the manifest's routes and client ------------------------------------------------------------


async def test_the_seeds_client_reads_the_manifest() -> None:
    """Same content at both addresses; another rollout's is empty."""
    async with staging_rig() as rig:
        await rig.say("a")
        client = RolloutControlClient(rig.sidecar.url, auth_token="t", request_timeout_s=5)
        async with client:
            assert await client.manifest("r1") == await rig.manifest()
            other = await client.manifest("r2")
    assert (other.rollout_id, other.records, other.failures) == ("r2", [], [])


async def test_a_framework_serves_its_own_ledger() -> None:
    """``install_rollout_control_routes``: the token is needed, ids are checked."""
    from capture_server.staging.ledger import StoreLedger

    app = FastAPI()
    ledger = StoreLedger(MemoryCaptureStore())
    await ledger.record_failure("r1", "c1", "worker_capture_failed")
    install_rollout_control_routes(app, ledger, auth_token="right")
    async with served_in_thread(app) as url:
        async with RolloutControlClient(url, auth_token="right", request_timeout_s=5) as client:
            manifest = await client.manifest("r1")
        assert [f.reason for f in manifest.failures] == ["worker_capture_failed"]
        async with RolloutControlClient(url, auth_token="wrong", request_timeout_s=5) as client:
            with pytest.raises(UnauthorizedError):
                await client.manifest("r1")
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            bad = f"{CONTROL_ROUTE_PREFIX}/rollouts/-bad/manifest"
            answer = await http.get(bad, headers={"authorization": "Bearer right"})
            assert answer.json()["error"]["code"] == "invalid_rollout_id"
    with pytest.raises(ConfigurationError):
        install_rollout_control_routes(FastAPI(), ledger, auth_token=" ")
