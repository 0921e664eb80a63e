"""The state of one captured call, and the ContextVar that carries it into the handler.

One ``CaptureContext`` per tagged request. The parent decision is made once and read by prefix
supply and by the record alike. Untagged traffic has no context.
"""

from __future__ import annotations

import time
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from middleware.fingerprint import HashedRequest
from middleware.observer import NO_OBSERVER, CaptureObserver
from middleware.protocols import LineageResolution, LineageResolver, TokenSink
from middleware.records import TokenIds

if TYPE_CHECKING:
    from middleware.engine_call import EngineCall

SAMPLING_KEYS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
"""The settings that ``CaptureContext.sampling`` keeps, where they are given."""

ParentBy = Literal["content", "response_id", "call_id"]
"""What named the parent: the conversation itself, or a ``previous_response_id``."""


@dataclass(slots=True, kw_only=True)
class CaptureContext:
    """What is known about the call in flight.

    The first block is the seed's contract; a framework may fill it by hand and call the steps in
    ``middleware.capture`` itself. The second block is what our middleware records in addition.
    """

    rollout_id: str
    model_call_id: str
    token_sink: TokenSink | None = None
    lineage_store: LineageResolver | None = None
    model: str = ""
    committed: bool = False
    delta_records: bool = True
    prefix_requested: bool = False
    prefix_supplied: bool = False
    parent_resolution: LineageResolution | None = None
    external_staging: str | None = None
    admitted_at: float | None = None
    capture_admission: Any = None
    parent_staging_chain: tuple[str, ...] = ()
    parent_chain_hash: str = ""
    request_items: list[dict[str, Any]] | None = None
    external_commit_coords: Any = None
    external_worker_response_seen: bool = False

    dialect: str = ""
    engine: str = ""
    agent_id: str | None = None
    trace_parent: str = ""  # the agent's ``traceparent`` header
    explicit_parent_call_id: str | None = None
    request_digest: str = ""
    prompt_config_digest: str = ""
    system_digest: str = ""
    hashed_request: HashedRequest | None = None
    first_call: bool = False
    arrived_at: float = field(default_factory=time.monotonic)  # monotonic, the request was read
    created_at: float = 0.0
    sampling: dict[str, Any] = field(default_factory=dict)
    guided: bool = False
    num_choices: int = 1
    weight_version: int | str | None = None
    parent_by: ParentBy = "content"
    prefix_reason: str = ""  # why a requested prefix was not supplied
    observer: CaptureObserver = NO_OBSERVER
    engine_call: EngineCall | None = None  # set where tokens come from the engine's boundary

    @property
    def parent_call_id(self) -> str | None:
        """The proven parent, None for roots and unresolved calls."""
        match = self.parent_resolution.match if self.parent_resolution else None
        return match.model_call_id if match else None

    @property
    def parent_tokens(self) -> TokenIds | None:
        """The parent's cumulative token ids (shared array, do not write)."""
        match = self.parent_resolution.match if self.parent_resolution else None
        return match.cumulative_token_ids if match else None


_current: ContextVar[CaptureContext | None] = ContextVar("token_capture_context", default=None)


def set_token_sink(context: CaptureContext) -> Token[CaptureContext | None]:
    """Make this the context of the current task; pass the token to ``reset_token_sink``."""
    return _current.set(context)


def reset_token_sink(token: Token[CaptureContext | None]) -> None:
    """Undo ``set_token_sink``."""
    _current.reset(token)


def current_capture_context() -> CaptureContext | None:
    """The context of the call in flight, None for untagged traffic."""
    return _current.get()
