"""What an export holds, before any file format: one packet per rollout.

A packet is a JSON ``head`` and records; a record is a JSON ``text`` and ragged number arrays. Two
kinds exist: ``rows`` (training rows, ``RolloutTraces``) and ``entries`` (model calls as recorded,
``TokenCaptureSnapshot``).

Invariant: packing and unpacking gives the same ids, log-probs (bit for bit), masks, spans and
metadata back, or raises. Head and records carry a seal, a sha256 over all that they hold, so that
a later change of any stored number or text is found by who checks it (``capture_server.verify``).
A seal proves integrity, not origin: who rewrites a file can seal it again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
from pydantic_core import PydanticSerializationError

from capture_server.client_models import traces_of
from capture_server.client_requests import parse_reasons
from capture_server.trajectories.rows import RolloutTraces
from middleware.canonical import loads_exact
from middleware.errors import InvalidInputError, UnsupportedSchemaError
from middleware.paths import validate_rollout_id
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import LogProbs, TokenEntry, TokenIds

FORMAT_VERSION: Final = 1
SEAL: Final = "export_seal"
RECORDS: Final = "records"
_FORMAT_PREFIX: Final = "token-capture."

Array = npt.NDArray[Any]


class InvalidExportError(InvalidInputError):
    """An export that cannot be written, or a file that is no (whole) export."""

    code = "invalid_export"


class Kind(StrEnum):
    """What the records of an export are."""

    ROWS = "rows"
    ENTRIES = "entries"

    @property
    def format_name(self) -> str:
        """The name under which files say what they hold."""
        return _FORMAT_PREFIX + self.value


@dataclass(frozen=True, slots=True)
class Column:
    """One ragged array per record. Columns of one ``group`` have equal lengths in each record."""

    name: str
    group: str
    dtype: str  # "" = token ids, in the narrowest of int32, int64, uint64


COLUMNS: Final[Mapping[Kind, tuple[Column, ...]]] = {
    Kind.ROWS: (
        Column("token_ids", "token", ""),
        Column("loss_mask", "token", "<u1"),
        Column("log_probs", "token", "<f8"),
    ),
    Kind.ENTRIES: (
        Column("prompt_token_ids", "prompt", ""),
        Column("generation_token_ids", "generation", ""),
        Column("generation_log_probs", "generation", "<f8"),
    ),
}
NAME_OF: Final[Mapping[Kind, str]] = {Kind.ROWS: "row_id", Kind.ENTRIES: "model_call_id"}


@dataclass(frozen=True, slots=True)
class Record:
    """``text``: JSON object without the arrays; ``arrays``: one per column, read-only."""

    text: dict[str, Any]
    arrays: dict[str, Array]
    seal: str | None = None


@dataclass(frozen=True, slots=True)
class Packet:
    """One rollout. ``head``: JSON object with the rollout's own values."""

    kind: Kind
    head: dict[str, Any]
    records: list[Record]
    seal: str | None = None
    is_sealed: bool = True  # False: an HTTP snapshot, which has no seals at all

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return str(self.head["rollout_id"])


# --- packing -----------------------------------------------------------------------------------


def pack_traces(traces: RolloutTraces) -> Packet:
    """Training rows as a packet.

    Raises:
        InvalidInputError: an id, array or text that no export can hold.
    """
    body = traces.to_json(arrays=True)
    columns = [column.name for column in COLUMNS[Kind.ROWS]]
    records = []
    for row in body.pop("rows"):
        arrays = {name: row.pop(name) for name in columns}
        records.append(Record(row, arrays))
    return _sealed(Kind.ROWS, body, records)


