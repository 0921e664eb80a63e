"""One choice being generated: model, sampler, grammar and text rules, one token per step.

Invariant: every step reports exactly the id that was sampled and its log-prob; text rules (held
back characters, stop strings, hidden end tokens) change text only, never ids. Synchronous: it
knows no event loop and no HTTP.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from capture_server.demo.grammar import Grammar, VocabularyTrie
from capture_server.demo.model import ModelState, NgramModel
from capture_server.demo.sampling import LogprobsMode, Sampler, SamplingParams
from capture_server.demo.tokenizer import TURN_END, StreamDecoder, Tokenizer, TokenNamer

FinishReason = Literal["stop", "length", "abort", "cancelled"]


@dataclass(slots=True)
class GenerationRecord:
    """What one choice really used and sampled; filled while it is generated."""

    index: int
    prompt_ids: NDArray[np.int64]
    guided: bool
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    """Parallel to ``token_ids``; kept whether or not the client asked for them."""
    finish_reason: FinishReason | None = None
    """None while it runs; ``cancelled`` when the client left."""

    def as_json(self) -> dict[str, Any]:
        """The record in plain lists, for ``GET /demo/generations``."""
        return {
            "index": self.index,
            "prompt_token_ids": self.prompt_ids.tolist(),
            "token_ids": self.token_ids.tolist(),
            "logprobs": self.logprobs.tolist(),
            "finish_reason": self.finish_reason,
            "guided": self.guided,
        }


@dataclass(frozen=True, slots=True)
class NamedLogprob:
    """One alternative of a position, with the text that it is reported under."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Step:
    """One sampled token of one choice, and the text that it set free."""

    index: int
    token_id: int
    token_text: str
    logprob: float
    top: tuple[NamedLogprob, ...]
    """The sampled token first, then the best others; empty when log-probs were not asked for."""
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class Machinery:
    """What all generations of an engine share."""

    tokenizer: Tokenizer
    model: NgramModel
    trie: VocabularyTrie
    logprobs_mode: LogprobsMode
    max_model_len: int


class Generation:
    """One choice of one request."""

    def __init__(
        self,
        machinery: Machinery,
        prompt_ids: NDArray[np.int64],
        params: SamplingParams,
        *,
        index: int,
        choice: int,
        grammar: Grammar | None = None,
    ) -> None:
        """``index`` names the choice in the answer; ``choice`` counts within its own prompt."""
        self.index = index
        self.params = params
        self.record = GenerationRecord(index, prompt_ids, grammar is not None)
        self._machinery = machinery
        self._state = ModelState(machinery.model, prompt_ids)
        self._grammar = grammar
        self._grammar_state = grammar.start if grammar else frozenset[int]()
        self._sampler = Sampler(
            params,
            choice=choice,
            prompt_ids=prompt_ids,
            vocab_size=machinery.tokenizer.vocab_size,
            end_id=TURN_END,
            mode=machinery.logprobs_mode,
        )
        self._namer = TokenNamer(machinery.tokenizer)
        self._text = _TextRules(machinery.tokenizer, params)
        self._aborted = False

    def abort(self) -> None:
        """Finish with the next token, as an engine does that is told to stop all work."""
        self._aborted = True

    def cancel(self) -> None:
        """Note that nobody waits for the rest."""
        if self.record.finish_reason is None:
            self.record.finish_reason = "cancelled"

    def step(self) -> Step:
        """Sample one token. Must not be called again after a step with a finish reason."""
        grammar, trie = self._grammar, self._machinery.trie
        mask = grammar.mask(self._grammar_state, trie) if grammar else None
        drawn = self._sampler.draw(self._state.logits(), mask)
        token_id = drawn.token_id
        top = tuple(NamedLogprob(i, self._namer.name(i), value) for i, value in drawn.top)
        token_text = self._namer.push(token_id)
        self._state.append(token_id)
        if grammar:
            symbols = trie.symbols(token_id)
            self._grammar_state = grammar.advance(self._grammar_state, symbols)
        self.record.token_ids.append(token_id)
        self.record.logprobs.append(drawn.logprob)
        stop_reason: int | str | None
        finish, stop_reason = self._finish(token_id)
        text, matched = self._text.push(token_id, finish, checks_stop=self._may_stop)
        if matched is not None:
            finish, stop_reason = "stop", matched
        self.record.finish_reason = finish
        return Step(self.index, token_id, token_text, drawn.logprob, top, text, finish, stop_reason)

    @property
    def _may_stop(self) -> bool:
        return len(self.record.token_ids) >= self.params.min_tokens

    def _finish(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        params = self.params
        num_tokens = len(self.record.token_ids)
        if self._may_stop:
            guided_end = self._grammar is not None and token_id == TURN_END
            if guided_end or (token_id == TURN_END and not params.ignore_eos):
                return "stop", None
            if token_id in params.stop_token_ids:
                return "stop", token_id
        total = len(self.record.prompt_ids) + num_tokens
        if num_tokens >= params.max_tokens or total >= self._machinery.max_model_len:
            return "length", None
        return ("abort" if self._aborted else None), None


class _TextRules:
    """Releases text: whole characters, nothing of a stop string, nothing of the end token."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = StreamDecoder(tokenizer, skip_special=params.skip_special_tokens)
        self._stop = params.stop
        self._keep_stop = params.include_stop_str_in_output
        self._held_chars = 0 if self._keep_stop else max(map(len, params.stop), default=1) - 1
        self._held = ""
        self._searched = ""  # the end of the text already seen, where a stop string may begin

    def push(
        self, token_id: int, finish: FinishReason | None, *, checks_stop: bool
    ) -> tuple[str, str | None]:
        """Text set free by this token, and the stop string that it completed, if any."""
        hides_token = finish == "stop" and not self._keep_stop
        new = "" if hides_token else self._decoder.push(token_id)
        window = self._searched + new
        matched = self._matched(window) if checks_stop and finish != "stop" else None
        self._held += new
        if matched is not None:
            stop, at = matched
            cut = len(window) - at - (len(stop) if self._keep_stop else 0)
            return self._held[: len(self._held) - cut], stop
        longest = max(map(len, self._stop), default=1)
        self._searched = window[len(window) - longest + 1 :] if longest > 1 else ""
        keep = 0 if finish else self._held_chars
        text = self._held[: len(self._held) - keep] if len(self._held) > keep else ""
        self._held = self._held[len(text) :]
        return text, None

    def _matched(self, window: str) -> tuple[str, int] | None:
        for stop in self._stop:
            at = window.find(stop)
            if stop and at >= 0:
                return stop, at
        return None
