"""A log-prob that was changed in a snapshot is never trained: rows and the strict path mask it."""

from __future__ import annotations

import pytest

from capture_server.trajectories import build_traces
from capture_server.trajectories.consumer import build_from_snapshot
from capture_server.verify import Checked, verify_snapshot
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import (
    ParentResolutionStatus,
    TokenEntry,
    TokenIds,
    compute_log_probs_digest,
    stamp_lineage,
)


def chain() -> list[TokenEntry]:
    """Three calls, each extending the one before, as the middleware stamps them."""
    entries: list[TokenEntry] = []
    cumulative, parent = TokenIds.of([]), None
    for number in range(3):
        prompt = cumulative + [number]
        entry = TokenEntry(
            rollout_id="r",
            model_call_id=f"c{number}",
            prompt_token_ids=prompt,
            generation_token_ids=[10 + number, 2],
            generation_log_probs=[-0.25, -0.5],
            created_at=100.0 + number,
            finish_reason="stop",
            delivered=True,
        )
        cumulative = prompt + entry.generation_token_ids
        status = ParentResolutionStatus.RESOLVED if parent else ParentResolutionStatus.ROOT
        stamp_lineage(entry, parent, parent_resolution=status, cumulative=cumulative)
        entry.log_probs_digest = compute_log_probs_digest(entry.generation_log_probs)
        entries.append(entry)
        parent = entry.model_call_id
    return entries


def snapshot(entries: list[TokenEntry]) -> TokenCaptureSnapshot:
    return TokenCaptureSnapshot("r", entries, False, "s", 1)


def test_an_unchanged_chain_is_trained() -> None:
    """The control: all three products take it."""
    entries = chain()

    assert not build_traces(entries).mask_sample
    assert not build_from_snapshot(snapshot(entries))["mask_sample"]
    assert list(verify_snapshot(snapshot(entries), Checked())) == []


@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize("position", range(2))
def test_one_changed_log_prob_of_any_call_is_masked_and_found(call: int, position: int) -> None:
    """Whatever the call and the position, parents and last calls alike."""
    entries = chain()
    values = [-0.25, -0.5]
    values[position] -= 1e-9
    entries[call] = entries[call].model_copy(update={"generation_log_probs": values})

    rows = build_traces(entries).rows
    assert all(row.mask_sample for row in rows if f"c{call}" in row.model_call_ids)
    assert build_from_snapshot(snapshot(entries))["mask_sample"]
    found = list(verify_snapshot(snapshot(entries), Checked()))
    assert [(violation.code, violation.call_id) for violation in found] == [
        ("log_probs_mismatch", f"c{call}")
    ]
