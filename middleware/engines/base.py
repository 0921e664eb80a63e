"""What an engine must be asked so that it reports tokens, and where it puts them.

One ``EngineProfile`` per kind of engine. Profiles are stateless; they know HTTP shapes, not
transport. What they read ends in one form, the ``TokenBundle`` of one choice.
Source: spec 06 B and 06b; raw answers of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from middleware.json_edit import EditTree
from middleware.records import LogProbs, TokenIds


class AnswerDefect(Exception):  # noqa: N818 - a finding, not a failure
    """The answer's token data cannot be trusted. Never leaves the middleware.

    ``code`` becomes the rollout's incomplete reason; ``detail`` is for humans and holds no
    token ids and no text.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


@dataclass(frozen=True, slots=True)
class TokenAsk:
    """How a request must be changed, and what must be taken out of the answer again.

    ``members`` are set at the top level of the request body. ``hide`` and ``hide_stream`` name
    what the agent did not ask for in a whole answer and in a stream's chunk.
    """

    members: Mapping[str, Any] = field(default_factory=dict)
    hide: EditTree = field(default_factory=dict)
    hide_stream: EditTree = field(default_factory=dict)
    hides_tokens: bool = False  # chunks that carry nothing but tokens vanish with them
    hides_usage: bool = False  # the separate usage chunk of a stream vanishes


@dataclass(slots=True)
class TokenBundle:
    """The tokens of one choice, as far as one answer or one chunk reports them.

    ``prompt`` None: not reported here. ``ids`` and ``log_probs`` are parallel once a defect
    check has passed; both None: this piece carries no tokens.
    """

    prompt: list[Any] | None = None
    ids: list[Any] | None = None
    log_probs: list[Any] | None = None
    routed_experts: Any = None


class EngineProfile(Protocol):
    """One kind of engine, for the dialects it reports tokens for."""

    @property
    def name(self) -> str:
        """As in ``--engine``, and on the record."""

    def ask(self, dialect: str, body: Mapping[str, Any]) -> TokenAsk:
        """What to send so that the engine reports ids and log-probs for this request."""

    def read(
        self, dialect: str, payload: Mapping[str, Any], choice: Mapping[str, Any], *, echo: bool
    ) -> TokenBundle:
        """The tokens that one choice of an answer (or of a chunk) carries."""


def checked_ids(values: object, what: str) -> TokenIds:
    """Token ids as a compact array.

    Raises:
        AnswerDefect: ``invalid_token_ids``.
    """
    try:
        return TokenIds.of(values)
    except ValueError as error:
        # The cause names values; a defect's detail reaches logs and must not.
        detail = f"{what} are not all integers from 0 to 2**64 - 1"
        raise AnswerDefect("invalid_token_ids", detail) from error


def checked_log_probs(values: object) -> LogProbs:
    """Log-probs as a compact array.

    Raises:
        AnswerDefect: ``non_finite_log_probs``: NaN, infinities, None, or the engines' sentinel
            (-9999.0 and below), none of which can be trained on.
    """
    try:
        return LogProbs.of(values)
    except ValueError as error:
        detail = "a log-prob is NaN, infinite, missing, or the engine's sentinel"
        raise AnswerDefect("non_finite_log_probs", detail) from error
