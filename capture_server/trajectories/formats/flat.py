"""safetensors and npz: all records of all rollouts in flat arrays with int64 offsets.

::

    header            uint8      {"format": ..., "format_version": 1}
    rollouts          uint8      heads (JSON), rollouts_offsets int64[R+1]
    rollout_records   int64[R+1] records of rollout r: rollout_records[r] to [r+1]
    details           uint8      record texts (JSON), details_offsets int64[N+1]
    <column>          numbers    one array per column, <group>_offsets int64[N+1]

Writing needs little memory, whatever the number of rollouts: numbers wait in temporary files
beside the target. Reading holds the file's arrays. numpy only; safetensors is imported when used.
"""

from __future__ import annotations

import errno
import shutil
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Final

import numpy as np

from capture_server.trajectories.formats.packets import (
    COLUMNS,
    FORMAT_VERSION,
    SEAL,
    Array,
    InvalidExportError,
    Kind,
    Packet,
    Record,
    json_bytes,
    json_object,
    kind_of,
    packet_of,
    record_of,
)
from middleware.errors import ConfigurationError

_OFFSETS: Final = "_offsets"
_CHUNK: Final = 1 << 20  # numbers converted at a time
# numpy parses array headers as Python; zipfile checks little before it decodes.
_DAMAGED_NPZ: Final = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    tokenize.TokenError,
    EOFError,
    KeyError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    ValueError,
)
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)  # equal exports are equal bytes


# --- writing -----------------------------------------------------------------------------------


class _Spool:
    """One flat array on its way to a file; gets wider when a number needs it."""

    def __init__(self, directory: Path, name: str, dtype: str) -> None:
        self.name = name
        self.path = directory / name
        self.dtype = np.dtype(dtype)
        self._file: BinaryIO = self.path.open("w+b")
        self.size = 0

    def append(self, values: Array) -> None:
        if values.dtype.kind in "iu" and values.dtype.itemsize > self.dtype.itemsize:
            self._widen(values.dtype.newbyteorder("<"))
        elif values.dtype == np.uint64 and self.dtype == np.int64:
            self._widen(np.dtype("<u8"))
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).data.cast("B"))
        self.size += values.size

    def append_bytes(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)

    def _widen(self, dtype: np.dtype[Any]) -> None:
        self._file.close()
        narrow = self.path.with_suffix(".narrow")
        self.path.rename(narrow)
        with narrow.open("rb") as old:
            self._file = self.path.open("w+b")
            while data := old.read(_CHUNK * self.dtype.itemsize):
                self._file.write(np.frombuffer(data, self.dtype).astype(dtype).data.cast("B"))
        narrow.unlink()
        self.dtype = dtype

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def mapped(self) -> Array:
        """The whole array, from the disk."""
        if not self.size:
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, mode="r", shape=(self.size,))


class _FlatArrays:
    """Spools for all arrays of an export."""

    def __init__(self, directory: Path, kind: Kind, stack: ExitStack) -> None:
        self._kind = kind
        self._spools: dict[str, _Spool] = {}

        def add(name: str, dtype: str) -> None:
            self._spools[name] = _Spool(directory, name, dtype)
            stack.callback(self._spools[name].close)

        add("header", "<u1")
        for name in ("rollouts", "details"):
            add(name, "<u1")
            add(name + _OFFSETS, "<i8")
        add("rollout_records", "<i8")
        for column in COLUMNS[kind]:
            add(column.name, column.dtype or "<i4")
        for group in {column.group: None for column in COLUMNS[kind]}:
            add(group + _OFFSETS, "<i8")
        for name, spool in self._spools.items():
            if name.endswith(_OFFSETS) or name == "rollout_records":
                spool.append(np.zeros(1, np.int64))
        marks = {"format": kind.format_name, "format_version": FORMAT_VERSION}
        self._spools["header"].append_bytes(json_bytes(marks))
        self._num_records = 0

    def add(self, packet: Packet) -> None:
        self._text("rollouts", json_bytes({**packet.head, SEAL: packet.seal}))
        for record in packet.records:
            self._text("details", json_bytes({**record.text, SEAL: record.seal}))
            for column in COLUMNS[self._kind]:
                self._spools[column.name].append(record.arrays[column.name])
            for column in {column.group: column for column in COLUMNS[self._kind]}.values():
                self._mark(column.group + _OFFSETS, self._spools[column.name].size)
        self._num_records += len(packet.records)
        self._mark("rollout_records", self._num_records)

    def _text(self, name: str, data: bytes) -> None:
        self._spools[name].append_bytes(data)
        self._mark(name + _OFFSETS, self._spools[name].size)

    def _mark(self, name: str, position: int) -> None:
        self._spools[name].append(np.array([position], np.int64))

    def finished(self) -> list[_Spool]:
        for spool in self._spools.values():
            spool.flush()
        return list(self._spools.values())


def _spooled(
    target: Path, kind: Kind, packets: Iterable[Packet], finish: Callable[[list[_Spool]], None]
) -> None:
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name, ExitStack() as s:
        arrays = _FlatArrays(Path(name), kind, s)
        for packet in packets:
            arrays.add(packet)
        finish(arrays.finished())


