"""What the conformance checks share: handles of the store under test, fresh ids, small records.

Invariant: two kits never touch the same rollout, and every handle that a kit made is in
``handles``, so that the runner can close it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from middleware.protocols import LineageResolver, TokenSink, TokenSource
from middleware.records import TokenEntry


class ConformanceError(AssertionError):
    """A store broke its contract: which check, and how."""

    def __init__(self, check_name: str, detail: str) -> None:
        super().__init__(f"{check_name}: {detail}")
        self.check_name = check_name
        self.detail = detail


@dataclass(slots=True)
class Kit:
    """One run: its handles, and an id below which nothing was ever written."""

    sink_factory: Callable[[], TokenSink]
    source_factory: Callable[[], TokenSource]
    lineage_factory: Callable[[], LineageResolver] | None
    prefix: str
    check: str = ""
    handles: list[Any] = field(default_factory=list)

    def sink(self) -> Any:
        """A new sink handle; ``Any``: checks also call what is optional."""
        self.handles.append(self.sink_factory())
        return self.handles[-1]

    def source(self) -> Any:
        self.handles.append(self.source_factory())
        return self.handles[-1]

    def resolver(self) -> LineageResolver:
        assert self.lineage_factory is not None
        self.handles.append(self.lineage_factory())
        resolver: LineageResolver = self.handles[-1]
        return resolver

    def rollout(self, name: str = "") -> str:
        return f"{self.prefix}.{self.check}{name}"

    def require(self, holds: bool, detail: str) -> None:
        if not holds:
            raise ConformanceError(self.check, detail)

    async def refused(
        self,
        awaitable: Awaitable[Any],
        kinds: type[Exception] | tuple[type[Exception], ...] = Exception,
    ) -> bool:
        """Whether it raised one of ``kinds``."""
        try:
            await awaitable
        except kinds:
            return True
        return False


def make_entry(rollout_id: str, call_id: str, seed: int = 0, *, prompt: int = 8) -> TokenEntry:
    """A small whole record; equal arguments give equal bytes."""
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call_id,
        prompt_token_ids=range(seed, seed + prompt),
        generation_token_ids=[seed + 1, 0, 2**31 + seed],
        generation_log_probs=[-0.5, 0.0, -0.1],
        output_items=[{"role": "assistant", "content": f"answer {seed}"}],
        token_item_index=0,
        created_at=1.5,
    )
