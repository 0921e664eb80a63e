"""Whole-rollout builds: the strict verdict, sources, local directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capture_server.stores.file import TokenCaptureStore
from capture_server.trajectories.consumer import (
    build_from_snapshot,
    clear_token_captures_for_rollouts,
    token_id_capture_dirs_from_config,
    trajectories_for_rollout,
    trajectories_from_source,
)
from capture_server.trajectories.delivery import finalize_rollout_token_capture
from capture_server.trajectories.rollout_ids import rollout_id_of
from middleware.errors import InvalidIdError
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import TokenEntry
from tests.unit.capture_server.rollout_factory import call, delta


def chain() -> list[TokenEntry]:
    first = call("a", [1, 2], [3, 4])
    return [first, call("b", [1, 2, 3, 4, 5], [6], first)]


def snapshot(entries: list[TokenEntry], *, incomplete: bool = False) -> TokenCaptureSnapshot:
    return TokenCaptureSnapshot("r", entries, incomplete, snapshot_id="s", version=4)


class Source:
    """A source that froze already."""

    def __init__(self, frozen: TokenCaptureSnapshot) -> None:
        self.frozen = frozen

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        assert rollout_id == self.frozen.rollout_id
        return self.frozen

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        raise AssertionError("building never retires")

    async def close(self) -> None: ...


def test_result_carries_all_documented_keys() -> None:
    """Verdict, response, metrics and the identity of what was consumed."""
    built = build_from_snapshot(snapshot(chain()), model="m")
    assert built.keys() == {
        "rollout_id", "builder", "rebuilt_response", "mask_sample", "metrics",
        "unresolved_retries", "unresolved_parent_calls", "_capture_snapshot",
    }  # fmt: skip
    assert built["_capture_snapshot"] == {"snapshot_id": "s", "version": 4}
    assert built["rebuilt_response"]["object"] == "response"
    assert built["rebuilt_response"]["model"] == "m"
    assert built["rebuilt_response"]["usage"] == {"input_tokens": 2, "output_tokens": 3}


def test_projection_leaves_entries_and_other_items_alone() -> None:
    """Arrays go on the item that carried them; stale arrays elsewhere are not handed on."""
    items = [
        {"type": "message", "role": "assistant", "content": "x", "prompt_token_ids": [9]},
        {"type": "function_call", "name": "f"},
    ]
    entry = call("a", [1], [2], output_items=items, token_item_index=0, routed_experts="v1:x")
    output = build_from_snapshot(snapshot([entry]))["rebuilt_response"]["output"]
    assert output[0]["prompt_token_ids"] == [1]
    assert output[0]["routed_experts"] == "v1:x"
    assert output[1] == {"type": "function_call", "name": "f"}
    assert entry.output_items == items


def test_per_request_cannot_be_one_response() -> None:
    """The result is a failed build that says what to use."""
    built = build_from_snapshot(snapshot(chain()), builder="per_request")
    assert (built["rebuilt_response"], built["mask_sample"]) == (None, True)
    assert "prefix_merging" in built["error"]


def test_unknown_builder_is_a_failed_build() -> None:
    """A masked result, not an exception in a trainer's loop."""
    built = build_from_snapshot(snapshot(chain()), builder="guess")
    assert built["mask_sample"] is True
    assert "unknown builder" in built["error"]


def test_undecided_repeat_masks_the_strict_result() -> None:
    """The agent asked again after its answer had ended."""
    first = call("a", [1], [2], created_at=1.0, timings={"total_ms": 100.0})
    again = call("b", [1], [3], created_at=5.0, delivered=False)
    built = build_from_snapshot(snapshot([first, again]))
    assert (built["mask_sample"], built["unresolved_retries"]) == (True, ["a"])


def doctored(as_delta: bool, at: int, index: int) -> list[TokenEntry]:
    """A chain of three in which one stored token of one record was changed."""
    entries: list[TokenEntry] = []
    cum: list[int] = []
    for turn in range(3):
        prompt, generated = [*cum, 10 + turn, 20 + turn], [turn, turn + 1]
        entry = call(f"c{turn}", prompt, generated, entries[-1] if entries else None)
        entry.response_id = f"resp-{turn}"
        entries.append(delta(entry, len(cum)) if as_delta and turn else entry)
        cum = prompt + generated
    entry = entries[at]
    ids, cut = entry.prompt_token_ids + entry.generation_token_ids, len(entry.prompt_token_ids)
    changed = ids.tolist()
    changed[index] += 1
    update = {"prompt_token_ids": changed[:cut], "generation_token_ids": changed[cut:]}
    entries[at] = TokenEntry.model_validate(entry.model_dump() | update)
    return entries


CHANGES = [
    (as_delta, at, index)
    for as_delta in (False, True)
    for at in range(3)
    for index in range(4 if as_delta or at == 0 else 4 * at + 4)
]


