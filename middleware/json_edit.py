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

import numpy as np
import orjson

from middleware.canonical import may_hold_long_integer

_BOM: Final = b"\xef\xbb\xbf"
_SPACE: Final = re.compile(rb"[ \t\r\n]*")
_STRING_BODY: Final = rb'[^"\\]*(?:\\.[^"\\]*)*'
_STRING: Final = re.compile(rb'"' + _STRING_BODY + rb'"', re.DOTALL)
_SCALAR: Final = re.compile(rb"[^,\]}\s]+")
# A key and what follows its colon: all of a string or scalar, nothing of a container.
_MEMBER: Final = re.compile(
    rb'[ \t\r\n]*("(' + _STRING_BODY + rb')")[ \t\r\n]*:[ \t\r\n]*'
    rb'("' + _STRING_BODY + rb'"|[^\[{"\s][^,\]}\s]*|)',
    re.DOTALL,
)
_FLAT: Final = re.compile(rb'[\[{][^\[\]{}"]*[\]}]')  # neither strings nor containers inside
# Inside a skipped container only strings (which may hold brackets) and brackets matter.
_STRUCTURE: Final = re.compile(rb'"' + _STRING_BODY + rb'"|[\[\]{}]', re.DOTALL)
_SMALL: Final = 64  # so many strings and brackets are matched one by one; then numpy takes over
_FIRST_WINDOW: Final = 1 << 14
_QUOTE: Final = 2
_BLANKS: Final = (b" ", b"\n", b"\t", b"\r")
_KINDS: Final = bytes(
    {ord("["): 1, ord("{"): 1, ord("]"): 255, ord("}"): 255, ord('"'): _QUOTE}.get(byte, 0)
    for byte in range(256)
)

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
    if not may_hold_long_integer(raw):
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


def _collect(raw: bytes, pos: int, tree: EditTree, edits: list[tuple[int, int, bytes]]) -> int:
    """Append (start, stop, replacement) in text order for the value at ``pos``; its end.

    What is walked through for its edits is not skipped a second time to find its end.
    """
    first = raw[pos : pos + 1]
    if first == b"[":
        below = tree.get("*")
        if isinstance(below, Mapping):
            return _collect_array(raw, pos, below, edits)
    if first == b"{":
        return _collect_object(raw, pos, tree, edits)
    return _value_stop(raw, pos)


def _collect_array(
    raw: bytes, pos: int, below: EditTree, edits: list[tuple[int, int, bytes]]
) -> int:
    pos = _skip_space(raw, pos + 1)
    while raw[pos : pos + 1] not in (b"]", b""):
        pos = _skip_space(raw, _collect(raw, pos, below, edits))
        if raw[pos : pos + 1] == b",":
            pos = _skip_space(raw, pos + 1)
    return pos + 1


def _collect_object(
    raw: bytes, pos: int, tree: EditTree, edits: list[tuple[int, int, bytes]]
) -> int:
    previous_stop: int | None = None  # end of the last member that stays
    opening, stop = pos, pos + 1
    run_start = pos + 1  # everything from here to the next kept member is dropped
    while (match := _MEMBER.match(raw, stop)) is not None:
        start, value, stop = match.start(1), match.start(3), match.end()
        action = tree.get(_key(match))
        dropped = action == "drop"
        if not dropped and previous_stop is None and start > run_start:
            leading = raw[run_start:start]
            if b"," in leading:
                edits.append((run_start, start, b""))
        if stop == value:  # a container
            if isinstance(action, Mapping):
                stop = _collect(raw, value, action, edits)
            else:
                stop = _value_stop(raw, value)
        if dropped:
            # Remove the comma on the left; a first member takes the comma on its right instead.
            if previous_stop is not None:
                edits.append((previous_stop, stop, b""))
                previous_stop = stop
        else:
            if action == "null":
                edits.append((value, stop, b"null"))
            previous_stop = stop
        last = _skip_space(raw, stop)
        if raw[last : last + 1] != b",":
            break
        stop = last + 1
    closing = _skip_space(raw, stop)
    if previous_stop is None and closing > opening + 1:
        edits.append((opening + 1, closing, b""))
    return closing + 1


def _members(raw: bytes, pos: int) -> Iterator[_Member]:
    """The members of the object whose brace stands at ``pos``."""
    stop = pos + 1
    while (match := _MEMBER.match(raw, stop)) is not None:
        value, stop = match.start(3), match.end()
        if stop == value:  # a container
            stop = _value_stop(raw, value)
        yield _Member(_key(match), match.start(1), value, stop)
        pos = _skip_space(raw, stop)
        if raw[pos : pos + 1] != b",":
            return
        stop = pos + 1


def _key(match: re.Match[bytes]) -> str:
    key = match[2]
    name: str = key.decode("utf-8", "replace") if b"\\" not in key else json.loads(match[1])
    return name


def _value_stop(raw: bytes, pos: int) -> int:
    first = raw[pos : pos + 1]
    if first in (b"{", b"["):
        flat = _FLAT.match(raw, pos)
        return flat.end() if flat is not None else _container_stop(raw, pos)
    match = (_STRING if first == b'"' else _SCALAR).match(raw, pos)
    if match is None:
        raise ValueError("JSON value expected")
    return match.end()


def _container_stop(raw: bytes, pos: int) -> int:
    depth = 0
    for count, match in enumerate(_STRUCTURE.finditer(raw, pos)):
        token = raw[match.start()]
        if token in b"{[":
            depth += 1
        elif token in b"]}":
            depth -= 1
            if depth == 0:
                return match.end()
        if count == _SMALL:
            return _large_container_stop(raw, pos)
    raise ValueError("unbalanced JSON text")


def _large_container_stop(raw: bytes, pos: int) -> int:
    """As ``_container_stop``, in a few passes at memory speed over a growing window."""
    size = _FIRST_WINDOW
    while True:
        text = raw[pos : pos + size]
        # Escapes of one length with what they stand for; afterwards every quote ends or begins.
        if b"\\" in text:
            text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        kinds = np.frombuffer(text.translate(_KINDS), np.int8)
        places = np.flatnonzero(kinds)
        steps = kinds[places]
        quotes = steps == _QUOTE
        in_string = np.logical_xor.accumulate(quotes)
        steps = np.where(quotes | in_string, 0, steps)
        closed = np.flatnonzero((np.cumsum(steps, dtype=np.int32) == 0) & (steps < 0))
        if closed.size:
            return pos + int(places[closed[0]]) + 1
        if pos + size >= len(raw):
            raise ValueError("unbalanced JSON text")
        size *= 4


def _skip_space(raw: bytes, pos: int) -> int:
    if raw[pos : pos + 1] not in _BLANKS:
        return pos
    match = _SPACE.match(raw, pos)
    assert match is not None  # the pattern matches the empty string
    return match.end()


def _first_byte(raw: bytes) -> int:
    return _skip_space(raw, len(_BOM) if raw.startswith(_BOM) else 0)
