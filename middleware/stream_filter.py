"""What a captured event stream looks like to the agent: bytes in, bytes to pass on and to hold.

Pure: no IO, no clock. Frames pass unchanged unless a member has to be hidden; from the frame that
completes the answer on (last finish reason, error, ``[DONE]``) everything is held.
"""

from __future__ import annotations

from typing import Any

from middleware.dialects.choices import ChoicesReader
from middleware.engines.base import TokenAsk
from middleware.json_edit import edit_members, loads
from middleware.outcome import Ending, Hole, Outcome, judge_stream
from middleware.sse import DONE, SSEFrame, SSEParser


class StreamFilter:
    """Feeds the reader and sorts the bytes.

    ``held`` is the tail so far; ``done_seen`` says that ``[DONE]`` has arrived.
    """

    def __init__(self, reader: ChoicesReader, ask: TokenAsk) -> None:
        self._parser = SSEParser()
        self._reader = reader
        self._ask = ask
        self._unreadable = False
        self._holding = False
        self.held = bytearray()
        self.done_seen = False

    def feed(self, chunk: bytes, *, last: bool = False) -> bytes:
        """The bytes that may go out now. ``last``: the stream ended with this chunk."""
        frames = self._parser.feed(chunk)
        if last and (rest := self._parser.flush()) is not None:
            frames.append(rest)
        ready = bytearray()
        for frame in frames:
            raw = self._seen(frame)
            if self._reader.complete or self._reader.error_seen or self.done_seen:
                self._holding = True
            (self.held if self._holding else ready).extend(raw)
        return bytes(ready)

    def judge(self, ending: Ending) -> Outcome:
        """What becomes of the call."""
        if self._unreadable and not self._reader.error_seen:
            return Hole("unparsable_answer", "a frame of the stream is no JSON object")
        return judge_stream(self._reader, ending, done_seen=self.done_seen)

    def _seen(self, frame: SSEFrame) -> bytes:
        if frame.data is None or self.done_seen:
            return frame.raw
        data = frame.data.strip()
        if data == DONE:
            self.done_seen = True
            return frame.raw
        payload = _parsed(data)
        if payload is None:
            self._unreadable = self._unreadable or bool(data)
            return frame.raw
        self._reader.feed(payload)
        if self._ask.hides_tokens and _is_empty_chunk(payload):
            return b""  # the engine sends such a chunk only because tokens were asked for
        edited = edit_members(frame.data, self._ask.hide_stream)
        return frame.raw if edited is frame.data else frame.with_data(edited)


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        payload = loads(data)
    except ValueError:
        return None
    return payload if isinstance(payload, dict) else None


def _is_empty_chunk(payload: dict[str, Any]) -> bool:
    """A chunk whose choices say nothing: no text, no role, no end."""
    choices = payload.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    return all(
        isinstance(choice, dict) and choice.get("delta") == {} and not choice.get("finish_reason")
        for choice in choices
    )
