"""What shapes a prompt besides the conversation: the prompt settings and the system texts.

Two digests that a record carries next to its lineage hashes. The first decides matches
(spec 02.4), the second only whether an exact prefix may be supplied (spec 06).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from middleware.canonical import canonical_json, sized, utf8
from middleware.errors import InvalidInputError

__all__ = ["PROMPT_CONFIG_KEYS", "SYSTEM_ROLES", "prompt_config_digest", "system_digest"]

_SYSTEM_DOMAIN: Final = b"token-capture-system"
_CONFIG_DOMAIN: Final = b"token-capture-prompt-config"

SYSTEM_ROLES: Final = ("system", "developer")
BILLING_HEADER: Final = "x-anthropic-billing-header"
PROMPT_CONFIG_KEYS: Final = (
    "model",
    "tools",
    "documents",
    "reasoning_effort",
    "chat_template",
    "chat_template_kwargs",
)


def system_digest(items: list[dict[str, Any]] | None) -> str:
    """sha256 hex over the full content of system and developer items, in order.

    Text blocks that start with Claude Code's billing header change with every request and are
    left out. Decides no match, only whether a prefix may be supplied (spec 06).

    Raises:
        InvalidInputError: (a ``ValueError``) the content cannot be encoded.
    """
    hasher = hashlib.sha256(_SYSTEM_DOMAIN)
    for item in items or []:
        if not isinstance(item, dict):
            raise InvalidInputError(f"an item is no object but {type(item).__name__}")
        if item.get("role") in SYSTEM_ROLES:
            hasher.update(b"\x00" + sized(utf8(item["role"])))
            for block in _system_blocks(item.get("content")):
                hasher.update(b"\x01" + sized(block))
    return hasher.hexdigest()


def _system_blocks(content: Any) -> Iterator[bytes]:
    for block in content if isinstance(content, list) else [content]:
        text = block.get("text") if isinstance(block, dict) else block
        if isinstance(text, str):
            if text and not text.startswith(BILLING_HEADER):
                yield utf8(text)
        elif block is not None:
            yield canonical_json(block)


def prompt_config_digest(body: Mapping[str, Any], extra_keys: Iterable[str] = ()) -> str:
    """sha256 hex over what shapes the prompt but is no conversation item.

    ``PROMPT_CONFIG_KEYS`` and ``extra_keys`` of the request body as the agent sent it, and the
    effort of a Responses ``reasoning`` object. Null and empty values count as absent, a
    ``cache_control`` on a tool as not there. ``tool_choice`` and ``response_format`` steer
    decoding and change from turn to turn: not covered.

    Raises:
        InvalidInputError: (a ``ValueError``) a value cannot be encoded.
    """
    values = {key: body.get(key) for key in {*PROMPT_CONFIG_KEYS, *extra_keys}}
    reasoning = body.get("reasoning")
    if values["reasoning_effort"] is None and isinstance(reasoning, dict):
        values["reasoning_effort"] = reasoning.get("effort")
    if isinstance(values["tools"], list):
        values["tools"] = [_without_cache_control(tool) for tool in values["tools"]]
    hasher = hashlib.sha256(_CONFIG_DOMAIN)
    for key in sorted(values):
        value = values[key]
        if value is not None and value not in ("", [], {}):
            hasher.update(b"\x00" + sized(utf8(key)))
            hasher.update(b"\x01" + sized(canonical_json(value)))
    return hasher.hexdigest()


def _without_cache_control(tool: Any) -> Any:
    if not isinstance(tool, dict) or "cache_control" not in tool:
        return tool
    return {key: value for key, value in tool.items() if key != "cache_control"}
