"""Hermes-style tool calls in generated text: ``<tool_call>{"name", "arguments"}</tool_call>``.

Invariant: a stream's argument pieces, joined, are the raw text of the arguments value, while the
whole-answer parser writes the parsed value again; vLLM differs between its two modes in the same
way. Text after the first call is dropped by both.
"""

from __future__ import annotations

import json
import re
from typing import Any
from uuid import uuid4

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALLS = re.compile(rf"{_OPEN}(.*?){_CLOSE}|{_OPEN}(.*)", re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*(?=\S)')


def new_call_id() -> str:
    """``chatcmpl-tool-`` and 16 hex digits."""
    return f"chatcmpl-tool-{uuid4().hex[:16]}"


def parse_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Content before the first call, and the calls; all content when a call cannot be read."""
    at = text.find(_OPEN)
    if at < 0:
        return text, []
    calls: list[dict[str, Any]] = []
    for match in _CALLS.finditer(text):
        function = _read_function(match[1] or match[2] or "")
        if function is None:
            return text, []
        calls.append({"id": new_call_id(), "type": "function", "function": function})
    return text[:at], calls


def _read_function(text: str) -> dict[str, str] | None:
    try:
        call = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    if "arguments" not in call:
        return None
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return {"name": call["name"], "arguments": arguments}


class ToolCallStream:
    """Turns text deltas into chat deltas while they come."""

    def __init__(self) -> None:
        self._index = -1
        self._text = ""  # not yet decided on: content that may be a marker, or the current call
        self._in_call = False
        self._name_sent = False
        self._arguments: _ValueScanner | None = None
        self._arguments_read = 0

    @property
    def any_call(self) -> bool:
        """Whether a call has been announced to the client."""
        return self._index >= 0

    def feed(self, text: str, *, final: bool = False) -> dict[str, Any]:
        """The delta for ``text``: ``{}``, ``{"content"}`` or ``{"content", "tool_calls"}``.

        ``final`` gives up waiting: held text that might have begun a marker becomes content.
        """
        self._text += text
        content = ""
        calls: list[dict[str, Any]] = []
        moved = True
        while moved:
            if self._in_call:
                self._read_call(calls)
                moved = self._leave_call()
            else:
                piece, moved = self._read_content(final=final)
                content += piece
        if calls:
            return {"content": content or None, "tool_calls": _merged(calls)}
        return {"content": content} if content else {}

    def _read_content(self, *, final: bool) -> tuple[str, bool]:
        at = self._text.find(_OPEN)
        found = at >= 0
        if not found:
            at = len(self._text) if final else len(self._text) - held_overlap(self._text, _OPEN)
        piece = "" if self.any_call else self._text[:at]
        self._text = self._text[at + len(_OPEN) :] if found else self._text[at:]
        self._in_call = found
        return piece, found

    def _read_call(self, calls: list[dict[str, Any]]) -> None:
        if not self._name_sent:
            match = _NAME.search(self._text)
            if match is None:
                return
            self._name_sent = True
            self._index += 1
            name = _unescaped(match[1])
            head = {"id": new_call_id(), "type": "function", "index": self._index}
            calls.append({**head, "function": {"name": name}})
        if self._arguments is None:
            match = _ARGUMENTS.search(self._text)
            if match is None:
                return
            self._arguments = _ValueScanner()
            self._arguments_read = match.end()
        piece = self._arguments.feed(self._text[self._arguments_read :])
        self._arguments_read = len(self._text)
        if piece:
            calls.append({"index": self._index, "function": {"arguments": piece}})

    def _leave_call(self) -> bool:
        at = self._text.find(_CLOSE)
        if at < 0:
            return False
        self._text = self._text[at + len(_CLOSE) :]
        self._in_call = self._name_sent = False
        self._arguments = None
        return True


class _ValueScanner:
    """Passes on the text of one JSON value and stops where it ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._done = False

    def feed(self, text: str) -> str:
        """The part of ``text`` that belongs to the value."""
        for at, char in enumerate(text):
            if self._done:
                return text[:at]
            if not self._takes(char):
                self._done = True
                return text[:at]
        return text

    def _takes(self, char: str) -> bool:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            self._done = not self._in_string and self._depth == 0
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
            self._done = self._depth == 0
        elif self._depth == 0 and (char in "}]," or char.isspace()):
            return False  # a bare number or word ends where its surroundings go on
        return True


def _unescaped(name: str) -> str:
    try:
        return str(json.loads(f'"{name}"', strict=False))
    except json.JSONDecodeError:
        return name  # a model may write an escape that JSON does not know


def held_overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that begins ``marker``."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def _merged(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per call: a name and its first argument piece may come with one token."""
    merged: list[dict[str, Any]] = []
    for call in calls:
        if merged and merged[-1]["index"] == call["index"]:
            merged[-1]["function"] = {**merged[-1]["function"], **call["function"]}
        else:
            merged.append(call)
    return merged
