"""Whole rollouts in front of a real vLLM: agent, capture, freeze, rows, retire."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.engine.agent import LOOK_UP, ChatAgent, tool_call_options
from tests.engine.checks import assert_captured, assert_linked, assert_rows, in_order
from tests.engine.rig import Engine, Rollout

both_modes = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@both_modes
def test_a_conversation_of_plain_words_becomes_one_row(
    engine: Engine, rollout: Rollout, agent: openai.OpenAI, words: dict[str, Any], stream: bool
) -> None:
    """Five turns whose text re-tokenizes exactly are one chain: one row with five spans."""
    chat = ChatAgent(agent, stream)
    chat.messages.append({"role": "system", "content": "Speak of ships."})
    for number in range(1, 6):
        chat.say(f"Report number {number}, please.", seed=number, **words)
    entries = in_order(chat, rollout.frozen_calls())

    assert_linked(entries)
    for turn, entry in zip(chat.turns, entries, strict=True):
        assert_captured(engine, turn, entry)
        assert entry["delivered"] is True
    traces = assert_rows(rollout, entries)
    (row,) = traces["rows"]
    assert traces["main_row"] == 0
    assert row["starts"]["kind"] == "root"
    assert row["ends"] == chat.turns[-1].finish_reason
    for span, entry in zip(row["call_spans"], entries, strict=True):
        assert span["model_call_id"] == entry["model_call_id"]
        assert row["token_ids"][span["start"] : span["end"]] == entry["generation_token_ids"]


@both_modes
def test_a_rollout_with_a_tool_call_is_captured(
    engine: Engine, rollout: Rollout, agent: openai.OpenAI, words: dict[str, Any], stream: bool
) -> None:
    """Words, a required tool call, its result, words again: linked, exact, every row sound."""
    chat = ChatAgent(agent, stream, tools=[LOOK_UP])
    chat.say("Shall I take the ferry?", **words)
    chat.messages.append({"role": "user", "content": "Look up the weather first."})
    called = chat.ask(**tool_call_options(engine, chat))
    chat.give_tool_results(called, {"rain": False, "wind": "north"})
    chat.ask(seed=3, **words)
    chat.say("Thanks.", seed=4, **words)
    entries = in_order(chat, rollout.frozen_calls())

    assert called.finish_reason == "tool_calls"
    assert called.message["tool_calls"][0]["function"]["name"] == "look_up"
    assert_linked(entries)
    for turn, entry in zip(chat.turns, entries, strict=True):
        assert_captured(engine, turn, entry)
        assert entry["delivered"] is True
    assert_rows(rollout, entries)


@both_modes
def test_text_that_retokenizes_differently_starts_a_fragment(
    engine: Engine, rollout: Rollout, agent: openai.OpenAI, stream: bool
) -> None:
    """Random bytes cannot be tokenized back: the links stand, and no row mixes two token runs."""
    chat = ChatAgent(agent, stream)
    for number in range(1, 4):
        chat.say(f"Say anything ({number}).", seed=number, max_tokens=24)
    entries = in_order(chat, rollout.frozen_calls())

    assert_linked(entries)
    for turn, entry in zip(chat.turns, entries, strict=True):
        assert_captured(engine, turn, entry)
        assert entry["delivered"] is True
    traces = assert_rows(rollout, entries)
    assert len(traces["rows"]) > 1, "this seed happened to re-tokenize exactly: choose another"
    fragments = [row for row in traces["rows"] if row["starts"]["kind"] == "fragment"]
    assert {row["starts"]["reason"] for row in fragments} == {"parent_digest_mismatch"}
    assert rollout.get().json()["drifted_calls"] == len(fragments)


def test_many_agents_at_once_are_kept_apart(
    engine: Engine,
    new_rollout: Callable[[], Rollout],
    openai_client: Callable[[str], openai.OpenAI],
    words: dict[str, Any],
) -> None:
    """Eight rollouts with the same opening words, at once: each is its own sound chain."""

    def play(number: int) -> tuple[Rollout, ChatAgent]:
        rollout = new_rollout()
        chat = ChatAgent(openai_client(rollout.base_url), stream=number % 2 == 0)
        for turn in range(3):
            chat.say("Report, please.", seed=100 * number + turn, **words)
        return rollout, chat

    with ThreadPoolExecutor(8) as pool:
        played = list(pool.map(play, range(8)))
    for rollout, chat in played:
        entries = in_order(chat, rollout.frozen_calls())
        assert_linked(entries)
        (row,) = assert_rows(rollout, entries)["rows"]
        assert row["model_call_ids"] == [turn.call_id for turn in chat.turns]


def test_the_trainers_side_from_freeze_to_retirement(
    rollout: Rollout, agent: openai.OpenAI, words: dict[str, Any]
) -> None:
    """Freeze fences the agent, a stale retire keeps everything, the right one removes it once."""
    chat = ChatAgent(agent, stream=False)
    chat.say("One.", **words)
    chat.say("Two.", **words)
    assert rollout.get().json()["state"] == "open"
    frozen = rollout.freeze()
    snapshot_id, version = frozen["snapshot_id"], frozen["version"]

    assert rollout.freeze() | {"version": version} == frozen, "freeze is idempotent"
    with pytest.raises(openai.ConflictError) as refused:
        chat.say("Three.", **words)
    assert refused.value.response.json()["error"]["code"] == "rollout_frozen"

    responses = rollout.post("/trajectories", {"format": "responses"}).json()
    assert responses["mask_sample"] is False
    assert responses["metrics"]["n_calls"] == 2
    assert responses["rebuilt_response"]["output"]

    stale = rollout.retire(snapshot_id, version + 1)
    assert stale.status_code == 409
    assert stale.json()["error"]["code"] == "stale_snapshot"
    assert len(rollout.get("/snapshot").json()["entries"]) == 2

    assert rollout.retire(snapshot_id, version).json() == {"retired": True}
    assert rollout.retire(snapshot_id, version).json() == {"retired": True}
    assert rollout.get("/snapshot").status_code == 410
    assert rollout.get().json()["state"] == "retired"
    with pytest.raises(openai.APIStatusError) as gone:
        chat.ask(**words)
    assert gone.value.status_code == 410
