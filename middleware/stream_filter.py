"""What a captured event stream looks like to the agent: bytes in, bytes to pass on and to hold.

Pure: no IO, no clock. Frames pass unchanged unless a member has to be hidden; from the frame that
completes the answer on (last finish reason, error, ``[DONE]``) everything is held.
"""

from __future__ import annotations

from typing import Any

from middleware.dialects.base import AnswerReader
from middleware.engines.base import TokenAsk
from middleware.json_edit import edit_members, loads, set_members
from middleware.outcome import Ending, Hole, Outcome, judge_stream
from middleware.sse import DONE, SSEFrame, SSEParser


class StreamFilter:
    """Feeds the reader and sorts the bytes.

    ``done_seen`` says that ``[DONE]`` has arrived.
    """

    def __init__(self, reader: AnswerReader, ask: TokenAsk) -> None:
        self._parser = SSEParser()
        self._reader = reader
        self._ask = ask
        self._unreadable = False
        self._holding = False
        self._tail: list[SSEFrame | bytes] = []
        self.done_seen = False

    @property
    def held(self) -> bytes:
        """The tail so far."""
        return b"".join(part if isinstance(part, bytes) else part.raw for part in self._tail)

    def feed(self, chunk: bytes, *, last: bool = False) -> bytes:
        """The bytes that may go out now. ``last``: the stream ended with this chunk."""
        ready = bytearray()
        for frame in self._parser.feed(chunk):
            self._pass(self._seen(frame), ready)
        if last and (rest := self._parser.flush()) is not None:
            self._pass(self._seen_rest(rest), ready)
        return bytes(ready)

    def _pass(self, frame: SSEFrame | bytes, ready: bytearray) -> None:
        if self._reader.complete or self._reader.error_seen or self.done_seen:
            self._holding = True
        if self._holding:
            self._tail.append(frame)
        else:
            ready.extend(frame if isinstance(frame, bytes) else frame.raw)

    def judge(self, ending: Ending) -> Outcome:
        """What becomes of the call."""
        if self._unreadable and not self._reader.error_seen:
            return Hole("unparsable_answer", "a frame of the stream is no JSON object")
        return judge_stream(self._reader, ending, done_seen=self.done_seen)

    def _seen(self, frame: SSEFrame) -> SSEFrame | bytes:
        """Read a frame; returns it as the agent shall see it."""
        if self.done_seen:
            return frame
        self._unreadable = self._unreadable or frame.stray
        if frame.data is None:
            return frame
        data = frame.data.strip()
        if data == DONE:
            self.done_seen = True
            return frame
        payload = _parsed(data)
        if payload is None:
            self._unreadable = self._unreadable or bool(data)
            return frame
        self._reader.feed(payload)
        return self._for_agent(frame, frame.data, payload)

    def _seen_rest(self, rest: SSEFrame) -> SSEFrame | bytes:
        """The stream's last block lacks its empty line: readers never see one that is cut."""
        data = (rest.data or b"").strip()
        if rest.stray or data == DONE or _parsed(data) is not None:
            return self._seen(rest)
        return rest

    def _for_agent(self, frame: SSEFrame, data: bytes, payload: dict[str, Any]) -> SSEFrame | bytes:
        if self._ask.hides_tokens and _is_empty_chunk(payload):
            return b""  # the engine sends such a chunk only because tokens were asked for
        if self._ask.hides_usage and payload.get("choices") == [] and "usage" in payload:
            self._move_to_last(payload)
            return b""
        edited = edit_members(data, self._ask.hide_stream)
        return frame if edited is data else SSEFrame(frame.with_data(edited), edited, frame.event)

    def _move_to_last(self, usage_chunk: dict[str, Any]) -> None:
        """vLLM puts its fingerprint on the last chunk: without the usage chunk, the one before."""
        value = usage_chunk.get("system_fingerprint")
        at = next((i for i in reversed(range(len(self._tail))) if _has_data(self._tail[i])), None)
        if value is None or at is None:
            return
        last = self._tail[at]
        assert isinstance(last, SSEFrame)
        assert last.data is not None
        if b'"system_fingerprint"' not in last.data:
            self._tail[at] = last.with_data(set_members(last.data, {"system_fingerprint": value}))


def _has_data(part: SSEFrame | bytes) -> bool:
    return isinstance(part, SSEFrame) and part.data is not None


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
