"""Agents that talk to an engine in any dialect, streamed or not, with plain HTTP.

They keep the history as their dialect has it, and beside it, in neutral form, the messages that
are new since the last answer: that is what a continuation's prompt must add.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.engine.inside.rig import InsideRollout
from tests.engine.rig import MODEL

PLACES: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string", "enum": ["Lisbon", "Porto"]}},
    "required": ["place"],
    "additionalProperties": False,
}
# A random model calls a tool when a grammar makes it.
TOOL_CALL = (
    r'<tool_call>\n\{"name": "look_up", "arguments": \{"place": "(Lisbon|Porto)"\}\}\n</tool_call>'
)
THOUGHTS = r"<think>[a-z ]{4,12}</think>[a-z ]{4,12}"


@dataclass(frozen=True)
class Asked:
    """One answered request: its call id, what was new since the last shown answer, the answer."""

    call_id: str
    new: list[dict[str, str]]
    items: list[dict[str, Any]]
    tool_ids: list[str]


@dataclass
class Talk:
    """One conversation. ``options`` of ``ask`` are chat's names; what a dialect lacks is left out.

    ``history`` is what the next request will send.
    """

    rollout: InsideRollout
    dialect: str
    kind: str = "own"
    stream: bool = False
    system: str = ""
    tools: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    new: list[dict[str, str]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    def user(self, text: str) -> Talk:
        """Append a user message."""
        self.history.append({"role": "user", "content": text})
        self.new.append({"role": "user", "content": text})
        return self

    def give_results(self, text: str) -> Talk:
        """Answer the last answer's tool calls."""
        for call_id in self.asked[-1].tool_ids:
            self.history.append(_tool_result(self.dialect, call_id, text))
            self.new.append({"role": "tool", "content": text})
        return self

    def body(self, **options: Any) -> dict[str, Any]:
        """The request that ``ask`` would send."""
        body = _BODIES[self.dialect](self, options)
        if self.kind != "own":
            body["chat_template_kwargs"] = {"kind": self.kind}
        if self.stream:
            body["stream"] = True
        return {"model": MODEL, **body}

    def ask(self, **options: Any) -> Asked:
        """Send the conversation and take the answer into it."""
        response = self.rollout.post_model(
            ROUTES[self.dialect], self.body(**options), headers=self.headers
        )
        assert response.status_code == 200, response.text
        items = answer_items(self.dialect, response)
        self.history += items
        asked = Asked(
            response.headers["x-model-call-id"], [*self.new], items, _tool_ids(self.dialect, items)
        )
        if items:
            self.new = []
        # else: an answer without any item (Responses) leaves no trace in the conversation, which
        # goes on from the answer before
        self.asked.append(asked)
        return asked

    @property
    def chain(self) -> list[Asked]:
        """The calls that the conversation as it stands went through."""
        return [asked for asked in self.asked[:-1] if asked.items] + self.asked[-1:]


ROUTES = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}


def _chat_body(talk: Talk, options: dict[str, Any]) -> dict[str, Any]:
    head = [{"role": "system", "content": talk.system}] if talk.system else []
    body: dict[str, Any] = {"messages": head + talk.history, "max_tokens": 12, **options}
    if talk.tools:
        function = {"name": "look_up", "parameters": PLACES}
        body["tools"] = [{"type": "function", "function": function}]
    return body


def _responses_body(talk: Talk, options: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"input": talk.history, "max_output_tokens": 12, **options}
    if "max_tokens" in body:
        body["max_output_tokens"] = body.pop("max_tokens")
    if talk.system:
        body["instructions"] = talk.system
    if talk.tools:
        body["tools"] = [{"type": "function", "name": "look_up", "parameters": PLACES}]
    return body


def _messages_body(talk: Talk, options: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": talk.history, "max_tokens": 12}
    body |= {key: value for key, value in options.items() if key in ("max_tokens", "temperature")}
    if "stop" in options:
        body["stop_sequences"] = options["stop"]
    if talk.system:
        body["system"] = talk.system
    if talk.tools:
        body["tools"] = [{"name": "look_up", "input_schema": PLACES}]
    return body


_BODIES: dict[str, Callable[[Talk, dict[str, Any]], dict[str, Any]]] = {
    "chat": _chat_body,
    "responses": _responses_body,
    "messages": _messages_body,
}


def _tool_result(dialect: str, call_id: str, text: str) -> dict[str, Any]:
    if dialect == "chat":
        return {"role": "tool", "tool_call_id": call_id, "content": text}
    if dialect == "responses":
        return {"type": "function_call_output", "call_id": call_id, "output": text}
    block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
    return {"role": "user", "content": [block]}


def _tool_ids(dialect: str, items: list[dict[str, Any]]) -> list[str]:
    if dialect == "chat":
        return [call["id"] for item in items for call in item.get("tool_calls") or []]
    if dialect == "responses":
        return [item["call_id"] for item in items if item["type"] == "function_call"]
    return [
        block["id"] for item in items for block in item["content"] if block["type"] == "tool_use"
    ]


def answer_items(dialect: str, response: httpx.Response) -> list[dict[str, Any]]:
    """What the dialect's agent appends to its history."""
    streamed = response.headers["content-type"].startswith("text/event-stream")
    if dialect == "chat":
        return [_chat_message(events(response)) if streamed else _whole_message(response)]
    if dialect == "responses":
        whole = events(response)[-1]["response"] if streamed else response.json()
        return list(whole["output"])
    content = _blocks(events(response)) if streamed else response.json()["content"]
    return [{"role": "assistant", "content": content}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The payloads of an event stream, without ``[DONE]``."""
    return list(_events(response.text))


def _events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _whole_message(response: httpx.Response) -> dict[str, Any]:
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return {key: message[key] for key in ("role", "content", "tool_calls") if key in message}


def _chat_message(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    text = ""
    calls: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls") or []:
            new = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            call = calls.setdefault(delta["index"], new)
            call["id"] += delta.get("id") or ""
            for key in ("name", "arguments"):
                call["function"][key] += delta["function"].get(key) or ""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def _blocks(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    blocks: dict[int, dict[str, Any]] = {}
    partial: dict[int, str] = {}
    for event in stream:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, index = event["delta"], event["index"]
            if delta["type"] == "text_delta":
                blocks[index]["text"] += delta["text"]
            elif delta["type"] == "input_json_delta":
                partial[index] = partial.get(index, "") + delta["partial_json"]
    for index, text in partial.items():
        blocks[index]["input"] = json.loads(text)
    # An agent that got no block keeps an empty one.
    return list(blocks.values()) or [{"type": "text", "text": ""}]
