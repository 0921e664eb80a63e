r"""The journal format: pure encoding, decoding and scanning of one rollout's append-only file.

::

    <root>/<2 hex of sha256(rollout id)>/<name>.jsonl          one file per rollout

    {"t":"journal","rollout_id":"r1","uid":"9f..","v":1,"at":1.5,"crc":"5d41402a"}\n    line 1
    {"t":"intent","call":"c1",...                         ,"crc":"7b2c01aa"}\n
    {"t":"entry","call":"c1",...,"entry":{...}            ,"crc":"e0d8f313"}\n
    |<------------------ the crc covers these bytes ----->|<-- 18 bytes -->|

    t           says                                              then the rollout
    journal     whose file this is; ``uid`` is new on every rewrite
    registered  budgets, expiry and labels, before the first call    open
    intent      a call is about to generate                       open
    cancel      nothing generated reached the client              open
    entry       a finished record (arrays packed), closes intent  open
    note        delivered / sink_ms of a stored record            (no state change)
    ledger_row  a call whose tokens are staged elsewhere (spec 07), closes its intent   open
    incomplete  must be masked, and why                           any state but retired
    closing     no new intents; first half of a freeze            open
    frozen      the fence, with the snapshot's id                 frozen
    retired     the snapshot was consumed; line 2 of a tombstone  retired
    torn        the damaged bytes before this line were a torn tail, known and reported

Each line is one JSON object, so ``jq`` reads a journal. The line ends with the CRC-32 (8 hex
digits) of the bytes before ``,"crc"``. A line counts when it is whole: CRC right, newline there.
Damage after the last whole line is a torn tail, which was never acknowledged; damage before a
whole line is corruption. A line that starts ``{"j":1,`` holds what only Python's ``json`` reads
back exactly (integers beyond 64 bits, lone surrogates).

Invariant: ``decode(encode(record)) == record``, and no damaged byte ever yields a record.
This module does no I/O and knows no state (``fold``).
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final

import orjson

from middleware.errors import InvalidRecordError, UnsupportedSchemaError
from middleware.lineage.ledger import StampedRow

FORMAT_VERSION: Final = 1
SUFFIX: Final = ".jsonl"

_CRC_LENGTH: Final = len(b',"crc":"00000000"}')
_PYTHON_JSON: Final = b'{"j":1,'
_MAX_PLAIN_NAME: Final = 200
_MAX_HASHED_PREFIX: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Line 1. ``uid`` differs between two files that ever stood at one path."""

    TYPE: ClassVar[str] = "journal"
    rollout_id: str
    uid: str
    v: int
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What a rollout was registered with (``decisions.decide_register``).

    ``expires_at`` is a Unix time; None: no such limit.
    """

    TYPE: ClassVar[str] = "registered"
    at: float = 0.0
    max_calls: int | None = None
    max_generated_tokens: int | None = None
    expires_at: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """``holder`` names the process that serves the call (see ``holders``).

    ``attempt`` names the ``open_intent`` that wrote it ("" in old journals; ``attempts``).
    """

    TYPE: ClassVar[str] = "intent"
    call: str
    at: float = 0.0
    request_digest: str = ""
    observed: bool = True
    holder: str = ""
    attempt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Closes an intent of which nothing generated reached the client.

    ``attempt``: the intent that is meant; "" is whichever is open.
    """

    TYPE: ClassVar[str] = "cancel"
    call: str
    reason: str = ""
    at: float = 0.0
    attempt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One stored ``TokenEntry``, with what a status needs beside the packed record.

    ``payload`` is the sha256 of its canonical bytes, ``prompt_len`` the length of the full
    prompt (also of a delta entry), ``closes`` the intent that this record closes ("" = none).
    ``entry`` is the packed record without the fields that hold their default.
    """

    TYPE: ClassVar[str] = "entry"
    call: str
    closes: str
    payload: str
    prompt_len: int
    gen_len: int
    # Not compared: two entries are the same payload exactly when ``payload`` is equal.
    entry: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def request_digest(self) -> str:
        """sha256 of the request body; "" = unknown."""
        return self.entry.get("request_digest") or ""

    @property
    def resolution(self) -> str:
        """``root``, ``resolved``, ``unresolved``; "" = not recorded."""
        return self.entry.get("parent_resolution") or ""

    @property
    def is_drifted(self) -> bool:
        """Whether the prompt left its parent's tokens."""
        return self.entry.get("drift_at") is not None

    @property
    def at(self) -> float:
        """Unix time of dispatch; 0 = unknown."""
        return self.entry.get("created_at") or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow(StampedRow):
    """One committed call of external staging; see its base."""

    TYPE: ClassVar[str] = "ledger_row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Later notes on a stored record, merged when it is read."""

    TYPE: ClassVar[str] = "note"
    call: str
    notes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incomplete:
    """One cause for which the rollout must be masked; ``call`` may be ""."""

    TYPE: ClassVar[str] = "incomplete"
    code: str
    call: str = ""
    detail: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """New intents are refused from here on."""

    TYPE: ClassVar[str] = "closing"
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """The fence."""

    TYPE: ClassVar[str] = "frozen"
    snapshot_id: str
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """All that is left of a consumed snapshot."""

    TYPE: ClassVar[str] = "retired"
    snapshot_id: str
    version: int
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Torn:
    """The damage from ``offset`` up to this line was a torn tail that could not be cut off."""

    TYPE: ClassVar[str] = "torn"
    offset: int
    length: int
    at: float = 0.0


