"""Two sidecars over one store are restarted in turn under load: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import demo_engine, free_port, sidecar_process

AGENTS = 8
TURNS = 12


class Pair:
    """Two sidecars of one store; agents use whichever takes connections."""

    def __init__(self, engine: str, place: Path) -> None:
        self._engine, self._place = engine, place
        self._stacks: dict[int, ExitStack] = {}
        self._processes: dict[int, Any] = {}
        self.ports = [free_port(), free_port()]

    def start(self, port: int) -> None:
        stack = self._stacks[port] = ExitStack()
        store = f"file://{self._place}/store"
        log = self._place / f"{port}.log"
        running = sidecar_process(self._engine, store, log, port=port)
        _, self._processes[port] = stack.enter_context(running)

    def restart(self, port: int) -> int:
        """SIGTERM, wait for its own end, start the next; returns the exit code."""
        self._processes[port].send_signal(signal.SIGTERM)
        code: int = self._processes[port].wait(30)
        self._stacks.pop(port).close()
        self.start(port)
        return code

    def close(self) -> None:
        for stack in self._stacks.values():
            stack.close()


async def one_turn(http: httpx.AsyncClient, ports: list[int], rollout: str, body: Any) -> Any:
    """The answer of the first sidecar that takes the call; only a refused connection goes on."""
    tag = f"/ng-rollout/{rollout}/training-token-capture/v1/chat/completions"
    while True:
        for port in ports:
            try:
                answer = await http.post(f"http://127.0.0.1:{port}{tag}", json=body)
            except httpx.ConnectError:
                continue
            assert answer.status_code == 200, answer.text
            return answer.json()
        await asyncio.sleep(0.05)


async def agent(number: int, ports: list[int], turns: list[int]) -> list[str]:
    """One conversation; every second agent prefers the other sidecar. Ids of its answers."""
    said = [{"role": "user", "content": f"task {number}"}]
    preferred = ports[number % 2 :] + ports[: number % 2]
    answers = []
    # No kept-alive connections: a closed one would look like a lost answer.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=60, trust_env=False) as http:
        for _ in range(TURNS):
            body = {"model": "demo", "messages": said, "max_tokens": 24}
            answer = await one_turn(http, preferred, f"agent-{number}", body)
            answers.append(answer["id"])
            turns[0] += 1
            said += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]
    return answers


async def restarts(pair: Pair, turns: list[int]) -> list[int]:
    """Each sidecar once, in the middle of the work; exit codes."""
    codes = []
    for share, port in ((0.2, pair.ports[0]), (0.5, pair.ports[1])):
        while turns[0] < share * AGENTS * TURNS:
            await asyncio.sleep(0.01)
        codes.append(await asyncio.to_thread(pair.restart, port))
    return codes


@pytest.mark.timeout(120)
async def test_rolling_restart_under_load(tmp_path: Path) -> None:
    """Every answer is recorded, every rollout is whole, each conversation is one chain."""
    with demo_engine(tmp_path / "engine.log") as engine:
        pair = Pair(engine, tmp_path)
        try:
            for port in pair.ports:
                await asyncio.to_thread(pair.start, port)
            turns = [0]
            codes, *answers = await asyncio.gather(
                restarts(pair, turns), *(agent(n, pair.ports, turns) for n in range(AGENTS))
            )
            assert codes == [0, 0]
            url = f"http://127.0.0.1:{pair.ports[0]}"
            async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
                for number, ids in enumerate(answers):
                    tag = f"/ng-rollout/agent-{number}/training-token-capture"
                    frozen = (await http.post(f"{tag}/freeze")).json()
                    entries = (await http.get(f"{tag}/snapshot")).json()["entries"]
                    assert frozen["incomplete_reasons"] == []
                    assert {entry["response_id"] for entry in entries} == set(ids)
                    assert frozen["resolutions"]["resolved"] == TURNS - 1
        finally:
            pair.close()
