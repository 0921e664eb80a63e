"""Normalising request and output items before they are hashed (spec 02.2).

Harnesses echo a turn in many shapes: reasoning kept, dropped or folded into text, contents as
strings or blocks, numbers respelled. After this step those shapes are equal.

Invariant: the input is never changed; an item to which no rule applies is the very same object
in the result; normalising twice changes nothing. Nothing is judged: what cannot be hashed is
passed on for ``middleware.fingerprint`` to refuse.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from middleware.canonical import parse_json_text
from middleware.errors import InvalidInputError
from middleware.fingerprint import TEXT_BLOCKS, is_model_authored
from middleware.prompt_shape import SYSTEM_ROLES

__all__ = ["normalise_items"]

_REASONING_FIELDS: Final = ("reasoning", "reasoning_content")
# Tuples, not sets, for types: they may be any JSON value, hashable or not.
_REASONING_BLOCKS: Final = ("thinking", "redacted_thinking")
_REASONING_ITEMS: Final = ("reasoning", *_REASONING_BLOCKS)
_VOLATILE: Final = frozenset(
    {"cache_control", "signature", "status", "annotations", "logprobs", "phase"}
)
_DROPPED_FROM_ITEMS: Final = _VOLATILE.union(_REASONING_FIELDS)
_SERVER_MADE_IDS: Final = ("rs_", "msg_", "fc_")
_CUSTOM_TYPES: Final = {
    "custom_tool_call": "function_call",
    "custom_tool_call_output": "function_call_output",
}
_PLAIN_KEYS: Final = frozenset({"role", "content", "name", "tool_call_id", "tool_calls"})
_NAMED_TYPES: Final = frozenset({"", "message", "function_call", "function_call_output"})

_THINK = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
_EXACT_FLOATS: Final = 2.0**53
_LEAVES: Final = frozenset({str, int, bool, type(None)})  # most values: not worth a call

Item = dict[str, Any]


def normalise_items(items: list[Item] | None) -> list[Item]:
    """The items as the two hashes shall see them; linear, cheap where nothing applies.

    A model-authored turn of which only reasoning was there becomes one assistant item without
    content.

    Raises:
        InvalidInputError: (a ``ValueError``) an item is no object, or nested too deeply.
    """
    try:
        return _normalised(items or [])
    except RecursionError as error:
        raise InvalidInputError("an item is nested too deeply to be hashed") from error


def _normalised(items: list[Item]) -> list[Item]:
    kept: list[Item] = []
    only_reasoning = False  # so far in this turn: reasoning was dropped and nothing was kept
    for item in items:
        if not isinstance(item, dict):
            raise InvalidInputError(f"an item is no object but {type(item).__name__}")
        authored = is_model_authored(item)
        normal = None if item.get("type") in _REASONING_ITEMS else _normal_item(item, authored)
        if normal is None:
            only_reasoning = only_reasoning or not _ends_in_turn(kept)
            continue
        if normal is not item:  # another type may have made it the model's, or no longer so
            authored = is_model_authored(normal)
        if only_reasoning and not authored:
            kept.append({"role": "assistant"})
        only_reasoning = False
        kept.append(normal)
    if only_reasoning:
        kept.append({"role": "assistant"})
    return kept


def _ends_in_turn(kept: list[Item]) -> bool:
    return bool(kept) and is_model_authored(kept[-1])


def _normal_item(item: Item, authored: bool) -> Item | None:
    """One item after all five steps; None if it held nothing but reasoning."""
    if item.keys() <= _PLAIN_KEYS:  # the commonest shapes by far: few rules can apply
        content = item.get("content")
        if type(content) is str and not (authored and "</think>" in content):
            if not item.get("tool_calls"):
                return item
            if content:
                return _with_integral_arguments(item)
        if authored and (content is None or content == "") and item.get("tool_calls"):
            return _with_integral_arguments(_without_content(item))
    kind = item.get("type")
    clean, had_reasoning = _without_volatile(item, kind)
    if isinstance(kind, str) and kind not in _NAMED_TYPES:
        if kind in _CUSTOM_TYPES:
            clean = _as_function_item(clean, _CUSTOM_TYPES[kind])
            authored = is_model_authored(clean)
        elif not _is_message(item):
            return _cleaned_wrapping(item, kind) if _is_wrapped(item, kind) else _wrapped(clean)
    clean, had_thinking = _with_normal_content(clean, authored)
    if authored:
        clean = _with_integral_arguments(clean)
        if (had_reasoning or had_thinking) and _is_empty(clean):
            return None
    return clean


# --- steps 1 and 2: reasoning and volatile keys ----------------------------------------------


def _without_volatile(item: Item, kind: Any) -> tuple[Item, bool]:
    """The item without keys that are dropped anywhere, and whether it carried reasoning."""
    drop_id = _is_server_made(item, kind)
    if not drop_id and _DROPPED_FROM_ITEMS.isdisjoint(item):
        return item, False
    had_reasoning = any(item.get(field) for field in _REASONING_FIELDS)
    dropped = _DROPPED_FROM_ITEMS | {"id"} if drop_id else _DROPPED_FROM_ITEMS
    return {key: value for key, value in item.items() if key not in dropped}, had_reasoning


def _is_server_made(item: Item, kind: Any) -> bool:
    item_id = item.get("id")
    if not isinstance(item_id, str) or not item_id.startswith(_SERVER_MADE_IDS):
        return False
    if kind == "item_reference":
        return False  # there the id is all that is said
    return not (kind == "function_call" and item_id.startswith("fc_") and not item.get("call_id"))


def _clean_blocks(blocks: list[Any]) -> list[Any]:
    """The blocks without thinking and volatile keys; the same list if nothing applies."""
    clean = [
        _clean_block(block)
        for block in blocks
        if not (isinstance(block, dict) and block.get("type") in _REASONING_BLOCKS)
    ]
    same = len(clean) == len(blocks) and all(a is b for a, b in zip(clean, blocks, strict=True))
    return blocks if same else clean


def _clean_block(block: Any) -> Any:
    # An object without type is no content block but data, of which every key counts.
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        return block
    if not _VOLATILE.isdisjoint(block):
        block = {key: value for key, value in block.items() if key not in _VOLATILE}
    inner = block.get("content")
    if isinstance(inner, list):
        clean = _single_text(_clean_blocks(inner))
        if clean is not inner:
            block = {**block, "content": clean}
    if block.get("type") == "tool_use":
        arguments = _integral_arguments(block.get("input"))
        if arguments is not block.get("input"):
            block = {**block, "input": arguments}
    return block


# --- step 3: contents ------------------------------------------------------------------------


def _with_normal_content(item: Item, authored: bool) -> tuple[Item, bool]:
    content = item.get("content")
    normal, had_thinking = content, False
    if isinstance(content, list):
        normal = _clean_blocks(content)
        had_thinking = len(normal) != len(content)
    if authored:
        unfolded = _without_think_tags(normal)
        had_thinking = had_thinking or unfolded is not normal
        normal = unfolded
    if isinstance(normal, list):
        normal = _single_text(normal)
    output = item.get("output")
    clean_output = _clean_blocks(output) if isinstance(output, list) else output
    if item.get("tool_calls") and _is_empty_text(normal):
        item = _without_content(item)
    elif normal is not content:
        item = {**item, "content": normal}
    if clean_output is not output:
        item = {**item, "output": clean_output}
    return item, had_thinking


def _is_empty_text(content: Any) -> bool:
    # Not merely false: 0 and {} are no texts at all, and are refused when hashed.
    return content is None or content == "" or content == []


def _without_content(item: Item) -> Item:
    if "content" not in item:
        return item
    return {key: value for key, value in item.items() if key != "content"}


def _single_text(blocks: list[Any]) -> Any:
    """The string, if the content is one text block; else the list itself."""
    if len(blocks) == 1:
        text = _text_of(blocks[0])
        if text is not None:
            return text
    return blocks


def _text_of(block: Any) -> str | None:
    if isinstance(block, str):
        return block
    if isinstance(block, dict) and (block.get("type") or "") in TEXT_BLOCKS:
        text = block.get("text")
        return text if isinstance(text, str) else None
    return None


def _without_think_tags(content: Any) -> Any:
    """The content without leading ``<think>...</think>`` in its first text; same if none."""
    if isinstance(content, str):
        return _unfolded(content)
    if not isinstance(content, list):
        return content
    for at, block in enumerate(content):
        text = _text_of(block)
        if not text:
            continue
        rest = _unfolded(text)
        if rest is text:
            return content
        if rest:
            first = rest if isinstance(block, str) else {**block, "text": rest}
            return [*content[:at], first, *content[at + 1 :]]
        # Nothing but thoughts: what follows is the first text now.
        return _without_think_tags([*content[:at], *content[at + 1 :]])
    return content


def _unfolded(text: str) -> str:
    while "</think>" in text and (found := _THINK.match(text)):
        text = text[found.end() :]
    return text


def _is_empty(item: Item) -> bool:
    content = item.get("content")
    if item.get("tool_calls") or item.get("type") == "function_call":
        return False
    if isinstance(content, list):
        return all(_text_of(block) == "" for block in content)
    return _is_empty_text(content)


# --- step 4: other typed items ---------------------------------------------------------------


def _as_function_item(item: Item, kind: str) -> Item:
    clean = {key: value for key, value in item.items() if key != "input"}
    clean["type"] = kind
    if kind == "function_call":
        clean["arguments"] = item.get("input")
    return clean


def _is_message(item: Item) -> bool:
    """Whether an item of another type is a message all the same."""
    role = item.get("role")
    if role in SYSTEM_ROLES:
        return True
    return bool(role) and ("content" in item or bool(item.get("tool_calls")))


def _is_wrapped(item: Item, kind: str) -> bool:
    """Whether this is what ``_wrapped`` makes already."""
    content = item.get("content")
    return (
        item.keys() == {"type", "content"}
        and isinstance(content, list)
        and len(content) == 1
        and isinstance(content[0], dict)
        and content[0].get("type") == kind
    )


def _wrapped(item: Item) -> Item:
    content = item.get("content")
    if isinstance(content, list) and (clean := _clean_blocks(content)) is not content:
        item = {**item, "content": clean}
    return {"type": item["type"], "content": [item]}


def _cleaned_wrapping(item: Item, kind: str) -> Item:
    block = item["content"][0]
    again = _wrapped(_without_volatile(block, kind)[0])
    return item if again["content"][0] is block else again


# --- step 5: numbers in tool arguments -------------------------------------------------------


def _with_integral_arguments(item: Item) -> Item:
    if item.get("type") == "function_call":
        arguments = _integral_arguments(item.get("arguments"))
        if arguments is not item.get("arguments"):
            item = {**item, "arguments": arguments}
    calls = item.get("tool_calls")
    if isinstance(calls, list):
        integral = [_with_integral_call(call) for call in calls]
        if any(new is not old for new, old in zip(integral, calls, strict=True)):
            item = {**item, "tool_calls": integral}
    return item


def _with_integral_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = _integral_arguments(function.get("arguments"))
    if arguments is function.get("arguments"):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _integral_arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return _integral(arguments)
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        parsed = parse_json_text(arguments)
    if _integral(parsed) is parsed:
        return arguments
    return _integral(parse_json_text(arguments))  # orjson would round large integers


def _integral(value: Any) -> Any:
    """The value with integral floats below 2**53 as integers; the same object if none."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _EXACT_FLOATS else value
    if isinstance(value, dict):
        changed = {
            key: new
            for key, old in value.items()
            if type(old) not in _LEAVES and (new := _integral(old)) is not old
        }
        return {**value, **changed} if changed else value
    if isinstance(value, list):
        new_list = [_integral(old) for old in value]
        same = all(new is old for new, old in zip(new_list, value, strict=True))
        return value if same else new_list
    return value
