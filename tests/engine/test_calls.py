"""Single calls in front of a real vLLM whose shape is not one plain answer."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.engine.agent import to_openai
from tests.engine.rig import MODEL, Engine, Rollout, wait_until

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Say anything."}],
    "seed": 21,
    "max_tokens": 24,
}
# Long enough that nobody finishes it by accident while a test is busy leaving.
LONG = {"max_tokens": 1900, "min_tokens": 1900}
both_modes = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def chat(agent: openai.OpenAI, body: dict[str, Any], *, stream: bool) -> str:
    """Send a chat request, read the answer to its end, and return the call id."""
    raw = agent.chat.completions.with_raw_response.create(**body, stream=stream)
    answer = raw.parse()
    if isinstance(answer, openai.Stream):
        with answer:
            for _ in answer:
                pass
    call_id: str = raw.headers["x-model-call-id"]
    return call_id


def asked_directly(engine: Engine, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a direct chat call, with token ids and log-probs."""
    asked = body | {"logprobs": True, "return_token_ids": True}
    choices: list[dict[str, Any]] = engine.post("/v1/chat/completions", asked)["choices"]
    return choices


def assert_same_tokens(entry: dict[str, Any], choice: dict[str, Any]) -> None:
    """The entry's generation is the choice's."""
    log_probs = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert entry["generation_token_ids"] == choice["token_ids"]
    assert entry["generation_log_probs"] == pytest.approx(log_probs, abs=1e-3)
    assert entry["finish_reason"] == choice["finish_reason"]


@both_modes
def test_every_choice_becomes_an_entry(
    engine: Engine, rollout: Rollout, agent: openai.OpenAI, stream: bool
) -> None:
    """n=2: two entries ``<id>.0`` and ``<id>.1`` with one prompt, each choice's own tokens."""
    body = CHAT | {"n": 2}
    call_id = chat(agent, body, stream=stream)
    calls = rollout.frozen_calls()

    assert set(calls) == {f"{call_id}.0", f"{call_id}.1"}
    for index, choice in enumerate(asked_directly(engine, body)):
        entry = calls[f"{call_id}.{index}"]
        assert_same_tokens(entry, choice)
        assert entry["choice_index"] == index
        assert entry["prompt_token_ids"] == engine.tokenize(messages=CHAT["messages"])


@both_modes
def test_a_stop_string_cuts_text_but_no_token(
    engine: Engine, rollout: Rollout, agent: openai.OpenAI, stream: bool
) -> None:
    """The tokens of the stop string were sampled, so they are captured; the text ends before."""
    body = CHAT | {"stop": ["e", "a"], "max_tokens": 60}
    call_id = chat(agent, body, stream=stream)
    (choice,) = asked_directly(engine, body)
    entry = rollout.frozen_calls()[call_id]

    assert choice["stop_reason"] in ("e", "a"), "choose a seed that writes an e or an a"
    assert_same_tokens(entry, choice)
    sampled = engine.post("/detokenize", {"model": MODEL, "tokens": entry["generation_token_ids"]})
    assert choice["stop_reason"] in sampled["prompt"].removeprefix(choice["message"]["content"])


@both_modes
@pytest.mark.parametrize("max_tokens", [1, 7])
def test_a_call_cut_by_length_holds_what_was_sampled(
    engine: Engine, rollout: Rollout, agent: openai.OpenAI, max_tokens: int, stream: bool
) -> None:
    """``length`` adds no end-of-turn token: as many ids as were allowed."""
    body = CHAT | {"max_tokens": max_tokens}
    call_id = chat(agent, body, stream=stream)
    entry = rollout.frozen_calls()[call_id]

    assert entry["finish_reason"] == "length"
    assert len(entry["generation_token_ids"]) == max_tokens
    assert_same_tokens(entry, asked_directly(engine, body)[0])


@both_modes
def test_a_turn_that_the_model_ended_keeps_its_end_token(
    engine: Engine, rollout: Rollout, agent: openai.OpenAI, stream: bool
) -> None:
    """``stop``: the sampled end-of-turn token is part of the generation, with its log-prob."""
    (end_of_turn,) = engine.tokenize(prompt="<|im_end|>")
    body = CHAT | {"logit_bias": {str(end_of_turn): 6.0}, "max_tokens": 200}
    call_id = chat(agent, body, stream=stream)
    entry = rollout.frozen_calls()[call_id]

    assert entry["finish_reason"] == "stop"
    assert entry["generation_token_ids"][-1] == end_of_turn
    assert_same_tokens(entry, asked_directly(engine, body)[0])


def test_an_abandoned_stream_is_kept_as_far_as_it_was_seen(
    engine: Engine, rollout: Rollout, agent: openai.OpenAI
) -> None:
    """The agent leaves mid-stream: the engine stops, the entry holds a true beginning, no row."""
    body = CHAT | LONG
    with agent.chat.completions.create(**to_openai(body), stream=True) as stream:
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break
    wait_until(lambda: engine.running_requests() == 0, "the engine to be idle", within_s=10)
    wait_until(lambda: rollout.get().json()["calls"] == 1, "the call to be recorded", within_s=10)
    (entry,) = rollout.frozen_calls().values()
    seen = len(entry["generation_token_ids"])
    assert 1 <= seen < LONG["max_tokens"]
    (choice,) = asked_directly(engine, body | {"max_tokens": seen, "min_tokens": seen})

    assert entry["finish_reason"] == "client_disconnect"
    assert entry["delivered"] is False
    assert entry["generation_token_ids"] == choice["token_ids"]
    assert rollout.rows()["rows"] == [], "a call that nobody kept is trained on by nobody"


