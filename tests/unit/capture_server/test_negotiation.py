"""Accept, Accept-Encoding and If-None-Match."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_server.negotiation import etag_matches, preferred_encoding, preferred_type

JSON, NDJSON = "application/json", "application/x-ndjson"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        (NDJSON, NDJSON),
        ("Application/X-NDJSON", NDJSON),
        (f"{JSON};q=0.5, {NDJSON}", NDJSON),
        (f"{NDJSON};q=0.1, */*;q=0.5", JSON),
        (f"{JSON};q=0, */*", NDJSON),
        ("text/html, */*;q=0.1", JSON),
        (f"{JSON}; charset=utf-8", JSON),
        ("text/html", None),
        ("*/*;q=0", None),
        (f"{JSON};q=high", None),
    ],
)
def test_preferred_type(accept: str, expected: str | None) -> None:
    """Weights count, the most specific range decides, our order breaks ties."""
    assert preferred_type(accept, (JSON, NDJSON)) == expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", None),
        ("gzip", "gzip"),
        ("GZIP;q=0.1", "gzip"),
        ("gzip, zstd", "zstd"),
        ("zstd;q=0, *", "gzip"),
        ("*;q=0", None),
        ("identity, br", None),
    ],
)
def test_preferred_encoding(header: str, expected: str | None) -> None:
    """A weight of zero forbids; the rest is the server's choice."""
    assert preferred_encoding(header, ("zstd", "gzip")) == expected


@given(st.text(max_size=60))
def test_any_header_is_understood(header: str) -> None:
    """No spelling of a header makes a request fail."""
    assert preferred_type(header, (JSON, NDJSON)) in (JSON, NDJSON, None)
    assert preferred_encoding(header, ("zstd", "gzip")) in ("zstd", "gzip", None)
    assert etag_matches(header, '"x"') in (True, False)


def test_entity_tags_compare_weakly() -> None:
    """Lists, weak tags and the star."""
    assert etag_matches('"a", W/"b"', '"b"')
    assert etag_matches(" * ", '"b"')
    assert not etag_matches('"bb"', '"b"')
    assert not etag_matches("", '"b"')
