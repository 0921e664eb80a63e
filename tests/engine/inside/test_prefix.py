"""Exact prefixes on a real vLLM: many templates, three dialects, hostile conversations."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.inside.expect import assert_exact, cumulative, links
from tests.engine.inside.make_model import END_TOKENS
from tests.engine.inside.rig import Inside, InsideEngine, InsideRollout
from tests.engine.inside.talk import THOUGHTS, TOOL_CALL, Talk
from tests.engine.inside.templates import KINDS

CONVERSATIONS = 30
DIALECTS = ("chat", "responses", "messages")
every_kind = pytest.mark.parametrize("kind", sorted(KINDS))


def own_end_only(engine: InsideEngine, kind: str) -> dict[str, Any]:
    """A model of this kind never samples another family's end token."""
    others = [token for token in END_TOKENS if token != KINDS[kind].end]
    return {"logit_bias": {str(engine.token_ids(token)[0]): -100 for token in others}}


def bias_to_end(engine: InsideEngine, kind: str, by: float) -> dict[str, Any]:
    """The same, and the model likes to end its turn."""
    bias = own_end_only(engine, kind)
    bias["logit_bias"][str(engine.token_ids(KINDS[kind].end)[0])] = by
    return bias


def play_hostile(engine: InsideEngine, talk: Talk) -> None:
    """Everything that makes counting and re-rendering go wrong, one after the other."""
    end = KINDS[talk.kind].end
    only = own_end_only(engine, talk.kind)
    talk.user("Say anything.").ask(seed=1, max_tokens=6, **only)
    talk.user(f"What does {end} mean? 🙂é").ask(seed=2, max_tokens=1, **only)
    talk.user("  spaced out \n\n").ask(seed=3, max_tokens=30, stop=["e"], **only)
    inside = bias_to_end(engine, talk.kind, 7.0)
    talk.user("Never end.").ask(seed=4, max_tokens=12, ignore_eos=True, **inside)
    talk.user("Think first.").ask(
        seed=5, max_tokens=80, structured_outputs={"regex": THOUGHTS}, **only
    )
    talk.user("End at once.").ask(seed=6, max_tokens=30, **bias_to_end(engine, talk.kind, 6.0))
    if talk.tools:
        asked = talk.user("Weather?").ask(
            seed=7, max_tokens=90, structured_outputs={"regex": TOOL_CALL}, **only
        )
        assert asked.tool_ids or talk.dialect == "messages"
        if asked.tool_ids:
            talk.give_results('{"rain": "no"}').ask(seed=8, max_tokens=6, **only)
    talk.user("Thanks.").ask(seed=9, max_tokens=4, **only)


@every_kind
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_append_only_continuation_extends_its_parent(
    inside: Inside, rollout: InsideRollout, dialect: str, kind: str
) -> None:
    """All links are exact and add what the template renders; the rows are one unbroken chain."""
    stream = (len(dialect) + len(kind)) % 2 == 0
    talk = Talk(rollout, dialect, kind, stream, system="Be brief.", tools=True)
    play_hostile(inside.engine, talk)
    calls = rollout.frozen_calls()

    exact = assert_exact(inside.engine, talk, calls)
    if dialect != "messages":  # it has no logit_bias: another family's end token may come
        assert exact == len(links(talk, calls)) >= len(talk.asked) - 2
        row = max(rollout.rows()["rows"], key=lambda row: len(row["token_ids"]))
        assert row["model_call_ids"] == [asked.call_id for asked in talk.chain]
        assert row["token_ids"] == cumulative(calls[talk.asked[-1].call_id])


def play_randomly(engine: InsideEngine, rollout: InsideRollout, seed: int) -> Talk:
    """A conversation that the seed decides."""
    dice = random.Random(seed)
    talk = Talk(
        rollout,
        dice.choice(DIALECTS),
        dice.choice(sorted(KINDS)),
        dice.random() < 0.5,
        system=dice.choice(["", "Be brief.", "  Two\n\nparagraphs. "]),
        tools=dice.random() < 0.5,
    )
    words = ["yes", "no 🙂", *END_TOKENS, "<think>", "[INST]", "\n", "  ", "\u00e9\u0301", "{}"]
    for turn in range(dice.randint(2, 6)):
        options: dict[str, Any] = {"seed": dice.randrange(10**6), "max_tokens": dice.randint(1, 24)}
        options |= own_end_only(engine, talk.kind)
        if dice.random() < 0.3:
            options |= bias_to_end(engine, talk.kind, dice.uniform(0.0, 8.0))
        if dice.random() < 0.3:
            options["stop"] = dice.sample(["a", "e", " the", "\n"], 2)
        if dice.random() < 0.2:
            options["ignore_eos"] = True
        if talk.tools and dice.random() < 0.4:
            options |= {"structured_outputs": {"regex": TOOL_CALL}, "max_tokens": 90}
        new = " ".join(dice.choices(words, k=dice.randint(1, 5)))
        # An empty message is refused by some dialects.
        asked = talk.user(f"{turn} {new}").ask(**options)
        if asked.tool_ids:
            talk.give_results(f"{{{turn}}}")
    return talk


