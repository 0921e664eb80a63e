"""Responses: requests as conversation items, answers as output items.

The answer is complete with ``response.completed`` (or ``response.incomplete``), which repeats
all its items. Source: spec 02.1, 05; event names as vLLM 0.32 sends them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from middleware.dialects.choices import openai_error
from middleware.dialects.single import SingleAnswerContent, SingleAnswerDialect
from middleware.errors import UnsupportedParameterError
from middleware.records import response_to_output_items

_LAST_EVENTS: Final = ("response.completed", "response.incomplete")
_TEXT_DELTAS: Final = ("response.output_text.delta", "response.refusal.delta")


class ResponsesDialect(SingleAnswerDialect):
    """``POST /v1/responses``."""

    name: Final = "responses"

    def request_items(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """``instructions`` as one system item, then ``input`` (spec 02.1)."""
        items: list[dict[str, Any]] = []
        if body.get("instructions"):
            items.append({"role": "system", "content": body["instructions"]})
        given = body.get("input")
        if isinstance(given, str):
            items.append({"role": "user", "content": given})
        elif isinstance(given, list):
            items += given
        return items

    def previous_response(self, body: Mapping[str, Any]) -> str | None:
        """``previous_response_id``."""
        given = body.get("previous_response_id")
        return given if isinstance(given, str) and given else None

    def check(self, body: Mapping[str, Any]) -> None:
        """See ``Dialect.check``."""
        if body.get("background"):
            raise UnsupportedParameterError(
                "background responses cannot be captured (they go on after the answer): remove "
                "'background' and use 'stream' for long generations"
            )

    def content(self, body: Mapping[str, Any]) -> ResponsesContent:
        """See ``Dialect.content``."""
        return ResponsesContent()

    def error_body(self, status: int, code: str, message: str) -> dict[str, Any]:
        """See ``Dialect.error_body``."""
        return openai_error(status, code, message)


class ResponsesContent(SingleAnswerContent):
    """See ``middleware.dialects.base.AnswerContent``."""

    def __init__(self) -> None:
        super().__init__()
        self._whole: dict[str, Any] | None = None
        self._items: dict[int, dict[str, Any]] = {}  # finished ones by output index
        self._texts: dict[int, list[str]] = {}  # of unfinished ones

    def feed(self, payload: Mapping[str, Any]) -> None:
        """Take one event."""
        kind = payload.get("type")
        if not isinstance(kind, str):
            self.error_seen = self.error_seen or bool(payload.get("error"))
            return
        response = payload.get("response")
        if kind in ("error", "response.failed"):
            self.error_seen = True
        elif isinstance(response, dict):
            self.note_head(response)
            if kind in _LAST_EVENTS:
                self._take_whole(response)
        elif kind == "response.output_item.done" and isinstance(payload.get("item"), dict):
            self._items[_index(payload)] = payload["item"]
            self.saw_text = True
        elif kind.endswith(".delta") and payload.get("delta"):
            self.saw_text = True
            if kind in _TEXT_DELTAS and isinstance(payload["delta"], str):
                self._texts.setdefault(_index(payload), []).append(payload["delta"])

    def feed_whole(self, payload: Mapping[str, Any]) -> bool:
        """Take a whole answer."""
        if payload.get("error") or payload.get("status") == "failed":
            self.error_seen = True
        if not isinstance(payload.get("output"), list):
            return False
        self.note_head(payload)
        self._take_whole(payload)
        return True

    def _take_whole(self, response: Mapping[str, Any]) -> None:
        self._whole = dict(response)
        self.complete = True
        self.saw_text = self.saw_text or bool(response.get("output"))
        self.note_usage(response.get("usage"))

    def output_items(self, index: int) -> list[dict[str, Any]]:
        """See ``AnswerContent``; of a cut answer, what was said so far."""
        if self._whole is not None:
            return response_to_output_items(self._whole)
        items = dict(self._items)
        for position, pieces in self._texts.items():
            if position not in items:
                text = {"type": "output_text", "text": "".join(pieces)}
                items[position] = {"type": "message", "role": "assistant", "content": [text]}
        return [items[position] for position in sorted(items)]


def _index(event: Mapping[str, Any]) -> int:
    index = event.get("output_index")
    return index if isinstance(index, int) else 0
