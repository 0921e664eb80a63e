"""The dialects that are captured, and which request path speaks which."""

from __future__ import annotations

from typing import Final

from middleware.dialects.base import Answer, ChoiceAnswer, Dialect, ReportedDialect
from middleware.dialects.chat import ChatDialect
from middleware.dialects.completions import CompletionsDialect, token_prompt
from middleware.dialects.messages import MessagesDialect
from middleware.dialects.responses import ResponsesDialect

CAPTURED_ROUTES: Final[dict[str, ReportedDialect]] = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/completions": CompletionsDialect(),
}
"""What engines report tokens for in their answers."""

IN_ENGINE_ROUTES: Final[dict[str, Dialect]] = {
    **CAPTURED_ROUTES,
    "/v1/responses": ResponsesDialect(),
    "/v1/messages": MessagesDialect(),
}
"""What can be captured at the engine's own boundary, whatever the answer says."""

__all__ = [
    "CAPTURED_ROUTES",
    "IN_ENGINE_ROUTES",
    "Answer",
    "ChoiceAnswer",
    "Dialect",
    "ReportedDialect",
    "token_prompt",
]