def write_npz(path: Path, kind: Kind, packets: Iterable[Packet]) -> None:
    """An uncompressed ``.npz``, for ``numpy.load``."""

    def finish(spools: list[_Spool]) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for spool in spools:
                member = zipfile.ZipInfo(f"{spool.name}.npy", _EPOCH)
                with archive.open(member, "w", force_zip64=True) as out, spool.path.open("rb") as i:
                    form = {"descr": spool.dtype.str, "fortran_order": False}
                    np.lib.format.write_array_header_1_0(out, {**form, "shape": (spool.size,)})
                    shutil.copyfileobj(i, out, _CHUNK)

    _spooled(path, kind, packets, finish)


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ConfigurationError(
            "safetensors files need their package: pip install 'token-capture[safetensors]'"
        ) from error
    return safetensors


def write_safetensors(path: Path, kind: Kind, packets: Iterable[Packet]) -> None:
    """A safetensors file. Its own metadata repeats format and version.

    Raises:
        ConfigurationError: safetensors is not installed.
    """
    package = _safetensors()

    def finish(spools: list[_Spool]) -> None:
        # One entry only: the package writes several in random order.
        marks = {"format": f"{kind.format_name} {FORMAT_VERSION}"}
        package.numpy.save_file({s.name: s.mapped() for s in spools}, path, marks)

    _spooled(path, kind, packets, finish)


# --- reading -----------------------------------------------------------------------------------


def read_npz(path: Path) -> Iterator[Packet]:
    """The packets of a ``.npz`` file; see ``export.read_packets`` for what is raised."""
    try:
        # Opened here: numpy leaves a file open that it cannot read.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except _DAMAGED_NPZ as error:
        raise InvalidExportError(f"{path} cannot be read: {error}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # a seek to an offset that the damaged file names
            raise
        raise InvalidExportError(f"{path} cannot be read: {error}") from error
    yield from _packets(arrays, str(path))


def read_safetensors(path: Path) -> Iterator[Packet]:
    """The packets of a safetensors file."""
    package = _safetensors()
    try:
        arrays = package.numpy.load_file(path)
    except (package.SafetensorError, ValueError, KeyError, MemoryError) as error:
        raise InvalidExportError(f"{path} cannot be read: {error}") from error
    yield from _packets(arrays, str(path))


def _packets(arrays: Mapping[str, Array], where: str) -> Iterator[Packet]:
    if "header" not in arrays:
        raise InvalidExportError(f"{where} is no export of token-capture: it has no header")
    header = json_object(arrays["header"].tobytes(), f"{where}: header")
    kind = kind_of(header.get("format"), header.get("format_version"), where)
    flat = _Flat(kind, arrays, where)
    for at in range(flat.num_rollouts):
        head = json_object(flat.text("rollouts", at), f"{where}: head {at}")
        records = [flat.record(place) for place in range(*flat.records_of(at))]
        yield packet_of(kind, head, records, where)


class _Flat:
    """The arrays of a file, with every offset checked."""

    def __init__(self, kind: Kind, arrays: Mapping[str, Array], where: str) -> None:
        self._kind = kind
        self._arrays = arrays
        self._where = where
        self._offsets: dict[str, list[int]] = {}
        self.num_rollouts = self._take_offsets("rollouts" + _OFFSETS, "rollouts")
        num_records = self._take_offsets("details" + _OFFSETS, "details")
        held = self._take_offsets("rollout_records", None)
        if held != self.num_rollouts or self._offsets["rollout_records"][-1] != num_records:
            raise InvalidExportError(f"{where}: rollout_records does not fit the records")
        for column in COLUMNS[kind]:
            name = column.group + _OFFSETS
            if self._take_offsets(name, column.name) != num_records:
                raise InvalidExportError(f"{where}: {name} does not fit the {num_records} records")

    def _take_offsets(self, name: str, values: str | None) -> int:
        """Check and keep an offsets array; return how many items it cuts its values into."""
        for needed in (name, values):
            if needed is not None and (
                needed not in self._arrays or self._arrays[needed].ndim != 1
            ):
                raise InvalidExportError(f"{self._where}: array {needed!r} is missing or not 1-D")
        offsets = self._arrays[name]
        sound = (
            offsets.dtype == np.int64
            and offsets.size > 0
            and int(offsets[0]) == 0
            and bool((np.diff(offsets) >= 0).all())
            and (values is None or int(offsets[-1]) == self._arrays[values].size)
        )
        if not sound:
            raise InvalidExportError(f"{self._where}: {name} does not cut up {values or 'records'}")
        self._offsets[name] = offsets.tolist()
        return int(offsets.size) - 1

    def records_of(self, at: int) -> tuple[int, int]:
        places = self._offsets["rollout_records"]
        return places[at], places[at + 1]

    def text(self, name: str, at: int) -> bytes:
        return bytes(self._slice(name, name + _OFFSETS, at).astype(np.uint8, copy=False).data)

    def _slice(self, name: str, offsets: str, at: int) -> Array:
        places = self._offsets[offsets]
        return self._arrays[name][places[at] : places[at + 1]]

    def record(self, at: int) -> Record:
        text = json_object(self.text("details", at), f"{self._where}: details {at}")
        arrays = {
            column.name: self._slice(column.name, column.group + _OFFSETS, at)
            for column in COLUMNS[self._kind]
        }
        try:
            return record_of(self._kind, text, arrays)
        except InvalidExportError as error:
            raise InvalidExportError(f"{self._where}: {error}") from error
