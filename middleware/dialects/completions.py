"""Text Completions: prompts as text or token ids, singly or in batches.

Lineage of this dialect goes by tokens (spec 02.6); it has no conversation items.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from middleware.dialects.chat import choice_count, refuse_uncapturable
from middleware.dialects.choices import ChoicesReader, openai_error
from middleware.dialects.choices_content import ChoicesContent, ContentAssembler
from middleware.engines.base import EngineProfile
from middleware.records import TokenIds


class CompletionsDialect:
    """``POST /v1/completions``."""

    name: Final = "completions"

    def request_items(self, body: Mapping[str, Any]) -> None:
        """None: resolved by tokens."""

    def num_choices(self, body: Mapping[str, Any]) -> int:
        """Number of prompts times ``n`` (choices come prompt-major)."""
        return _prompt_count(body) * choice_count(body)

    def previous_response(self, body: Mapping[str, Any]) -> None:
        """Completions have no such reference."""

    def choices_per_prompt(self, body: Mapping[str, Any]) -> int:
        """``n``."""
        return choice_count(body)

    def generates(self, body: Mapping[str, Any]) -> bool:
        """Not with ``echo`` and ``max_tokens: 0``: then only the prompt is scored (06b 0.5)."""
        max_tokens = body.get("max_tokens")
        return not (body.get("echo") is True and max_tokens == 0 and max_tokens is not False)

    def check(self, body: Mapping[str, Any]) -> None:
        """See ``Dialect.check``."""
        refuse_uncapturable(body)

    def reader(self, body: Mapping[str, Any], profile: EngineProfile) -> ChoicesReader:
        """See ``Dialect.reader``."""
        return ChoicesReader(
            self.name,
            profile,
            _TextContent,
            num_choices=self.num_choices(body),
            choices_per_prompt=choice_count(body),
            echo=body.get("echo") is True,
        )

    def content(self, body: Mapping[str, Any]) -> ChoicesContent:
        """See ``Dialect.content``."""
        return ChoicesContent(_TextContent, num_choices=self.num_choices(body))

    def error_body(self, status: int, code: str, message: str) -> dict[str, Any]:
        """See ``Dialect.error_body``."""
        return openai_error(status, code, message)


def token_prompt(body: Mapping[str, Any]) -> TokenIds | None:
    """The single token prompt of a request, None for text, batches and invalid ids."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], (str, list)):
        return None
    try:
        return TokenIds.of(prompt)
    except ValueError:
        return None  # the engine answers it with its own 400


def _prompt_count(body: Mapping[str, Any]) -> int:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        return len(prompt)
    return 1


class _TextContent(ContentAssembler):
    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, choice: Mapping[str, Any]) -> bool:
        text = choice.get("text")
        if not isinstance(text, str) or not text:
            return False
        self._pieces.append(text)
        return True

    def output_items(self) -> list[dict[str, Any]]:
        text = "".join(self._pieces)
        return [{"type": "message", "role": "assistant", "content": text}]