Record = (
    Header | Registered | Intent | Cancel | Entry | LedgerRow | Note | Incomplete | Closing | Frozen
    | Retired | Torn
)  # fmt: skip
_TYPES: Final[dict[str, type[Record]]] = {
    cls.TYPE: cls
    for cls in (
        Header, Registered, Intent, Cancel, Entry, LedgerRow, Note, Incomplete, Closing, Frozen,
        Retired, Torn,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a scanned file: bytes ``[start, end)``; ``record`` is None where damaged."""

    start: int
    end: int
    record: Record | None


def encode(record: Record) -> bytes:
    """The record's line, newline included. Fields that hold their default are left out.

    Raises:
        InvalidRecordError: the content is not JSON at all.
    """
    form: dict[str, Any] = {"t": record.TYPE}
    for f in fields(record):
        value = getattr(record, f.name)
        if value != f.default:
            form[f.name] = value
    return seal(form)


def seal(form: dict[str, Any]) -> bytes:
    """The line of one JSON object (key ``t`` first), newline and checksum included.

    Raises:
        InvalidRecordError: the content is not JSON at all.
    """
    try:
        body = orjson.dumps(form)
    except orjson.JSONEncodeError:
        try:
            body = json.dumps({"j": 1, **form}, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError) as exc:
            raise InvalidRecordError(f"a {form['t']} record cannot be written: {exc}") from exc
    covered = body[:-1]
    return b'%b,"crc":"%08x"}\n' % (covered, zlib.crc32(covered))


def decode(line: bytes) -> Record | None:
    """The record of one line (without its newline), or None if the line is damaged.

    Raises:
        UnsupportedSchemaError: an undamaged line that this version does not understand.
    """
    form = unseal(line)
    return None if form is None else _from_form(form)


def unseal(line: bytes) -> dict[str, Any] | None:
    """What ``seal`` was given, from its line (without the newline); None if it is damaged."""
    covered, tail = line[:-_CRC_LENGTH], line[-_CRC_LENGTH:]
    if not covered or tail != b',"crc":"%08x"}' % zlib.crc32(covered):
        return None
    try:
        form = json.loads(line) if line.startswith(_PYTHON_JSON) else orjson.loads(line)
    except ValueError:
        return None
    if not isinstance(form, dict):
        return None
    form.pop("crc", None)
    form.pop("j", None)
    return form


def _from_form(form: dict[str, Any]) -> Record:
    kind = form.pop("t", None)
    if kind == Header.TYPE and form.get("v") != FORMAT_VERSION:
        raise UnsupportedSchemaError(
            f"journal format version {form.get('v')!r} is not supported; this version reads and "
            f"writes {FORMAT_VERSION}"
        )
    try:
        return _TYPES[kind](**form)
    except (KeyError, TypeError) as exc:
        raise UnsupportedSchemaError(
            f"a journal line of type {kind!r} is not understood; a newer version wrote it"
        ) from exc


def scan(data: bytes, base: int = 0) -> Iterator[Span]:
    """Cut a file's bytes (the first at offset ``base``) into records and damaged spans.

    Spans are adjacent and cover all bytes. Neighbouring damaged lines are one span; a damaged
    last span is a torn tail.

    Raises:
        UnsupportedSchemaError: see ``decode``; the message names the offset.
    """
    start, damaged_from = 0, -1
    while start < len(data):
        newline = data.find(b"\n", start)
        end = len(data) if newline < 0 else newline + 1
        try:
            record = decode(data[start:newline]) if newline >= 0 else None
        except UnsupportedSchemaError as exc:
            raise UnsupportedSchemaError(f"{exc} (byte {base + start})") from exc
        if record is None and damaged_from < 0:
            damaged_from = start
        elif record is not None:
            if damaged_from >= 0:
                yield Span(base + damaged_from, base + start, None)
                damaged_from = -1
            yield Span(base + start, base + end, record)
        start = end
    if damaged_from >= 0:
        yield Span(base + damaged_from, base + len(data), None)


def journal_name(rollout_id: str) -> str:
    """The file's place below the store's root. Distinct ids never share it.

    Ids with upper-case letters are hashed, so that file systems that fold case do not mix
    ``A1`` and ``a1``; ``+`` stands in no id, so no plain name equals a hashed one.
    """
    digest = hashlib.sha256(rollout_id.encode("ascii")).hexdigest()
    name = rollout_id
    if len(rollout_id) > _MAX_PLAIN_NAME or rollout_id != rollout_id.lower():
        name = f"{rollout_id[:_MAX_HASHED_PREFIX].lower()}+{digest[:16]}"
    return f"{digest[:2]}/{name}{SUFFIX}"


def is_hashed_name(file_name: str) -> bool:
    """Whether the file's header has to be read to learn its rollout id."""
    return "+" in file_name
