"""Exact prefixes from token ids alone, with toy templates and a toy tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware.context import CaptureContext
from middleware.protocols import LineageMatch, LineageResolution
from middleware.records import ParentResolutionStatus, TokenIds
from middleware.splice import (
    MARKERS,
    NoExactPrefixError,
    exact_prompt,
    require_suppliable,
    with_last_answer,
)

END, OTHER_END = 1000, 1001
Message = dict[str, Any]
Template = Callable[[list[Message]], str]


def tokens(text: str) -> TokenIds:
    """One token per character; the toy end-of-turn characters are special tokens."""
    special = {"⏹": END, "⏏": OTHER_END}
    return TokenIds.of([special.get(char, ord(char)) for char in text])


def plain(messages: list[Message]) -> str:
    """ChatML-like."""
    return "".join(f"<{m['role']}>{m['content']}⏹\n" for m in messages) + "<assistant>"


def stripping(messages: list[Message]) -> str:
    """Drops what stands before a bar in answers."""
    shown = [
        m | {"content": m["content"].split("|")[-1]} if m["role"] == "assistant" else m
        for m in messages
    ]
    return plain(shown)


def moving(messages: list[Message]) -> str:
    """Puts the system prompt before the last user message."""
    system = "".join(m["content"] for m in messages if m["role"] == "system")
    rest = [m for m in messages if m["role"] != "system"]
    last = max((i for i, m in enumerate(rest) if m["role"] == "user"), default=-1)
    parts = [
        f"[{system if i == last else ''}{m['content']}]"
        if m["role"] == "user"
        else f"{m['content']}⏹"
        for i, m in enumerate(rest)
    ]
    return "".join(parts)


def spliced(template: Template, messages: list[Message], parent: TokenIds) -> TokenIds:
    """The prompt for a conversation whose last answer is ``parent``'s."""
    marked = [with_last_answer(messages, marker) for marker in MARKERS]
    first, second = (tokens(template(m)) for m in marked if m is not None)
    return exact_prompt(parent, tokens(template(messages)), (first, second), {END, OTHER_END})


TALK: list[Message] = [
    {"role": "system", "content": "brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "thoughts|answer"},
    {"role": "user", "content": "more"},
]


@pytest.mark.parametrize("template", [plain, stripping, moving])
@pytest.mark.parametrize("generated", ["thoughts|answer⏹", "thoughts|ans", "a⏹b⏹", "x"])
def test_the_parent_is_extended_by_the_templates_own_tail(
    template: Template, generated: str
) -> None:
    """Whatever was sampled stays; an end of turn is added only where none was sampled."""
    parent = tokens(template(TALK[:2]) + generated)
    tail = {plain: "\n<user>more⏹\n<assistant>", moving: "[briefmore]"}
    expected = tail.get(template, "\n<user>more⏹\n<assistant>")
    closing = "" if generated.endswith("⏹") else "⏹"
    assert spliced(template, TALK, parent) == TokenIds.concat(parent, tokens(closing + expected))


text = st.text(st.characters(codec="utf-8", exclude_characters="⏏"), max_size=12)


@given(
    answer=text,
    generated=text.filter(bool),
    new=st.lists(st.tuples(st.sampled_from(["user", "tool"]), text), min_size=1, max_size=4),
    template=st.sampled_from([plain, stripping]),
)
def test_any_conversation_extends_exactly(
    answer: str, generated: str, new: list[tuple[str, str]], template: Template
) -> None:
    """Also with end-of-turn characters in answers and user messages, and with markers in them."""
    messages = [*TALK[:2], {"role": "assistant", "content": answer}]
    messages += [{"role": role, "content": content} for role, content in new]
    parent = tokens(template(TALK[:2]) + generated)
    prompt = spliced(template, messages, parent)
    added = "".join(f"<{role}>{content}⏹\n" for role, content in new) + "<assistant>"
    closing = "" if generated.endswith("⏹") else "⏹"
    assert prompt == TokenIds.concat(parent, tokens(f"{closing}\n{added}"))


def refusal(template: Template, messages: list[Message], generated: str = "answer⏹") -> str:
    """Why no prefix is given."""
    with pytest.raises(NoExactPrefixError) as refused:
        spliced(template, messages, tokens(template(messages[:2]) + generated))
    return refused.value.reason


def test_a_template_without_an_end_of_turn_is_refused() -> None:
    """There is no place where the parent's tokens could be joined."""
    assert (
        refusal(lambda m: "".join(f"{x['role']}: {x['content']}\n" for x in m), TALK)
        == "no_end_of_turn"
    )


def test_another_sampled_end_token_is_refused() -> None:
    """The model ended with a token that the template would not have written."""
    assert refusal(plain, TALK, "answer⏏") == "other_end_token"


def test_a_template_that_repeats_the_answer_is_refused() -> None:
    """The tail would begin behind the last copy and drop what stands between."""

    def repeating(messages: list[Message]) -> str:
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        return plain(messages) + "".join(f"you said {text}⏹" for text in said)

    assert refusal(repeating, TALK) == "answer_not_in_one_place"


def test_a_template_that_drops_the_answer_is_refused() -> None:
    """Where no marker appears, nothing tells where the answer was."""
    assert refusal(lambda m: f"{len(m)}⏹", TALK) == "answer_not_in_one_place"


def test_a_tail_that_depends_on_the_answer_is_refused() -> None:
    """What the template writes after the answer must be the same for the real one."""

    def counting(messages: list[Message]) -> str:
        length = sum(len(m["content"]) for m in messages if m["role"] == "assistant")
        return plain(messages) + f"{length}"

    assert refusal(counting, TALK) == "tail_depends_on_answer"


def test_the_whole_last_run_of_answers_is_replaced() -> None:
    """One answer may be several items; earlier answers and tool calls in it go."""
    messages = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "tool_calls": [{}]},
        {"role": "tool", "content": "d"},
    ]
    assert with_last_answer(messages, "X") == [
        *messages[:2],
        {"role": "assistant", "content": "X"},
        messages[4],
    ]
    assert with_last_answer(messages[1:2], "X") is None


