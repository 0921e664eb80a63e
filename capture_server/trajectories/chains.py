"""What a build hands out: chains of calls whose tokens are one unbroken sequence.

Invariant: ``root_prompt``, then per link its ``interstitial`` and its entry's generation, is the
exact token sequence that the engine saw and sampled up to that call. Interstitials are views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from capture_server.trajectories.calls import Call
from middleware.errors import InvalidRecordError
from middleware.records import TokenEntry, TokenIds


@dataclass(slots=True)
class ChainLink:
    """One call in a chain. ``interstitial``: prompt tokens after the parent's sequence (mask 0).

    The first link's interstitial is empty; its prompt is the chain's ``root_prompt``. ``entry``
    is the record as captured: a delta stays a delta.
    """

    entry: TokenEntry
    interstitial: TokenIds


@dataclass(slots=True)
class Chain:
    """A root-to-leaf path of calls."""

    chain_id: str
    links: list[ChainLink] = field(default_factory=list)
    root_prompt: TokenIds = field(default_factory=lambda: TokenIds(()))

    def validate(self) -> None:
        """Require one log-prob for each generated token.

        Raises:
            InvalidRecordError: a trainer could not use this chain.
        """
        for link in self.links:
            ids, log_probs = link.entry.generation_token_ids, link.entry.generation_log_probs
            if len(ids) != len(log_probs):
                raise InvalidRecordError(
                    f"call {link.entry.model_call_id!r} in chain {self.chain_id!r} has "
                    f"{len(ids)} generated tokens but {len(log_probs)} log-probs"
                )

    @property
    def call_ids(self) -> list[str]:
        """The calls from the chain's first to its last."""
        return [link.entry.model_call_id for link in self.links]

    @property
    def generated_tokens(self) -> int:
        """Number of policy-generated tokens in the chain."""
        return sum(len(link.entry.generation_token_ids) for link in self.links)

    @property
    def token_ids(self) -> TokenIds:
        """The whole sequence as one new array; index it with ``generation_spans``."""
        pieces = [self.root_prompt]
        for link in self.links:
            pieces += [link.interstitial, link.entry.generation_token_ids]
        return TokenIds.concat(*pieces)

    def generation_spans(self) -> Iterator[tuple[TokenEntry, int, int]]:
        """Per link: its entry and the half-open place of its generation in ``token_ids``."""
        position = len(self.root_prompt)
        for link in self.links:
            start = position + len(link.interstitial)
            position = start + len(link.entry.generation_token_ids)
            yield link.entry, start, position


def chain_of(chain_id: str, calls: Sequence[Call]) -> Chain:
    """The chain of a verified path."""
    first, rest = calls[0], calls[1:]
    links = [ChainLink(first.entry, TokenIds(()))]
    links += [ChainLink(call.entry, call.interstitial) for call in rest]
    return Chain(chain_id, links, first.full_prompt())


def chain_ids(paths: Sequence[Sequence[Call]], *, first_is_main: bool) -> list[str]:
    """``main`` and ``branch-<n>`` for paths in listing order.

    Without a delivered terminal, main is the path whose first call was dispatched earliest.
    """
    if not paths:
        return []
    main = 0
    if not first_is_main:
        main = min(range(len(paths)), key=lambda at: (*_age(paths[at][0]), at))
    branches = iter(range(len(paths)))
    return ["main" if at == main else f"branch-{next(branches)}" for at in range(len(paths))]


def _age(call: Call) -> tuple[float, str]:
    return (call.entry.created_at, call.call_id)
