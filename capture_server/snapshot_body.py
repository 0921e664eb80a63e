"""A snapshot as bytes, piece by piece: JSON, NDJSON, selected fields, rebuilt prompts.

No piece is larger than one entry, so a large rollout never exists as one string. A prompt is
rebuilt only when the result fits the digest that was recorded for it; one that cannot be rebuilt
keeps its stored suffix and stays marked ``prompt_is_delta``. Pure and synchronous: the caller
iterates in a thread.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson
import zstandard

from capture_server.control_models import ReasonBody
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import (
    TokenEntry,
    TokenIds,
    compute_digest,
    entry_from_json_bytes,
    entry_to_json_bytes,
)

ENCODINGS: Final = ("zstd", "gzip")
_ARRAY_FIELDS: Final = frozenset(
    {"prompt_token_ids", "generation_token_ids", "generation_log_probs"}
)
_PIECE_BYTES: Final = 1 << 18
# Fast settings: the link is usually local, and digits compress well at any level.
_GZIP_LEVEL: Final = 1
_ZSTD_LEVEL: Final = 1


@dataclass(frozen=True, slots=True)
class EntryView:
    """Which part of each entry is written. ``fields`` None = all of it."""

    fields: tuple[str, ...] | None = None
    full_prompts: bool = False


def header_of(snapshot: TokenCaptureSnapshot) -> dict[str, Any]:
    """The snapshot object without its entries (first line of NDJSON)."""
    return {
        "rollout_id": snapshot.rollout_id,
        "snapshot_id": snapshot.snapshot_id,
        "version": snapshot.version,
        "incomplete": snapshot.incomplete,
        "incomplete_reasons": [
            ReasonBody.of(reason).model_dump() for reason in snapshot.incomplete_reasons
        ],
        "calls": len(snapshot.entries),
    }


def ndjson_pieces(snapshot: TokenCaptureSnapshot, view: EntryView) -> Iterator[bytes]:
    """The header line, then one line per entry."""
    yield orjson.dumps(header_of(snapshot)) + b"\n"
    for body in _entry_bodies(snapshot, view):
        yield body + b"\n"


def json_pieces(snapshot: TokenCaptureSnapshot, view: EntryView) -> Iterator[bytes]:
    """One JSON object, ``entries`` last."""
    yield orjson.dumps(header_of(snapshot))[:-1] + b',"entries":['
    separator = b""
    for body in _entry_bodies(snapshot, view):
        yield separator + body
        separator = b","
    yield b"]}"


def _entry_bodies(snapshot: TokenCaptureSnapshot, view: EntryView) -> Iterator[bytes]:
    by_id = {entry.model_call_id: entry for entry in snapshot.entries}
    for entry in snapshot.entries:
        yield _entry_body(_with_full_prompt(entry, by_id) if view.full_prompts else entry, view)


def _entry_body(entry: TokenEntry, view: EntryView) -> bytes:
    if view.fields is None:
        return entry_to_json_bytes(entry)
    names = set(view.fields)
    if "prompt_token_ids" in names and entry.prompt_is_delta:
        names.add("prompt_is_delta")  # never let a suffix be taken for a whole prompt
    arrays = names & _ARRAY_FIELDS
    form = entry.model_dump(mode="json", include=names - arrays)
    form.update((name, getattr(entry, name).array) for name in arrays)
    try:
        return orjson.dumps(form, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        # Content may hold what orjson refuses: integers beyond 64 bits, lone surrogates.
        form.update((name, getattr(entry, name).tolist()) for name in arrays)
        return json.dumps(form, separators=(",", ":")).encode("ascii")


def _with_full_prompt(entry: TokenEntry, by_id: dict[str, TokenEntry]) -> TokenEntry:
    if not entry.prompt_is_delta:
        return entry
    prompt = _full_prompt(entry, by_id)
    if prompt is None:
        return entry
    return entry.model_copy(update={"prompt_token_ids": prompt, "prompt_is_delta": False})


def _full_prompt(entry: TokenEntry, by_id: dict[str, TokenEntry]) -> TokenIds | None:
    """The prompt through the chain of parents; None when a link is missing or does not fit."""
    segments = [entry.prompt_token_ids]
    current: TokenEntry | None = entry
    for _ in range(len(by_id)):  # a chain longer than that is a cycle
        if current is None or not current.prompt_is_delta:
            break
        current = by_id.get(current.parent_call_id or "")
        if current is not None:
            segments += [current.generation_token_ids, current.prompt_token_ids]
    if current is None or current.prompt_is_delta:
        return None
    prompt = TokenIds.concat(*reversed(segments))
    whole = TokenIds.concat(prompt, entry.generation_token_ids)
    fits = len(whole) == entry.cum_len and compute_digest(whole) == entry.digest
    return prompt if fits else None


def batched(pieces: Iterable[bytes], size: int = _PIECE_BYTES) -> Iterator[bytes]:
    """Join small pieces, so that each hop between threads carries a useful amount."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        if len(buffer) >= size:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


def encoded(pieces: Iterable[bytes], encoding: str | None) -> Iterator[bytes]:
    """The pieces under a content coding of ``ENCODINGS`` (None: as they are)."""
    if encoding is None:
        yield from pieces
        return
    compressor: Any = (
        zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS | 16)
        if encoding == "gzip"
        else zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compressobj()
    )
    for piece in pieces:
        yield compressor.compress(piece)
    yield compressor.flush()


def parse_ndjson(data: bytes) -> tuple[dict[str, Any], list[TokenEntry]]:
    """The reader's side of ``ndjson_pieces``: the header and the entries.

    Raises:
        ValueError: not NDJSON of a snapshot, or fewer entries than the header announces.
    """
    lines = data.split(b"\n")
    header: Any = orjson.loads(lines[0])
    if not isinstance(header, dict) or "snapshot_id" not in header:
        raise ValueError("the first line is no snapshot header")
    entries = [entry_from_json_bytes(line) for line in lines[1:] if line]
    if len(entries) != header.get("calls", len(entries)):
        raise ValueError(f"{len(entries)} entries, but the header says {header['calls']}")
    return header, entries
