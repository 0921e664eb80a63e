"""Routed experts of mixture-of-experts models: which experts each token went to.

A text envelope ``nrlre1:<dtype>:<T>x<L>x<K>:<base64>`` of a C-contiguous little-endian integer
array (T tokens, L layers, K experts each), or nested lists as older engines send them. Invariant:
a payload decodes completely or not at all. Nothing is padded here. Source: spec 07.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from middleware.errors import InvalidInputError

ROUTED_EXPERTS_ENVELOPE_VERSION: Final = 1
ROUTED_EXPERTS_MAGIC: Final = "nrlre1"
MISSING_ROUTE_SENTINEL: Final = -1
"""Stands for an expert where an engine padded a token that it has no routes for."""

_LEGACY: Final = "legacy-int"
_DTYPES: Final = {"int8": "<i1", "int16": "<i2", "int32": "<i4"}
_SHAPE: Final = re.compile(r"([0-9]{1,18})x([0-9]{1,18})x([0-9]{1,18})")


class RouteValues(Sequence[list[list[int]]]):
    """``[token][layer][slot]`` over one read-only array; equals the nested lists it stands for."""

    __slots__ = ("array",)

    def __init__(self, values: npt.NDArray[Any]) -> None:
        values.setflags(write=False)
        self.array: Final = values  # (T, L, K)

    def __len__(self) -> int:
        return int(self.array.shape[0])

    @overload
    def __getitem__(self, index: SupportsIndex) -> list[list[int]]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[list[int]]]: ...
    def __getitem__(self, index: Any) -> Any:
        return self.array[index].tolist()

    def __iter__(self) -> Iterator[list[list[int]]]:
        return (token.tolist() for token in self.array)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        return np.array(self.array, dtype=dtype) if copy else np.asarray(self.array, dtype=dtype)

    def tolist(self) -> list[list[list[int]]]:
        """Nested lists of Python integers."""
        nested: list[list[list[int]]] = self.array.tolist()
        return nested

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RouteValues):
            return bool(np.array_equal(self.array, other.array))
        if isinstance(other, list | tuple):
            return self.tolist() == [list(map(list, token)) for token in other]
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RouteValues(shape={self.array.shape}, dtype={self.array.dtype})"


@dataclass(frozen=True, slots=True)
class RoutedExpertsFragment:
    """A decoded payload. ``dtype`` is the envelope's, or ``legacy-int`` for nested lists."""

    values: RouteValues
    dtype: str
    num_layers: int
    topk: int


class RouteSpanMode(StrEnum):
    """Which of a staged call's tokens its routes belong to."""

    FULL = "full"  # carried and generated tokens
    GENERATION = "generation"  # generated tokens only
    MISSING = "missing"  # none


def classify_route_span(
    *, carry_len: int, generation_len: int, staged_route_len: int
) -> RouteSpanMode:
    """What ``staged_route_len`` rows of routes cover, by their number.

    Raises:
        InvalidInputError: (a ``ValueError``) the number fits neither the whole delta nor its
            generation; which tokens they belong to would be a guess.
    """
    lengths = (carry_len, generation_len, staged_route_len)
    if any(type(length) is not int or length < 0 for length in lengths):
        raise InvalidInputError("lengths are integers >= 0")
    if staged_route_len == 0:
        return RouteSpanMode.MISSING
    if staged_route_len == carry_len + generation_len:
        return RouteSpanMode.FULL
    if staged_route_len == generation_len:
        return RouteSpanMode.GENERATION
    raise InvalidInputError(
        f"{staged_route_len} rows of routes for {carry_len} carried and {generation_len} "
        "generated tokens: stage one for each, or for the generated ones"
    )


def encode_routed_experts(
    values: Sequence[Sequence[Sequence[int]]], *, dtype: str = "int16"
) -> str:
    """The envelope of ``[token][layer][slot]`` (lists, or an integer array of shape (T, L, K)).

    Raises:
        InvalidInputError: (a ``ValueError``) unknown dtype, no constant L and K, an empty
            dimension, or a value that does not fit the dtype.
    """
    if dtype not in _DTYPES:
        raise InvalidInputError(f"dtype {dtype!r} is none of {', '.join(_DTYPES)}")
    array = _checked_array(values)
    target = np.dtype(_DTYPES[dtype])
    limits = np.iinfo(target)
    if array.min() < limits.min or array.max() > limits.max:
        raise InvalidInputError(f"an expert index does not fit {dtype}")
    shape = "x".join(map(str, array.shape))
    data = base64.b64encode(array.astype(target).tobytes()).decode("ascii")
    return f"{ROUTED_EXPERTS_MAGIC}:{dtype}:{shape}:{data}"


