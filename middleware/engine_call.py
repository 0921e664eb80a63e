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
from middleware.env_settings import PrefixSupplyMode
from middleware.errors import PrefixUnavailableError
from middleware.records import TokenIds
from middleware.splice import NoExactPrefixError, require_suppliable

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


@dataclass(slots=True, kw_only=True)
class PrefixSupply:
    """What became of giving a generation the exact tokens of the one that it continues.

    ``given``: the prompt that replaced the rendered one; it starts with ``parent``. ``supplied``:
    the engine's own report says that it was used. ``reason``: why not.
    """

    requested: bool = False
    parent: TokenIds | None = None
    given: TokenIds | None = None
    supplied: bool = False
    reason: str = ""

    def check(self, reported: TokenIds) -> bool:
        """Compare with the prompt that the engine reports; False if it ignored what was given."""
        if self.given is None:
            return True
        used = reported == self.given
        self.supplied = used and self.parent is not None and reported.startswith(self.parent)
        if not self.supplied:
            self.reason = "engine_ignored_it"
        return self.supplied


class Generation:
    """One run of the engine for one prompt."""

    def __init__(self, call: EngineCall, prefix: PrefixSupply) -> None:
        self._call = call
        self.prefix = prefix
        self.prompt: TokenIds | None = None
        self.choices: dict[int, _Choice] = {}

    def cumulative(self) -> TokenIds:
        """Prompt and generation, once it has ended by itself.

        Raises:
            NoExactPrefixError: nothing can be put after it.
        """
        choice = self.choices.get(0)
        if self.prompt is None or choice is None or len(self.choices) > 1:
            raise NoExactPrefixError("no_parent")
        if choice.finish_reason not in ("stop", "length"):
            raise NoExactPrefixError("parent_was_cut")
        return TokenIds.concat(self.prompt, TokenIds.of(choice.ids))

    def note_prompt(self, ids: Any) -> None:
        """The prompt as the engine reports it; later reports change nothing."""
        if self.prompt is None and ids is not None:
            try:
                self.prompt = checked_ids(ids, "prompt_token_ids")
            except AnswerDefect as defect:
                self._call.keep(defect)
                return
            self._call.check_supply(self)

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
        prefix_supply: whether prompts are replaced; ``require`` is about the first generation.
    """

    def __init__(
        self,
        context: CaptureContext,
        content: AnswerContent,
        *,
        choices_per_prompt: int,
        batch: bool,
        prefix_supply: PrefixSupplyMode = "off",
    ) -> None:
        self.context = context
        self._content = content
        self._per_prompt = choices_per_prompt
        self._batch = batch
        self._prefix_supply = prefix_supply
        self._generations: list[Generation] = []
        self._next_prefix = PrefixSupply(requested=context.prefix_requested)
        self.defect: AnswerDefect | None = None
        self.refusal: PrefixUnavailableError | None = None

    # --- the engine's side ---------------------------------------------------------------------

    @property
    def wants_prefix(self) -> bool:
        """Whether the next prompt should start with recorded tokens."""
        return self._next_prefix.requested

    def parent_tokens(self) -> TokenIds:
        """What the next prompt should start with.

        Raises:
            NoExactPrefixError: the link is sound enough to be recorded, not to be supplied.
        """
        if self._generations:
            return self._generations[-1].cumulative()
        return require_suppliable(self.context)

    def begin(self) -> Generation:
        """A generation starts.

        Raises:
            PrefixUnavailableError: a prefix is required, and none could be supplied.
        """
        prefix = self._next_prefix
        if prefix.requested and prefix.given is None:
            self.decline(prefix.reason or "prompt_not_rendered")
        generation = Generation(self, prefix)
        self._generations.append(generation)
        # Another generation behind the same answer continues this one (built-in tools).
        more = self._prefix_supply != "off" and not self._batch
        self._next_prefix = PrefixSupply(requested=more)
        return generation

    def supply(self, parent: TokenIds, prompt: TokenIds) -> None:
        """The engine is about to be given this prompt in place of the rendered one."""
        self._next_prefix.parent, self._next_prefix.given = parent, prompt

    def decline(self, reason: str) -> None:
        """No exact prefix can be given, and why.

        Raises:
            PrefixUnavailableError: one is required, and nothing was generated yet.
        """
        self._next_prefix.reason = reason
        if self._generations:
            return
        self.context.prefix_reason = reason
        if self._prefix_supply == "require":
            self.refusal = PrefixUnavailableError(
                f"no exact prefix can be given to this continuation ({reason}); set "
                "prefix_supply=auto to let such calls drift, or make the agent only append"
            )
            raise self.refusal

    def check_supply(self, generation: Generation) -> None:
        """Only the engine's own report proves that the supplied ids were used."""
        prefix = generation.prefix
        is_used = generation.prompt is not None and prefix.check(generation.prompt)
        if generation is self._generations[0]:
            self.context.prefix_supplied = prefix.supplied
            self.context.prefix_reason = prefix.reason
        if not is_used:
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
        if number:
            prefix = generation.prefix
            extras |= {
                "prefix_requested": prefix.requested,
                "prefix_supplied": prefix.supplied,
                "prefix_reason": prefix.reason or None,
            }
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
