"""Verification: every committed field is held to its commitment, whatever is tampered with."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_server.staging.conformance import load_golden_vectors
from capture_server.staging.rebuild import (
    RebuildError,
    ReceiptVerificationError,
    linearize,
    verify_and_linearize,
)
from capture_server.staging.records import CallRecord, RolloutReceipt, StagedCallBaseSnapshot
from tests.unit.capture_server.staging.staged_calls import Chain, three_calls

CODES = {
    "unsupported_schema", "unsupported_digest", "unsupported_extras_digest", "rollout_failed",
    "capture_poisoned", "empty_manifest", "duplicate_manifest_row", "duplicate_staging_key",
    "row_count_mismatch", "duplicate_snapshot", "snapshot_identity_mismatch",
    "snapshot_order_mismatch", "wrong_rollout", "invalid_snapshot", "corrupt_digest",
    "missing_parent", "parent_length_mismatch", "lineage_cycle", "missing_terminal",
    "invalid_mask_order", "empty_generation", "chain_hash_mismatch", "empty_training_row",
    "cumulative_hash_mismatch",
}  # fmt: skip
# Covered by no hash and no rule: a receipt's outcome, and what serves attribution only.
FREE_ROW = {"response_id", "admitted_at", "output_fingerprint", "continuation_fingerprint",
            "fingerprint_version", "staging_key"}  # fmt: skip
FREE_RECEIPT = {"reward", "terminal_selection", "terminal_attribution_reason"}
ROW_FIELDS = sorted(set(CallRecord.model_fields) - FREE_ROW)
RECEIPT_FIELDS = sorted(set(RolloutReceipt.model_fields) - FREE_RECEIPT)
DEFAULTED = {"schema_version", "digest_version", "extras_digest_version", "manifest",
             "capture_poisoned", "failure_reason", "mode", "extras_digest"}  # fmt: skip
SNAPSHOT_FIELDS = sorted(StagedCallBaseSnapshot.model_fields)


def unchecked(model: Any, values: dict[str, Any]) -> Any:
    return model.model_construct(**values)


def forms(chain: Chain) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Receipt, rows and snapshots as plain values."""
    receipt = dict(chain.receipt("c"))
    rows = [dict(row) for row in receipt.pop("manifest")]
    names = StagedCallBaseSnapshot.model_fields
    snapshots = [{name: getattr(s, name) for name in names} for s in chain.snapshots()]
    return copy.deepcopy((receipt, rows, snapshots))


def judged(receipt: dict[str, Any], rows: list[Any], snapshots: list[Any]) -> Any:
    """Everything built without validation, so that the verifier has to notice."""
    manifest = [unchecked(CallRecord, row) for row in rows]
    return verify_and_linearize(
        unchecked(RolloutReceipt, {**receipt, "manifest": manifest}),
        [unchecked(StagedCallBaseSnapshot, snapshot) for snapshot in snapshots],
    )


def tampered(value: Any, draw: Any) -> Any:
    """Another value: of the same kind, or of a neighbouring type."""
    if isinstance(value, bool):
        return draw(st.sampled_from([not value, int(value), None]))
    if isinstance(value, int):
        other = draw(st.integers(0, 2**64).filter(lambda n: n != value))
        return draw(st.sampled_from([other, float(value), str(value), None, value + 1]))
    if isinstance(value, float):
        return draw(st.sampled_from([value + 0.5, -value - 1.0, int(value), None, "0.0"]))
    if isinstance(value, str):
        other = value[:-1] + ("1" if value[-1] == "0" else "0")
        return draw(st.sampled_from([other, value + "x", "", value.encode(), 7, None]))
    if isinstance(value, list):
        changed = list(value)
        how = draw(st.sampled_from(["drop", "double", "element", "tuple"]))
        at = draw(st.integers(0, len(changed) - 1))
        if how == "drop":
            del changed[at]
        elif how == "double":
            changed.insert(at, changed[at])
        elif how == "element":
            changed[at] = tampered(changed[at], draw)
        return tuple(changed) if how == "tuple" else changed
    return draw(st.sampled_from(["x", 0, 1.0]))


