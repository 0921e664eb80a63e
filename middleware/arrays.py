"""Token ids and log-probs as compact, immutable sequences over numpy arrays.

Invariant: a ``TokenIds`` holds only integers in ``0 <= id < 2**64`` and a ``LogProbs`` only
finite floats above the engines' "no value" sentinel, so whoever has one need not check again.
Both look like sequences of Python numbers and cost 4 (or 8) bytes per element.

It does not know what the tokens mean: digests and records live in ``middleware.records``.
"""

from __future__ import annotations

import array
import binascii
import marshal
import operator
import struct
from collections.abc import Iterator, Sequence
from typing import (
    Any,
    ClassVar,
    Final,
    Generic,
    Self,
    SupportsIndex,
    TypeGuard,
    TypeVar,
    cast,
    overload,
)

import numpy as np
import numpy.typing as npt
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, SchemaValidator, core_schema

from middleware.errors import InvalidRecordError

NO_LOG_PROB_SENTINEL: Final = -9999.0
"""Engines write this (or less) where they have no log-prob; it cannot be trained on."""

_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1
_MAX_ID: Final = 2**64 - 1
_FLOAT_CELL: Final = np.dtype([("tag", "u1"), ("value", "<f8")])
_FLOAT_TAG: Final = ord("g")
# pydantic's decoder is five times as fast as binascii's; see ``_decoded`` for what it lets pass.
_BASE64: Final = SchemaValidator(
    core_schema.bytes_schema(), core_schema.CoreConfig(val_json_bytes="base64")
)
_NATIVE_INT_CODES: Final = frozenset("bBhHiIlLqQ")

T = TypeVar("T", int, float)


class _CompactSequence(Sequence[T], Generic[T]):
    """What both kinds share: a read-only 1-D array behind the ``Sequence`` protocol."""

    __slots__ = ("_array",)
    _array: npt.NDArray[Any]
    _what: ClassVar[str]
    _wire_types: ClassVar[tuple[str, ...]]

    def __init__(self, values: object = ()) -> None:
        self._array = self._checked(values)

    @classmethod
    def of(cls, values: object) -> Self:
        """Wrap ``values``; a value of this very class is returned as it is, without a copy."""
        return values if isinstance(values, cls) else cls(values)

    @classmethod
    def concat(cls, *parts: object) -> Self:
        """One sequence out of several, in order."""
        arrays = [cls.of(part).array for part in parts]
        kept = [part for part in arrays if part.size]
        if len(kept) <= 1:
            return cls._wrap(kept[0] if kept else cls._empty())
        return cls._wrap(cls._joined(kept))

    @classmethod
    def _wrap(cls, values: npt.NDArray[Any]) -> Self:
        """Trust ``values``; make it read-only."""
        made = cls.__new__(cls)
        values.setflags(write=False)
        made._array = values  # noqa: SLF001 - our own, from an alternative constructor
        return made

    @classmethod
    def _checked(cls, values: object) -> npt.NDArray[Any]:
        raise NotImplementedError

    @classmethod
    def _joined(cls, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.concatenate(arrays)

    @classmethod
    def _empty(cls) -> npt.NDArray[Any]:
        raise NotImplementedError

    @property
    def array(self) -> npt.NDArray[Any]:
        """The read-only 1-D array itself (shared, not a copy)."""
        return self._array

    @property
    def nbytes(self) -> int:
        """Bytes of payload that this sequence refers to."""
        return int(self._array.nbytes)

    def tolist(self) -> list[T]:
        """A new list of Python numbers."""
        return cast("list[T]", self._array.tolist())

    def pack(self) -> dict[str, str]:
        """``{"dtype": ..., "b64": ...}``: little-endian, in the narrowest exact type."""
        packed = self._packable()
        data = packed.astype(packed.dtype.newbyteorder("<"), copy=False).tobytes()
        # numpy says "=i4" or "|i1" for some; spell the wire name ourselves.
        name = f"<{packed.dtype.kind}{packed.dtype.itemsize}"
        return {"dtype": name, "b64": binascii.b2a_base64(data, newline=False).decode("ascii")}

    @classmethod
    def unpack(cls, form: object) -> Self:
        """Read ``pack``'s form back.

        Raises:
            InvalidRecordError: unknown dtype, broken base64, a partial element, a bad value.
        """
        if not isinstance(form, dict) or form.keys() != {"dtype", "b64"}:
            raise InvalidRecordError(f"a packed array has 'dtype' and 'b64', not {_kind(form)}")
        dtype, text = form["dtype"], form["b64"]
        if dtype not in cls._wire_types or not isinstance(text, str):
            raise InvalidRecordError(f"unknown dtype {dtype!r} for packed {cls._what}s")
        try:
            data = _decoded(text)
        except ValueError as error:
            raise InvalidRecordError(f"packed {cls._what}s are no base64: {error}") from error
        if len(data) % int(dtype[2:]):
            raise InvalidRecordError(f"packed {cls._what}s end within an element")
        return cls(np.frombuffer(data, dtype=dtype))

    def _packable(self) -> npt.NDArray[Any]:
        raise NotImplementedError

    def __len__(self) -> int:
        return int(self._array.size)

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: SupportsIndex | slice) -> T | Self:
        if isinstance(index, slice):
            return self._wrap(self._array[index])
        return cast("T", self._array[operator.index(index)].item())

    def __iter__(self) -> Iterator[T]:
        return iter(self.tolist())

    def __contains__(self, value: object) -> bool:
        return value in self.tolist()

    def __add__(self, other: object) -> Self:
        if not _is_plain_sequence(other):
            return NotImplemented
        return self.concat(self, other)

    def __radd__(self, other: object) -> Self:
        if not _is_plain_sequence(other):
            return NotImplemented
        return self.concat(other, self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, type(self)):
            return bool(_same(self._array, other._array))
        if isinstance(other, (list, tuple)):
            # Python's own comparison: exact for every number, and False for foreign elements.
            return len(other) == len(self) and self.tolist() == list(other)
        if isinstance(other, (np.ndarray, array.array)):
            return self.tolist() == other.tolist()
        return NotImplemented

    # Equal to lists, so it must not claim a hash that differs from theirs.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        head = ", ".join(map(repr, self._array[:6].tolist()))
        more = f", ... {len(self)} in all" if len(self) > 6 else ""
        return f"{type(self).__name__}([{head}{more}])"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy: pickling a view must not drag its base along.
        return (type(self), (np.array(self._array),))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.of,
            serialization=core_schema.plain_serializer_function_ser_schema(
                cls.tolist, when_used="json"
            ),
        )


