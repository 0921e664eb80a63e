"""The golden vectors of builds and projections, one test per named case."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from capture_server.trajectories.builder import (
    BuildOutput,
    assert_prefix_contiguity,
    prefix_merging,
)
from capture_server.trajectories.consumer import build_from_snapshot
from capture_server.trajectories.terminal import resolve_terminal
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import TokenEntry

GOLDEN = Path(__file__).parents[2] / "data" / "golden"


def _cases(name: str) -> list[Any]:
    cases = json.loads((GOLDEN / f"{name}.json").read_text())
    return [pytest.param(case["input"], case["expected"], id=case["name"]) for case in cases]


def _shown(out: BuildOutput, expected: dict[str, Any]) -> dict[str, Any]:
    """The build in the vectors' form, with the keys that the vector gives."""
    return {
        "chains": [
            {
                "chain_id": chain.chain_id,
                "call_ids": chain.call_ids,
                "root_prompt": chain.root_prompt.tolist(),
                "interstitials": [link.interstitial.tolist() for link in chain.links],
            }
            for chain in out.chains
        ],
        "quarantined": sorted(out.quarantined),
        "notes": {name: getattr(out.notes, name) for name in expected["notes"]},
    }


@pytest.mark.parametrize(
    ("given", "expected"), [*_cases("builder"), *_cases("builder_prefix_only")]
)
def test_build_gives_the_recorded_result_in_any_order(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Chains, quarantine and notes are those of the vector, however the entries are ordered."""
    entries = [TokenEntry.model_validate(entry) for entry in given["entries"]]
    for seed in range(3):
        out = prefix_merging(entries, given.get("terminal_call_id"))
        for name in ("unresolved_retries", "empty_generation_calls", "unresolved_parent_calls"):
            if name in expected["notes"]:
                expected["notes"][name] = sorted(set(expected["notes"][name]))
        assert _shown(out, expected) == expected
        random.Random(seed).shuffle(entries)


@pytest.mark.parametrize(("given", "expected"), _cases("terminal"))
def test_terminal_is_attributed_as_recorded(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Call, method and reason are those of the vector, for token entries and ledger rows."""
    entries: list[Any] = given["entries"]
    if given["kind"] == "token":
        entries = [TokenEntry.model_validate(entry) for entry in entries]
    for ordered in (entries, entries[::-1]):
        found = resolve_terminal(
            ordered,
            given["response"],
            given["explicit_call_id"],
            declared_response_id=given["declared_response_id"],
        )
        assert asdict(found) == expected


@pytest.mark.parametrize(("given", "expected"), _cases("assemble"))
def test_whole_rollout_is_assembled_as_recorded(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Verdict, metrics and rebuilt response are those of the vector, in any order of entries."""
    entries = [TokenEntry.model_validate(entry) for entry in given["entries"]]
    for ordered in (entries, entries[::-1]):
        snapshot = TokenCaptureSnapshot(
            given["rollout_id"], ordered, given["incomplete"], snapshot_id="s", version=1
        )
        built = build_from_snapshot(
            snapshot,
            model=given["model"],
            verified_response=given["verified_response"],
            explicit_terminal_call_id=given["explicit_terminal_call_id"],
            declared_response_id=given["declared_response_id"],
        )
        response = built["rebuilt_response"]
        assert {
            "mask_sample": built["mask_sample"],
            "error": "error" in built,
            "metrics": built["metrics"],
            "output": response and response["output"],
            "usage": response and response["usage"],
        } == expected
        if response:
            assert_prefix_contiguity(response)
