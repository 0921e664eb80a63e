"""Messages: requests as conversation items, answers as content blocks.

In a stream the answer is complete with ``message_delta``, which has the stop reason. Source:
spec 02.1, 05; the events of the Messages API as vLLM 0.32 sends them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from middleware.dialects.single import SingleAnswerContent, SingleAnswerDialect
from middleware.json_edit import loads
from middleware.records import response_to_output_items

_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_PIECE_OF: Final = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
    "signature_delta": "signature",
}


class MessagesDialect(SingleAnswerDialect):
    """``POST /v1/messages``."""

    name: Final = "messages"

    def request_items(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """``system`` as one system item, then ``messages`` (spec 02.1)."""
        items: list[dict[str, Any]] = []
        if body.get("system"):
            items.append({"role": "system", "content": body["system"]})
        messages = body.get("messages")
        if isinstance(messages, list):
            items += messages
        return items

    def previous_response(self, body: Mapping[str, Any]) -> None:
        """Messages have no such reference."""

    def check(self, body: Mapping[str, Any]) -> None:
        """Everything of this dialect can be captured."""

    def content(self, body: Mapping[str, Any]) -> MessagesContent:
        """See ``Dialect.content``."""
        return MessagesContent()

    def error_body(self, status: int, code: str, message: str) -> dict[str, Any]:
        """The Messages error shape, with our machine-readable ``code``."""
        kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


class _Block:
    __slots__ = ("pieces", "start")

    def __init__(self, start: dict[str, Any]) -> None:
        self.start = start
        self.pieces: dict[str, list[str]] = {}

    def content(self) -> dict[str, Any]:
        """The block as a whole answer would show it."""
        block = dict(self.start)
        for name, pieces in self.pieces.items():
            text = "".join(pieces)
            if name == "partial_json":
                block["input"] = _parsed(text)
            else:
                block[name] = (block.get(name) or "") + text
        return block


class MessagesContent(SingleAnswerContent):
    """See ``middleware.dialects.base.AnswerContent``."""

    def __init__(self) -> None:
        super().__init__()
        self._whole: dict[str, Any] | None = None
        self._blocks: dict[int, _Block] = {}

    def feed(self, payload: Mapping[str, Any]) -> None:
        """Take one event."""
        kind = payload.get("type")
        if kind == "content_block_delta":
            self._add_delta(payload)
        elif kind == "content_block_start" and isinstance(payload.get("content_block"), dict):
            self._start_block(payload)
        elif kind == "message_start" and isinstance(payload.get("message"), dict):
            self.note_head(payload["message"])
        elif kind == "message_delta":
            self.note_usage(payload.get("usage"))
            self.complete = True
        elif kind == "error" or payload.get("error"):
            self.error_seen = True

    def feed_whole(self, payload: Mapping[str, Any]) -> bool:
        """Take a whole answer."""
        if payload.get("type") == "error" or payload.get("error"):
            self.error_seen = True
        if not isinstance(payload.get("content"), list):
            return False
        self.note_head(payload)
        self.note_usage(payload.get("usage"))
        self._whole = dict(payload)
        self.complete = True
        self.saw_text = any(_says_something(block) for block in payload["content"])
        return True

    def _start_block(self, event: Mapping[str, Any]) -> None:
        block = event["content_block"]
        self._blocks[_index(event)] = _Block(block)
        self.saw_text = self.saw_text or _says_something(block)

    def _add_delta(self, event: Mapping[str, Any]) -> None:
        delta = event.get("delta")
        block = self._blocks.get(_index(event))
        if not isinstance(delta, dict) or block is None:
            return
        name = _PIECE_OF.get(delta.get("type", ""))
        piece = delta.get(name) if name else None
        if name and isinstance(piece, str) and piece:
            block.pieces.setdefault(name, []).append(piece)
            self.saw_text = self.saw_text or name != "signature"

    def output_items(self, index: int) -> list[dict[str, Any]]:
        """See ``AnswerContent``."""
        blocks = [block.content() for _, block in sorted(self._blocks.items())]
        message = {"type": "message", "role": "assistant", "content": blocks}
        return response_to_output_items(self._whole if self._whole is not None else message)


def _says_something(block: Any) -> bool:
    if not isinstance(block, dict):
        return bool(block)
    return block.get("type") == "tool_use" or bool(block.get("text") or block.get("thinking"))


def _index(event: Mapping[str, Any]) -> int:
    index = event.get("index")
    return index if isinstance(index, int) else 0


def _parsed(text: str) -> Any:
    """A tool's input as clients read it; what is no JSON (a cut call) stays text."""
    if not text.strip():
        return {}
    try:
        return loads(text.encode("utf-8", "surrogatepass"))
    except ValueError:
        return text
