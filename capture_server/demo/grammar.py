"""Constrained decoding: which tokens may come next under a small regular grammar.

A grammar is built from symbols (a byte, or a special token), run as a lazily built DFA, and
turned into a mask over the vocabulary by walking the vocabulary's trie. Invariant: every token
sequence that the masks allow to the end spells a word of the grammar, and from every state that
can be reached some token is allowed. Strings and free numbers are bounded, so a constrained
answer ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from capture_server.demo.sampling import Mask
from capture_server.demo.tokenizer import NUM_SPECIAL, Tokenizer

_SPECIAL_SYMBOL = 256  # symbol of special token i is 256 + i


@dataclass(slots=True)
class _Node:
    """An NFA state: free moves, and moves on one symbol out of a set."""

    free: list[int] = field(default_factory=list)
    on: list[tuple[frozenset[int], int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of an automaton with one way in and one way out."""

    start: int
    end: int


class GrammarBuilder:
    """Builds an NFA by Thompson's construction."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []

    def literal(self, text: str) -> Fragment:
        """Exactly the UTF-8 bytes of ``text`` (special tokens are not looked for)."""
        return self.sequence([self._symbols(frozenset((b,))) for b in text.encode()])

    def special(self, token_id: int) -> Fragment:
        """Exactly one special token."""
        return self._symbols(frozenset((_SPECIAL_SYMBOL + token_id,)))

    def bytes_in(self, *ranges: tuple[int, int]) -> Fragment:
        """One byte out of the inclusive ``ranges``."""
        return self._symbols(frozenset(b for low, high in ranges for b in range(low, high + 1)))

    def sequence(self, parts: Iterable[Fragment]) -> Fragment:
        """The parts one after another; an empty sequence matches nothing-at-all."""
        start = end = self._node()
        for part in parts:
            self._nodes[end].free.append(part.start)
            end = part.end
        return Fragment(start, end)

    def choice(self, parts: Iterable[Fragment]) -> Fragment:
        """Any one of the parts."""
        start, end = self._node(), self._node()
        for part in parts:
            self._nodes[start].free.append(part.start)
            self._nodes[part.end].free.append(end)
        return Fragment(start, end)

    def optional(self, part: Fragment) -> Fragment:
        """The part, or nothing."""
        return self.choice([part, self.sequence([])])

    def repeat(self, parts: list[Fragment], minimum: int) -> Fragment:
        """At least ``minimum`` of the given copies of a part, at most all of them, in order."""
        end = self._node()
        start = at = self._node()
        for count, part in enumerate(parts):
            if count >= minimum:
                self._nodes[at].free.append(end)
            self._nodes[at].free.append(part.start)
            at = part.end
        self._nodes[at].free.append(end)
        return Fragment(start, end)

    def one_or_more(self, part: Fragment) -> Fragment:
        """The part, any number of times, but once at least."""
        end = self._node()
        self._nodes[part.end].free += [part.start, end]
        return Fragment(part.start, end)

    def build(self, root: Fragment) -> Grammar:
        """The finished grammar: everything that ``root`` matches."""
        return Grammar(self._nodes, root)

    def _symbols(self, symbols: frozenset[int]) -> Fragment:
        start, end = self._node(), self._node()
        self._nodes[start].on.append((symbols, end))
        return Fragment(start, end)

    def _node(self) -> int:
        self._nodes.append(_Node())
        return len(self._nodes) - 1


_State = frozenset[int]


class Grammar:
    """A grammar and the token masks found so far; may be shared by many generations."""

    def __init__(self, nodes: list[_Node], root: Fragment) -> None:
        self._nodes = nodes
        self._end = root.end
        self.start: _State = self._close([root.start])
        self._moves: dict[tuple[_State, int], _State] = {}
        self._masks: dict[_State, Mask] = {}

    def is_complete(self, state: _State) -> bool:
        """Whether the text so far is a whole word of the grammar."""
        return self._end in state

    def advance(self, state: _State, symbols: Iterable[int]) -> _State:
        """The state after the symbols; the empty state when they are not allowed."""
        for symbol in symbols:
            state = self._move(state, symbol)
            if not state:
                break
        return state

    def mask(self, state: _State, trie: VocabularyTrie) -> Mask:
        """bool[vocab]: tokens that keep the word possible."""
        mask = self._masks.get(state)
        if mask is None:
            mask = np.zeros(trie.vocab_size, dtype=np.bool_)
            self._mark(state, trie.root, mask)
            mask.setflags(write=False)
            self._masks[state] = mask
        return mask

    def _mark(self, state: _State, node: _TrieNode, mask: Mask) -> None:
        for symbol, child in node.children.items():
            after = self._move(state, symbol)
            if after:
                if child.ids:
                    mask[child.ids] = True
                self._mark(after, child, mask)

    def _move(self, state: _State, symbol: int) -> _State:
        key = (state, symbol)
        after = self._moves.get(key)
        if after is None:
            nodes = self._nodes
            targets = [t for n in state for symbols, t in nodes[n].on if symbol in symbols]
            after = self._moves[key] = self._close(targets)
        return after

    def _close(self, seeds: list[int]) -> _State:
        reached = set(seeds)
        todo = list(seeds)
        while todo:
            for following in self._nodes[todo.pop()].free:
                if following not in reached:
                    reached.add(following)
                    todo.append(following)
        return frozenset(reached)


@dataclass(slots=True)
class _TrieNode:
    children: dict[int, _TrieNode] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)


class VocabularyTrie:
    """All tokens by their symbols."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._symbols = [token_symbols(tokenizer, i) for i in range(tokenizer.vocab_size)]
        self.root = _TrieNode()
        for token_id, symbols in enumerate(self._symbols):
            node = self.root
            for symbol in symbols:
                node = node.children.setdefault(symbol, _TrieNode())
            node.ids.append(token_id)

    def symbols(self, token_id: int) -> tuple[int, ...]:
        """The grammar symbols that one token stands for."""
        return self._symbols[token_id]


def token_symbols(tokenizer: Tokenizer, token_id: int) -> tuple[int, ...]:
    """A special token is one symbol of its own, any other token its bytes."""
    if token_id < NUM_SPECIAL:
        return (_SPECIAL_SYMBOL + token_id,)
    return tuple(tokenizer.token_bytes(token_id))
