"""From logits to one sampled token and the log-prob that is reported for it.

Invariant: the reported log-prob belongs to the sampled id and to the distribution that was asked
for: ``raw_logprobs`` (before bias, penalties, temperature and truncation, but after a grammar
mask, as vLLM reports them) or ``processed_logprobs`` (exactly what was sampled from). The same
seed gives the same tokens. Knows nothing about text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
LOGPROB_FLOOR = -9999.0  # what vLLM writes for minus infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling settings, already checked; defaults are vLLM's."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or less: no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """None: fresh entropy. Choice ``k`` of a request uses ``seed + k``."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    num_logprobs: int | None = None
    """Alternatives to report beside the sampled token; None: no log-probs; -1: all."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token as it was drawn."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(id, log-prob), the sampled token first, then the most likely others, best first."""


class Sampler:
    """Draws tokens for one choice; holds its random generator and the counts for penalties."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        choice: int,
        prompt_ids: NDArray[np.int64],
        vocab_size: int,
        end_id: int,
        mode: LogprobsMode,
    ) -> None:
        self._params = params
        self._mode = mode
        # numpy wants seeds >= 0; the two's complement keeps negative ones apart.
        seed = None if params.seed is None else (params.seed + choice) % 2**64
        self._rng = np.random.default_rng(seed)
        self._bias = _bias_vector(params, vocab_size)
        self._generated = np.zeros(vocab_size)
        self._in_prompt = np.zeros(vocab_size, dtype=np.bool_)
        self._in_prompt[prompt_ids] = True
        self._ends = sorted({end_id, *params.stop_token_ids})
        self._num_generated = 0

    def draw(self, logits: Floats, mask: Mask | None) -> Sampled:
        """Sample the next token from ``logits`` (float64[vocab]); ``mask`` marks allowed ids."""
        if mask is not None:
            logits = np.where(mask, logits, -np.inf)
        final = self._process(logits)
        token_id = int(np.argmax(final)) if self._greedy else self._choose(final)
        reported = _log_softmax(logits if self._mode == "raw_logprobs" else final)
        self._generated[token_id] += 1.0
        self._num_generated += 1
        top = top_logprobs(reported, token_id, self._params.num_logprobs)
        return Sampled(token_id, reported_value(reported[token_id]), top)

    @property
    def _greedy(self) -> bool:
        return self._params.temperature < 1e-5

    def _process(self, logits: Floats) -> Floats:
        """Bias, length rules, penalties, temperature, truncation: what is sampled from."""
        params = self._params
        out = logits.copy() if self._bias is None else logits + self._bias
        if self._num_generated < params.min_tokens and np.isfinite(out).sum() > len(self._ends):
            out[self._ends] = -np.inf
        self._penalize(out)
        if self._greedy:
            return out
        out /= params.temperature
        _truncate(out, params.top_k, params.top_p, params.min_p)
        return out

    def _penalize(self, out: Floats) -> None:
        params = self._params
        if params.repetition_penalty != 1.0:
            seen = self._in_prompt | (self._generated > 0)
            factor = params.repetition_penalty
            out[seen] = np.where(out[seen] > 0, out[seen] / factor, out[seen] * factor)
        if params.frequency_penalty != 0.0:
            out -= params.frequency_penalty * self._generated
        if params.presence_penalty != 0.0:
            out -= params.presence_penalty * (self._generated > 0)

    def _choose(self, logits: Floats) -> int:
        weights = np.exp(logits - logits.max())
        cumulative = np.cumsum(weights)
        drawn = self._rng.random() * cumulative[-1]
        return int(np.searchsorted(cumulative, drawn, side="right"))


def reported_value(logprob: float) -> float:
    """A log-prob as it goes over the wire: float32 precision, never minus infinity."""
    return max(float(np.float32(logprob)), LOGPROB_FLOOR)


def top_logprobs(logprobs: Floats, token_id: int, num: int | None) -> tuple[tuple[int, float], ...]:
    """The given token, then the ``num`` most likely ones that are not it (None: nothing)."""
    if num is None:
        return ()
    best: list[int] = []
    if num != 0:
        order = np.argsort(-logprobs, kind="stable")
        best = [int(i) for i in (order if num < 0 else order[:num]) if int(i) != token_id]
    return tuple((i, reported_value(logprobs[i])) for i in (token_id, *best))


def _bias_vector(params: SamplingParams, vocab_size: int) -> Floats | None:
    if not params.logit_bias:
        return None
    bias = np.zeros(vocab_size)
    for token_id, value in params.logit_bias.items():
        bias[token_id] = min(max(value, -100.0), 100.0)
    return bias


def _log_softmax(logits: Floats) -> Floats:
    shifted: Floats = logits - logits.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def _truncate(out: Floats, top_k: int, top_p: float, min_p: float) -> None:
    """Set the logits outside min-p, top-k and top-p to minus infinity, in place."""
    if min_p > 0.0:
        out[out < out.max() + np.log(min_p)] = -np.inf
    if 0 < top_k < len(out):
        kth = np.partition(out, -top_k)[-top_k]
        out[out < kth] = -np.inf
    if top_p < 1.0:
        order = np.argsort(-out, kind="stable")
        probs = np.exp(_log_softmax(out))[order]
        # A token stays while the mass before it is below top_p: the best one always stays.
        before = np.cumsum(probs) - probs
        out[order[before >= top_p]] = -np.inf
