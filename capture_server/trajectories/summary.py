"""The metrics of a build: what operators and trainers read to see what was lost, and why.

Counts, ids and reasons only; never tokens or text.
"""

from __future__ import annotations

from typing import Any

from capture_server.trajectories.builder import BuildOutput
from capture_server.trajectories.terminal import TerminalAttribution


def terminal_metrics(attribution: TerminalAttribution, chain: str) -> dict[str, Any]:
    """Who named the scored call, and what became of its chain."""
    return {
        "method": attribution.method or "none",
        "call_id": attribution.model_call_id,
        "reason": attribution.reason,
        "chain": chain,
    }


def build_metrics(
    out: BuildOutput, attribution: TerminalAttribution, *, n_calls: int, incomplete: bool
) -> dict[str, Any]:
    """The metrics of a build that gave chains. Keys: spec 04, "Build of a whole rollout"."""
    notes = out.notes
    metrics: dict[str, Any] = {
        "n_calls": n_calls,
        "terminal_attribution": terminal_metrics(attribution, notes.terminal_chain),
        "chains": notes.chains,
        "roots": notes.roots,
        "quarantined_calls": len(out.quarantined),
        "quarantined_fraction": round(len(out.quarantined) / n_calls, 4) if n_calls else 0.0,
        "delivered_fraction": notes.delivered_fraction,
        "generated_tokens_captured": notes.generated_tokens_captured,
        "generated_tokens_delivered": notes.generated_tokens_delivered,
        "parent_link_failures": dict(notes.parent_link_failures),
        "unresolved_parent_calls": len(notes.unresolved_parent_calls),
        "empty_generation_calls": len(notes.empty_generation_calls),
    }
    if incomplete:
        metrics["capture_incomplete"] = True
    return metrics


def failed_metrics(
    n_calls: int, attribution: TerminalAttribution | None, *, incomplete: bool
) -> dict[str, Any]:
    """The metrics of a build without any chain; ``attribution`` is None without records."""
    metrics: dict[str, Any] = {"n_calls": n_calls}
    if attribution is not None:
        chain = "not_captured" if attribution.attributed else "error"
        metrics["terminal_attribution"] = terminal_metrics(attribution, chain)
    if incomplete:
        metrics["capture_incomplete"] = True
    return metrics
