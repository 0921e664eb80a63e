"""Lanes whose threads take several rollouts along in one turn, so that they share a round trip.

Invariant: as ``Lanes``: at any moment at most one thread works for a rollout, and it was given
everything that was queued for it. ``release`` gives a rollout back before its turn is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from capture_server.stores.lanes import Job, Lanes

logger = logging.getLogger(__name__)

_MOST_PER_TURN: Final = 32


class Turns(Lanes[Job]):
    """``work(turn)`` gets rollout -> jobs; it must not raise."""

    def __init__(self, work: Callable[[dict[str, list[Job]]], None], *, max_threads: int) -> None:
        super().__init__(lambda key, jobs: work({key: jobs}), max_threads=max_threads)
        self._work_turn = work

    def release(self, key: str) -> None:
        """Nothing of this rollout is left to do in this turn."""
        with self._condition:
            self._running.discard(key)
            if key in self._queued:
                self._ready.append(key)
                self._call_a_thread()
            elif self._closed:
                self._condition.notify_all()

    def _serve(self) -> None:
        while (first := self._next_turn()) is not None:
            turn = dict([first])
            self._take_along(turn)
            try:
                self._work_turn(turn)
            except BaseException:
                # The thread goes on: other rollouts wait for it.
                logger.critical("a turn broke its promise not to raise", exc_info=True)
                for key in turn:
                    self.release(key)

    def _take_along(self, turn: dict[str, list[Job]]) -> None:
        """A fair share of what is ready: the other threads are there for the rest."""
        with self._condition:
            share = min(len(self._ready) // self._max_threads, _MOST_PER_TURN - 1)
            for _ in range(share):
                key = self._ready.popleft()
                self._running.add(key)
                turn[key] = self._queued.pop(key)
