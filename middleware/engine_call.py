"""One captured request at the engine's own boundary: what it generates, and what the client sees.

The engine's side feeds token ids and log-probs (``Generation``), the HTTP side feeds the answer's
content; both meet in ``answer``. Knows no engine: an adapter such as ``middleware.vllm`` calls in.

Invariant: nothing that an adapter feeds can fail the model call; what does not add up is kept as
a defect and makes the rollout incomplete.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from middleware.context import CaptureContext
from middleware.dialects.base import Answer, AnswerContent, ChoiceAnswer
from middleware.engines.base import AnswerDefect, checked_ids, checked_log_probs
from middleware.errors import PrefixUnavailableError
from middleware.records import TokenIds

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one engine output says about one choice.

    ``ids`` and ``log_probs`` are parallel. ``replaces``: they are all tokens so far, not only
    the new ones. ``finish_reason`` is the engine's, "" while the choice goes on.
    """

    index: int
    ids: Sequence[int]
    log_probs: Sequence[float] | None
    replaces: bool
    finish_reason: str = ""
    routed_experts: Any = None
    extras: Mapping[str, Any] = field(default_factory=dict)


class _Choice:
    __slots__ = ("extras", "finish_reason", "ids", "log_probs", "routed_experts")

    def __init__(self) -> None:
        self.ids = array("q")
        self.log_probs = array("d")
        self.finish_reason = ""
        self.routed_experts: Any = None
        self.extras: dict[str, Any] = {}


class Generation:
    """One run of the engine for one prompt."""

    def __init__(self, call: EngineCall) -> None:
        self._call = call
        self.prompt: TokenIds | None = None
        self.choices: dict[int, _Choice] = {}

    def note_prompt(self, ids: Any) -> None:
        """The prompt as the engine reports it; later reports change nothing."""
        if self.prompt is None and ids is not None:
            try:
                self.prompt = checked_ids(ids, "prompt_token_ids")
            except AnswerDefect as defect:
                self._call.keep(defect)
                return
            self._call.check_supply(self.prompt)

    def note(self, piece: Piece) -> None:
        """Take the tokens of one choice."""
        choice = self.choices.setdefault(piece.index, _Choice())
        if piece.log_probs is None and piece.ids:
            self._call.keep(AnswerDefect("missing_log_probs", f"{len(piece.ids)} ids without"))
            return
        log_probs = piece.log_probs or ()
        if len(piece.ids) != len(log_probs):
            self._call.keep(
                AnswerDefect("length_mismatch", f"{len(piece.ids)} ids, {len(log_probs)} log-probs")
            )
            return
        if piece.replaces:
            choice.ids, choice.log_probs = array("q", piece.ids), array("d", log_probs)
        else:
            choice.ids.extend(piece.ids)
            choice.log_probs.extend(log_probs)
        choice.finish_reason = piece.finish_reason or choice.finish_reason
        if piece.routed_experts is not None:
            choice.routed_experts = piece.routed_experts
        choice.extras.update(piece.extras)

    def note_failure(self, error: Exception) -> None:
        """The adapter could not read an output: its tokens are lost."""
        self._call.keep(AnswerDefect("unreadable_output", f"{type(error).__name__}: {error}"))

    @property
    def num_tokens(self) -> int:
        """Generated tokens so far, of all choices."""
        return sum(len(choice.ids) for choice in self.choices.values())


