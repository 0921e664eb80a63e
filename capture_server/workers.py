"""``--workers N``: several server processes behind one socket, and the parent that keeps them.

Invariant: until the parent is told to end, every worker that died is started again (with growing
waits if it keeps dying); then each is told, waited for, and in the end killed. Workers share the
listening socket and the store, nothing else: what one of them acknowledged, all can continue and
freeze. A call of a worker that died is known to the store by its intent's holder.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Final

from capture_server.config import Settings
from capture_server.metrics import forget_worker
from capture_server.stores.registry import (
    open_resolver,
    open_store,
    require_process_shared,
)
from middleware.errors import ConfigurationError

logger = logging.getLogger(__name__)

STARTUP_FAILURE: Final = 3  # exit code of a worker that could not begin to serve
_HEALTHY_S: Final = 10.0  # a worker that lived so long did not fail at its start
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0


def check_workers(settings: Settings) -> None:
    """Refuse settings with which several workers cannot hold what capture promises.

    Raises:
        ConfigurationError: names the store or resolver, and what to configure.
    """
    asyncio.run(_check(settings))


async def _check(settings: Settings) -> None:
    store = open_store(settings.store, spill_dir=settings.spill_dir)
    try:
        resolver = open_resolver(settings.store, store)
        try:
            require_process_shared(store, resolver, workers=settings.workers)
        finally:
            await resolver.close()
    finally:
        await store.close()


def serve_workers(
    settings: Settings, listeners: Sequence[socket.socket], *, stop_timeout_s: float
) -> None:
    """Run ``settings.workers`` processes until SIGTERM or SIGINT. Main thread only.

    Raises:
        ConfigurationError: a worker could not start at all; its log says why.
    """
    # Spawned, not forked: a child must not inherit threads' locks or an event loop.
    context = multiprocessing.get_context("spawn")

    def start(index: int) -> BaseProcess:
        process = context.Process(
            target=_work, args=(settings, listeners), name=f"token-capture-worker-{index}"
        )
        process.start()
        return process

    Supervisor(start, settings.workers, stop_timeout_s=stop_timeout_s).run()


def _work(settings: Settings, listeners: Sequence[socket.socket]) -> None:
    """The life of one worker."""
    # Here, not above: the application imports this module.
    from capture_server.app import create_app, run_server
    from capture_server.logs import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    _end_with_parent()
    if not run_server(create_app(settings), settings, listeners):
        sys.exit(STARTUP_FAILURE)


def _end_with_parent() -> None:
    """A parent that was killed tells nobody: without this its workers would keep the port."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        logger.error("the parent process is gone; this worker ends")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="token-capture-parent-watch", daemon=True).start()


class _Slot:
    """One of the N places: its process now, or when the next one is due."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: BaseProcess | None = None
        self.started_at = 0.0
        self.num_starts = 0
        self.num_failures = 0  # in a row, soon after the start
        self.due_at = 0.0


class Supervisor:
    """Keeps ``num_workers`` processes running. ``start(index)`` makes and starts one."""

    def __init__(
        self, start: Callable[[int], BaseProcess], num_workers: int, *, stop_timeout_s: float
    ) -> None:
        self._start = start
        self._slots = [_Slot(index) for index in range(num_workers)]
        self._stop_timeout_s = stop_timeout_s
        self._told: int | None = None  # the signal that told us to end

    def run(self) -> None:
        """Return when told to end and every worker has ended.

        Raises:
            ConfigurationError: a worker could not start at all.
        """
        wake_reader, wake_writer = os.pipe()
        for end in (wake_reader, wake_writer):
            os.set_blocking(end, False)
        kept = {n: signal.signal(n, self._on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
        old_wakeup = signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        try:
            while self._told is None:
                self._start_due()
                sentinels = [s.process.sentinel for s in self._slots if s.process is not None]
                wait([*sentinels, wake_reader], self._seconds_to_next())
                self._bury_dead()
        finally:
            self._end_all()
            signal.set_wakeup_fd(old_wakeup)
            for number, handler in kept.items():
                signal.signal(number, handler)
            os.close(wake_reader)
            os.close(wake_writer)

    def _on_signal(self, number: int, frame: object) -> None:
        self._told = number

    def _start_due(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.process is None and slot.due_at <= now and self._told is None:
                slot.process = self._start(slot.index)
                slot.started_at = now
                slot.num_starts += 1
                logger.info(
                    "worker %d runs as process %s",
                    slot.index,
                    slot.process.pid,
                    extra={"action": "worker_started", "worker": slot.index},
                )

    def _seconds_to_next(self) -> float | None:
        due = [slot.due_at for slot in self._slots if slot.process is None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _bury_dead(self) -> None:
        for slot in self._slots:
            process = slot.process
            if process is None or process.is_alive() or self._told is not None:
                continue
            process.join()
            slot.process = None
            forget_worker(process.pid or 0)
            logger.error(
                "worker %d (process %s) ended with %s; its open calls are lost",
                slot.index,
                process.pid,
                process.exitcode,
                extra={"action": "worker_died", "worker": slot.index},
            )
            if _could_not_start(slot, process):
                raise ConfigurationError("a worker could not start; its log above says why")
            self._schedule(slot)

    def _schedule(self, slot: _Slot) -> None:
        now = time.monotonic()
        is_healthy = now - slot.started_at >= _HEALTHY_S
        slot.num_failures = 0 if is_healthy else slot.num_failures + 1
        # The first death is answered at once: the others serve one worker short.
        wait_s = _FIRST_WAIT_S * 2 ** (slot.num_failures - 2) if slot.num_failures > 1 else 0.0
        slot.due_at = now + min(wait_s, _LONGEST_WAIT_S)

    def _end_all(self) -> None:
        running = [slot.process for slot in self._slots if slot.process is not None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + self._stop_timeout_s
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                logger.error("process %s did not end in time and is killed", process.pid)
                process.kill()
                process.join()


def _could_not_start(slot: _Slot, process: BaseProcess) -> bool:
    """The first process of a place ended by itself, at once: the next one would, too."""
    lived_s = time.monotonic() - slot.started_at
    ended_itself = (process.exitcode or 0) >= 0
    return ended_itself and slot.num_starts == 1 and lived_s < _HEALTHY_S
