"""The n-gram model as a distribution."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_server.demo.model import ModelState, load_default
from capture_server.demo.tokenizer import TOOL_START, TURN_END

TOKENIZER, MODEL = load_default()
contexts = st.lists(st.integers(0, MODEL.vocab_size - 1), max_size=40)


@settings(max_examples=50)
@given(contexts)
def test_next_logits_is_a_distribution(context: list[int]) -> None:
    """After any context, all log-probs are finite and sum to one."""
    logits = MODEL.next_logits(context)

    assert (MODEL.vocab_size,) == logits.shape
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(np.exp(logits).sum(), 1.0, atol=1e-9)


@settings(max_examples=50)
@given(contexts, contexts)
def test_growing_a_state_equals_starting_with_the_whole(
    prompt: list[int], generated: list[int]
) -> None:
    """The incremental state gives bit for bit what the pure function gives."""
    state = ModelState(MODEL, prompt)
    for token_id in generated:
        state.append(token_id)

    np.testing.assert_array_equal(MODEL.next_logits(prompt + generated), state.logits())


def test_the_whole_prompt_counts() -> None:
    """Two prompts with the same end give different log-probs: no record can be mistaken."""
    tail = TOKENIZER.encode("The harbour town of Verrin wakes")
    one = MODEL.next_logits(TOKENIZER.encode("alpha ") + tail)
    other = MODEL.next_logits(TOKENIZER.encode("beta ") + tail)

    assert not np.array_equal(one, other)


def test_a_turn_ends_after_its_last_word() -> None:
    """The model has learned that a known answer is followed by the end of the turn."""
    text = "<|im_start|>assistant\nThe capital of France is Paris."

    assert int(np.argmax(MODEL.next_logits(TOKENIZER.encode(text)))) == TURN_END


def test_tool_calls_are_likely_only_where_tools_were_mentioned() -> None:
    """A conversation without tools hardly ever starts a call."""
    turn = "<|im_start|>user\nRun the tests.<|im_end|>\n<|im_start|>assistant\n"
    plain = MODEL.next_logits(TOKENIZER.encode(turn))
    with_tools = MODEL.next_logits(TOKENIZER.encode("<tool_call></tool_call>" + turn))

    assert np.exp(plain[TOOL_START]) < 0.01 < 0.1 < np.exp(with_tools[TOOL_START])
