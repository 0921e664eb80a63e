"""A look at a file store's root without the store: check every journal, dump every record.

Invariant: nothing is written, and nothing is repaired; a file is read under its lock, so a
running sidecar is not disturbed and its unfinished appends are not called damage. What the store
itself would make of a file (fold, torn tail, corruption) is judged by the same rules.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import orjson

from capture_server.stores.filesystem import FileSystem
from capture_server.stores.fold import RolloutFold, entry_record
from capture_server.stores.journal import (
    SUFFIX,
    Entry,
    Header,
    Record,
    Span,
    Torn,
    journal_name,
    scan,
    unseal,
)
from middleware.arrays import LogProbs, TokenIds
from middleware.errors import UnsupportedSchemaError
from middleware.paths import validate_rollout_id
from middleware.records import payload_digest, unpack_entry

_LOCK_TIMEOUT_S: Final = 10.0
_ARRAYS: Final[dict[str, type[TokenIds] | type[LogProbs]]] = {
    "prompt_token_ids": TokenIds,
    "generation_token_ids": TokenIds,
    "generation_log_probs": LogProbs,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something about a file. A ``problem`` masks or blocks its rollout; a ``note`` does not."""

    severity: Literal["note", "problem"]
    code: str
    detail: str
    line: int = 0  # from one; 0: the file as a whole
    offset: int = 0  # bytes


@dataclass(slots=True, kw_only=True)
class FileReport:
    """What one file holds."""

    path: str  # below the root
    rollout_id: str = ""
    state: str = "unknown"
    version: int = 0
    calls: int = 0
    incomplete: bool = False
    num_records: int = 0
    num_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """No problems; notes are allowed."""
        return all(finding.severity == "note" for finding in self.findings)

    def add(self, severity: Literal["note", "problem"], code: str, detail: str, **at: int) -> None:
        """Note something down."""
        self.findings.append(Finding(severity=severity, code=code, detail=detail, **at))


def check_root(root: Path, *, fs: FileSystem | None = None) -> Iterator[FileReport]:
    """One report per file below the root, by path.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    layer = fs or FileSystem()
    for path in _files(root):
        report = FileReport(path=str(path.relative_to(root)))
        if not path.name.endswith(SUFFIX):
            report.add("note", "leftover", "no journal; a crash may have left it, or it is foreign")
        else:
            _check_file(root, path, report, layer)
        yield report


def _files(root: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(root, onerror=_raise):
        names.sort()
        for name in sorted(files):
            yield Path(directory) / name


def _raise(error: OSError) -> None:
    raise error


def _check_file(root: Path, path: Path, report: FileReport, fs: FileSystem) -> None:
    try:
        data = _read(path, fs)
    except OSError as exc:
        report.add("problem", "unreadable", exc.strerror or str(exc))
        return
    report.num_bytes = len(data)
    if not data:
        report.add("note", "empty", "a crash came between making it and its first line")
        return
    try:
        spans = list(scan(data))
    except UnsupportedSchemaError as exc:
        report.add("problem", "unsupported", str(exc))
        return
    _Check(report, data).run(root, path, spans)


def _read(path: Path, fs: FileSystem) -> bytes:
    fd = fs.open_read_only(path)
    try:
        if not fs.lock(fd, _LOCK_TIMEOUT_S):
            raise OSError(None, f"another process has kept its lock for {_LOCK_TIMEOUT_S:g} s")
        return fs.read(fd, 0, fs.size_and_inode(fd)[0])
    finally:
        fs.close(fd)


class _Check:
    """One file's lines, in order."""

    def __init__(self, report: FileReport, data: bytes) -> None:
        self._report = report
        self._data = data
        self._line = 0  # lines before the current span

    def run(self, root: Path, path: Path, spans: list[Span]) -> None:
        first = spans[0].record
        report = self._report
        if not isinstance(first, Header):
            # A torn first line is the tail of a file that never held anything.
            is_torn = len(spans) == 1 and first is None
            if not is_torn:
                report.add("problem", "no_header", "line 1 does not say whose journal this is")
        else:
            report.rollout_id = first.rollout_id
            if root / journal_name(first.rollout_id) != path:
                place = journal_name(first.rollout_id)
                report.add("problem", "misplaced", f"it belongs at {place}: move it back")
        fold = RolloutFold(report.rollout_id)
        for index, span in enumerate(spans):
            follower = spans[index + 1].record if index + 1 < len(spans) else None
            self._take(fold, span, follower)
        status = fold.status()
        report.state, report.version, report.calls = status.state, status.version, status.calls
        report.incomplete = status.incomplete

    def _take(self, fold: RolloutFold, span: Span, follower: Record | None) -> None:
        at = {"line": self._line + 1, "offset": span.start}
        num_lines = self._data.count(b"\n", span.start, span.end)
        self._line += max(1, num_lines)
        if span.record is not None:
            self._report.num_records += 1
            fold.apply(span.record)
            if isinstance(span.record, Entry):
                self._check_entry(span.record, at)
            return
        size = span.end - span.start
        if follower is None:
            detail = f"{size} bytes behind the last whole line, never acknowledged"
            self._report.add("note", "torn_tail", detail, **at)
        elif isinstance(follower, Torn) and follower.offset == span.start:
            self._report.add("note", "isolated_tail", f"{size} bytes of a torn tail", **at)
        else:
            fold.apply_damage("", num_lines)
            detail = f"{size} damaged bytes before whole lines; the rollout is masked"
            self._report.add("problem", "corrupt", detail, **at)

    def _check_entry(self, record: Entry, at: dict[str, int]) -> None:
        """The line is undamaged; does it hold the record that it says it holds?"""
        try:
            entry = unpack_entry(dict(record.entry))
        except ValueError as exc:
            detail = f"the record of call {record.call!r} is not understood: {exc}"
            self._report.add("problem", "bad_record", detail, **at)
            return
        found = entry_record(
            entry, payload=payload_digest(entry), closes=record.closes, packed=record.entry
        )
        if found != record or entry.rollout_id != self._report.rollout_id:
            detail = f"the record of call {record.call!r} differs from its digest, lengths or id"
            self._report.add("problem", "bad_record", detail, **at)


