"""Wire models: strict types, consistency, nothing undeclared."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from capture_server.staging.records import (
    CallRecord,
    CaptureAdmission,
    CaptureLedgerCommit,
    CommitCoords,
    ManifestFailure,
    RolloutManifest,
    RolloutReceipt,
    StagedCallBaseSnapshot,
    StagedCallRecord,
    StagedCallSnapshot,
    StageResult,
    staging_key,
)
from tests.unit.capture_server.staging.staged_calls import Chain, three_calls

HASH = "0" * 64
CHAIN = three_calls()


def full(model: Any) -> dict[str, Any]:
    return model.model_dump()


ADMISSION = full(CHAIN.admission("d", "c"))
MODELS: list[tuple[Any, dict[str, Any]]] = [
    (CallRecord, full(CHAIN.row("b", admitted_at=1.5, output_fingerprint=HASH))),
    (CaptureAdmission, ADMISSION),
    (
        CaptureLedgerCommit,
        {"rollout_id": "r", "record": full(CHAIN.row("b")), "request_items": [],
         "response_items": [{"role": "assistant"}], "staging_chain": ["r/a"]},
    ),
    (CommitCoords, full(CHAIN.coords["b"])),
    (ManifestFailure, {"model_call_id": "c", "reason": "unresolved_parent"}),
    (RolloutManifest, {"rollout_id": "r", "records": [full(CHAIN.row("a"))]}),
    (RolloutReceipt, full(CHAIN.receipt("c", reward=0.5))),
    (StageResult, {"ok": True, "staging_key": "k"}),
    (StagedCallBaseSnapshot, full(CHAIN.staging.records["r/b"]) | {"extras": ...}),
    (StagedCallSnapshot, full(CHAIN.staging.records["r/a"])),
    (StagedCallRecord, full(CHAIN.staging.records["r/a"])),
]  # fmt: skip
MODELS = [(m, {k: v for k, v in values.items() if v is not ...}) for m, values in MODELS]


def wrong_values(value: Any) -> list[Any]:
    """Neighbours of a value that are of another type, or malformed."""
    if isinstance(value, bool):
        return [1, "true", None]
    if isinstance(value, int):
        return [float(value), str(value), bool(value), -1, None]
    if isinstance(value, float):
        return [int(value), str(value), math.nan, math.inf, True]
    if isinstance(value, str):
        return [b"x", 7, "" if len(value) != 64 else value.upper() + "g"]
    if isinstance(value, list | tuple):
        return [None, "x", {"a": 1}, [object()], list(value) + [True]]
    return []


CASES = [
    pytest.param(model, values, name, wrong, id=f"{model.__name__}-{name}-{wrong!r:.20}")
    for model, values in MODELS
    for name, value in values.items()
    for wrong in wrong_values(value)
]


@pytest.mark.parametrize(("model", "values", "name", "wrong"), CASES)
def test_types_are_strict(model: Any, values: dict[str, Any], name: str, wrong: Any) -> None:
    """`1.0` is no integer, `1` no float, `true` neither; no NaN, no empty identifier."""
    with pytest.raises(ValidationError):
        model.model_validate({**values, name: wrong})


@pytest.mark.parametrize(("model", "values"), MODELS, ids=lambda m: getattr(m, "__name__", ""))
def test_sound_values_pass_and_nothing_else(model: Any, values: dict[str, Any]) -> None:
    """Accepted, immutable, round-tripping through JSON; undeclared keys are refused."""
    made = model.model_validate(values)
    assert model.model_validate(made.model_dump()) == made
    assert model.model_validate_json(made.model_dump_json()) == made
    with pytest.raises(ValidationError):
        made.schema_version = 2
    with pytest.raises(ValidationError):
        model.model_validate({**values, "surprise": 1})
    with pytest.raises(ValidationError):
        model.model_validate({**values, "schema_version": 3})


@pytest.mark.parametrize(
    "changes",
    [
        {"parent_call_id": None},
        {"mode": "text"},
        {"prev_len": 0},
        {"parent_chain_hash": None},
        {"staging_chain": []},
        {"required_prefix_token_ids": [1] * 9},
        {"staging_chain": [], "required_prefix_token_ids": [1, 2]},
        {"staging_chain": [], "required_prefix_token_ids": [-1] * 9},
        {"staging_chain": [""]},
    ],
    ids=str,
)
def test_an_admission_says_where_its_prefix_is(changes: dict[str, Any]) -> None:
    """A child names its parent's chain or its ids, never neither or both."""
    with pytest.raises(ValidationError):
        CaptureAdmission.model_validate({**ADMISSION, **changes})


