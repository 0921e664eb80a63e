"""middleware.codings: every coding round-trips, is bounded, and refuses broken data."""

from __future__ import annotations

import gzip
import zlib

import brotli
import pytest
import zstandard

from middleware.codings import decode_body
from middleware.errors import BodyTooLargeError, InvalidInputError, UnsupportedEncodingError

DATA = b'{"a":1}' * 50_000
ENCODED = {
    "gzip": gzip.compress(DATA),
    "deflate": zlib.compress(DATA),
    "br": brotli.compress(DATA),
    "zstd": zstandard.compress(DATA),
}


@pytest.mark.parametrize("name", ENCODED)
def test_round_trip_bound_and_damage(name: str) -> None:
    """Right data decodes; too much, cut and foreign data are typed errors."""
    body = ENCODED[name]

    assert decode_body(body, name.upper(), limit=len(DATA)) == DATA
    with pytest.raises(BodyTooLargeError):
        decode_body(body, name, limit=len(DATA) - 1)
    for damaged in (body[:-5], body[:3], b"not encoded at all"):
        with pytest.raises(InvalidInputError):
            decode_body(damaged, name, limit=len(DATA))


def test_members_and_stacks() -> None:
    """Several gzip members or zstd frames are one body; codings are undone in reverse order."""
    assert decode_body(gzip.compress(b"a") * 2, "gzip", limit=9) == b"aa"
    assert decode_body(zstandard.compress(b"a") * 2, "zstd", limit=9) == b"aa"
    assert decode_body(gzip.compress(ENCODED["br"]), "br, gzip", limit=1 << 20) == DATA
    raw_deflate = zlib.compressobj(wbits=-15)
    assert decode_body(raw_deflate.compress(b"x") + raw_deflate.flush(), "deflate", limit=9) == b"x"


def test_no_coding_and_unknown_codings() -> None:
    """Identity returns the very bytes; an unknown coding is named."""
    assert decode_body(DATA, "", limit=1) is DATA
    assert decode_body(DATA, "identity", limit=1) is DATA
    with pytest.raises(UnsupportedEncodingError, match="snappy"):
        decode_body(DATA, "snappy", limit=1)
