"""The lineage hashes: prefixes, dialects, canonical JSON, and the two side digests."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware.canonical import canonical_json
from middleware.fingerprint import (
    HashedRequest,
    assistant_fingerprint,
    canonicalize_tool_arguments,
    conversation_digest,
    prompt_config_digest,
    system_digest,
)

numbers = st.integers() | st.floats()
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
arguments = st.dictionaries(texts, json_values, max_size=3)
turns = st.lists(st.tuples(texts, texts, st.lists(arguments, max_size=2), texts), max_size=4)


def chat(conversation: list[Any]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for at, (question, answer, calls, result) in enumerate(conversation):
        items.append({"role": "user", "content": question})
        tool_calls = [
            {
                "id": f"k{at}.{i}",
                "type": "function",
                "function": {"name": "f", "arguments": json.dumps(args, indent=1)},
            }
            for i, args in enumerate(calls)
        ]
        items.append({"role": "assistant", "content": answer or None, "tool_calls": tool_calls})
        items.extend(
            {"role": "tool", "tool_call_id": f"k{at}.{i}", "content": result}
            for i, _ in enumerate(calls)
        )
    return items


def responses(conversation: list[Any]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for at, (question, answer, calls, result) in enumerate(conversation):
        text = [{"type": "output_text", "text": answer, "annotations": []}]
        items.append({"role": "user", "content": [{"type": "input_text", "text": question}]})
        items.append({"type": "message", "role": "assistant", "content": text})
        for i, args in enumerate(calls):
            call = {"type": "function_call", "call_id": f"k{at}.{i}", "name": "f"}
            items.append(call | {"arguments": json.dumps(args)})
        items.extend(
            {"type": "function_call_output", "call_id": f"k{at}.{i}", "output": result}
            for i, _ in enumerate(calls)
        )
    return items


def anthropic(conversation: list[Any]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for at, (question, answer, calls, result) in enumerate(conversation):
        blocks: list[dict[str, Any]] = [{"type": "text", "text": answer}]
        for i, args in enumerate(calls):
            blocks.append({"type": "tool_use", "id": f"k{at}.{i}", "name": "f", "input": args})
        results = [
            {"type": "tool_result", "tool_use_id": f"k{at}.{i}", "content": result}
            for i, _ in enumerate(calls)
        ]
        items.append({"role": "user", "content": question})
        items.append({"role": "assistant", "content": blocks})
        items.append({"role": "user", "content": results})
    return items


@settings(deadline=None, max_examples=60)
@given(turns)
def test_one_conversation_has_one_fingerprint_in_all_dialects(conversation: list[Any]) -> None:
    """Chat, Responses and Messages forms of the same turns are found by the same key."""
    found = {assistant_fingerprint(form(conversation)) for form in (chat, responses, anthropic)}
    assert len(found) == 1


@settings(deadline=None, max_examples=60)
@given(turns, st.sampled_from([chat, responses, anthropic]))
def test_one_pass_gives_every_prefix_digest(conversation: list[Any], form: Any) -> None:
    """``prefix_digest(k)`` is the digest of the first k items, and the input stays as it was."""
    items = form(conversation)
    before = copy.deepcopy(items)
    hashed = HashedRequest(items)
    assert len(hashed) == len(items)
    for count in range(len(items) + 1):
        assert hashed.prefix_digest(count) == conversation_digest(items[:count])
    assert hashed.fingerprint == assistant_fingerprint(items)
    assert hashed.is_root == (not items)
    assert repr(items) == repr(before)


@settings(deadline=None, max_examples=60)
@given(turns, turns, st.sampled_from([chat, responses, anthropic]))
def test_a_continuation_equals_hashing_everything_again(
    request: list[Any], output: list[Any], form: Any
) -> None:
    """The stamp of a finished call is what a request that echoes it will hash to."""
    asked, answered = form(request), form(output)
    stamp = HashedRequest(asked).continuation(answered)
    assert stamp == (
        assistant_fingerprint(asked + answered), len(asked), conversation_digest(asked)
    )  # fmt: skip


def test_the_query_names_the_positions_of_the_last_run() -> None:
    """Contexts may end at any item of the last model-authored run, and nowhere else."""
    user, said = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    call = {"type": "function_call", "call_id": "k", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "k", "output": "o"}
    items = [user, said, user, said, call, call, output, user]
    query = HashedRequest(items).query("config")
    assert sorted(query.context_digests) == [3, 4, 5]
    assert query.context_digests[4] == conversation_digest(items[:4])
    assert query.prompt_config_digest == "config"
    assert HashedRequest([user]).query().context_digests == {}
    assert sorted(HashedRequest([said]).query().context_digests) == [0]


@pytest.mark.parametrize(
    "bad",
    [
        "text", {"role": "user"}, ["x"], [None], [{"role": "user", "content": 5}],
        [{"role": "user", "content": {}}], [{"role": "user", "content": 0}],
        [{"role": "user", "content": [3]}], [{"role": "user", "content": [{"x": 1}]}],
        [{"role": "user", "content": [{"type": "", "text": 1}]}],
        [{"role": "user", "content": "\ud800"}], [{"role": 5, "content": "x"}],
        [{"role": ["user"], "content": "x"}], [{"role": "user", "content": [{"type": 3}]}],
        [{"role": "assistant", "tool_calls": ["x"]}],
        [{"role": "assistant", "tool_calls": {"a": 1}}],
        [{"role": "user", "content": [{"type": ["x"]}]}],
        [{"role": "assistant", "tool_calls": [{"function": "f"}]}],
        [{"role": "assistant", "tool_calls": [{"id": 5, "function": {}}]}],
        [{"role": "user", "content": [{"type": "image", "data": "\ud800"}]}],
        [{"role": "tool", "content": [{"type": "text", "text": "\udfff"}]}],
    ],
)  # fmt: skip
def test_what_cannot_be_hashed_is_refused(bad: Any) -> None:
    """Non-objects, unsupported contents and lone surrogates are a ValueError in every hash."""
    with pytest.raises(ValueError):
        conversation_digest(bad)
    with pytest.raises(ValueError):
        HashedRequest(bad)


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    """JSON nested beyond Python's stack is refused, in objects and in argument strings."""
    deep: Any = 1
    for _ in range(50_000):
        deep = [deep]
    with pytest.raises(ValueError):
        canonicalize_tool_arguments(deep)
    text = "[" * 100_000 + "]" * 100_000
    assert canonicalize_tool_arguments(text) == text  # no JSON that Python reads


