"""Megatron workers: one generation as a mapping or an object with these three attributes.

``prompt_token_ids``, ``generated_token_ids``, ``generated_log_probs``. Arrays and tensors are read
through their ``tolist``. Invariant: as many log-probs as generated ids, or ``ValueError``.
"""

from __future__ import annotations

from typing import Any, Final

from capture_server.staging.adapters.numbers import log_probs_of, token_ids_of
from middleware.errors import InvalidInputError

GENERATED_IDS_FIELD: Final = "generated_token_ids"
GENERATED_LOGPROBS_FIELD: Final = "generated_log_probs"
PREFIX_IDS_FIELD: Final = "required_prefix_token_ids"
PROMPT_IDS_FIELD: Final = "prompt_token_ids"

_EXTRAS_FIELDS: Final = ("routed_experts", "media_spans")


class MegatronCaptureAdapter:
    """See ``CaptureAdapter``. Stateless."""

    def enter_prefix(
        self, request_payload: dict[str, Any], prefix_ids: list[int]
    ) -> dict[str, Any]:
        """The request with ``required_prefix_token_ids``."""
        return {**request_payload, PREFIX_IDS_FIELD: list(prefix_ids)}

    def extract_prompt_ids(self, response_payload: Any) -> list[int]:
        """The prompt's ids.

        Raises:
            InvalidInputError: (a ``ValueError``) not there, or not ids.
        """
        return token_ids_of(_required(response_payload, PROMPT_IDS_FIELD), PROMPT_IDS_FIELD)

    def extract_generation(self, response_payload: Any) -> tuple[list[int], list[float]]:
        """The generated ids and their log-probs.

        Raises:
            InvalidInputError: (a ``ValueError``) missing, of different number, not finite.
        """
        ids = token_ids_of(_required(response_payload, GENERATED_IDS_FIELD), GENERATED_IDS_FIELD)
        log_probs = log_probs_of(_required(response_payload, GENERATED_LOGPROBS_FIELD))
        if len(ids) != len(log_probs):
            raise InvalidInputError(f"{len(ids)} generated ids, {len(log_probs)} log-probs")
        return ids, log_probs

    def extract_extras(self, response_payload: Any) -> dict[str, Any] | None:
        """Routed experts and media spans, where the generation has them."""
        found = {name: _read(response_payload, name) for name in _EXTRAS_FIELDS}
        return {name: value for name, value in found.items() if value is not None} or None


def _required(payload: Any, name: str) -> Any:
    value = _read(payload, name)
    if value is None:
        raise InvalidInputError(f"the generation has no {name}")
    return value


def _read(payload: Any, name: str) -> Any:
    value: Any = payload.get(name) if isinstance(payload, dict) else getattr(payload, name, None)
    return value.tolist() if hasattr(value, "tolist") else value