class EngineCall:
    """Watches one call; see ``middleware.dialects.base.AnswerReader`` for the HTTP side.

    Args:
        context: the call; learns how the engine sampled and whether a prefix was supplied.
        content: reads what the client is told.
        choices_per_prompt: where one request holds several prompts, choices come prompt-major.
        batch: several generations of this request are several prompts, not turns of one answer.
    """

    def __init__(
        self,
        context: CaptureContext,
        content: AnswerContent,
        *,
        choices_per_prompt: int,
        batch: bool,
        require_prefix: bool = False,
    ) -> None:
        self.context = context
        self._content = content
        self._per_prompt = choices_per_prompt
        self._batch = batch
        self._require_prefix = require_prefix
        self._generations: list[Generation] = []
        self._supplied: TokenIds | None = None
        self.defect: AnswerDefect | None = None
        self.refusal: PrefixUnavailableError | None = None

    # --- the engine's side ---------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether the engine was asked to generate."""
        return bool(self._generations)

    def begin(self) -> Generation:
        """A generation starts.

        Raises:
            PrefixUnavailableError: a prefix is required, and none could be supplied.
        """
        if not self._generations and self.context.prefix_requested and self._supplied is None:
            self.decline(self.context.prefix_reason or "prompt_not_rendered")
        generation = Generation(self)
        self._generations.append(generation)
        return generation

    def supply(self, prompt: TokenIds) -> None:
        """The engine is about to be given this prompt in place of the rendered one."""
        self._supplied = prompt

    def decline(self, reason: str) -> None:
        """No exact prefix can be given, and why.

        Raises:
            PrefixUnavailableError: one is required.
        """
        self.context.prefix_reason = reason
        if self._require_prefix:
            self.refusal = PrefixUnavailableError(
                f"no exact prefix can be given to this continuation ({reason}); set "
                "prefix_supply=auto to let such calls drift, or make the agent only append"
            )
            raise self.refusal

    def check_supply(self, reported: TokenIds) -> None:
        """Only the engine's own report proves that the supplied ids were used."""
        if self._supplied is None or len(self._generations) != 1:
            return
        parent = self.context.parent_tokens
        used = reported == self._supplied
        self.context.prefix_supplied = used and parent is not None and reported.startswith(parent)
        if not self.context.prefix_supplied:
            self.context.prefix_reason = "engine_ignored_it"
            logger.error(
                "the engine did not use the prompt it was given",
                extra={
                    "action": "prefix_ignored",
                    "rollout_id": self.context.rollout_id,
                    "model_call_id": self.context.model_call_id,
                },
            )

    def keep(self, defect: AnswerDefect) -> None:
        """Remember the first thing that does not add up."""
        self.defect = self.defect or defect

    # --- the client's side ---------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """See ``AnswerReader``."""
        return sum(generation.num_tokens for generation in self._generations)

    @property
    def saw_text(self) -> bool:
        """See ``AnswerReader``."""
        return self._content.saw_text

    @property
    def error_seen(self) -> bool:
        """See ``AnswerReader``."""
        return self._content.error_seen

    @property
    def complete(self) -> bool:
        """See ``AnswerReader``."""
        return self._content.complete

    @property
    def all_finished(self) -> bool:
        """See ``AnswerReader``."""
        return self._content.all_finished

    def feed(self, payload: Mapping[str, Any]) -> None:
        """See ``AnswerReader``."""
        self._content.feed(payload)

    def feed_whole(self, payload: Mapping[str, Any]) -> bool:
        """See ``AnswerReader``."""
        return self._content.feed_whole(payload)

    def answer(self) -> Answer:
        """See ``AnswerReader``."""
        if self.defect is not None:
            raise self.defect
        if self._content.saw_text and not self.num_tokens:
            raise AnswerDefect("missing_token_ids", "there is text, and the engine was not seen")
        counted = self._content.generated
        if self._content.complete and counted is not None and counted != self.num_tokens:
            raise AnswerDefect("usage_mismatch", f"usage says {counted}, seen {self.num_tokens}")
        return Answer(
            choices=self._choice_answers(),
            response_id=self._content.response_id,
            model=self._content.model,
            usage=self._content.usage,
        )

    def _choice_answers(self) -> list[ChoiceAnswer]:
        several_turns = len(self._generations) > 1 and not self._batch
        answers: list[ChoiceAnswer] = []
        for number, generation in enumerate(self._generations):
            if generation.prompt is None and generation.choices:
                raise AnswerDefect("missing_prompt_token_ids", "the engine reported no prompt ids")
            for index, choice in sorted(generation.choices.items()):
                if several_turns:
                    answers.append(self._turn(generation, choice, number))
                else:
                    shown_as = number * self._per_prompt + index
                    answers.append(self._choice(generation, choice, shown_as))
        return answers

    def _choice(self, generation: Generation, choice: _Choice, index: int) -> ChoiceAnswer:
        if self._content.is_visible(index) and not choice.ids:
            raise AnswerDefect("missing_token_ids", f"choice {index} has text but no token ids")
        items = self._content.output_items(index)
        # What the client was not told is not finished for it, whatever the engine says.
        finish_reason = choice.finish_reason if self._content.is_finished(index) else ""
        return _answer_of(generation, choice, index, items, finish_reason, choice.extras)

    def _turn(self, generation: Generation, choice: _Choice, number: int) -> ChoiceAnswer:
        """One of several generations behind one answer (built-in tools); the last one ends it."""
        is_last = number == len(self._generations) - 1
        items = self._content.output_items(0) if is_last else []
        finish_reason = choice.finish_reason
        if is_last and not self._content.complete:
            finish_reason = ""
        extras = choice.extras | {"sub_generation": number}
        answer = _answer_of(generation, choice, number, items, finish_reason, extras)
        return replace(answer, continues=number > 0)


def _answer_of(
    generation: Generation,
    choice: _Choice,
    index: int,
    items: list[dict[str, Any]],
    finish_reason: str,
    extras: Mapping[str, Any],
) -> ChoiceAnswer:
    assert generation.prompt is not None  # by _choice_answers
    return ChoiceAnswer(
        index=index,
        prompt_token_ids=generation.prompt,
        token_ids=checked_ids(np.array(choice.ids, dtype=np.int64), "token_ids"),
        log_probs=checked_log_probs(np.array(choice.log_probs, dtype=np.float64)),
        output_items=items,
        token_item_index=len(items) - 1 if items else None,
        finish_reason=finish_reason,
        routed_experts=choice.routed_experts,
        extras=extras,
    )
