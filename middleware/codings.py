"""Content codings of HTTP bodies: gzip, deflate, br, zstd, and stacks of them.

Bounded: decoding stops at ``limit`` bytes, so that a small body cannot fill the memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Final

import brotli
import zstandard

from middleware.errors import BodyTooLargeError, InvalidInputError, UnsupportedEncodingError

_PIECE: Final = 1 << 20
_ZSTD_STEP: Final = 1 << 10


def codings_of(header: str) -> list[str]:
    """The codings of a content-encoding header in the order they were applied."""
    names = [name.strip().lower() for name in header.split(",")]
    return [name for name in names if name not in ("", "identity")]


def decode_body(body: bytes, header: str, *, limit: int) -> bytes:
    """Undo a content-encoding header.

    Args:
        body: the bytes as they came.
        header: the header's value; empty or ``identity`` returns ``body`` itself.
        limit: most bytes the result may have.

    Raises:
        UnsupportedEncodingError: a coding that is not known here.
        BodyTooLargeError: more than ``limit`` bytes.
        InvalidInputError: not valid data of that coding.
    """
    for name in reversed(codings_of(header)):
        decoder = _DECODERS.get(name)
        if decoder is None:
            raise UnsupportedEncodingError(
                f"content-encoding {name!r} is not supported: use gzip, deflate, br, zstd or none"
            )
        body = _collect(decoder(body), name, limit)
    return body


def _collect(pieces: Iterator[bytes], name: str, limit: int) -> bytes:
    out = bytearray()
    try:
        for piece in pieces:
            out += piece
            if len(out) > limit:
                raise BodyTooLargeError(
                    f"the {name} body decodes to more than {limit} bytes: send less"
                )
    except (zlib.error, brotli.error, zstandard.ZstdError, EOFError) as error:
        raise InvalidInputError(f"the body is no valid {name} data: {error}") from error
    return bytes(out)


def _gunzip(body: bytes) -> Iterator[bytes]:
    # 47 = any zlib or gzip header; several gzip members may follow each other.
    while body:
        decoder = zlib.decompressobj(wbits=47)
        yield from _unzlib(decoder, body)
        body = decoder.unused_data


def _inflate(body: bytes) -> Iterator[bytes]:
    # "deflate" means zlib, but some senders use the raw form.
    wbits = 15 if body[:1] and body[0] & 0x0F == 8 else -15
    return _unzlib(zlib.decompressobj(wbits=wbits), body)


def _unzlib(decoder: zlib._Decompress, body: bytes) -> Iterator[bytes]:
    piece = decoder.decompress(body, _PIECE)
    # Not "while unconsumed_tail": after the end of the data it keeps its last value.
    while not decoder.eof and (piece or decoder.unconsumed_tail):
        yield piece
        piece = decoder.decompress(decoder.unconsumed_tail, _PIECE)
    if not decoder.eof:
        raise EOFError("it ends early")
    yield piece


def _unbrotli(body: bytes) -> Iterator[bytes]:
    decoder = brotli.Decompressor()
    yield decoder.process(body, output_buffer_limit=_PIECE)
    while not decoder.can_accept_more_data():
        yield decoder.process(b"", output_buffer_limit=_PIECE)
    if not decoder.is_finished():
        raise EOFError("it ends early")


def _unzstd(body: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(body):
        decoder = zstandard.ZstdDecompressor().decompressobj()
        while not decoder.eof and position < len(body):
            # Small steps bound what one call can blow up to.
            step = body[position : position + _ZSTD_STEP]
            yield decoder.decompress(step)
            position += len(step)
        if not decoder.eof:
            raise EOFError("it ends early")
        position -= len(decoder.unused_data)


_DECODERS: Final[dict[str, Callable[[bytes], Iterator[bytes]]]] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _inflate,
    "br": _unbrotli,
    "zstd": _unzstd,
}
