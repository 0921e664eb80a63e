"""Is a record what its type says? Asked once per record, before anything is decided on it.

Validation guards the way in; what a framework's own transport copies, patches or constructs comes
past it, and optional fields are never validated. Such a record is set aside by name, like one
that was lost: it neither crashes the build of a batch nor is it repaired. O(1) per record, but
for its content items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from middleware.errors import InvalidRecordError
from middleware.records import LogProbs, ParentResolutionStatus, TokenEntry, TokenIds

INVALID_RECORD: Final = "invalid_record"

_Check = Callable[[Any], bool]


def _is(*kinds: type) -> _Check:
    # By exact type: a bool is an int, and must not pass for one.
    return lambda value: type(value) in kinds


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_time(value: Any) -> bool:
    return as_finite(value) is not None


def _are_items(value: Any) -> bool:
    return type(value) is list and all(isinstance(item, dict) for item in value)


_OPTIONAL_TEXT: Final = _or_none(_is(str))
_OPTIONAL_FLAG: Final = _or_none(_is(bool))
_OPTIONAL_COUNT: Final = _or_none(_is_count)
_LABEL: Final = _or_none(_is(int, str))
_CHECKS: Final[dict[str, _Check]] = {
    "rollout_id": _is(str),
    "prompt_token_ids": _is(TokenIds),
    "generation_token_ids": _is(TokenIds),
    "generation_log_probs": _is(LogProbs),
    "output_items": _are_items,
    "token_item_index": _OPTIONAL_COUNT,
    "response_id": _OPTIONAL_TEXT,
    "created_at": _is_time,
    "parent_call_id": _OPTIONAL_TEXT,
    "cum_len": _OPTIONAL_COUNT,
    "digest": _OPTIONAL_TEXT,
    "parent_resolution": _or_none(_is(ParentResolutionStatus)),
    "parent_resolution_reason": _is(str),
    "continuation_fingerprint": _is(str),
    "continuation_context_digest": _is(str),
    "continuation_context_len": _is(int),
    "prompt_is_delta": _is(bool),
    # Optional ones that decide something, or that rows show.
    "dialect": _OPTIONAL_TEXT,
    "finish_reason": _OPTIONAL_TEXT,
    "delivered": _OPTIONAL_FLAG,
    "first_call": _OPTIONAL_FLAG,
    "request_digest": _OPTIONAL_TEXT,
    "agent_id": _OPTIONAL_TEXT,
    "weight_version": _LABEL,
    "weight_version_end": _LABEL,
    "drift_at": _OPTIONAL_COUNT,
}


def record_problem(entry: TokenEntry) -> str:
    """What is wrong with a record, in words; "" when nothing is."""
    for name, check in _CHECKS.items():
        value = getattr(entry, name, None)
        if not check(value):
            return f"{name} is of type {type(value).__name__}, or out of its range"
    ids, log_probs = len(entry.generation_token_ids), len(entry.generation_log_probs)
    if ids != log_probs:
        return f"it has {ids} sampled tokens and {log_probs} log-probs"
    if entry.token_item_index is not None and entry.token_item_index >= len(entry.output_items):
        return f"token_item_index {entry.token_item_index} is no index into its output_items"
    return ""


def require_entries(entries: Iterable[object]) -> None:
    """Refuse what cannot even be named.

    Raises:
        InvalidRecordError: an element is no ``TokenEntry``, or has no call id.
    """
    for entry in entries:
        if not isinstance(entry, TokenEntry):
            raise InvalidRecordError(f"a {type(entry).__name__} is no TokenEntry")
        if type(entry.model_call_id) is not str:
            kind = type(entry.model_call_id).__name__
            raise InvalidRecordError(f"a record's model_call_id is of type {kind}")


def split_sound(entries: Sequence[TokenEntry]) -> tuple[list[TokenEntry], dict[str, str]]:
    """The records of sound calls, and call id -> problem of those with a broken copy.

    Raises:
        InvalidRecordError: as ``require_entries``.
    """
    require_entries(entries)
    broken: dict[str, str] = {}
    for entry in entries:
        if problem := record_problem(entry):
            broken.setdefault(entry.model_call_id, problem)
    return [entry for entry in entries if entry.model_call_id not in broken], broken


def as_finite(value: object) -> float | None:
    """A real, finite number as float; None for anything else (bools and texts too)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
