"""Row build: from the records of one rollout to chains and training rows."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence

from capture_server.trajectories import build_traces, run_builder
from capture_server.trajectories.builder import BUILDERS
from middleware.records import TokenEntry
from tests.bench import data
from tests.bench.measure import Row, compare, medians, peak_bytes, side_by_side, timed
from tests.bench.naive import ListEntry, TrieBuilder

_TRIE = "dict trie"


def build(short: bool) -> list[Row]:
    """Every builder, with links inferred (the trie's very task) and with recorded ones."""
    calls, tokens = (60, 60_000) if short else (200, 200_000)
    old = data.growing_rollout(calls, tokens, delta=False, decided=False)
    full = data.growing_rollout(calls, tokens, delta=False)
    delta = data.growing_rollout(calls, tokens, delta=True)
    lists = data.as_lists(old)
    size = f"{calls} calls to {tokens // 1000}k"
    rows = [
        _against_trie("build-inferred", f"{size}, links inferred", old, lists),
        _against_trie("build", f"{size}, every digest checked", full, lists),
        _against_trie("build-delta", f"{size}, delta prompts, digests", delta, lists),
        _traces(f"{size}, training rows, delta prompts, digests", delta, lists),
        *_memory(size, full, delta, lists),
        _linear(short),
    ]
    return rows + _large(short)


def _against_trie(name: str, work: str, entries: list[TokenEntry], lists: list[ListEntry]) -> Row:
    """Two builders against two runs of the trie, on the wall: digests use all cores."""
    builders = _builders(entries)
    cpu = statistics.median(timed(builders) for _ in range(3))
    taken = side_by_side(
        builders,
        lambda: [TrieBuilder(lists).chains() for _ in range(2)],
        clock=time.perf_counter,
    )
    return compare(
        name,
        work,
        taken,
        unit="ms",
        scale=1000,
        target=20.0,
        # Checking digests is a pass of sha256 per call: see docs/performance.md.
        bound=20.0 if name == "build-inferred" else 8.0,
        sense="at least",
        inverse=True,
        against=f"2 x {_TRIE}",
        processor_ms=round(cpu * 1000, 1),
    )


def _builders(entries: Sequence[TokenEntry]) -> Callable[[], object]:
    return lambda: [run_builder(entries, name) for name in BUILDERS]


def _traces(work: str, entries: list[TokenEntry], lists: list[ListEntry]) -> Row:
    def rows() -> object:
        return build_traces(entries)

    cpu = statistics.median(timed(rows) for _ in range(3))
    taken = side_by_side(rows, lambda: TrieBuilder(lists).chains(), clock=time.perf_counter)
    return compare(
        "build-traces",
        work,
        taken,
        unit="ms",
        scale=1000,
        target=None,
        bound=8.0,
        sense="at least",
        inverse=True,
        against=_TRIE,
        processor_ms=round(cpu * 1000, 1),
    )


def _memory(
    size: str, full: list[TokenEntry], delta: list[TokenEntry], lists: list[ListEntry]
) -> list[Row]:
    trie = peak_bytes(lambda: TrieBuilder(lists).chains())
    tokens = max(entry.cum_len or 0 for entry in full) * 4
    rows = []
    for name, entries in (("build-memory", full), ("build-memory-delta", delta)):
        peak = peak_bytes(_builders(entries))
        rows.append(
            compare(
                name,
                f"{size}, peak beyond the records",
                (peak, trie),
                unit="MB",
                scale=1e-6,
                target=0.1,
                against=_TRIE,
                times_its_tokens=round(peak / tokens, 2),
            )
        )
    return rows


def _linear(short: bool) -> Row:
    """At a fixed number of tokens, 20 times the calls cost at most 20 times as much."""
    tokens = 50_000 if short else 100_000
    few = _builders(data.growing_rollout(50, tokens))
    many = _builders(data.growing_rollout(1000, tokens))
    taken = side_by_side(many, few, rounds=7)
    return compare(
        "build-linear",
        f"1,000 calls against 50, {tokens // 1000}k tokens, per call",
        (taken[0] / 1000, taken[1] / 50),
        unit="ms",
        scale=1000,
        target=1.0,
        against="50 calls",
    )


def _large(short: bool) -> list[Row]:
    return [_long_chain(short), *_unrelated(short)]


def _long_chain(short: bool) -> Row:
    """A very long conversation, told by what no builder can save: one sha256 per record."""
    turns, tokens = (3_000, 60_000) if short else (10_000, 200_000)
    entries = data.growing_rollout(turns, tokens)
    work = _hash_all(entries)
    taken = medians(
        [(timed(lambda: run_builder(entries)), timed(work)) for _ in range(5 if short else 3)]
    )
    return compare(
        "build-long",
        f"chain of {turns:,} turns, {tokens // 1000}k tokens",
        taken,
        unit="ms",
        scale=1000,
        target=None,
        bound=1.5,
        against="its digests, bare sha256",
    )


def _hash_all(entries: list[TokenEntry]) -> Callable[[], None]:
    data_bytes = bytes(8 * max(entry.cum_len or 0 for entry in entries))
    view = memoryview(data_bytes)

    def run() -> None:
        for entry in entries:
            hashlib.sha256(view[: 8 * (entry.cum_len or 0)]).hexdigest()

    return run


def _unrelated(short: bool) -> list[Row]:
    """Rows are copies: ids, a mask and a float64 log-prob for every token (4 + 1 + 8 bytes)."""
    calls, prompt = (50, 100_000) if short else (100, 100_000)
    entries = data.unrelated_calls(calls, prompt)
    own = sum(entry.prompt_token_ids.nbytes for entry in entries)
    took = timed(lambda: run_builder(entries), time.perf_counter)
    work = f"{calls} unrelated prompts of {prompt // 1000}k"
    build_peak = peak_bytes(lambda: [run_builder(entries, name) for name in BUILDERS])
    rows_peak = peak_bytes(lambda: build_traces(entries))
    return [
        compare(
            "build-unrelated",
            f"{work}, peak of the build",
            (build_peak, own),
            unit="MB",
            scale=1e-6,
            target=3.0,
            against="their own bytes",
            prefix_merging_ms=round(took * 1000, 1),
        ),
        compare(
            "rows-unrelated",
            f"{work}, all rows",
            (rows_peak, own),
            unit="MB",
            scale=1e-6,
            target=None,
            bound=3.5,
            against="their own bytes",
        ),
    ]
