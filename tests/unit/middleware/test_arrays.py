"""TokenIds and LogProbs behave like lists of numbers and hold only valid ones."""

from __future__ import annotations

import array
import copy
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware.arrays import LogProbs, TokenIds
from middleware.errors import InvalidRecordError

ids = st.one_of(
    st.integers(0, 2**31 - 1), st.integers(2**31, 2**63 - 1), st.integers(2**63, 2**64 - 1)
)
id_lists = st.lists(ids, max_size=30)
log_probs = st.lists(st.floats(-9998, 1e6, allow_nan=False), max_size=30)


@settings(deadline=None, max_examples=60)
@given(id_lists)
def test_reads_like_its_list(values: list[int]) -> None:
    """Length, order, iteration, indexing, slicing and equality are the list's."""
    made = TokenIds(values)
    assert len(made) == len(values)
    assert list(made) == made.tolist() == values
    assert all(type(token) is int for token in made)
    assert made == values == made
    assert made == tuple(values)
    assert [made[i] for i in range(len(values))] == values
    assert made[-3:] == values[-3:]
    assert made[1::2] == values[1::2]
    assert (values == made) is True


@settings(deadline=None, max_examples=60)
@given(id_lists, id_lists)
def test_concatenates_like_lists(left: list[int], right: list[int]) -> None:
    """``+`` on either side and ``concat`` are exact for every width of ids."""
    assert TokenIds(left) + TokenIds(right) == left + right
    assert TokenIds(left) + right == left + right
    assert left + TokenIds(right) == left + right
    assert TokenIds.concat(left, right, left) == left + right + left


@settings(deadline=None, max_examples=60)
@given(id_lists, id_lists)
def test_compares_like_lists(left: list[int], right: list[int]) -> None:
    """Equality, prefix test and common prefix agree with a slow reference."""
    assert (TokenIds(left) == TokenIds(right)) == (left == right)
    assert TokenIds(left).startswith(right) == (left[: len(right)] == right)
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    assert TokenIds(left).common_prefix_len(right) == common
    assert TokenIds(left + right).startswith(TokenIds(left))


@settings(deadline=None, max_examples=60)
@given(id_lists)
def test_survives_every_way_of_copying(values: list[int]) -> None:
    """Pickle, copy and the packed form give the same ids back."""
    made = TokenIds(values)
    assert pickle.loads(pickle.dumps(made)) == made
    assert copy.deepcopy(made) == made
    assert TokenIds.unpack(made.pack()) == made


@settings(deadline=None, max_examples=60)
@given(log_probs)
def test_log_probs_keep_every_bit(values: list[float]) -> None:
    """A log-prob comes back as exactly the float that went in, packed or not."""
    made = LogProbs(values)
    assert [math.copysign(1, v) for v in made] == [math.copysign(1, v) for v in values]
    assert made == values
    assert LogProbs.unpack(made.pack()) == values


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 2**31 - 1], np.int32),
        ([2**31], np.int64),
        ([2**63 - 1], np.int64),
        ([2**63], np.uint64),
    ],
)
def test_takes_the_narrowest_type(values: list[int], kind: type) -> None:
    """int32 as long as everything fits, then int64, then uint64."""
    assert TokenIds(values).array.dtype == kind


@pytest.mark.parametrize(
    "bad",
    [
        [-1], [1, 2, -5], [2**64], [2**64, -1], [True], [1, False], [1.0], [1.5], ["1"], [None],
        [[1]], [b"1"], None, "12", b"12", 5, np.array([1.5]), np.array([True]), np.array([[1]]),
        np.array([-1]), array.array("d", [1.0]), [10**5000],
        [np.array([1, 2])], [np.bool_(True)], [np.float64(1.0)], [float("nan")],
    ],
)  # fmt: skip
def test_refuses_what_is_no_token_id(bad: object) -> None:
    """Negatives, ids beyond 64 bits and every non-integer are a ValueError, never coerced."""
    with pytest.raises(InvalidRecordError):
        TokenIds.of(bad)
    if isinstance(bad, list):
        with pytest.raises(InvalidRecordError):
            TokenIds.of([7] * 1000 + bad)


