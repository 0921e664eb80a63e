"""Echoed shapes of one turn are equal after normalising, and different contents are not."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware.fingerprint import HashedRequest, assistant_fingerprint, conversation_digest
from middleware.normalise import normalise_items

USER = {"role": "user", "content": "q"}
CALL = {"id": "k", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def hashes(*items: dict[str, Any]) -> tuple[str, str]:
    normal = normalise_items([USER, *items, USER])
    return assistant_fingerprint(normal), conversation_digest(normal)


@pytest.mark.parametrize(
    "echo",
    [
        [{"role": "assistant", "content": "ok"}],
        [{"role": "assistant", "content": "ok", "reasoning_content": "r"}],
        [{"role": "assistant", "content": "ok", "reasoning": "r"}],
        [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
         {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
          "content": [{"type": "output_text", "text": "ok", "annotations": [], "logprobs": []}]}],
        [{"role": "assistant", "content": [
            {"type": "thinking", "thinking": "r", "signature": "s"},
            {"type": "text", "text": "ok"}]}],
        [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, "ok"]}],
        [{"role": "assistant", "content": "<think>r</think>ok"}],
        [{"role": "assistant", "content": "\n<think>\nr\n</think>\n\nok"}],
        [{"role": "assistant", "content": [{"type": "text", "text": "<think>r</think> ok"}]}],
        [{"role": "assistant", "content": [
            {"type": "text", "text": "<think>r</think>"}, {"type": "text", "text": "ok"}]}],
    ],
)  # fmt: skip
def test_reasoning_in_every_form_goes(echo: list[dict[str, Any]]) -> None:
    """However a harness echoes reasoning, the turn hashes like its text alone (C11)."""
    assert hashes(*echo) == hashes({"role": "assistant", "content": "ok"})


@pytest.mark.parametrize(
    "other",
    [
        {"role": "assistant", "content": "ok."}, {"role": "assistant", "content": " ok"},
        {"role": "assistant", "content": "ok<think>r</think>"},
        {"role": "assistant", "content": "<think>ok"}, {"role": "user", "content": "ok"},
    ],
)  # fmt: skip
def test_other_text_is_another_turn(other: dict[str, Any]) -> None:
    """A changed answer, kept whitespace, a later or an unclosed tag are content."""
    assert hashes(other) != hashes({"role": "assistant", "content": "ok"})


def test_user_text_is_never_stripped() -> None:
    """A literal ``<think>`` in what the user wrote stays."""
    item = {"role": "user", "content": "<think>r</think>ok"}
    assert normalise_items([item]) == [item]
    blocks = {"role": "user", "content": [{"type": "text", "text": "<think>r</think>ok"}]}
    assert normalise_items([blocks]) == [item]


@pytest.mark.parametrize(
    "turn",
    [
        [{"type": "reasoning", "summary": []}],
        [{"type": "reasoning", "summary": []}, {"type": "reasoning", "encrypted_content": "x"}],
        [{"type": "reasoning", "summary": []}, {"role": "assistant", "content": ""}],
        [{"role": "assistant", "content": "<think>r</think>\n"}],
        [{"role": "assistant", "content": "", "reasoning_content": "r"}],
        [{"role": "assistant", "content": None, "reasoning": "r"}],
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "r"}]}],
        [{"role": "assistant", "content": ""}],
        [{"role": "assistant"}],
    ],
)  # fmt: skip
def test_a_turn_of_nothing_but_reasoning_is_one_empty_turn(turn: list[dict[str, Any]]) -> None:
    """It counts as one assistant item without content, in every dialect."""
    assert hashes(*turn) == hashes({"role": "assistant"})
    assert len(normalise_items([USER, *turn, USER])) == 3
    assert len(normalise_items([USER, *turn])) == 2


def test_reasoning_next_to_a_call_leaves_the_call_alone() -> None:
    """A turn of which something is left gets no extra item."""
    call = {"type": "function_call", "call_id": "k", "name": "f", "arguments": "{}"}
    reasoning = {"type": "reasoning", "summary": []}
    assert normalise_items([USER, reasoning, call]) == [USER, call]
    assert normalise_items([USER, call, reasoning, USER]) == [USER, call, USER]
    assert normalise_items([reasoning, USER]) == [{"role": "assistant"}, USER]


@pytest.mark.parametrize(
    "content", [None, "", [], [{"type": "text", "text": ""}], [{"type": "output_text", "text": ""}]]
)
def test_an_empty_text_next_to_tool_calls_is_no_content(content: Any) -> None:
    """null, empty string, empty list, one empty block and no key are one shape (C10)."""
    with_key = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    without = {"role": "assistant", "tool_calls": [CALL]}
    assert normalise_items([with_key]) == [without]
    assert hashes(with_key) == hashes(without)
    blank = {"role": "assistant", "content": " ", "tool_calls": [CALL]}
    assert hashes(blank) != hashes(without)


def test_volatile_keys_go_from_items_and_blocks() -> None:
    """Cache marks, signatures, states and server-made ids change from echo to echo."""
    image = {"type": "image", "source": {"data": "AA"}}
    noisy = {"role": "user", "content": [image | {"cache_control": {"type": "ephemeral"}}, "x"]}
    assert normalise_items([noisy]) == [{"role": "user", "content": [image, "x"]}]
    result = {"type": "tool_result", "tool_use_id": "k", "content": [
        {"type": "text", "text": "out", "cache_control": {}}]}  # fmt: skip
    cleaned = {"type": "tool_result", "tool_use_id": "k", "content": "out"}
    assert normalise_items([{"role": "user", "content": [result, "x"]}]) == [
        {"role": "user", "content": [cleaned, "x"]}
    ]
    message = {"type": "message", "role": "assistant", "content": "a", "id": "msg_1", "phase": "x"}
    assert normalise_items([message]) == [{"type": "message", "role": "assistant", "content": "a"}]


def test_a_call_keeps_the_only_id_it_has() -> None:
    """An ``fc_`` id stays where a function call has no ``call_id``, and a reference its id."""
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    assert normalise_items([call | {"id": "fc_1"}]) == [call | {"id": "fc_1"}]
    assert normalise_items([call | {"id": "fc_1", "call_id": "k"}]) == [call | {"call_id": "k"}]
    one, two = ({"type": "item_reference", "id": f"msg_{i}"} for i in (1, 2))
    assert hashes(one) != hashes(two)


def test_custom_tools_are_functions() -> None:
    """A custom call's input is its arguments; its output is a function's output."""
    items = [
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "k", "name": "p", "input": "*** x"},
        {"type": "custom_tool_call_output", "call_id": "k", "output": "done"},
    ]
    assert normalise_items(items) == [
        {"type": "function_call", "id": "ctc_1", "call_id": "k", "name": "p", "arguments": "*** x"},
        {"type": "function_call_output", "call_id": "k", "output": "done"},
    ]


def test_other_typed_items_count_whole() -> None:
    """They hash by everything they say, less the volatile keys, and calls are the model's."""
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"q": "x"}}
    normal = normalise_items([search])
    block = {"type": "web_search_call", "id": "ws_1", "action": {"q": "x"}}
    assert normal == [{"type": "web_search_call", "content": [block]}]
    assert hashes(search) != hashes(search | {"action": {"q": "y"}})
    assert hashes(search)[0] != ""
    assert hashes({"type": "mcp_list_tools", "tools": [1]})[0] == ""


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        ('{"t": 30.0}', '{"t": 30}'), ('{"t": [-0.0, 1e3]}', '{"t":[0,1000]}'),
        ('{"t": 30.0, "big": 99999999999999999999}', '{"big":99999999999999999999,"t":30}'),
    ],
)  # fmt: skip
def test_integral_floats_in_arguments_are_integers(sent: str, echoed: str) -> None:
    """JavaScript harnesses respell 30.0 as 30; every dialect's arguments are covered."""
    for form in (
        lambda text: {"type": "function_call", "call_id": "k", "name": "f", "arguments": text},
        lambda text: {"role": "assistant", "tool_calls": [
            {"id": "k", "function": {"name": "f", "arguments": text}}]},
        lambda text: {"role": "assistant", "content": [
            {"type": "tool_use", "id": "k", "name": "f", "input": text}]},
        lambda text: {"type": "custom_tool_call", "call_id": "k", "name": "f", "input": text},
    ):  # fmt: skip
        assert hashes(form(sent)) == hashes(form(echoed))


