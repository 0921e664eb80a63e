"""Which rollout does a finished record belong to?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from middleware.errors import InvalidIdError
from middleware.paths import validate_rollout_id

ROLLOUT_ID_KEY: Final = "_ng_rollout_id"
TASK_INDEX_KEY: Final = "_ng_task_index"
ROLLOUT_INDEX_KEY: Final = "_ng_rollout_index"
ATTEMPT_INDEX_KEY: Final = "_ng_attempt_index"


def rollout_id_of(record: Mapping[str, Any]) -> str | None:
    """``_ng_rollout_id``, else ``<task>-<rollout>`` from the indices; ``-a<n>`` for attempt n > 0.

    Returns:
        None when the record carries neither.

    Raises:
        InvalidIdError: (a ``ValueError``) what it carries makes no valid id.
    """
    given = record.get(ROLLOUT_ID_KEY)
    if given is not None:
        base = validate_rollout_id(given)
    elif record.get(TASK_INDEX_KEY) is None or record.get(ROLLOUT_INDEX_KEY) is None:
        return None
    else:
        base = f"{_index(record, TASK_INDEX_KEY)}-{_index(record, ROLLOUT_INDEX_KEY)}"
    attempt = _index(record, ATTEMPT_INDEX_KEY) if record.get(ATTEMPT_INDEX_KEY) is not None else 0
    return validate_rollout_id(f"{base}-a{attempt}" if attempt > 0 else base)


def _index(record: Mapping[str, Any], key: str) -> int:
    value = record[key]
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    raise InvalidIdError(f"{key} is {value!r}; it must be an integer")
