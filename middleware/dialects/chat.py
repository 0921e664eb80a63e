"""Chat Completions: requests as conversation items, answers as assistant messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from middleware.dialects.choices import ChoicesReader, openai_error
from middleware.dialects.choices_content import ChoicesContent, ContentAssembler
from middleware.engines.base import EngineProfile
from middleware.errors import InvalidInputError, UnsupportedParameterError
from middleware.records import response_to_output_items

_TEXT_FIELDS: Final = ("content", "reasoning", "reasoning_content", "refusal")


class ChatDialect:
    """``POST /v1/chat/completions``."""

    name: Final = "chat"

    def request_items(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """``messages`` as sent (spec 02.1)."""
        messages = body.get("messages")
        return messages if isinstance(messages, list) else []

    def num_choices(self, body: Mapping[str, Any]) -> int:
        """``n``, default 1."""
        return choice_count(body)

    def previous_response(self, body: Mapping[str, Any]) -> None:
        """Chat has no such reference."""

    def choices_per_prompt(self, body: Mapping[str, Any]) -> int:
        """All of them: there is one prompt."""
        return choice_count(body)

    def generates(self, body: Mapping[str, Any]) -> bool:
        """Always."""
        return True

    def check(self, body: Mapping[str, Any]) -> None:
        """See ``Dialect.check``."""
        refuse_uncapturable(body)

    def reader(self, body: Mapping[str, Any], profile: EngineProfile) -> ChoicesReader:
        """See ``Dialect.reader``."""
        num = self.num_choices(body)
        return ChoicesReader(
            self.name,
            profile,
            _ChatContent,
            num_choices=num,
            choices_per_prompt=num,
            echo=body.get("echo") is True,
        )

    def content(self, body: Mapping[str, Any]) -> ChoicesContent:
        """See ``Dialect.content``."""
        return ChoicesContent(_ChatContent, num_choices=self.num_choices(body))

    def error_body(self, status: int, code: str, message: str) -> dict[str, Any]:
        """See ``Dialect.error_body``."""
        return openai_error(status, code, message)


def choice_count(body: Mapping[str, Any]) -> int:
    """``n`` of a request; what is no positive integer is left for the engine to refuse."""
    n = body.get("n")
    if isinstance(n, str) and n.isdecimal() and len(n) < 10:
        n = int(n)  # engines that validate leniently take it as a number
    return int(n) if isinstance(n, (int, float)) and not isinstance(n, bool) and n > 0 else 1


def refuse_uncapturable(body: Mapping[str, Any]) -> None:
    """Beam search reports tokens of beams that were never sampled.

    Raises:
        UnsupportedParameterError: ``use_beam_search``, or ``best_of`` above 1.
        InvalidInputError: ``n`` is so large that its ids could not be named.
    """
    if body.get("use_beam_search"):
        raise UnsupportedParameterError(
            "use_beam_search cannot be captured (beams are not samples): remove it"
        )
    best_of = body.get("best_of")
    if best_of not in (None, 1):
        raise UnsupportedParameterError(
            "best_of cannot be captured (hidden samples are lost): use n instead"
        )
    if choice_count(body) > 10_000:
        raise InvalidInputError("n above 10000 is not supported on captured paths")


class _ChatContent(ContentAssembler):
    """One choice's message, taken whole or assembled from deltas."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] | None = None
        self._texts: dict[str, list[str]] = {}
        self._tool_calls: dict[int, dict[str, Any]] = {}

    def add(self, choice: Mapping[str, Any]) -> bool:
        message = choice.get("message")
        if isinstance(message, dict):
            self._whole = message
            return _is_visible(message)
        delta = choice.get("delta")
        if not isinstance(delta, dict) or not delta:
            return False
        for name in _TEXT_FIELDS:
            piece = delta.get(name)
            if isinstance(piece, str) and piece:
                self._texts.setdefault(name, []).append(piece)
        calls = delta.get("tool_calls")
        for position, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                self._add_tool_call(call, position)
        return _is_visible(delta)

    def _add_tool_call(self, call: Mapping[str, Any], position: int) -> None:
        index = call.get("index")
        index = index if isinstance(index, int) else position
        state = self._tool_calls.setdefault(index, {"id": "", "name": [], "arguments": []})
        if isinstance(call.get("id"), str) and call["id"]:
            state["id"] = call["id"]
        function = call.get("function")
        if isinstance(function, dict):
            for field in ("name", "arguments"):
                piece = function.get(field)
                if isinstance(piece, str):
                    state[field].append(piece)

    def output_items(self) -> list[dict[str, Any]]:
        message = self._whole if self._whole is not None else self._assembled()
        return response_to_output_items({"choices": [{"message": message}]})

    def _assembled(self) -> dict[str, Any]:
        text = self._texts.get("content")
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(text) if text else None,
        }
        for name in _TEXT_FIELDS[1:]:
            if name in self._texts:
                message[name] = "".join(self._texts[name])
        if self._tool_calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {
                        "name": "".join(call["name"]),
                        "arguments": "".join(call["arguments"]),
                    },
                }
                for _, call in sorted(self._tool_calls.items())
            ]
        return message


def _is_visible(message: Mapping[str, Any]) -> bool:
    """Any text counts, also in fields that are not known here."""
    return bool(
        message.get("tool_calls")
        or message.get("function_call")
        or any(text for name, text in message.items() if isinstance(text, str) and name != "role")
    )
