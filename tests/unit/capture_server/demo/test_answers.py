"""Reading generated text: content, reasoning, tool calls, whole and in deltas."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_server.demo.answers import AnswerForm, AnswerStream, ToolMode

TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a":{"b":"}]\\"{"},"c":[1, 2]}}\n'
    '</tool_call>\n<tool_call>{"name": "g", "arguments": 12.5}</tool_call>'
)
ARGUMENTS = ['{"a":{"b":"}]\\"{"},"c":[1, 2]}', "12.5"]
cuts = st.lists(st.integers(0, len(TWO_CALLS)), max_size=12)


def form(tools: ToolMode = "auto", *, thinking: bool = False) -> AnswerForm:
    return AnswerForm(thinking=thinking, tools=tools)


def split(text: str, at: list[int]) -> list[str]:
    bounds = [0, *sorted(at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def joined(how: AnswerForm, pieces: list[str]) -> dict[str, Any]:
    """Feed the pieces and assemble the deltas as a client does."""
    stream = AnswerStream(how)
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for at, piece in enumerate(pieces):
        delta = stream.delta(piece, final=at == len(pieces) - 1)
        found["content"] += delta.get("content") or ""
        found["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                found["calls"].append([call["function"]["name"], ""])
            found["calls"][call["index"]][1] += call["function"].get("arguments", "")
    return found


@given(cuts)
def test_streamed_calls_do_not_depend_on_the_cuts(at: list[int]) -> None:
    """However the text is cut, names and raw arguments come out the same."""
    found = joined(form(), split(TWO_CALLS, at))

    assert [["f", ARGUMENTS[0]], ["g", ARGUMENTS[1]]] == found["calls"]
    assert found["content"] == "Let me see.\n"


def test_whole_calls_are_written_again() -> None:
    """The whole answer holds the same values, spaced anew, as vLLM does."""
    message = form().message(TWO_CALLS)
    found = [call["function"]["arguments"] for call in message["tool_calls"]]

    assert [json.loads(raw) for raw in ARGUMENTS] == [json.loads(text) for text in found]
    assert found[0] == '{"a": {"b": "}]\\"{"}, "c": [1, 2]}'
    assert message["content"] == "Let me see.\n"


def test_first_delta_of_a_call_has_the_name_and_no_arguments() -> None:
    """Id, type, index and name come first; argument pieces carry only the index."""
    stream = AnswerStream(form())
    head = stream.delta('<tool_call>\n{"name": "f", ', final=False)
    markup = stream.delta('"arguments": ', final=False)
    piece = stream.delta("{}", final=False)
    tail = stream.delta("}\n</tool_call>", final=False)

    call = head["tool_calls"][0]
    assert list(call) == ["id", "type", "index", "function"]
    assert call["id"].startswith("chatcmpl-tool-")
    assert call["function"] == {"name": "f"}
    assert {} == markup == tail
    expected = [{"index": 0, "function": {"arguments": "{}"}}]
    assert {"content": None, "tool_calls": expected} == piece


def test_a_value_that_is_not_an_object_ends_at_its_end() -> None:
    """Numbers and words are passed on without the brace that follows them."""
    found = joined(form(), ['<tool_call>{"name": "f", "arguments": fal', "se}", "</tool_call>"])

    assert found["calls"] == [["f", "false"]]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {</tool_call>',
        "<tool_call>nothing",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call>",
    ],
)
def test_an_unreadable_call_is_content(text: str) -> None:
    """A whole answer with a broken call is given as text."""
    message = form().message(text)

    assert text == message["content"]
    assert "tool_calls" not in message


def test_a_call_cut_by_length_counts_when_its_json_is_whole() -> None:
    """The closing marker may be missing."""
    message = form().message('<tool_call>\n{"name": "f", "arguments": {}}\n')

    assert message["tool_calls"][0]["function"]["name"] == "f"


@pytest.mark.parametrize(("mode", "content"), [("auto", None), ("required", ""), ("named", "")])
def test_content_beside_calls(mode: ToolMode, content: str | None) -> None:
    """No text beside a call: null by the model's own choice, empty when it was forced."""
    message = form(mode).message('<tool_call>{"name": "f", "arguments": {}}</tool_call>')

    assert content == message["content"]


def test_markers_are_plain_text_without_tools() -> None:
    """Without tools nothing is parsed."""
    assert form("off").message(TWO_CALLS)["content"] == TWO_CALLS
    assert joined(form("off"), split(TWO_CALLS, [5, 20, 21]))["content"] == TWO_CALLS


@given(st.lists(st.integers(0, 40), max_size=8))
def test_half_a_marker_that_goes_nowhere_is_content(at: list[int]) -> None:
    """Text that looks like the start of a marker is shown in the end."""
    text = "a < b <tool <tool_cal and <tool_call"

    assert text == joined(form(), split(text, [min(c, len(text)) for c in at]))["content"]


THOUGHT = "<think>one </thi two</think>\n\nYes"


@given(st.lists(st.integers(0, len(THOUGHT)), max_size=8))
def test_reasoning_is_split_off(at: list[int]) -> None:
    """Everything to the end of the think block is reasoning, in both modes, at any cut."""
    how = form("off", thinking=True)
    found = joined(how, split(THOUGHT, at))

    assert (found["reasoning"], found["content"]) == ("one </thi two", "\n\nYes")
    message = how.message(THOUGHT)
    assert (message["reasoning"], message["content"]) == ("one </thi two", "\n\nYes")


def test_nothing_but_reasoning() -> None:
    """An answer cut inside the think block has no content at all."""
    message = form("off", thinking=True).message("hm")

    assert (message["reasoning"], message["content"]) == ("hm", None)
    assert joined(form("off", thinking=True), ["hm", "</t"])["reasoning"] == "hm</t"


@pytest.mark.parametrize(
    ("mode", "reason", "expected"),
    [
        ("auto", "stop", "tool_calls"),
        ("required", "stop", "tool_calls"),
        ("named", "stop", "stop"),
        ("auto", "length", "length"),
        ("auto", "abort", "abort"),
    ],
)
def test_finish_reason_of_calls(mode: ToolMode, reason: str, expected: str) -> None:
    """``tool_calls`` only for a call that ended by itself and was not named by the client."""
    assert expected == form(mode).finish_reason(reason, any_call=True)
    assert reason == form(mode).finish_reason(reason, any_call=False)
