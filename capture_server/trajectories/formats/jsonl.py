"""JSON lines: per rollout one head line, then one line per record, arrays as plain lists.

A snapshot as the HTTP API answers it (NDJSON) is read too; it has no seals. Readable with ``jq``;
one rollout at a time is held in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from capture_server.trajectories.formats.packets import (
    COLUMNS,
    FORMAT_VERSION,
    RECORDS,
    SEAL,
    InvalidExportError,
    Kind,
    Packet,
    Record,
    json_object,
    kind_of,
    packet_of,
    record_of,
)

_FORMAT: Final = "format"
_VERSION: Final = "format_version"


def write_jsonl(file: BinaryIO, packets: Iterable[Packet]) -> None:
    """Write packets of one or several rollouts."""
    for packet in packets:
        marks = {_FORMAT: packet.kind.format_name, _VERSION: FORMAT_VERSION, SEAL: packet.seal}
        file.write(_line({**marks, **packet.head}))
        for record in packet.records:
            file.write(_line({**record.text, SEAL: record.seal, **record.arrays}))


def _line(form: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(form, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    except orjson.JSONEncodeError:
        # Integers beyond 64 bits and lone surrogates: Python's writer takes them.
        text = json.dumps(form, default=lambda array: array.tolist(), separators=(",", ":"))
        return text.encode("ascii") + b"\n"


def read_jsonl(path: Path) -> Iterator[Packet]:
    """The packets of a file.

    Raises:
        InvalidExportError: naming the line.
        UnsupportedSchemaError: a version that this release does not read.
    """
    with path.open("rb") as file:
        lines = enumerate(file, 1)
        for number, line in lines:
            head = _object(path, number, line)
            where = f"{path}: line {number}"
            is_sealed = _FORMAT in head
            kind = _kind_of_head(head, where)
            told = head.get(RECORDS)
            records = []
            for _, (at, body) in zip(range(told if type(told) is int else 0), lines, strict=False):
                records.append(_record(kind, _object(path, at, body), f"{path}: line {at}"))
            yield packet_of(kind, head, records, where, is_sealed=is_sealed)


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        raise InvalidExportError(f"{path}: line {number} is cut off")
    return json_object(line, f"{path}: line {number}")


def _kind_of_head(head: dict[str, Any], where: str) -> Kind:
    if _FORMAT not in head and "snapshot_id" in head and "calls" in head:
        # The NDJSON answer of the HTTP API: the same head under another name.
        head[RECORDS] = head["calls"]
        return Kind.ENTRIES
    return kind_of(head.pop(_FORMAT, None), head.pop(_VERSION, None), where)


def _record(kind: Kind, form: dict[str, Any], where: str) -> Record:
    arrays = {c.name: form.pop(c.name) for c in COLUMNS[kind] if c.name in form}
    try:
        return record_of(kind, form, arrays)
    except InvalidExportError as error:
        raise InvalidExportError(f"{where}: {error}") from error
