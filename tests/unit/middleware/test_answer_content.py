"""What answers tell the client, dialect by dialect, whole, streamed and cut."""

from __future__ import annotations

from typing import Any

import pytest

from middleware.dialects import IN_ENGINE_ROUTES
from middleware.dialects.base import AnswerContent
from middleware.errors import UnsupportedParameterError
from middleware.fingerprint import assistant_fingerprint
from middleware.normalise import normalise_items

MESSAGES = IN_ENGINE_ROUTES["/v1/messages"]
RESPONSES = IN_ENGINE_ROUTES["/v1/responses"]
CHAT = IN_ENGINE_ROUTES["/v1/chat/completions"]


def block(index: int, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """One event about a content block."""
    name = "delta" if kind == "delta" else "content_block"
    return {"type": f"content_block_{kind}", "index": index, name: content}


MESSAGE_STREAM: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"id": "m1", "model": "m", "content": []}},
    block(0, "start", {"type": "thinking", "thinking": ""}),
    block(0, "delta", {"type": "thinking_delta", "thinking": "hm"}),
    block(0, "delta", {"type": "signature_delta", "signature": "s"}),
    {"type": "content_block_stop", "index": 0},
    {"type": "ping"},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    block(1, "delta", {"type": "text_delta", "text": "h"}),
    block(1, "delta", {"type": "text_delta", "text": "ällo"}),
    {"type": "content_block_stop", "index": 1},
    {
        "type": "content_block_start",
        "index": 2,
        "content_block": {"type": "tool_use", "id": "t1", "name": "f", "input": {}},
    },
    block(2, "delta", {"type": "input_json_delta", "partial_json": '{"a"'}),
    block(2, "delta", {"type": "input_json_delta", "partial_json": ": 1}"}),
    {"type": "content_block_stop", "index": 2},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use"},
        "usage": {"input_tokens": 3, "output_tokens": 9},
    },
    {"type": "message_stop"},
]
MESSAGE_WHOLE = {
    "id": "m1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "hällo"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
    ],
    "stop_reason": "tool_use",
    "usage": {"input_tokens": 3, "output_tokens": 9},
}
OUTPUT = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "content": [{"type": "output_text", "text": "hällo"}],
    },
    {"type": "function_call", "call_id": "t1", "name": "f", "arguments": '{"a": 1}', "id": "fc_1"},
]
RESPONSE_WHOLE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "model": "m",
    "status": "completed",
    "error": None,
    "output": OUTPUT,
    "usage": {"input_tokens": 3, "output_tokens": 9},
}
RESPONSE_STREAM: list[dict[str, Any]] = [
    {"type": "response.created", "response": RESPONSE_WHOLE | {"output": [], "usage": None}},
    {"type": "response.output_item.done", "output_index": 0, "item": OUTPUT[0]},
    {"type": "response.output_text.delta", "output_index": 1, "delta": "häl"},
    {"type": "response.output_text.delta", "output_index": 1, "delta": "lo"},
    {"type": "response.output_item.done", "output_index": 1, "item": OUTPUT[1]},
    {"type": "response.function_call_arguments.delta", "output_index": 2, "delta": '{"a": 1}'},
    {"type": "response.output_item.done", "output_index": 2, "item": OUTPUT[2]},
    {"type": "response.completed", "response": RESPONSE_WHOLE},
]
CHAT_ITEM = {
    "role": "assistant",
    "content": "hällo",
    "tool_calls": [
        {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    ],
}


def fed(dialect: Any, payloads: list[dict[str, Any]]) -> AnswerContent:
    """Content after these frames."""
    content: AnswerContent = dialect.content({})
    for payload in payloads:
        content.feed(payload)
    return content


def whole(dialect: Any, payload: dict[str, Any]) -> AnswerContent:
    """Content of a whole answer."""
    content: AnswerContent = dialect.content({})
    assert content.feed_whole(payload) is True
    return content


@pytest.mark.parametrize(
    "content",
    [
        fed(MESSAGES, MESSAGE_STREAM),
        whole(MESSAGES, MESSAGE_WHOLE),
        fed(RESPONSES, RESPONSE_STREAM),
        whole(RESPONSES, RESPONSE_WHOLE),
    ],
    ids=["messages-stream", "messages", "responses-stream", "responses"],
)
def test_a_whole_answer_is_read_alike_in_both_modes(content: AnswerContent) -> None:
    """Id, model, usage and items; and the fingerprint is that of the same turn in chat."""
    assert content.response_id in ("m1", "resp_1")
    assert content.model == "m"
    assert content.generated == 9
    assert content.complete
    assert content.saw_text
    assert not content.error_seen
    assert content.is_finished(0)
    items = normalise_items(content.output_items(0))
    assert assistant_fingerprint(items) == assistant_fingerprint(normalise_items([CHAT_ITEM]))


@pytest.mark.parametrize(
    ("dialect", "stream", "last"),
    [
        (MESSAGES, MESSAGE_STREAM, "message_delta"),
        (RESPONSES, RESPONSE_STREAM, "response.completed"),
    ],
)
def test_the_answer_is_complete_with_its_last_event(
    dialect: Any, stream: list[dict[str, Any]], last: str
) -> None:
    """From that event on the end is held; not one event earlier."""
    kinds = [payload["type"] for payload in stream]
    at = kinds.index(last)
    assert fed(dialect, stream[:at]).complete is False
    assert fed(dialect, stream[: at + 1]).complete is True


def test_a_cut_stream_keeps_what_was_said() -> None:
    """Text so far is an item; a cut tool input stays the text that it is."""
    (message,) = fed(RESPONSES, RESPONSE_STREAM[2:3]).output_items(0)
    assert message["content"] == [{"type": "output_text", "text": "häl"}]
    cut = fed(MESSAGES, MESSAGE_STREAM[:12])
    assert not cut.complete
    assert cut.output_items(0)[-1]["content"][-1]["input"] == '{"a"'


@pytest.mark.parametrize(
    ("dialect", "event"),
    [
        (MESSAGES, {"type": "error", "error": {"type": "api_error"}}),
        (RESPONSES, {"type": "error", "message": "x"}),
        (RESPONSES, {"type": "response.failed", "response": {"id": "r"}}),
        (RESPONSES, {"error": {"message": "x"}}),
        (CHAT, {"error": {"message": "x"}}),
    ],
)
def test_error_events_are_seen(dialect: Any, event: dict[str, Any]) -> None:
    """An error frame ends an answer, whatever was said before."""
    assert fed(dialect, [event]).error_seen is True


@pytest.mark.parametrize("nothing", [None, {}, "", False])
@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES])
def test_an_empty_error_member_is_none(dialect: Any, nothing: object) -> None:
    """Some engines send the member with every answer."""
    whole_answer = {"id": "x", "choices": [], "output": [], "content": [], "error": nothing}
    content = dialect.content({})
    content.feed_whole(whole_answer)
    content.feed({"error": nothing})
    assert content.error_seen is False


