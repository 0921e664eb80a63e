"""TokenEntry: what it refuses, its JSON, canonical and packed forms, and its digests."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import struct
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from middleware.canonical import loads_exact, may_hold_long_integer
from middleware.errors import InvalidRecordError
from middleware.records import (
    LogProbs,
    ParentResolutionStatus,
    TokenEntry,
    TokenIds,
    canonical_bytes,
    compute_digest,
    cumulative_tokens,
    encode_token_ids,
    entry_from_json_bytes,
    entry_to_json_bytes,
    extract_token_fields,
    pack_entry,
    payload_digest,
    response_to_output_items,
    stamp_lineage,
    strip_token_fields,
    unpack_entry,
)


def entry(**changes: Any) -> TokenEntry:
    fields: dict[str, Any] = {
        "rollout_id": "r",
        "model_call_id": "c",
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3, 4],
        "generation_log_probs": [-0.5, -0.25],
    }
    return TokenEntry.model_validate(fields | changes)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
entries = st.builds(
    lambda prompt, pairs, items, extras: entry(
        prompt_token_ids=prompt,
        generation_token_ids=[token for token, _ in pairs],
        generation_log_probs=[value for _, value in pairs],
        output_items=items,
        **extras,
    ),
    st.lists(st.integers(0, 2**64 - 1), max_size=8),
    st.lists(st.tuples(st.integers(0, 2**40), st.floats(-100, 0)), max_size=8),
    st.lists(st.dictionaries(st.text(max_size=4), json_values, max_size=3), max_size=2),
    st.fixed_dictionaries(
        {}, optional={"delivered": st.booleans(), "timings": st.fixed_dictionaries(
            {}, optional={"sink_ms": st.floats(0, 9), "total_ms": st.floats(0, 9)})}
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"schema_version": 2}, {"schema_version": 0}, {"schema_version": True},
        {"schema_version": "1"}, {"schema_version": 1.0}, {"schema_version": None},
        {"generation_log_probs": [-0.5]}, {"generation_log_probs": [-0.5, -0.25, -1.0]},
        {"generation_log_probs": [-0.5, float("nan")]}, {"generation_log_probs": [-0.5, None]},
        {"generation_log_probs": [-0.5, float("-inf")]}, {"generation_log_probs": [-0.5, -9999.0]},
        {"generation_token_ids": [3, True]}, {"generation_token_ids": [3, "4"]},
        {"prompt_token_ids": [-1]}, {"prompt_token_ids": None}, {"prompt_token_ids": "12"},
        {"token_item_index": 0}, {"token_item_index": -1, "output_items": [{}]},
        {"token_item_index": 1, "output_items": [{}]},
        {"token_item_index": True, "output_items": [{}, {}]},
        {"parent_resolution": "resolved"}, {"parent_resolution": "resolved", "parent_call_id": ""},
        {"parent_resolution": "root", "parent_call_id": "p"},
        {"parent_resolution": "unresolved", "parent_call_id": "p"}, {"parent_resolution": "maybe"},
        {"prompt_is_delta": True}, {"prompt_is_delta": True, "parent_resolution": "root"},
        {"created_at": float("nan")},
    ],
)  # fmt: skip
def test_refuses_an_entry_that_disagrees_with_itself(changes: dict[str, Any]) -> None:
    """Every rule of the record is a validation error, never a repaired value."""
    with pytest.raises(ValidationError):
        entry(**changes)


def test_accepts_what_the_rules_allow() -> None:
    """Empty generations, zero ids, an index into the items and a delta with its parent."""
    assert entry(generation_token_ids=[], generation_log_probs=[]).generation_token_ids == []
    assert entry(prompt_token_ids=[0], generation_log_probs=[0.0, 0]).prompt_token_ids == [0]
    assert entry(output_items=[{"type": "message"}], token_item_index=0).token_item_index == 0
    delta = entry(prompt_is_delta=True, parent_resolution="resolved", parent_call_id="p")
    assert delta.parent_resolution is ParentResolutionStatus.RESOLVED


def test_the_message_says_what_is_wrong() -> None:
    """A length mismatch names both lengths, a bad log-prob its position."""
    with pytest.raises(ValidationError, match="2 generation_token_ids but 1 generation_log_probs"):
        entry(generation_log_probs=[-0.5])
    with pytest.raises(ValidationError, match="index 1 is nan"):
        entry(generation_log_probs=[-0.5, float("nan")])


def test_absent_extras_are_absent_in_json() -> None:
    """The typed extras read None while absent and never put a null into the record."""
    plain = entry()
    assert plain.delivered is None
    assert plain.engine is None
    assert "delivered" not in plain.model_dump(mode="json")
    plain.engine = "vllm"
    assert plain.model_dump(mode="json")["engine"] == "vllm"
    plain.engine = None
    assert b"engine" not in entry_to_json_bytes(plain)
    assert entry(weight_version=7, unheard_of=[1]).model_dump(mode="json")["unheard_of"] == [1]


def test_lists_given_later_are_checked_and_packed_too() -> None:
    """Assignment and ``model_copy`` take lists, hold compact arrays, and refuse bad ids."""
    changed = entry()
    changed.prompt_token_ids = [7, 8]  # type: ignore[assignment]
    assert isinstance(changed.prompt_token_ids, TokenIds)
    copied = changed.model_copy(update={"generation_log_probs": [-1.0, -2.0]})
    assert isinstance(copied.generation_log_probs, LogProbs)
    with pytest.raises(InvalidRecordError):
        changed.prompt_token_ids = [-1]  # type: ignore[assignment]


@settings(deadline=None, max_examples=60)
@given(entries)
def test_every_form_gives_the_same_entry_back(original: TokenEntry) -> None:
    """JSON, JSON bytes, packed form, pickle and copy keep entry and canonical bytes."""
    form = original.model_dump(mode="json")
    for read in (
        TokenEntry.model_validate(form),
        TokenEntry.model_validate_json(original.model_dump_json()),
        entry_from_json_bytes(entry_to_json_bytes(original)),
        unpack_entry(orjson.loads(orjson.dumps(pack_entry(original)))),
        pickle.loads(pickle.dumps(original)),
        copy.deepcopy(original),
    ):
        assert read == original
        assert canonical_bytes(read) == canonical_bytes(original)


@settings(deadline=None, max_examples=60)
@given(entries)
def test_the_fast_dump_is_pydantics(original: TokenEntry) -> None:
    """Plain lists in the same keys and order as the ordinary dump, and canonical orjson bytes."""
    form = original.model_dump(mode="json")
    assert type(form["prompt_token_ids"]) is list
    assert list(form) == list(original.model_dump(mode="json", exclude_none=False))
    assert form == json.loads(original.model_dump_json())
    form.pop("delivered", None)
    form.get("timings", {}).pop("sink_ms", None)
    if not form.get("timings", True):
        del form["timings"]
    assert canonical_bytes(original) == orjson.dumps(form, option=orjson.OPT_SORT_KEYS)


def test_later_notes_do_not_make_another_payload() -> None:
    """``delivered`` and ``timings.sink_ms`` may be added; anything else is another payload."""
    first = entry(timings={"total_ms": 5.0})
    noted = entry(timings={"total_ms": 5.0, "sink_ms": 1.0}, delivered=True)
    assert payload_digest(first) == payload_digest(noted)
    assert payload_digest(entry()) == payload_digest(entry(timings={"sink_ms": 3}, delivered=False))
    for changes in (
        {"timings": {"total_ms": 6.0}}, {"created_at": 1.0},
        {"generation_log_probs": [-0.5, -0.26]},
        {"prompt_token_ids": [1, 3]}, {"engine": "x"}, {"output_items": [{}]},
    ):  # fmt: skip
        assert payload_digest(entry(**{"timings": {"total_ms": 5.0}} | changes)) != payload_digest(
            first
        )


@pytest.mark.parametrize("odd", [2**70, "\ud800", [{"deep": 2**64}]])
def test_content_that_orjson_refuses_is_still_readable(odd: Any) -> None:
    """Integers beyond 64 bits and lone surrogates in content never make a record unreadable."""
    strange = entry(output_items=[{"value": odd}])
    read = entry_from_json_bytes(entry_to_json_bytes(strange))
    assert read.output_items == [{"value": odd}]
    assert read.model_dump(mode="json") == strange.model_dump(mode="json")
    assert canonical_bytes(read) == canonical_bytes(strange)


@pytest.mark.parametrize(
    "field", ["prompt_token_ids", "generation_token_ids", "generation_log_probs"]
)
@pytest.mark.parametrize(
    "form", [None, [1, 2], {"dtype": "<i2", "b64": ""}, {"dtype": "<i4", "b64": "AAAA"}]
)
def test_unpack_is_strict(field: str, form: Any) -> None:
    """Missing, plain, unknown or torn arrays are refused, and the input is left alone."""
    packed = pack_entry(entry()) | {field: form}
    before = copy.deepcopy(packed)
    with pytest.raises(ValueError):
        unpack_entry(packed)
    assert packed == before


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_digest_is_the_documented_bytes(ids: list[int]) -> None:
    """The vectorised digest equals a byte-by-byte reference, for lists and arrays."""
    slow = b"\x01" + struct.pack(">Q", len(ids)) + b"".join(struct.pack(">Q", i) for i in ids)
    assert encode_token_ids(ids) == slow
    wanted = hashlib.sha256(b"nemo-gym-tokens" + (slow if ids else b"")).hexdigest()
    assert compute_digest(ids) == compute_digest(TokenIds(ids)) == wanted


def test_a_digest_error_names_the_id() -> None:
    """Ids below 0 or of 2**64 and more are refused by name."""
    with pytest.raises(ValueError, match="-7"):
        compute_digest([1, -7])
    with pytest.raises(ValueError, match=str(2**64)):
        compute_digest([2**64])


def test_stamp_lineage_describes_the_full_sequence() -> None:
    """cum_len and digest cover prompt + generation; a delta needs the cumulative sequence."""
    full = stamp_lineage(entry(), None, parent_resolution=ParentResolutionStatus.ROOT)
    assert (full.cum_len, full.digest) == (4, compute_digest([1, 2, 3, 4]))
    assert cumulative_tokens(full) == [1, 2, 3, 4]
    delta = entry(
        prompt_token_ids=[5], prompt_is_delta=True, parent_resolution="resolved", parent_call_id="p"
    )
    with pytest.raises(InvalidRecordError):
        cumulative_tokens(delta)
    with pytest.raises(InvalidRecordError):
        stamp_lineage(delta, "p")
    stamped = stamp_lineage(delta, "p", cumulative=[1, 2, 5, 3, 4])
    assert stamped is delta
    assert (delta.cum_len, delta.digest) == (5, compute_digest([1, 2, 5, 3, 4]))


@pytest.mark.parametrize("cumulative", [[1, 2, 3], [1, 2, 3, 5], [0, 1, 2, 3, 4], []])
def test_stamp_lineage_refuses_a_cumulative_that_disagrees(cumulative: list[int]) -> None:
    """A given sequence that is not the entry's own is refused, and nothing is stamped."""
    full = entry()
    with pytest.raises(InvalidRecordError):
        stamp_lineage(full, None, cumulative=cumulative)
    assert full.digest is None


