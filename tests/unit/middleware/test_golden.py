"""The golden vectors of records, fingerprints and lineage: every case, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from middleware.fingerprint import (
    FINGERPRINT_VERSION,
    HashedRequest,
    assistant_fingerprint,
    canonicalize_tool_arguments,
    conversation_digest,
)
from middleware.lineage import (
    IncrementalLineageStore,
    InMemoryLineageStore,
    stamp_continuation,
)
from middleware.records import (
    TokenEntry,
    compute_digest,
    encode_token_ids,
    extract_token_fields,
    response_to_output_items,
    stamp_lineage,
    strip_token_fields,
)

GOLDEN = Path(__file__).parents[2] / "data" / "golden"


def cases(name: str) -> list[Any]:
    found = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return [pytest.param(case["input"], case["expected"], id=case["name"]) for case in found]


def outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except ValueError:
        return "error"


@pytest.mark.parametrize(("given", "expected"), cases("token_digest"))
def test_token_digest(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Digest and encoding of an id sequence are the wire contract's bytes."""
    ids = given["token_ids"]
    ids = list(range(*ids["range"])) if isinstance(ids, dict) else ids
    assert outcome(lambda: compute_digest(ids)) == expected["digest"]
    encoded = outcome(lambda: encode_token_ids(ids).hex())
    if "encoded" in expected:
        assert encoded == expected["encoded"]
    else:
        assert len(encoded) == 2 * expected["encoded_length"]
        assert encoded[:82] == expected["encoded_head"]


@pytest.mark.parametrize(("given", "expected"), cases("extract"))
def test_extract(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Token fields, output items and stripped items of a served response."""
    payload = given["payload"]
    untouched = json.dumps(payload)

    def stripped() -> dict[str, Any]:
        items, index = strip_token_fields(response_to_output_items(payload))
        return {"items": items, "token_item_index": index}

    assert outcome(lambda: extract_token_fields(payload)) == expected["token_fields"]
    assert outcome(lambda: response_to_output_items(payload)) == expected["output_items"]
    assert outcome(stripped) == expected["stripped"]
    assert json.dumps(payload) == untouched


@pytest.mark.parametrize(("given", "expected"), cases("fingerprint"))
def test_fingerprint(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Both hashes and the canonical arguments, version 3."""
    assert FINGERPRINT_VERSION == 3
    if "arguments" in given:
        assert (
            outcome(lambda: canonicalize_tool_arguments(given["arguments"]))
            == (expected["canonical"])
        )
        return
    messages = given["messages"]
    assert outcome(lambda: assistant_fingerprint(messages)) == expected["assistant_fingerprint"]
    assert outcome(lambda: conversation_digest(messages)) == expected["conversation_digest"]
    if "error" in expected.values():
        with pytest.raises(ValueError):
            HashedRequest(messages)
        return
    hashed = HashedRequest(messages)
    assert hashed.fingerprint == expected["assistant_fingerprint"]
    assert hashed.prefix_digest(len(hashed)) == expected["conversation_digest"]


class ListBackend(IncrementalLineageStore):
    """The smallest backend: entries in a list, the handle is the index."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[TokenEntry] = []

    def _fetch_new_entries(self, rollout_id: str, cursor: Any) -> tuple[list[Any], Any]:
        new = list(enumerate(self.entries))[cursor or 0 :]
        found = [(entry, at) for at, entry in new if entry.rollout_id == rollout_id]
        return found, len(self.entries)

    def _load_entry(self, rollout_id: str, ref: Any) -> TokenEntry:
        return self.entries[ref]

    async def put(self, entry: TokenEntry) -> None:
        self.entries.append(entry)


def committed(call: dict[str, Any]) -> TokenEntry:
    entry = TokenEntry(
        rollout_id=call.get("rollout_id", "r"),
        model_call_id=call["call_id"],
        prompt_token_ids=call["prompt_token_ids"],
        generation_token_ids=call["generation_token_ids"],
        generation_log_probs=[-0.5] * len(call["generation_token_ids"]),
        output_items=call["output_items"],
    )
    stamp_lineage(entry, None)
    if not call.get("unstamped"):
        stamp_continuation(entry, call["request_items"])
    if "fingerprint_version" in call:
        entry.fingerprint_version = call["fingerprint_version"]
    return entry


@pytest.mark.parametrize("make_store", [InMemoryLineageStore, ListBackend])
@pytest.mark.parametrize(("given", "expected"), cases("resolve"))
async def test_resolve(
    given: dict[str, Any], expected: dict[str, Any], make_store: type[ListBackend]
) -> None:
    """The request-time decision, the same in memory and over a backend."""
    store = make_store()
    for call in given["commits"]:
        await store.put(committed(call))
    try:
        found = await store.resolve("r", given["request"])
    except ValueError:
        assert expected == "error" or expected.get("status") == "error"
        return
    match = found.match
    assert {
        "status": found.status.value,
        "reason": found.reason,
        "parent_call_id": match.model_call_id if match else None,
        "cumulative_token_ids": match.cumulative_token_ids.tolist() if match else None,
    } == expected
    await store.close()
