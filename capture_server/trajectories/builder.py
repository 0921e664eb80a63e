"""Build trainable chains from the entries of one frozen rollout.

``prefix_merging`` joins calls whose parent is proven by tokens and digests; ``per_request`` gives
one chain per call. Both are pure, independent of the order of entries and free of recursion; the
work is numpy and sha256 over arrays that are never copied. Rules: spec 04, "Builders".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from capture_server.trajectories.calls import Call
from capture_server.trajectories.chains import Chain, ChainLink, chain_ids, chain_of
from capture_server.trajectories.digests import contradicting
from capture_server.trajectories.graph import LineageGraph, build_graph
from capture_server.trajectories.projection import (
    assert_prefix_contiguity,
    project_chain_to_output_items,
    project_main_chain_response,
)
from middleware.errors import InvalidInputError
from middleware.records import TokenEntry, TokenIds

__all__ = [
    "BUILDERS",
    "BuildNotes",
    "BuildOutput",
    "Chain",
    "ChainLink",
    "assert_prefix_contiguity",
    "merged_chains",
    "per_request",
    "prefix_merging",
    "project_chain_to_output_items",
    "project_main_chain_response",
    "run_builder",
    "single_chains",
]


@dataclass(slots=True)
class BuildNotes:
    """What a build kept, dropped or could not decide. All id lists are sorted."""

    builder: str
    roots: int = 0  # calls without parent, before retries are quarantined
    chains: int = 0
    generated_tokens_captured: int = 0
    generated_tokens_delivered: int = 0
    delivered_fraction: float = 0.0
    unresolved_retries: list[str] = field(default_factory=list)
    terminal_call_id: str | None = None
    terminal_chain: str = ""  # "", "delivered", "broken" or "not_captured"
    empty_generation_calls: list[str] = field(default_factory=list)
    parent_link_failures: dict[str, int] = field(default_factory=dict)
    unresolved_parent_calls: list[str] = field(default_factory=list)
    undelivered_calls: list[str] = field(default_factory=list)
    aborted_calls: list[str] = field(default_factory=list)
    given_history: list[str] = field(default_factory=list)
    n_calls: int = 0  # different call ids
    # call id -> first index at which its prompt leaves the named parent's sequence
    drift: dict[str, int] = field(default_factory=dict)
    # calls of the main chain whose tokens are not those of their own digest or cum_len
    digest_mismatches: list[str] = field(default_factory=list)


@dataclass(slots=True)
class BuildOutput:
    """``quarantined``: calls left out because their place is ambiguous; ``undecided``: retry
    groups of which one had to be kept although none could be known."""

    chains: list[Chain]
    quarantined: list[str] = field(default_factory=list)
    notes: BuildNotes = field(default_factory=lambda: BuildNotes(builder=""))
    undecided: list[str] = field(default_factory=list)

    @property
    def main_chain(self) -> Chain | None:
        """The chain called ``main``, if there is one."""
        return next((chain for chain in self.chains if chain.chain_id == "main"), None)


def prefix_merging(
    entries: Sequence[TokenEntry], terminal_call_id: str | None = None
) -> BuildOutput:
    """One chain per root-to-leaf path of proven parent links."""
    return merged_chains(build_graph(entries, terminal_call_id))


def per_request(entries: Sequence[TokenEntry], terminal_call_id: str | None = None) -> BuildOutput:
    """One chain per call that can be rebuilt and generated something; nothing is inferred."""
    return single_chains(build_graph(entries, terminal_call_id))


BUILDERS: dict[str, Callable[[Sequence[TokenEntry], str | None], BuildOutput]] = {
    "per_request": per_request,
    "prefix_merging": prefix_merging,
}


def run_builder(
    entries: Sequence[TokenEntry],
    builder: str = "prefix_merging",
    terminal_call_id: str | None = None,
) -> BuildOutput:
    """Chain frozen entries with the named strategy.

    Raises:
        InvalidInputError: no such builder.
    """
    if builder not in BUILDERS:
        raise InvalidInputError(
            f"unknown builder {builder!r}; use one of {', '.join(sorted(BUILDERS))}"
        )
    return BUILDERS[builder](entries, terminal_call_id)


def merged_chains(graph: LineageGraph) -> BuildOutput:
    """``prefix_merging`` of a graph that was built already."""
    paths = graph.paths()
    names = chain_ids(paths, first_is_main=graph.delivered_terminal() is not None)
    chains = [chain_of(name, path) for name, path in zip(names, paths, strict=True)]
    notes = _notes("prefix_merging", graph)
    notes.chains = len(chains)
    out = BuildOutput(
        chains,
        _ids(graph, lambda call: call.quarantined),
        notes,
        _ids(graph, lambda call: call.undecided),
    )
    main = out.main_chain
    if main is not None:
        found = contradicting(paths[names.index(main.chain_id)])
        notes.digest_mismatches = sorted(call.call_id for call in found)
    _count_delivered(notes, main.generated_tokens if main is not None else 0)
    return out


def single_chains(graph: LineageGraph) -> BuildOutput:
    """``per_request`` of a graph that was built already."""
    calls = sorted(graph.calls.values(), key=lambda call: call.key)
    # Longest first: a rebuilt delta prompt is then shared by all shorter ones on its path.
    prompts = {call.call_id: call.full_prompt() for call in reversed(calls)}
    chains = [
        Chain(f"req-{at}", [ChainLink(call.entry, TokenIds(()))], prompts[call.call_id])
        for at, call in enumerate(calls)
    ]
    notes = _notes("per_request", graph)
    notes.roots = notes.chains = len(chains)
    notes.unresolved_retries = []
    if notes.terminal_call_id is not None:
        known = notes.terminal_call_id in graph.calls
        notes.terminal_chain = "delivered" if known else "not_captured"
    _count_delivered(notes, notes.generated_tokens_captured)
    return BuildOutput(chains, [], notes)


def _notes(builder: str, graph: LineageGraph) -> BuildNotes:
    calls = graph.calls.values()
    return BuildNotes(
        builder=builder,
        roots=sum(call.parent is None and not call.set_aside for call in calls),
        generated_tokens_captured=sum(len(call.generated) for call in calls),
        unresolved_retries=list(graph.unresolved_retries),
        terminal_call_id=graph.terminal_call_id,
        terminal_chain=graph.terminal_chain,
        empty_generation_calls=sorted(graph.empty),
        parent_link_failures=dict(sorted(graph.link_failures().items())),
        unresolved_parent_calls=graph.unresolved_parent_calls(),
        undelivered_calls=graph.set_aside("undelivered"),
        aborted_calls=graph.set_aside("aborted"),
        given_history=_ids(graph, lambda call: call.given_history),
        n_calls=graph.n_calls,
        drift=dict(sorted(graph.drift.items())),
    )


def _count_delivered(notes: BuildNotes, delivered: int) -> None:
    notes.generated_tokens_delivered = delivered
    if notes.generated_tokens_captured:
        notes.delivered_fraction = round(delivered / notes.generated_tokens_captured, 4)


def _ids(graph: LineageGraph, chosen: Callable[[Call], bool]) -> list[str]:
    return sorted(call.call_id for call in graph.calls.values() if chosen(call))