# --- dump --------------------------------------------------------------------------------------


def dump_root(
    root: Path, *, rollout_id: str | None = None, unpack: bool = False, fs: FileSystem | None = None
) -> Iterator[bytes]:
    """Every line of every journal as one JSON object with its rollout, line and offset.

    Damaged bytes show as ``{"t":"damaged"}`` with their length. ``unpack`` turns packed arrays
    into lists.

    Raises:
        FileNotFoundError: there is no such directory, or no such rollout in it.
    """
    layer = fs or FileSystem()
    if rollout_id is not None:
        paths = iter([root / journal_name(validate_rollout_id(rollout_id))])
    else:
        paths = (path for path in _files(root) if path.name.endswith(SUFFIX))
    for path in paths:
        yield from _dump_lines(str(path.relative_to(root)), _read(path, layer), unpack=unpack)


def _dump_lines(path: str, data: bytes, *, unpack: bool) -> Iterator[bytes]:
    rollout_id, offset = "", 0
    *whole, rest = data.split(b"\n")
    for number, line in enumerate([*whole, rest] if rest else whole, start=1):
        is_whole = number <= len(whole)
        form = unseal(line) if is_whole else None
        if form is None:
            form = {"t": "damaged", "length": len(line) + is_whole, "newline": is_whole}
        if form["t"] == Header.TYPE:
            rollout_id = form["rollout_id"]
        place = {"rollout_id": rollout_id, "path": path, "line": number, "offset": offset}
        yield _dumps(place | (_unpacked(form) if unpack else form))
        offset += len(line) + 1


def _unpacked(form: dict[str, Any]) -> dict[str, Any]:
    entry = form.get("entry")
    if form["t"] != Entry.TYPE or not isinstance(entry, dict):
        return form
    plain = dict(entry)
    for name, kind in _ARRAYS.items():
        if name in plain:
            plain[name] = kind.unpack(plain[name]).tolist()
    return form | {"entry": plain}


def _dumps(form: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(form)
    except orjson.JSONEncodeError:
        # Content may hold what orjson refuses: integers beyond 64 bits, lone surrogates.
        return json.dumps(form, separators=(",", ":")).encode("ascii")


def summary_of(reports: Iterator[FileReport]) -> tuple[dict[str, Any], list[FileReport]]:
    """Counts over a root, and the files that have findings."""
    states: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    found: list[FileReport] = []
    for report in reports:
        is_journal = report.path.endswith(SUFFIX)
        states[report.state] += is_journal
        totals["journals"] += is_journal
        totals["incomplete"] += report.incomplete
        totals["records"] += report.num_records
        totals["bytes"] += report.num_bytes
        totals["problems"] += sum(f.severity == "problem" for f in report.findings)
        totals["notes"] += sum(f.severity == "note" for f in report.findings)
        if report.findings:
            found.append(report)
    names = ("journals", "incomplete", "records", "bytes", "problems", "notes")
    counted: dict[str, Any] = {name: totals[name] for name in names}
    return counted | {"states": {k: v for k, v in sorted(states.items()) if v}}, found
