"""One choice, token by token: ends, stop strings, records, drift."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from capture_server.demo.engine import DemoEngine
from capture_server.demo.generation import Generation, Step
from capture_server.demo.sampling import SamplingParams
from capture_server.demo.schema import json_grammar
from capture_server.demo.template import render
from capture_server.demo.tokenizer import NUM_SPECIAL, TURN_END

ENGINE = DemoEngine(max_model_len=512)
ENCODE = ENGINE.tokenizer.encode
PROMPT = ENCODE(render([{"role": "user", "content": "Tell me a short story."}]))


def generation(prompt: list[int] = PROMPT, grammar: Any = None, **params: Any) -> Generation:
    settings = SamplingParams(**{"max_tokens": 60, "seed": 1, **params})
    ids = np.asarray(prompt, dtype=np.int64)
    return Generation(ENGINE.machinery, ids, settings, index=0, choice=0, grammar=grammar)


def finished(one: Generation) -> list[Step]:
    steps = [one.step()]
    while steps[-1].finish_reason is None:
        steps.append(one.step())
    return steps


def text_of(steps: list[Step]) -> str:
    return "".join(step.text for step in steps)


def forced(text: str) -> dict[str, Any]:
    """Settings under which every token is the one token ``text``."""
    (token_id,) = ENCODE(text)
    return {"logit_bias": {token_id: 100.0}}


def test_a_turn_ends_with_its_end_token() -> None:
    """The end token is in the ids and in the log-probs, not in the text."""
    one = generation(temperature=0.0)
    steps = finished(one)

    assert (steps[-1].finish_reason, steps[-1].stop_reason) == ("stop", None)
    assert one.record.token_ids[-1] == TURN_END
    assert "<|im_end|>" not in text_of(steps)
    assert steps[-1].token_text == "<|im_end|>"


def test_length_and_context_end_a_generation() -> None:
    """``max_tokens`` ends it, and so does the model's context."""
    assert len(finished(generation(max_tokens=7, ignore_eos=True))) == 7
    long_prompt = PROMPT * (500 // len(PROMPT))
    steps = finished(generation(long_prompt, max_tokens=500, ignore_eos=True))

    assert len(long_prompt) + len(steps) == 512
    assert steps[-1].finish_reason == "length"


def test_ignored_end_tokens_are_hidden_and_counted() -> None:
    """With ``ignore_eos`` generation goes on and the end token shows no text."""
    bias = {"logit_bias": {TURN_END: 100.0}}
    steps = finished(generation(max_tokens=3, ignore_eos=True, **bias))

    assert ([s.token_id for s in steps], text_of(steps)) == ([TURN_END] * 3, "")


def test_stop_token_is_reported_and_hidden() -> None:
    """A stop token ends the answer, names itself, and gives no text."""
    token_id = NUM_SPECIAL + ord("L")
    bias = {"logit_bias": {token_id: 100.0}, "stop_token_ids": frozenset({token_id})}
    steps = finished(generation(**bias))

    assert [("stop", token_id, "")] == [(s.finish_reason, s.stop_reason, s.text) for s in steps]


@pytest.mark.parametrize(
    ("settings", "text", "num_tokens"),
    [
        ({"stop": ("LLL",)}, "", 3),
        ({"stop": ("LLL",), "include_stop_str_in_output": True}, "LLL", 3),
        ({"stop": ("LLL",), "min_tokens": 5}, "LL", 5),
        ({"stop": ("LLM",), "max_tokens": 4}, "LLLL", 4),
        ({"stop": ("x", "L")}, "", 1),
    ],
)
def test_stop_strings_cut_text_and_not_ids(
    settings: dict[str, Any], text: str, num_tokens: int
) -> None:
    """Text ends before the stop string (or with it), ids hold all that was sampled."""
    one = generation(**forced("L"), **settings)
    steps = finished(one)

    assert text == text_of(steps)
    assert num_tokens == len(steps) == len(one.record.token_ids)
    expected = None if settings["stop"] == ("LLM",) else ("L" if num_tokens == 1 else "LLL")
    assert expected == steps[-1].stop_reason


def test_text_that_may_begin_a_stop_string_waits() -> None:
    """Nothing of a possible stop string is shown early; what waited comes at the end."""
    steps = finished(generation(**forced("L"), stop=("LLM",), max_tokens=4))

    assert [step.text for step in steps] == ["", "", "L", "LLL"]


def test_streamed_text_is_the_text_of_the_ids() -> None:
    """Without stop strings the pieces are the decoded ids, half characters left out."""
    for seed in range(20):
        one = generation(seed=seed)
        steps = finished(one)
        shown = [i for i in one.record.token_ids if i >= NUM_SPECIAL]
        assert ENGINE.tokenizer.decode(shown).startswith(text_of(steps))


def test_records_hold_what_was_reported() -> None:
    """Ids and log-probs of the record are those of the steps, also when nobody asked."""
    one = generation(seed=3)
    steps = finished(one)

    assert one.record.token_ids.tolist() == [step.token_id for step in steps]
    assert one.record.logprobs.tolist() == [step.logprob for step in steps]
    assert one.record.finish_reason == steps[-1].finish_reason


def test_logprobs_can_be_computed_again_from_the_ids() -> None:
    """Raw log-probs equal the model's own for the recorded prompt and ids."""
    one = generation(seed=4, temperature=0.7)
    finished(one)

    again = ENGINE.logprob_of(one.record.prompt_ids.tolist(), one.record.token_ids.tolist())

    assert again == one.record.logprobs.tolist()


def test_abort_ends_with_the_next_token() -> None:
    """An aborted generation reports one more token and its reason."""
    one = generation(ignore_eos=True)
    one.step()
    one.abort()

    assert one.step().finish_reason == "abort"


def test_cancel_marks_only_what_still_runs() -> None:
    """A client that left is on record, a finished answer stays finished."""
    running, done = generation(), generation(max_tokens=1)
    finished(done)
    for one in (running, done):
        one.cancel()

    assert (running.record.finish_reason, done.record.finish_reason) == ("cancelled", "length")


def test_a_guided_answer_follows_its_grammar() -> None:
    """Under a grammar the text is of the schema, forced tokens have log-prob 0."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    one = generation(grammar=json_grammar(schema), ignore_eos=True)
    steps = finished(one)

    assert text_of(steps).startswith('{"n":')
    assert steps[-1].token_id == TURN_END
    assert one.record.guided
    assert 0.0 in one.record.logprobs
    assert min(one.record.logprobs) < -0.01


def test_sampled_answers_drift() -> None:
    """For some seed the answer's text encodes to other ids than were sampled.

    The next turn's prompt is then no longer the previous prompt and answer, token by token.
    """
    for seed in range(60):
        one = generation(seed=seed)
        text = text_of(finished(one))
        sampled = one.record.token_ids.tolist()
        if sampled[-1] != TURN_END or min(sampled[:-1]) < NUM_SPECIAL:
            continue  # cut short, or with a hidden marker: another text, not another spelling
        turns = [{"role": "user", "content": "Tell me a short story."}]
        turns += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
        following = ENCODE(render(turns))
        cumulative = PROMPT + sampled
        if following[: len(cumulative)] != cumulative:
            assert ENGINE.tokenizer.decode(following).startswith(
                ENGINE.tokenizer.decode(cumulative)
            )
            return
    pytest.fail("no seed drifted")
