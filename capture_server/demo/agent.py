"""The demo's agent: a plain HTTP client that knows nothing of capture.

It has one tool, streams when told to, and repeats a request whose answer it lost, as real
harnesses do: with the identical body and no mark.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Look up today's weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Oslo", "Lima", "Kyoto"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 7},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]


@dataclass
class Turn:
    """What the agent saw of one model call."""

    kind: str
    message: dict[str, Any]
    response_id: str
    model_call_id: str


@dataclass
class DemoAgent:
    """Talks to an OpenAI-style base URL; ``messages`` is its whole memory."""

    http: httpx.AsyncClient
    base_url: str
    model: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    async def say(self, text: str, *, seed: int, kind: str = "answer", **options: Any) -> Turn:
        """A user message and the model's whole answer."""
        self.messages.append({"role": "user", "content": text})
        return await self._call(kind, seed=seed, **options)

    async def report_weather(self, call: dict[str, Any], *, seed: int) -> Turn:
        """Run the tool that the model called, hand its result over, stream the answer."""
        arguments = json.loads(call["function"]["arguments"])
        result = {"city": arguments["city"], "forecast": ["sunny"] * arguments["days"]}
        self.messages.append(
            {"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)}
        )
        return await self._stream("streamed answer", seed=seed)

    async def say_over_a_bad_line(self, text: str, *, lost_seed: int, seed: int) -> Turn:
        """A streamed answer breaks off after its first text; the agent asks again."""
        self.messages.append({"role": "user", "content": text})
        await self._lose_stream(seed=lost_seed)
        return await self._stream("streamed answer (retry)", seed=seed)

    def _body(self, **options: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": self.messages,
            "tools": TOOLS,
            "max_tokens": 48,
            **options,
        }

    async def _call(self, kind: str, **options: Any) -> Turn:
        response = await self.http.post(
            f"{self.base_url}/chat/completions", json=self._body(**options)
        )
        response.raise_for_status()
        answer = response.json()
        message = {
            key: value
            for key, value in answer["choices"][0]["message"].items()
            if key in ("role", "content", "tool_calls") and value is not None
        }
        return self._heard(kind, message, answer["id"], response)

    async def _stream(self, kind: str, **options: Any) -> Turn:
        text, response_id = [], ""
        body = self._body(stream=True, tool_choice="none", **options)
        url = f"{self.base_url}/chat/completions"
        async with self.http.stream("POST", url, json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    break  # as the official clients do
                if line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    response_id = chunk["id"]
                    text += [c["delta"].get("content") or "" for c in chunk["choices"]]
        message = {"role": "assistant", "content": "".join(text)}
        return self._heard(kind, message, response_id, response)

    async def _lose_stream(self, **options: Any) -> None:
        body = self._body(stream=True, tool_choice="none", **options)
        url = f"{self.base_url}/chat/completions"
        async with self.http.stream("POST", url, json=body) as response:
            async for line in response.aiter_lines():
                if '"content":"' in line and '"content":""' not in line:
                    return  # leaving the block closes the connection

    def _heard(
        self, kind: str, message: dict[str, Any], response_id: str, response: httpx.Response
    ) -> Turn:
        self.messages.append(message)
        turn = Turn(kind, message, response_id, response.headers["x-model-call-id"])
        self.turns.append(turn)
        return turn
