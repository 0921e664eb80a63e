"""Records as database rows: the journal's line, and an entry's arrays as plain bytes beside it.

Invariant: ``read_record(*row_of(record)) == record``, and equal entries give equal canonical
bytes. The line's checksum is the journal's; in place of each array it holds the array's type
and length in bytes. Little-endian; types as in ``middleware.arrays``. No I/O.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from capture_server.stores.fold import with_notes
from capture_server.stores.journal import Entry, Record, decode, encode
from middleware.errors import StoreError
from middleware.records import TokenEntry, unpack_entry

ARRAY_FIELDS: Final = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def row_of(record: Record) -> tuple[bytes, bytes | None]:
    """``(line, arrays)`` of a record; ``arrays`` is None for all but entries."""
    if not isinstance(record, Entry):
        return encode(record), None
    form = dict(record.entry)
    arrays = []
    for name in ARRAY_FIELDS:
        data = binascii.a2b_base64(form[name]["b64"])
        arrays.append(data)
        form[name] = {"dtype": form[name]["dtype"], "bytes": len(data)}
    return encode(replace(record, entry=form)), b"".join(arrays)


def read_record(line: bytes, arrays: bytes | None) -> Record | None:
    """The record of a row, None if its line is damaged.

    Raises:
        StoreError: the arrays do not fit their line.
        UnsupportedSchemaError: a newer version wrote it.
    """
    record = decode(line.removesuffix(b"\n"))
    if not isinstance(record, Entry) or arrays is None:
        return record
    form = dict(record.entry)
    end = 0
    for name in ARRAY_FIELDS:
        start, end = end, end + form[name]["bytes"]
        text = binascii.b2a_base64(arrays[start:end], newline=False).decode("ascii")
        form[name] = {"dtype": form[name]["dtype"], "b64": text}
    if end != len(arrays):
        raise StoreError(f"the arrays of call {record.call!r} have not the length of its record")
    return replace(record, entry=form)


def entry_of(record: Entry, notes: Mapping[str, Any]) -> TokenEntry:
    """The entry as it is read, notes merged in.

    Raises:
        StoreError: undamaged but not understood.
    """
    try:
        return with_notes(unpack_entry(dict(record.entry)), notes)
    except ValueError as exc:
        raise StoreError(
            f"the record of call {record.call!r} is undamaged but not understood: {exc}"
        ) from exc
