"""The call tree: which call continues which, why, where it drifted, and what became of it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from rich.console import Console

from capture_server.call_tree import CallNode, CallTree, call_tree, drawn
from capture_server.trajectories.traces import build_traces
from middleware.protocols import IncompleteReason, TokenCaptureSnapshot
from middleware.records import TokenEntry
from tests.unit.capture_server.rollout_factory import call, delta, rollouts


def tree_of(entries: list[TokenEntry], terminal: str | None = None, **fields: Any) -> CallTree:
    given: dict[str, Any] = {"incomplete": False, "snapshot_id": "s", "version": 1, **fields}
    one = TokenCaptureSnapshot(rollout_id="r", entries=entries, **given)
    return call_tree(one, terminal_call_id=terminal)


def nodes(tree: CallTree) -> dict[str, CallNode]:
    return {node.model_call_id: node for node in tree.calls}


def text_of(tree: CallTree) -> str:
    console = Console(width=200, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(drawn(tree))
    return captured.get()


def branching() -> list[TokenEntry]:
    """Root, continuation, two branches below it (one drifted), and a sub-agent."""
    a = call("a", [1, 2], [3], created_at=1.0, timings={"total_ms": 120.4, "ttft_ms": 20.0})
    b = delta(call("b", [1, 2, 3, 4], [5], a, created_at=2.0), 3)
    c = delta(call("c", [1, 2, 3, 4, 5, 6], [7], b, created_at=3.0), 5)
    d = call("d", [1, 2, 3, 9, 9], [8], b, created_at=4.0, drift_at=3)
    e = call("e", [50], [51], parent_resolution="unresolved", created_at=5.0,
             parent_resolution_reason="no_match", agent_id="sub")  # fmt: skip
    return [e, d, c, b, a]


def test_parents_stand_before_their_children() -> None:
    """A line of conversation keeps its depth; only branches go deeper."""
    shown = [(n.model_call_id, n.parent_call_id, n.depth) for n in tree_of(branching()).calls]
    assert shown == [("a", None, 0), ("b", "a", 1), ("c", "b", 2), ("d", "b", 2), ("e", None, 0)]


def test_each_call_says_why_it_stands_there() -> None:
    """The resolver's decision, then the build's reason, with tokens and times."""
    found = nodes(tree_of(branching()))
    assert (found["b"].resolution, found["b"].extends, found["b"].reason) == ("resolved", True, "")
    assert (found["b"].prompt_tokens, found["b"].new_prompt_tokens) == (4, 1)
    assert (found["d"].extends, found["d"].reason) == (False, "parent_digest_mismatch")
    assert found["e"].reason == "no_match, parent_unresolved"
    assert (found["a"].ttft_ms, found["a"].total_ms, found["e"].agent_id) == (20.0, 120.4, "sub")


def test_drift_is_told_with_call_and_position() -> None:
    """Which call, how many of its parent's tokens it kept, and how much of the rollout survived."""
    tree = tree_of(branching())
    node = nodes(tree)["d"]
    assert tree.drifted_calls == ["d"]
    assert (node.drift_at, node.parent_tokens) == (3, 5)
    assert (tree.generated_tokens, tree.trained_tokens, tree.survived) == (5, 5, 1.0)
    assert "drift at 3 of 5 tokens" in text_of(tree)


def test_drift_at_the_first_token_counts() -> None:
    """Position 0 is a position."""
    a = call("a", [1], [2])
    assert tree_of([a, call("b", [9, 2], [3], a, drift_at=0)]).drifted_calls == ["b"]


def test_what_is_not_trained_says_so() -> None:
    """Undelivered, undecided and quarantined retries, empty and lost records, masked rows."""
    a = call("a", [1], [2], created_at=1.0)
    gone = call("gone", [1, 2, 3], [4], a, delivered=False, created_at=2.0)
    kept = call("kept", [1, 2, 3], [5], a, created_at=3.0)
    empty = call("empty", [1, 2, 6], [], a, created_at=4.0)
    lost = delta(call("lost", [8, 8], [9], "nobody", created_at=5.0), 1)
    found = nodes(tree_of([a, gone, kept, empty, lost]))
    assert {n: found[n].standing for n in found} == {
        "a": "trained", "gone": "undelivered", "kept": "trained", "empty": "empty",
        "lost": "delta_chain_unreconstructable",
    }  # fmt: skip
    twice = [call("x", [1], [2]), call("y", [1], [3])]
    assert sorted(n.standing for n in tree_of(twice).calls) == ["quarantined", "undecided"]
    why = [IncompleteReason(code="dangling_intent", model_call_id="z")]
    masked = tree_of([a], incomplete=True, incomplete_reasons=why)
    assert (masked.calls[0].standing, masked.calls[0].mask_reasons) == (
        "masked", ["capture_incomplete"],
    )  # fmt: skip
    assert masked.survived == 0.0
    assert "incomplete: dangling_intent" in text_of(masked)
    assert "masked: do not train" in text_of(masked)


def test_the_scored_call_is_marked() -> None:
    """The tree shows where the reward belongs."""
    tree = tree_of(branching(), "c")
    assert [n.model_call_id for n in tree.calls if n.is_terminal] == ["c"]
    assert "c (scored)" in text_of(tree)


def test_links_that_lead_back_are_cut() -> None:
    """A cycle is drawn once, not for ever."""
    a = call("a", [1], [2], "b")
    b = call("b", [1, 2, 3], [4], "a")
    assert sorted(node.model_call_id for node in tree_of([a, b]).calls) == ["a", "b"]


def test_thousands_of_turns_are_drawn_flat() -> None:
    """No recursion, and no line wider than its words."""
    entries = [call("c0", [0], [1])]
    cum = [0, 1]
    for at in range(1, 1500):
        prompt = [*cum, 2]
        entries.append(delta(call(f"c{at}", prompt, [3], entries[-1]), len(cum)))
        cum = [*prompt, 3]
    tree = tree_of(entries)
    assert max(node.depth for node in tree.calls) == 1
    assert max(map(len, text_of(tree).splitlines())) < 120


def test_no_tokens_and_no_text_are_shown() -> None:
    """Counts and ids only."""
    secret = call("a", [123456], [654321], output_items=[{"type": "message", "content": "secret"}])
    tree = tree_of([secret])
    for shown in (json.dumps(tree.to_json()), text_of(tree)):
        assert not any(word in shown for word in ("123456", "654321", "secret"))


@given(rollouts())
@settings(max_examples=100)
def test_every_call_is_drawn_once(rollout: tuple[list[TokenEntry], str | None]) -> None:
    """Any rollout; the trained tokens are those of the rows."""
    entries, terminal = rollout
    tree = tree_of(entries, terminal)
    assert sorted(nodes(tree)) == sorted({entry.model_call_id for entry in entries})
    assert len(nodes(tree)) == len(tree.calls)
    one = TokenCaptureSnapshot("r", entries, False, "s", 1)
    rows = build_traces(one, explicit_terminal_call_id=terminal).rows
    trained = {s.model_call_id for row in rows for s in row.call_spans if s.trained}
    assert {n.model_call_id for n in tree.calls if n.standing in ("trained", "masked")} <= trained
    json.dumps(tree.to_json())
    assert text_of(tree)
