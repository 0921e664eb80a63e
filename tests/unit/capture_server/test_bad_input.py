"""Broken records: named or masked, one rollout at a time; never a crash, never a repair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from capture_server.call_tree import call_tree
from capture_server.trajectories import (
    build_from_snapshot,
    build_traces,
    finalize_rollout_token_capture,
    resolve_terminal,
)
from capture_server.trajectories.soundness import INVALID_RECORD
from capture_server.verify import Checked, verify_snapshot
from middleware.errors import InvalidRecordError, TokenCaptureError
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import TokenEntry
from tests.unit.capture_server.rollout_factory import call, delta

HUGE = 10**400
ODD: list[Any] = [
    math.nan, math.inf, -math.inf, None, True, False, "5", "", "\ud800", [1], {"a": [1]},
    HUGE, -1, 0, 1e308, b"x", (1, 2), object(),
    {"total_ms": HUGE}, {"total_ms": math.nan}, {"total_ms": True}, {"total_ms": "7"},
]  # fmt: skip
FIELDS = sorted(
    set(TokenEntry.model_fields)
    - {"prompt_token_ids", "generation_token_ids", "generation_log_probs"}
    | {"delivered", "finish_reason", "dialect", "engine", "sampling", "weight_version", "timings"}
    | {"weight_version_end", "choice_index", "guided", "agent_id", "request_digest", "usage"}
    | {"first_call", "drift_at", "prompt_config_digest", "system_digest", "unheard_of"}
)


def rollout() -> list[TokenEntry]:
    """A retry pair (one undelivered), a continuation, a drifted call, a delta, a text prompt."""
    timings = {"total_ms": 5.0}
    first = call("a", [1], [2], created_at=1.0, delivered=False, timings=timings)
    again = call("b", [1], [3], created_at=2.0, timings=timings, request_digest="b" * 64)
    on = delta(call("c", [1, 3, 4], [5], again, created_at=3.0), 2)
    off = call("d", [1, 9, 4], [5], again, created_at=4.0, drift_at=1)
    text = call("e", [1, 3, 4, 5, 6], [7], on, created_at=5.0, dialect="completions")
    return [first, again, on, off, text]


def snapshot(entries: Sequence[Any], rollout_id: str = "r") -> TokenCaptureSnapshot:
    return TokenCaptureSnapshot(rollout_id, entries, False, "s", 1)


class Source:
    """A framework's own source: hands out whatever it holds."""

    def __init__(self, entries: Sequence[Any]) -> None:
        self.entries = entries

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        return snapshot(self.entries)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return True

    async def close(self) -> None:
        return None


# --- past validation -------------------------------------------------------------------------


@given(
    field=st.sampled_from(FIELDS),
    value=st.sampled_from(ODD),
    at=st.integers(0, 4),
    builder=st.sampled_from(["prefix_merging", "per_request"]),
    terminal=st.sampled_from([None, "b", "c", "e"]),
)
@settings(max_examples=600)
def test_no_value_in_any_field_breaks_a_build(
    field: str, value: Any, at: int, builder: str, terminal: str | None
) -> None:
    """Records patched past validation: a result or an error with a name, from every reader."""
    entries = rollout()
    entries[at] = entries[at].model_copy(update={field: value})
    one = snapshot(entries)
    built = build_from_snapshot(one, explicit_terminal_call_id=terminal)
    assert built["rebuilt_response"] is not None or built["error"]
    for read in (
        lambda: build_traces(one, builder=builder, explicit_terminal_call_id=terminal).to_json(),
        lambda: call_tree(one).to_json(),
        lambda: list(verify_snapshot(one, Checked())),
    ):
        try:
            read()
        except TokenCaptureError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("created_at", math.nan), ("created_at", "5"), ("created_at", None), ("created_at", HUGE),
        ("delivered", "false"), ("delivered", 0), ("finish_reason", ["stop"]), ("cum_len", True),
        ("cum_len", "3"), ("parent_call_id", ["a"]), ("request_digest", {}), ("first_call", 1),
        ("output_items", None), ("output_items", ["x"]), ("token_item_index", 7),
        ("weight_version", [1]), ("weight_version", True), ("prompt_is_delta", 1),
        ("parent_resolution", "resolved"), ("dialect", 5), ("drift_at", True), ("drift_at", -1),
    ],
)  # fmt: skip
def test_a_broken_record_is_set_aside_by_name(field: str, value: Any) -> None:
    """It is counted as a link failure, trains nothing, and who names it starts a fragment."""
    entries = rollout()
    entries[1] = entries[1].model_copy(update={field: value})
    traces = build_traces(snapshot(entries))
    assert traces.metrics["parent_link_failures"][INVALID_RECORD] == 1
    assert "b" not in {s.model_call_id for row in traces.rows for s in row.call_spans}
    assert traces.metrics["n_calls"] == 5
    built = build_from_snapshot(snapshot(entries))
    assert built["mask_sample"]
    assert "b" in built["unresolved_parent_calls"]
    found = [v for v in verify_snapshot(snapshot(entries), Checked()) if v.call_id == "b"]
    assert [v.code for v in found] == ["record_invalid"]
    assert field in found[0].message
    node = next(n for n in call_tree(snapshot(entries)).calls if n.model_call_id == "b")
    assert node.standing == INVALID_RECORD


def test_an_unusable_timing_is_unknown_not_wrong() -> None:
    """A clock is no ground to lose a call."""
    entries = rollout()
    expected = [row.to_json() for row in build_traces(snapshot(entries)).rows]
    for value in (None, [], {"total_ms": HUGE}, {"total_ms": math.inf}, {"total_ms": "5"}, "x"):
        changed = [e.model_copy(update={"timings": value}) for e in entries]
        assert [row.to_json() for row in build_traces(snapshot(changed)).rows] == expected


