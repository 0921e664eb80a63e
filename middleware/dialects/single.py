"""What the dialects with exactly one answer per request (responses, messages) have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SingleAnswerDialect:
    """The parts of ``Dialect`` that do not depend on the request."""

    def num_choices(self, body: Mapping[str, Any]) -> int:
        """One."""
        return 1

    def choices_per_prompt(self, body: Mapping[str, Any]) -> int:
        """One."""
        return 1

    def generates(self, body: Mapping[str, Any]) -> bool:
        """Always."""
        return True


class SingleAnswerContent:
    """The parts of ``AnswerContent`` that both share; the whole answer is choice 0."""

    def __init__(self) -> None:
        self.response_id: str | None = None
        self.model = ""
        self.usage: dict[str, Any] | None = None
        self.generated: int | None = None
        self.error_seen = False
        self.saw_text = False
        self.complete = False

    @property
    def all_finished(self) -> bool:
        """There is one choice."""
        return self.complete

    def is_visible(self, index: int) -> bool:
        """See ``AnswerContent``."""
        return index == 0 and self.saw_text

    def is_finished(self, index: int) -> bool:
        """See ``AnswerContent``."""
        return index == 0 and self.complete

    def note_head(self, answer: Mapping[str, Any]) -> None:
        """Take the id and the model of an answer."""
        if isinstance(answer.get("id"), str):
            self.response_id = answer["id"]
        if isinstance(answer.get("model"), str):
            self.model = answer["model"]

    def note_usage(self, usage: Any) -> None:
        """Take a count of tokens; a later one replaces an earlier one."""
        if isinstance(usage, dict):
            self.usage = {**(self.usage or {}), **usage}
            counted = self.usage.get("output_tokens")
            self.generated = counted if isinstance(counted, int) else None
