"""Incremental server-sent-events parser that keeps the bytes.

Invariant: the concatenation of the ``raw`` of all frames (``feed`` then ``flush``) is exactly
what was fed, for any chunking. Frames are what the event-stream format calls events, plus
comment-only blocks; what a frame means is the dialect's business.

Source: WHATWG HTML, "Server-sent events" (line ends, BOM, comments, field syntax).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_EOL: Final = re.compile(rb"\r\n|\n|\r")
# An end of line followed by an empty line. "\r" only counts alone: "\r\n" is one line end.
_FRAME_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_BOM: Final = b"\xef\xbb\xbf"
DONE: Final = b"[DONE]"
_OTHER_FIELDS: Final = frozenset((b"", b"id", b"retry"))  # an empty name is a comment


@dataclass(frozen=True, slots=True)
class SSEFrame:
    """One block of an event stream.

    ``data`` is the joined value of its ``data`` fields, None when it has none (comments,
    keep-alives, a lone ``event:``). ``stray``: it has a line that is no field of the format, which
    readers ignore, but which may be text all the same.
    """

    raw: bytes
    data: bytes | None = None
    event: str = ""
    stray: bool = False

    def with_data(self, data: bytes) -> bytes:
        """The frame's bytes with its data replaced (every other line as it was)."""
        if self.data is None:
            return self.raw
        out: list[bytes] = []
        written = False
        for line, end in _split_lines(self.raw):
            name, _, value = line.removeprefix(_BOM).partition(b":")
            if name != b"data":
                out += (line, end)
            elif not written:
                space = b" " if value.startswith(b" ") or not value else b""
                field = line[: len(line) - len(value)] + space
                # A line end inside the data ends a data line: each line is a field of its own.
                out += (end.join(field + piece for piece in data.split(b"\n")), end)
                written = True
        return b"".join(out)


class SSEParser:
    """Cuts a byte stream into frames; linear in the bytes fed, whatever the chunking."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0  # no frame end starts before this offset
        self._at_start = True

    def feed(self, chunk: bytes) -> list[SSEFrame]:
        """The frames that this chunk completed."""
        self._buffer += chunk
        frames: list[SSEFrame] = []
        start = 0
        while (match := _FRAME_END.search(self._buffer, max(start, self._scanned))) is not None:
            frames.append(self._frame(bytes(self._buffer[start : match.end()])))
            start = self._scanned = match.end()
        del self._buffer[:start]
        # A frame end may begin with the last three bytes ("\r\n\r" + "\n").
        self._scanned = max(0, len(self._buffer) - 3)
        return frames

    def flush(self) -> SSEFrame | None:
        """What is left at the end of the stream: a last frame without its empty line."""
        if not self._buffer:
            return None
        raw = bytes(self._buffer)
        self._buffer.clear()
        self._scanned = 0
        return self._frame(raw)

    def _frame(self, raw: bytes) -> SSEFrame:
        at_start, self._at_start = self._at_start, False
        # Engines send "data: {...}\n\n"; this path skips the general line splitter.
        if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
            return SSEFrame(raw, raw[6:-2])
        text = raw.removeprefix(_BOM) if at_start else raw
        data: list[bytes] = []
        event = ""
        stray = False
        for line, _ in _split_lines(text):
            name, _, value = line.partition(b":")
            if name == b"data":
                data.append(value.removeprefix(b" "))
            elif name == b"event":
                event = value.removeprefix(b" ").decode("utf-8", "replace")
            elif name not in _OTHER_FIELDS:
                stray = True
        return SSEFrame(raw, b"\n".join(data) if data else None, event, stray)


def _split_lines(raw: bytes) -> list[tuple[bytes, bytes]]:
    """Lines with their line ends, nothing lost."""
    lines: list[tuple[bytes, bytes]] = []
    start = 0
    for match in _EOL.finditer(raw):
        lines.append((raw[start : match.start()], match.group()))
        start = match.end()
    if start < len(raw):
        lines.append((raw[start:], b""))
    return lines