def test_random_conversations_extend_exactly(inside: Inside) -> None:
    """Conversations that dice decide, eight at a time: every link is exact."""

    def play(seed: int) -> tuple[Talk, InsideRollout]:
        rollout = rollouts[seed]
        return play_randomly(inside.engine, rollout, seed), rollout

    rollouts = [inside.rollout() for _ in range(CONVERSATIONS)]
    with ThreadPoolExecutor(8) as pool:
        played = list(pool.map(play, range(CONVERSATIONS)))
    exact = possible = 0
    for talk, rollout in played:
        calls = rollout.frozen_calls()
        found = assert_exact(inside.engine, talk, calls)
        exact += found
        possible += len(links(talk, calls))
        if talk.dialect != "messages":
            assert found == len(links(talk, calls)), (talk.kind, talk.dialect)
    assert exact > 2 * CONVERSATIONS
    print(f"{exact} of {possible} random continuations were given an exact prefix")


def reason_of(talk: Talk, rollout: InsideRollout) -> tuple[str, dict[str, Any]]:
    """Why the last call of the talk got no prefix."""
    calls = rollout.frozen_calls()
    _, child, _ = links(talk, calls)[-1]
    assert child["prefix_requested"] is True
    assert child["prefix_supplied"] is False
    return child["prefix_reason"], child


def test_a_template_without_an_end_of_turn_gets_nothing(
    inside: Inside, rollout: InsideRollout
) -> None:
    """Nothing can be proven there: the prompt is the template's own."""
    talk = Talk(rollout, "chat", "bare")
    talk.user("One.").ask(seed=1)
    talk.user("Two.").ask(seed=2)
    reason, child = reason_of(talk, rollout)
    assert reason == "no_end_of_turn"
    rendered = inside.engine.tokenize(
        messages=talk.history[:3], chat_template_kwargs={"kind": "bare"}
    )
    assert child["prompt_token_ids"] == rendered


@pytest.mark.parametrize("dialect", DIALECTS)
def test_changed_instructions_are_never_put_under_an_old_prefix(
    rollout: InsideRollout, dialect: str
) -> None:
    """A new system prompt, or one that follows the answer, needs the engine's own rendering."""
    talk = Talk(rollout, dialect, system="Be brief.")
    talk.user("One.").ask(seed=1)
    talk.system = "Be verbose."
    talk.user("Two.").ask(seed=2)
    assert reason_of(talk, rollout)[0] == "system_changed"


def test_a_system_message_after_the_answer_prevents_supply(rollout: InsideRollout) -> None:
    """The same text at another place is another instruction."""
    talk = Talk(rollout, "chat")
    talk.user("One.").ask(seed=1)
    talk.history.append({"role": "system", "content": "Now be brief."})
    talk.user("Two.").ask(seed=2)
    assert reason_of(talk, rollout)[0] == "system_changed"


def test_another_familys_end_token_prevents_supply(inside: Inside, rollout: InsideRollout) -> None:
    """The model ended its turn with a token that the template would not have written."""
    other = {"logit_bias": {str(inside.engine.token_ids("</s>")[0]): 100}}
    talk = Talk(rollout, "chat", "llama")
    talk.user("One.").ask(seed=1, **other)
    talk.user("Two.").ask(seed=2)
    assert reason_of(talk, rollout)[0] == "other_end_token"


def test_a_prompt_as_long_as_the_context_is_not_supplied(
    inside: Inside, rollout: InsideRollout
) -> None:
    """Where the parent's tokens leave no room, the prompt is the template's own, shorter one.

    The template throws the long reasoning away, so that the engine itself has room.
    """
    only = own_end_only(inside.engine, "stripping")
    talk = Talk(rollout, "chat", "stripping")
    # Digits do not merge: one token each.
    regex = r"<think>[0-9]{1800}</think>ok"
    talk.user("Think.").ask(seed=1, max_tokens=1900, structured_outputs={"regex": regex}, **only)
    talk.user("0123456789" * 52).ask(seed=2, max_tokens=4, **only)
    reason, child = reason_of(talk, rollout)
    assert reason == "too_long"
    assert len(child["prompt_token_ids"]) < 1000


def test_previous_response_id_is_an_exact_link(inside: Inside, rollout: InsideRollout) -> None:
    """The agent sends only what is new; vLLM keeps the conversation, and the tokens are exact."""
    previous: dict[str, Any] = {}
    ids: list[str] = []
    for turn in range(4):
        body = {
            "model": "tiny",
            "instructions": "Be brief.",
            "input": f"Turn {turn}.",
            "max_output_tokens": 10,
            "seed": turn,
            **own_end_only(inside.engine, "own"),
            **previous,
        }
        answer = rollout.post_model("/responses", body)
        assert answer.status_code == 200, answer.text
        previous = {"previous_response_id": answer.json()["id"]}
        ids.append(answer.headers["x-model-call-id"])
    calls = rollout.frozen_calls()
    for parent, child in itertools.pairwise(ids):
        assert calls[child]["parent_call_id"] == parent
        assert calls[child]["prefix_supplied"] is True
        so_far = cumulative(calls[parent])
        assert calls[child]["prompt_token_ids"][: len(so_far)] == so_far
    (row,) = rollout.rows()["rows"]
    assert row["model_call_ids"] == ids


def test_a_foreign_previous_response_is_no_parent(inside: Inside) -> None:
    """A response of another rollout is unknown here: unresolved, and nothing is supplied."""
    body = {"model": "tiny", "input": "Hello.", "max_output_tokens": 6, "seed": 1}
    other = inside.rollout().post_model("/responses", body).json()["id"]
    rollout = inside.rollout()
    answer = rollout.post_model("/responses", body | {"previous_response_id": other})
    assert answer.status_code == 200
    (entry,) = rollout.frozen_calls().values()
    assert entry["parent_resolution"] == "unresolved"
    assert entry["parent_resolution_reason"] == "no_match"
    assert entry["prefix_requested"] is False
