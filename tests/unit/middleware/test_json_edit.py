"""middleware.json_edit: edits of JSON text equal edits of the parsed value, bytes kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware.json_edit import EditTree, edit_members, loads, set_members

TREE: EditTree = {
    "x": "drop",
    "y": "null",
    "c": {"*": {"x": "drop", "y": "null", "m": {"x": "drop"}}},
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(st.sampled_from('xycma\\"'), below, max_size=5)
    ),
    max_leaves=20,
)


def edited(value: Any, tree: EditTree) -> Any:
    """The slow, obvious form of ``edit_members``."""
    if isinstance(value, list):
        below = tree.get("*")
        return [edited(item, below) if isinstance(below, dict) else item for item in value]
    if not isinstance(value, dict):
        return value
    out = {}
    for key, item in value.items():
        action = tree.get(key)
        if action == "drop":
            continue
        if isinstance(action, dict):
            out[key] = edited(item, action)
        else:
            out[key] = None if action == "null" else item
    return out


@given(VALUES, st.sampled_from([None, 0, 2]), st.booleans())
def test_edits_equal_edits_of_the_parsed_value(
    value: Any, indent: int | None, ascii_: bool
) -> None:
    """Whatever the layout of the text."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_).encode()

    assert json.loads(edit_members(text, TREE)) == edited(value, TREE)


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=5), st.sampled_from([None, 1]))
def test_set_members_replaces_or_appends(value: dict[str, Any], indent: int | None) -> None:
    """The result parses to the dict with the members set."""
    members = {"x": True, "new": 0}
    text = json.dumps(value, indent=indent).encode()

    assert json.loads(set_members(text, members)) == value | members


def test_what_is_not_edited_keeps_its_bytes() -> None:
    """C43: number spelling, key order, unknown members, big integers, escapes, spaces."""
    text = b'{ "b":1.0e5, "n":123456789012345678901234567890 ,"a":"\\u00e9\\/", "b":[ 1,2 ] }'

    assert edit_members(text, TREE) == text
    assert set_members(text, {"z": 1}) == text[:-2] + b',"z":1 }'


def test_every_occurrence_of_a_doubled_member_is_overridden() -> None:
    """Parsers differ in which one they read."""
    assert set_members(b'{"l":false,"l":null}', {"l": True}) == b'{"l":true,"l":true}'


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b"[12345678901234567890123]", [12345678901234567890123]),
        (b"[18446744073709551615]", [2**64 - 1]),
        (b"[1e400]", [float("inf")]),
        (b'["\\ud800"]', ["\ud800"]),
    ],
)
def test_loads_reads_what_python_servers_write(raw: bytes, value: Any) -> None:
    """Integers stay exact at any size; what orjson refuses is still read."""
    assert loads(raw) == value


def test_loads_refuses_what_is_no_json() -> None:
    """As a ValueError, whatever the fault."""
    for raw in (b"", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(ValueError, match=r"."):
            loads(raw)
