"""What the dialects have in common: a finished answer, its readers, and a dialect's interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from middleware.records import LogProbs, TokenIds

if TYPE_CHECKING:
    from middleware.engines.base import AnswerDefect, EngineProfile
    from middleware.errors import TokenCaptureError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceAnswer:
    """One choice of one answer; becomes one ``TokenEntry``.

    ``token_ids`` and ``log_probs`` are parallel. ``finish_reason`` is the engine's, or "" when
    the choice was cut. ``token_item_index`` points into ``output_items``.
    """

    index: int
    prompt_token_ids: TokenIds
    token_ids: TokenIds
    log_probs: LogProbs
    output_items: list[dict[str, Any]] = field(default_factory=list)
    token_item_index: int | None = None
    finish_reason: str = ""
    routed_experts: Any = None
    continues: bool = False  # it extends the choice before it (sub-generations of one request)
    extras: Mapping[str, Any] = field(default_factory=dict)  # further members of the record


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything a response said that a record needs. ``choices`` by rising index."""

    choices: list[ChoiceAnswer]
    response_id: str | None = None
    model: str = ""
    usage: dict[str, Any] | None = None


class AnswerReader(Protocol):
    """Watches one answer: what the client is told, and which tokens that is made of.

    Two kinds: ``ChoicesReader`` finds the tokens in the HTTP answer itself, ``EngineCall`` gets
    them from the engine's own boundary. Defects are kept, and raised by ``answer``.
    """

    defect: AnswerDefect | None

    @property
    def num_tokens(self) -> int:
        """Generated tokens seen so far, of all choices."""

    @property
    def saw_text(self) -> bool:
        """The client is told something that the model said."""

    @property
    def error_seen(self) -> bool:
        """The answer is, or broke off with, an error."""

    @property
    def complete(self) -> bool:
        """Every expected choice has its end."""

    @property
    def all_finished(self) -> bool:
        """Every choice that appeared has its end."""

    @property
    def refusal(self) -> TokenCaptureError | None:
        """Set when the call is refused although it was dispatched; nothing was generated."""

    def feed(self, payload: Mapping[str, Any]) -> None:
        """Take the payload of one frame."""

    def feed_whole(self, payload: Mapping[str, Any]) -> bool:
        """Take a whole answer; False if it has no place for model text."""

    def answer(self) -> Answer:
        """The answer so far, checked.

        Raises:
            AnswerDefect: what the client may have seen cannot be recorded exactly.
        """


class AnswerContent(Protocol):
    """What an answer tells the client, without tokens; fed like ``AnswerReader``."""

    response_id: str | None
    model: str
    usage: dict[str, Any] | None
    error_seen: bool

    @property
    def generated(self) -> int | None:
        """Tokens that ``usage`` counts for the whole answer."""

    @property
    def saw_text(self) -> bool:
        """See ``AnswerReader``."""

    @property
    def complete(self) -> bool:
        """See ``AnswerReader``."""

    @property
    def all_finished(self) -> bool:
        """See ``AnswerReader``."""

    def feed(self, payload: Mapping[str, Any]) -> None:
        """Take the payload of one frame."""

    def feed_whole(self, payload: Mapping[str, Any]) -> bool:
        """Take a whole answer; False if it has no place for model text."""

    def is_visible(self, index: int) -> bool:
        """Whether the client is told something of that choice."""

    def is_finished(self, index: int) -> bool:
        """Whether the client is told that the choice has ended."""

    def output_items(self, index: int) -> list[dict[str, Any]]:
        """A choice's content as Responses-style output items."""


class Dialect(Protocol):
    """One wire format of model calls."""

    @property
    def name(self) -> str:
        """As on the record: ``chat``, ``completions``..."""

    def request_items(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The conversation as sent; None where lineage goes by tokens alone (completions)."""

    def previous_response(self, body: Mapping[str, Any]) -> str | None:
        """The id of the response that the request continues, where it names one."""

    def num_choices(self, body: Mapping[str, Any]) -> int:
        """How many choices a complete answer has."""

    def choices_per_prompt(self, body: Mapping[str, Any]) -> int:
        """How many of them belong to one prompt (choices come prompt-major)."""

    def generates(self, body: Mapping[str, Any]) -> bool:
        """False for a request that only scores its prompt."""

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuse what cannot be captured.

        Raises:
            UnsupportedParameterError: beam search, ``best_of``, background responses.
        """

    def content(self, body: Mapping[str, Any]) -> AnswerContent:
        """A fresh reader of what the answer to this request tells the client."""

    def error_body(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Our own refusal in this dialect's error shape."""


class ReportedDialect(Dialect, Protocol):
    """A dialect in whose answers engines report tokens."""

    def reader(self, body: Mapping[str, Any], profile: EngineProfile) -> AnswerReader:
        """A fresh reader for the answer to this request."""
