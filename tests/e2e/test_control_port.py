"""``--control-port``: sandboxes reach model traffic only, with several workers too."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import demo_engine, free_port, sidecar_process

R = "/ng-rollout/r1/training-token-capture"
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_each_port_serves_its_own(tmp_path: Path, workers: str) -> None:
    """Control names are closed on the agents' port, model calls on the control port."""
    control_port, log = free_port(), tmp_path / "log"
    flags = ("--control-port", str(control_port), "--workers", workers)
    with (
        demo_engine(log) as engine,
        sidecar_process(engine, f"file://{tmp_path}/store", log, *flags) as (url, _),
        httpx.Client(base_url=url, trust_env=False) as agent,
        httpx.Client(base_url=f"http://127.0.0.1:{control_port}", trust_env=False) as operator,
    ):
        for path in ("/healthz", "/readyz", "/version", "/metrics"):
            assert agent.get(path).status_code == operator.get(path).status_code == 200
        for path in (R, f"{R}/snapshot", f"{R}//freeze", "/ng-rollout", "//ng-rollout", f"{R}/"):
            assert agent.get(path).status_code == 404, path
        for path in (f"{R}/freeze", "/ng-rollout:batch", "/ng%2drollout:sweep"):
            assert agent.post(path, json={}).status_code == 404, path
        spoofed = {"host": f"127.0.0.1:{control_port}", "x-forwarded-port": str(control_port)}
        assert agent.get("/ng-rollout", headers=spoofed).status_code == 404

        assert operator.post(f"{R}/v1/chat/completions", json=HELLO).status_code == 404
        assert operator.post("/v1/chat/completions", json=HELLO).status_code == 404
        assert operator.get(R).json()["state"] == "unknown"

        assert agent.post(f"{R}/v1/chat/completions", json=HELLO).status_code == 200
        frozen = operator.post(f"{R}/freeze").json()
        assert (frozen["calls"], frozen["incomplete"]) == (1, False)
        assert agent.get("/v1/models").status_code == 200
