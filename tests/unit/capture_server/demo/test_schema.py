"""Constrained decoding: what the grammars of tools and schemas allow."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_server.demo.grammar import Grammar, GrammarBuilder, VocabularyTrie
from capture_server.demo.model import load_default
from capture_server.demo.schema import json_grammar, tool_calls_grammar
from capture_server.demo.tokenizer import TURN_END

TOKENIZER, MODEL = load_default()
TRIE = VocabularyTrie(TOKENIZER)
ALL_KINDS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": -2, "maximum": 9},
        "big": {"type": "integer", "minimum": 0},
        "x": {"type": "number"},
        "ok": {"type": "boolean"},
        "city": {"type": "string"},
        "unit": {"enum": ["°C", "°F", 3]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1},
        "maybe": {"type": ["integer", "null"]},
        "either": {"anyOf": [{"type": "boolean"}, {"const": "no"}]},
        "deep": {"type": "object", "properties": {"a": {"type": "null"}}},
        "any": {},
    },
}


def random_walk(grammar: Grammar, seed: int) -> list[int]:
    """Any allowed token with equal chance: finds holes that a good model would not."""
    rng = np.random.default_rng(seed)
    state, ids = grammar.start, []
    while not grammar.is_complete(state):
        token_id = int(rng.choice(np.flatnonzero(grammar.mask(state, TRIE))))
        ids.append(token_id)
        state = grammar.advance(state, TRIE.symbols(token_id))
    return ids


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_any_allowed_path_is_json_of_the_schema(seed: int) -> None:
    """Whatever allowed tokens are drawn, the answer ends and is JSON with the right types."""
    ids = random_walk(json_grammar(ALL_KINDS), seed)
    value = json.loads(TOKENIZER.decode_bytes(ids[:-1]).decode("utf-8"))

    assert ids[-1] == TURN_END
    assert list(ALL_KINDS["properties"]) == list(value)
    assert -2 <= value["n"] <= 9
    assert value["big"] >= 0
    assert isinstance(value["ok"], bool)
    assert isinstance(value["city"], str)
    assert value["unit"] in ["°C", "°F", 3]
    assert 1 <= len(value["tags"]) <= 4
    assert all(len(tag) <= 4 for tag in value["tags"])
    assert value["maybe"] is None or isinstance(value["maybe"], int)
    assert value["either"] in (True, False, "no")
    assert value["deep"] == {"a": None}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_one_call_is_one_call(seed: int) -> None:
    """With ``many=False`` exactly one call of a known tool comes, then the end of the turn."""
    tools = [{"name": "a"}, {"name": "b", "parameters": ALL_KINDS}]
    text = TOKENIZER.decode(random_walk(tool_calls_grammar(tools, many=False), seed))

    assert text.startswith('<tool_call>\n{"name": "')
    assert text.endswith("}\n</tool_call><|im_end|>")
    assert text.count("</tool_call>") == 1
    call = json.loads(text.split("\n")[1])
    assert call["name"] in ("a", "b")


def test_several_calls_are_possible() -> None:
    """With ``many=True`` some paths hold more than one call."""
    grammar = tool_calls_grammar([{"name": "a"}], many=True)
    texts = [TOKENIZER.decode(random_walk(grammar, seed)) for seed in range(10)]

    assert max(text.count("<tool_call>") for text in texts) > 1


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 9}, ["0", "9"], ["10", "-1", "07", "1.0"]),
        ({"type": "integer"}, ["-3", "120"], ["+1", "007", ""]),
        ({"type": "string"}, ['""', '"aé€"'], ['"', "a", '"\\n"', '"' + "a" * 25 + '"']),
        ({"type": "boolean"}, ["true", "false"], ["True", "null"]),
        ({"type": "array", "items": {"type": "null"}}, ["[]", "[null, null]"], ["[null,]"]),
        (
            {"type": "object", "properties": {"a": {"type": "null"}, "b": {}}, "required": ["a"]},
            ['{"a": null}', '{"a":null}'],
            ["{}", '{"b": 1}'],
        ),
    ],
)
def test_words_of_simple_schemas(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    """The grammar of a schema holds the good words and none of the bad ones."""
    grammar = json_grammar(schema)

    def accepts(word: str) -> bool:
        end = 256 + TURN_END
        return grammar.is_complete(grammar.advance(grammar.start, [*word.encode(), end]))

    assert dict.fromkeys(good, True) == {word: accepts(word) for word in good}
    assert dict.fromkeys(bad, False) == {word: accepts(word) for word in bad}


def test_masks_hold_every_token_that_stays_inside() -> None:
    """The mask equals a plain check of each token (the trie walk against a double loop)."""
    b = GrammarBuilder()
    root = b.choice([b.literal("the harbour"), b.sequence([b.literal("th"), b.special(TURN_END)])])
    grammar = b.build(root)
    state = grammar.start
    for symbol in b"th":
        expected = [
            bool(grammar.advance(state, TRIE.symbols(i))) for i in range(TOKENIZER.vocab_size)
        ]
        assert expected == grammar.mask(state, TRIE).tolist()
        state = grammar.advance(state, [symbol])
    assert grammar.mask(state, TRIE)[TURN_END]
