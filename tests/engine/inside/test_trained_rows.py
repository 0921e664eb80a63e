"""Rows as a trainer gets them, against the weights themselves; and what drift does to them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.inside.expect import assert_exact, cumulative, links
from tests.engine.inside.rig import Inside, InsideRollout, model_dir, recompute
from tests.engine.inside.talk import THOUGHTS, Talk
from tests.engine.inside.test_prefix import DIALECTS, own_end_only, play_hostile

CLOSE = 1e-4


def play_thoughtful(inside: Inside, rollout: InsideRollout, dialect: str, turns: int = 6) -> Talk:
    """Every answer begins with reasoning that the template drops from the next prompt."""
    talk = Talk(rollout, dialect, "stripping", system="Be brief.")
    for turn in range(turns):
        talk.user(f"Question {turn}.").ask(
            seed=turn,
            max_tokens=60,
            structured_outputs={"regex": THOUGHTS},
            **own_end_only(inside.engine, "stripping"),
        )
    return talk


def differences(rows: list[dict[str, Any]]) -> list[float]:
    """Per row the largest difference between captured and recomputed log-probs.

    Spans sampled under a grammar are set apart: theirs are the log-probs after its mask.
    """
    found = []
    for row, again in zip(rows, recompute(rows, model_dir()), strict=True):
        trained = [i for i, mask in enumerate(row["loss_mask"]) if mask]
        guided = {
            i
            for span in row["call_spans"]
            if span.get("guided")
            for i in range(span["start"], span["end"])
        }
        gaps = [
            abs(row["log_probs"][i] - log_prob)
            for i, log_prob in zip(trained, again, strict=True)
            if i not in guided
        ]
        found.append(max(gaps, default=0.0))
    return found


@pytest.mark.parametrize("supply", ["auto", "off"])
def test_every_trained_token_has_the_log_prob_of_the_weights(
    request: pytest.FixtureRequest, supply: str
) -> None:
    """transformers in float32 finds the captured log-probs, in long chains and in fragments."""
    served: Inside = request.getfixturevalue("inside" if supply == "auto" else "inside_off")
    rows: list[dict[str, Any]] = []
    for dialect in DIALECTS:
        rollout = served.rollout()
        talk = Talk(rollout, dialect, "stripping", stream=True, system="Be brief.", tools=True)
        play_hostile(served.engine, talk)
        rollout.frozen_calls()
        rows += rollout.rows()["rows"]
    tokens = sum(sum(row["loss_mask"]) for row in rows)
    worst = max(differences(rows))
    print(f"{supply}: {len(rows)} rows, {tokens} trained tokens, largest difference {worst:.1e}")
    assert tokens > 150
    assert worst < CLOSE


def test_the_check_finds_rows_that_are_wrong(inside_off: Inside) -> None:
    """Drifted and re-tokenized rows, built as a careless trainer would, fail it by far."""
    rollout = inside_off.rollout()
    talk = Talk(rollout, "chat", "stripping")
    only = own_end_only(inside_off.engine, "stripping")
    for turn in range(3):
        talk.user(f"Question {turn}.").ask(seed=turn, max_tokens=24, **only)
    calls = rollout.frozen_calls()
    parent, child, _ = links(talk, calls)[0]
    assert child["drift_at"] < len(cumulative(parent)), "choose another seed: nothing drifted"

    glued = _row(cumulative(parent), child)  # as if the child had extended its parent
    text = inside_off.engine.post(
        "/detokenize", {"model": "tiny", "tokens": child["generation_token_ids"]}
    )["prompt"]
    again = inside_off.engine.token_ids(text)
    retokenized = _row(child["prompt_token_ids"], child)
    length = min(len(again), len(child["generation_token_ids"]))
    retokenized["token_ids"][-len(child["generation_token_ids"]) :] = again[:length] + [0] * (
        len(child["generation_token_ids"]) - length
    )
    honest = _row(child["prompt_token_ids"], child)

    right, drifted, spelled_again = differences([honest, glued, retokenized])
    print(f"honest {right:.1e}, drifted {drifted:.1e}, re-tokenized {spelled_again:.1e}")
    assert right < CLOSE
    assert drifted > 100 * CLOSE
    assert spelled_again > 100 * CLOSE


def _row(prompt: list[int], entry: dict[str, Any]) -> dict[str, Any]:
    generated = entry["generation_token_ids"]
    return {
        "token_ids": prompt + generated,
        "loss_mask": [0] * len(prompt) + [1] * len(generated),
        "log_probs": [0.0] * len(prompt) + entry["generation_log_probs"],
        "call_spans": [],
    }


@pytest.mark.parametrize("dialect", DIALECTS)
def test_without_supply_drift_is_reported_and_never_trained(
    inside_off: Inside, dialect: str
) -> None:
    """The links stand, each drifted call begins a row of its own, and the status counts them."""
    rollout = inside_off.rollout()
    talk = play_thoughtful(inside_off, rollout, dialect)
    calls = rollout.frozen_calls()
    drifted = []
    for parent, child, _ in links(talk, calls):
        assert child["parent_call_id"] == parent["model_call_id"]
        assert (child["prefix_requested"], child["prefix_supplied"]) == (False, False)
        so_far = cumulative(parent)
        if child["prompt_token_ids"][: len(so_far)] != so_far:
            assert child["prompt_token_ids"][: child["drift_at"]] == so_far[: child["drift_at"]]
            drifted.append(child["model_call_id"])
    assert rollout.get().json()["drifted_calls"] == len(drifted)
    rows = rollout.rows()["rows"]
    assert len(rows) >= len(drifted)
    if dialect != "messages":
        assert len(drifted) == len(talk.asked) - 1
    for row in rows:
        last = calls[row["model_call_ids"][-1]]
        assert row["token_ids"] == cumulative(last), "a row is one call's own tokens"


def cached_share(served: Inside) -> tuple[float, int, int]:
    """Cached and all prompt tokens of the continuations of eight thoughtful rollouts."""
    cached = prompts = exact = 0
    for _ in range(4):
        rollout = served.rollout()
        talk = play_thoughtful(served, rollout, "chat", turns=8)
        calls = rollout.frozen_calls()
        for _, child, _ in links(talk, calls):
            details = child["usage"]["prompt_tokens_details"] or {}
            cached += details.get("cached_tokens") or 0
            prompts += len(child["prompt_token_ids"])
            exact += child["prefix_supplied"]
    return cached / prompts, prompts, exact


def test_prefix_caching_gets_better(inside: Inside, inside_off: Inside) -> None:
    """vLLM's own count of cached prompt tokens, with and without supply, on the same talk."""
    without, prompts_off, _ = cached_share(inside_off)
    with_supply, prompts_on, exact = cached_share(inside)
    print("\n| prefix supply | continuation prompt tokens | cached | exact links |")
    print("|---|---|---|---|")
    print(f"| off | {prompts_off} | {without:.2f} | 0 |")
    print(f"| auto | {prompts_on} | {with_supply:.2f} | {exact} |")
    assert with_supply > without


def test_long_exact_chains_are_one_row(inside: Inside, rollout: InsideRollout) -> None:
    """Eight turns of reasoning that the template strips: one row, every answer trained."""
    talk = play_thoughtful(inside, rollout, "chat", turns=8)
    calls = rollout.frozen_calls()
    assert assert_exact(inside.engine, talk, calls) == 7
    (row,) = rollout.rows()["rows"]
    generated = sum(len(calls[asked.call_id]["generation_token_ids"]) for asked in talk.asked)
    assert sum(row["loss_mask"]) == generated
