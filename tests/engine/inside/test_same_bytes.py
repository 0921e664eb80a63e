"""What the agent sees with capture inside is what vLLM sends without it, to the byte.

The same engine is asked the same thing past the tag and through it, with the same seed; only what
it makes up anew each time (ids, the clock) is set aside. Streams are compared event by event
after joining neighbouring deltas: where an engine cuts its text depends on its hurry.
"""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.engine.agent import LOOK_UP
from tests.engine.inside.rig import Inside
from tests.engine.inside.talk import THOUGHTS, TOOL_CALL, events
from tests.engine.rig import MODEL

SAY = [{"role": "user", "content": "Say anything."}]
CHAT = {"model": MODEL, "messages": SAY, "seed": 5, "max_tokens": 16}
COMPLETION = {"model": MODEL, "prompt": "A lighthouse", "seed": 5, "max_tokens": 16}
RESPONSE = {"model": MODEL, "input": "Say anything.", "seed": 5, "max_output_tokens": 16}
MESSAGE = {"model": MODEL, "messages": SAY, "temperature": 0.0, "max_tokens": 16}
FUNCTION: dict[str, Any] = LOOK_UP["function"]
CHAT_TOOLS = {"tools": [LOOK_UP], "max_tokens": 90}
BY_GRAMMAR = {"structured_outputs": {"regex": TOOL_CALL}}
RESPONSE_TOOLS = {"tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 90}
MESSAGE_TOOLS = {
    "tools": [{"name": "look_up", "input_schema": FUNCTION["parameters"], "strict": True}],
    "max_tokens": 90,
}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", CHAT),
    "chat-length": ("/chat/completions", CHAT | {"max_tokens": 1}),
    "chat-top-logprobs": ("/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    "chat-logprobs-off": ("/chat/completions", CHAT | {"logprobs": False, "top_logprobs": None}),
    "chat-token-ids": ("/chat/completions", CHAT | {"return_token_ids": True}),
    "chat-no-reasoning": ("/chat/completions", CHAT | {"include_reasoning": False}),
    "chat-n2": ("/chat/completions", CHAT | {"n": 2}),
    "chat-stop": ("/chat/completions", CHAT | {"stop": ["e", "o"]}),
    "chat-echo": ("/chat/completions", CHAT | {"echo": True, "add_generation_prompt": False}),
    "chat-prompt-logprobs": ("/chat/completions", CHAT | {"prompt_logprobs": 0}),
    "chat-tools": ("/chat/completions", CHAT | CHAT_TOOLS | BY_GRAMMAR),
    "chat-tools-required": ("/chat/completions", CHAT | CHAT_TOOLS | {"tool_choice": "required"}),
    "chat-thoughts": (
        "/chat/completions",
        CHAT | {"structured_outputs": {"regex": THOUGHTS}, "max_tokens": 60},
    ),
    "completion": ("/completions", COMPLETION),
    "completion-logprobs": ("/completions", COMPLETION | {"logprobs": 2}),
    "completion-ids": (
        "/completions",
        COMPLETION | {"prompt": [9, 8, 7], "return_token_ids": True},
    ),
    "completion-batch": ("/completions", COMPLETION | {"prompt": ["One", "Two"], "n": 2}),
    "completion-echo": ("/completions", COMPLETION | {"echo": True, "logprobs": 0}),
    "response": ("/responses", RESPONSE),
    "response-length": ("/responses", RESPONSE | {"max_output_tokens": 1}),
    "response-logprobs": (
        "/responses",
        RESPONSE | {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ),
    "response-stop": ("/responses", RESPONSE | {"stop": ["e", "o"]}),
    "response-tools": ("/responses", RESPONSE | RESPONSE_TOOLS | BY_GRAMMAR),
    "message": ("/messages", MESSAGE),
    "message-length": ("/messages", MESSAGE | {"max_tokens": 1}),
    "message-stop": ("/messages", MESSAGE | {"stop_sequences": ["e", "o"]}),
    "message-system": ("/messages", MESSAGE | {"system": "Be brief."}),
    "message-tools": ("/messages", MESSAGE | MESSAGE_TOOLS | {"tool_choice": {"type": "any"}}),
}
every_request = pytest.mark.parametrize("name", REQUESTS)

UNREPEATABLE_HEADERS = {"date", "x-request-id"}
_RANDOM_ID = re.compile(
    rb'"(id|item_id|call_id|request_id|signature)":\s*"[^"]*"|"(created|created_at|completed_at)":\s*[0-9.]+'
)


def steady(body: bytes) -> bytes:
    """The bytes without what the engine makes up anew each time."""
    return _RANDOM_ID.sub(b"*", body)


def headers_of(response: httpx.Response) -> dict[str, str]:
    """The headers that should repeat, without our two."""
    ours = {"x-model-call-id", "x-rollout-id"}
    return {k: v for k, v in response.headers.items() if k not in UNREPEATABLE_HEADERS | ours}


def ask_both(inside: Inside, route: str, body: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The engine's answer past the tag, the captured one, and the rollout."""
    rollout = inside.rollout()
    if "tools" in body:  # long enough for the prefix cache, whose hits are counted in usage
        httpx.post(f"{inside.engine.url}/v1{route}", json=body, timeout=120)
    direct = httpx.post(f"{inside.engine.url}/v1{route}", json=body, timeout=120)
    captured = rollout.post_model(route, body)
    assert captured.status_code == direct.status_code == 200, captured.text
    assert captured.headers["x-rollout-id"] == rollout.rollout_id
    assert captured.headers["x-model-call-id"]
    return direct, captured, rollout


@pytest.fixture(params=["plain", "reasoning"])
def engine_under_test(request: pytest.FixtureRequest) -> Inside:
    """The default engine, and one with a reasoning parser (which needs exact prefixes)."""
    name = "inside" if request.param == "plain" else "inside_require"
    found: Inside = request.getfixturevalue(name)
    return found


@every_request
def test_a_whole_answer_is_the_engines_own(engine_under_test: Inside, name: str) -> None:
    """Status, headers and bytes equal the direct answer; the tokens are recorded."""
    route, body = REQUESTS[name]
    direct, captured, rollout = ask_both(engine_under_test, route, body)

    assert steady(captured.content) == steady(direct.content)
    assert headers_of(captured) == headers_of(direct)
    entries = rollout.frozen_calls().values()
    assert len(entries) == len(direct.json().get("choices", [0]))
    assert all(entry["generation_token_ids"] for entry in entries)
    assert all(entry["delivered"] for entry in entries)


@every_request
def test_a_stream_is_the_engines_own(engine_under_test: Inside, name: str) -> None:
    """The same events with the same fields in the same order, and the same tokens as whole."""
    route, body = REQUESTS[name]
    if name == "chat-prompt-logprobs":
        pytest.skip("vLLM refuses prompt_logprobs above 0 in streams, and sends none for 0")
    streamed = body | {"stream": True}
    if "/completions" in route:
        streamed["stream_options"] = {"include_usage": True}
    direct, captured, rollout = ask_both(engine_under_test, route, streamed)

    assert joined(events(captured)) == joined(events(direct))
    assert captured.text.endswith("data: [DONE]\n\n") == direct.text.endswith("data: [DONE]\n\n")
    assert event_names(captured) == event_names(direct)
    assert headers_of(captured) == headers_of(direct)
    assert all(entry["delivered"] for entry in rollout.frozen_calls().values())


def event_names(response: httpx.Response) -> list[str]:
    """The stream's event lines, without repetitions."""
    names = re.findall(r"^event: (.*)$", response.text, re.MULTILINE)
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def joined(stream: list[dict[str, Any]]) -> dict[int, list[Any]]:
    """The events by choice, without random ids, neighbouring deltas of one kind made one.

    How the choices of one answer interleave is chance.
    """
    found: dict[int, list[Any]] = {}
    for payload in stream:
        for event in _parts(_without(payload)):
            events = found.setdefault(_choice_of(event), [])
            key = _delta_key(event)
            if key and events and _delta_key(events[-1]) == key:
                _add(events[-1], event)
            else:
                events.append(event)
    return found


def _choice_of(event: dict[str, Any]) -> int:
    choices = event.get("choices")
    return choices[0]["index"] if choices else -1


_TEXTS = {"delta", "content", "reasoning", "text", "thinking", "partial_json", "arguments"}
_VOLATILE = {
    *("id", "item_id", "call_id", "signature", "created", "created_at", "completed_at"),
    "sequence_number",
    "text_offset",  # counted from the start of each chunk
}


def _without(value: Any) -> Any:
    if isinstance(value, list):
        return [_without(item) for item in value]
    if isinstance(value, dict):
        return {k: _without(v) for k, v in value.items() if k not in _VOLATILE}
    return value


def _parts(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """A chunk of one choice as what it adds and what it ends; empty parts fall away.

    An engine that is hurried merges the last piece of text into the end, or sends empty chunks.
    """
    choices = payload.get("choices")
    if choices is None or len(choices) != 1:
        return [payload]
    choice = {key: value for key, value in choices[0].items() if value not in (None, "", [], {})}
    if "delta" in choice:
        choice["delta"] = {k: v for k, v in choice["delta"].items() if v not in (None, "")}
        choice = {key: value for key, value in choice.items() if value != {}}
    choice["index"] = choices[0]["index"]
    ending = {key: choice.pop(key) for key in ("finish_reason", "stop_reason") if key in choice}
    rest = {key: value for key, value in payload.items() if key != "choices"}
    added = [{**rest, "choices": [choice]}] if len(choice) > 1 else []
    return added + ([{"choices": [{"index": choice["index"], **ending}]}] if ending else [])


def _delta_key(event: dict[str, Any]) -> Any:
    """What makes two deltas neighbours; None for any other event."""
    kind = event.get("type", "")
    if kind.endswith(".delta") and isinstance(event.get("delta"), str):
        return (kind, event.get("output_index"), "logprobs" in event)
    if kind == "content_block_delta":
        return (kind, event["index"], event["delta"]["type"])
    choices = event.get("choices")
    if not choices or len(choices) != 1 or "finish_reason" in choices[0]:
        return None
    delta = choices[0].get("delta", {})
    calls = tuple(call["index"] for call in delta.get("tool_calls") or ())
    return (choices[0]["index"], calls, "role" in delta, "reasoning" in delta)


def _add(target: Any, more: Any) -> None:
    """Append one delta to its neighbour."""
    for key, value in more.items():
        if key not in target or target[key] is None:
            target[key] = value
        elif isinstance(value, dict):
            _add(target[key], value)
        elif isinstance(value, list) and key in ("choices", "tool_calls"):
            for old, new in zip(target[key], value, strict=True):
                _add(old, new)
        elif isinstance(value, list):
            target[key] = target[key] + value
        elif isinstance(value, str) and key in _TEXTS:
            target[key] += value