def pack_snapshot(snapshot: TokenCaptureSnapshot) -> Packet:
    """Entries of a frozen rollout as a packet.

    Raises:
        InvalidInputError: an id, array or text that no export can hold.
    """
    columns = [column.name for column in COLUMNS[Kind.ENTRIES]]
    records = []
    for entry in snapshot.entries:
        try:
            text = entry.model_dump(mode="json", exclude=set(columns))
        except PydanticSerializationError as error:
            raise InvalidExportError(
                f"the record of call {entry.model_call_id!r} is no JSON: {error}"
            ) from error
        records.append(Record(text, {name: getattr(entry, name).array for name in columns}))
    head = {
        "rollout_id": snapshot.rollout_id,
        "snapshot_id": snapshot.snapshot_id,
        "version": snapshot.version,
        "incomplete": snapshot.incomplete,
        "incomplete_reasons": [dataclasses.asdict(r) for r in snapshot.incomplete_reasons],
        "calls": len(records),  # as in the HTTP API's header
    }
    return _sealed(Kind.ENTRIES, head, records)


def _sealed(kind: Kind, head: dict[str, Any], records: list[Record]) -> Packet:
    rollout_id = validate_rollout_id(head["rollout_id"])
    head = {**head, RECORDS: len(records)}
    sealed = []
    for at, record in enumerate(records):
        if SEAL in record.text:
            raise InvalidExportError(f"a record of rollout {rollout_id!r} has a field {SEAL!r}")
        seal = record_seal(kind, rollout_id, at, record)
        sealed.append(Record(record.text, record.arrays, seal))
    return Packet(kind, head, sealed, head_seal(kind, head))


# --- seals -------------------------------------------------------------------------------------


def head_seal(kind: Kind, head: Mapping[str, Any]) -> str:
    """sha256 hex over the kind and the head's JSON."""
    return hashlib.sha256(kind.format_name.encode() + b"\0" + json_bytes(head)).hexdigest()


def record_seal(kind: Kind, rollout_id: str, at: int, record: Record) -> str:
    """sha256 hex over the record's place, text and arrays (counts, then 8 bytes per number)."""
    place = f"{kind.format_name}\0{rollout_id}\0{at}\0"
    hasher = hashlib.sha256(place.encode("ascii", "backslashreplace") + json_bytes(record.text))
    for column in COLUMNS[kind]:
        values = record.arrays[column.name]
        wide = "<u8" if not column.dtype else column.dtype
        hasher.update(f"\0{column.name}\0{values.size}\0".encode())
        hasher.update(np.ascontiguousarray(values, dtype=wide).data.cast("B"))
    return hasher.hexdigest()


