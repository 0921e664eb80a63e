"""NeMo-RL's vLLM server: the whole token bundle rides on the chat message.

``choices[i].message.{prompt_token_ids, generation_token_ids, generation_log_probs,
routed_experts}``, ids as integers or ``"token_id:123"`` strings. Not in streams.
Source: spec 06b 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from middleware.engines.base import AnswerDefect, TokenAsk, TokenBundle
from middleware.records import TOKEN_FIELDS

_TOKEN_ID: Final = re.compile(r"token_id:([0-9]{1,20})")


class NemoRLProfile:
    """Token bundle on the message; the server decides alone that it reports one."""

    name: Final = "nemo_rl"

    def ask(self, dialect: str, body: Mapping[str, Any]) -> TokenAsk:
        """Log-probs on; the bundle is ours to take out again."""
        if dialect != "chat":
            return TokenAsk()
        members: dict[str, Any] = {"logprobs": True, "return_tokens_as_token_ids": True}
        in_choice: dict[str, Any] = {"message": dict.fromkeys(TOKEN_FIELDS, "drop")}
        if body.get("logprobs") is not True:
            in_choice["logprobs"] = "drop"
        tree = {"choices": {"*": in_choice}}
        return TokenAsk(members, tree, tree)

    def read(
        self, dialect: str, payload: Mapping[str, Any], choice: Mapping[str, Any], *, echo: bool
    ) -> TokenBundle:
        """The message's bundle, ids as integers."""
        return read_message_bundle(choice)


def read_message_bundle(choice: Mapping[str, Any]) -> TokenBundle:
    """The bundle on a choice's message, empty when there is none.

    Raises:
        AnswerDefect: ``invalid_token_ids``.
    """
    message = choice.get("message")
    if not isinstance(message, dict):
        return TokenBundle()
    prompt, ids, log_probs, routed = (message.get(name) for name in TOKEN_FIELDS)
    return TokenBundle(
        [_as_id(value) for value in prompt] if isinstance(prompt, list) else None,
        [_as_id(value) for value in ids] if isinstance(ids, list) else None,
        log_probs if isinstance(log_probs, list) else None,
        routed,
    )


def _as_id(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = _TOKEN_ID.fullmatch(value)
    if match is None:
        raise AnswerDefect("invalid_token_ids", "a token id is a string but not 'token_id:<n>'")
    return int(match[1])
