"""The hashes against the vectors, and against a slow reading of the rule."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_server.staging.conformance import (
    assert_golden_vectors,
    evaluate_vector,
    load_golden_vectors,
    main,
)
from capture_server.staging.digest import (
    EMPTY_EXTRAS_DIGEST,
    build_staging_delta,
    compute_chain_hash,
    compute_extras_digest,
    compute_staging_digest,
    encode_token_ids,
    hash_token_ids,
)

GOLDEN = json.loads(
    (Path(__file__).parents[3] / "data" / "golden" / "staging.json").read_text(encoding="utf-8")
)
IDS = st.lists(st.integers(0, 2**64 - 1), max_size=20)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), inner)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden_vector(case: dict[str, Any]) -> None:
    """Every published vector comes out as published."""
    assert evaluate_vector(case["input"]) == case["expected"]


def test_the_kit_ships_the_vectors() -> None:
    """What frameworks run is what we are tested with."""
    assert list(load_golden_vectors().values()) == GOLDEN
    assert_golden_vectors()


def test_the_kit_runs_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With a backend it also stages and fetches."""
    assert main(["--backend", "tests.e2e.staging_backend:memory_backend"]) == 0
    assert "golden vectors hold" in capsys.readouterr().out


def q(value: int) -> bytes:
    return struct.pack(">Q", value)


def slow_ids(ids: list[int]) -> bytes:
    return q(len(ids)) + b"".join(map(q, ids))


def slow_value(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"B\1" if value else b"B\0"
    if isinstance(value, int):
        return b"I" + struct.pack(">q", value)
    if isinstance(value, float):
        return b"F" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"S" + q(len(value.encode())) + value.encode()
    if isinstance(value, list):
        return b"L" + q(len(value)) + b"".join(map(slow_value, value))
    items = sorted((key.encode(), inner) for key, inner in value.items())
    return b"D" + q(len(items)) + b"".join(q(len(k)) + k + slow_value(v) for k, v in items)


@given(IDS)
def test_ids_are_encoded_as_the_rule_says(ids: list[int]) -> None:
    """Count and ids, eight bytes each; hashed under their domain."""
    assert encode_token_ids(ids) == slow_ids(ids)
    prefix = hashlib.sha256(b"nemo-gym-staging-prefix-v2" + slow_ids(ids)).hexdigest()
    assert hash_token_ids(ids) == prefix
    chain = hashlib.sha256(b"nemo-gym-staging-chain-v1\0" + slow_ids(ids)).hexdigest()
    assert compute_chain_hash(None, ids) == chain


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), VALUES))
def test_extras_are_hashed_as_the_rule_says(extras: dict[str, Any]) -> None:
    """Every value with its type; keys by their UTF-8."""
    expected = hashlib.sha256(b"nemo-gym-staging-extras-v1\1" + slow_value(extras)).hexdigest()
    assert compute_extras_digest(extras) == expected


@pytest.mark.parametrize(
    "value",
    [(1,), b"x", np.int64(1), np.float64(1.0), math.nan, math.inf, 2**63, -(2**63) - 1, {1: 2},
     {"\ud800": 1}, "\ud800", {1}, object()],
    ids=repr,
)  # fmt: skip
def test_extras_of_other_types_are_refused(value: Any) -> None:
    """Never converted: the hash must mean the same in every language."""
    with pytest.raises(ValueError):
        compute_extras_digest({"a": value})


def test_endless_extras_are_refused() -> None:
    """A value that holds itself ends in an error, not in a crash."""
    extras: dict[str, Any] = {}
    extras["again"] = extras
    with pytest.raises(ValueError):
        compute_extras_digest(extras)


def test_no_extras_have_the_published_digest() -> None:
    """The constant that stands as a default in the wire models."""
    assert compute_extras_digest(None) == EMPTY_EXTRAS_DIGEST


CALL: dict[str, Any] = {
    "schema_version": 2, "digest_version": 2, "extras_digest_version": 1, "rollout_id": "r",
    "model_call_id": "c", "parent_call_id": "p", "mode": "token_in", "prev_len": 2,
    "delta_len": 2, "cum_len": 4, "weight_version": 3, "token_ids_delta": [5, 6],
    "token_mask_delta": [0.0, 1.0], "generation_log_probs_delta": [0.0, -0.1],
    "extras_digest": EMPTY_EXTRAS_DIGEST, "chain_hash": "0" * 64, "cumulative_hash": "1" * 64,
}  # fmt: skip


