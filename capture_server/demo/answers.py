"""From generated text to a chat message: content, reasoning and tool calls, whole or in deltas.

Invariant: the deltas of a stream, joined, are the whole answer's parts (tool arguments excepted:
see ``tool_calls``). Which tokens carried which text is not its business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from capture_server.demo.tool_calls import ToolCallStream, held_overlap, parse_tool_calls

_THINK_START, _THINK_END = "<think>", "</think>"

ToolMode = Literal["off", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the text of an answer is to be read."""

    thinking: bool
    """The text begins inside a think block."""
    tools: ToolMode

    @property
    def reads_markers(self) -> bool:
        """Whether special tokens must stay visible in the text."""
        return self.thinking or self.tools != "off"

    def finish_reason(self, reason: str | None, *, any_call: bool) -> str | None:
        """``tool_calls`` for a call that came to its end, except under a named choice."""
        if reason == "stop" and any_call and self.tools != "named":
            return "tool_calls"
        return reason

    def message(self, text: str) -> dict[str, Any]:
        """The whole ``message`` of a choice."""
        reasoning: str | None = None
        content: str | None = text
        if self.thinking:
            before, _, after = text.partition(_THINK_END)
            reasoning = before.removeprefix(_THINK_START) or None
            content = after or None
        calls: list[dict[str, Any]] = []
        if self.tools != "off":
            content, calls = parse_tool_calls(content or "")
            if self.thinking or calls:
                content = content or None
            if calls and self.tools != "auto":
                content = ""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
        if calls:
            message["tool_calls"] = calls
        return message | {"reasoning": reasoning}


class AnswerStream:
    """The same, piece by piece."""

    def __init__(self, form: AnswerForm) -> None:
        self._thinking = form.thinking
        self._tools = ToolCallStream() if form.tools != "off" else None
        self._held = ""
        self._began = False
        self.num_reasoning_chunks = 0

    @property
    def any_call(self) -> bool:
        """Whether a tool call was announced."""
        return self._tools is not None and self._tools.any_call

    def delta(self, text: str, *, final: bool) -> dict[str, Any]:
        """The ``delta`` object for newly released text; ``{}`` when it shows nothing."""
        reasoning = ""
        if self._thinking:
            reasoning, text = self._split(text, final=final)
        delta: dict[str, Any] = {}
        if reasoning:
            self.num_reasoning_chunks += 1
            delta["reasoning"] = reasoning
        if self._tools is not None:
            return delta | self._tools.feed(text, final=final)
        return delta | ({"content": text} if text else {})

    def _split(self, text: str, *, final: bool) -> tuple[str, str]:
        """(reasoning, content) out of text that is inside the think block, or leaves it."""
        self._held += text
        if not self._began and len(self._held) >= len(_THINK_START):
            self._held = self._held.removeprefix(_THINK_START)
            self._began = True
        reasoning, marker, content = self._held.partition(_THINK_END)
        if marker:
            self._thinking = False
            self._held = ""
            return reasoning, content
        keep = 0 if final else held_overlap(self._held, _THINK_END)
        if not final and not self._began and _THINK_START.startswith(self._held):
            keep = len(self._held)
        reasoning = self._held[: len(self._held) - keep]
        self._held = self._held[len(reasoning) :]
        self._began = self._began or bool(reasoning)
        return reasoning, content
