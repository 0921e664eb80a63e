"""Edits of JSON *text*: set top-level members, remove or null nested ones, touch nothing else.

Invariant: every byte outside the edited members is the byte that came in; number spelling, key
order, escapes, duplicate and unknown members survive. The text must be valid JSON: callers parse
it first (``loads``), these functions do not validate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

_BOM: Final = b"\xef\xbb\xbf"
_SPACE: Final = re.compile(rb"[ \t\r\n]*")
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SCALAR: Final = re.compile(rb"[^,\]}\s]+")
# Inside a skipped container only strings (which may hold brackets) and brackets matter.
_DIGITS: Final = bytes(48 if 48 <= byte <= 57 else byte for byte in range(256))
_STRUCTURE: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)

Edit = Literal["drop", "null"]
EditTree = Mapping[str, "Edit | EditTree"]
"""What to do below an object: member name -> edit, or the tree of its value.

The name ``"*"`` stands for every element of an array.
"""


def loads(raw: bytes) -> Any:
    """Parse JSON as agents and engines write it: orjson, else the standard library.

    The second reads what orjson refuses (``NaN``, ``Infinity``, lone surrogates in escapes) and
    what it would round (integers beyond 64 bit).

    Raises:
        ValueError: no JSON, or not UTF-8.
    """
    raw = raw.removeprefix(_BOM)
    # translate + find scan at memory speed; a regular expression would cost more than the parse.
    if raw.translate(_DIGITS).find(b"0" * 19) < 0:
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            pass  # the standard library decides
    try:
        # Decoded here: json.loads would guess UTF-16 and UTF-32, which cannot be edited.
        return json.loads(raw.decode())
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error


@dataclass(frozen=True, slots=True)
class _Member:
    key: str
    start: int  # of the key's quote
    value: int
    stop: int  # end of the value


def set_members(raw: bytes, members: Mapping[str, Any]) -> bytes:
    """Set top-level members of an object: replaced where present, else appended.

    A member that occurs several times is replaced everywhere, so that no parser can read the
    old value.
    """
    if not members:
        return raw
    todo = {key: orjson.dumps(value) for key, value in members.items()}
    out: list[bytes] = []
    last = 0
    opening = _first_byte(raw)
    found: set[str] = set()
    end_of_last = opening + 1
    empty = True
    for member in _members(raw, opening):
        empty = False
        end_of_last = member.stop
        if member.key in todo:
            found.add(member.key)
            out += (raw[last : member.value], todo[member.key])
            last = member.stop
    missing = [key for key in todo if key not in found]
    if missing:
        added = b",".join(orjson.dumps(key) + b":" + todo[key] for key in missing)
        out += (raw[last:end_of_last], b"" if empty else b",", added)
        last = end_of_last
    out.append(raw[last:])
    return b"".join(out)


def edit_members(raw: bytes, tree: EditTree) -> bytes:
    """Drop or null the members that the tree names, wherever they are present."""
    edits: list[tuple[int, int, bytes]] = []
    _collect(raw, _first_byte(raw), tree, edits)
    if not edits:
        return raw
    out: list[bytes] = []
    last = 0
    for start, stop, replacement in edits:
        out += (raw[last:start], replacement)
        last = stop
    out.append(raw[last:])
    return b"".join(out)


def _collect(raw: bytes, pos: int, tree: EditTree, edits: list[tuple[int, int, bytes]]) -> None:
    """Append (start, stop, replacement) in text order for the value at ``pos``."""
    if raw[pos : pos + 1] == b"[":
        below = tree.get("*")
        if isinstance(below, Mapping):
            for start, _ in _elements(raw, pos):
                _collect(raw, start, below, edits)
        return
    if raw[pos : pos + 1] != b"{":
        return
    previous_stop: int | None = None  # end of the last member that stays
    run_start = pos + 1  # everything from here to the next kept member is dropped
    for member in _members(raw, pos):
        action = tree.get(member.key)
        if action == "drop":
            # Remove the comma on the left; a first member takes the comma on its right instead.
            if previous_stop is not None:
                edits.append((previous_stop, member.stop, b""))
                previous_stop = member.stop
            continue
        if previous_stop is None and member.start > run_start:
            leading = raw[run_start : member.start]
            if b"," in leading:
                edits.append((run_start, member.start, b""))
        previous_stop = member.stop
        if action == "null":
            edits.append((member.value, member.stop, b"null"))
        elif isinstance(action, Mapping):
            _collect(raw, member.value, action, edits)
    if previous_stop is None:
        closing = _value_stop(raw, pos) - 1
        if closing > pos + 1:
            edits.append((pos + 1, closing, b""))


def _members(raw: bytes, pos: int) -> Iterator[_Member]:
    """The members of the object whose brace stands at ``pos``."""
    pos = _skip_space(raw, pos + 1)
    while raw[pos : pos + 1] == b'"':
        start = pos
        key_stop = _string_stop(raw, pos)
        key = raw[start + 1 : key_stop - 1]
        value = _skip_space(raw, _skip_space(raw, key_stop) + 1)
        stop = _value_stop(raw, value)
        name = (
            key.decode("utf-8", "replace") if b"\\" not in key else json.loads(raw[start:key_stop])
        )
        yield _Member(name, start, value, stop)
        pos = _skip_space(raw, stop)
        if raw[pos : pos + 1] != b",":
            return
        pos = _skip_space(raw, pos + 1)


def _elements(raw: bytes, pos: int) -> Iterator[tuple[int, int]]:
    """Start and stop of the elements of the array whose bracket stands at ``pos``."""
    pos = _skip_space(raw, pos + 1)
    while raw[pos : pos + 1] not in (b"]", b""):
        stop = _value_stop(raw, pos)
        yield pos, stop
        pos = _skip_space(raw, stop)
        if raw[pos : pos + 1] == b",":
            pos = _skip_space(raw, pos + 1)


def _value_stop(raw: bytes, pos: int) -> int:
    first = raw[pos : pos + 1]
    if first == b'"':
        return _string_stop(raw, pos)
    if first in (b"{", b"["):
        depth = 0
        for match in _STRUCTURE.finditer(raw, pos):
            token = raw[match.start()]
            if token in b"{[":
                depth += 1
            elif token in b"}]":
                depth -= 1
                if depth == 0:
                    return match.end()
        raise ValueError("unbalanced JSON text")
    match_scalar = _SCALAR.match(raw, pos)
    if match_scalar is None:
        raise ValueError("JSON value expected")
    return match_scalar.end()


def _string_stop(raw: bytes, pos: int) -> int:
    match = _STRING.match(raw, pos)
    if match is None:
        raise ValueError("unterminated JSON string")
    return match.end()


def _first_byte(raw: bytes) -> int:
    return _skip_space(raw, len(_BOM) if raw.startswith(_BOM) else 0)


def _skip_space(raw: bytes, pos: int) -> int:
    match = _SPACE.match(raw, pos)
    assert match is not None  # the pattern matches the empty string
    return match.end()
