"""Routed-experts envelopes: exact round trips, and nothing that is almost one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from capture_server.staging.routes import (
    RouteSpanMode,
    classify_route_span,
    decode_routed_experts,
    encode_routed_experts,
    routed_experts_token_count,
)

SHAPES = hnp.array_shapes(min_dims=3, max_dims=3, max_side=4)


@given(st.sampled_from(["int8", "int16", "int32"]), st.data())
def test_round_trip(dtype: str, data: st.DataObject) -> None:
    """Lists and arrays alike, every value of the type."""
    array = data.draw(hnp.arrays(dtype, SHAPES))
    for values in (array, array.tolist(), array[::-1][::-1]):
        fragment = decode_routed_experts(encode_routed_experts(values, dtype=dtype))
        assert fragment.values == array.tolist()
        assert list(fragment.values) == array.tolist()
        assert np.array_equal(np.asarray(fragment.values), array)
        assert (fragment.dtype, fragment.num_layers, fragment.topk) == (dtype, *array.shape[1:])
    assert decode_routed_experts(array.tolist()).values == array.tolist()


def test_values_are_a_sequence_over_one_array() -> None:
    """Compact, read-only, indexable by token."""
    values = decode_routed_experts([[[1, 2]], [[3, 4]]]).values
    assert (len(values), values[1], values[:1]) == (2, [[3, 4]], [[[1, 2]]])
    assert values != [[[1, 2]]]
    with pytest.raises(ValueError):
        values.array[0, 0, 0] = 9


def test_unsigned_indices_never_wrap() -> None:
    """Beyond 63 bit they are refused, not read as negative; small ones pass."""
    assert decode_routed_experts(
        encode_routed_experts(np.array([[[7]]], dtype=np.uint64), dtype="int8")  # type: ignore[arg-type]
    ).values == [[[7]]]
    for index in (2**63, 2**64 - 1):
        with pytest.raises(ValueError, match="63 bit"):
            encode_routed_experts(np.array([[[index]]], dtype=np.uint64), dtype="int8")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "payload",
    [
        "nrlre1:int8:+1x1x1:AA==",
        "nrlre1:int8:1 x1x1:AA==",
        "nrlre1:int8:\u0661x1x1:AA==",
        "nrlre1:int8:1x1x1:AA",
        "nrlre1:int8:1x1x1:AAAA=",
        "nrlre1:int8:1x1x1: AA==",
        "nrlre1:int8:1x1x1x1:AA==",
        "nrlre1:int8:99999999999999999x99999999999999999x9:AA==",
        " nrlre1:int8:1x1x1:AA==",
        b"nrlre1:int8:1x1x1:AA==",
        [[[2**63]]],
        [[["1"]]],
        [[1]],
        [[[1]], [1]],
        [[[1]], None],
    ],
    ids=repr,
)
def test_what_is_almost_an_envelope_is_refused(payload: Any) -> None:
    """Also where only a count is asked."""
    for reader in (decode_routed_experts, routed_experts_token_count):
        with pytest.raises(ValueError):
            reader(payload)


def test_a_count_is_that_of_a_payload_that_decodes() -> None:
    """The head alone proves nothing."""
    assert routed_experts_token_count("nrlre1:int8:2x1x1:AQI=") == 2
    with pytest.raises(ValueError):
        routed_experts_token_count("nrlre1:int8:2x1x1:AQ==")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([[[128]]], "int8"), ([[[1]]], "int64"), ([], "int8"), ([[[1.0]]], "int8"),
     (np.zeros((1, 1)), "int8"), (np.zeros((1, 1, 1)), "int8"), ([[[1], [2]], [[3]]], "int8")],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_not_encoded(values: Any, dtype: str) -> None:
    """Never cut, never padded."""
    with pytest.raises(ValueError):
        encode_routed_experts(values, dtype=dtype)


def test_route_spans() -> None:
    """All tokens, the generated ones, none; any other number is a guess."""

    def mode(staged: int) -> RouteSpanMode:
        return classify_route_span(carry_len=3, generation_len=2, staged_route_len=staged)

    assert (mode(5), mode(2), mode(0)) == ("full", "generation", "missing")
    for staged in (1, 3, 4, 6, -1):
        with pytest.raises(ValueError):
            mode(staged)
