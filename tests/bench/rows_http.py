"""Rows overhead, stream, big and snapshot: the sidecar over real HTTP, in its own process.

The baseline of the first three is the same proxy with capture off: the same tagged path without
the capture segment, so that the engine sends no token ids and nothing is recorded.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any

import orjson

from capture_server.stores.file import TokenCaptureStore
from middleware.paths import CAPTURE_SEGMENT, ROLLOUT_SEGMENT
from tests.bench import data, engine, machine
from tests.bench.measure import Pair, Row, compare, medians, timed, without_gc
from tests.bench.wire import Connection, Rig, connected, cpu_seconds, rig

_OFF = "same proxy, capture off"
_SENT = re.compile(rb": sent ([0-9.]+)")
_numbers = count()


@dataclass
class Block:
    """What one run of calls took: seconds on the wall, of the sidecar's processor, per call."""

    wall: float
    cpu: float
    each: list[float]
    first_chunk: list[float]


def _path(rollout: str, *, captured: bool) -> str:
    segment = f"/{CAPTURE_SEGMENT}" if captured else ""
    return f"/{ROLLOUT_SEGMENT}/{rollout}{segment}/v1/chat/completions"


def _request(model: str, prompt_characters: int) -> bytes:
    messages = data.chat_messages(4, prompt_characters, tools=False)
    return orjson.dumps({"model": model, "messages": messages, "stream": model[:6] == "stream"})


