"""vLLM workers (NeMo-RL's server and stock vLLM): chat completions as dictionaries.

The token bundle is read from the message (``prompt_token_ids``, ``generation_token_ids``,
``generation_log_probs``), else from vLLM's own places (``prompt_token_ids`` at the top,
``token_ids`` and ``logprobs`` on the choice; ids also as ``token_id:<n>`` strings). Invariant:
one choice, ids and log-probs from one place, as many of one as of the other, and ids that are
given twice are equal; else ``ValueError``.
"""

from __future__ import annotations

from typing import Any, Final

from capture_server.staging.adapters.numbers import all_named, log_probs_of, token_ids_of
from middleware.errors import InvalidInputError

MEDIA_SPANS_FIELD: Final = "media_spans"
PREFIX_IDS_FIELD: Final = "required_prefix_token_ids"
PROMPT_IDS_FIELD: Final = "prompt_token_ids"
ROUTED_EXPERTS_FIELD: Final = "routed_experts"


class VLLMCaptureAdapter:
    """See ``CaptureAdapter``. Stateless."""

    def enter_prefix(
        self, request_payload: dict[str, Any], prefix_ids: list[int]
    ) -> dict[str, Any]:
        """The request with ``required_prefix_token_ids``, which NeMo-RL's server splices in."""
        return {**request_payload, PREFIX_IDS_FIELD: list(prefix_ids)}

    def extract_prompt_ids(self, response_payload: dict[str, Any]) -> list[int]:
        """The prompt's ids, from message, choice or top level (in this order).

        Raises:
            InvalidInputError: (a ``ValueError``) not there, or not ids.
        """
        choice = _only_choice(response_payload)
        for holder in (_message(choice), choice, response_payload):
            if holder.get(PROMPT_IDS_FIELD) is not None:
                return token_ids_of(holder[PROMPT_IDS_FIELD], PROMPT_IDS_FIELD)
        raise InvalidInputError("the answer has no prompt_token_ids")

    def extract_generation(self, response_payload: dict[str, Any]) -> tuple[list[int], list[float]]:
        """The only choice's ids and log-probs.

        Raises:
            InvalidInputError: (a ``ValueError``) see ``extract_generation_token_info``.
        """
        return extract_generation_token_info(_only_choice(response_payload))

    def extract_extras(self, response_payload: dict[str, Any]) -> dict[str, Any] | None:
        """Routed experts and media spans, where the answer has them."""
        choice = _only_choice(response_payload)
        extras: dict[str, Any] = {}
        for name in (ROUTED_EXPERTS_FIELD, MEDIA_SPANS_FIELD):
            for holder in (_message(choice), choice, response_payload):
                if holder.get(name) is not None:
                    extras[name] = holder[name]
                    break
        return extras or None


def extract_generation_token_info(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    """One choice's sampled ids and their log-probs, parallel.

    Raises:
        InvalidInputError: (a ``ValueError``) missing, of different number, not finite, no ids, or
            ids that are given twice and differ.
    """
    message = _message(choice)
    ids, log_probs = message.get("generation_token_ids"), message.get("generation_log_probs")
    if ids is None and log_probs is None:
        ids, log_probs = _native(choice)
    if ids is None or log_probs is None:
        raise InvalidInputError("the answer lacks generated ids or their log-probs")
    found = token_ids_of(ids, "generated ids"), log_probs_of(log_probs)
    if len(found[0]) != len(found[1]):
        raise InvalidInputError(f"{len(found[0])} generated ids, {len(found[1])} log-probs")
    return found


def _native(choice: dict[str, Any]) -> tuple[Any, Any]:
    content = choice.get("logprobs")
    content = content.get("content") if isinstance(content, dict) else None
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        return None, None
    named = [item.get("token") for item in content]
    log_probs = [item.get("logprob") for item in content]
    ids = choice.get("token_ids")
    if ids is None:
        return named, log_probs
    # With names in both places the engine said the same thing twice, or one of them is wrong.
    if named and all_named(named):
        ids = token_ids_of(ids, "generated ids")
        if ids != token_ids_of(named, "generated ids"):
            raise InvalidInputError("token_ids are not the ids that the log-probs are of")
    return ids, log_probs


def _only_choice(payload: Any) -> dict[str, Any]:
    choices = payload.get("choices") if isinstance(payload, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise InvalidInputError("a captured answer has exactly one choice")
    choice: dict[str, Any] = choices[0]
    return choice


def _message(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message")
    return message if isinstance(message, dict) else {}
