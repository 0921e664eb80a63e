"""``/metrics`` of several worker processes: whichever answers, answers for all."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import httpx

from tests.e2e.processes import demo_engine, sidecar_process
from tests.e2e.test_workers import workers_of

CALLS = 12
BODY = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def scraped(url: str, name: str) -> float:
    """The sum of a metric's samples, read over a new connection."""
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    found = re.findall(rf"^token_capture_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def call(url: str, rollout: str) -> None:
    tag = f"/ng-rollout/{rollout}/training-token-capture/v1/chat/completions"
    # A connection of its own: the kernel hands them to different workers.
    assert httpx.post(url + tag, json=BODY, timeout=30, trust_env=False).status_code == 200


def wait_until_answering(url: str, workers: int, parent: int) -> None:
    deadline = time.monotonic() + 30
    while len(workers_of(parent)) < workers or scraped(url, "store_healthy") != 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_values_add_up_over_workers_and_outlive_one(tmp_path: Path) -> None:
    """Calls counted by a worker that was killed stay counted; its gauges go."""
    with demo_engine(tmp_path / "engine.log") as engine:
        flags = ("--workers", "2")
        log = tmp_path / "sidecar.log"
        with sidecar_process(engine, f"file://{tmp_path}/store", log, *flags) as (url, parent):
            for number in range(CALLS):
                call(url, f"r{number}")
            assert {scraped(url, "calls_total") for _ in range(6)} == {CALLS}
            assert scraped(url, "put_seconds_count") == CALLS

            victim = workers_of(parent.pid)[0]
            os.kill(victim, signal.SIGKILL)
            wait_until_answering(url, 2, parent.pid)
            call(url, "after")
            assert {scraped(url, "calls_total") for _ in range(6)} == {CALLS + 1}
            assert scraped(url, "open_intents") == 0
