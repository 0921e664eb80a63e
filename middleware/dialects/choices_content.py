"""What an OpenAI-shaped answer (``choices``) tells the client, without its tokens.

The twin of ``ChoicesReader`` for calls whose tokens come from the engine's own boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from middleware.dialects.choices import ContentAssembler


class _Choice:
    __slots__ = ("content", "finished", "visible")

    def __init__(self, content: ContentAssembler) -> None:
        self.content = content
        self.finished = False
        self.visible = False


class ChoicesContent:
    """See ``middleware.dialects.base.AnswerContent``."""

    def __init__(self, content: Callable[[], ContentAssembler], *, num_choices: int) -> None:
        self._content = content
        self._num_choices = num_choices
        self._choices: dict[int, _Choice] = {}
        self.response_id: str | None = None
        self.model = ""
        self.usage: dict[str, Any] | None = None
        self.generated: int | None = None
        self.error_seen = False
        self.saw_text = False

    @property
    def complete(self) -> bool:
        """Every expected choice has its finish reason."""
        return len(self._choices) >= self._num_choices and self.all_finished

    @property
    def all_finished(self) -> bool:
        """Every choice that appeared has its finish reason."""
        choices = self._choices.values()
        return bool(choices) and all(choice.finished for choice in choices)

    def feed(self, payload: Mapping[str, Any]) -> None:
        """Take one chunk."""
        if payload.get("error") is not None or payload.get("object") == "error":
            self.error_seen = True
            return
        if self.response_id is None and isinstance(payload.get("id"), str):
            self.response_id = payload["id"]
        if not self.model and isinstance(payload.get("model"), str):
            self.model = payload["model"]
        choices = payload.get("choices")
        for position, choice in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(choice, dict):
                self._feed_choice(choice, position)
        # With choices it is one choice's running count (continuous_usage_stats).
        if not choices:
            self._note_usage(payload.get("usage"))

    def feed_whole(self, payload: Mapping[str, Any]) -> bool:
        """Take a whole answer."""
        self.feed(payload)
        self._note_usage(payload.get("usage"))
        return bool(payload.get("choices"))

    def _feed_choice(self, choice: Mapping[str, Any], position: int) -> None:
        index = choice.get("index", position)
        if not isinstance(index, int):
            return
        state = self._choices.get(index)
        if state is None:
            state = self._choices[index] = _Choice(self._content())
        if state.content.add(choice):
            state.visible = self.saw_text = True
        state.finished = state.finished or bool(choice.get("finish_reason"))

    def _note_usage(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self.usage = usage
            counted = usage.get("completion_tokens")
            self.generated = counted if isinstance(counted, int) else None

    def is_visible(self, index: int) -> bool:
        """See ``AnswerContent``."""
        return index in self._choices and self._choices[index].visible

    def is_finished(self, index: int) -> bool:
        """See ``AnswerContent``."""
        return index in self._choices and self._choices[index].finished

    def output_items(self, index: int) -> list[dict[str, Any]]:
        """See ``AnswerContent``."""
        return self._choices[index].content.output_items() if index in self._choices else []