def test_other_numbers_stay() -> None:
    """Fractions, floats from 2**53 on and numbers outside arguments are not respelled."""
    for one, two in ((1.5, 1), (float(2**53), 2**53), (1e300, 10**300)):
        calls = [{"type": "function_call", "call_id": "k", "name": "f", "arguments": {"n": n}}
                 for n in (one, two)]  # fmt: skip
        assert hashes(calls[0]) != hashes(calls[1])
    results = [{"type": "function_call_output", "call_id": "k", "output": {"n": n}}
               for n in (1.0, 1)]  # fmt: skip
    assert hashes(results[0]) != hashes(results[1])


@pytest.mark.parametrize("key", ["status", "signature", "annotations", "phase", "cache_control"])
def test_data_in_tool_results_keeps_every_key(key: str) -> None:
    """An object without type is no content block: two answers of a tool are not one."""
    for form in (
        lambda data: {"type": "function_call_output", "call_id": "k", "output": [data]},
        lambda data: {"type": "custom_tool_call_output", "call_id": "k", "output": [data]},
        lambda data: {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "k", "content": [data]}]},
        lambda data: {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "k", "content": [data, data]}]},
    ):  # fmt: skip
        assert hashes(form({key: "ok"})) != hashes(form({key: "fail"}))
        typed = [form({"type": "text", "text": "x", key: value}) for value in ("ok", "fail")]
        assert hashes(typed[0]) == hashes(typed[1])


