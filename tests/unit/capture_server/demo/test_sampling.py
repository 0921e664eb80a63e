"""Sampling and the log-probs that are reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from capture_server.demo.sampling import LOGPROB_FLOOR, Floats, Sampled, Sampler, SamplingParams

LOGITS: Floats = np.log(np.array([0.5, 0.25, 0.15, 0.1]))
END = 3


def sampler(choice: int = 0, mode: Any = "raw_logprobs", **params: Any) -> Sampler:
    settings = SamplingParams(**{"max_tokens": 10, "seed": 1, "num_logprobs": 0, **params})
    return Sampler(
        settings,
        choice=choice,
        prompt_ids=np.array([0]),
        vocab_size=4,
        end_id=END,
        mode=mode,
    )


def draws(num: int = 300, **params: Any) -> list[Sampled]:
    drawer = sampler(**params)
    return [drawer.draw(LOGITS, None) for _ in range(num)]


def ids(found: list[Sampled]) -> set[int]:
    return {one.token_id for one in found}


def test_frequencies_follow_the_distribution() -> None:
    """Many draws come close to the probabilities (a wrong index would be far off)."""
    found = [one.token_id for one in draws(4000)]

    shares = np.bincount(found, minlength=4) / len(found)

    np.testing.assert_allclose(shares, np.exp(LOGITS), atol=0.03)


def test_same_seed_same_tokens_other_choice_other_tokens() -> None:
    """A seed fixes the sequence; choices of one request differ; negative seeds work."""
    assert draws(40) == draws(40)
    assert draws(40) != draws(40, choice=1)
    assert draws(40, seed=-5) == draws(40, seed=-5)


def test_choice_k_is_seed_plus_k() -> None:
    """Choice 1 of seed 1 is what choice 0 of seed 2 would have been."""
    assert draws(40, seed=1, choice=1) == draws(40, seed=2)


@pytest.mark.parametrize(
    ("params", "possible"),
    [
        ({"temperature": 0.0}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.4}, {0, 1}),
        ({"logit_bias": {2: 100.0}}, {2}),
        ({"logit_bias": {0: -100.0, 1: -100.0}}, {2, 3}),
        ({"min_tokens": 1000}, {0, 1, 2}),
        ({"min_tokens": 1000, "stop_token_ids": frozenset({0})}, {1, 2}),
    ],
)
def test_what_can_be_drawn(params: dict[str, Any], possible: set[int]) -> None:
    """Each setting leaves exactly its tokens possible."""
    assert possible == ids(draws(**params))


def test_raw_logprobs_ignore_bias_and_temperature() -> None:
    """By default the log-prob is the model's own, whatever was done before drawing."""
    found = draws(5, logit_bias={2: 100.0}, temperature=0.3)

    assert {float(np.float32(LOGITS[2]))} == {one.logprob for one in found}


def test_processed_logprobs_are_those_of_the_distribution_drawn_from() -> None:
    """In processed mode a forced token has log-prob 0, truncated mass is spread again."""
    forced = draws(3, mode="processed_logprobs", logit_bias={2: 100.0})
    halved = draws(50, mode="processed_logprobs", top_k=2)

    assert {0.0} == {one.logprob for one in forced}
    expected = {0: np.log(0.5 / 0.75), 1: np.log(0.25 / 0.75)}
    for one in halved:
        assert one.logprob == pytest.approx(expected[one.token_id], abs=1e-6)


def test_a_mask_counts_in_raw_mode_too() -> None:
    """Under a grammar the reported log-prob is renormalised over what was allowed."""
    mask = np.array([False, True, True, False])
    drawer = sampler()
    found = [drawer.draw(LOGITS, mask) for _ in range(50)]

    assert {1, 2} == ids(found)
    assert {float(np.float32(np.log(0.25 / 0.4)))} == {
        one.logprob for one in found if one.token_id == 1
    }


def test_alternatives_begin_with_the_sampled_token() -> None:
    """The sampled token is first, then the best others, without repeating it."""
    found = draws(1, num_logprobs=2, logit_bias={3: 100.0})[0]

    assert [token_id for token_id, _ in found.top] == [3, 0, 1]
    assert found.logprob == found.top[0][1]


def test_impossible_alternatives_have_the_floor() -> None:
    """Minus infinity never goes over the wire."""
    found = draws(1, mode="processed_logprobs", top_k=1, num_logprobs=-1)[0]

    assert [token_id for token_id, _ in found.top] == [0, 1, 2, 3]
    assert found.top[-1][1] == LOGPROB_FLOOR


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 4.0}],
)
def test_penalties_spread_the_choice(penalty: dict[str, float]) -> None:
    """Greedy decoding without a penalty repeats one token; with one it moves on."""
    assert {0} == ids(draws(6, temperature=0.0))
    assert len(ids(draws(6, temperature=0.0, **penalty))) > 1
