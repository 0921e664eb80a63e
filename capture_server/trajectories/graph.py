"""Steps 1 to 6 of a build: from unordered entries to a judged forest of calls.

Pure and independent of the order of entries. What trainers get is read off this forest by
``builder`` (chains) and ``traces`` (rows). Source of every rule: spec 04.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from capture_server.trajectories.calls import Call
from capture_server.trajectories.deltas import place_deltas
from capture_server.trajectories.duplicates import one_call_per_id
from capture_server.trajectories.parents import PARENT_RECOVERED, link_parents
from capture_server.trajectories.retries import judge_retries, set_aside_leaves
from capture_server.trajectories.soundness import INVALID_RECORD, split_sound
from middleware.records import TokenEntry

DUPLICATE_CONFLICT: Final = "duplicate_call_id_conflict"
UNRECONSTRUCTABLE: Final = "delta_chain_unreconstructable"

TerminalChain = Literal["", "delivered", "broken", "not_captured"]


@dataclass(slots=True)
class LineageGraph:
    """The judged forest. ``calls`` holds every rebuilt call that generated something."""

    n_calls: int
    calls: dict[str, Call]
    empty: dict[str, Call]
    lost: dict[str, str]  # call id -> why no copy or rebuild of it can be used
    terminal_call_id: str | None
    terminal_chain: TerminalChain = ""
    broken_at_fragment_only: bool = False
    unresolved_retries: list[str] = field(default_factory=list)
    parallel_attempts: bool = False
    drift: dict[str, int] = field(default_factory=dict)

    def set_aside(self, why: str) -> list[str]:
        """Ids of the leaves set aside as "undelivered" or "aborted", sorted."""
        return sorted(call.call_id for call in self.calls.values() if call.set_aside == why)

    def link_failures(self) -> Counter[str]:
        """Reason -> number of calls; recovered links are counted too."""
        reasons = Counter(self.lost.values())
        reasons.update(call.failure for call in self.calls.values() if call.failure)
        recovered = sum(call.recovered for call in self.calls.values())
        if recovered:
            reasons[PARENT_RECOVERED] = recovered
        return reasons

    def unresolved_parent_calls(self) -> list[str]:
        """Every call with a link failure that was not made good, sorted."""
        return sorted([*self.lost, *(c.call_id for c in self.calls.values() if c.failure)])

    def paths(self, *, fragments_deliver: bool = False) -> list[list[Call]]:
        """Step 7: root-to-leaf paths without quarantined calls, in listing order.

        A delivered terminal cuts its path and puts it first. ``fragments_deliver`` treats a
        terminal that is broken only because its path begins at a fragment like a delivered one.
        """
        leaves = sorted(self._leaves(), key=lambda call: call.key)
        found = [leaf.path() for leaf in leaves]
        terminal = self.delivered_terminal(fragments_deliver=fragments_deliver)
        if terminal is None:
            return found
        others = [path for path in found if terminal not in path]
        return [terminal.path(), *others]

    def delivered_terminal(self, *, fragments_deliver: bool = False) -> Call | None:
        """The terminal, if the chain that ends at it is delivered."""
        counts = self.terminal_chain == "delivered" or (
            fragments_deliver and self.broken_at_fragment_only
        )
        return self.calls.get(self.terminal_call_id or "") if counts else None

    def _leaves(self) -> list[Call]:
        leaves: list[Call] = []
        open_calls = [call for call in self.calls.values() if call.parent is None]
        while open_calls:
            call = open_calls.pop()
            if call.quarantined or call.set_aside:
                continue
            going_on = [child for child in call.children if not child.set_aside]
            open_calls += going_on
            if not going_on:
                leaves.append(call)
        return leaves


def build_graph(entries: Sequence[TokenEntry], terminal_call_id: str | None = None) -> LineageGraph:
    """Judge the calls of one frozen rollout. The entries are not changed.

    Raises:
        InvalidRecordError: an element is no entry, or has no call id (see ``soundness``).
    """
    sound, broken = split_sound(entries)
    calls, conflicts = one_call_per_id(sound)
    n_calls = len(calls) + len(conflicts) + len(broken)
    lost = dict.fromkeys(broken, INVALID_RECORD)
    lost |= dict.fromkeys(conflicts, DUPLICATE_CONFLICT)
    lost |= dict.fromkeys(place_deltas(calls), UNRECONSTRUCTABLE)
    empty = {c: call for c, call in calls.items() if c not in lost and not call.generated}
    generating = {c: call for c, call in calls.items() if c not in lost and call.generated}
    decided = any(entry.parent_resolution is not None for entry in sound)
    drift = link_parents(generating, empty, decided=decided)
    graph = LineageGraph(n_calls, generating, empty, lost, terminal_call_id, drift=drift)
    _judge(graph)
    return graph


def _judge(graph: LineageGraph) -> None:
    terminal = graph.calls.get(graph.terminal_call_id or "")
    path = terminal.path() if terminal is not None else []
    if graph.terminal_call_id is not None:
        graph.terminal_chain = "delivered" if path else "not_captured"
    if path:
        spoiled = path[-1].aborted or any(call.ambiguous for call in path)
        if spoiled or path[0].is_fragment:
            graph.terminal_chain = "broken"
            graph.broken_at_fragment_only = not spoiled
    set_aside_leaves(graph.calls.values(), terminal)
    found = judge_retries(
        graph.calls.values(),
        path,
        terminal_spares=graph.terminal_chain == "delivered" or graph.broken_at_fragment_only,
    )
    graph.parallel_attempts = found.parallel_attempts
    if graph.terminal_chain not in ("delivered", "broken"):
        graph.unresolved_retries = found.unresolved
