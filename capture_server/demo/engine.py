"""The demo engine: shared model, running generations, and what they really sampled.

Invariant: with ``record=True`` the record of a response id holds the ids and log-probs that were
used, taken where they were sampled and not where they were written out, so a test can prove that
captured equals sampled. Memory is bounded by records and by tokens. All methods belong to one
event loop, except ``abort_all``, which only sets flags.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture_server.demo.generation import (
    Generation,
    GenerationRecord,
    Machinery,
    NamedLogprob,
    Step,
)
from capture_server.demo.grammar import VocabularyTrie
from capture_server.demo.model import ModelState, load_default
from capture_server.demo.sampling import LogprobsMode, reported_value, top_logprobs
from capture_server.demo.tokenizer import TokenNamer

VERSION = "0.32.0"
"""The vLLM version whose wire format the engine speaks."""

_MAX_RECORDED_TOKENS = 4_000_000
_POSITIONS_BETWEEN_YIELDS = 16

PromptLogprobs = list[tuple[tuple[NamedLogprob, int], ...] | None]
"""Per prompt position: (alternative, rank), the prompt's own token first; None at the start."""


class DemoEngine:
    """A small language model behind vLLM's wire format.

    Args:
        model_name: the served name; a request for another one gets 404.
        max_model_len: prompt plus generation, in tokens.
        token_delay_s: pause before every token of a request.
        record: keep what was sampled, for ``GET /demo/generations``.
        max_records: response ids kept; the oldest go first.
        logprobs_mode: vLLM's ``--logprobs-mode``.
        thinking: open a think block for every answer and report it as ``reasoning``.
        strip_reasoning: leave earlier reasoning out of later prompts, as some templates do.
    """

    def __init__(
        self,
        *,
        model_name: str = "demo",
        max_model_len: int = 8192,
        token_delay_s: float = 0.0,
        record: bool = True,
        max_records: int = 512,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        thinking: bool = False,
        strip_reasoning: bool = False,
    ) -> None:
        self.tokenizer, self.model = load_default()
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.token_delay_s = token_delay_s
        self.thinking = thinking
        self.strip_reasoning = strip_reasoning
        self.tokens_generated = 0
        trie = VocabularyTrie(self.tokenizer)
        self.machinery = Machinery(self.tokenizer, self.model, trie, logprobs_mode, max_model_len)
        self._keeps_records = record
        self._max_records = max_records
        self._records: OrderedDict[str, list[GenerationRecord]] = OrderedDict()
        self._running: set[Generation] = set()
        self._resumed = asyncio.Event()
        self._resumed.set()

    @property
    def num_running(self) -> int:
        """Choices being generated now."""
        return len(self._running)

    async def run(
        self, response_id: str, generations: Sequence[Generation]
    ) -> AsyncGenerator[Step, None]:
        """Generate all choices, one token each in turn. Closing the iterator stops them.

        The event loop gets its turn after every token. While the engine is paused, nothing
        starts.
        """
        await self._resumed.wait()
        self._remember(response_id, generations)
        self._running.update(generations)
        active = list(generations)
        try:
            while active:
                if self.token_delay_s > 0:
                    await asyncio.sleep(self.token_delay_s)
                for generation in list(active):
                    await asyncio.sleep(0)
                    step = generation.step()
                    self.tokens_generated += 1
                    if step.finish_reason is not None:
                        active.remove(generation)
                        self._running.discard(generation)
                    yield step
        finally:
            for generation in active:
                generation.cancel()
                self._running.discard(generation)

    async def prompt_logprobs(self, prompt_ids: NDArray[np.int64], num: int) -> PromptLogprobs:
        """Log-probs of the prompt itself, with ``num`` alternatives per position."""
        state = ModelState(self.model, prompt_ids[:1])
        namer = TokenNamer(self.tokenizer)
        namer.push(int(prompt_ids[0]))
        found: PromptLogprobs = [None]
        for position, token_id in enumerate(prompt_ids[1:].tolist()):
            if position % _POSITIONS_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
            logprobs = state.logits()
            entries = []
            for other, value in top_logprobs(logprobs, token_id, num):
                rank = int((logprobs > logprobs[other]).sum()) + 1
                entries.append((NamedLogprob(other, namer.name(other), value), rank))
            found.append(tuple(entries))
            namer.push(token_id)
            state.append(token_id)
        return found

    def logprob_of(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Raw log-probs of ``token_ids`` after ``prompt_ids``, by another way than sampling."""
        context = [*prompt_ids, *token_ids]
        start = len(prompt_ids)
        rows = (self.model.next_logits(context[:at]) for at in range(start, len(context)))
        pairs = zip(rows, token_ids, strict=True)
        return [reported_value(float(row[token_id])) for row, token_id in pairs]

    def pause(self) -> None:
        """Abort what runs and hold new requests, as vLLM's ``/pause?mode=abort``."""
        self._resumed.clear()
        self.abort_all()

    def resume(self) -> None:
        """Let requests in again."""
        self._resumed.set()

    def abort_all(self) -> None:
        """End every running choice with its next token and ``finish_reason: abort``."""
        for generation in list(self._running):
            generation.abort()

    def records(self, response_id: str) -> list[dict[str, Any]] | None:
        """What was sampled for one response id, by choice; None when it is not known."""
        records = self._records.get(response_id)
        return None if records is None else [record.as_json() for record in records]

    def response_ids(self) -> list[str]:
        """Response ids on record, oldest first."""
        return list(self._records)

    def _remember(self, response_id: str, generations: Sequence[Generation]) -> None:
        if not self._keeps_records:
            return
        earlier = self._records.pop(response_id, [])  # a client may name its requests twice
        self._records[response_id] = earlier + [g.record for g in generations]
        while len(self._records) > self._max_records or (
            len(self._records) > 1 and self._num_recorded() > _MAX_RECORDED_TOKENS
        ):
            self._records.popitem(last=False)

    def _num_recorded(self) -> int:
        return sum(
            len(record.prompt_ids) + len(record.token_ids)
            for records in self._records.values()
            for record in records
        )
