"""Canonical JSON and canonical tool arguments: the text that stands for a value in a hash.

Invariant: two values that differ as JSON (a number's size, ``NaN`` against ``null``) never get
the same text, and the order of keys or the spacing of a source text never matters. Source:
spec 02.3. Knows nothing of conversations.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

from middleware.errors import InvalidInputError

__all__ = [
    "NOT_JSON",
    "canonical_json",
    "canonicalize_tool_arguments",
    "encode_arguments",
    "loads_exact",
    "may_hold_long_integer",
    "parse_json_text",
    "sized",
    "utf8",
]

NOT_JSON: Final = object()

_LONG_RUN: Final = b"0" * 19  # the shortest integer beyond 64 bits is -2**63 - 1
_RUN: Final = re.compile(b"0+")
_DIGITS_ONLY: Final = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))

# orjson reads integers beyond 64 bits as floats; printed, such a float has an exponent.
_LARGE_NUMBER: Final = b"e+" if b"e+" in orjson.dumps(1e19) else b"e"


def utf8(text: Any) -> bytes:
    """The text's UTF-8 bytes.

    Raises:
        InvalidInputError: (a ``ValueError``) no string, or one with a lone surrogate.
    """
    if not isinstance(text, str):
        # Only the type: the value may be a prompt, and messages reach logs.
        raise InvalidInputError(f"{type(text).__name__} stands where text must be")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"text holds a lone surrogate at index {error.start}") from error


def sized(payload: bytes) -> bytes:
    """The payload with its length (8 bytes, big-endian) in front."""
    return len(payload).to_bytes(8, "big") + payload


def canonical_json(value: Any) -> bytes:
    """JSON as orjson prints it, keys sorted; integers of any size and non-finite numbers exact.

    Raises:
        InvalidInputError: (a ``ValueError``) a lone surrogate, a key that is no string, a value
            that JSON does not have, or nesting beyond what Python can walk.
    """
    try:
        printed = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        return _exact_json(value)
    # orjson prints non-finite numbers as null: only then a closer look is needed.
    return _exact_json(value) if b"null" in printed else printed


def _exact_json(value: Any) -> bytes:
    try:
        return b"".join(_json_pieces(value))
    except RecursionError as error:
        raise InvalidInputError("JSON is nested too deeply to be hashed") from error
    except (orjson.JSONEncodeError, UnicodeEncodeError) as error:
        raise InvalidInputError(f"JSON cannot be encoded: {error}") from error


def _json_pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, float) and not math.isfinite(value):
        yield b"NaN" if math.isnan(value) else b"Infinity" if value > 0 else b"-Infinity"
    elif isinstance(value, int) and not isinstance(value, bool):
        yield str(int(value)).encode("ascii")
    elif isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise InvalidInputError("a JSON object has a key that is no string")
        yield b"{"
        for at, key in enumerate(sorted(value)):
            yield (b"," if at else b"") + orjson.dumps(key) + b":"
            yield from _json_pieces(value[key])
        yield b"}"
    elif isinstance(value, (list, tuple)):
        yield b"["
        for at, element in enumerate(value):
            if at:
                yield b","
            yield from _json_pieces(element)
        yield b"]"
    elif value is None or isinstance(value, (str, float, bool)):
        yield orjson.dumps(value)
    else:
        raise InvalidInputError(f"{type(value).__name__} is no JSON value")


def parse_json_text(text: str) -> Any:
    """The value that Python's ``json`` reads (integers exact, ``NaN``...), or ``NOT_JSON``."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return NOT_JSON


def loads_exact(data: bytes | str) -> Any:
    """``orjson.loads``, but integers of any size stay exact and lone surrogates are read.

    orjson turns integers beyond 64 bits into floats: a record read back would differ from the
    one that was written.

    Raises:
        ValueError: no JSON.
    """
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if not may_hold_long_integer(raw):
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            pass  # Python's reader takes more, and says what is wrong if it does not
    return json.loads(data)


def may_hold_long_integer(raw: bytes) -> bool:
    """Whether JSON text may hold an integer that orjson would round; rarely True in vain.

    The digits behind a point do not count: half of all log-probs below 0.01 have 19 of them.
    """
    # Digits as "0", all else as " ": a search then runs at memory speed.
    digits = raw.translate(_DIGITS_ONLY)
    at = digits.find(_LONG_RUN)
    while at >= 0:
        if raw[at - 1 : at] != b".":
            return True
        run = _RUN.match(digits, at)
        assert run is not None  # found just now
        at = digits.find(_LONG_RUN, run.end())
    return False


def canonicalize_tool_arguments(value: Any) -> str:
    """The text that stands for a tool call's arguments inside the hashes.

    None is empty; a string that parses as JSON counts as its canonical JSON, any other string
    stripped; anything else as canonical JSON.

    Raises:
        InvalidInputError: as ``canonical_json``.
    """
    return encode_arguments(value).decode("utf-8")


def encode_arguments(value: Any) -> bytes:
    """``canonicalize_tool_arguments`` as UTF-8 bytes."""
    if value is None:
        return b""
    if not isinstance(value, str):
        return canonical_json(value)
    try:
        printed = orjson.dumps(orjson.loads(value), option=orjson.OPT_SORT_KEYS)
        # orjson reads no non-finite numbers, so a null here is one. One byte is found much faster
        # than two, and seldom is there.
        if _LARGE_NUMBER[-1] not in printed or _LARGE_NUMBER not in printed:
            return printed
    except (ValueError, TypeError):
        pass  # no JSON, or JSON that only Python reads: the exact way decides
    parsed = parse_json_text(value)
    return utf8(value.strip()) if parsed is NOT_JSON else canonical_json(parsed)
