"""Recompute everything that records and training rows claim, without trusting who wrote them.

``verify_path`` takes a store's root, one journal or an exported file; ``verify_snapshot`` and
``verify_traces`` what a server answered. All yield violations in a fixed order, so that the first
one is the same in every run; nothing is written or repaired. What is recomputed: ``entries``
(digests, lengths, deltas, links, drift), ``rows`` (masks, spans, log-probs, each sampled token
trained once), ``journals`` (lines, checksums, payloads), and the seals of exported files.

It cannot prove what is not recorded: that a fingerprint is that of a request nobody kept (only
its form is checked), or that a rewritten file, sealed again, is the original.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

from capture_server.trajectories.export import Kind, read_packets
from capture_server.trajectories.formats.packets import (
    NAME_OF,
    InvalidExportError,
    Packet,
    head_seal,
    record_seal,
    unpack_snapshot,
    unpack_traces,
)
from capture_server.trajectories.rows import RolloutTraces
from capture_server.verify.entries import RecordedCalls
from capture_server.verify.findings import Checked, Violation
from capture_server.verify.journals import is_journal, journal_paths, read_journal
from capture_server.verify.rows import check_rows, check_rows_against
from middleware.errors import InvalidInputError, UnsupportedSchemaError
from middleware.protocols import TokenCaptureSnapshot

__all__ = [
    "Checked",
    "Violation",
    "load_recorded",
    "verify_path",
    "verify_snapshot",
    "verify_traces",
]

Snapshots = dict[str, TokenCaptureSnapshot]


def verify_path(
    path: Path, checked: Checked | None = None, *, recorded: Snapshots | None = None
) -> Iterator[Violation]:
    """Verify a store's root, a journal, or an exported file.

    ``recorded``: the entries that exported rows are compared with, by rollout id (see
    ``load_recorded``). ``checked`` is counted up as the work goes on.

    Raises:
        InvalidInputError: there is nothing at ``path`` that could be verified.
        ConfigurationError: the format's package is not installed.
        OSError: it cannot be read.
    """
    checked = checked if checked is not None else Checked()
    if path.is_dir():
        paths = journal_paths(path)
        if not paths:
            raise InvalidInputError(f"{path} holds no journals; give the root of a file store")
        for journal in paths:
            yield from _verify_journal(journal, checked)
        return
    with path.open("rb") as file:
        start = file.read(16)
    if is_journal(start):
        yield from _verify_journal(path, checked)
    else:
        yield from _verify_export(path, checked, recorded)


def load_recorded(path: Path) -> Snapshots:
    """The entries of a root, a journal or an export of entries, by rollout id; not verified.

    Raises:
        InvalidInputError: it holds no entries, or cannot be understood.
        OSError: it cannot be read.
    """
    if path.is_dir():
        found: Iterable[TokenCaptureSnapshot | None] = (
            read_journal(journal).snapshot for journal in journal_paths(path)
        )
    else:
        with path.open("rb") as file:
            start = file.read(16)
        if is_journal(start):
            found = (read_journal(path).snapshot,)
        else:
            found = map(unpack_snapshot, read_packets(path))
    return {snapshot.rollout_id: snapshot for snapshot in found if snapshot is not None}


def verify_snapshot(snapshot: TokenCaptureSnapshot, checked: Checked) -> Iterator[Violation]:
    """Verify the entries of one rollout."""
    calls = RecordedCalls(snapshot)
    checked.rollouts += 1
    checked.calls += len(snapshot.entries)
    checked.tokens += calls.num_tokens
    yield from calls.violations()


def verify_traces(
    traces: RolloutTraces, checked: Checked, snapshot: TokenCaptureSnapshot | None = None
) -> Iterator[Violation]:
    """Verify the rows of one rollout, against its entries if they are given."""
    checked.rows += len(traces.rows)
    checked.tokens += sum(row.token_ids.size for row in traces.rows)
    yield from check_rows(traces)
    if snapshot is not None:
        yield from check_rows_against(traces, snapshot, RecordedCalls(snapshot))


def _verify_journal(path: Path, checked: Checked) -> Iterator[Violation]:
    reading = read_journal(path)
    checked.files += 1
    checked.notices += reading.notices
    yield from reading.violations
    if reading.snapshot is not None:
        for found in verify_snapshot(reading.snapshot, checked):
            yield dataclasses.replace(found, file=str(path))


def _verify_export(path: Path, checked: Checked, recorded: Snapshots | None) -> Iterator[Violation]:
    checked.files += 1
    rollouts = 0
    try:
        for packet in read_packets(path):
            rollouts += 1
            for found in _verify_packet(packet, checked, recorded):
                yield dataclasses.replace(found, file=str(path))
    except (InvalidExportError, UnsupportedSchemaError) as error:
        message = str(error).removeprefix(f"{path}").lstrip(": ")
        yield Violation(code=error.code, message=message, file=str(path))
        return
    if not rollouts:
        # An empty file must not pass for a verified one.
        yield Violation(code="empty_export", message="it holds no rollouts", file=str(path))


def _verify_packet(
    packet: Packet, checked: Checked, recorded: Snapshots | None
) -> Iterator[Violation]:
    try:
        if packet.kind is Kind.ROWS:
            traces = unpack_traces(packet)
            snapshot = None
            if recorded is not None:
                snapshot = recorded.get(packet.rollout_id)
                if snapshot is None:
                    message = "there are rows of this rollout, but no entries to compare with"
                    yield Violation(
                        code="entries_missing", message=message, rollout_id=packet.rollout_id
                    )
            checked.rollouts += 1
            yield from verify_traces(traces, checked, snapshot)
        else:
            yield from verify_snapshot(unpack_snapshot(packet), checked)
    except InvalidExportError as error:
        yield Violation(code=error.code, message=str(error), rollout_id=packet.rollout_id)
    # Last: what is wrong inside says more than that something is.
    yield from _check_seals(packet)


def _check_seals(packet: Packet) -> Iterator[Violation]:
    if not packet.is_sealed:
        return  # an answer of the HTTP API, saved as it came
    rollout_id = packet.rollout_id
    if packet.seal != head_seal(packet.kind, packet.head):
        message = "its head is not the one that was exported"
        yield Violation(code="seal_mismatch", message=message, rollout_id=rollout_id)
    for at, record in enumerate(packet.records):
        if record.seal == record_seal(packet.kind, rollout_id, at, record):
            continue
        name = str(record.text.get(NAME_OF[packet.kind], at))
        yield Violation(
            code="seal_mismatch",
            message="the record is not the one that was exported",
            rollout_id=rollout_id,
            row_id=name if packet.kind is Kind.ROWS else "",
            call_id=name if packet.kind is Kind.ENTRIES else "",
        )
