"""What becomes of a captured call: a pure decision from what was seen and how it ended.

Three outcomes: an entry (everything whose text went out was seen), nothing (no model text
reached the client: the intent is cancelled), or a hole (the client may hold model text whose
tokens we do not have: the rollout is incomplete). Source: spec 05, "What is a hole?".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from middleware.dialects.base import Answer, AnswerReader
from middleware.engines.base import AnswerDefect


class Ending(StrEnum):
    """How the transport ended, as far as we saw it."""

    CLEAN = "clean"
    RESET = "reset"  # the engine broke off: reset, short body, missing last chunk
    CLIENT_GONE = "client_gone"


@dataclass(frozen=True, slots=True)
class Captured:
    """An entry per choice.

    ``whole`` is False for a call that was cut; ``cut`` is then the finish reason of its
    unfinished choices. ``delivered`` False: known not to have reached the client; None: decided
    when the end was sent.
    """

    answer: Answer
    whole: bool
    cut: str = ""
    delivered: bool | None = None


@dataclass(frozen=True, slots=True)
class Nothing:
    """No model text reached the client; ``reason`` stays on the cancelled intent."""

    reason: str


@dataclass(frozen=True, slots=True)
class Hole:
    """Text may have reached the client without its tokens."""

    code: str
    detail: str = ""


Outcome = Captured | Nothing | Hole


def judge_stream(reader: AnswerReader, ending: Ending, *, done_seen: bool) -> Outcome:
    """Judge an event stream.

    Args:
        reader: fed with every frame that was passed on or held.
        ending: how the stream ended.
        done_seen: ``[DONE]`` arrived; whatever follows it does not count any more.
    """
    if reader.error_seen:
        return _cut(reader, "upstream_error")
    clean = ending is Ending.CLEAN or done_seen
    if reader.complete or (clean and reader.all_finished):
        return _whole(reader, delivered=None if clean else False)
    if ending is Ending.CLIENT_GONE:
        return _cut(reader, "client_disconnect")
    if ending is Ending.RESET and not done_seen:
        return _cut(reader, "upstream_error")
    return _cut(reader, "truncated")


def judge_body(payload: Any, reader: AnswerReader) -> Outcome:
    """Judge a whole 2xx JSON answer (already parsed)."""
    if not isinstance(payload, dict):
        return Hole("unparsable_answer", "the answer is JSON but no object")
    has_place_for_text = reader.feed_whole(payload)
    if reader.error_seen:
        outcome = _cut(reader, "upstream_error")
        return Nothing("error_answer") if isinstance(outcome, Nothing) else outcome
    if not has_place_for_text:
        return Nothing("no_model_text")
    if not reader.all_finished and reader.defect is None:
        return _cut(reader, "truncated")  # never a finished turn without a finish reason
    return _whole(reader, delivered=None)


def _whole(reader: AnswerReader, *, delivered: bool | None) -> Outcome:
    return _captured(reader, "no_generation", whole=True, delivered=delivered)


def _cut(reader: AnswerReader, reason: str) -> Outcome:
    if not reader.num_tokens and not reader.saw_text and reader.defect is None:
        return Nothing(reason)
    return _captured(reader, reason, whole=False, delivered=False)


def _captured(reader: AnswerReader, reason: str, *, whole: bool, delivered: bool | None) -> Outcome:
    try:
        answer = reader.answer()
    except AnswerDefect as defect:
        silent = not reader.num_tokens and not reader.saw_text
        if silent and defect.code == "missing_prompt_token_ids":
            return Nothing(reason)  # no text and no tokens: there is nothing to lose
        return Hole(defect.code, defect.detail)
    return Captured(answer, whole=whole, cut="" if whole else reason, delivered=delivered)
