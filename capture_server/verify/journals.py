"""One journal of a file store, read without a store: lines, checksums, payloads, then its calls.

Nothing is locked, written or repaired, so a root in use may be verified too: what is being
appended at that moment looks like a torn tail, which is a notice and no violation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from capture_server.stores.fold import RolloutFold, with_notes
from capture_server.stores.journal import (
    Entry,
    Header,
    Record,
    Span,
    Torn,
    journal_name,
    scan,
)
from capture_server.verify.findings import Violation
from middleware.errors import UnsupportedSchemaError
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import TokenEntry, payload_digest, unpack_entry


@dataclass(slots=True)
class JournalReading:
    """What a journal holds. ``snapshot`` is its state as it stands, frozen or not."""

    rollout_id: str = ""
    state: str = "unknown"
    snapshot: TokenCaptureSnapshot | None = None
    violations: list[Violation] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def is_journal(start: bytes) -> bool:
    """Whether a file that begins so is a journal."""
    return start.startswith(b'{"t":"')


def journal_paths(root: Path) -> list[Path]:
    """All journals below a store's root, in order."""
    return sorted(path for path in root.glob("*/*.jsonl") if not path.name.startswith("."))


def read_journal(path: Path) -> JournalReading:
    """Read and check one journal's lines.

    Raises:
        OSError: it cannot be read.
    """
    return _Reader(path, path.read_bytes()).reading


class _Reader:
    """One pass over a journal's bytes."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._path = path
        self._data = data
        self._fold = RolloutFold("")
        self._stored: dict[str, tuple[Entry, int]] = {}
        self._line = 1
        self.reading = JournalReading()
        try:
            spans = list(scan(data))
        except UnsupportedSchemaError as error:
            self._found("unsupported_schema", str(error))
            return
        for span, follower in zip(spans, [*spans[1:], None], strict=True):
            if span.record is None:
                self._take_damage(span, follower.record if follower else None)
            else:
                self._take(span.record)
            self._line += data.count(b"\n", span.start, span.end)
        self._finish(list(self._entries()))

    def _found(self, code: str, message: str, *, line: int | None = None, call: str = "") -> None:
        self.reading.violations.append(
            Violation(
                code=code,
                message=message,
                file=str(self._path),
                line=line,
                rollout_id=self.reading.rollout_id,
                call_id=call,
            )
        )

    def _take_damage(self, span: Span, follower: Record | None) -> None:
        size = span.end - span.start
        if follower is None or (isinstance(follower, Torn) and follower.offset == span.start):
            self.reading.notices.append(
                f"{self._path}: line {self._line}: a torn tail of {size} bytes, never acknowledged"
            )
            return
        self._fold.apply_damage("damaged", self._data.count(b"\n", span.start, span.end))
        message = f"{size} damaged bytes at offset {span.start}"
        self._found("corrupt_line", message, line=self._line)

    def _take(self, record: Record) -> None:
        if isinstance(record, Header):
            if not self.reading.rollout_id:
                self._take_header(record)
            return
        if not self.reading.rollout_id and not self.reading.violations:
            self._found("header_missing", "the journal does not begin with its header", line=1)
        if isinstance(record, Entry):
            if record.call in self._stored:
                message = "a second record of this call"
                self._found("duplicate_call_id", message, line=self._line, call=record.call)
            self._stored.setdefault(record.call, (record, self._line))
        self._fold.apply(record)

    def _take_header(self, header: Header) -> None:
        self.reading.rollout_id = header.rollout_id
        # The seed's callers copy single journals elsewhere: only the name itself must fit.
        expected = Path(journal_name(header.rollout_id)).name
        if self._path.name != expected:
            message = f"the journal of rollout {header.rollout_id!r} is called {expected}"
            self._found("journal_misplaced", message, line=self._line)

    def _entries(self) -> Iterator[TokenEntry]:
        for record, line in self._stored.values():
            try:
                entry = unpack_entry(dict(record.entry))
            except ValueError as error:
                self._found("record_invalid", str(error), line=line, call=record.call)
                continue
            for code, message in _disagreements(record, entry):
                self._found(code, message, line=line, call=record.call)
            yield with_notes(entry, self._fold.notes.get(record.call, {}))

    def _finish(self, entries: list[TokenEntry]) -> None:
        if not self.reading.rollout_id and not entries:
            return  # a file that was created and not written to
        reasons = self._fold.reasons()
        self.reading.state = self._fold.state
        ended = self._fold.retired or self._fold.frozen
        self.reading.snapshot = TokenCaptureSnapshot(
            rollout_id=self.reading.rollout_id,
            entries=entries,
            incomplete=bool(reasons),
            snapshot_id=ended.snapshot_id if ended else "",
            version=self._fold.version,
            incomplete_reasons=reasons,
        )


def _disagreements(record: Entry, entry: TokenEntry) -> Iterator[tuple[str, str]]:
    if record.payload != payload_digest(entry):
        yield "payload_mismatch", "the record is not the one that was acknowledged"
    if record.call != entry.model_call_id:
        yield "call_id_mismatch", f"the record inside is of call {entry.model_call_id!r}"
    if record.gen_len != len(entry.generation_token_ids):
        yield "length_mismatch", f"gen_len is {record.gen_len}"
    prompt_len = len(entry.prompt_token_ids)
    if entry.prompt_is_delta and entry.cum_len is not None:
        prompt_len = entry.cum_len - len(entry.generation_token_ids)
    if record.prompt_len != prompt_len:
        yield "length_mismatch", f"prompt_len is {record.prompt_len}, the record's is {prompt_len}"