def json_bytes(value: Any) -> bytes:
    """JSON with sorted keys; ASCII escapes where UTF-8 cannot hold the text.

    Raises:
        InvalidExportError: not JSON at all.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # Integers beyond 64 bits and lone surrogates: Python's writer takes them.
        try:
            return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidExportError(f"no JSON, so it cannot be exported: {error}") from error


def json_object(data: bytes | str, what: str) -> dict[str, Any]:
    """Read a JSON object back.

    Raises:
        InvalidExportError: no JSON, or no object.
    """
    try:
        value = loads_exact(data)
    except (ValueError, RecursionError) as error:
        raise InvalidExportError(f"{what} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidExportError(f"{what} is no JSON object")
    return value


# --- unpacking ---------------------------------------------------------------------------------


def kind_of(format_name: object, version: object, where: str) -> Kind:
    """What a file says it holds.

    Raises:
        InvalidExportError: no export of ours.
        UnsupportedSchemaError: a version that this release does not read.
    """
    found = next((kind for kind in Kind if kind.format_name == format_name), None)
    if found is None:
        raise InvalidExportError(f"{where}: {format_name!r} is no export format of token-capture")
    if type(version) is not int or version != FORMAT_VERSION:
        raise UnsupportedSchemaError(
            f"{where}: export version {version!r} is not supported; this release reads "
            f"{FORMAT_VERSION}"
        )
    return found


def packet_of(
    kind: Kind,
    head: dict[str, Any],
    records: list[Record],
    where: str,
    *,
    is_sealed: bool = True,
) -> Packet:
    """A packet as a reader found it; ``head`` still has its seal.

    Raises:
        InvalidExportError: no head, or another number of records than the head says.
    """
    seal = head.pop(SEAL, None)
    told = head.get(RECORDS)
    if not isinstance(head.get("rollout_id"), str) or type(told) is not int:
        raise InvalidExportError(f"{where}: a rollout's head has no rollout_id or no record count")
    if told != len(records):
        raise InvalidExportError(
            f"{where}: rollout {head['rollout_id']!r} has {len(records)} records, but its head "
            f"says {told}"
        )
    return Packet(kind, head, records, _text_or_none(seal), is_sealed)


def record_of(kind: Kind, text: dict[str, Any], arrays: Mapping[str, object]) -> Record:
    """A record as a reader found it: every array checked for type, range and length.

    Raises:
        InvalidExportError: naming the record and the column.
    """
    seal = text.pop(SEAL, None)
    checked: dict[str, Array] = {}
    lengths: dict[str, tuple[str, int]] = {}
    name = str(text.get(NAME_OF[kind], "?"))
    for column in COLUMNS[kind]:
        try:
            values = _checked(column, arrays[column.name])
        except (ValueError, KeyError) as error:
            raise InvalidExportError(f"record {name!r}, {column.name}: {error}") from error
        other, length = lengths.setdefault(column.group, (column.name, values.size))
        if length != values.size:
            raise InvalidExportError(
                f"record {name!r} has {length} {other} but {values.size} {column.name}"
            )
        checked[column.name] = values
    return Record(text, checked, _text_or_none(seal))


def _text_or_none(seal: object) -> str | None:
    return seal if isinstance(seal, str) else None


def _checked(column: Column, values: object) -> Array:
    if column.dtype == "<f8":
        return LogProbs.of(values).array
    ids = TokenIds.of(values).array
    if not column.dtype:
        return ids
    if ids.size and int(ids.max()) > 1:
        at = int(np.argmax(ids > 1))
        raise InvalidExportError(f"mask at index {at} is {int(ids[at])}; it must be 0 or 1")
    mask = ids.astype(np.uint8)
    mask.setflags(write=False)
    return mask


def unpack_traces(packet: Packet) -> RolloutTraces:
    """Training rows of a packet.

    Raises:
        InvalidExportError: it holds something else, or a row lacks what a row needs.
    """
    _require(packet, Kind.ROWS)
    rows = [{**record.text, **record.arrays} for record in packet.records]
    try:
        traces = traces_of({**packet.head, "rows": rows})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_understood(packet, error) from error
    for row, record in zip(traces.rows, packet.records, strict=True):
        if row.mask_sample != record.text["mask_sample"]:
            raise InvalidExportError(
                f"rollout {packet.rollout_id!r}: row {row.row_id!r} has mask_reasons "
                f"{row.mask_reasons} but mask_sample {record.text['mask_sample']!r}"
            )
    return traces


def unpack_snapshot(packet: Packet) -> TokenCaptureSnapshot:
    """Entries of a packet.

    Raises:
        InvalidExportError: it holds something else, or an entry is not valid.
    """
    _require(packet, Kind.ENTRIES)
    head = packet.head
    try:
        return TokenCaptureSnapshot(
            rollout_id=packet.rollout_id,
            entries=[
                TokenEntry.model_validate({**record.text, **record.arrays})
                for record in packet.records
            ],
            incomplete=bool(head["incomplete"]),
            snapshot_id=head["snapshot_id"],
            version=head["version"],
            incomplete_reasons=parse_reasons(head["incomplete_reasons"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _not_understood(packet, error) from error


def _require(packet: Packet, kind: Kind) -> None:
    if packet.kind is not kind:
        raise InvalidExportError(f"this export holds {packet.kind}, not {kind}")


def _not_understood(packet: Packet, error: Exception) -> InvalidExportError:
    what = "lacks " if isinstance(error, KeyError) else ""
    return InvalidExportError(
        f"rollout {packet.rollout_id!r} ({packet.kind}) is not understood: {what}{error}"
    )
