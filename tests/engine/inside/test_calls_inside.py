"""Single calls inside vLLM that are not one plain answer: cut, refused, lost, several."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.engine.inside.rig import Inside, InsideRollout
from tests.engine.inside.talk import ROUTES, Talk
from tests.engine.rig import MODEL, wait_until

SAY = "Say anything."
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "min_tokens": 1500}
every_dialect = pytest.mark.parametrize("dialect", sorted(ROUTES))
both_modes = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def long_body(dialect: str) -> dict[str, Any]:
    """A request that nobody finishes by accident while a test is busy leaving."""
    talk = Talk(None, dialect)  # type: ignore[arg-type]
    talk.user(SAY)
    body = talk.body(seed=1, **LONG)
    if dialect == "responses":
        body.pop("min_tokens")
    if dialect == "messages":
        body["max_tokens"] = 1500
    return body


def is_idle(inside: Inside) -> bool:
    """Whether the engine works on nothing."""
    return inside.engine.running_requests() == 0


def closed(rollout: InsideRollout) -> bool:
    """Whether no call of the rollout is open."""
    return rollout.get().json()["open_intents"] == []


def in_both_modes(rollout: InsideRollout, route: str, body: dict[str, Any]) -> list[httpx.Response]:
    """The answers to a request, whole and streamed."""
    return [rollout.post_model(route, body | {"stream": stream}) for stream in (False, True)]


@every_dialect
def test_a_stream_that_the_client_leaves_is_recorded_as_cut(
    inside: Inside, rollout: InsideRollout, dialect: str
) -> None:
    """The engine stops within a second; the tokens so far are an entry that is no finished turn."""
    body = long_body(dialect) | {"stream": True}
    url = f"{rollout.base_url}{ROUTES[dialect]}"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        call_id = response.headers["x-model-call-id"]
        for number, _ in enumerate(response.iter_lines()):
            if number > 40:
                break
    left = time.monotonic()
    wait_until(lambda: is_idle(inside), "the engine to be idle", within_s=10)
    idle_after = time.monotonic() - left
    wait_until(lambda: closed(rollout), "the intent to be closed", within_s=10)
    entry = rollout.frozen_calls()[call_id]

    assert idle_after < 3, "cancellation took too long"
    # A random model may have ended its turn at once in the dialect without ignore_eos.
    if entry["finish_reason"] != "stop":
        assert entry["finish_reason"] == "client_disconnect"
        assert entry["delivered"] is False
    assert 0 < len(entry["generation_token_ids"]) < 1500


@every_dialect
def test_a_whole_answer_that_the_client_leaves_is_no_call(
    inside: Inside, rollout: InsideRollout, dialect: str
) -> None:
    """Nothing reached the client: the intent is cancelled, nothing is recorded or incomplete."""
    timed_out = 0
    for attempt in range(20):
        body = long_body(dialect)
        if dialect == "messages":  # without ignore_eos a random model may end at once
            body["messages"][0]["content"] += f" {attempt}"
        try:
            url = f"{rollout.base_url}{ROUTES[dialect]}"
            httpx.post(url, json=body, timeout=httpx.Timeout(10, read=0.4))
        except httpx.ReadTimeout:
            timed_out += 1
            break
    wait_until(lambda: is_idle(inside), "the engine to be idle", within_s=10)
    wait_until(lambda: closed(rollout), "the intent to be closed", within_s=10)
    assert timed_out == 1
    assert len(rollout.frozen_calls()) == attempt


def test_drained_calls_are_whole(inside_require: Inside) -> None:
    """``ON_DISCONNECT=drain``: the engine goes on for nobody, and the entry is whole."""
    rollout = inside_require.rollout()
    body = long_body("chat") | {"stream": True, "max_tokens": 120, "min_tokens": 120}
    with httpx.stream("POST", f"{rollout.base_url}/chat/completions", json=body) as response:
        call_id = response.headers["x-model-call-id"]
        next(response.iter_lines())
    wait_until(lambda: closed(rollout), "the call to be drained", within_s=30)
    entry = rollout.frozen_calls()[call_id]
    assert entry["finish_reason"] == "length"
    assert entry["delivered"] is False
    assert len(entry["generation_token_ids"]) == 120


@both_modes
def test_every_choice_and_prompt_is_an_entry(
    inside: Inside, rollout: InsideRollout, stream: bool
) -> None:
    """Two prompts, two choices each: four entries, prompt-major, each with its own tokens."""
    body = {
        "model": MODEL,
        "prompt": ["One", "Two three"],
        "n": 2,
        "seed": 3,
        "max_tokens": 8,
        "stream": stream,
    }
    answer = rollout.post_model("/completions", body)
    base = answer.headers["x-model-call-id"]
    calls = rollout.frozen_calls()
    direct = inside.engine.post(
        "/v1/completions", body | {"stream": False, "return_token_ids": True, "logprobs": 0}
    )
    assert set(calls) == {f"{base}.{index}" for index in range(4)}
    for choice in direct["choices"]:
        entry = calls[f"{base}.{choice['index']}"]
        assert entry["prompt_token_ids"] == choice["prompt_token_ids"]
        assert entry["generation_token_ids"] == choice["token_ids"]
        assert entry["generation_log_probs"] == pytest.approx(
            choice["logprobs"]["token_logprobs"], abs=1e-4
        )


@every_dialect
def test_the_record_says_how_the_tokens_were_sampled(rollout: InsideRollout, dialect: str) -> None:
    """Effective parameters, also those that the agent left to the engine; a grammar is noted."""
    talk = Talk(rollout, dialect).user(SAY)
    asked = talk.ask(temperature=0.5, max_tokens=4)
    (entry,) = rollout.frozen_calls().values()
    assert entry["model_call_id"] == asked.call_id
    assert entry["sampling"]["temperature"] == 0.5
    assert entry["sampling"]["top_p"] == 1.0
    assert entry["sampling"]["logprobs_mode"] == "raw_logprobs"
    assert (entry["dialect"], entry["engine"]) == (dialect, "vllm")
    assert "guided" not in entry


def test_a_grammar_is_noted(rollout: InsideRollout) -> None:
    """Log-probs under a grammar are those after its mask: trainers must know."""
    body = Talk(rollout, "chat").user(SAY).body(max_tokens=8, structured_outputs={"regex": "a+"})
    rollout.post_model("/chat/completions", body)
    (entry,) = rollout.frozen_calls().values()
    assert entry["guided"] is True


@pytest.mark.parametrize(
    ("route", "change", "code"),
    [
        ("/chat/completions", {"use_beam_search": True, "n": 2}, "unsupported_parameter"),
        ("/completions", {"prompt": "a", "use_beam_search": True}, "unsupported_parameter"),
        ("/responses", {"input": "a", "background": True}, "unsupported_parameter"),
    ],
    ids=["chat-beams", "completion-beams", "background"],
)
def test_what_cannot_be_captured_is_refused(
    rollout: InsideRollout, route: str, change: dict[str, Any], code: str
) -> None:
    """400 before any compute, in the dialect's shape, and no trace."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": SAY}], **change}
    for answer in in_both_modes(rollout, route, body):
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == code
    assert rollout.frozen_calls() == {}