class TokenIds(_CompactSequence[int]):
    """Immutable token ids: int32 if all fit, else int64, else uint64.

    Raises:
        InvalidRecordError: (a ``ValueError``) an element is no integer in ``0 <= id < 2**64``;
            booleans, floats, strings and None are no integers.
    """

    __slots__ = ()
    _what = "token id"
    _wire_types = ("<i4", "<i8", "<u8")

    @classmethod
    def sharing(cls, ids: npt.NDArray[Any]) -> Self:
        """Wrap a 1-D int32, int64 or uint64 array of valid ids without copying or checking it.

        The caller promises that these elements are never written again.
        """
        return cls._wrap(ids.view())

    @classmethod
    def _empty(cls) -> npt.NDArray[Any]:
        return np.empty(0, np.int32)

    @classmethod
    def _checked(cls, values: object) -> npt.NDArray[Any]:
        if isinstance(values, TokenIds):
            return values.array
        if isinstance(values, (list, tuple)):
            return _narrow(_ids_from_numbers(values))
        if isinstance(values, np.ndarray):
            return _narrow(_ids_from_ndarray(values))
        if isinstance(values, array.array):
            if values.typecode not in _NATIVE_INT_CODES:
                raise InvalidRecordError(f"token ids in an array of type {values.typecode!r}")
            return _narrow(_ids_from_ndarray(np.array(values)))
        if not _is_sequence_of_values(values):
            raise InvalidRecordError(f"token ids must be a list of integers, not {_kind(values)}")
        return _narrow(_ids_from_numbers(list(values)))

    @classmethod
    def _joined(cls, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        # int64 + uint64 would become float64 by numpy's own promotion.
        if any(part.dtype == np.uint64 for part in arrays):
            arrays = [part.astype(np.uint64) for part in arrays]
        return np.concatenate(arrays)

    def _packable(self) -> npt.NDArray[Any]:
        return _narrow(self._array)  # a slice may fit a narrower type than its whole

    def startswith(self, prefix: object) -> bool:
        """Whether the first ids are exactly ``prefix`` (the empty prefix: always)."""
        head = TokenIds.of(prefix).array
        return head.size <= self._array.size and bool(_same(self._array[: head.size], head))

    def common_prefix_len(self, other: object) -> int:
        """How many leading ids are equal in both."""
        theirs = TokenIds.of(other).array
        size = min(self._array.size, theirs.size)
        if size == 0:
            return 0
        differs = np.not_equal(*_comparable(self._array[:size], theirs[:size]))
        first = int(differs.argmax())
        return first if differs[first] else size

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "array", "items": {"type": "integer", "minimum": 0}}


