"""What the dialects have in common: a finished answer, and the interface of a dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from middleware.records import LogProbs, TokenIds

if TYPE_CHECKING:
    from middleware.dialects.choices import ChoicesReader
    from middleware.engines.base import EngineProfile


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything a response said that a record needs. ``choices`` by rising index."""

    choices: list[ChoiceAnswer]
    response_id: str | None = None
    model: str = ""
    usage: dict[str, Any] | None = None


class Dialect(Protocol):
    """One wire format of model calls."""

    @property
    def name(self) -> str:
        """As on the record: ``chat``, ``completions``..."""

    def request_items(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The conversation as sent; None where lineage goes by tokens alone (completions)."""

    def num_choices(self, body: Mapping[str, Any]) -> int:
        """How many choices a complete answer has."""

    def generates(self, body: Mapping[str, Any]) -> bool:
        """False for a request that only scores its prompt."""

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuse what cannot be captured.

        Raises:
            UnsupportedParameterError: beam search, ``best_of``.
        """

    def reader(self, body: Mapping[str, Any], profile: EngineProfile) -> ChoicesReader:
        """A fresh reader for the answer to this request."""

    def error_body(self, status: int, code: str, message: str) -> dict[str, Any]:
        """Our own refusal in this dialect's error shape."""
