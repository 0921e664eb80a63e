"""Arrow IPC (stream and file) and Parquet: one table row per record.

::

    rollout_id  string            every record
    index       int32             place of the record in its rollout; null: the rollout has none
    row_id | model_call_id        string, null where index is
    <ids>       large_list<int32>, null where an id needs more: then <ids>_wide, uint64
    <others>    large_list<uint8 | double>
    details     string            the record's text (JSON)
    rollout     string            the rollout's head (JSON), on its first record only

The schema's metadata names format and version. Lists are flat values with int64 offsets, so
numpy, Arrow and Parquet readers get them without copying. Writing is here, reading in
``columnar_reader``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Final

import numpy as np

from capture_server.trajectories.formats.packets import (
    COLUMNS,
    FORMAT_VERSION,
    NAME_OF,
    SEAL,
    Array,
    Column,
    InvalidExportError,
    Kind,
    Packet,
    Record,
    json_bytes,
)
from middleware.errors import ConfigurationError

# pyarrow ships no types.
Schema = Any
RecordBatch = Any

WIDE: Final = "_wide"
_BATCH_BYTES: Final = 2 << 20  # arrays per record batch; a Parquet row group holds several
_ROW_GROUP_BYTES: Final = 64 << 20
FORMAT_KEY: Final = b"format"
VERSION_KEY: Final = b"format_version"


def pyarrow_module() -> Any:
    """pyarrow, imported at the first use.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigurationError(
            "Arrow and Parquet need pyarrow: pip install 'token-capture[arrow]'"
        ) from error
    return pyarrow


def schema_of(kind: Kind, columns: Sequence[Column] | None = None) -> Schema:
    """The schema of all files and streams of this kind (with ``columns``: of these only).

    Raises:
        ConfigurationError: pyarrow is not installed.
    """
    arrow = pyarrow_module()
    fields = [
        arrow.field("rollout_id", arrow.string(), nullable=False),
        arrow.field("index", arrow.int32()),
        arrow.field(NAME_OF[kind], arrow.string()),
    ]
    for column in COLUMNS[kind] if columns is None else columns:
        fields.append(arrow.field(column.name, _list_type(column, wide=False)))
        if not column.dtype:
            fields.append(arrow.field(column.name + WIDE, _list_type(column, wide=True)))
    fields += [arrow.field("details", arrow.string()), arrow.field("rollout", arrow.string())]
    marks = {FORMAT_KEY: kind.format_name, VERSION_KEY: str(FORMAT_VERSION)}
    return arrow.schema(fields, metadata=marks)


def _list_type(column: Column, *, wide: bool) -> Any:
    arrow = pyarrow_module()
    if column.dtype == "<f8":
        value = arrow.float64()
    elif column.dtype:
        value = arrow.uint8()
    else:
        value = arrow.uint64() if wide else arrow.int32()
    return arrow.large_list(arrow.field("item", value, nullable=False))


# --- writing -----------------------------------------------------------------------------------


class _Lines:
    """Table rows in the making: columns as Python lists of references."""

    def __init__(self, kind: Kind, columns: Sequence[Column] | None = None) -> None:
        self._kind = kind
        self._ragged = COLUMNS[kind] if columns is None else columns
        self._schema = schema_of(kind, columns)
        self._columns: dict[str, list[Any]] = {name: [] for name in self._schema.names}
        self.num_bytes = 0

    def add(self, packet: Packet) -> Iterator[RecordBatch]:
        """Take in a packet; give back what is full."""
        head = _text({**packet.head, SEAL: packet.seal})
        if not packet.records:
            self._append(packet.rollout_id, None, None, head)
        for at, record in enumerate(packet.records):
            self._append(packet.rollout_id, at, record, head if at == 0 else None)
            if self.num_bytes >= _BATCH_BYTES:
                yield self.take()

    def _append(
        self, rollout_id: str, at: int | None, record: Record | None, head: str | None
    ) -> None:
        columns = self._columns
        columns["rollout_id"].append(rollout_id)
        columns["index"].append(at)
        columns["rollout"].append(head)
        text = None if record is None else _text({**record.text, SEAL: record.seal})
        columns["details"].append(text)
        name = NAME_OF[self._kind]
        columns[name].append(None if record is None else record.text[name])
        for column in self._ragged:
            values = None if record is None else record.arrays[column.name]
            is_wide = values is not None and not column.dtype and values.dtype != np.int32
            columns[column.name].append(None if is_wide else values)
            if not column.dtype:
                columns[column.name + WIDE].append(values if is_wide else None)
            self.num_bytes += 0 if values is None else values.nbytes
        self.num_bytes += len(text or "")

    def __bool__(self) -> bool:
        return bool(self._columns["index"])

    def take(self) -> RecordBatch:
        """Everything so far as one batch; start over."""
        arrow = pyarrow_module()
        arrays = []
        for field in self._schema:
            values = self._columns[field.name]
            if arrow.types.is_large_list(field.type):
                arrays.append(_ragged(values, field.type))
            else:
                arrays.append(_plain(values, field))
            values.clear()
        self.num_bytes = 0
        return arrow.RecordBatch.from_arrays(arrays, schema=self._schema)


