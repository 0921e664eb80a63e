"""A second ``--middleware`` for the load test: how long the event loop stands still, and for whom.

A thread looks at the loop's thread every few milliseconds and notes whose code is innermost: ours
(``middleware``, ``capture_server``) or anybody else's. ``GET /loop-probe`` answers and resets.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[3])
OURS = (f"{ROOT}/middleware/", f"{ROOT}/capture_server/")
OTHERS = ("/site-packages/vllm/", "/starlette/", "/fastapi/", "/uvicorn/")
SAMPLE_S = 0.002
TICK_S = 0.005


class LoopProbe:
    """Pass-through middleware that samples the event loop's thread."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._loop_thread = threading.get_ident()
        self._reset()
        self._ticking: asyncio.Task[None] | None = None

    def _reset(self) -> None:
        self.samples = self.ours = 0
        # Seconds, samples of ours, samples in all, seconds on the CPU.
        self.gaps: list[tuple[float, int, int, float]] = []
        self._since_tick = [0, 0]
        self._where: dict[str, int] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer ``/loop-probe``; everything else passes."""
        if scope["type"] == "http" and scope["path"] == "/loop-probe":
            if self._ticking is None:
                self._loop_thread = threading.get_ident()
                self._ticking = asyncio.create_task(self._tick())
                threading.Thread(target=self._watch, daemon=True).start()
            await self._answer(send)
            return
        await self._app(scope, receive, send)

    async def _answer(self, send: Any) -> None:
        top = sorted(self._where.items(), key=lambda item: -item[1])[:25]
        report = {
            "samples": self.samples,
            "ours": self.ours,
            "sample_s": SAMPLE_S,
            "gaps": [gap for gap in self.gaps if gap[0] > 0.02],
            "cpu_s": time.process_time(),
            "where": top,
        }
        self._reset()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(report).encode()})

    async def _tick(self) -> None:
        before, cpu_before = time.monotonic(), time.thread_time()
        while True:
            await asyncio.sleep(TICK_S)
            now, cpu = time.monotonic(), time.thread_time()
            ours, seen = self._since_tick
            self._since_tick = [0, 0]
            self.gaps.append((now - before - TICK_S, ours, seen, cpu - cpu_before))
            before, cpu_before = now, cpu

    def _watch(self) -> None:
        while True:
            time.sleep(SAMPLE_S)
            frame = sys._current_frames().get(self._loop_thread)
            where = _innermost(frame)
            self.samples += 1
            self._since_tick[1] += 1
            if where:
                self.ours += 1
                self._since_tick[0] += 1
                self._where[where] = self._where.get(where, 0) + 1


def _innermost(frame: Any) -> str:
    """Where in our code the thread is, "" if somebody else's code is further in."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OURS):
            return f"{name.removeprefix(ROOT)}:{frame.f_code.co_name}"
        if any(other in name for other in OTHERS):
            return ""
        frame = frame.f_back
    return ""
