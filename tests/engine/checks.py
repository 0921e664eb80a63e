"""What the engine suite demands of captured calls and of the rows built from them.

The oracles are independent of the product: the engine itself, asked directly, and a slow builder.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.agent import ChatAgent, Turn
from tests.engine.rig import Engine, Rollout


def assert_captured(engine: Engine, turn: Turn, entry: dict[str, Any]) -> None:
    """The entry holds what the engine reports when it is asked the same thing directly."""
    asked = turn.body | {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
    answer = engine.post("/v1/chat/completions", asked)
    choice = answer["choices"][0]
    log_probs = [token["logprob"] for token in choice["logprobs"]["content"]]
    rendered = {key: turn.body[key] for key in ("messages", "tools") if key in turn.body}

    assert entry["prompt_token_ids"] == answer["prompt_token_ids"] == engine.tokenize(**rendered)
    assert entry["generation_token_ids"] == choice["token_ids"]
    assert entry["generation_log_probs"] == pytest.approx(log_probs, abs=1e-3)
    assert entry["finish_reason"] == turn.finish_reason == choice["finish_reason"]
    assert entry["dialect"] == "chat"


def expected_rows(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a linear conversation, built the slow way, token by token.

    ``entries`` are in the order of the conversation. A call whose prompt does not start with all
    the tokens before it begins a row of its own.
    """
    rows: list[dict[str, Any]] = []
    for entry in entries:
        prompt = entry["prompt_token_ids"]
        so_far = rows[-1]["token_ids"] if rows else None
        if so_far is None or prompt[: len(so_far)] != so_far:
            so_far = []
            rows.append({"calls": [], "token_ids": [], "loss_mask": [], "log_probs": []})
        row, new = rows[-1], prompt[len(so_far) :]
        generated = entry["generation_token_ids"]
        row["calls"].append(entry["model_call_id"])
        row["token_ids"] += new + generated
        row["loss_mask"] += [0] * len(new) + [1] * len(generated)
        row["log_probs"] += [0.0] * len(new) + entry["generation_log_probs"]
    return rows


def assert_rows(rollout: Rollout, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The rollout's rows are exactly the expected ones, none masked."""
    traces = rollout.rows()
    found = [
        {
            "calls": row["model_call_ids"],
            "token_ids": row["token_ids"],
            "loss_mask": row["loss_mask"],
            "log_probs": row["log_probs"],
        }
        for row in traces["rows"]
    ]
    order = [entry["model_call_id"] for entry in entries]
    found.sort(key=lambda row: order.index(row["calls"][0]))

    assert found == expected_rows(entries)
    assert traces["mask_sample"] is False
    assert not any(row["mask_sample"] for row in traces["rows"])
    return traces


def in_order(agent: ChatAgent, calls: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of the agent's turns, in the order of the conversation."""
    assert set(calls) == {turn.call_id for turn in agent.turns}
    return [calls[turn.call_id] for turn in agent.turns]


def assert_linked(entries: list[dict[str, Any]]) -> None:
    """The first call is a root, every other is resolved to the one before it."""
    first, *others = entries
    assert (first["parent_resolution"], first["parent_call_id"]) == ("root", None)
    for parent, child in zip(entries, others, strict=False):
        assert child["parent_resolution"] == "resolved", child["parent_resolution_reason"]
        assert child["parent_call_id"] == parent["model_call_id"]
