"""Reading Arrow IPC and Parquet exports back; the layout is described in ``columnar``.

Invariant: a packet that is given out had every column, type, null, index and length checked; what
pyarrow raises on damaged data becomes ``InvalidExportError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from capture_server.trajectories.formats.columnar import (
    FORMAT_KEY,
    VERSION_KEY,
    WIDE,
    pyarrow_module,
    schema_of,
)
from capture_server.trajectories.formats.packets import (
    COLUMNS,
    NAME_OF,
    Array,
    InvalidExportError,
    Kind,
    Packet,
    Record,
    json_object,
    kind_of,
    packet_of,
    record_of,
)

_READ_RECORDS: Final = 64  # records read at a time from Parquet


def read_arrow_stream(source: BinaryIO, where: str) -> Iterator[Packet]:
    """The packets of an IPC stream; see ``export.read_packets`` for what is raised."""
    with _as_invalid_export(where), pyarrow_module().ipc.open_stream(source) as reader:
        yield from _packets(reader.schema, reader, where)


def read_arrow_file(path: Path) -> Iterator[Packet]:
    """The packets of an IPC file."""
    arrow = pyarrow_module()
    where = str(path)
    with (
        _as_invalid_export(where),
        arrow.memory_map(where) as source,
        arrow.ipc.open_file(source) as reader,
    ):
        found = (reader.get_batch(at) for at in range(reader.num_record_batches))
        yield from _packets(reader.schema, found, where)


def read_parquet(path: Path) -> Iterator[Packet]:
    """The packets of a Parquet file."""
    pyarrow_module()
    from pyarrow import parquet

    where = str(path)
    with _as_invalid_export(where), parquet.ParquetFile(where) as file:
        found = file.iter_batches(batch_size=_READ_RECORDS)
        yield from _packets(file.schema_arrow, found, where)


class _as_invalid_export:  # noqa: N801 - reads as the statement that it is used in
    """What pyarrow raises on a damaged file becomes ``InvalidExportError``."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # MemoryError: a damaged length asks for more than there is.
        damaged = (pyarrow_module().ArrowException, EOFError, MemoryError, UnicodeDecodeError)
        # pyarrow's own complaints about short data are OSErrors without a number.
        is_short = isinstance(error, OSError) and error.errno is None
        own = isinstance(error, InvalidExportError)
        if error is not None and not own and (is_short or isinstance(error, damaged)):
            raise InvalidExportError(f"{self._where} cannot be read: {error}") from error


def _packets(schema: Any, found: Iterable[Any], where: str) -> Iterator[Packet]:
    kind = _checked_schema(schema, where)
    head: dict[str, Any] | None = None
    records: list[Record] = []
    for batch in found:
        batch.validate(full=True)
        lines = _BatchReader(kind, batch, where)
        for at in range(batch.num_rows):
            started = lines.head(at)
            if started is not None:
                if head is not None:
                    yield packet_of(kind, head, records, where)
                head, records = started, []
            if head is None or lines.rollout_id(at) != head.get("rollout_id"):
                raise InvalidExportError(f"{where}: a record stands under no head of its rollout")
            record = lines.record(at, len(records))
            if record is not None:
                records.append(record)
    if head is not None:
        yield packet_of(kind, head, records, where)


def _checked_schema(schema: Any, where: str) -> Kind:
    marks = schema.metadata or {}
    version = marks.get(VERSION_KEY, b"").decode("ascii", "replace")
    name = marks.get(FORMAT_KEY, b"").decode("ascii", "replace")
    kind = kind_of(name, int(version) if version.isdigit() else version, where)
    expected = schema_of(kind)
    for field in expected:
        at = schema.get_field_index(field.name)
        if at < 0 or not schema.field(at).type.equals(field.type):
            raise InvalidExportError(
                f"{where}: column {field.name!r} is missing or of another type"
            )
    return kind


class _BatchReader:
    """Records of one batch; arrays are views of Arrow's memory until they are checked."""

    def __init__(self, kind: Kind, batch: Any, where: str) -> None:
        self._kind = kind
        self._where = where
        self._plain = {
            name: batch.column(name).to_pylist()
            for name in ("rollout_id", "index", NAME_OF[kind], "details", "rollout")
        }
        self._lists = {
            field.name: batch.column(field.name)
            for field in schema_of(kind)
            if field.name not in self._plain
        }

    def rollout_id(self, at: int) -> Any:
        return self._plain["rollout_id"][at]

    def head(self, at: int) -> dict[str, Any] | None:
        text = self._plain["rollout"][at]
        return None if text is None else json_object(text, f"{self._where}: a rollout's head")

    def record(self, at: int, expected: int) -> Record | None:
        index = self._plain["index"][at]
        if index is None:
            return None
        if index != expected:
            raise InvalidExportError(
                f"{self._where}: record {index} of rollout {self.rollout_id(at)!r} stands where "
                f"record {expected} should"
            )
        text = json_object(self._plain["details"][at] or "", f"{self._where}: a record's details")
        name = NAME_OF[self._kind]
        if text.get(name) != self._plain[name][at]:
            raise InvalidExportError(
                f"{self._where}: {name} is {self._plain[name][at]!r}, in details {text.get(name)!r}"
            )
        try:
            return record_of(self._kind, text, self._arrays(at))
        except InvalidExportError as error:
            raise InvalidExportError(
                f"{self._where}: rollout {self.rollout_id(at)!r}: {error}"
            ) from error

    def _arrays(self, at: int) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for column in COLUMNS[self._kind]:
            given = self._values(column.name, at)
            wide = None if column.dtype else self._values(column.name + WIDE, at)
            if (given is None) == (wide is None):
                raise InvalidExportError(f"column {column.name} is given twice or not at all")
            values = given if given is not None else wide
            assert values is not None
            found[column.name] = values
        return found

    def _values(self, name: str, at: int) -> Array | None:
        scalar = self._lists[name][at]
        if not scalar.is_valid:
            return None
        values = scalar.values
        if values.null_count:
            raise InvalidExportError(f"column {name} holds nulls")
        array: Array = values.to_numpy(zero_copy_only=False)
        return array