def test_an_inline_admission() -> None:
    """The ids themselves, as many as ``prev_len``."""
    inline = {**ADMISSION, "staging_chain": [], "required_prefix_token_ids": [1] * 9}
    assert CaptureAdmission.model_validate(inline).prev_len == 9


@pytest.mark.parametrize(
    "changes",
    [{"prev_len": 1, "cum_len": 4}, {"parent_chain_hash": HASH}, {"staging_chain": ["x"]},
     {"required_prefix_token_ids": [1]}, {"mode": "token_in"}],
    ids=str,
)  # fmt: skip
def test_a_root_has_no_prefix(changes: dict[str, Any]) -> None:
    """Nothing may stand before it."""
    root = {"rollout_id": "r", "model_call_id": "a", "mode": "text"}
    CaptureAdmission.model_validate(root)
    with pytest.raises(ValidationError):
        CaptureAdmission.model_validate({**root, **changes})


@pytest.mark.parametrize("field", ["digest", "extras_digest", "staging_key", "chain_hash"])
def test_staged_coordinates_are_complete(field: str) -> None:
    """Only a failed capture may lack a hash."""
    values = full(CHAIN.coords["b"])
    with pytest.raises(ValidationError):
        CommitCoords.model_validate({**values, field: None})
    failed = {**values, field: None, "disposition": "capture_failed"}
    assert CommitCoords.model_validate(failed).disposition == "capture_failed"


@pytest.mark.parametrize(
    "changes",
    [{"cum_len": 7}, {"delta_len": 0, "cum_len": 3}, {"parent_call_id": None}, {"prev_len": 0}],
    ids=str,
)
def test_lengths_add_up(changes: dict[str, Any]) -> None:
    """In coordinates and rows alike."""
    for model, values in ((CommitCoords, CHAIN.coords["b"]), (CallRecord, CHAIN.row("b"))):
        with pytest.raises(ValidationError):
            model.model_validate({**full(values), **changes})


def test_extras_are_held_to_their_commitment() -> None:
    """A snapshot with other extras, or without, is not what was staged."""
    values = full(CHAIN.staging.records["r/a"])
    for extras in (None, {}, {"routed_experts": "other"}):
        with pytest.raises(ValidationError):
            StagedCallSnapshot.model_validate({**values, "extras": extras})


@pytest.mark.parametrize(
    "changes",
    [
        {"terminal_model_call_id": "zz"},
        {"terminal_model_call_id": None},
        {"terminal_selection": None},
        {"terminal_selection": "guess"},
        {"failure_reason": "x"},
        {"failure_reason": ""},
        {"manifest": []},
        {"manifest": [full(CHAIN.row("a")), full(CHAIN.row("a"))]},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_an_unpoisoned_receipt_names_a_terminal(changes: dict[str, Any]) -> None:
    """One that is in the manifest, and what named it; else it must be poisoned."""
    with pytest.raises(ValidationError):
        RolloutReceipt.model_validate({**full(CHAIN.receipt("c")), **changes})


def test_a_poisoned_receipt_may_be_empty() -> None:
    """Nothing has to be known of a rollout that failed."""
    receipt = RolloutReceipt(rollout_id="r", capture_poisoned=True, failure_reason="x")
    assert receipt.manifest == []


def test_the_staging_key_of_a_call() -> None:
    """Rollout and call, as published."""
    assert staging_key("roll", "k0") == "roll/k0"
    assert Chain().add("a", [1], [2]).staging_key == "r/a"


def test_errors_hold_no_tokens() -> None:
    """Messages may end in logs; ids and texts may not."""
    values = full(CHAIN.staging.records["r/b"]) | {"token_ids_delta": [987654, 5, 6]}
    del values["extras"]
    with pytest.raises(ValidationError) as caught:
        StagedCallBaseSnapshot.model_validate(values)
    assert "987654" not in str(caught.value)
