"""The server process is killed: nothing acknowledged is lost, nothing lost goes unseen."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import demo_engine, free_port, sidecar_process

R = "/ng-rollout/r1/training-token-capture"


def ask(url: str, messages: list[dict[str, Any]], **options: Any) -> httpx.Response:
    body = {"model": "demo", "messages": messages, "max_tokens": 12, "seed": 1} | options
    return httpx.post(f"{url}{R}/v1/chat/completions", json=body, timeout=20, trust_env=False)


def test_a_kill_between_two_turns_loses_no_acknowledged_call(tmp_path: Path) -> None:
    """kill -9, a new process on the same store: turn 2 resolves to turn 1, both are trained."""
    store = f"file://{tmp_path / 'store'}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    with demo_engine(tmp_path / "engine.log") as engine:
        with sidecar_process(engine, store, tmp_path / "first.log") as (url, first):
            answer = ask(url, messages)
            assert answer.status_code == 200
            first.send_signal(signal.SIGKILL)
            first.wait(5)
        messages.append(answer.json()["choices"][0]["message"])
        messages.append({"role": "user", "content": "go on"})
        with sidecar_process(engine, store, tmp_path / "second.log") as (url, _):
            second = ask(url, messages)
            with httpx.Client(base_url=url + R, timeout=20, trust_env=False) as trainer:
                frozen = trainer.post("/freeze").json()
                entries = trainer.get("/snapshot").json()["entries"]

    assert (frozen["calls"], frozen["incomplete"]) == (2, False)
    by_id = {entry["model_call_id"]: entry for entry in entries}
    child = by_id[second.headers["x-model-call-id"]]
    assert child["parent_call_id"] == answer.headers["x-model-call-id"]


def test_a_call_lost_in_a_kill_makes_the_rollout_incomplete(tmp_path: Path) -> None:
    """Killed while the engine generates: the intent dangles, and freeze says so."""
    store = f"file://{tmp_path / 'store'}"
    body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    body |= {"max_tokens": 4000, "ignore_eos": True}
    with demo_engine(tmp_path / "engine.log") as engine:
        with sidecar_process(engine, store, tmp_path / "first.log") as (url, first):
            with httpx.stream("POST", f"{url}{R}/v1/chat/completions", json=body) as response:
                pieces = response.iter_raw()
                next(pieces)
                first.send_signal(signal.SIGKILL)
                first.wait(5)
                with pytest.raises(httpx.TransportError):
                    list(pieces)
        with sidecar_process(engine, store, tmp_path / "second.log") as (url, _):
            frozen = httpx.post(f"{url}{R}/freeze", timeout=20, trust_env=False).json()

    assert frozen["incomplete"]
    assert [reason["code"] for reason in frozen["incomplete_reasons"]] == ["dangling_intent"]


def test_the_server_ends_cleanly_when_told_to(tmp_path: Path) -> None:
    """SIGTERM: running calls end, exit code 0; a second process may take the port at once."""
    port = free_port()
    with demo_engine(tmp_path / "engine.log") as engine:
        for run in range(2):
            log = tmp_path / f"{run}.log"
            store = f"file://{tmp_path / 'store'}"
            with sidecar_process(engine, store, log, port=port) as (url, server):
                assert ask(url, [{"role": "user", "content": "hello"}]).status_code == 200
                server.send_signal(signal.SIGTERM)
                assert server.wait(20) == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--store", "redis://x"], "redis://x"),
        (["--host", "0.0.0.0"], "TOKEN_CAPTURE_CONTROL_TOKEN"),
        (["--engine", "x"], "engine"),
    ],
)
def test_settings_that_cannot_work_end_the_start_with_one_clear_line(
    flags: list[str], named: str
) -> None:
    """An unknown store, an address open to all without a token: no traceback, the remedy named."""
    done = subprocess.run(
        [sys.executable, "-m", "capture_server.cli", "serve", *flags],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert named in done.stderr
