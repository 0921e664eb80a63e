"""Rollouts to files and back: JSON lines, Arrow IPC, Parquet, safetensors, npz.

Two kinds of export: training rows (``RolloutTraces``) and entries (``TokenCaptureSnapshot``), any
number of rollouts per file. The file's suffix chooses the format when writing; its first bytes
tell it when reading. Invariant: what is loaded equals what was exported, ids, log-probs (bit for
bit), masks, spans and metadata; a file that was cut or changed raises, it is never repaired.

Rollouts are taken from an iterator and written one after the other: memory is bounded by the
largest one. A file appears under its name when it is whole and on disk. What the files hold is
described in ``formats``; whether it is true, ``capture_server.verify`` checks.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from capture_server.trajectories.deltas import place_deltas
from capture_server.trajectories.duplicates import one_call_per_id
from capture_server.trajectories.formats import columnar, columnar_reader, flat, jsonl
from capture_server.trajectories.formats.packets import (
    FORMAT_VERSION,
    InvalidExportError,
    Kind,
    Packet,
    pack_snapshot,
    pack_traces,
    unpack_snapshot,
    unpack_traces,
)
from capture_server.trajectories.rows import RolloutTraces
from capture_server.trajectories.soundness import split_sound
from middleware.errors import InvalidInputError
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import TokenEntry

__all__ = [
    "FORMAT_VERSION",
    "SUFFIXES",
    "InvalidExportError",
    "Kind",
    "arrow_stream",
    "check_suffix",
    "entries_from_arrow",
    "export_entries",
    "export_rows",
    "load_entries",
    "load_rows",
    "read_packets",
    "rows_from_arrow",
    "with_full_prompts",
]

Writer = Callable[[Path, Kind, Iterable[Packet]], None]


def export_rows(path: str | Path, traces: Iterable[RolloutTraces]) -> int:
    """Write the training rows of rollouts to one file; return how many rollouts.

    The suffix is one of ``SUFFIXES``. An existing file is replaced, in one step.

    Raises:
        InvalidInputError: unknown suffix, or a rollout that no export can hold.
        ConfigurationError: the format's package is not installed.
        OSError: the disk refused.
    """
    return _export(Path(path), Kind.ROWS, map(pack_traces, traces))


def export_entries(
    path: str | Path, snapshots: Iterable[TokenCaptureSnapshot], *, full_prompts: bool = False
) -> int:
    """Write the entries of frozen rollouts to one file; return how many rollouts.

    ``full_prompts`` rebuilds prompts stored as suffixes (see ``with_full_prompts``).

    Raises:
        As ``export_rows``.
    """
    if full_prompts:
        snapshots = map(with_full_prompts, snapshots)
    return _export(Path(path), Kind.ENTRIES, map(pack_snapshot, snapshots))


def load_rows(path: str | Path) -> Iterator[RolloutTraces]:
    """The rollouts of an export of rows, one after the other.

    Raises:
        InvalidExportError: no whole export of rows.
        UnsupportedSchemaError: a version that this release does not read.
        ConfigurationError: the format's package is not installed.
        OSError: it cannot be opened.
    """
    return map(unpack_traces, read_packets(path))


def load_entries(path: str | Path) -> Iterator[TokenCaptureSnapshot]:
    """The rollouts of an export of entries, one after the other.

    Raises:
        As ``load_rows``.
    """
    return map(unpack_snapshot, read_packets(path))


def with_full_prompts(snapshot: TokenCaptureSnapshot) -> TokenCaptureSnapshot:
    """The snapshot with delta prompts rebuilt, as far as digests prove them.

    What cannot be rebuilt stays a delta and says so. Arrays are shared along a chain.
    """
    calls, _ = one_call_per_id(split_sound(snapshot.entries)[0])
    for lost in place_deltas(calls):
        del calls[lost]
    # Deepest first: one array then serves all shorter prompts on its path.
    deepest_first = sorted(calls.values(), key=lambda call: -call.prompt_len)
    prompts = {call.call_id: call.full_prompt() for call in deepest_first}

    def rebuilt(entry: TokenEntry) -> TokenEntry:
        if not entry.prompt_is_delta or entry.model_call_id not in prompts:
            return entry
        whole = {"prompt_token_ids": prompts[entry.model_call_id], "prompt_is_delta": False}
        return entry.model_copy(update=whole)

    return TokenCaptureSnapshot(
        rollout_id=snapshot.rollout_id,
        entries=[rebuilt(entry) for entry in snapshot.entries],
        incomplete=snapshot.incomplete,
        snapshot_id=snapshot.snapshot_id,
        version=snapshot.version,
        incomplete_reasons=snapshot.incomplete_reasons,
    )


# --- Arrow over HTTP ---------------------------------------------------------------------------


def arrow_stream(source: RolloutTraces | TokenCaptureSnapshot) -> Iterator[bytes]:
    """One rollout as an Arrow IPC stream, piece by piece.

    Raises:
        InvalidInputError: no export can hold it; raised here, not by the iterator.
        ConfigurationError: pyarrow is not installed.
    """
    if isinstance(source, RolloutTraces):
        return columnar.stream_pieces(Kind.ROWS, (pack_traces(source),))
    return columnar.stream_pieces(Kind.ENTRIES, (pack_snapshot(source),))


def rows_from_arrow(data: bytes) -> RolloutTraces:
    """The reader's side of ``arrow_stream`` for training rows.

    Raises:
        As ``load_rows``.
    """
    return unpack_traces(_only_packet(data))


def entries_from_arrow(data: bytes) -> TokenCaptureSnapshot:
    """The reader's side of ``arrow_stream`` for entries.

    Raises:
        As ``load_rows``.
    """
    return unpack_snapshot(_only_packet(data))


def _only_packet(data: bytes) -> Packet:
    packets = list(columnar_reader.read_arrow_stream(io.BytesIO(data), "Arrow stream"))
    if len(packets) != 1:
        raise InvalidExportError(f"the Arrow stream holds {len(packets)} rollouts, not one")
    return packets[0]


# --- files -------------------------------------------------------------------------------------


def _to_open_file(write: Callable[..., None], *, with_kind: bool = True) -> Writer:
    def write_path(path: Path, kind: Kind, packets: Iterable[Packet]) -> None:
        with path.open("wb") as file:
            if with_kind:
                write(file, kind, packets)
            else:
                write(file, packets)

    return write_path


_WRITERS: Final[dict[str, Writer]] = {
    ".jsonl": _to_open_file(jsonl.write_jsonl, with_kind=False),
    ".ndjson": _to_open_file(jsonl.write_jsonl, with_kind=False),
    ".arrow": _to_open_file(columnar.write_arrow_file),
    ".arrows": _to_open_file(columnar.write_arrow_stream),
    ".parquet": _to_open_file(columnar.write_parquet),
    ".safetensors": flat.write_safetensors,
    ".npz": flat.write_npz,
}
SUFFIXES: Final = tuple(_WRITERS)


def check_suffix(path: Path) -> None:
    """Refuse a file name that names no format.

    Raises:
        InvalidInputError: naming those that exist.
    """
    if path.suffix not in _WRITERS:
        raise InvalidInputError(
            f"{path}: the suffix chooses the format; use one of {', '.join(SUFFIXES)}"
        )


def _export(path: Path, kind: Kind, packets: Iterable[Packet]) -> int:
    check_suffix(path)
    written = 0

    def counted() -> Iterator[Packet]:
        nonlocal written
        for packet in packets:
            written += 1
            yield packet

    with _appearing_whole(path) as partial:
        _WRITERS[path.suffix](partial, kind, counted())
    return written


@contextmanager
def _appearing_whole(path: Path) -> Iterator[Path]:
    """A temporary file that takes the name ``path`` once it is whole and on disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # without it a crash may bring the old file back
        finally:
            os.close(directory)
    finally:
        partial.unlink(missing_ok=True)


def read_packets(path: str | Path) -> Iterator[Packet]:
    """The rollouts of a file as they stand in it, nothing checked but their form.

    Raises:
        InvalidExportError: no export, cut, or with arrays of wrong type or length.
        UnsupportedSchemaError: a version that this release does not read.
        ConfigurationError: the format's package is not installed.
        OSError: it cannot be opened.
    """
    path = Path(path)
    with path.open("rb") as file:
        start = file.read(16)
    if start.startswith(b"ARROW1"):
        return columnar_reader.read_arrow_file(path)
    if start.startswith(b"PAR1"):
        return columnar_reader.read_parquet(path)
    if start.startswith(b"PK"):
        return flat.read_npz(path)
    if start.startswith(b"\xff\xff\xff\xff"):
        return _read_arrow_stream(path)
    if start[4:9] == b"\0\0\0\0{":  # the length of a JSON header, then the header
        return flat.read_safetensors(path)
    if start.startswith(b"{") or not start:
        return jsonl.read_jsonl(path)
    raise InvalidExportError(f"{path} is no export of token-capture")


def _read_arrow_stream(path: Path) -> Iterator[Packet]:
    with path.open("rb") as file:
        yield from columnar_reader.read_arrow_stream(file, str(path))
