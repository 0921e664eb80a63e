"""A bounded map of rollouts to their lineage, for one worker.

Eviction takes the least recently used rollout and never the only one. It is safe: the evicted
rollout's later calls are ``unresolved`` and get masked. Not thread-safe: its owner locks.
"""

from __future__ import annotations

from collections import OrderedDict

from middleware.lineage.matching import RolloutLineage


class LineageIndex:
    """``RolloutLineage`` per rollout, bounded by their number and by the tokens they keep."""

    def __init__(self, max_rollouts: int = 512, max_tokens: int = 8_000_000) -> None:
        self._max_rollouts = max_rollouts
        self._max_tokens = max_tokens
        self._rollouts: OrderedDict[str, RolloutLineage] = OrderedDict()

    def for_rollout(self, rollout_id: str) -> RolloutLineage:
        """The rollout's lineage, made if it is new; others may be evicted for it."""
        lineage = self._rollouts.setdefault(rollout_id, RolloutLineage())
        self._rollouts.move_to_end(rollout_id)
        self.trim()
        return lineage

    def get(self, rollout_id: str) -> RolloutLineage | None:
        """The rollout's lineage, if this worker has one; nothing is made or evicted."""
        lineage = self._rollouts.get(rollout_id)
        if lineage is not None:
            self._rollouts.move_to_end(rollout_id)
        return lineage

    def trim(self) -> None:
        """Evict down to the bounds; to be called after entries were added."""
        tokens = self.total_tokens
        while len(self._rollouts) > 1 and (
            len(self._rollouts) > self._max_rollouts or tokens > self._max_tokens
        ):
            _, evicted = self._rollouts.popitem(last=False)
            tokens -= evicted.total_tokens

    def drop(self, rollout_id: str) -> None:
        """Forget a rollout (its records were retired)."""
        self._rollouts.pop(rollout_id, None)

    def clear(self) -> None:
        """Forget everything."""
        self._rollouts.clear()

    @property
    def total_tokens(self) -> int:
        """Tokens kept over all rollouts; sequences that share a buffer count once."""
        return sum(lineage.total_tokens for lineage in self._rollouts.values())
