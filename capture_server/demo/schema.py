"""Simple JSON schemas and tool choices as grammars.

Covers what agents' tools use: objects, arrays, strings (enum, const, length), integers, numbers,
booleans, null, anyOf/oneOf, and unions of types. Patterns, formats and references are not
enforced; a schema that says nothing allows one short JSON value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from capture_server.demo.grammar import Fragment, Grammar, GrammarBuilder
from capture_server.demo.tokenizer import TOOL_END, TOOL_START, TURN_END

_MAX_STRING_CHARS = 24
_MAX_ARRAY_ITEMS = 4
_MAX_DIGITS = 6
_MAX_LISTED_INTEGERS = 256
_MAX_DEPTH = 6
_ANYTHING = ("string", "integer", "boolean", "null")


def tool_calls_grammar(tools: Sequence[Mapping[str, Any]], *, many: bool) -> Grammar:
    """One call of any of ``tools`` (or several, if ``many``), then the end of the turn.

    ``tools`` are the ``function`` objects of the request: ``{"name", "parameters"}``.
    """
    return _tool_calls_grammar(json.dumps(list(tools)), many=many)


def json_grammar(schema: Mapping[str, Any]) -> Grammar:
    """One JSON value of the schema, then the end of the turn."""
    return _json_grammar(json.dumps(schema))


# Requests of one agent repeat their tools: the automaton and its token masks are kept.
@lru_cache(maxsize=64)
def _tool_calls_grammar(tools_json: str, *, many: bool) -> Grammar:
    b = GrammarBuilder()
    call = b.choice([_call(b, tool) for tool in json.loads(tools_json)])
    calls = b.one_or_more(b.sequence([call, b.optional(b.literal("\n"))])) if many else call
    return b.build(b.sequence([calls, b.special(TURN_END)]))


@lru_cache(maxsize=64)
def _json_grammar(schema_json: str) -> Grammar:
    b = GrammarBuilder()
    return b.build(b.sequence([_value(b, json.loads(schema_json), 0), b.special(TURN_END)]))


def _call(b: GrammarBuilder, tool: Mapping[str, Any]) -> Fragment:
    parameters = tool.get("parameters")
    schema = parameters if isinstance(parameters, Mapping) and parameters else {"type": "object"}
    return b.sequence(
        [
            b.special(TOOL_START),
            b.literal('\n{"name": ' + json.dumps(str(tool["name"])) + ', "arguments": '),
            _value(b, schema, 0),
            b.literal("}\n"),
            b.special(TOOL_END),
        ]
    )


def _value(b: GrammarBuilder, schema: Mapping[str, Any], depth: int) -> Fragment:
    if "const" in schema:
        return b.literal(_dump(schema["const"]))
    if schema.get("enum"):
        return b.choice([b.literal(_dump(value)) for value in schema["enum"]])
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if options and depth < _MAX_DEPTH:
            return b.choice([_value(b, option, depth + 1) for option in options])
    kind = schema.get("type", "object" if "properties" in schema else _ANYTHING)
    kinds = [kind] if isinstance(kind, str) else list(kind)
    return b.choice([_typed(b, one, schema, depth) for one in kinds])


def _typed(b: GrammarBuilder, kind: str, schema: Mapping[str, Any], depth: int) -> Fragment:
    if kind == "string":
        return _string(b, schema)
    if kind == "integer":
        return _integer(b, schema)
    if kind == "number":
        return b.sequence(
            [_integer(b, schema), b.optional(b.sequence([b.literal("."), b.bytes_in(_DIGIT)]))]
        )
    if kind == "boolean":
        return b.choice([b.literal("true"), b.literal("false")])
    if kind == "array":
        return _array(b, schema, depth)
    if kind == "object":
        return _object(b, schema, depth)
    return b.literal("null")


_DIGIT = (0x30, 0x39)


def _integer(b: GrammarBuilder, schema: Mapping[str, Any]) -> Fragment:
    low, high = schema.get("minimum"), schema.get("maximum")
    if isinstance(low, int) and isinstance(high, int) and high - low < _MAX_LISTED_INTEGERS:
        return b.choice([b.literal(str(value)) for value in range(low, max(low, high) + 1)])
    more = b.repeat([b.bytes_in(_DIGIT) for _ in range(_MAX_DIGITS - 1)], 0)
    positive = b.sequence([b.bytes_in((0x31, 0x39)), more])
    parts = [positive] if isinstance(low, int) and low > 0 else [b.literal("0"), positive]
    digits = b.choice(parts)
    if isinstance(low, int) and low >= 0:
        return digits
    return b.sequence([b.optional(b.literal("-")), digits])


def _string(b: GrammarBuilder, schema: Mapping[str, Any]) -> Fragment:
    minimum = int(schema.get("minLength", 0))
    maximum = max(min(int(schema.get("maxLength", _MAX_STRING_CHARS)), _MAX_STRING_CHARS), minimum)
    chars = [_character(b) for _ in range(maximum)]
    return b.sequence([b.literal('"'), b.repeat(chars, minimum), b.literal('"')])


def _character(b: GrammarBuilder) -> Fragment:
    """One printable character in valid UTF-8, no quote and no backslash."""
    tail = (0x80, 0xBF)
    return b.choice(
        [
            b.bytes_in((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E)),
            b.sequence([b.bytes_in((0xC3, 0xDF)), b.bytes_in(tail)]),
            b.sequence([b.bytes_in((0xE1, 0xEC)), b.bytes_in(tail), b.bytes_in(tail)]),
        ]
    )


def _array(b: GrammarBuilder, schema: Mapping[str, Any], depth: int) -> Fragment:
    items = schema.get("items")
    item_schema = items if isinstance(items, Mapping) and depth < _MAX_DEPTH else {"type": "null"}
    minimum = int(schema.get("minItems", 0))
    maximum = max(min(int(schema.get("maxItems", _MAX_ARRAY_ITEMS)), _MAX_ARRAY_ITEMS), minimum)
    if maximum == 0:
        return b.literal("[]")
    first = _value(b, item_schema, depth + 1)
    others = [
        b.sequence([b.literal(", "), _value(b, item_schema, depth + 1)]) for _ in range(maximum - 1)
    ]
    filled = b.sequence([first, b.repeat(others, max(minimum - 1, 0))])
    return b.sequence([b.literal("["), filled if minimum else b.optional(filled), b.literal("]")])


def _object(b: GrammarBuilder, schema: Mapping[str, Any], depth: int) -> Fragment:
    """Required properties in the order declared; all of them when none is required."""
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = schema.get("required") or list(properties)
    names = [name for name in properties if name in required] if depth < _MAX_DEPTH else []
    parts = [b.literal("{")]
    for at, name in enumerate(names):
        parts.append(b.literal((", " if at else "") + _dump(name) + ":"))
        # Both spacings are legal JSON; a client that re-serialises the arguments keeps one.
        parts.append(b.optional(b.literal(" ")))
        parts.append(_value(b, properties[name], depth + 1))
    return b.sequence([*parts, b.literal("}")])


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
