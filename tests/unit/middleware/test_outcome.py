"""middleware.outcome: the table of what becomes of a call."""

from __future__ import annotations

from typing import Any

import pytest

from middleware.dialects.chat import ChatDialect
from middleware.dialects.choices import ChoicesReader
from middleware.engines import engine_profile
from middleware.outcome import Captured, Ending, Hole, Nothing, judge_body, judge_stream


def reader(n: int = 1) -> ChoicesReader:
    return ChatDialect().reader({"n": n}, engine_profile("vllm"))


def piece(
    text: str = "", ids: list[int] | None = None, finish: str | None = None
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    if ids is not None:
        choice |= {"token_ids": ids, "logprobs": {"content": [{"logprob": -0.1}] * len(ids)}}
    return {"choices": [choice], "prompt_token_ids": [1]}


TEXT, END, SILENT = piece("a", [5]), piece("b", [6], "stop"), piece("", [7])
ERROR: dict[str, Any] = {"error": {"message": "x"}}
BLIND = piece("a")  # text without ids


@pytest.mark.parametrize(
    ("payloads", "ending", "done", "expected"),
    [
        ([TEXT, END], Ending.CLEAN, True, ("whole", None)),
        ([TEXT, END], Ending.CLEAN, False, ("whole", None)),
        ([TEXT, END], Ending.RESET, True, ("whole", None)),
        ([TEXT, END], Ending.RESET, False, ("whole", False)),
        ([TEXT, END], Ending.CLIENT_GONE, False, ("whole", False)),
        ([TEXT], Ending.CLEAN, True, ("truncated", False)),
        ([TEXT], Ending.CLEAN, False, ("truncated", False)),
        ([TEXT], Ending.RESET, False, ("upstream_error", False)),
        ([TEXT], Ending.CLIENT_GONE, False, ("client_disconnect", False)),
        ([SILENT], Ending.CLIENT_GONE, False, ("client_disconnect", False)),
        ([TEXT, ERROR], Ending.CLEAN, True, ("upstream_error", False)),
        ([TEXT, ERROR, END], Ending.CLEAN, True, ("upstream_error", False)),
        ([], Ending.CLEAN, True, "truncated"),
        ([], Ending.RESET, False, "upstream_error"),
        ([], Ending.CLIENT_GONE, False, "client_disconnect"),
        ([ERROR], Ending.CLEAN, True, "upstream_error"),
        ([BLIND], Ending.CLIENT_GONE, False, Hole),
        ([BLIND, piece("", None, "stop")], Ending.CLEAN, True, Hole),
        ([piece("", None, "stop")], Ending.CLEAN, True, ("whole", None)),  # an empty generation
    ],
)
def test_streams(payloads: list[Any], ending: Ending, done: bool, expected: Any) -> None:
    """An entry if everything whose text went out was seen, else a hole; nothing if no text did."""
    subject = reader()
    for payload in payloads:
        subject.feed(payload)

    outcome = judge_stream(subject, ending, done_seen=done)

    match outcome:
        case Captured(whole=True):
            assert ("whole", outcome.delivered) == expected
        case Captured():
            assert (outcome.cut, outcome.delivered) == expected
        case Nothing():
            assert outcome.reason == expected
        case Hole():
            assert (expected, outcome.code) == (Hole, "missing_token_ids")


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (ERROR, "error_answer"),
        ({"object": "error", "message": "x"}, "error_answer"),
        ({"choices": []}, "no_model_text"),
        ({"choices": None}, "no_model_text"),
        ([], Hole),
        ({"choices": [{"message": {"content": "text"}, "finish_reason": "stop"}]}, Hole),
    ],
)
def test_whole_answers(payload: Any, expected: Any) -> None:
    """A 2xx without model text cancels; model text without tokens is a hole."""
    outcome = judge_body(payload, reader())

    if expected is Hole:
        assert isinstance(outcome, Hole)
    else:
        assert outcome == Nothing(expected)


def test_one_choice_without_tokens_beside_one_with_tokens_is_a_hole() -> None:
    """The sum over choices must not hide that one of them lost its tokens."""
    subject = reader(2)
    good = END["choices"][0] | {"message": {"content": "a"}}
    blind = {"index": 1, "message": {"content": "b"}, "finish_reason": "stop"}

    outcome = judge_body({"choices": [good, blind], "prompt_token_ids": [1]}, subject)

    assert isinstance(outcome, Hole)


def test_text_without_ids_in_the_middle_of_a_stream_is_a_hole() -> None:
    """Also when other chunks carry ids and no usage is given."""
    subject = reader()
    for payload in (TEXT, BLIND, END):
        subject.feed(payload)

    assert isinstance(judge_stream(subject, Ending.CLEAN, done_seen=True), Hole)
