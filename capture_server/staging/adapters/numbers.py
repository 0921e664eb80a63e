"""Numbers as engines' JSON spells them, checked: shared by the adapters."""

from __future__ import annotations

import re
from typing import Any, Final

from middleware.arrays import LogProbs, TokenIds
from middleware.errors import InvalidInputError

_TOKEN_ID: Final = re.compile(r"token_id:([0-9]{1,20})")


def token_ids_of(values: Any, what: str) -> list[int]:
    """Token ids: integers, or ``token_id:<n>`` strings.

    Raises:
        InvalidInputError: (a ``ValueError``) anything else.
    """
    if isinstance(values, list) and any(isinstance(value, str) for value in values):
        values = [_named(value, what) for value in values]
    return TokenIds.of(values).tolist()


def all_named(values: list[Any]) -> bool:
    """Whether every value is a ``token_id:<n>`` string."""
    return all(isinstance(value, str) and _TOKEN_ID.fullmatch(value) for value in values)


def _named(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    match = _TOKEN_ID.fullmatch(value)
    if match is None:
        raise InvalidInputError(f"{what} hold a string that is not 'token_id:<n>'")
    return int(match[1])


def log_probs_of(values: Any) -> list[float]:
    """Finite log-probs; what engines write where they have none (-9999.0) is refused.

    Raises:
        InvalidInputError: (a ``ValueError``) null, not finite, a sentinel, no number.
    """
    return LogProbs.of(values).tolist()
