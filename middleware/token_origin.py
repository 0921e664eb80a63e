"""Where a captured call's tokens come from: the engine's HTTP answer, or its own boundary."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from middleware.context import CaptureContext
from middleware.dialects import CAPTURED_ROUTES, Dialect, ReportedDialect
from middleware.dialects.base import AnswerReader
from middleware.engines import EngineProfile
from middleware.engines.base import TokenAsk

EngineProvider = Callable[[], Awaitable[EngineProfile]]


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """How the request is changed, and what watches the answer."""

    ask: TokenAsk
    reader: AnswerReader


class TokenOrigin(Protocol):
    """Prepares calls so that their tokens will be seen."""

    @property
    def routes(self) -> Mapping[str, Dialect]:
        """The request paths whose tokens can be seen."""

    async def prepare(
        self, context: CaptureContext, dialect: Dialect, body: Mapping[str, Any]
    ) -> PreparedCall:
        """Called once per call, when its parent is decided and nothing was dispatched."""


class ReportedTokens:
    """Tokens that the engine reports in its answers, as its profile knows to ask for them."""

    routes: Mapping[str, Dialect] = CAPTURED_ROUTES

    def __init__(self, engine: EngineProfile | EngineProvider) -> None:
        self._engine = engine

    async def prepare(
        self, context: CaptureContext, dialect: Dialect, body: Mapping[str, Any]
    ) -> PreparedCall:
        """See ``TokenOrigin``."""
        profile = await self._engine() if callable(self._engine) else self._engine
        context.engine = profile.name
        reported = cast("ReportedDialect", dialect)  # by ``routes``
        return PreparedCall(profile.ask(dialect.name, body), reported.reader(body, profile))
