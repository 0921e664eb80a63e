"""Real server processes for end-to-end tests: started, waited for, ended with their group."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process(*args: str, ready: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``python -m args`` until the block ends; ``ready`` is a URL that must answer 200."""
    with log.open("ab") as output:
        running = subprocess.Popen(
            [sys.executable, "-m", *args], stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 40
        while not _answers(ready):
            if running.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{args} did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield running
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGTERM)
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait(5)


@contextmanager
def demo_engine(log: Path) -> Iterator[str]:
    """The built-in engine as a process; its base URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with process("capture_server.demo", "--port", str(port), ready=f"{url}/health", log=log):
        yield url


@contextmanager
def sidecar_process(
    upstream: str, store: str, log: Path, *flags: str, port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """``token-capture serve`` as a process; its base URL and the process."""
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    args = ["capture_server.cli", "serve", "--upstream", upstream, "--store", store, *flags]
    with process(*args, "--port", str(port), ready=f"{url}/healthz", log=log) as running:
        yield url, running


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
