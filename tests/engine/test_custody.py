"""kill -9 of the sidecar in front of a real vLLM: nothing acknowledged is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai

from tests.engine.agent import ChatAgent, to_openai
from tests.engine.checks import assert_captured, assert_linked, assert_rows, in_order
from tests.engine.rig import Engine, Rollout, Sidecar, wait_until

Client = Callable[[str], openai.OpenAI]


def test_a_kill_between_two_turns_loses_nothing(
    engine: Engine, mortal_sidecar: Sidecar, openai_client: Client, words: dict[str, Any]
) -> None:
    """Killed after every answer and restarted on the same store: one sound chain of all turns."""
    rollout = Rollout("killed-between", mortal_sidecar)
    chat = ChatAgent(openai_client(rollout.base_url), stream=True)
    for number in range(3):
        chat.stream = number % 2 == 0
        chat.say("Report, please.", seed=number, **words)
        mortal_sidecar.kill()
        mortal_sidecar.start(within_s=30)
        # The old connections died with the process.
        chat.client = openai_client(rollout.base_url)
    entries = in_order(chat, rollout.frozen_calls())

    assert_linked(entries)
    for turn, entry in zip(chat.turns, entries, strict=True):
        assert_captured(engine, turn, entry)
    (row,) = assert_rows(rollout, entries)["rows"]
    assert row["model_call_ids"] == [turn.call_id for turn in chat.turns]


def test_a_kill_after_freeze_keeps_the_snapshot(
    mortal_sidecar: Sidecar, openai_client: Client, words: dict[str, Any]
) -> None:
    """The frozen state, its name and its version survive; so does the retirement."""
    rollout = Rollout("killed-frozen", mortal_sidecar)
    ChatAgent(openai_client(rollout.base_url), stream=False).say("One.", **words)
    frozen = rollout.freeze()
    before = rollout.get("/snapshot").json()
    mortal_sidecar.kill()
    mortal_sidecar.start(within_s=30)

    assert rollout.get("/snapshot").json() == before
    retired = rollout.retire(frozen["snapshot_id"], frozen["version"])
    assert retired.json() == {"retired": True}
    mortal_sidecar.kill()
    mortal_sidecar.start(within_s=30)
    assert rollout.get().json()["state"] == "retired"


def test_a_kill_in_the_middle_of_a_call_masks_the_rollout(
    engine: Engine, mortal_sidecar: Sidecar, openai_client: Client, words: dict[str, Any]
) -> None:
    """The client may hold text of a call that was never recorded: incomplete, with the reason."""
    rollout = Rollout("killed-within", mortal_sidecar)
    client = openai_client(rollout.base_url)
    chat = ChatAgent(client, stream=True)
    first = chat.say("One.", **words)
    chat.messages.append({"role": "user", "content": "Two."})
    body = to_openai(chat.body(max_tokens=1700, min_tokens=1700))
    with client.chat.completions.create(**body, stream=True) as stream:
        next(iter(stream))
        next(iter(stream))
        mortal_sidecar.kill()
    wait_until(lambda: engine.running_requests() == 0, "the engine to be idle", within_s=10)
    mortal_sidecar.start(within_s=30)
    frozen = rollout.freeze()
    snapshot = rollout.get("/snapshot").json()

    assert frozen["incomplete"] is True
    assert [reason["code"] for reason in snapshot["incomplete_reasons"]] == ["dangling_intent"]
    assert [entry["model_call_id"] for entry in snapshot["entries"]] == [first.call_id]
    assert rollout.rows()["mask_sample"] is True