@pytest.mark.parametrize(("as_delta", "at", "index"), CHANGES)
async def test_a_changed_token_is_never_delivered_unmasked(
    as_delta: bool, at: int, index: int
) -> None:
    """At any position of any call, with and without an attributed terminal, last call included."""
    frozen = snapshot(doctored(as_delta, at, index))
    asked: list[dict[str, Any]] = [
        {}, {"explicit_terminal_call_id": "c2"}, {"declared_response_id": "resp-2"},
        {"verified_response": {"id": "resp-2", "output": []}},
    ]  # fmt: skip
    for how in asked:
        assert build_from_snapshot(frozen, **how)["mask_sample"] is True
    record: dict[str, Any] = {"_ng_rollout_id": "r", "response": {"id": "resp-2", "output": []}}
    await finalize_rollout_token_capture(record, Source(frozen))
    assert record["mask_sample"] is True
    if at == 2 and index >= 8:  # only the last call's own digest contradicts it
        assert record["_ng_token_capture"]["recorded_digest_mismatch"] == ["c2"]


@pytest.mark.parametrize("cum_len", [0, 5, 7])
def test_a_wrong_recorded_length_masks_the_result(cum_len: int) -> None:
    """Zero is a length like any other; an absent one says nothing."""
    first, last = chain()
    last.cum_len = cum_len
    built = build_from_snapshot(snapshot([first, last]))
    assert (built["mask_sample"], built["recorded_digest_mismatch"]) == (True, ["b"])
    last.cum_len = None
    assert build_from_snapshot(snapshot([first, last]))["mask_sample"] is False


async def test_source_is_frozen_and_built() -> None:
    """The async form gives the same result as the pure one."""
    frozen = snapshot(chain(), incomplete=True)
    built = await trajectories_from_source("r", Source(frozen), explicit_terminal_call_id="b")
    assert built == build_from_snapshot(frozen, explicit_terminal_call_id="b")
    assert built is not None
    assert built["mask_sample"] is True
    assert built["metrics"]["capture_incomplete"] is True


async def test_local_directories(tmp_path: Path) -> None:
    """None without directories; else the directory that holds the rollout; two are a failure."""
    assert trajectories_for_rollout("r", []) is None
    roots = [tmp_path / "one", tmp_path / "two"]
    store = TokenCaptureStore(roots[1])
    for entry in chain():
        await store.put(entry)
    await store.close()
    built = trajectories_for_rollout("r", roots)
    assert built is not None
    assert (built["mask_sample"], built["metrics"]["n_calls"]) == (False, 2)
    missing = trajectories_for_rollout("other", roots)
    assert missing is not None
    assert missing["mask_sample"] is True
    other = TokenCaptureStore(tmp_path / "three")
    await other.put(chain()[0])
    await other.close()
    torn = trajectories_for_rollout("r", [*roots, tmp_path / "three"])
    assert torn is not None
    assert (torn["mask_sample"], torn["rebuilt_response"]) == (True, None)


async def test_clearing_frees_the_ids_that_are_about_to_be_used(tmp_path: Path) -> None:
    """Other rollouts stay; a malformed row clears nothing."""
    store = TokenCaptureStore(tmp_path)
    for rollout_id in ("0-1", "0-2"):
        await store.put(call("a", [1], [2], rollout_id=rollout_id))
    row: dict[str, Any] = {"_ng_task_index": 0, "_ng_rollout_index": 1}
    with pytest.raises(InvalidIdError):
        clear_token_captures_for_rollouts([row, {"_ng_rollout_id": "../x"}], [tmp_path])
    assert len(store.read_entries("0-1")) == 1
    clear_token_captures_for_rollouts([row, {"note": "no id"}], [tmp_path])
    fresh = TokenCaptureStore(tmp_path)
    assert (len(fresh.read_entries("0-1")), len(fresh.read_entries("0-2"))) == (0, 1)
    await store.close()
    await fresh.close()


def test_directories_come_from_the_enabled_configuration(tmp_path: Path) -> None:
    """A disabled or absent block has none."""
    block = {"enabled": True, "dir": str(tmp_path)}
    assert token_id_capture_dirs_from_config({"token_id_capture": block}) == [tmp_path]
    assert token_id_capture_dirs_from_config({"token_id_capture": block | {"enabled": False}}) == []
    assert token_id_capture_dirs_from_config({}) == []


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"_ng_rollout_id": "x"}, "x"),
        ({"_ng_rollout_id": "x", "_ng_attempt_index": 2}, "x-a2"),
        ({"_ng_task_index": 3, "_ng_rollout_index": 0}, "3-0"),
        ({"_ng_task_index": 3, "_ng_rollout_index": 0, "_ng_attempt_index": 0}, "3-0"),
        ({"_ng_task_index": 3, "_ng_rollout_index": 1, "_ng_attempt_index": 1}, "3-1-a1"),
        ({"_ng_task_index": 3}, None),
        ({}, None),
    ],
)
def test_rollout_id_of_a_record(record: dict[str, Any], expected: str | None) -> None:
    """An explicit id wins over indices; attempts after the first have a suffix."""
    assert rollout_id_of(record) == expected


@pytest.mark.parametrize(
    "record",
    [
        {"_ng_rollout_id": "../x"},
        {"_ng_rollout_id": 5},
        {"_ng_task_index": True, "_ng_rollout_index": 0},
        {"_ng_task_index": 1, "_ng_rollout_index": 0, "_ng_attempt_index": "x"},
    ],
)
def test_malformed_ids_are_refused(record: dict[str, Any]) -> None:
    """Never a lookup under a made-up id."""
    with pytest.raises(InvalidIdError):
        rollout_id_of(record)
