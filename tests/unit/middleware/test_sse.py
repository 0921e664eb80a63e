"""middleware.sse: any chunking gives the same frames, and no byte is lost."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from middleware.sse import SSEFrame, SSEParser

EVIL = '好🙂é "  "'
STREAMS = [
    f'data: {{"t":"{EVIL}"}}\n\ndata: [DONE]\n\n'.encode(),
    f'data: {{"t":"{EVIL}"}}\r\n\r\n: ping\r\n\r\ndata:x\r\n\r\n'.encode(),
    b":\n\n: ping\n\ndata:{}\n\nevent: x\nid: 3\nretry: 9\ndata: {}\n\n",
    b"\xef\xbb\xbfdata: a\n\ndata: one\ndata: two\n\ndata: [DONE]",
    b"data: a\r\rdata: b\r\r",
    b"\n\ndata\n\ndata: \n\n",
]


def parse(*chunks: bytes) -> list[SSEFrame]:
    parser = SSEParser()
    frames = [frame for chunk in chunks for frame in parser.feed(chunk)]
    last = parser.flush()
    return [*frames, last] if last else frames


def events(frames: list[SSEFrame]) -> list[tuple[str, bytes]]:
    return [(frame.event, frame.data) for frame in frames if frame.data is not None]


def test_every_split_in_two_and_byte_by_byte_parses_alike() -> None:
    """C22: a character or a line end cut by a chunk border changes nothing."""
    for stream in STREAMS:
        whole = events(parse(stream))
        singles = [stream[i : i + 1] for i in range(len(stream))]
        for chunks in [singles, *([stream[:cut], stream[cut:]] for cut in range(len(stream)))]:
            frames = parse(*chunks)

            assert events(frames) == whole
            assert b"".join(frame.raw for frame in frames) == stream


@given(st.lists(st.binary(max_size=9), max_size=12))
def test_arbitrary_bytes_are_kept(chunks: list[bytes]) -> None:
    """The frames' raw bytes are the stream, whatever was fed."""
    assert b"".join(frame.raw for frame in parse(*chunks)) == b"".join(chunks)


@given(st.text(alphabet="ad:at \r\n", max_size=40), st.data())
def test_chunking_never_changes_the_events(text: str, data: st.DataObject) -> None:
    """Line-end heavy streams parse alike in one piece and in random pieces."""
    stream = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    bounds = [0, *cuts, len(stream)]
    chunks = [stream[a:b] for a, b in itertools.pairwise(bounds)]

    assert events(parse(*chunks)) == events(parse(stream))


def test_the_format_s_oddities() -> None:
    """C24: comments, no space after the colon, fields, several data lines, BOM, no last newline."""
    assert events(parse(STREAMS[2])) == [("", b"{}"), ("x", b"{}")]
    assert events(parse(STREAMS[3])) == [("", b"a"), ("", b"one\ntwo"), ("", b"[DONE]")]
    assert events(parse(STREAMS[4])) == [("", b"a"), ("", b"b")]
    assert events(parse(STREAMS[5])) == [("", b""), ("", b"")]


def test_line_separators_of_unicode_do_not_end_a_line() -> None:
    """U+2028 and friends are content."""
    data = "a b\x85c".encode()

    assert events(parse(b"data: " + data + b"\n\n")) == [("", data)]


def test_a_frame_s_data_can_be_replaced_without_touching_its_other_lines() -> None:
    """event, id and comments stay; several data lines become one."""
    frame = parse(b": c\r\nevent: x\r\ndata: 1\r\ndata: 2\r\nid: 7\r\n\r\n")[0]

    assert frame.with_data(b"{}") == b": c\r\nevent: x\r\ndata: {}\r\nid: 7\r\n\r\n"
    assert parse(b"data:1\n\n")[0].with_data(b"22") == b"data:22\n\n"


def test_a_line_of_megabytes_is_linear() -> None:
    """C25: 3 MB fed in 1 kB pieces is scanned once, not once per piece."""
    line = b"data: " + b"7," * 1_500_000 + b"\n\n"
    parser = SSEParser()
    frames = [f for i in range(0, len(line), 1024) for f in parser.feed(line[i : i + 1024])]

    assert [len(frame.raw) for frame in frames] == [len(line)]
