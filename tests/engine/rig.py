"""The engine suite's two real processes, and the trainer's side in plain HTTP.

``Engine`` is a ``vllm serve``, ``Sidecar`` a ``token-capture serve``: both are subprocesses with a
log of their own, ended with their whole process group. ``Rollout`` speaks the control routes with
httpx and nothing of ours, so that these tests do not believe the product's own client.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.engine.digests import assert_sound

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tiny"
CONTEXT = 2048  # tokens: --max-model-len

# Offline, one small key-value cache, two threads: what a two-core machine can serve.
ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
}

# float32 and no prefix cache: the same request and seed must sample the same tokens twice, which
# is what lets these tests compare a captured call with one that the engine was asked directly.
ENGINE_FLAGS = [
    *("--served-model-name", MODEL),
    *("--max-model-len", str(CONTEXT)),
    *("--max-num-seqs", "8"),
    *("--dtype", "float32"),
    "--enforce-eager",
    "--no-enable-prefix-caching",
    "--enable-auto-tool-choice",
    *("--tool-call-parser", "hermes"),
]


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(holds: Callable[[], bool], what: str, *, within_s: float) -> None:
    """Poll until ``holds()``; polling is the only way to wait for another process's HTTP port.

    Raises:
        AssertionError: it did not hold in time.
    """
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {within_s} s in vain: {what}"
        time.sleep(0.05)


@dataclass
class Process:
    """A server subprocess: started in its own process group, its output in one log file."""

    name: str
    command: Sequence[str]
    health_url: str
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    _popen: subprocess.Popen[bytes] | None = None

    def start(self, *, within_s: float) -> None:
        """Start and wait until the health route answers 200."""
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=_clean_environment() | self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until(self._is_healthy, f"{self.name} to be healthy", within_s=within_s)

    def _is_healthy(self) -> bool:
        assert self._popen is not None
        code = self._popen.poll()
        assert code is None, f"{self.name} ended with {code}\n{self.log_tail()}"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.health_url, timeout=2).status_code == 200
        return False

    def kill(self) -> None:
        """kill -9, as a crash would."""
        self._end(signal.SIGKILL, within_s=10)

    def stop(self, *, within_s: float = 30) -> None:
        """SIGTERM, then SIGKILL for what is left of the group. Idempotent."""
        if self._popen is None:
            return
        try:
            self._end(signal.SIGTERM, within_s=within_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def _end(self, how: signal.Signals, *, within_s: float) -> None:
        assert self._popen is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, how)
        self._popen.wait(within_s)
        # The leader is gone; its children (vLLM's engine core) must not outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen = None

    def log_tail(self, lines: int = 60) -> str:
        """The last lines of the log, for a failure report."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def _clean_environment() -> dict[str, str]:
    """This process's environment without our own settings: a developer's shell decides nothing."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TOKEN_CAPTURE_")}
    return kept | {"PYTHONUNBUFFERED": "1"}


class Engine(Process):
    """A real ``vllm serve`` of the tiny model."""

    def __init__(self, vllm: Path, model: Path, log: Path, url: str = "") -> None:
        port = free_port()
        self.url = url or f"http://127.0.0.1:{port}"
        command = [str(vllm), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
        super().__init__(
            "vllm", [*command, *ENGINE_FLAGS], f"{self.url}/health", log, dict(ENGINE_ENV)
        )

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the engine directly, past the sidecar.

        Raises:
            httpx.HTTPStatusError: it refused.
        """
        response = httpx.post(f"{self.url}{path}", json=body, timeout=300)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def tokenize(self, **body: Any) -> list[int]:
        """The engine's own token ids of ``messages=[...]`` (with ``tools=``) or ``prompt=``."""
        ids: list[int] = self.post("/tokenize", {"model": MODEL, **body})["tokens"]
        return ids

    def running_requests(self) -> int:
        """How many requests the scheduler is working on now."""
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            if line.startswith("vllm:num_requests_running"):
                return int(float(line.rsplit(" ", 1)[1]))
        raise AssertionError("the engine reports no vllm:num_requests_running")


class Sidecar(Process):
    """A real ``token-capture serve`` in front of an engine."""

    def __init__(self, upstream: str, store: Path, log: Path, *flags: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.store = store
        command = [sys.executable, "-m", "capture_server.cli", "serve"]
        command += ["--upstream", upstream, "--store", store.as_uri()]
        command += ["--host", "127.0.0.1", "--port", str(port), *flags]
        super().__init__("sidecar", command, f"{self.url}/readyz", log)


@dataclass(frozen=True)
class Rollout:
    """One rollout's URLs and what its trainer asks for."""

    rollout_id: str
    sidecar: Sidecar

    @property
    def control(self) -> str:
        """``R``, the root of the control routes."""
        return f"{self.sidecar.url}/ng-rollout/{self.rollout_id}/training-token-capture"

    @property
    def base_url(self) -> str:
        """What the agent is given."""
        return f"{self.control}/v1"

    def get(self, route: str = "", **params: str) -> httpx.Response:
        """A control GET, whatever its status."""
        return httpx.get(f"{self.control}{route}", params=params, timeout=30)

    def post(self, route: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """A control POST, whatever its status."""
        return httpx.post(f"{self.control}{route}", json=body, timeout=30)

    def freeze(self) -> dict[str, Any]:
        """Freeze and return the summary."""
        response = self.post("/freeze")
        assert response.status_code == 200, response.text
        summary: dict[str, Any] = response.json()
        return summary

    def frozen_calls(self) -> dict[str, dict[str, Any]]:
        """Freeze, and return the complete snapshot's entries with full prompts, by call id.

        Raises:
            AssertionError: the rollout is incomplete, or a digest does not fit its tokens.
        """
        summary = self.freeze()
        snapshot = self.get("/snapshot", full_prompts="true").json()
        assert snapshot["incomplete"] is False, snapshot["incomplete_reasons"]
        assert snapshot["snapshot_id"] == summary["snapshot_id"]
        calls = {entry["model_call_id"]: entry for entry in snapshot["entries"]}
        assert len(calls) == len(snapshot["entries"]) == summary["calls"]
        for entry in calls.values():
            assert_sound(entry)
        return calls

    def rows(self) -> dict[str, Any]:
        """The frozen rollout's training rows (``format: traces``), shapes checked."""
        response = self.post("/trajectories", {"builder": "prefix_merging", "format": "traces"})
        assert response.status_code == 200, response.text
        traces: dict[str, Any] = response.json()
        for row in traces["rows"]:
            length = len(row["token_ids"])
            assert len(row["loss_mask"]) == len(row["log_probs"]) == length
            assert set(row["loss_mask"]) <= {0, 1}
        return traces

    def retire(self, snapshot_id: str, version: int) -> httpx.Response:
        """Retire exactly that snapshot."""
        return self.post("/retire", {"snapshot_id": snapshot_id, "version": version})
