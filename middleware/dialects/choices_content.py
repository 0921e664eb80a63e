"""What an OpenAI-shaped answer (``choices``) tells the client, whole or chunk by chunk.

``ShownAnswer`` reads it. ``ChoicesContent`` is that alone, for calls whose tokens come from the
engine's own boundary; ``choices.ChoicesReader`` also finds the tokens in the answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar


class ContentAssembler(ABC):
    """Puts the content of one choice together."""

    @abstractmethod
    def add(self, choice: Mapping[str, Any]) -> bool:
        """Take a whole choice or a chunk's; return whether the client sees text in it."""

    @abstractmethod
    def output_items(self) -> list[dict[str, Any]]:
        """The content as Responses-style output items."""


class ShownChoice:
    """What the client was told of one choice so far."""

    __slots__ = ("content", "finish_reason", "visible")

    def __init__(self, content: ContentAssembler) -> None:
        self.content = content
        self.finish_reason = ""
        self.visible = False  # the client saw text of this choice


ChoiceT = TypeVar("ChoiceT", bound=ShownChoice)


class ShownAnswer(ABC, Generic[ChoiceT]):
    """The answer so far, by choice. Feed it every parsed payload; nothing that it says raises.

    Args:
        new_choice: what is kept of a choice that appears.
        num_choices: how many a complete answer has.
    """

    def __init__(self, new_choice: Callable[[], ChoiceT], *, num_choices: int) -> None:
        self._new_choice = new_choice
        self._num_choices = num_choices
        self._choices: dict[int, ChoiceT] = {}
        self._usage_is_total = False
        self.usage: dict[str, Any] | None = None
        self.response_id: str | None = None
        self.model = ""
        self.saw_text = False
        self.error_seen = False

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
        """Take one chunk, or the whole answer."""
        try:
            self._feed(payload)
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            # An engine may say anything; the call is served all the same.
            kind = type(error).__name__
            self._note_odd("unparsable_answer", f"the answer has an odd shape ({kind})")

    def feed_whole(self, payload: Mapping[str, Any]) -> bool:
        """``feed`` for a non-streaming answer, whose usage counts all its choices."""
        self.feed(payload)
        if self.usage is not None:
            self._usage_is_total = True
        return bool(payload.get("choices"))

    def _feed(self, payload: Mapping[str, Any]) -> None:
        # Some engines send an empty ``error`` with every chunk.
        if payload.get("error") or payload.get("object") == "error":
            self.error_seen = True
        if self.response_id is None and isinstance(payload.get("id"), str):
            self.response_id = payload["id"]
        if not self.model and isinstance(payload.get("model"), str):
            self.model = payload["model"]
        choices = payload.get("choices") or []
        if not isinstance(choices, list):
            self._note_odd("unparsable_answer", "choices is no array")
            choices = []
        self._note_usage(payload.get("usage"), is_total=not choices)
        for position, choice in enumerate(choices):
            if isinstance(choice, dict):
                self._feed_choice(payload, choice, position)
            else:
                self._note_odd("unparsable_answer", "a choice is no object")

    def _feed_choice(
        self, payload: Mapping[str, Any], choice: Mapping[str, Any], position: int
    ) -> None:
        index = choice.get("index", position)
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            self._note_odd("invalid_choice_index", "a choice's index is no integer >= 0")
            return
        state = self._choices.get(index)
        if state is None:
            state = self._choices[index] = self._new_choice()
        if visible := state.content.add(choice):
            state.visible = self.saw_text = True
        self._take(state, payload, choice, visible=visible)
        if isinstance(choice.get("finish_reason"), str) and choice["finish_reason"]:
            state.finish_reason = choice["finish_reason"]

    def _note_usage(self, usage: Any, *, is_total: bool) -> None:
        # continuous_usage_stats puts one choice's running usage on every chunk; the separate
        # last chunk (no choices) has the total.
        if isinstance(usage, dict) and (is_total or not self._usage_is_total):
            self.usage = usage
            self._usage_is_total = is_total

    @abstractmethod
    def _take(
        self,
        state: ChoiceT,
        payload: Mapping[str, Any],
        choice: Mapping[str, Any],
        *,
        visible: bool,
    ) -> None:
        """More of a choice than its content. ``visible``: the client sees text in this part."""

    @abstractmethod
    def _note_odd(self, code: str, detail: str) -> None:
        """The answer is not shaped as answers are."""


class ChoicesContent(ShownAnswer[ShownChoice]):
    """See ``middleware.dialects.base.AnswerContent``."""

    def __init__(self, content: Callable[[], ContentAssembler], *, num_choices: int) -> None:
        super().__init__(lambda: ShownChoice(content()), num_choices=num_choices)

    @property
    def generated(self) -> int | None:
        """See ``AnswerContent``; a running count is none."""
        counted = self.usage.get("completion_tokens") if self.usage else None
        return counted if self._usage_is_total and isinstance(counted, int) else None

    def is_visible(self, index: int) -> bool:
        """See ``AnswerContent``."""
        return index in self._choices and self._choices[index].visible

    def is_finished(self, index: int) -> bool:
        """See ``AnswerContent``."""
        return index in self._choices and bool(self._choices[index].finish_reason)

    def output_items(self, index: int) -> list[dict[str, Any]]:
        """See ``AnswerContent``."""
        return self._choices[index].content.output_items() if index in self._choices else []

    def _take(
        self,
        state: ShownChoice,
        payload: Mapping[str, Any],
        choice: Mapping[str, Any],
        *,
        visible: bool,
    ) -> None:
        """Nothing: its tokens are read elsewhere."""

    def _note_odd(self, code: str, detail: str) -> None:
        """Nothing: the engine's own report decides what is recorded."""
