"""The line format: round trip, damage, names."""

from __future__ import annotations

import itertools
import json
import string
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_server.stores.journal import (
    Cancel,
    Closing,
    Entry,
    Frozen,
    Header,
    Incomplete,
    Intent,
    Note,
    Registered,
    Retired,
    Span,
    Torn,
    decode,
    encode,
    is_hashed_name,
    journal_name,
    scan,
)
from middleware.errors import InvalidRecordError, UnsupportedSchemaError

text = st.text(max_size=20)  # includes lone surrogates
number = st.floats(allow_nan=False, allow_infinity=False)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
records = st.one_of(
    st.builds(Header, rollout_id=text, uid=text, v=st.just(1), at=number),
    st.builds(
        Intent, call=text, at=number, request_digest=text, observed=st.booleans(), holder=text
    ),
    st.builds(Cancel, call=text, reason=text, at=number),
    st.builds(
        Entry, call=text, closes=text, payload=text, prompt_len=st.integers(0, 9),
        gen_len=st.integers(0, 9), entry=st.dictionaries(text, anything, max_size=4),
    ),
    st.builds(Note, call=text, notes=st.dictionaries(text, anything, max_size=3)),
    st.builds(Incomplete, code=text, call=text, detail=text, at=number),
    st.builds(Closing, at=number),
    st.builds(
        Registered,
        at=number,
        max_calls=st.none() | st.integers(0, 2**53),
        expires_at=st.none() | number,
        labels=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3),
    ),
    st.builds(Frozen, snapshot_id=text, at=number),
    st.builds(Retired, snapshot_id=text, version=st.integers(0, 9), at=number),
    st.builds(Torn, offset=st.integers(0, 9), length=st.integers(0, 9), at=number),
)  # fmt: skip
ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", fullmatch=True)


@given(records)
def test_a_record_survives_its_line(record):
    """Encoding and decoding give the record back, whatever text or number it holds."""
    line = encode(record)

    assert line.count(b"\n") == 1
    assert record == decode(line[:-1])
    if isinstance(record, Entry):
        assert record.entry == decode(line[:-1]).entry


@given(records)
def test_a_line_is_json_with_the_crc_last(record):
    """An operator reads it with jq."""
    form = json.loads(encode(record))

    assert (
        next(key for key in form if key != "j"),
        list(form)[-1],
    ) == ("t", "crc")


@given(records, st.data())
def test_no_damaged_byte_yields_a_record(record, data):
    """Any changed byte is noticed."""
    line = bytearray(encode(record)[:-1])
    index = data.draw(st.integers(0, len(line) - 1))
    line[index] ^= data.draw(st.integers(1, 255))

    assert decode(bytes(line)) is None


@given(st.lists(records, max_size=4), st.data())
def test_a_cut_file_holds_its_whole_lines(written, data):
    """Cut anywhere: every line before the cut is read, and the rest is one torn tail."""
    lines = [encode(record) for record in written]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    spans = list(scan(whole[:cut], 100))
    kept = [span.record for span in spans if span.record is not None]
    num_whole = sum(len(b"".join(lines[: i + 1])) <= cut for i in range(len(lines)))

    assert written[:num_whole] == kept
    assert sum(span.end - span.start for span in spans) == cut
    assert [span.start for span in spans] == [100, *[span.end for span in spans]][: len(spans)]


@given(st.lists(st.one_of(records.map(encode), st.binary(max_size=40)), max_size=6))
def test_spans_cover_any_bytes_without_neighbouring_damage(parts):
    """Scanning never fails on rubbish, and damaged lines next to each other are one span."""
    data = b"".join(parts)
    spans = list(scan(data))

    assert data == b"".join(data[span.start : span.end] for span in spans)
    damaged = [span.record is None for span in spans]
    assert not any(a and b for a, b in itertools.pairwise(damaged))


def test_damage_between_lines_is_a_span_of_its_own():
    """What stands behind damage is read."""
    a, b = encode(Closing(at=1.0)), encode(Closing(at=2.0))
    data = a + b"rubbish\n\x00\x00\n" + b

    assert list(scan(data)) == [
        Span(0, len(a), Closing(at=1.0)),
        Span(len(a), len(data) - len(b), None),
        Span(len(data) - len(b), len(data), Closing(at=2.0)),
    ]


@pytest.mark.parametrize(
    "line",
    [
        encode(Header(rollout_id="r", uid="u", v=2)),
        encode(Closing()).replace(b"closing", b"unheard"),
        encode(Closing(at=1.0)).replace(b'"at"', b'"om"'),
    ],
    ids=["newer version", "unknown type", "unknown field"],
)
def test_an_undamaged_line_of_a_newer_version_is_refused(line):
    """Nothing is skipped that may mean something."""
    covered = line[: line.rindex(b',"crc"')]
    line = covered + b',"crc":"%08x"}' % zlib.crc32(covered)
    with pytest.raises(UnsupportedSchemaError, match="byte 7"):
        list(scan(line + b"\n", 7))


def test_what_is_no_json_is_refused():
    """An object that JSON cannot hold never reaches the file."""
    with pytest.raises(InvalidRecordError):
        encode(Note(call="c", notes={"x": object()}))


@given(st.lists(ids, min_size=2, max_size=20, unique=True))
def test_distinct_ids_have_distinct_names_even_without_case(rollouts):
    """Also on a file system that folds case, and none is too long for a directory."""
    names = [journal_name(rollout) for rollout in rollouts]

    assert len(rollouts) == len({name.lower() for name in names})
    assert all(name == name.lower() for name in names)
    assert max(len(name.partition("/")[2]) for name in names) < 250
    assert set("".join(names)) <= set(string.ascii_lowercase + string.digits + "._-+/")


def test_plain_names_show_the_id():
    """An operator finds the file of an id."""
    assert "/task-1.jsonl" in journal_name("task-1")
    assert not is_hashed_name("task-1.jsonl")
    assert is_hashed_name(journal_name("Task-1").partition("/")[2])