class LogProbs(_CompactSequence[float]):
    """Immutable log-probs as float64: finite, above ``NO_LOG_PROB_SENTINEL``.

    Raises:
        InvalidRecordError: (a ``ValueError``) an element is no such number; the message names
            its position.
    """

    __slots__ = ()
    _what = "log-prob"
    _wire_types = ("<f4", "<f8")

    @classmethod
    def _empty(cls) -> npt.NDArray[Any]:
        return np.empty(0, np.float64)

    @classmethod
    def _checked(cls, values: object) -> npt.NDArray[Any]:
        if isinstance(values, LogProbs):
            return values.array
        if isinstance(values, array.array):
            values = np.array(values)
        if isinstance(values, np.ndarray):
            if values.ndim != 1 or values.dtype.kind not in "fiu":
                raise InvalidRecordError(
                    f"log-probs must be a 1-D float array, not {values.ndim}-D {values.dtype}"
                )
            numbers = np.array(values, dtype=np.float64)
        else:
            numbers = _floats_from_numbers(values)
        _refuse_untrainable(numbers)
        numbers.setflags(write=False)
        return numbers

    def _packable(self) -> npt.NDArray[Any]:
        with np.errstate(over="ignore"):  # too large for float32: stays float64
            short = self._array.astype(np.float32)
        return short if np.array_equal(short, self._array) else self._array

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "array", "items": {"type": "number"}}


def _decoded(text: str) -> bytes:
    """Standard base64, padded; nothing else.

    Raises:
        ValueError: the text is anything else.
    """
    if len(text) % 4 or "-" in text or "_" in text:
        raise ValueError("it is not padded, or uses the URL-safe alphabet")
    try:
        # The stub knows only dicts of strings.
        data: bytes = _BASE64.validate_strings(text)  # type: ignore[arg-type]
    except ValidationError as error:
        # Only what is wrong: pydantic's own text quotes the tokens.
        raise ValueError(error.errors(include_url=False)[0]["msg"]) from None
    return data


def _plain_ids(values: Sequence[object]) -> npt.NDArray[np.int32] | None:
    """A list's integers as int32 in one pass; None if any is no integer or does not fit.

    Checking each element's type and collecting its value are two passes over Python objects;
    struct does both in one, except that it takes a bool for 0 or 1: those are looked at.
    """
    try:
        ids = np.frombuffer(struct.pack(f"={len(values)}i", *values), np.int32)
    except (struct.error, TypeError):  # TypeError: an array of several where a number must be
        return None
    may_be_bool = np.flatnonzero((ids == 0) | (ids == 1)).tolist()
    kinds = set(map(type, map(values.__getitem__, may_be_bool)))
    return None if kinds & {bool, np.bool_} else ids


def _plain_floats(values: object) -> npt.NDArray[np.float64] | None:
    """A list of nothing but plain floats; None if any element is of another type.

    As ``_plain_ids``, but struct would take integers and bools for floats. marshal tells them
    apart: a list is 5 bytes, then per element a type tag and the little-endian value. If the
    length is right and every tag stands where it must, no element can be anything else. The
    format of version 2 has been fixed since Python 2.5.
    """
    if type(values) is not list and type(values) is not tuple:
        return None
    try:
        data = marshal.dumps(values, 2)
    except ValueError:
        return None  # an element that marshal does not know
    if len(data) != 5 + _FLOAT_CELL.itemsize * len(values):
        return None
    cells = np.frombuffer(data, _FLOAT_CELL, offset=5)
    if not (cells["tag"] == _FLOAT_TAG).all():
        return None
    return cells["value"].astype(np.float64)


def _ids_from_numbers(values: Sequence[object]) -> npt.NDArray[Any]:
    """A list's numbers; whatever is no plain small int takes the slower, telling way."""
    plain = _plain_ids(values)
    if plain is not None:
        _refuse_negative(plain)
        return plain
    for kind in set(map(type, values)):
        if kind is not int and (
            issubclass(kind, (bool, np.bool_)) or not issubclass(kind, (int, np.integer))
        ):
            at, bad = next((i, v) for i, v in enumerate(values) if type(v) is kind)
            raise InvalidRecordError(
                f"token id at index {at} is {_kind(bad)}; token ids are integers"
            )
    numbers = cast("Sequence[int]", values)
    for code in "iqQ":
        try:
            made = array.array(code, numbers)
        except OverflowError:
            continue
        found: npt.NDArray[Any] = np.frombuffer(made, dtype=code)
        _refuse_negative(found)
        return found
    raise InvalidRecordError(_out_of_range(next(v for v in numbers if not 0 <= v <= _MAX_ID)))


