"""Rows bytes, put and put-wide: what the file store costs on disk and in time."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from capture_server.stores.file import TokenCaptureStore
from middleware.records import TokenEntry, entry_to_json_bytes
from tests.bench import data, machine
from tests.bench.measure import Pair, Row, compare, medians, without_gc
from tests.bench.naive import JsonlStore

_NAIVE = "JSONL + state rewritten per put"
Put = Callable[[Any], Awaitable[None]]


def stored_bytes(short: bool) -> list[Row]:
    """Bytes of the journal, all framing included."""
    calls, tokens = 100, 100_000
    delta = data.growing_rollout(calls, tokens)
    full = data.growing_rollout(calls, tokens, delta=False)
    with tempfile.TemporaryDirectory() as root:
        stored = asyncio.run(_stored_size(Path(root), delta))
    as_json = sum(len(entry_to_json_bytes(entry)) for entry in full)
    prompt = sum(len(entry.prompt_token_ids) for entry in delta)
    generated = sum(len(entry.generation_token_ids) for entry in delta)
    size = f"{calls} calls to {tokens // 1000}k tokens"
    return [
        compare(
            "bytes",
            f"{size}, journal",
            (stored, as_json),
            unit="KB",
            scale=1e-3,
            target=1 / 20,
            against="JSON of full prompts",
        ),
        compare(
            "bytes-token",
            f"{size}, journal, {prompt} new prompt + {generated} generated tokens",
            (stored, 6.0 * prompt + 14.0 * generated),
            unit="KB",
            scale=1e-3,
            target=1.0,
            against="6 B a prompt token, 14 B a generated one",
        ),
    ]


async def _stored_size(root: Path, entries: Sequence[TokenEntry]) -> int:
    store = TokenCaptureStore(root)
    await asyncio.gather(*map(store.put, entries))
    await store.close()
    return store.statistics().bytes_written


def put(short: bool) -> list[Row]:
    """One rollout, one put after another: each waits for its own sync."""
    calls = 600 if short else 2_000
    block = 50 if short else 100
    entries = data.growing_rollout(calls, calls * 50)
    lists = data.as_lists(entries)
    with tempfile.TemporaryDirectory() as root:
        ours, theirs = asyncio.run(_blocks(Path(root), entries, lists, block))
        grown, fresh = asyncio.run(_first_and_last(Path(root) / "growth", entries, 100))
        sync = machine.fsync_seconds(Path(root))
    size = f"{calls:,} puts of 50 tokens, one rollout"
    return [
        compare(
            "put",
            size,
            (sum(ours) / calls, sum(theirs) / calls),
            unit="ms a put",
            scale=1000,
            target=3.0,
            bound=1.0,  # one sync each: where that is slow, little else counts
            sense="at least",
            inverse=True,
            against=_NAIVE,
            fsync_ms=round(sync * 1000, 3),
        ),
        compare(
            "put-growth",
            f"last 100 of {calls:,} puts against the first 100 of another rollout, in turn",
            (grown, fresh),
            unit="ms a put",
            scale=1000,
            target=1.2,
            against="the first 100",
        ),
    ]


async def _first_and_last(root: Path, entries: Sequence[TokenEntry], count: int) -> Pair:
    """Median seconds of a put into a grown rollout, and into one that has just begun."""
    store = TokenCaptureStore(root)
    young = [entry.model_copy(update={"rollout_id": "young"}) for entry in entries[: count + 1]]
    await asyncio.gather(*map(store.put, [*entries[:-count], young[0]]))
    taken = []
    with without_gc():
        for last, first in zip(entries[-count:], young[1:], strict=True):
            taken.append(
                (await _one_by_one(store.put, [last]), await _one_by_one(store.put, [first]))
            )
    await store.close()
    return medians(taken)


async def _blocks(
    root: Path, entries: Sequence[TokenEntry], lists: Sequence[Any], block: int
) -> tuple[list[float], list[float]]:
    """Seconds per block of puts, both stores in turn."""
    (root / "naive").mkdir()
    store, naive = TokenCaptureStore(root / "ours"), JsonlStore(root / "naive")
    ours, theirs = [], []
    for start, stop in pairwise(range(0, len(entries) + 1, block)):
        with without_gc():
            ours.append(await _one_by_one(store.put, entries[start:stop]))
            theirs.append(await _one_by_one(naive.put, lists[start:stop]))
    await store.close()
    return ours, theirs


async def _one_by_one(put_one: Put, entries: Sequence[Any]) -> float:
    began = time.perf_counter()
    for entry in entries:
        await put_one(entry)
    return time.perf_counter() - began


def put_wide(short: bool) -> list[Row]:
    """Many rollouts at once, each with one call under way at a time."""
    rollouts, calls = 64, 3 if short else 8
    taken = []
    with tempfile.TemporaryDirectory() as root:
        for at in range(5):
            taken.append(asyncio.run(_wide_round(Path(root) / str(at), rollouts, calls)))
    return [
        compare(
            "put-wide",
            f"{rollouts} rollouts at once, {calls} puts each, 4k prompt + 256",
            medians(taken),
            unit="ms a put",
            scale=1000 / (rollouts * calls),
            target=3.0,
            bound=1.0,  # one journal per rollout: a sync a put on either side
            sense="at least",
            inverse=True,
            against=_NAIVE,
        )
    ]


async def _wide_round(root: Path, rollouts: int, calls: int) -> tuple[float, float]:
    (root / "naive").mkdir(parents=True)
    store, naive = TokenCaptureStore(root / "ours"), JsonlStore(root / "naive")
    (one,) = data.growing_rollout(1, 4096 + 256, generated_share=256 / 4352)
    entries = [
        [
            one.model_copy(update={"rollout_id": f"r{rollout}", "model_call_id": f"c{call}"})
            for call in range(calls)
        ]
        for rollout in range(rollouts)
    ]
    lists = [data.as_lists(one_rollout) for one_rollout in entries]
    ours = await _at_once(store.put, entries)
    theirs = await _at_once(naive.put, lists)
    await store.close()
    return ours, theirs


async def _at_once(put_one: Put, rollouts: Sequence[Sequence[Any]]) -> float:
    with without_gc():
        began = time.perf_counter()
        await asyncio.gather(*(_one_by_one(put_one, entries) for entries in rollouts))
        return time.perf_counter() - began