def context(items: list[Message] | None = None, **changes: Any) -> CaptureContext:
    """A call whose parent may be supplied, unless ``changes`` spoil it."""
    parent = {
        "prompt_config_digest": "p",
        "system_digest": "s",
        "finish_reason": "stop",
        **{key: changes.pop(f"parent_{key}") for key in _PARENT if f"parent_{key}" in changes},
    }
    match = LineageMatch("c1", TokenIds.of([1, 2, 3]), **parent)
    call = CaptureContext(
        rollout_id="r",
        model_call_id="c2",
        request_items=items or TALK,
        prompt_config_digest="p",
        system_digest="s",
        parent_resolution=LineageResolution(ParentResolutionStatus.RESOLVED, match),
    )
    for name, value in changes.items():
        setattr(call, name, value)
    return call


_PARENT = ("prompt_config_digest", "system_digest", "finish_reason")


def test_a_sound_link_may_be_supplied() -> None:
    """Everything recorded agrees."""
    assert require_suppliable(context()) == [1, 2, 3]
    only_reasoning = [*TALK[:2], {"type": "reasoning", "summary": []}, TALK[3]]
    assert require_suppliable(context(only_reasoning)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parent_resolution": None}, "no_parent"),
        ({"prompt_config_digest": ""}, "prompt_config_unknown"),
        ({"parent_prompt_config_digest": ""}, "prompt_config_unknown"),
        ({"prompt_config_digest": "q"}, "prompt_config_changed"),
        ({"system_digest": "t"}, "system_changed"),
        ({"parent_system_digest": ""}, "system_changed"),
        ({"items": [*TALK, {"role": "developer", "content": "x"}]}, "system_changed"),
        ({"items": TALK, "parent_by": "response_id"}, None),
        (
            {"items": [*TALK, {"role": "system", "content": "x"}], "parent_by": "response_id"},
            "system_changed",
        ),
        *[
            ({"parent_finish_reason": end}, "parent_was_cut")
            for end in ("abort", "client_disconnect", "upstream_error", "truncated", "")
        ],
        ({"parent_finish_reason": "length"}, None),
        ({"parent_finish_reason": "tool_calls"}, None),
    ],
)
def test_an_unsound_link_is_never_supplied(changes: dict[str, Any], reason: str | None) -> None:
    """A wrong supply would never show, so every condition is checked on recorded facts."""
    call = context(changes.pop("items", None), **changes)
    if reason is None:
        assert require_suppliable(call) == [1, 2, 3]
        return
    with pytest.raises(NoExactPrefixError) as refused:
        require_suppliable(call)
    assert refused.value.reason == reason