async def _run_block(
    served: Rig, body: bytes, *, captured: bool, calls: int, concurrency: int
) -> Block:
    """``calls`` in all; each connection works in a rollout of its own, one call at a time."""
    block = Block(0.0, 0.0, [], [])
    async with AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(connected(served.url)) for _ in range(concurrency)]
        with without_gc():
            cpu, began = await cpu_seconds(served.url), time.perf_counter()
            await asyncio.gather(
                *(_calls(line, block, body, captured, calls // concurrency) for line in lines)
            )
            block.wall = time.perf_counter() - began
            block.cpu = await cpu_seconds(served.url) - cpu
    return block


async def _calls(line: Connection, block: Block, body: bytes, captured: bool, calls: int) -> None:
    path = _path(f"bench-{next(_numbers)}", captured=captured)
    for _ in range(calls):
        began = time.perf_counter()
        reply = await line.ask("POST", path, body, marker=b": sent")
        block.each.append(time.perf_counter() - began)
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {reply.body[:200]!r}")
        if (sent := _SENT.search(reply.body)) is not None:
            block.first_chunk.append(reply.first_at - float(sent[1]))


async def _in_turn(
    served: Rig, body: bytes, *, calls: int, concurrency: int = 1, rounds: int = 5
) -> list[tuple[Block, Block]]:
    """(captured, not captured) blocks, after one unmeasured pair."""
    pairs = []
    for at in range(rounds + 1):
        pair = [
            await _run_block(served, body, captured=captured, calls=calls, concurrency=concurrency)
            for captured in (True, False)
        ]
        if at:
            pairs.append((pair[0], pair[1]))
    return pairs


def _of(pairs: list[tuple[Block, Block]], value: Callable[[Block], float]) -> Pair:
    return medians([(value(on), value(off)) for on, off in pairs])


def _p50(block: Block) -> float:
    return statistics.median(block.each)


def overhead(short: bool) -> list[Row]:
    """An 8k-token call: its latency when alone, and the rate of 64 at once."""
    body = _request("call-7936-256", 24_000)
    calls = (32, 192) if short else (100, 640)
    with rig() as served:
        alone = asyncio.run(_in_turn(served, body, calls=calls[0]))
        many = asyncio.run(_in_turn(served, body, calls=calls[1], concurrency=64))
        sync = machine.fsync_seconds(served.root)
    on, off = _of(alone, _p50)
    added = (on - off) * 1000
    cpu_on, cpu_off = _of(many, lambda block: block.cpu / calls[1])
    return [
        compare(
            "overhead",
            "8k-token call alone, p50",
            (on, off),
            unit="ms",
            scale=1000,
            target=None,
            bound=_REACHABLE["overhead"],
            against=_OFF,
            added_ms=round(added, 2),
            target_ms=f"2 + one fsync ({sync * 1000:.2f})",
            met="yes" if added <= 2 + sync * 1000 else "no",
        ),
        compare(
            "overhead-64",
            "8k-token calls, 64 at once, calls a second",
            _of(many, lambda block: calls[1] / block.wall),
            unit="/s",
            target=0.6,
            bound=_REACHABLE["overhead-64"],
            sense="at least",
            against=_OFF,
            cpu_ms_a_call=f"{cpu_on * 1000:.2f} against {cpu_off * 1000:.2f}",
        ),
    ]


_REACHABLE = {"overhead": 12.0, "overhead-64": 0.06, "stream": 3.0, "first": 3.0, "big": 10.0}
"""Ratios reached with capture on, where the specification's target is absolute or out of reach;
docs/performance.md says where the time goes."""


def stream(short: bool) -> list[Row]:
    """A paced stream: processor time per chunk, and how long the first token's chunk takes."""
    chunks = 400 if short else 2_000
    body = _request(f"stream-2000-{chunks}", 8_000)
    with rig() as served:
        pairs = asyncio.run(_in_turn(served, body, calls=2, concurrency=2))
    on, off = _of(pairs, lambda block: block.cpu / (2 * chunks))
    first = _of(pairs, lambda block: statistics.median(block.first_chunk))
    return [
        compare(
            "stream",
            f"{chunks:,} chunks, processor time a chunk",
            (on, off),
            unit="us",
            scale=1e6,
            target=None,
            bound=_REACHABLE["stream"],
            against=_OFF,
            added_us=round((on - off) * 1e6, 1),
            target_us=60,
            met="yes" if on - off <= 60e-6 else "no",
        ),
        compare(
            "stream-first",
            "first token's chunk, engine to client, p50",
            first,
            unit="ms",
            scale=1000,
            target=None,
            bound=_REACHABLE["first"],
            against=_OFF,
            target_ms="1.0 after it arrives",
            met="yes" if first[0] - first[1] <= 0.001 else "no",
        ),
    ]


def big(short: bool) -> list[Row]:
    """A very long answer in one piece: processor time of the sidecar."""
    tokens = 65_000
    calls = 2 if short else 5
    body = _request(f"call-2000-{tokens}", 8_000)
    with rig() as served:
        pairs = asyncio.run(_in_turn(served, body, calls=calls))
    on, off = _of(pairs, lambda block: block.cpu / calls)
    raw = engine.whole_body(engine.answer_of(f"call-2000-{tokens}"), with_tokens=True)
    parse = statistics.median(timed(lambda: orjson.loads(raw)) for _ in range(5))
    return [
        compare(
            "big",
            f"answer of {tokens:,} tokens ({len(raw) / 1e6:.1f} MB), processor time added",
            (on - off, parse),
            unit="ms",
            scale=1000,
            target=None,
            bound=_REACHABLE["big"],
            against="one orjson parse of it",
            capture_off_ms=round(off * 1000, 1),
            target_ms=10,
            met="yes" if on - off <= 0.010 else "no",
        )
    ]


def snapshot(short: bool) -> list[Row]:
    """Freeze and fetch a whole rollout over HTTP."""
    calls, tokens = 100, 100_000
    with rig() as served:
        return asyncio.run(_snapshots(served, calls, tokens))


async def _snapshots(served: Rig, calls: int, tokens: int) -> list[Row]:
    size = f"freeze + fetch {calls} calls, {tokens // 1000}k tokens"
    rows = []
    for name, what, accept, target in _FORMS:
        taken, sizes = [], (0, 0)
        for _ in range(6):
            one = await _fetch(served, await _stored(served, calls, tokens), accept, "")
            other = await _fetch(
                served,
                await _stored(served, calls, tokens),
                "application/json",
                "?full_prompts=true",
            )
            if one is None or other is None:
                break
            taken.append((one[0], other[0]))
            sizes = (one[1], other[1])
        if not taken:
            continue  # this sidecar does not speak that format
        shown: dict[str, Any] = {
            "bytes": f"{sizes[0]:,} against {sizes[1]:,} ({sizes[1] / sizes[0]:.0f} times)"
        }
        rows.append(
            compare(
                name,
                f"{size}, {what}",
                medians(taken[1:]),
                unit="ms",
                scale=1000,
                target=target,
                bound=target or 0.4,
                against="JSON with full prompts",
                **shown,
            )
        )
    return rows


_FORMS = (
    ("snapshot-json", "JSON with delta prompts", "application/json", None),
    ("snapshot-arrow", "Arrow", "application/vnd.apache.arrow.stream", 1 / 5),
)


async def _stored(served: Rig, calls: int, tokens: int) -> str:
    """A new rollout in the sidecar's store, put there by this process."""
    rollout = f"snap-{next(_numbers)}"
    store = TokenCaptureStore(served.root)
    entries = data.growing_rollout(calls, tokens, rollout_id=rollout)
    await asyncio.gather(*map(store.put, entries))
    await store.close()
    return rollout


async def _fetch(served: Rig, rollout: str, accept: str, query: str) -> tuple[float, int] | None:
    """Seconds and bytes of freeze + snapshot; None if the format is not served."""
    base = f"/{ROLLOUT_SEGMENT}/{rollout}/{CAPTURE_SEGMENT}"
    async with connected(served.url) as line:
        with without_gc():
            began = time.perf_counter()
            frozen = await line.ask("POST", f"{base}/freeze")
            reply = await line.ask(
                "GET", f"{base}/snapshot{query}", headers=f"accept: {accept}\r\n"
            )
            took = time.perf_counter() - began
    assert frozen.status == 200, frozen.body
    if reply.status == 406:
        return None
    assert reply.status == 200, reply.body[:300]
    return took, len(reply.body)
