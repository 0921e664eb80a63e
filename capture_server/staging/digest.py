"""The hashes of external staging: pure functions over token ids, masks, log-probs and extras.

They are a wire contract (versions below): a framework's worker computes the same bytes. Vectors:
``capture_server.staging.conformance``. ``Q`` is an 8-byte big-endian unsigned number, ``T`` a
length and UTF-8, ``E`` a count and ids. Invariant: whatever is hashed was checked first; a value
of another type (a bool for an integer, an integer for a float) is refused, never converted.
Source: spec 07 "Hashes".
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from middleware.arrays import LogProbs, TokenIds
from middleware.errors import InvalidInputError
from middleware.staging_wire import STAGING_SCHEMA_VERSION, check_placement

__all__ = [
    "EMPTY_EXTRAS_DIGEST",
    "EXTRAS_DIGEST_VERSION",
    "STAGING_DIGEST_VERSION",
    "STAGING_SCHEMA_VERSION",
    "build_staging_delta",
    "compute_chain_hash",
    "compute_extras_digest",
    "compute_staging_digest",
    "encode_token_ids",
    "hash_token_ids",
]

STAGING_DIGEST_VERSION: Final = 2
EXTRAS_DIGEST_VERSION: Final = 1
EMPTY_EXTRAS_DIGEST: Final = "a1edc33c107616cf344faf0103daa025cfb125f8e1c784ae5f6a49faf2b768b6"

_PREFIX_DOMAIN: Final = b"nemo-gym-staging-prefix-v2"
_CHAIN_DOMAIN: Final = b"nemo-gym-staging-chain-v1"
_EXTRAS_DOMAIN: Final = b"nemo-gym-staging-extras-v1"
_CALL_DOMAIN: Final = b"nemo-gym-staging-call-v2"
_HASH: Final = re.compile(r"[0-9a-f]{64}")

FloatArray = npt.NDArray[np.float64]


# --- ids ----------------------------------------------------------------------------------------


def encode_token_ids(token_ids: Sequence[int]) -> bytes:
    """``E``: the count and each id, 8 bytes big-endian.

    Raises:
        InvalidInputError: (a ``ValueError``) an element is no integer in ``0 <= id < 2**64``.
    """
    ids = TokenIds.of(token_ids)
    return _q(len(ids), "the number of ids") + ids.array.astype(">u8").tobytes()


def hash_token_ids(token_ids: Sequence[int]) -> str:
    """The cumulative hash: of a call's whole sequence, prompt and generation.

    Raises:
        InvalidInputError: (a ``ValueError``) see ``encode_token_ids``.
    """
    return hashlib.sha256(_PREFIX_DOMAIN + encode_token_ids(token_ids)).hexdigest()


def compute_chain_hash(parent_chain_hash: str | None, token_ids_delta: Sequence[int]) -> str:
    """The hash of a call's delta on top of its parent's chain hash (None: a root).

    Raises:
        InvalidInputError: (a ``ValueError``) the parent's is no 64 lowercase hex digits, or an
            id is invalid.
    """
    parent = b"\0"
    if parent_chain_hash is not None:
        parent = b"\1" + _raw_hash(parent_chain_hash, "the parent's chain hash")
    encoded = encode_token_ids(token_ids_delta)
    return hashlib.sha256(_CHAIN_DOMAIN + parent + encoded).hexdigest()


# --- extras -------------------------------------------------------------------------------------


def compute_extras_digest(extras: Mapping[str, Any] | None) -> str:
    """The commitment to a call's extras: JSON-like values, told apart by type.

    Raises:
        InvalidInputError: (a ``ValueError``) not a mapping or None; a tuple, bytes, numpy scalar,
            NaN, an integer beyond 64 bit, a key that is no string, nesting without end.
    """
    if extras is not None and not isinstance(extras, Mapping):
        raise InvalidInputError(f"extras are a mapping or None, not {type(extras).__name__}")
    pieces: list[bytes] = [_EXTRAS_DOMAIN, b"\1"]
    try:
        _add_value(extras, pieces)
    except RecursionError as error:
        raise InvalidInputError("extras are nested too deeply") from error
    return hashlib.sha256(b"".join(pieces)).hexdigest()


def _add_value(value: Any, pieces: list[bytes]) -> None:
    kind = type(value)
    if value is None:
        pieces.append(b"N")
    elif kind is bool:
        pieces.append(b"B\1" if value else b"B\0")
    elif kind is int:
        if not -(1 << 63) <= value < 1 << 63:
            raise InvalidInputError("an integer in extras is beyond 64 bit")
        pieces.append(b"I" + struct.pack(">q", value))
    elif kind is float:
        if not np.isfinite(value):
            raise InvalidInputError("a number in extras is not finite")
        pieces.append(b"F" + struct.pack(">d", value))
    elif kind is str:
        pieces.append(b"S" + _t(value, "a string in extras"))
    elif kind is list:
        pieces.append(b"L" + _q(len(value), "a list's length"))
        for item in value:
            _add_value(item, pieces)
    elif isinstance(value, Mapping):
        _add_mapping(value, pieces)
    else:
        raise InvalidInputError(f"a {kind.__name__} in extras cannot be hashed")


def _add_mapping(value: Mapping[Any, Any], pieces: list[bytes]) -> None:
    if any(type(key) is not str for key in value):
        raise InvalidInputError("a key in extras is no string")
    encoded = {_utf8(key, "a key in extras"): item for key, item in value.items()}
    pieces.append(b"D" + _q(len(encoded), "a mapping's length"))
    for key in sorted(encoded):
        pieces.append(_q(len(key), "a key's length") + key)
        _add_value(encoded[key], pieces)


# --- the whole call -----------------------------------------------------------------------------


def compute_staging_digest(
    *,
    schema_version: int,
    digest_version: int,
    extras_digest_version: int,
    rollout_id: str,
    model_call_id: str,
    parent_call_id: str | None,
    mode: str,
    prev_len: int,
    delta_len: int,
    cum_len: int,
    weight_version: int,
    token_ids_delta: Sequence[int],
    token_mask_delta: Sequence[float],
    generation_log_probs_delta: Sequence[float],
    extras_digest: str,
    chain_hash: str,
    cumulative_hash: str,
) -> str:
    """The commitment to everything that a worker staged for one call.

    The three deltas are parallel (``delta_len`` elements); the mask is 0.0 for prompt tokens,
    1.0 for generated ones; a log-prob is 0.0 wherever the mask is.

    Raises:
        InvalidInputError: (a ``ValueError``) the arguments contradict each other, a type is
            wrong, or a version is unknown.
    """
    versions = _versions(schema_version, digest_version, extras_digest_version)
    lengths = b"".join(
        _q(value, name)
        for name, value in (
            ("prev_len", prev_len),
            ("delta_len", delta_len),
            ("cum_len", cum_len),
            ("weight_version", weight_version),
        )
    )
    try:
        check_placement(parent_call_id, mode, prev_len)
    except ValueError as error:
        raise InvalidInputError(str(error)) from error
    ids = encode_token_ids(token_ids_delta)
    mask = _checked_floats(token_mask_delta, "token_mask_delta")
    log_probs = _checked_floats(generation_log_probs_delta, "generation_log_probs_delta")
    _check_lengths(prev_len, delta_len, cum_len, (len(ids) // 8 - 1, mask.size, log_probs.size))
    _check_mask(mask, log_probs)
    parent = b"\0" if parent_call_id is None else b"\1" + _identifier(parent_call_id, "parent")
    return hashlib.sha256(
        b"".join(
            (
                _CALL_DOMAIN,
                versions,
                _identifier(rollout_id, "rollout_id"),
                _identifier(model_call_id, "model_call_id"),
                parent,
                _t(mode, "mode"),
                lengths,
                _b(ids),
                _b(_float32(mask, "token_mask_delta")),
                _b(_float32(log_probs, "generation_log_probs_delta")),
                _raw_hash(extras_digest, "extras_digest"),
                b"\1" + _raw_hash(chain_hash, "chain_hash"),
                b"\1" + _raw_hash(cumulative_hash, "cumulative_hash"),
            )
        )
    ).hexdigest()


def build_staging_delta(
    *,
    prompt_token_ids: Sequence[int],
    generated_token_ids: Sequence[int],
    generated_log_probs: Sequence[float],
    prev_len: int,
) -> tuple[list[int], list[float], list[float]]:
    """What a call adds to its parent's tokens: (ids, mask, log-probs), parallel.

    The prompt behind ``prev_len`` is carried (mask and log-prob 0.0), the generation follows.

    Raises:
        InvalidInputError: (a ``ValueError``) ``prev_len`` beyond the prompt, counts that differ,
            invalid ids, a log-prob that is not a finite float.
    """
    prompt, generated = TokenIds.of(prompt_token_ids), TokenIds.of(generated_token_ids)
    log_probs = _checked_floats(generated_log_probs, "generated_log_probs")
    _q(prev_len, "prev_len")
    if prev_len > len(prompt):
        raise InvalidInputError(f"prev_len {prev_len} is beyond a prompt of {len(prompt)} tokens")
    if len(generated) != log_probs.size:
        raise InvalidInputError(
            f"{len(generated)} generated ids but {log_probs.size} log-probs: one for each is needed"
        )
    carried = prompt[prev_len:]
    ids = TokenIds.concat(carried, generated).tolist()
    mask = [0.0] * len(carried) + [1.0] * len(generated)
    return ids, mask, [0.0] * len(carried) + log_probs.tolist()


def _versions(schema: int, digest: int, extras: int) -> bytes:
    for name, given, known in (
        ("schema_version", schema, STAGING_SCHEMA_VERSION),
        ("digest_version", digest, STAGING_DIGEST_VERSION),
        ("extras_digest_version", extras, EXTRAS_DIGEST_VERSION),
    ):
        if type(given) is not int or given != known:
            raise InvalidInputError(f"{name} {given!r} is unknown; this version speaks {known}")
    return bytes((schema, digest, extras))


def _check_lengths(prev_len: int, delta_len: int, cum_len: int, counts: tuple[int, ...]) -> None:
    if delta_len == 0:
        raise InvalidInputError("a call stages at least one token")
    if any(count != delta_len for count in counts):
        raise InvalidInputError(f"ids, mask and log-probs have {counts} elements, not {delta_len}")
    if cum_len != prev_len + delta_len:
        raise InvalidInputError(f"cum_len {cum_len} is not {prev_len} + {delta_len}")


def _check_mask(mask: FloatArray, log_probs: FloatArray) -> None:
    carried = mask == 0.0
    if not np.all(carried | (mask == 1.0)):
        raise InvalidInputError("a mask value is neither 0.0 nor 1.0")
    if np.any(log_probs[carried] != 0.0):
        raise InvalidInputError("a carried token has a log-prob")


# --- encodings ----------------------------------------------------------------------------------


def _q(value: Any, what: str) -> bytes:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise InvalidInputError(f"{what} is no integer in 0 <= n < 2**64")
    return value.to_bytes(8, "big")


def _b(data: bytes) -> bytes:
    return _q(len(data), "length") + data


def _t(text: str, what: str) -> bytes:
    return _b(_utf8(text, what))


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{what} is not valid Unicode") from error


def _identifier(value: Any, what: str) -> bytes:
    if type(value) is not str or not value:
        raise InvalidInputError(f"{what} must be a string that is not empty")
    return _t(value, what)


def _raw_hash(value: Any, what: str) -> bytes:
    if type(value) is not str or _HASH.fullmatch(value) is None:
        raise InvalidInputError(f"{what} must be 64 lowercase hex digits")
    return bytes.fromhex(value)


def _checked_floats(values: Any, what: str) -> FloatArray:
    """``float64[T]``; lists must hold Python floats and nothing else."""
    if isinstance(values, LogProbs):
        values = values.array
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind != "f":
            raise InvalidInputError(f"{what} is no one-dimensional array of floats")
    elif not isinstance(values, list | tuple) or set(map(type, values)) - {float}:
        raise InvalidInputError(f"{what} must be a list of floats")
    checked = np.asarray(values, dtype=np.float64)
    if not np.isfinite(checked).all():
        raise InvalidInputError(f"{what} holds a value that is not finite")
    return checked


def _float32(values: FloatArray, what: str) -> bytes:
    """Count and float32 big-endian each."""
    with np.errstate(over="ignore"):
        narrow = values.astype(">f4")
    if not np.isfinite(narrow).all():
        raise InvalidInputError(f"{what} holds a value beyond float32")
    return _q(values.size, what) + narrow.tobytes()