@pytest.mark.parametrize("content", [{}, 0, False, 0.0])
def test_what_is_no_text_is_no_empty_text(content: Any) -> None:
    """It stays beside tool calls, and is refused when hashed."""
    item = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    assert normalise_items([item]) == [item]
    assert normalise_items([{**item, "reasoning": "r"}]) == [item]
    with pytest.raises(ValueError):
        hashes(item)


@pytest.mark.parametrize("role", ["user", "tool", "assistant", "system", "", None])
def test_custom_calls_of_any_role_are_normalised_once(role: Any) -> None:
    """What a custom call becomes is normalised as that, in the first pass already."""
    item = {"type": "custom_tool_call", "role": role, "call_id": "k", "input": '{"n": 1.0}'}
    once = normalise_items([{"type": "reasoning"}, item])
    assert normalise_items(once) == once
    assert len(once) == (2 if role == "system" else 1)


def test_a_wrapped_item_is_cleaned_like_a_bare_one() -> None:
    """Volatile keys go, whether or not the item looks as if it were wrapped already."""
    block = {"type": "x_call", "status": "done", "id": "msg_1", "content": [
        {"type": "text", "text": "a", "annotations": []}]}  # fmt: skip
    wrapped = {"type": "x_call", "content": [block]}
    once = normalise_items([wrapped])
    clean = {"type": "x_call", "content": [{"type": "text", "text": "a"}]}
    assert once == [{"type": "x_call", "content": [clean]}] == normalise_items([block])
    assert normalise_items(once)[0] is once[0]


def test_untouched_items_are_the_same_objects() -> None:
    """Where no rule applies nothing is copied."""
    items = [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "a"},
             {"role": "assistant", "content": "b", "tool_calls": [CALL]},
             {"role": "tool", "tool_call_id": "k", "content": "t"}]  # fmt: skip
    assert all(new is old for new, old in zip(normalise_items(items), items, strict=True))


scalars = st.sampled_from([None, "", "x", " <think>a</think> b", "fc_1", 1.0, -0.0, 7, True])
kinds = st.sampled_from(
    ["reasoning", "function_call", "custom_tool_call", "mcp_call", "message", "thinking", "text",
     "tool_use", "tool_result", "image", "", ["x"], {}, 5]
)  # fmt: skip
blocks = st.fixed_dictionaries(
    {},
    optional={
        "type": kinds, "text": scalars, "input": scalars, "cache_control": scalars,
        "status": scalars, "id": scalars, "content": st.lists(
            st.fixed_dictionaries({}, optional={"type": kinds, "text": scalars, "status": scalars}),
            max_size=2,
        ),
    },
)  # fmt: skip
contents = scalars | st.just({}) | st.just(0) | st.lists(blocks | scalars, max_size=3)
items_ = st.lists(
    st.fixed_dictionaries({}, optional={
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool", ["x"]]),
        "type": kinds, "content": contents, "reasoning": scalars, "id": scalars, "call_id": scalars,
        "arguments": scalars, "input": scalars, "output": contents, "status": scalars,
        "tool_calls": st.lists(st.just(CALL) | scalars, max_size=2),
    }),
    max_size=4,
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(items_)
def test_normalising_twice_changes_nothing_and_the_input_is_kept(items: list[Any]) -> None:
    """Idempotent on whatever JSON comes, without mutating it; hashing it may only refuse."""
    before = copy.deepcopy(items)
    once = normalise_items(items)
    assert items == before
    with contextlib.suppress(ValueError):
        HashedRequest(once)
    assert repr(normalise_items(once)) == repr(once)


def test_nonsense_is_refused_and_not_crashed_on() -> None:
    """Items that are no objects are a ValueError; null means none."""
    assert normalise_items(None) == []
    with pytest.raises(ValueError):
        normalise_items(["x"])  # type: ignore[list-item]
    deep: Any = "x"
    for _ in range(20_000):
        deep = [{"type": "tool_result", "content": deep}]
    with pytest.raises(ValueError):
        normalise_items([{"role": "user", "content": deep}])