def _ids_from_ndarray(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if values.ndim != 1:
        raise InvalidRecordError(f"token ids must be 1-D, not {values.ndim}-D")
    if values.size and values.dtype.kind not in "iu":
        raise InvalidRecordError(f"token ids must be integers, not {values.dtype}")
    if values.dtype.kind not in "iu":
        return np.empty(0, np.int32)  # numpy makes an empty list a float array
    _refuse_negative(values)
    # Someone else may still hold a writable array: immutable means our own copy then.
    return np.array(values) if _writable(values) else values


def _writable(values: npt.NDArray[Any]) -> bool:
    owner: object = values
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return True
        owner = owner.base
    return owner is not None and not isinstance(owner, bytes)


def _narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The smallest of int32, int64, uint64 that holds all values, in native byte order."""
    top = int(values.max()) if values.size else 0
    kind: type[np.integer[Any]] = (
        np.int32 if top <= _INT32_MAX else np.int64 if top <= _INT64_MAX else np.uint64
    )
    narrow = values.astype(kind, copy=False)
    narrow.setflags(write=False)
    return narrow


def _floats_from_numbers(values: object) -> npt.NDArray[np.float64]:
    if not _is_sequence_of_values(values):
        raise InvalidRecordError(f"log-probs must be a list of floats, not {_kind(values)}")
    plain = _plain_floats(values)
    if plain is not None:
        return plain
    numbers = values if isinstance(values, (list, tuple)) else list(values)
    for kind in set(map(type, numbers)):
        if kind is not float and (
            issubclass(kind, (bool, np.bool_))
            or not issubclass(kind, (float, int, np.floating, np.integer))
        ):
            at, bad = next((i, v) for i, v in enumerate(numbers) if type(v) is kind)
            raise InvalidRecordError(
                f"log-prob at index {at} is {_kind(bad)}; log-probs are finite floats"
            )
    try:
        return np.array(numbers, dtype=np.float64)
    except OverflowError as error:
        raise InvalidRecordError("a log-prob is too large for a float") from error


def _refuse_untrainable(numbers: npt.NDArray[np.float64]) -> None:
    if not numbers.size:
        return
    # One comparison finds NaN, both infinities and the sentinel.
    good = (numbers > NO_LOG_PROB_SENTINEL) & (numbers < np.inf)
    if not good.all():
        at = int(np.argmin(good))
        raise InvalidRecordError(
            f"log-prob at index {at} is {float(numbers[at])!r}; log-probs must be finite and "
            f"above {NO_LOG_PROB_SENTINEL}, nothing else can be trained on"
        )


def _refuse_negative(values: npt.NDArray[Any]) -> None:
    if values.size and values.dtype.kind == "i" and int(values.min()) < 0:
        raise InvalidRecordError(_out_of_range(int(values[values < 0][0])))


def _out_of_range(value: int) -> str:
    shown = str(value) if abs(value) < 2**70 else f"about 2**{abs(value).bit_length()}"
    return f"token id {shown} is out of range: ids are 0 <= id < 2**64"


def _comparable(
    left: npt.NDArray[Any], right: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Both in a type in which comparing is exact (ids are never negative, so uint64 is)."""
    if left.dtype != right.dtype and np.uint64 in (left.dtype, right.dtype):
        return left.astype(np.uint64), right.astype(np.uint64)
    return left, right


def _same(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    return left.size == right.size and bool(np.array_equal(*_comparable(left, right)))


def _is_plain_sequence(value: object) -> bool:
    return isinstance(value, (_CompactSequence, list, tuple, np.ndarray, array.array))


def _is_sequence_of_values(value: object) -> TypeGuard[Sequence[object]]:
    """A set or a dict has no order to rely on, and a generator is gone after one look."""
    return isinstance(value, Sequence) and not isinstance(
        value, (str, bytes, bytearray, memoryview)
    )


def _kind(value: object) -> str:
    if value is None:
        return "None"
    return f"{type(value).__name__} {value!r}"[:60]
