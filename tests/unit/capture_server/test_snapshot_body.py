"""Snapshots as bytes: exact, in pieces, and only what can be proven."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_server.control_models import ENTRY_FIELDS
from capture_server.snapshot_body import (
    EntryView,
    batched,
    encoded,
    json_pieces,
    ndjson_pieces,
    parse_ndjson,
)
from middleware.protocols import IncompleteReason, TokenCaptureSnapshot
from middleware.records import ParentResolutionStatus, TokenEntry, stamp_lineage


def call(call_id: str, prompt: list[int], generation: list[int], **more: Any) -> TokenEntry:
    return TokenEntry(
        rollout_id="r1",
        model_call_id=call_id,
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=[-0.25] * len(generation),
        **more,
    )


def delta(call_id: str, parent: str, prompt: list[int], generation: list[int]) -> TokenEntry:
    return call(
        call_id,
        prompt,
        generation,
        parent_call_id=parent,
        parent_resolution=ParentResolutionStatus.RESOLVED,
        prompt_is_delta=True,
    )


def snapshot(*entries: TokenEntry, **more: Any) -> TokenCaptureSnapshot:
    return TokenCaptureSnapshot("r1", entries, False, "s", 3, **more)


def as_json(of: TokenCaptureSnapshot, **view: Any) -> Any:
    return json.loads(b"".join(json_pieces(of, EntryView(**view))))


tokens = st.lists(st.integers(0, 2**64 - 1), max_size=8)


@given(st.lists(st.tuples(tokens, tokens), max_size=5))
def test_ndjson_round_trip(calls: list[tuple[list[int], list[int]]]) -> None:
    """What a client reads is what was stored, for any ids up to 64 bits."""
    entries = [call(f"c{i}", prompt, generated) for i, (prompt, generated) in enumerate(calls)]
    reasons = (IncompleteReason(code="x", model_call_id="c0", detail="d", at=1.5),)
    data = b"".join(ndjson_pieces(snapshot(*entries, incomplete_reasons=reasons), EntryView()))

    header, read = parse_ndjson(data)

    assert read == entries
    assert header["calls"] == len(entries)
    assert header["incomplete_reasons"] == [
        {"code": "x", "model_call_id": "c0", "detail": "d", "at": 1.5}
    ]


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6), st.randoms())
def test_rebuilt_prompts_are_the_whole_way_to_the_call(
    turns: list[tuple[list[int], list[int]]], shuffler: Any
) -> None:
    """Any chain, in any order of entries: each prompt is everything before its generation."""
    before: list[int] = []
    entries, prompts = [], {}
    for at, (prompt, generated) in enumerate(turns):
        parent = f"c{at - 1}" if at else None
        made = (
            delta(f"c{at}", parent, prompt, generated) if parent else call("c0", prompt, generated)
        )
        prompts[made.model_call_id] = [*before, *prompt]
        before = [*before, *prompt, *generated]
        stamp_lineage(made, parent, parent_resolution=made.parent_resolution, cumulative=before)
        entries.append(made)
    shuffler.shuffle(entries)

    rebuilt = as_json(snapshot(*entries), full_prompts=True)["entries"]

    assert {e["model_call_id"]: e["prompt_token_ids"] for e in rebuilt} == prompts
    assert not any(e["prompt_is_delta"] for e in rebuilt)


def test_links_in_a_circle_end() -> None:
    """Broken lineage is left as it is stored; nothing loops."""
    body = as_json(
        snapshot(delta("a", "b", [1], [2]), delta("b", "a", [3], [4]), delta("c", "c", [5], [6])),
        full_prompts=True,
    )

    assert [e["prompt_token_ids"] for e in body["entries"]] == [[1], [3], [5]]
    assert all(e["prompt_is_delta"] for e in body["entries"])


def test_content_that_orjson_refuses_is_written_all_the_same() -> None:
    """Integers beyond 64 bits and lone surrogates in an agent's text lose nothing."""
    items = [{"type": "message", "content": "\ud800", "number": 2**70}]
    kept = call("c1", [1], [2], output_items=items)

    assert as_json(snapshot(kept))["entries"][0]["output_items"] == items
    by_name = as_json(snapshot(kept), fields=("output_items", "prompt_token_ids"))["entries"]
    assert by_name == [{"output_items": items, "prompt_token_ids": [1]}]


@pytest.mark.parametrize("name", ENTRY_FIELDS)
def test_every_field_can_be_asked_for(name: str) -> None:
    """Required and optional ones; an optional field that is absent is left out."""
    entries = as_json(snapshot(call("c1", [1], [2])), fields=(name,))["entries"]

    expected = call("c1", [1], [2]).model_dump(mode="json")
    assert entries == [{name: expected[name]} if name in expected else {}]


@given(st.lists(st.binary(max_size=40), max_size=10), st.integers(1, 64))
def test_batching_changes_no_byte(pieces: list[bytes], size: int) -> None:
    """Only the borders move; no piece is empty, and all but the last are large enough."""
    joined = list(batched(pieces, size))

    assert b"".join(joined) == b"".join(pieces)
    assert all(len(piece) >= size for piece in joined[:-1])
    assert all(joined)


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_gzip_gives_the_bytes_back(pieces: list[bytes]) -> None:
    """However they were cut."""
    assert gzip.decompress(b"".join(encoded(pieces, "gzip"))) == b"".join(pieces)


@pytest.mark.parametrize("data", [b"", b"[]\n", b"{}\n", b'{"snapshot_id": "s", "calls": 1}\n'])
def test_what_is_no_snapshot_is_refused(data: bytes) -> None:
    """A reader gets an error, not an empty rollout."""
    with pytest.raises(ValueError):
        parse_ndjson(data)
