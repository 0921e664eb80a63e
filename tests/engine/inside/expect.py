"""What exact prefixes must look like, checked on the engine's own reported ids."""

from __future__ import annotations

from typing import Any

from tests.engine.inside.make_model import END_TOKENS
from tests.engine.inside.rig import InsideEngine
from tests.engine.inside.talk import PLACES, Asked, Talk
from tests.engine.inside.templates import KINDS

Entries = dict[str, dict[str, Any]]


def cumulative(entry: dict[str, Any]) -> list[int]:
    """Prompt and generation of an entry with its full prompt."""
    return entry["prompt_token_ids"] + entry["generation_token_ids"]


def links(talk: Talk, calls: Entries) -> list[tuple[dict[str, Any], dict[str, Any], Asked]]:
    """Parent, child and what the child's request added, for every continuation of the talk."""
    found = []
    parent: dict[str, Any] | None = None
    for asked in talk.asked:
        child = calls[asked.call_id]
        if parent is not None:
            found.append((parent, child, asked))
        if asked.items:
            parent = child
    return found


def assert_exact(engine: InsideEngine, talk: Talk, calls: Entries) -> int:
    """Every continuation extends its parent token for token by what the template renders.

    Where the parent ended with an end token of another family, nothing may be supplied. Returns
    how many links were exact.
    """
    ends = {token: engine.token_ids(token)[0] for token in END_TOKENS}
    end = ends[KINDS[talk.kind].end]
    exact = 0
    for parent, child, asked in links(talk, calls):
        assert child["parent_resolution"] == "resolved", child["parent_resolution_reason"]
        assert child["parent_call_id"] == parent["model_call_id"]
        assert child["prefix_requested"] is True
        last = parent["generation_token_ids"][-1]
        if last in ends.values() and last != end:
            assert child["prefix_supplied"] is False
            assert child["prefix_reason"] == "other_end_token"
            continue
        assert child["prefix_supplied"] is True, child.get("prefix_reason")
        so_far = cumulative(parent)
        assert child["prompt_token_ids"][: len(so_far)] == so_far
        closing = [] if last == end else [end]
        added = child["prompt_token_ids"][len(so_far) :]
        assert added == closing + _rendered(engine, talk, asked)
        assert "drift_at" not in child
        exact += 1
    return exact


def _rendered(engine: InsideEngine, talk: Talk, asked: Asked) -> list[int]:
    """What the template renders for the new messages, found without our code."""
    if talk.kind == "mistral" and talk.tools and asked.new[-1]["role"] == "user":
        # This kind repeats the tools before the last user message, in vLLM's own spelling: ask
        # for a conversation that begins there.
        head = [{"role": "system", "content": talk.system}] if talk.system else []
        function = {"name": "look_up", "parameters": PLACES}
        tools = [{"type": "function", "function": function}]
        kind = {"kind": talk.kind}
        alone = engine.tokenize(
            messages=head + asked.new[-1:], tools=tools, chat_template_kwargs=kind
        )
        before = KINDS[talk.kind].new_part(asked.new[:-1], "")
        return engine.token_ids(before) + alone[1:]
    return engine.token_ids(KINDS[talk.kind].new_part(asked.new, talk.system))
