"""Reading tokens and content off a served response: one extraction path for all dialects.

Engine-native shapes are brought to these fields first (``middleware.engines``). Invariant: the
response is never changed, and token data is taken whole from exactly one item or not at all.
Source: spec 01, "Reading tokens off a served response".
"""

from __future__ import annotations

from typing import Any, Final

from middleware.errors import InvalidRecordError

TOKEN_FIELDS: Final = (
    "prompt_token_ids",
    "generation_token_ids",
    "generation_log_probs",
    "routed_experts",
)
_REQUIRED_TOKEN_FIELDS: Final = TOKEN_FIELDS[:3]


def extract_token_fields(response_json: dict[str, Any]) -> dict[str, Any] | None:
    """The token fields of a served response, as found there; None when no item carries any.

    Looks at Responses ``output[*]`` and Chat ``choices[*].message``. Null counts as absent;
    ``routed_experts`` is optional and by itself not token data.

    Raises:
        InvalidRecordError: (a ``ValueError``) more than one item carries token fields, or one
            carries only a part of them.
    """
    carriers = [item for item in _token_items(response_json) if _present(item)]
    if not carriers:
        return None
    if len(carriers) > 1:
        raise InvalidRecordError(
            f"{len(carriers)} items of one response carry token ids; exactly one may"
        )
    found = _present(carriers[0])
    missing = [name for name in _REQUIRED_TOKEN_FIELDS if name not in found]
    if missing:
        raise InvalidRecordError(f"the response's token data lacks {', '.join(missing)}")
    return {name: carriers[0].get(name) for name in TOKEN_FIELDS}


def _present(item: dict[str, Any]) -> list[str]:
    return [name for name in _REQUIRED_TOKEN_FIELDS if item.get(name) is not None]


def _token_items(response: dict[str, Any]) -> list[dict[str, Any]]:
    output = [item for item in _list(response.get("output")) if isinstance(item, dict)]
    messages = [
        choice.get("message")
        for choice in _list(response.get("choices"))
        if isinstance(choice, dict)
    ]
    return output + [message for message in messages if isinstance(message, dict)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def response_to_output_items(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """The content of a served response as Responses-style output items (new dicts).

    A non-empty Responses ``output`` as it is, else Chat ``choices`` as ``message`` items, else
    an Anthropic ``content`` as ``reasoning`` items followed by one ``message`` item. Elements
    that are no objects are skipped. Source: spec 01.
    """
    output = _list(payload.get("output"))
    if output:
        return [dict(item) for item in output if isinstance(item, dict)]
    choices = _list(payload.get("choices"))
    if choices:
        return _chat_items(choices)
    return _anthropic_items(payload)


def _chat_items(choices: list[Any]) -> list[dict[str, Any]]:
    items = []
    for choice in choices:
        message = choice.get("message") if isinstance(choice, dict) else choice
        if message is None:
            message = {"type": "message"}  # nothing was said: an empty assistant message
        if isinstance(message, dict):
            item = dict(message)
            item.setdefault("type", "message")
            item.setdefault("role", "assistant")
            items.append(item)
    return items


def _anthropic_items(payload: dict[str, Any]) -> list[dict[str, Any]]:
    if payload.get("type", "message") != "message" or payload.get("role", "") != "assistant":
        return []
    content = payload.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    items: list[dict[str, Any]] = []
    rest: list[Any] = []
    for block in _list(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            text = block.get("thinking")
            summary = [{"type": "summary_text", "text": text}] if text else []
            items.append({"type": "reasoning", "summary": summary})
        elif kind == "redacted_thinking":
            item = {"type": "reasoning", "summary": []}
            if block.get("data") is not None:
                item["encrypted_content"] = block["data"]
            items.append(item)
        elif isinstance(block, (dict, str)):
            rest.append(block)
    if rest:
        items.append({"type": "message", "role": "assistant", "content": rest})
    return items


def strip_token_fields(items: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int | None]:
    """The items without token arrays (new dicts), and the index of the one that carried them.

    Raises:
        InvalidRecordError: (a ``ValueError``) two items carry ``generation_token_ids``.
    """
    carriers = [i for i, item in enumerate(items) if item.get("generation_token_ids") is not None]
    if len(carriers) > 1:
        raise InvalidRecordError(
            f"items {carriers} of one response carry generation_token_ids; exactly one may"
        )
    stripped = [
        {name: value for name, value in item.items() if name not in TOKEN_FIELDS} for item in items
    ]
    return stripped, carriers[0] if carriers else None
