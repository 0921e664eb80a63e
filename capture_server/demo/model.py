"""A small real language model: an interpolated n-gram over token ids, in numpy.

Invariant: ``next_logits`` is a pure function of the context; it gives natural log-probabilities
over the whole vocabulary, all finite, that sum to one. A part of the mass goes to tokens that the
context already holds, so the distribution depends on the whole prompt, not only on its last
tokens: log-probs recomputed under another prompt differ. It is no good writer, and need not be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from capture_server.demo.tokenizer import (
    END_OF_TEXT,
    NUM_SPECIAL,
    THINK_START,
    TOOL_START,
    TURN_START,
    Tokenizer,
)

VOCAB_SIZE = 800
_ORDER = 5  # longest context, in tokens
_UNIFORM_MASS = 0.02
_CONTEXT_MASS = 0.03
# A marker that the context has never mentioned (no tools offered, no thinking asked for) is rare.
_MARKERS = (TOOL_START, THINK_START)
# Turns and documents are begun by the template, not by the model.
_OPENINGS = np.array([END_OF_TEXT, TURN_START])
_RARE_FACTOR = 1e-3

# continuation ids, their share of the mass, the share left for shorter contexts
_Entry = tuple[NDArray[np.int64], NDArray[np.float64], float]


class NgramModel:
    """Witten-Bell interpolation of all context lengths up to five tokens.

    Source: I. H. Witten, T. C. Bell, "The zero-frequency problem", IEEE Trans. Inf. Theory 1991.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}
        self._entries: dict[tuple[int, ...], _Entry] = {}
        self._base = np.full(vocab_size, 1.0 / vocab_size)

    def fit(self, documents: Iterable[Sequence[int]]) -> None:
        """Count every context of every document; documents do not see each other."""
        unigrams = np.zeros(self.vocab_size)
        for ids in documents:
            unigrams += np.bincount(ids, minlength=self.vocab_size)
            for context, token in _contexts(ids):
                continuations = self._counts.setdefault(context, {})
                continuations[token] = continuations.get(token, 0) + 1
        share = unigrams / max(unigrams.sum(), 1.0)
        self._base = (1 - _UNIFORM_MASS) * share + _UNIFORM_MASS / self.vocab_size
        self._entries.clear()

    def next_logits(self, context_ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """float64[vocab]: natural log-probabilities of the token after ``context_ids``."""
        return ModelState(self, context_ids).logits()

    def distribution(self, tail: tuple[int, ...]) -> NDArray[np.float64]:
        """float64[vocab]: the n-gram probabilities after ``tail`` (its last five tokens count)."""
        probs = self._base.copy()
        for length in range(1, min(len(tail), _ORDER) + 1):
            entry = self._entry(tail[-length:])
            if entry is None:  # a longer context of an unseen one is unseen too
                break
            ids, shares, rest = entry
            probs *= rest
            probs[ids] += shares
        return probs

    def _entry(self, context: tuple[int, ...]) -> _Entry | None:
        entry = self._entries.get(context)
        if entry is None:
            counts = self._counts.get(context)
            if counts is None:
                return None
            ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
            seen = np.fromiter(counts.values(), dtype=np.float64, count=len(counts))
            total = seen.sum() + len(counts)
            entry = (ids, seen / total, len(counts) / total)
            self._entries[context] = entry
        return entry


class ModelState:
    """One sequence being generated: the context's counts, kept up to date token by token."""

    def __init__(self, model: NgramModel, context_ids: Sequence[int] | NDArray[np.int64]) -> None:
        self._model = model
        ids = np.asarray(context_ids, dtype=np.int64)
        self._counts = np.bincount(ids, minlength=model.vocab_size).astype(np.float64)
        self._tail: tuple[int, ...] = tuple(int(i) for i in ids[-_ORDER:])

    def append(self, token_id: int) -> None:
        """Extend the context by one token."""
        self._counts[token_id] += 1.0
        self._tail = (*self._tail, token_id)[-_ORDER:]

    def logits(self) -> NDArray[np.float64]:
        """float64[vocab]: natural log-probabilities of the next token."""
        probs = self._model.distribution(self._tail)
        copied = self._counts.copy()
        copied[:NUM_SPECIAL] = 0.0
        total = copied.sum()
        if total > 0.0:
            probs *= 1.0 - _CONTEXT_MASS
            probs += copied * (_CONTEXT_MASS / total)
        probs[_OPENINGS] *= _RARE_FACTOR
        for marker in _MARKERS:
            if self._counts[marker] == 0.0:
                probs[marker] *= _RARE_FACTOR
        logits: NDArray[np.float64] = np.log(probs)
        logits -= np.log(probs.sum())
        return logits


def _contexts(ids: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    for at in range(1, len(ids)):
        for length in range(1, min(at, _ORDER) + 1):
            yield tuple(ids[at - length : at]), ids[at]


@lru_cache(maxsize=1)
def load_default() -> tuple[Tokenizer, NgramModel]:
    """Train tokenizer and model on the packaged text (once per process, well under a second)."""
    corpus = resources.files(__package__).joinpath("corpus.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer.train(corpus, VOCAB_SIZE)
    model = NgramModel(tokenizer.vocab_size)
    end = "<|endoftext|>"
    model.fit([*tokenizer.encode(part), END_OF_TEXT] for part in corpus.split(end))
    return tokenizer, model