def test_a_running_count_is_not_the_total() -> None:
    """Only the last chunk, which has no choices, counts the whole answer."""
    chunk = {
        "choices": [{"index": 0, "delta": {"content": "a"}}],
        "usage": {"completion_tokens": 1},
    }
    content = fed(CHAT, [chunk])
    assert content.generated is None
    content.feed({"choices": [], "usage": {"completion_tokens": 2}})
    assert content.generated == 2


@pytest.mark.parametrize("odd", [{"choices": 3}, {"choices": [3]}, {"choices": [{"index": -1}]}])
def test_odd_shapes_are_passed_over(odd: dict[str, Any]) -> None:
    """The engine's own report decides; reading the answer never raises."""
    content = fed(CHAT, [odd, {"choices": [{"index": 0, "finish_reason": "stop"}]}])
    assert content.is_finished(0)
    assert not content.saw_text


def test_requests_as_items() -> None:
    """Instructions and system prompts lead; a string input is a user message."""
    assert RESPONSES.request_items({"instructions": "be", "input": "hi"}) == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi"},
    ]
    assert RESPONSES.request_items({"input": OUTPUT}) == OUTPUT
    blocks = [{"type": "text", "text": "be"}]
    assert MESSAGES.request_items({"system": blocks, "messages": [CHAT_ITEM]}) == [
        {"role": "system", "content": blocks},
        CHAT_ITEM,
    ]
    assert RESPONSES.previous_response({"previous_response_id": "r"}) == "r"
    assert RESPONSES.previous_response({"previous_response_id": ""}) is None


def test_background_responses_are_refused() -> None:
    """They go on after their answer."""
    with pytest.raises(UnsupportedParameterError):
        RESPONSES.check({"background": True})
    RESPONSES.check({"background": False})


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (409, "invalid_request_error"), (413, "request_too_large"),
     (429, "rate_limit_error"), (503, "overloaded_error"), (502, "api_error")],
)  # fmt: skip
def test_refusals_in_the_messages_shape(status: int, kind: str) -> None:
    """As Anthropic's API answers, with our machine-readable code."""
    error = {"type": kind, "message": "m", "code": "c"}
    assert MESSAGES.error_body(status, "c", "m") == {"type": "error", "error": error}