def slow_canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@settings(deadline=None, max_examples=60)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=8,
))  # fmt: skip
def test_integers_of_any_size_are_exact(value: Any) -> None:
    """Canonical JSON equals Python's own, given as an object or as respaced text."""
    assert json.loads(canonical_json(value)) == value
    if not isinstance(value, str) and value is not None:
        assert canonicalize_tool_arguments(json.dumps(value, indent=2)) == (
            canonicalize_tool_arguments(value)
        )


@pytest.mark.parametrize(
    ("given_", "canonical"),
    [
        ('{"n": NaN}', '{"n":NaN}'), ('{"n": null}', '{"n":null}'), ("NaN", "NaN"),
        ("-Infinity", "-Infinity"), ('[1e999, "null"]', '[Infinity,"null"]'),
        ({"a": float("nan"), "b": None}, '{"a":NaN,"b":null}'), ("null", "null"),
        ("18446744073709551616", "18446744073709551616"), (2**70, str(2**70)),
        ('{"b":[1.50],"a":-9223372036854775809}', '{"a":-9223372036854775809,"b":[1.5]}'),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        (" plain words ", "plain words"), ('"e+"', '"e+"'), (False, "false"), ("[1,]", "[1,]"),
    ],
)  # fmt: skip
def test_canonical_arguments(given_: Any, canonical: str) -> None:
    """NaN is not null, large integers keep every digit, and other text is only stripped."""
    assert canonicalize_tool_arguments(given_) == canonical


def test_foreign_calls_are_model_authored() -> None:
    """An item without role whose type ends in ``_call`` counts into the fingerprint."""
    asked = [{"role": "user", "content": "u"}]
    search = {"type": "web_search_call", "content": [{"type": "web_search_call", "q": 1}]}
    assert assistant_fingerprint(asked) == ""
    assert assistant_fingerprint([*asked, search]) != ""
    assert not HashedRequest([*asked, search]).is_root
    assert HashedRequest([*asked, {"type": "item_reference", "id": "x"}]).is_root


system_items = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant"])},
    optional={
        "type": st.sampled_from(["function_call", "message", "function_call_output", "x_call"]),
        "content": st.sampled_from(["s", "t", None, [{"type": "text", "text": "s"}]]),
        "call_id": st.sampled_from(["k", "l"]),
        "arguments": st.sampled_from(["{}", "[1]"]),
        "tool_calls": st.just([{"id": "k", "function": {"name": "f", "arguments": "{}"}}]),
    },
)


@settings(deadline=None, max_examples=150)
@given(st.lists(system_items, max_size=5))
def test_both_hashes_and_the_one_pass_agree_on_system_items(items: list[dict[str, Any]]) -> None:
    """Of whatever type: only the role counts in the context, nothing in the fingerprint."""
    hashed = HashedRequest(items)
    for count in range(len(items) + 1):
        assert hashed.prefix_digest(count) == conversation_digest(items[:count])
    others = [item for item in items if item["role"] not in ("system", "developer")]
    assert hashed.fingerprint == assistant_fingerprint(items) == assistant_fingerprint(others)
    assert HashedRequest([]).continuation(items)[0] == hashed.fingerprint
    bare = [i if i in others else {"role": i["role"]} for i in items]
    assert conversation_digest(items) == conversation_digest(bare)


def test_system_digest_sees_content_and_skips_billing_headers() -> None:
    """System texts count in full wherever they stand; the volatile billing block does not."""
    plain = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "x"}]
    billed = [{"role": "system", "content": [
        {"type": "text", "text": "x-anthropic-billing-header: cc=1"},
        {"type": "text", "text": "Be kind."},
    ]}]  # fmt: skip
    assert system_digest(plain) == system_digest(billed)
    assert system_digest(plain) != system_digest([{"role": "system", "content": "Be mean."}])
    assert system_digest(plain) != system_digest([{"role": "developer", "content": "Be kind."}])
    assert system_digest([*plain, plain[0]]) != system_digest(plain)
    assert system_digest([{"role": "system", "content": 17}]) != system_digest([])


def test_prompt_config_digest_covers_what_shapes_the_prompt() -> None:
    """Tools, template settings, effort, documents and model count; decoding settings do not."""
    body = {"model": "m", "tools": [{"name": "f"}], "messages": [1]}
    same = prompt_config_digest(body)
    for change in ({"tool_choice": "none"}, {"response_format": {}}, {"temperature": 1.0},
                   {"messages": []}, {"documents": None}, {"chat_template_kwargs": {}},
                   {"tools": [{"name": "f", "cache_control": {"type": "ephemeral"}}]}):  # fmt: skip
        assert prompt_config_digest(body | change) == same
    for change in ({"model": "n"}, {"tools": []}, {"documents": [{"text": "d"}]},
                   {"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}},
                   {"chat_template_kwargs": {"enable_thinking": False}}):  # fmt: skip
        assert prompt_config_digest(body | change) != same
    assert prompt_config_digest(body | {"x": 1}, ["x"]) != prompt_config_digest(body, ["x"])
