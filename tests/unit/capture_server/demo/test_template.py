"""The chat template."""

from __future__ import annotations

from typing import Any

import pytest

from capture_server.demo.errors import EngineRequestError
from capture_server.demo.template import is_plain_text, render

HI = {"role": "user", "content": "hi"}


def test_plain_conversation() -> None:
    """A user turn and the opening of the answer, in ChatML."""
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    assert expected == render([HI])


def test_tool_round_trip() -> None:
    """Calls are written as the model writes them; results have a turn of their own."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":1,"b":"é"}'}}
    messages = [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "42"}]},
    ]
    written = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'

    text = render(messages)

    assert f"<|im_start|>assistant\n{written}\n{written}<|im_end|>\n" in text
    assert text.endswith("<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n")


def test_tools_join_the_system_message() -> None:
    """Tool definitions come in one system turn, after the caller's own system text."""
    tool = {"type": "function", "function": {"name": "f"}}
    text = render([{"role": "system", "content": "Be kind."}, HI], [tool])

    assert text.startswith("<|im_start|>system\nBe kind.\n\nYou can call tools.")
    assert '{"type": "function", "function": {"name": "f"}}<|im_end|>' in text
    assert text.count("<|im_start|>system") == 1


def test_a_longer_conversation_extends_the_shorter_one() -> None:
    """Prompt plus answer is a prefix of the next turn's prompt text."""
    first = render([HI])
    second = render([HI, {"role": "assistant", "content": "Hello!"}, HI])

    assert second.startswith(first + "Hello!<|im_end|>\n")


def test_reasoning_is_kept_or_stripped() -> None:
    """``strip_reasoning`` drops thinking before the last user message, and only there."""
    answer = {"role": "assistant", "content": "\n\nYes", "reasoning": "hm"}
    messages = [HI, answer, HI, answer]

    assert render(messages).count("<think>\nhm</think>\n\nYes") == 2
    assert render(messages, strip_reasoning=True).count("<think>\nhm</think>") == 1
    assert render([HI], thinking=True).endswith("<|im_start|>assistant\n<think>\n")


def test_final_message_can_be_continued() -> None:
    """``continue_final_message`` leaves the last turn open."""
    messages = [HI, {"role": "assistant", "content": "Su"}]
    text = render(messages, add_generation_prompt=False, continue_final_message=True)

    assert text.endswith("<|im_start|>assistant\nSu")
    with pytest.raises(EngineRequestError, match="continue_final_message"):
        render(messages, add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize(
    "message",
    [
        {"content": "no role"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
    ],
)
def test_unreadable_messages_are_refused(message: dict[str, Any]) -> None:
    """What cannot be rendered is a 400, not a guess."""
    with pytest.raises(EngineRequestError):
        render([message])


def test_other_media_are_seen() -> None:
    """A conversation with an image is not plain text."""
    image = {"role": "user", "content": [{"type": "image_url"}]}

    assert (is_plain_text([HI]), is_plain_text([HI, image])) == (True, False)
