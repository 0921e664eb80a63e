"""Reads OpenAI-shaped answers (``choices``), whole or chunk by chunk, into an ``Answer``.

Invariant: what ``answer()`` returns is exactly what the engine reported; anything that does not
add up (counts, types, missing arrays) is an ``AnswerDefect``, never padded, cut or guessed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from middleware.dialects.base import Answer, ChoiceAnswer
from middleware.dialects.choices_content import ContentAssembler, ShownAnswer, ShownChoice
from middleware.engines.base import (
    AnswerDefect,
    EngineProfile,
    TokenBundle,
    checked_ids,
    checked_log_probs,
)
from middleware.records import TokenIds, strip_token_fields

_NUMBERS: Final = frozenset((int, float))


class _ChoiceState(ShownChoice):
    """Tokens and content of one choice so far."""

    __slots__ = ("ids", "log_probs", "prompt", "reported", "routed_experts")

    def __init__(self, content: ContentAssembler) -> None:
        super().__init__(content)
        self.ids = array("q")
        self.log_probs = array("d")
        self.prompt: TokenIds | None = None
        self.reported = False  # the engine reported ids, be they none
        self.routed_experts: Any = None

    def add_tokens(self, bundle: TokenBundle) -> None:
        ids = bundle.ids or []
        log_probs = bundle.log_probs or []
        if len(ids) != len(log_probs):
            if not log_probs:
                raise AnswerDefect("missing_log_probs", f"{len(ids)} token ids, no log-probs")
            if not ids:
                raise AnswerDefect("missing_token_ids", f"{len(log_probs)} log-probs, no token ids")
            raise AnswerDefect(
                "length_mismatch", f"{len(ids)} token ids but {len(log_probs)} log-probs"
            )
        if not ids:
            return
        if set(map(type, ids)) != {int}:
            raise AnswerDefect("invalid_token_ids", "a token id is not an integer")
        try:
            self.ids.extend(ids)
        except OverflowError as error:
            raise AnswerDefect("invalid_token_ids", "a token id is out of range") from error
        if not set(map(type, log_probs)) <= _NUMBERS:
            raise AnswerDefect("non_finite_log_probs", "a log-prob is null or not a number")
        self.log_probs.extend(log_probs)


class ChoicesReader(ShownAnswer[_ChoiceState]):
    """Collects one answer. Feed it every parsed payload, then ask for the ``answer``.

    Defects are kept until then, not raised.
    """

    refusal: Final = None  # see ``AnswerReader``: an engine behind HTTP refuses for itself

    def __init__(
        self,
        dialect: str,
        profile: EngineProfile,
        content: Callable[[], ContentAssembler],
        *,
        num_choices: int,
        choices_per_prompt: int,
        echo: bool,
    ) -> None:
        super().__init__(lambda: _ChoiceState(content()), num_choices=num_choices)
        self._dialect = dialect
        self._profile = profile
        self._per_prompt = max(1, choices_per_prompt)
        self._echo = echo
        self.num_tokens = 0
        self._unbacked = False
        self.defect: AnswerDefect | None = None

    def _take(
        self,
        state: _ChoiceState,
        payload: Mapping[str, Any],
        choice: Mapping[str, Any],
        *,
        visible: bool,
    ) -> None:
        try:
            bundle = self._profile.read(self._dialect, payload, choice, echo=self._echo)
            if bundle.prompt is not None:
                self._note_prompt(state, bundle.prompt)
            before = len(state.ids)
            state.add_tokens(bundle)
            self.num_tokens += len(state.ids) - before
            # echo sends the prompt's text before the first generated token.
            if visible and not bundle.ids and (state.ids or not self._echo):
                finish = choice.get("finish_reason")
                detail = "a chunk has text but no token ids"
                # A stop string can leave text for the last chunk: there the count decides.
                self._unbacked = self._unbacked or bool(finish)
                if not finish:
                    self._keep(AnswerDefect("missing_token_ids", detail))
            state.reported = state.reported or bundle.ids is not None
            if bundle.routed_experts is not None:
                state.routed_experts = bundle.routed_experts
        except AnswerDefect as defect:
            self._keep(defect)

    def _note_odd(self, code: str, detail: str) -> None:
        self._keep(AnswerDefect(code, detail))

    def _note_prompt(self, state: _ChoiceState, prompt: list[Any]) -> None:
        ids = checked_ids(prompt, "prompt_token_ids")
        if state.prompt is not None and state.prompt != ids:
            raise AnswerDefect("conflicting_prompt_token_ids", "reported twice, differently")
        state.prompt = ids

    def _keep(self, defect: AnswerDefect) -> None:
        self.defect = self.defect or defect

    def answer(self) -> Answer:
        """The answer so far, checked.

        Raises:
            AnswerDefect: what the client may have seen cannot be recorded exactly.
        """
        if self.defect is not None:
            raise self.defect
        for index, choice in self._choices.items():
            if choice.visible and not choice.ids and not (self._echo and choice.reported):
                raise AnswerDefect("missing_token_ids", f"choice {index} has text but no token ids")
        self._check_usage()
        return Answer(
            choices=[self._choice_answer(index) for index in sorted(self._choices)],
            response_id=self.response_id,
            model=self.model,
            usage=self.usage,
        )

    def _choice_answer(self, index: int) -> ChoiceAnswer:
        state = self._choices[index]
        prompt = self._prompt_of(index)
        if prompt is None:
            raise AnswerDefect("missing_prompt_token_ids", f"choice {index} has no prompt ids")
        items, token_item = strip_token_fields(state.content.output_items())
        return ChoiceAnswer(
            index=index,
            prompt_token_ids=prompt,
            token_ids=checked_ids(np.array(state.ids, dtype=np.int64), "token_ids"),
            log_probs=checked_log_probs(np.array(state.log_probs, dtype=np.float64)),
            output_items=items,
            token_item_index=token_item if token_item is not None or not items else len(items) - 1,
            finish_reason=state.finish_reason,
            routed_experts=state.routed_experts,
        )

    def _prompt_of(self, index: int) -> TokenIds | None:
        """A choice's prompt ids; choices of one prompt share a report."""
        own = self._choices[index].prompt
        if own is not None:
            return own
        group = index // self._per_prompt
        for other, state in self._choices.items():
            if other // self._per_prompt == group and state.prompt is not None:
                return state.prompt
        return None

    def _check_usage(self) -> None:
        if self.usage is None or not (self._usage_is_total or self._num_choices == 1):
            if self._unbacked:
                raise AnswerDefect("missing_token_ids", "the last chunk's text has no token ids")
            return
        counted = self.usage.get("completion_tokens")
        if isinstance(counted, int) and counted != self.num_tokens:
            raise AnswerDefect(
                "usage_mismatch", f"usage says {counted} generated tokens, seen {self.num_tokens}"
            )
        prompts = {index // self._per_prompt: self._prompt_of(index) for index in self._choices}
        counted = self.usage.get("prompt_tokens")
        seen = sum(len(prompt) for prompt in prompts.values() if prompt is not None)
        known = bool(prompts) and None not in prompts.values()
        if known and isinstance(counted, int) and counted != seen:
            raise AnswerDefect("usage_mismatch", f"usage says {counted} prompt tokens, seen {seen}")


def openai_error(status: int, code: str, message: str) -> dict[str, Any]:
    """The OpenAI error shape, as vLLM answers it, with our machine-readable ``code``."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
