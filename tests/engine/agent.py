"""A scripted chat agent on the official ``openai`` client, and what it remembers of each turn.

It only knows a base URL. Every turn keeps the body it sent, so that a test can ask the engine the
same thing directly and compare.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import openai

from tests.engine.rig import MODEL, Engine

LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up the weather of a place.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "enum": ["Lisbon", "Porto"]},
                "days": {"type": "integer", "enum": [1, 2, 3]},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class Turn:
    """One answered request: the body (without ``stream``), its call id, and the answer."""

    body: dict[str, Any]
    call_id: str
    message: dict[str, Any]
    finish_reason: str


@dataclass
class ChatAgent:
    """Plays a conversation turn by turn, streamed or not."""

    client: openai.OpenAI
    stream: bool
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def body(self, **options: Any) -> dict[str, Any]:
        """The request that ``ask`` would send now."""
        tools: dict[str, Any] = {"tools": self.tools, "tool_choice": "none"} if self.tools else {}
        sampling = {"temperature": 1.0, "seed": 11, "max_tokens": 12}
        # A copy: later turns append to the list.
        messages = list(self.messages)
        return {"model": MODEL, "messages": messages, **tools, **sampling, **options}

    def say(self, text: str, **options: Any) -> Turn:
        """One user message, answered."""
        self.messages.append({"role": "user", "content": text})
        return self.ask(**options)

    def ask(self, **options: Any) -> Turn:
        """Send the conversation as it stands and append the answer to it."""
        body = self.body(**options)
        request = to_openai(body)
        if self.stream:
            headers, message, finish_reason = self._streamed(request)
        else:
            headers, message, finish_reason = self._whole(request)
        turn = Turn(body, headers["x-model-call-id"], message, finish_reason)
        self.messages.append(message)
        self.turns.append(turn)
        return turn

    def give_tool_results(self, turn: Turn, result: Any) -> None:
        """Answer every tool call of a turn."""
        for call in turn.message["tool_calls"]:
            self.messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)}
            )

    def _whole(self, request: dict[str, Any]) -> tuple[Any, dict[str, Any], str]:
        raw = self.client.chat.completions.with_raw_response.create(**request)
        choice = raw.parse().choices[0]
        message: dict[str, Any] = {"role": "assistant", "content": choice.message.content}
        if choice.message.tool_calls:
            message["tool_calls"] = [
                call.model_dump(exclude_unset=True) for call in choice.message.tool_calls
            ]
        return raw.headers, message, choice.finish_reason

    def _streamed(self, request: dict[str, Any]) -> tuple[Any, dict[str, Any], str]:
        raw = self.client.chat.completions.with_raw_response.create(**request, stream=True)
        content, finish_reason = "", ""
        calls: dict[int, dict[str, Any]] = {}
        with raw.parse() as chunks:
            for chunk in chunks:
                for choice in chunk.choices:
                    content += choice.delta.content or ""
                    finish_reason = choice.finish_reason or finish_reason
                    for delta in choice.delta.tool_calls or []:
                        _add_tool_delta(calls, delta)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        return raw.headers, message, finish_reason


def _add_tool_delta(calls: dict[int, dict[str, Any]], delta: Any) -> None:
    empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    call = calls.setdefault(delta.index, empty)
    call["id"] = delta.id or call["id"]
    call["function"]["name"] += delta.function.name or ""
    call["function"]["arguments"] += delta.function.arguments or ""


# vLLM's own parameters, which the official client passes in ``extra_body``.
_EXTENSIONS = ("allowed_token_ids", "min_tokens")


def to_openai(body: dict[str, Any]) -> dict[str, Any]:
    """The official client's keyword arguments for a request body."""
    extra = {key: value for key, value in body.items() if key in _EXTENSIONS}
    known = {key: value for key, value in body.items() if key not in _EXTENSIONS}
    return {**known, "extra_body": extra} if extra else known


def tool_call_options(engine: Engine, agent: ChatAgent) -> dict[str, Any]:
    """Options with which the random model calls a tool before it runs out of tokens.

    The grammar allows any white space, and a random model loves it; so the seed is looked for by
    asking the engine directly, which the rollout does not see.
    """
    options: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    options["max_tokens"] = 150
    for seed in range(1, 60):
        answer = engine.post("/v1/chat/completions", agent.body(**options, seed=seed))
        if answer["choices"][0]["finish_reason"] == "tool_calls":
            return {**options, "seed": seed}
    raise AssertionError("no seed below 60 makes the model call a tool")
