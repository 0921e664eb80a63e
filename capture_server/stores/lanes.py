"""A bounded pool of threads in which the jobs of one key run in order, a whole batch at a time.

Invariant: at any moment at most one thread works for a key, and it was given every job that the
key had queued when it started: that is what makes group commit. Keys never wait for each other
as long as a thread is free.

It does not know what a job is; ``work(key, jobs)`` must not raise.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

from middleware.errors import StoreClosedError

logger = logging.getLogger(__name__)
Job = TypeVar("Job")

_IDLE_S: Final = 5.0  # a thread without work for so long ends; the next job starts a new one
_MOST_BLOCKED: Final = 56  # threads that may wait for other processes on top of ``max_threads``


class Lanes(Generic[Job]):
    """``submit`` from any thread; ``close`` drains."""

    def __init__(self, work: Callable[[str, list[Job]], None], *, max_threads: int = 8) -> None:
        self._work = work
        self._max_threads = max_threads
        # Guards everything below.
        self._condition = threading.Condition()
        self._queued: dict[str, list[Job]] = {}
        self._ready: deque[str] = deque()  # keys with queued jobs for which nobody works
        self._running: set[str] = set()
        self._num_threads = 0
        self._num_idle = 0
        self._num_blocked = 0
        self._closed = False

    def submit(self, key: str, job: Job) -> None:
        """Queue a job behind the earlier ones of its key.

        Raises:
            StoreClosedError: after ``close``.
        """
        with self._condition:
            if self._closed:
                raise StoreClosedError("the store is closed: this process is shutting down")
            if key in self._queued:
                self._queued[key].append(job)
                return
            self._queued[key] = [job]
            if key not in self._running:
                self._ready.append(key)
                self._call_a_thread()

    def _call_a_thread(self) -> None:
        limit = self._max_threads + min(self._num_blocked, _MOST_BLOCKED)
        if len(self._ready) > self._num_idle and self._num_threads < limit:
            self._num_threads += 1
            threading.Thread(target=self._serve, name="token-capture-store", daemon=True).start()
        else:
            self._condition.notify()

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Around a wait for another process: a stand-in thread may serve the other keys."""
        with self._condition:
            self._num_blocked += 1
            if self._ready:
                self._call_a_thread()
        try:
            yield
        finally:
            with self._condition:
                self._num_blocked -= 1

    def _serve(self) -> None:
        while (turn := self._next_turn()) is not None:
            key, jobs = turn
            try:
                self._work(key, jobs)
            except BaseException:
                # The thread goes on: other rollouts wait for it.
                logger.critical("a job of %s broke its promise not to raise", key, exc_info=True)
            finally:
                with self._condition:
                    self._running.discard(key)
                    if key in self._queued:
                        self._ready.append(key)  # this thread is free again: no other is needed
                    elif self._closed:
                        self._condition.notify_all()

    def _next_turn(self) -> tuple[str, list[Job]] | None:
        with self._condition:
            deadline = time.monotonic() + _IDLE_S
            while not self._ready:
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    self._num_threads -= 1
                    self._condition.notify_all()
                    return None
                self._num_idle += 1
                self._condition.wait(left)
                self._num_idle -= 1
            key = self._ready.popleft()
            self._running.add(key)
            return key, self._queued.pop(key)

    def close(self, timeout_s: float) -> int:
        """Refuse new jobs, let the queued ones end; return how many were given up."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._queued and not self._running, timeout_s)
            return sum(len(jobs) for jobs in self._queued.values()) + len(self._running)