@pytest.mark.parametrize("stranger", [None, {"model_call_id": "a"}, "entry", 5])
async def test_what_is_no_record_fails_by_name(stranger: Any) -> None:
    """The build says what it got; the finalizer masks the one record and goes on."""
    one = snapshot([*rollout(), stranger])
    with pytest.raises(InvalidRecordError, match="no TokenEntry"):
        build_traces(one)
    assert "no TokenEntry" in build_from_snapshot(one)["error"]
    record: dict[str, Any] = {"_ng_rollout_id": "r", "response": {"output": []}}
    built = await finalize_rollout_token_capture(record, Source(one.entries))
    assert built is not None
    assert record["mask_sample"] is True
    assert "no TokenEntry" in record["_ng_token_capture"]["error"]


def test_a_record_without_a_usable_call_id_fails_by_name() -> None:
    """There is no name to set it aside under."""
    for value in (None, 5, ["a"], {}):
        entries = [*rollout()[:1], rollout()[1].model_copy(update={"model_call_id": value})]
        with pytest.raises(InvalidRecordError, match="model_call_id"):
            build_traces(snapshot(entries))
        assert "model_call_id" in build_from_snapshot(snapshot(entries))["error"]


# --- foreign, cyclic, missing, conflicting ---------------------------------------------------


def test_a_foreign_record_masks_the_rollout() -> None:
    """A snapshot that mixes two rollouts is not to be trained on, whichever record is meant."""
    entries = rollout()
    entries[2] = entries[2].model_copy(update={"rollout_id": "other"})
    traces = build_traces(snapshot(entries))
    assert traces.mask_sample
    assert all("foreign_rollout_id" in row.mask_reasons for row in traces.rows)
    built = build_from_snapshot(snapshot(entries))
    assert (built["mask_sample"], built["rebuilt_response"]) == (True, None)
    assert "another rollout" in built["error"]
    assert build_traces(entries).mask_sample
    assert build_traces(snapshot(rollout(), "elsewhere")).mask_sample


def test_cycles_and_missing_parents_start_fragments() -> None:
    """Nothing is crossed that leads back or leads nowhere."""
    a = delta(call("a", [1, 2], [3], "b"), 1)
    b = delta(call("b", [1, 2, 3], [4], "a"), 1)
    own = delta(call("own", [5, 6], [7], "own"), 1)
    full = call("full", [8], [9], "full")
    orphan = call("orphan", [10], [11], "nobody")
    traces = build_traces(snapshot([a, b, own, full, orphan]))
    assert traces.metrics["parent_link_failures"] == {
        "delta_chain_unreconstructable": 3, "parent_call_id_missing": 1,
        "parent_digest_mismatch": 1,
    }  # fmt: skip
    assert [row.model_call_ids for row in traces.rows] == [["full"], ["orphan"]]


def test_conflicting_copies_are_both_set_aside() -> None:
    """Two records of one call with other log-probs prove that one of them is wrong."""
    entries = rollout()
    other = entries[1].model_copy(update={"generation_log_probs": [-9.0]})
    traces = build_traces(snapshot([*entries, other]))
    assert traces.metrics["parent_link_failures"]["duplicate_call_id_conflict"] == 1
    assert "b" not in {s.model_call_id for row in traces.rows for s in row.call_spans}


# --- the way in ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, None, True, "1", [1], -1, 2**64, 1.5, HUGE])
def test_a_bad_token_id_is_refused(value: Any) -> None:
    """In every array of ids, with the reason."""
    good = call("a", [1], [2]).model_dump(mode="json")
    for name in ("prompt_token_ids", "generation_token_ids"):
        with pytest.raises(ValidationError, match="token id"):
            TokenEntry.model_validate({**good, name: [value]})


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, None, True, "1", [1], -9999, HUGE]
)
def test_a_bad_log_prob_is_refused(value: Any) -> None:
    """Nothing is zipped, padded or taken for 0.0."""
    good = call("a", [1], [2]).model_dump(mode="json")
    with pytest.raises(ValidationError, match="log-prob"):
        TokenEntry.model_validate({**good, "generation_log_probs": [value]})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("created_at", "5"), ("created_at", True), ("created_at", math.inf), ("cum_len", "3"),
        ("cum_len", True), ("cum_len", 1.5), ("continuation_context_len", "1"),
        ("fingerprint_version", "3"), ("token_item_index", "0"), ("prompt_is_delta", "true"),
        ("prompt_is_delta", 1), ("prefix_supplied", "yes"), ("prefix_requested", 0),
        ("model_call_id", 5), ("rollout_id", None), ("schema_version", True),
    ],
)  # fmt: skip
def test_texts_and_bools_are_no_numbers(field: str, value: Any) -> None:
    """A record is not repaired on its way in."""
    good = call("a", [1], [2]).model_dump(mode="json")
    with pytest.raises(ValidationError):
        TokenEntry.model_validate({**good, field: value})


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text()
    | st.sampled_from(["\ud800", "message", "assistant", "output_text", "function_call"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "role", "content", "text", "arguments", "id", "output", "\udfff"]),
        inner, max_size=4,
    ),
    max_leaves=10,
)  # fmt: skip


@given(JSON, st.one_of(st.none(), st.text()), st.one_of(st.none(), st.text()))
@settings(max_examples=200)
def test_no_response_breaks_the_attribution(
    response: Any, explicit: str | None, declared: str | None
) -> None:
    """Lone surrogates, NaN, nested nonsense: no call is named, nothing is raised."""
    for given_response in (response, {"id": response, "output": response}):
        found = resolve_terminal(rollout(), given_response, explicit, declared_response_id=declared)
        assert found.reason or found.attributed
