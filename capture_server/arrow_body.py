"""The Arrow answers of ``R/snapshot`` and ``R/trajectories``: IPC streams, piece by piece.

The layout is that of exported ``.arrows`` files (``trajectories.formats.columnar``). Pure and
synchronous: the caller calls and iterates in a thread, where pyarrow is imported at the first use.
What cannot be written is raised by the call, before the first piece of an answer goes out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from capture_server.control_models import TrajectoriesRequest
from capture_server.snapshot_body import EntryView
from capture_server.trajectories.export import arrow_stream, with_full_prompts
from capture_server.trajectories.formats.columnar import stream_pieces
from capture_server.trajectories.formats.packets import (
    COLUMNS,
    NAME_OF,
    Kind,
    Packet,
    Record,
    pack_snapshot,
)
from capture_server.trajectories_body import build_rows
from middleware.protocols import TokenCaptureSnapshot


def arrow_is_installed() -> bool:
    """Whether Arrow can be answered here (found out without importing it)."""
    return importlib.util.find_spec("pyarrow") is not None


def snapshot_pieces(snapshot: TokenCaptureSnapshot, view: EntryView) -> Iterator[bytes]:
    """The entries. With ``fields`` only those: columns not asked for are left out."""
    if view.full_prompts:
        snapshot = with_full_prompts(snapshot)
    if view.fields is None:
        return arrow_stream(snapshot)
    columns = [column for column in COLUMNS[Kind.ENTRIES] if column.name in view.fields]
    packet = _selected(pack_snapshot(snapshot), set(view.fields))
    return stream_pieces(Kind.ENTRIES, (packet,), columns)


def _selected(packet: Packet, fields: set[str]) -> Packet:
    shown = {*fields, NAME_OF[packet.kind]}
    if "prompt_token_ids" in fields:
        shown.add("prompt_is_delta")  # never let a suffix be taken for a whole prompt
    records = [
        Record({name: value for name, value in r.text.items() if name in shown}, r.arrays)
        for r in packet.records
    ]
    # A part is not what was sealed.
    return Packet(packet.kind, packet.head, records, is_sealed=False)


def rows_pieces(snapshot: TokenCaptureSnapshot, asked: TrajectoriesRequest) -> Iterator[bytes]:
    """The training rows, built as asked."""
    return arrow_stream(build_rows(snapshot, asked))
