"""Made-up rollouts of a given size. Everything is seeded: two runs measure the same data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from middleware.records import LogProbs, TokenEntry, TokenIds, stamp_lineage
from tests.bench.naive import ListEntry

VOCABULARY = 151_936


def ids(rng: np.random.Generator, count: int) -> TokenIds:
    """Random token ids of a large vocabulary."""
    return TokenIds.of(rng.integers(0, VOCABULARY, count, dtype=np.int32))


def log_probs(rng: np.random.Generator, count: int) -> LogProbs:
    """Log-probs as engines report them: float32 values."""
    return LogProbs.of(-rng.exponential(0.5, count).astype(np.float32))


def growing_rollout(
    calls: int,
    tokens: int,
    *,
    rollout_id: str = "r",
    generated_share: float = 0.3,
    delta: bool = True,
    decided: bool = True,
) -> list[TokenEntry]:
    """One conversation: each call's prompt is the sequence before it and something new.

    ``tokens`` is the length of the last call's sequence. ``decided=False``: as writers that
    record neither parents nor digests leave it.
    """
    rng = np.random.default_rng(7)
    ends = np.linspace(0, tokens, calls + 1).astype(int)
    whole = ids(rng, tokens)
    entries: list[TokenEntry] = []
    for at in range(calls):
        start, end = int(ends[at]), int(ends[at + 1])
        prompt_end = max(start + 1, end - max(1, int((end - start) * generated_share)))
        as_delta = delta and decided and at > 0
        entry = TokenEntry(
            rollout_id=rollout_id,
            model_call_id=f"c{at:05}",
            model="m",
            prompt_token_ids=whole[start if as_delta else 0 : prompt_end],
            generation_token_ids=whole[prompt_end:end],
            generation_log_probs=log_probs(rng, end - prompt_end),
            output_items=[{"type": "message", "role": "assistant", "content": "done"}],
            created_at=1000.0 + at,
            parent_resolution=("resolved" if at else "root") if decided else None,
            parent_call_id=f"c{at - 1:05}" if at and decided else None,
            prompt_is_delta=as_delta,
        )
        if decided:
            stamp_lineage(entry, entry.parent_call_id, cumulative=whole[:end])
        entries.append(entry)
    return entries


def unrelated_calls(calls: int, prompt: int) -> list[TokenEntry]:
    """Roots that share nothing, as an older writer leaves them: every pair must be told apart."""
    rng = np.random.default_rng(11)
    return [
        TokenEntry(
            rollout_id="r",
            model_call_id=f"c{at:05}",
            prompt_token_ids=ids(rng, prompt),
            generation_token_ids=ids(rng, 16),
            generation_log_probs=log_probs(rng, 16),
        )
        for at in range(calls)
    ]


def as_lists(entries: list[TokenEntry]) -> list[ListEntry]:
    """The same full records with plain lists, for the naive ways."""
    return [ListEntry.model_validate(entry.model_dump(mode="json")) for entry in entries]


def chat_messages(turns: int, characters: int, *, tools: bool) -> list[dict[str, Any]]:
    """A conversation of about ``characters`` in all; with ``tools`` every turn calls one."""
    return list(_messages(turns, characters // turns, tools=tools))


def _messages(turns: int, each: int, *, tools: bool) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(5)
    words = [
        bytes(rng.integers(97, 123, 3 + n % 7, dtype=np.uint8)).decode("ascii") for n in range(997)
    ]

    def text(size: int) -> str:
        made = " ".join(words[n] for n in rng.integers(0, len(words), size // 6))
        return made.replace(words[3], f"{words[3]}\n").replace(words[5], f'"{words[5]}"')

    yield {"role": "system", "content": text(2000)}
    yield {"role": "user", "content": text(500)}
    for turn in range(turns):
        if not tools:
            yield {"role": "assistant", "content": text(each // 2)}
            yield {"role": "user", "content": text(each // 2)}
            continue
        arguments = {"path": f"src/{words[turn]}.py", "line": turn, "text": text(each // 4)}
        function = {"name": "edit", "arguments": json.dumps(arguments)}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        yield {"role": "assistant", "content": None, "tool_calls": [call]}
        yield {"role": "tool", "tool_call_id": f"call_{turn}", "content": text(each * 3 // 4)}
