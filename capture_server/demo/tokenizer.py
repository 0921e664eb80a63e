"""A byte-level BPE tokenizer, trained at start on a small text.

Invariant: ``decode(encode(text)) == text`` for every text, and every byte is a token of its own,
so sampled ids may spell text in more ways than ``encode`` would (that is what makes retokenization
drift possible). It reads no tokenizer files and knows no other vocabulary.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
END_OF_TEXT, TURN_START, TURN_END, THINK_START, THINK_END, TOOL_START, TOOL_END = range(7)
NUM_SPECIAL = len(SPECIAL_TOKENS)
_FIRST_MERGE = NUM_SPECIAL + 256
_REPLACEMENT = "\ufffd"

# Pieces are bounded, so that one endless word cannot make merging quadratic.
_PIECES = re.compile(
    r" ?[^\W\d_]{1,32}| ?\d{1,3}| ?(?:[^\w\s]|_){1,32}|\s{1,32}(?!\S)|\s{1,32}", re.UNICODE
)
_SPECIALS = re.compile("(" + "|".join(re.escape(s) for s in SPECIAL_TOKENS) + ")")
_SPECIAL_IDS = {text: i for i, text in enumerate(SPECIAL_TOKENS)}

Pair = tuple[int, int]


class Tokenizer:
    """Special tokens first, then the 256 bytes, then one id per merge in the order learned."""

    def __init__(self, merges: Sequence[Pair]) -> None:
        self._ranks: dict[Pair, int] = {pair: i for i, pair in enumerate(merges)}
        self._bytes = [s.encode() for s in SPECIAL_TOKENS] + [bytes([b]) for b in range(256)]
        for left, right in merges:
            self._bytes.append(self._bytes[left] + self._bytes[right])
        self._encode_piece = lru_cache(maxsize=16_384)(self._merge_piece)

    @classmethod
    def train(cls, text: str, vocab_size: int) -> Tokenizer:
        """Learn the most frequent merges of ``text`` until ``vocab_size`` ids exist."""
        plain = (part for part in _SPECIALS.split(text) if part not in _SPECIAL_IDS)
        words = Counter(piece for part in plain for piece in _PIECES.findall(part))
        return cls(_learn_merges(words, vocab_size - _FIRST_MERGE))

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id in ``range(vocab_size)`` is valid."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; the spelling of a special token is that token."""
        ids: list[int] = []
        for part in _SPECIALS.split(text):
            special = _SPECIAL_IDS.get(part)
            if special is not None:
                ids.append(special)
                continue
            for piece in _PIECES.findall(part):
                ids.extend(self._encode_piece(piece))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for (special tokens: their spelling)."""
        return self._bytes[token_id]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of ``ids``, which need not be valid UTF-8."""
        return b"".join([self._bytes[i] for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def _merge_piece(self, piece: str) -> tuple[int, ...]:
        ids = [NUM_SPECIAL + b for b in piece.encode("utf-8", "replace")]
        while len(ids) > 1:
            ranked = [self._ranks.get(pair, -1) for pair in pairwise(ids)]
            known = [rank for rank in ranked if rank >= 0]
            if not known:
                break
            best = min(known)
            at = ranked.index(best)
            ids[at : at + 2] = [_FIRST_MERGE + best]
        return tuple(ids)


def _learn_merges(words: Counter[str], num_merges: int) -> list[Pair]:
    """Byte-pair encoding over word counts; ties go to the pair that sorts first."""
    spellings = [[NUM_SPECIAL + b for b in word.encode()] for word in words]
    counts = list(words.values())
    pairs: Counter[Pair] = Counter()
    where: dict[Pair, set[int]] = {}
    for index, ids in enumerate(spellings):
        _count_pairs(ids, counts[index], index, pairs, where)
    merges: list[Pair] = []
    while len(merges) < num_merges and pairs:
        best = max(pairs.items(), key=lambda item: (item[1], -item[0][0], -item[0][1]))[0]
        if pairs[best] < 2:  # a pair seen once teaches nothing but this one text
            break
        new_id = _FIRST_MERGE + len(merges)
        merges.append(best)
        for index in where.pop(best):
            _count_pairs(spellings[index], -counts[index], index, pairs, where)
            spellings[index] = _apply_merge(spellings[index], best, new_id)
            _count_pairs(spellings[index], counts[index], index, pairs, where)
        del pairs[best]
    return merges


def _count_pairs(
    ids: list[int], count: int, index: int, pairs: Counter[Pair], where: dict[Pair, set[int]]
) -> None:
    for pair in pairwise(ids):
        pairs[pair] += count
        if count > 0:
            where.setdefault(pair, set()).add(index)


def _apply_merge(ids: list[int], pair: Pair, new_id: int) -> list[int]:
    merged: list[int] = []
    at = 0
    while at < len(ids):
        if at + 1 < len(ids) and (ids[at], ids[at + 1]) == pair:
            merged.append(new_id)
            at += 2
        else:
            merged.append(ids[at])
            at += 1
    return merged


class StreamDecoder:
    """Text of a growing token sequence: an incomplete character is held back until it is whole.

    What is still held when the generation ends is never shown, as in vLLM.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._pending = b""

    def push(self, token_id: int) -> str:
        """The text that became complete with this token (often all of it, sometimes ``""``)."""
        if self._skip_special and token_id < NUM_SPECIAL:
            return ""
        self._pending += self._tokenizer.token_bytes(token_id)
        text = self._pending.decode("utf-8", "replace")
        if text.endswith(_REPLACEMENT):
            return ""
        self._pending = b""
        return text


class TokenNamer:
    """The ``token`` string that is reported with a log-prob: ``""`` for a piece of a character.

    The piece that completes a character is named by the whole character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tail = b""

    def name(self, token_id: int) -> str:
        """Name ``token_id`` at this position without moving on (for alternatives)."""
        piece = self._tokenizer.token_bytes(token_id)
        text = piece.decode("utf-8", "replace")
        if not text.endswith(_REPLACEMENT):
            return text
        for start in range(len(self._tail)):
            try:
                return (self._tail[start:] + piece).decode("utf-8")
            except UnicodeDecodeError:
                continue
        return ""

    def push(self, token_id: int) -> str:
        """Name ``token_id`` and move to the next position."""
        text = self.name(token_id)
        # A character has at most 4 bytes, so at most 3 can wait for their end.
        self._tail = b"" if text else (self._tail + self._tokenizer.token_bytes(token_id))[-3:]
        return text