@every_dialect
def test_the_engines_refusals_pass_through(
    inside: Inside, rollout: InsideRollout, dialect: str
) -> None:
    """The same status and bytes as past the tag, no call and no hole."""
    talk = Talk(rollout, dialect).user("hi " * 3000)
    for body in (talk.body(), Talk(rollout, dialect).user(SAY).body() | {"model": "nobody"}):
        for answer in in_both_modes(rollout, ROUTES[dialect], body):
            streamed = body | {"stream": "event-stream" in answer.headers["content-type"]}
            direct = httpx.post(f"{inside.engine.url}/v1{ROUTES[dialect]}", json=streamed)
            if answer.status_code != 200:
                assert answer.content == direct.content
                assert answer.status_code == direct.status_code >= 400
    assert rollout.frozen_calls() == {}


def test_a_refusal_after_generation_is_no_hole(rollout: InsideRollout) -> None:
    """Messages with tool arguments that are no object: vLLM answers an error, having generated."""
    statuses = set()
    for number in range(12):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"{SAY} {number}"}],
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "tool", "name": "f"},
            "max_tokens": 40,
        }
        statuses.add(rollout.post_model("/messages", body).status_code)
    calls = rollout.frozen_calls()
    assert statuses & {400, 500}, "this model always made objects: the case was not met"
    assert len(calls) < 12