def test_the_call_digest_follows_the_layout() -> None:
    """Byte for byte as the rule lays it out."""
    t = lambda text: q(len(text)) + text.encode()  # noqa: E731
    b = lambda data: q(len(data)) + data  # noqa: E731
    floats = lambda values: b(q(len(values)) + struct.pack(f">{len(values)}f", *values))  # noqa: E731
    content = (
        b"nemo-gym-staging-call-v2" + bytes([2, 2, 1]) + t("r") + t("c") + b"\1" + t("p")
        + t("token_in") + q(2) + q(2) + q(4) + q(3) + b(slow_ids([5, 6]))
        + floats([0.0, 1.0]) + floats([0.0, -0.1]) + bytes.fromhex(EMPTY_EXTRAS_DIGEST)
        + b"\1" + bytes(32) + b"\1" + bytes.fromhex("1" * 64)
    )  # fmt: skip
    assert compute_staging_digest(**CALL) == hashlib.sha256(content).hexdigest()


def test_arrays_hash_like_lists() -> None:
    """A worker need not make Python objects of its arrays."""
    arrays = {
        "token_ids_delta": np.array([5, 6], np.int32),
        "token_mask_delta": np.array([0.0, 1.0]),
        "generation_log_probs_delta": np.array([0.0, -0.1]),
    }
    assert compute_staging_digest(**{**CALL, **arrays}) == compute_staging_digest(**CALL)


@pytest.mark.parametrize(
    "changes",
    [
        {"prev_len": True},
        {"prev_len": 2.0},
        {"weight_version": -1},
        {"weight_version": 1 << 64},
        {"mode": "other"},
        {"mode": ["token_in"]},
        {"rollout_id": 7},
        {"rollout_id": "\ud800"},
        {"digest_version": True},
        {"token_ids_delta": [True, 6]},
        {"token_ids_delta": None},
        {"token_mask_delta": [0, 1]},
        {"token_mask_delta": [0.0, True]},
        {"token_mask_delta": [0.0, math.nan]},
        {"token_mask_delta": np.array([[0.0, 1.0]])},
        {"token_mask_delta": np.array([0, 1])},
        {"generation_log_probs_delta": [1e-60, -0.1]},
        {"generation_log_probs_delta": [0.0, -math.inf]},
        {"generation_log_probs_delta": "ab"},
        {"chain_hash": "A" * 64},
        {"chain_hash": "0" * 63 + "\n"},
        {"cumulative_hash": None},
    ],
    ids=str,
)
def test_inconsistent_calls_are_refused(changes: dict[str, Any]) -> None:
    """Types and contradictions, beyond the published vectors."""
    with pytest.raises(ValueError):
        compute_staging_digest(**{**CALL, **changes})


def test_a_delta_is_what_comes_behind_the_parent() -> None:
    """Carried prompt with mask 0.0 and log-prob 0.0, then the generation."""
    found = build_staging_delta(
        prompt_token_ids=[1, 2, 3],
        generated_token_ids=[4, 5],
        generated_log_probs=[-0.5, -0.25],
        prev_len=2,
    )
    assert found == ([3, 4, 5], [0.0, 1.0, 1.0], [0.0, -0.5, -0.25])


@pytest.mark.parametrize(
    "changes",
    [
        {"prev_len": 4},
        {"prev_len": -1},
        {"prev_len": True},
        {"generated_log_probs": [-0.5]},
        {"generated_log_probs": [-0.5, math.nan]},
        {"generated_log_probs": [-0.5, -1]},
        {"generated_token_ids": [4, -5]},
    ],
    ids=str,
)
def test_a_delta_of_nonsense_is_refused(changes: dict[str, Any]) -> None:
    """Nothing is padded, cut or converted."""
    given_: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3], "generated_token_ids": [4, 5],
        "generated_log_probs": [-0.5, -0.25], "prev_len": 2,
    }  # fmt: skip
    with pytest.raises(ValueError):
        build_staging_delta(**{**given_, **changes})
