"""Finalising and retiring rollout records."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from capture_server.trajectories.delivery import (
    capture_build_can_retire,
    finalize_rollout_token_capture,
    retire_rollout_token_capture,
    rollout_carries_token_ids,
)
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import TokenEntry
from tests.unit.capture_server.rollout_factory import call


class Source:
    """Freezes to given entries and remembers what was retired."""

    def __init__(self, entries: list[TokenEntry], fails: Exception | None = None) -> None:
        self.entries, self.fails = entries, fails
        self.version = 1
        self.frozen: list[str] = []
        self.dropped: list[tuple[str, str, int]] = []

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        if self.fails:
            raise self.fails
        self.frozen.append(rollout_id)
        return TokenCaptureSnapshot(rollout_id, self.entries, False, "snap", self.version)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        if self.fails:
            raise self.fails
        if version != self.version:
            return False
        self.dropped.append((rollout_id, snapshot_id, version))
        return True

    async def close(self) -> None: ...


def entries() -> list[TokenEntry]:
    first = call("a", [1], [2], response_id="resp-a")
    return [first, call("b", [1, 2, 3], [4], first, response_id="resp-b")]


def record(**more: Any) -> dict[str, Any]:
    output = [{"type": "message", "role": "assistant", "content": "x"}]
    return {
        "_ng_rollout_id": "r", "reward": 1.0, "response": {"id": "resp-b", "output": output},
        **more,
    }  # fmt: skip


async def test_finalising_replaces_only_the_output() -> None:
    """Reward and every other field stay; the metrics are attached; nothing is retired."""
    source, result = Source(entries()), record()
    before = copy.deepcopy(result)
    built = await finalize_rollout_token_capture(result, source)
    assert built is not None
    assert built["mask_sample"] is False
    assert [i["generation_token_ids"] for i in result["response"]["output"]] == [[2], [4]]
    assert result.pop("_ng_token_capture")["terminal_attribution"]["call_id"] == "b"
    result["response"]["output"] = before["response"]["output"]
    assert result == before
    assert source.dropped == []


async def test_without_source_nothing_happens() -> None:
    """This caller does not rebuild."""
    result = record()
    assert await finalize_rollout_token_capture(result, None) is None
    assert result == record()


async def test_record_with_tokens_is_left_alone_and_its_records_may_be_retired() -> None:
    """The policy's own ids win over any reconstruction."""
    output = [{"type": "message", "generation_token_ids": [9]}]
    result = record(response={"output": output})
    before, source = copy.deepcopy(result), Source(entries())
    built = await finalize_rollout_token_capture(result, source)
    assert result == before
    assert capture_build_can_retire(built)
    assert await retire_rollout_token_capture("r", source, built) is True
    assert source.dropped == [("r", "snap", 1)]


@pytest.mark.parametrize(
    ("result", "error"),
    [
        ({"response": {"output": []}}, "no rollout id"),
        ({"_ng_rollout_id": "../x", "response": {}}, "bad id"),
    ],
)
async def test_record_that_cannot_be_looked_up_is_masked(
    result: dict[str, Any], error: str
) -> None:
    """It would look healthy until it reached the trainer."""
    built = await finalize_rollout_token_capture(result, Source(entries()))
    assert built is not None
    assert result["mask_sample"] is True
    assert error in result["_ng_token_capture"]["error"]
    assert not capture_build_can_retire(built)


async def test_failing_source_masks_the_record_instead_of_raising() -> None:
    """One rollout does not take its batch down."""
    result = record()
    built = await finalize_rollout_token_capture(result, Source([], fails=OSError("away")))
    assert built is not None
    assert built["rebuilt_response"] is None
    assert result["mask_sample"] is True
    assert result["_ng_token_capture"]["error"] == "OSError: away"


async def test_masked_build_keeps_its_records() -> None:
    """Nothing captured: masked, with the error, and not retired."""
    result, source = record(), Source([])
    built = await finalize_rollout_token_capture(result, source)
    assert result["mask_sample"] is True
    assert result["_ng_token_capture"]["error"]
    assert result["response"] == record()["response"]
    assert await retire_rollout_token_capture("r", source, built) is False
    assert source.dropped == []


async def test_declared_terminal_of_the_record_is_heeded() -> None:
    """Both keys are read from the record; an unknown declared id masks."""
    result = record(terminal_response_id="resp-gone")
    await finalize_rollout_token_capture(result, Source(entries()))
    assert result["mask_sample"] is True
    named = record(_ng_terminal_model_call_id="a", response={"output": []})
    built = await finalize_rollout_token_capture(named, Source(entries()))
    assert built is not None
    assert built["metrics"]["terminal_attribution"]["call_id"] == "a"
    assert [i["generation_token_ids"] for i in named["response"]["output"]] == [[2]]


async def test_changed_snapshot_is_not_retired() -> None:
    """A record lost after the freeze bumps the version; the evidence is kept."""
    result, source = record(), Source(entries())
    built = await finalize_rollout_token_capture(result, source)
    source.version = 2
    assert await retire_rollout_token_capture("r", source, built) is False
    source.fails = OSError("away")
    assert await retire_rollout_token_capture("r", source, built) is False
    assert await retire_rollout_token_capture("r", None, built) is False
    assert await retire_rollout_token_capture("r", source, None) is False


@pytest.mark.parametrize(
    ("response", "carries"),
    [
        (None, False),
        ({"output": None}, False),
        ({"output": ["x", {"generation_token_ids": []}]}, False),
        ({"output": [{}, {"generation_token_ids": [1]}]}, True),
    ],
)
def test_carrying_token_ids(response: Any, carries: bool) -> None:
    """Any item with generated ids counts; partial coverage must stay visible."""
    assert rollout_carries_token_ids({"response": response}) is carries