def test_the_untouched_rollout_passes() -> None:
    """The property below starts from something sound."""
    row = judged(*forms(three_calls()))
    assert row.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row.token_mask == [0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert row.logprobs == [0.0, 0.0, -0.5, 0.0, -0.5, -1.5, 0.0, 0.0, -0.5]
    assert row.call_ids == row.model_call_ids == ["a", "b", "c"]
    assert row.link_spans == [("a", 2, 1), ("b", 1, 2), ("c", 2, 1)]
    assert (row.prompt_len, row.weight_versions) == (2, [1, 2, 2])
    assert [(s.start, s.end) for s in row.weight_version_spans] == [(0, 3), (3, 6), (6, 9)]


def test_half_built_objects_are_refused_with_a_code() -> None:
    """Whatever one field of one object lacks, and whatever stands in for an object."""
    for kind in range(3):
        for name in [RECEIPT_FIELDS, ROW_FIELDS, SNAPSHOT_FIELDS][kind]:
            receipt, rows, snapshots = forms(three_calls())
            form = [receipt, rows[1], snapshots[1]][kind]
            if form.pop(name, None) is None or name in DEFAULTED:
                continue
            with pytest.raises(ReceiptVerificationError) as caught:
                judged(receipt, rows, snapshots)
            assert caught.value.code in CODES or caught.value.code.startswith("wrong_")
    sound, staged = three_calls().receipt("c"), three_calls().snapshots()
    calls: list[tuple[Any, Any]] = [
        (None, staged), ({}, staged), (sound, None), (sound, [None] * 3), (sound, [{}] * 3),
        (sound.model_copy(update={"manifest": None}), staged),
        (sound.model_copy(update={"manifest": 3}), staged),
        (sound.model_copy(update={"manifest": [None]}), staged),
    ]  # fmt: skip
    for receipt_given, snapshots_given in calls:
        with pytest.raises(ReceiptVerificationError) as caught:
            verify_and_linearize(receipt_given, snapshots_given)
        assert caught.value.code in CODES
    with pytest.raises(ReceiptVerificationError, match="invalid_snapshot"):
        linearize("r", [None], sound.manifest[:1])  # type: ignore[list-item]


@given(st.data())
def test_tampering_with_any_committed_field_is_caught(data: st.DataObject) -> None:
    """One field of one record or of the receipt is changed: a stable code, never a row."""
    receipt, rows, snapshots = forms(three_calls())
    holder, fields = data.draw(
        st.sampled_from(
            [(receipt, [f for f in RECEIPT_FIELDS if f != "manifest"])]
            + [(row, ROW_FIELDS) for row in rows]
            + [(snapshot, SNAPSHOT_FIELDS) for snapshot in snapshots]
        )
    )
    field = data.draw(st.sampled_from(fields))
    before = holder[field]
    holder[field] = tampered(before, data.draw)
    if holder is receipt and field == "terminal_model_call_id" and holder[field] in ("a", "b"):
        return  # another sound terminal: who was scored is not committed to
    if type(holder[field]) is type(before) and holder[field] == before:
        return
    with pytest.raises(ReceiptVerificationError) as caught:
        judged(receipt, rows, snapshots)
    code = caught.value.code
    assert code in CODES or code.removeprefix("wrong_") in CallRecord.model_fields


@given(st.data())
def test_tampering_with_rows_and_snapshots_alike_is_caught(data: st.DataObject) -> None:
    """The same lie in the row and in the snapshot does not hold either."""
    receipt, rows, snapshots = forms(three_calls())
    at = data.draw(st.integers(0, 2))
    shared = sorted(set(rows[0]) & set(snapshots[0]) - {"model_call_id"})
    field = data.draw(st.sampled_from(shared))
    before = rows[at][field]
    rows[at][field] = snapshots[at][field] = tampered(before, data.draw)
    if type(rows[at][field]) is type(before) and rows[at][field] == before:
        return
    with pytest.raises(ReceiptVerificationError):
        judged(receipt, rows, snapshots)


@given(st.permutations([0, 1, 2]), st.permutations([0, 1, 2]))
def test_order_is_judged_but_not_relied_on(rows_at: list[int], snapshots_at: list[int]) -> None:
    """Snapshots follow the manifest's order; the manifest's own order means nothing."""
    receipt, rows, snapshots = forms(three_calls())
    rows = [rows[i] for i in rows_at]
    snapshots = [snapshots[i] for i in snapshots_at]
    if rows_at == snapshots_at:
        assert judged(receipt, rows, snapshots).model_call_ids == ["a", "b", "c"]
        return
    with pytest.raises(ReceiptVerificationError, match="snapshot_order_mismatch"):
        judged(receipt, rows, snapshots)


def test_a_link_to_another_sequence_of_equal_length_is_caught() -> None:
    """Lengths fit, hashes do not: the child was generated behind other tokens."""
    chain, other = Chain(), Chain()
    chain.add("a", [1, 2], [3])
    other.add("a", [1, 9], [3])
    other.add("b", [4], [5], parent="a")
    chain.coords["b"] = other.coords["b"]
    snapshots = [*chain.staging.fetch(["r/a"]), *other.staging.fetch(["r/b"])]
    with pytest.raises(RebuildError) as caught:
        verify_and_linearize(chain.receipt("b"), snapshots)
    assert caught.value.code == "chain_hash_mismatch"


def test_linearize_selects_a_terminal_by_the_links() -> None:
    """Without a receipt and a hint."""
    chain = three_calls()
    manifest = [chain.row(call_id) for call_id in chain.coords]
    assert linearize("r", chain.snapshots(), manifest).model_call_ids == ["a", "b", "c"]
    hinted = linearize("r", chain.snapshots(), manifest, terminal_hint="b")
    assert hinted.model_call_ids == ["a", "b"]
    chain.add("b2", [4], [7], parent="a")
    chain.add("d", [1], [2], parent="b2")
    manifest = [chain.row(call_id) for call_id in chain.coords]
    with pytest.raises(RebuildError, match="missing_terminal"):
        linearize("r", chain.snapshots(), manifest)


def test_errors_travel_between_processes() -> None:
    """A finalizer pool pickles them."""
    error = pickle.loads(pickle.dumps(RebuildError("missing_parent", "x")))
    assert (error.code, error.detail) == ("missing_parent", "x")
    assert isinstance(error, ReceiptVerificationError)


def test_the_vectors_use_stable_codes_only() -> None:
    """The list of the specification is complete as far as the vectors go."""
    for case in load_golden_vectors().values():
        if case["input"]["op"] == "verify_and_linearize":
            code = case["expected"].get("error", "validation")
            assert code == "validation" or code in CODES or code.startswith("wrong_")


def test_a_long_chain_costs_what_its_tokens_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cumulative sequence is hashed once per row, not once per call."""
    chain = Chain()
    chain.add("c0", [1], [2])
    for number in range(1, 200):
        chain.add(f"c{number}", [3], [4], parent=f"c{number - 1}")
    hashed: list[int] = []
    from capture_server.staging import rebuild

    original = rebuild.hash_token_ids
    monkeypatch.setattr(
        rebuild, "hash_token_ids", lambda ids: hashed.append(len(ids)) or original(ids)
    )
    row = verify_and_linearize(chain.receipt("c199"), chain.snapshots())
    assert hashed == [len(row.token_ids)] == [400]