def test_stamp_lineage_refuses_a_status_without_its_parent() -> None:
    """``resolved`` needs a parent and the others must not have one."""
    with pytest.raises(InvalidRecordError):
        stamp_lineage(entry(), None, parent_resolution=ParentResolutionStatus.RESOLVED)
    with pytest.raises(InvalidRecordError):
        stamp_lineage(entry(), "p", parent_resolution=ParentResolutionStatus.UNRESOLVED)
    assert stamp_lineage(entry(), "p").parent_call_id == "p"  # the seed's older form


def test_anthropic_content_shapes() -> None:
    """A string is one text block; thinking becomes reasoning items before the message."""
    assert response_to_output_items({"role": "assistant", "content": "hi"}) == [
        {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "hi"}]}
    ]
    blocks = [{"type": "text", "text": "a"}, {"type": "redacted_thinking", "data": "x"}, None, 5]
    assert response_to_output_items({"role": "assistant", "content": blocks}) == [
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "a"}]},
    ]


def test_token_fields_are_never_guessed() -> None:
    """Two carriers or half a carrier are an error; no carrier is None."""
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [0.0]}
    both = {"choices": [{"message": dict(tokens)}, {"message": dict(tokens)}]}
    with pytest.raises(ValueError):
        extract_token_fields(both)
    with pytest.raises(ValueError):
        extract_token_fields({"output": [{"generation_token_ids": [2]}]})
    assert extract_token_fields({"output": "text", "choices": {}}) is None
    with pytest.raises(ValueError):
        strip_token_fields([dict(tokens), dict(tokens)])


def test_numpy_tokens_are_not_copied_into_lists() -> None:
    """An entry made from a read-only array keeps that very memory."""
    ids = np.arange(1000, dtype=np.int32)
    ids.setflags(write=False)
    made = entry(prompt_token_ids=TokenIds(ids))
    assert np.shares_memory(made.prompt_token_ids.array, ids)


@pytest.mark.parametrize(
    ("text", "looks_long"),
    [
        ("[-9223372036854775809]", True),
        ("[18446744073709551616]", True),
        ("1234567890123456789", True),
        ("[999999999999999999, -0.0012345678901234567, 0.00000000001234567890123456789]", False),
        ("[0.0012345678901234567, 12345678901234567890]", True),
        ("[0.0012345678901234567e300]", False),
    ],
)
def test_only_integers_beyond_64_bits_take_the_slow_reader(text: str, looks_long: bool) -> None:
    """Log-probs have as many digits behind their point; integers are exact either way."""
    assert may_hold_long_integer(text.encode()) is looks_long
    assert repr(loads_exact(text)) == repr(json.loads(text))