def test_routes_that_nobody_reads_make_the_rollout_incomplete(rollout: InsideRollout) -> None:
    """A batch of conversations is answered, and the rollout can no longer be trained on."""
    body = {"model": MODEL, "messages": [[{"role": "user", "content": SAY}]], "max_tokens": 4}
    assert rollout.post_model("/chat/completions/batch", body).status_code == 200
    rollout.freeze()
    snapshot = rollout.get("/snapshot").json()
    assert [reason["code"] for reason in snapshot["incomplete_reasons"]] == ["unobserved_path"]


@every_dialect
def test_a_frozen_rollout_refuses_in_the_dialects_shape(
    rollout: InsideRollout, dialect: str
) -> None:
    """Freeze is heard in the engine's process, before anything is generated."""
    talk = Talk(rollout, dialect).user(SAY)
    talk.ask(max_tokens=2)
    rollout.freeze()
    refused = rollout.post_model(ROUTES[dialect], talk.user("More.").body())
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "rollout_frozen"
    assert ("type" in refused.json()) == (dialect == "messages")


def test_control_and_metrics_stay_where_they_are(inside: Inside, rollout: InsideRollout) -> None:
    """Of our routes the engine serves only model traffic; its own are its own."""
    freeze = httpx.post(f"{inside.engine.url}{rollout.path}/freeze")
    assert freeze.status_code == 404
    assert "token-capture serve" in freeze.json()["error"]["message"]
    assert "vllm:num_requests_running" in httpx.get(f"{inside.engine.url}/metrics").text
    assert httpx.get(f"{rollout.base_url}/models").json()["data"][0]["id"] == MODEL
    assert httpx.head(rollout.base_url).status_code == 200


@every_dialect
@both_modes
def test_require_refuses_what_would_drift(
    inside_require: Inside, dialect: str, stream: bool
) -> None:
    """409 ``prefix_unavailable`` for a continuation without an exact prefix; roots are served."""
    rollout = inside_require.rollout()
    talk = Talk(rollout, dialect, stream=stream, system="Be brief.")
    talk.user(SAY).ask(max_tokens=6)
    talk.user("Go on.").ask(max_tokens=6)
    talk.system = "Be verbose."
    refused = rollout.post_model(ROUTES[dialect], talk.user("More.").body(max_tokens=6))
    assert refused.status_code == 409, refused.text
    assert refused.json()["error"]["code"] == "prefix_unavailable"
    assert "system_changed" in refused.json()["error"]["message"]

    fresh = Talk(rollout, dialect, system="Be verbose.").user("Another agent.")
    fresh.ask(max_tokens=4)
    invented = Talk(rollout, dialect)
    invented.history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "never said"},
    ]
    invented.user("b").ask(max_tokens=4)
    calls = rollout.frozen_calls()
    assert len(calls) == 4, "the refused call left no record and no open intent"
    assert calls[talk.asked[1].call_id]["prefix_supplied"] is True
    assert calls[invented.asked[0].call_id]["parent_resolution"] == "unresolved"
