"""Reads OpenAI-shaped answers (``choices``), whole or chunk by chunk, into an ``Answer``.

Invariant: what ``answer()`` returns is exactly what the engine reported; anything that does not
add up (counts, types, missing arrays) is an ``AnswerDefect``, never padded, cut or guessed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from middleware.dialects.base import Answer, ChoiceAnswer
from middleware.engines.base import (
    AnswerDefect,
    EngineProfile,
    TokenBundle,
    checked_ids,
    checked_log_probs,
)
from middleware.records import TokenIds, strip_token_fields

_NUMBERS: Final = frozenset((int, float))


class ContentAssembler(ABC):
    """Puts the content of one choice together."""

    @abstractmethod
    def add(self, choice: Mapping[str, Any]) -> bool:
        """Take a whole choice or a chunk's; return whether the client sees text in it."""

    @abstractmethod
    def output_items(self) -> list[dict[str, Any]]:
        """The content as Responses-style output items."""


class _ChoiceState:
    """Tokens and content of one choice so far."""

    __slots__ = (
        "content",
        "finish_reason",
        "ids",
        "log_probs",
        "prompt",
        "reported",
        "routed_experts",
        "visible",
    )

    def __init__(self, content: ContentAssembler) -> None:
        self.content = content
        self.ids = array("q")
        self.log_probs = array("d")
        self.prompt: TokenIds | None = None
        self.finish_reason = ""
        self.reported = False  # the engine reported ids, be they none
        self.routed_experts: Any = None
        self.visible = False  # the client saw text of this choice

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


class ChoicesReader:
    """Collects one answer. Feed it every parsed payload, then ask for the ``answer``."""

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
        self._dialect = dialect
        self._profile = profile
        self._content = content
        self._num_choices = num_choices
        self._per_prompt = max(1, choices_per_prompt)
        self._echo = echo
        self._choices: dict[int, _ChoiceState] = {}
        self._usage: dict[str, Any] | None = None
        self._usage_is_total = False
        self.response_id: str | None = None
        self.model = ""
        self.num_tokens = 0
        self.saw_text = False
        self._unbacked = False
        self.error_seen = False
        self.defect: AnswerDefect | None = None

    @property
    def complete(self) -> bool:
        """Every expected choice has its finish reason."""
        return len(self._choices) >= self._num_choices and self.all_finished

    @property
    def all_finished(self) -> bool:
        """Every choice that appeared has its finish reason (some engines ignore ``n``)."""
        choices = self._choices.values()
        return bool(choices) and all(choice.finish_reason for choice in choices)

    def feed(self, payload: Mapping[str, Any]) -> None:
        """Take one chunk, or the whole answer. Defects are kept, not raised."""
        try:
            self._feed(payload)
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            # An engine may say anything; the call is served all the same.
            kind = type(error).__name__
            self._keep(AnswerDefect("unparsable_answer", f"the answer has an odd shape ({kind})"))

    def _feed(self, payload: Mapping[str, Any]) -> None:
        if payload.get("error") or payload.get("object") == "error":
            self.error_seen = True
        if self.response_id is None and isinstance(payload.get("id"), str):
            self.response_id = payload["id"]
        if not self.model and isinstance(payload.get("model"), str):
            self.model = payload["model"]
        choices = payload.get("choices") or []
        if not isinstance(choices, list):
            self._keep(AnswerDefect("unparsable_answer", "choices is no array"))
            choices = []
        self._note_usage(payload.get("usage"), is_total=not choices)
        for position, choice in enumerate(choices):
            if isinstance(choice, dict):
                self._feed_choice(payload, choice, position)
            else:
                self._keep(AnswerDefect("unparsable_answer", "a choice is no object"))

    def feed_whole(self, payload: Mapping[str, Any]) -> bool:
        """``feed`` for a non-streaming answer, whose usage counts all its choices."""
        self.feed(payload)
        if self._usage is not None:
            self._usage_is_total = True
        return bool(payload.get("choices"))

    def _feed_choice(
        self, payload: Mapping[str, Any], choice: Mapping[str, Any], position: int
    ) -> None:
        index = choice.get("index", position)
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            self._keep(AnswerDefect("invalid_choice_index", "a choice's index is no integer >= 0"))
            return
        state = self._choices.get(index)
        if state is None:
            state = self._choices[index] = _ChoiceState(self._content())
        visible = state.content.add(choice)
        state.visible = state.visible or visible
        self.saw_text = self.saw_text or visible
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
        if isinstance(choice.get("finish_reason"), str) and choice["finish_reason"]:
            state.finish_reason = choice["finish_reason"]

    def _note_prompt(self, state: _ChoiceState, prompt: list[Any]) -> None:
        ids = checked_ids(prompt, "prompt_token_ids")
        if state.prompt is not None and state.prompt != ids:
            raise AnswerDefect("conflicting_prompt_token_ids", "reported twice, differently")
        state.prompt = ids

    def _note_usage(self, usage: Any, *, is_total: bool) -> None:
        # continuous_usage_stats puts one choice's running usage on every chunk; the separate
        # last chunk (no choices) has the total.
        if isinstance(usage, dict) and (is_total or not self._usage_is_total):
            self._usage = usage
            self._usage_is_total = is_total

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
            usage=self._usage,
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
        if self._usage is None or not (self._usage_is_total or self._num_choices == 1):
            if self._unbacked:
                raise AnswerDefect("missing_token_ids", "the last chunk's text has no token ids")
            return
        counted = self._usage.get("completion_tokens")
        if isinstance(counted, int) and counted != self.num_tokens:
            raise AnswerDefect(
                "usage_mismatch", f"usage says {counted} generated tokens, seen {self.num_tokens}"
            )
        prompts = {index // self._per_prompt: self._prompt_of(index) for index in self._choices}
        counted = self._usage.get("prompt_tokens")
        seen = sum(len(prompt) for prompt in prompts.values() if prompt is not None)
        known = bool(prompts) and None not in prompts.values()
        if known and isinstance(counted, int) and counted != seen:
            raise AnswerDefect("usage_mismatch", f"usage says {counted} prompt tokens, seen {seen}")


def openai_error(status: int, code: str, message: str) -> dict[str, Any]:
    """The OpenAI error shape, as vLLM answers it, with our machine-readable ``code``."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