def _text(form: dict[str, Any]) -> str:
    if form[SEAL] is None:
        del form[SEAL]
    return json_bytes(form).decode()


def _plain(values: list[Any], field: Any) -> Any:
    try:
        return pyarrow_module().array(values, field.type)
    except (UnicodeEncodeError, pyarrow_module().ArrowException) as error:
        raise InvalidExportError(f"column {field.name}: {error}") from error


def _ragged(values: list[Array | None], kind: Any) -> Any:
    """One list array from separate numpy arrays: a single copy of the numbers."""
    arrow = pyarrow_module()
    lengths = [0 if value is None else value.size for value in values]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    dtype = kind.value_type.to_pandas_dtype()
    held = [value.astype(dtype, copy=False) for value in values if value is not None]
    flat = np.concatenate(held) if held else np.empty(0, dtype)
    missing = np.array([value is None for value in values])
    return arrow.LargeListArray.from_arrays(
        arrow.array(offsets), arrow.array(flat), type=kind, mask=arrow.array(missing)
    )


def batches(
    kind: Kind, packets: Iterable[Packet], columns: Sequence[Column] | None = None
) -> Iterator[RecordBatch]:
    """Packets as record batches of bounded size."""
    lines = _Lines(kind, columns)
    for packet in packets:
        yield from lines.add(packet)
        if lines.num_bytes >= _BATCH_BYTES:
            yield lines.take()
    if lines:
        yield lines.take()


class _Pieces:
    """A file that only hands on what was written since last asked."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.closed = False

    def write(self, data: Any) -> int:
        self._buffer += data
        return len(data)

    def flush(self) -> None:
        return None

    def take(self) -> bytes:
        data = bytes(self._buffer)
        self._buffer.clear()
        return data


def stream_pieces(
    kind: Kind, packets: Iterable[Packet], columns: Sequence[Column] | None = None
) -> Iterator[bytes]:
    """An Arrow IPC stream, piece by piece; with ``columns``, of these ragged ones only.

    Raises:
        ConfigurationError: pyarrow is not installed.
    """
    arrow = pyarrow_module()
    sink = _Pieces()
    with arrow.ipc.new_stream(sink, schema_of(kind, columns)) as writer:
        yield sink.take()
        for batch in batches(kind, packets, columns):
            writer.write_batch(batch)
            yield sink.take()
    yield sink.take()


def write_arrow_stream(file: BinaryIO, kind: Kind, packets: Iterable[Packet]) -> None:
    """An Arrow IPC stream."""
    for piece in stream_pieces(kind, packets):
        file.write(piece)


def write_arrow_file(file: BinaryIO, kind: Kind, packets: Iterable[Packet]) -> None:
    """An Arrow IPC file (random access by batch)."""
    with pyarrow_module().ipc.new_file(file, schema_of(kind)) as writer:
        for batch in batches(kind, packets):
            writer.write_batch(batch)


def write_parquet(file: BinaryIO, kind: Kind, packets: Iterable[Packet]) -> None:
    """A Parquet file, zstd-compressed, in row groups of bounded size."""
    arrow = pyarrow_module()
    from pyarrow import parquet

    held: list[Any] = []
    with parquet.ParquetWriter(file, schema_of(kind), compression="zstd") as writer:
        for batch in batches(kind, packets):
            held.append(batch)
            if sum(one.nbytes for one in held) >= _ROW_GROUP_BYTES:
                writer.write_table(arrow.Table.from_batches(held))
                held.clear()
        if held:
            writer.write_table(arrow.Table.from_batches(held))
