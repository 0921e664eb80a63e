"""Which calls run in this process, so that a freeze can wait for them.

Event-loop confined: no locks, every method runs on the server's loop.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

_FENCE_EVERY_S: Final = 0.1


class RunningCall(Protocol):
    """A call in flight."""

    @property
    def client_gone(self) -> bool:
        """Nobody reads the answer any more."""

    def abandon(self) -> None:
        """Stop the engine's work for this call; its outcome is still recorded."""


class OpenCallRegistry:
    """The running calls by rollout."""

    def __init__(self) -> None:
        self._calls: dict[str, set[RunningCall]] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def add(self, rollout_id: str, call: RunningCall) -> None:
        """A call begins."""
        self._calls.setdefault(rollout_id, set()).add(call)

    def remove(self, rollout_id: str, call: RunningCall) -> None:
        """A call has ended: its record, and the note of its delivery, are written."""
        calls = self._calls.get(rollout_id, set())
        calls.discard(call)
        if calls:
            return
        self._calls.pop(rollout_id, None)
        for waiter in self._waiters.pop(rollout_id, []):
            if not waiter.done():
                waiter.set_result(None)

    def fence(self, rollout_id: str) -> None:
        """A freeze is under way: nobody waits for calls whose client is gone."""
        for call in list(self._calls.get(rollout_id, ())):
            if call.client_gone:
                call.abandon()

    async def wait_closed(self, rollout_id: str, timeout_s: float) -> bool:
        """Wait until no call of the rollout runs here; False when the time is up first."""
        if rollout_id not in self._calls:
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(rollout_id, []).append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                while not waiter.done():
                    # Clients also leave while a freeze waits for them.
                    self.fence(rollout_id)
                    await asyncio.wait((waiter,), timeout=_FENCE_EVERY_S)
        except TimeoutError:
            return False
        return True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs at all (shutdown); False when the time is up first."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        for rollout_id in list(self._calls):
            left_s = deadline - asyncio.get_running_loop().time()
            if not await self.wait_closed(rollout_id, max(0.0, left_s)):
                return False
        return not self._calls