def test_a_retry_after_an_abandoned_stream_is_the_one_trained_on(
    rollout: Rollout, agent: openai.OpenAI
) -> None:
    """A dropped stream, then the identical body again without any mark: one row, the second's."""
    body = CHAT | {"max_tokens": 200, "min_tokens": 200}
    with agent.chat.completions.create(**to_openai(body), stream=True) as stream:
        next(iter(stream))
        next(iter(stream))
    kept = chat(agent, to_openai(body), stream=True)
    calls = rollout.frozen_calls()
    traces = rollout.rows()

    assert calls[kept]["delivered"] is True
    assert [row["model_call_ids"] for row in traces["rows"]] == [[kept]]
    assert traces["mask_sample"] is False


def test_an_agent_gone_before_the_first_token_leaves_nothing(
    engine: Engine, rollout: Rollout
) -> None:
    """A whole answer that nobody waited for: nothing reached the client, so nothing is missing."""
    body = CHAT | LONG
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{rollout.base_url}/chat/completions", json=body, timeout=0.7)
    wait_until(lambda: engine.running_requests() == 0, "the engine to be idle", within_s=5)

    assert rollout.frozen_calls() == {}


def completion(agent: openai.OpenAI, body: dict[str, Any], *, stream: bool) -> str:
    """Send a completion request, read the answer to its end, and return the call id."""
    raw = agent.completions.with_raw_response.create(**body, stream=stream)
    answer = raw.parse()
    if isinstance(answer, openai.Stream):
        with answer:
            for _ in answer:
                pass
    call_id: str = raw.headers["x-model-call-id"]
    return call_id


def completed_directly(engine: Engine, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a direct completion call, with token ids and log-probs."""
    asked = body | {"logprobs": 0, "return_token_ids": True}
    choices: list[dict[str, Any]] = engine.post("/v1/completions", asked)["choices"]
    return choices


def assert_completed(entry: dict[str, Any], choice: dict[str, Any]) -> None:
    """The entry holds the completion choice's prompt, tokens and log-probs."""
    assert entry["dialect"] == "completions"
    assert entry["prompt_token_ids"] == choice["prompt_token_ids"]
    assert entry["generation_token_ids"] == choice["token_ids"]
    expected = choice["logprobs"]["token_logprobs"]
    assert entry["generation_log_probs"] == pytest.approx(expected, abs=1e-3)
    assert entry["delivered"] is True


@both_modes
def test_a_text_completion_is_captured(
    engine: Engine, rollout: Rollout, agent: openai.OpenAI, stream: bool
) -> None:
    """A text prompt: the ids are the engine's own tokenization."""
    body = {"model": MODEL, "prompt": "A lighthouse keeper", "seed": 8, "max_tokens": 12}
    call_id = completion(agent, body, stream=stream)
    entry = rollout.frozen_calls()[call_id]

    (choice,) = completed_directly(engine, body)
    assert_completed(entry, choice)
    assert entry["prompt_token_ids"] == engine.tokenize(prompt=body["prompt"])
    assert entry["parent_resolution"] == "root"


@both_modes
def test_token_prompts_chain_by_their_tokens(
    engine: Engine, rollout: Rollout, agent: openai.OpenAI, stream: bool
) -> None:
    """An agent that sends ids back with new ones behind them makes one chain, one row."""
    prompt = engine.tokenize(messages=CHAT["messages"])
    order: list[str] = []
    for turn in range(3):
        body = {"model": MODEL, "prompt": prompt, "seed": turn, "max_tokens": 10}
        call_id = completion(agent, body, stream=stream)
        order.append(call_id)
        (choice,) = completed_directly(engine, body)
        prompt = [*prompt, *choice["token_ids"], 2, 203, 1]
    calls = rollout.frozen_calls()

    assert [calls[call_id]["parent_resolution"] for call_id in order] == [
        "root",
        "resolved",
        "resolved",
    ]
    assert [calls[call_id]["parent_call_id"] for call_id in order] == [None, *order[:2]]
    (row,) = rollout.rows()["rows"]
    assert row["model_call_ids"] == order
    assert row["token_ids"] == prompt[:-3]
    assert sum(row["loss_mask"]) == 30


@both_modes
def test_a_batch_of_prompts_becomes_one_entry_each(
    engine: Engine, rollout: Rollout, agent: openai.OpenAI, stream: bool
) -> None:
    """Two prompts with two choices each: four entries, numbered prompt by prompt."""
    body = {"model": MODEL, "prompt": ["One ship", "Two"], "n": 2, "seed": 8, "max_tokens": 6}
    call_id = completion(agent, body, stream=stream)
    calls = rollout.frozen_calls()

    assert set(calls) == {f"{call_id}.{index}" for index in range(4)}
    for index, choice in enumerate(completed_directly(engine, body)):
        assert_completed(calls[f"{call_id}.{index}"], choice)


@pytest.mark.parametrize("change", [{"use_beam_search": True}, {"best_of": 2}])
def test_what_cannot_be_captured_is_refused_with_a_reason(
    rollout: Rollout, change: dict[str, Any]
) -> None:
    """Beam search and best_of choose after sampling: refused before compute, no hole."""
    body = {"model": MODEL, "prompt": "One", "max_tokens": 4, "n": 1} | change
    refused = httpx.post(f"{rollout.base_url}/completions", json=body, timeout=30)

    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "unsupported_parameter"
    assert rollout.frozen_calls() == {}
