"""The dialects that are captured, and which request path speaks which."""

from __future__ import annotations

from typing import Final

from middleware.dialects.base import Answer, ChoiceAnswer, Dialect
from middleware.dialects.chat import ChatDialect
from middleware.dialects.completions import CompletionsDialect, token_prompt

CAPTURED_ROUTES: Final[dict[str, Dialect]] = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/completions": CompletionsDialect(),
}

__all__ = ["CAPTURED_ROUTES", "Answer", "ChoiceAnswer", "Dialect", "token_prompt"]