@pytest.mark.parametrize(
    "bad",
    [
        [float("nan")], [float("inf")], [float("-inf")], [-9999.0], [-1e9], [None], ["-1"], [True],
        [0.5, None], None, "x", 3, [10**400], np.array([[0.5]]), np.array(["a"]), [-9999],
    ],
)  # fmt: skip
def test_refuses_what_cannot_be_trained_on(bad: object) -> None:
    """Non-finite numbers, engines' sentinels and non-numbers are refused, never replaced."""
    with pytest.raises(InvalidRecordError):
        LogProbs.of(bad)


def test_zero_is_a_value() -> None:
    """Token id 0 and log-prob 0.0 are as good as any; integer log-probs become floats."""
    assert TokenIds([0]) == [0]
    assert LogProbs([0.0, 0, -0.0]) == [0.0, 0.0, -0.0]
    assert all(type(value) is float for value in LogProbs([0, -1]))


def test_accepts_arrays_of_every_kind() -> None:
    """numpy of any integer width and byte order, ``array``, tuples and ranges."""
    for source in (
        np.array([1, 2], ">u8"), np.array([1, 2], np.uint8), array.array("q", [1, 2]), (1, 2),
        range(1, 3), [np.int64(1), np.uint16(2)], np.array([], float),
    ):  # fmt: skip
        made = TokenIds.of(source)
        assert made in ([1, 2], [])
        assert made.array.dtype == np.int32


@pytest.mark.parametrize("kind", [TokenIds, LogProbs])
@pytest.mark.parametrize(
    "bad",
    [
        {1, 2}, frozenset({1}), {1: 2}, {}, set(), {1: 2}.keys(), {1: 2}.values(), iter([1]),
        (i for i in (1, 2)), map(int, "12"), memoryview(b"12"), bytearray(b"12"),
    ],
)  # fmt: skip
def test_refuses_what_has_no_lasting_order(
    kind: type[TokenIds] | type[LogProbs], bad: object
) -> None:
    """Sets and dicts are no sequences, nor is what can be read only once."""
    with pytest.raises(ValueError):
        kind.of(bad)


def test_is_immutable() -> None:
    """Neither the array it shows nor the one it was made of can change it."""
    source = np.array([1, 2, 3], np.int32)
    made = TokenIds(source)
    source[0] = 9
    assert made == [1, 2, 3]
    with pytest.raises(ValueError):
        made.array[0] = 9
    with pytest.raises(TypeError):
        hash(made)


def test_shares_instead_of_copying() -> None:
    """``of`` returns the same object, and a slice is a view."""
    made = TokenIds(range(1000))
    assert TokenIds.of(made) is made
    assert np.shares_memory(made[10:20].array, made.array)


@pytest.mark.parametrize(
    "form",
    [
        {"dtype": "<i4", "b64": "AAA="}, {"dtype": "<i2", "b64": ""}, {"dtype": "<f4", "b64": ""},
        {"dtype": ">i4", "b64": ""}, {"dtype": "<i4", "b64": "####"}, {"dtype": "<i4", "b64": "é"},
        {"dtype": "<i4", "b64": "/////w=="}, {"dtype": "<i4", "b64": None}, {"dtype": "<i4"},
        [], None, {"dtype": ["<i4"], "b64": ""}, {"dtype": "<i4", "b64": "AQAAAA"},
        {"dtype": "<i4", "b64": "_-8_AA=="}, {"dtype": "<i4", "b64": "AQAA\nAA=="},
        {"dtype": "<i4", "b64": "AQAAAB=="}, {"dtype": "<i4", "b64": "AQAAAA==AQAAAA=="},
    ],
)  # fmt: skip
def test_refuses_a_broken_packed_form(form: object) -> None:
    """Unknown types, broken base64, partial elements and negative ids are refused."""
    with pytest.raises(InvalidRecordError):
        TokenIds.unpack(form)


def test_log_probs_pack_short_only_when_exact() -> None:
    """float32 where every value survives it, else float64 for all."""
    assert LogProbs([-0.5, 0.0]).pack()["dtype"] == "<f4"
    assert LogProbs([-0.5, -0.1]).pack()["dtype"] == "<f8"
    assert LogProbs([1e300]).pack()["dtype"] == "<f8"


def test_repr_is_short() -> None:
    """A hundred thousand ids do not flood a log line."""
    assert len(repr(TokenIds(range(100_000)))) < 80
