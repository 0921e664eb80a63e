"""middleware.capture: the seed's entry points, and sinks that offer less than ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from capture_server.stores.memory import MemoryCaptureStore
from capture_server.stores.registry import open_resolver
from middleware.capture import (
    CaptureContext,
    capture_health_snapshot,
    capture_tokens,
    commit_entry,
    current_capture_context,
    register_call_intent,
    reset_token_sink,
    resolve_parent,
    set_token_sink,
)
from middleware.records import TokenEntry, compute_digest

USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
BUNDLE = {
    "prompt_token_ids": [1, 2],
    "generation_token_ids": [3],
    "generation_log_probs": [-0.5],
}


def served(text: str = "yes", **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text} | (fields or BUNDLE)
    return {"id": "resp-1", "model": "m", "choices": [{"index": 0, "message": message}]}


@pytest.fixture
def store() -> Iterator[MemoryCaptureStore]:
    """A store per test."""
    store = MemoryCaptureStore()
    yield store
    asyncio.run(store.close())


def context(sink: Any, call_id: str = "c1") -> CaptureContext:
    resolver = open_resolver("memory:", sink) if isinstance(sink, MemoryCaptureStore) else None
    return CaptureContext(
        rollout_id="r", model_call_id=call_id, token_sink=sink, lineage_store=resolver
    )


async def test_the_steps_of_a_framework_that_holds_whole_responses(
    store: MemoryCaptureStore,
) -> None:
    """Intent, parent, record; the second call continues the first and is stored as a delta."""
    first = context(store)
    token = set_token_sink(first)
    await resolve_parent(USER)
    await register_call_intent()
    assert (await store.status("r")).open_intents == ["c1"]
    await capture_tokens(served())
    reset_token_sink(token)

    second = context(store, "c2")
    token = set_token_sink(second)
    await resolve_parent(
        [*USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "?"}]
    )
    assert (second.parent_call_id, second.parent_tokens) == ("c1", [1, 2, 3])
    await register_call_intent()
    await capture_tokens(served("no", **BUNDLE | {"prompt_token_ids": [1, 2, 3, 4]}))
    reset_token_sink(token)

    assert current_capture_context() is None
    snapshot = await store.freeze("r")
    root, child = sorted(snapshot.entries, key=lambda entry: entry.model_call_id)
    assert first.committed
    assert second.committed
    assert not snapshot.incomplete
    assert root.output_items[0]["content"] == "yes"
    assert (child.parent_call_id, child.prompt_is_delta, child.prompt_token_ids) == (
        "c1",
        True,
        [4],
    )
    assert child.digest == compute_digest([1, 2, 3, 4, 3])


async def test_without_a_context_nothing_happens() -> None:
    """Untagged traffic costs nothing and raises nothing."""
    await resolve_parent(USER)
    await register_call_intent()
    await capture_tokens(served())
    await commit_entry(TokenEntry(rollout_id="r", model_call_id="c", **BUNDLE))


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (served(content="x"), "missing_token_ids"),
        (served(**BUNDLE | {"generation_log_probs": None}), "invalid_token_ids"),
        (served(**BUNDLE | {"generation_log_probs": [-0.1, -0.2]}), "length_mismatch"),
        (served(**BUNDLE | {"generation_log_probs": [float("nan")]}), "non_finite_log_probs"),
        (None, "unparsable_answer"),
    ],
)
async def test_a_response_without_sound_tokens_is_a_hole(
    store: MemoryCaptureStore, response: Any, code: str
) -> None:
    """Incomplete with a named reason; the caller never sees an exception."""
    token = set_token_sink(context(store))
    await capture_tokens(response)
    reset_token_sink(token)

    snapshot = await store.freeze("r")
    assert [reason.code for reason in snapshot.incomplete_reasons] == [code]


class PlainSink:
    """What a framework must have, and nothing more."""

    def __init__(self, *, fails: bool = False) -> None:
        self.entries: list[TokenEntry] = []
        self.marked: list[tuple[str, str]] = []
        self.fails = fails

    async def put(self, entry: TokenEntry) -> None:
        if self.fails:
            raise RuntimeError("transport away")
        self.entries.append(entry)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        self.marked.append((rollout_id, model_call_id))

    async def close(self) -> None: ...


async def test_a_sink_without_intents_works() -> None:
    """Custom sinks need ``put``, ``mark_incomplete`` and ``close``."""
    sink = PlainSink()
    token = set_token_sink(context(sink))
    await resolve_parent(USER)
    await register_call_intent()
    await capture_tokens(served())
    reset_token_sink(token)

    assert [entry.model_call_id for entry in sink.entries] == ["c1"]
    assert sink.marked == []


async def test_a_failing_sink_is_marked_and_counted() -> None:
    """The call is served; the rollout is incomplete; the counters tell."""
    sink = PlainSink(fails=True)
    before = capture_health_snapshot()
    token = set_token_sink(context(sink))
    await capture_tokens(served(), USER)
    reset_token_sink(token)

    assert sink.marked == [("r", "c1")]
    assert capture_health_snapshot()["put_failures"] == before["put_failures"] + 1


async def test_a_finished_entry_is_stamped_and_stored(store: MemoryCaptureStore) -> None:
    """``commit_entry`` for engine-side capture: lineage and continuation are filled in."""
    token = set_token_sink(context(store))
    await resolve_parent(USER)
    entry = TokenEntry(rollout_id="r", model_call_id="c1", **BUNDLE)
    await commit_entry(entry)
    reset_token_sink(token)

    (stored,) = (await store.freeze("r")).entries
    assert stored.digest == compute_digest([1, 2, 3])
    assert stored.parent_resolution is not None
    assert stored.parent_resolution.value == "root"
    assert stored.continuation_context_len == 1