def decode_routed_experts(payload: Any) -> RoutedExpertsFragment:
    """The routes of an envelope or of nested lists.

    Raises:
        InvalidInputError: (a ``ValueError``) anything that is not exactly one of the two.
    """
    if isinstance(payload, str):
        return _decoded_envelope(payload)
    if isinstance(payload, list | tuple):
        array = _checked_array(payload)
        return RoutedExpertsFragment(RouteValues(array), _LEGACY, array.shape[1], array.shape[2])
    raise InvalidInputError(f"routes are an envelope or nested lists, not {_kind(payload)}")


def routed_experts_token_count(payload: Any) -> int:
    """How many tokens a payload has routes for; it must decode.

    Raises:
        InvalidInputError: (a ``ValueError``) see ``decode_routed_experts``.
    """
    return len(decode_routed_experts(payload).values)


def _decoded_envelope(text: str) -> RoutedExpertsFragment:
    parts = text.split(":")
    if len(parts) != 4 or parts[0] != ROUTED_EXPERTS_MAGIC:
        raise InvalidInputError(f"routes are no {ROUTED_EXPERTS_MAGIC} envelope")
    _, dtype, shape_text, data_text = parts
    if dtype not in _DTYPES:
        raise InvalidInputError(f"routes have an unknown dtype; known: {', '.join(_DTYPES)}")
    match = _SHAPE.fullmatch(shape_text)
    shape = tuple(map(int, match.groups())) if match else ()
    if not shape or 0 in shape:
        raise InvalidInputError("the shape of routes is three positive numbers, as in 3x48x8")
    try:
        data = binascii.a2b_base64(data_text.encode("ascii"), strict_mode=True)
    except ValueError as error:
        raise InvalidInputError(f"routes are no base64: {error}") from error
    target = np.dtype(_DTYPES[dtype])
    if len(data) != shape[0] * shape[1] * shape[2] * target.itemsize:
        raise InvalidInputError(f"{len(data)} bytes of routes do not fill {shape_text} {dtype}")
    array = np.frombuffer(data, dtype=target).reshape(shape)  # (T, L, K)
    return RoutedExpertsFragment(RouteValues(array), dtype, shape[1], shape[2])


def _checked_array(values: Any) -> npt.NDArray[np.int64]:
    """(T, L, K) of int64; every L and K equal, nothing empty, integers only."""
    if isinstance(values, RouteValues):
        values = values.array
    if isinstance(values, np.ndarray):
        if values.ndim != 3 or values.dtype.kind not in "iu" or values.size == 0:
            raise InvalidInputError("routes are a three-dimensional array of integers, not empty")
        if values.dtype.kind == "u" and values.max() > np.iinfo(np.int64).max:
            raise InvalidInputError("an expert index is beyond 63 bit")
        return values.astype(np.int64)
    flat, lengths = values, []
    for _ in range(2):
        flat, length = _flattened(flat)
        lengths.append(length)
    if not isinstance(flat, list) or set(map(type, flat)) - {int}:
        raise InvalidInputError("an expert index is no integer")
    try:
        return np.array(flat, dtype=np.int64).reshape(len(values), *lengths)
    except OverflowError as error:
        raise InvalidInputError("an expert index is beyond 64 bit") from error


def _flattened(rows: Any) -> tuple[list[Any], int]:
    """The elements of lists of one length, joined, and that length."""
    if not rows or any(not isinstance(row, list | tuple) for row in rows):
        raise InvalidInputError("routes are lists of lists of lists, none of them empty")
    length = len(rows[0])
    if not length or any(len(row) != length for row in rows):
        raise InvalidInputError("every token needs the same number of layers and of experts")
    return [element for row in rows for element in row], length


def _kind(value: Any) -> str:
    return type(value).__name__
