"""``--workers N``: real server processes that share one socket, one store and every rollout."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture_server.config import load_settings
from capture_server.stores.journal import Intent, journal_name, scan
from capture_server.workers import check_workers
from middleware.errors import ConfigurationError
from tests.e2e.processes import demo_engine, sidecar_process
from tests.http.upstream import RESET, chat, scripted_engine, whole

_AGENTS = 12


def tagged(rollout: str, verb: str) -> str:
    return f"/ng-rollout/{rollout}/training-token-capture/{verb}"


def workers_of(parent: int) -> list[int]:
    """Pids of the worker processes (multiprocessing's resource tracker is none)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and b"spawn_main" in command:
            found.append(int(path.parent.name))
    return sorted(found)


def journal_text(root: Path, rollout: str) -> str:
    """What is recorded of the rollout so far."""
    path = root / journal_name(rollout)
    return path.read_text() if path.exists() else ""


def is_there(pid: int) -> bool:
    """Whether the process runs."""
    return Path(f"/proc/{pid}").exists()


def holders(root: Path, rollout: str) -> dict[str, int]:
    """Which process held each call's intent."""
    data = (root / journal_name(rollout)).read_bytes()
    intents = [span.record for span in scan(data) if isinstance(span.record, Intent)]
    return {intent.call: int(intent.holder.split(":")[-2]) for intent in intents}


@dataclass
class Served:
    """A running sidecar; ``agents`` are connections to different workers, one each."""

    url: str
    parent: subprocess.Popen[bytes]
    root: Path
    agents: dict[int, httpx.AsyncClient]


@asynccontextmanager
async def served(upstream: str, tmp_path: Path, workers: int, *flags: str) -> AsyncIterator[Served]:
    """Run one and find a connection to each of (at least two of) its workers."""
    root, log = tmp_path / "store", tmp_path / "sidecar.log"
    options = ("--workers", str(workers), *flags)
    async with AsyncExitStack() as stack:
        running = sidecar_process(upstream, f"file://{root}", log, *options)
        url, parent = await asyncio.to_thread(running.__enter__)
        stack.push_async_callback(asyncio.to_thread, running.__exit__, None, None, None)
        agents: dict[int, httpx.AsyncClient] = {}
        for attempt in range(20):
            new = [
                httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) for _ in range(_AGENTS)
            ]
            for client in new:
                await stack.enter_async_context(client)
            pids = await _find_workers(new, root, f"probe{attempt}")
            agents |= {pid: client for client, pid in pids.items() if pid not in agents}
            if len(agents) >= min(workers, 2):
                break
        yield Served(url, parent, root, agents)


async def _find_workers(
    clients: list[httpx.AsyncClient], root: Path, rollout: str
) -> dict[httpx.AsyncClient, int]:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answers = await asyncio.gather(
        *(client.post(tagged(rollout, "v1/chat/completions"), json=body) for client in clients)
    )
    held = holders(root, rollout)
    return {
        client: held[answer.headers["x-model-call-id"]]
        for client, answer in zip(clients, answers, strict=True)
    }


async def converse(agents: list[httpx.AsyncClient], rollout: str, turns: int) -> None:
    """One conversation whose calls go round the workers."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Count with me: one."}]
    for turn in range(turns):
        agent = agents[turn % len(agents)]
        body = {"model": "demo", "messages": messages, "max_tokens": 16}
        answer = await agent.post(tagged(rollout, "v1/chat/completions"), json=body)
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"])
        messages.append({"role": "user", "content": f"Turn {turn}: go on."})


@pytest.mark.parametrize("workers", [1, 2, 4])
async def test_a_rollouts_calls_are_spread_over_workers(workers, tmp_path):
    """Each continuation resolves wherever it lands; any worker freezes, reads and retires."""
    turns = 8
    engine = demo_engine(tmp_path / "engine.log")
    url = await asyncio.to_thread(engine.__enter__)
    try:
        async with served(url, tmp_path, workers) as made:
            assert len(workers_of(made.parent.pid)) == (0 if workers == 1 else workers)
            agents = list(made.agents.values())
            await converse(agents, "r1", turns)
            pids = set(holders(made.root, "r1").values())
            frozen = (await agents[-1].post(tagged("r1", "freeze"))).json()
            seen = [(await a.get(tagged("r1", "snapshot"))).json() for a in agents]
            built = await agents[0].get(tagged("r1", "trajectories"), params={"format": "traces"})
            name = {"snapshot_id": frozen["snapshot_id"], "version": frozen["version"]}
            retired = await agents[0].post(tagged("r1", "retire"), json=name)
            late = await agents[-1].post(
                tagged("r1", "v1/chat/completions"), json={"model": "m", "messages": []}
            )
    finally:
        await asyncio.to_thread(engine.__exit__, None, None, None)

    assert len(pids) == len(agents) >= min(workers, 2)
    assert (frozen["calls"], frozen["incomplete"]) == (turns, False)
    assert frozen["resolutions"] == {"root": 1, "resolved": turns - 1, "unresolved": 0}
    assert all(snapshot == seen[0] for snapshot in seen)
    # The demo engine re-tokenises a cut answer: a drifted call starts a row of its own.
    assert sum(len(row["model_call_ids"]) for row in built.json()["rows"]) == turns
    assert retired.json() == {"retired": True}
    assert (late.status_code, late.json()["error"]["code"]) == (410, "rollout_retired")


ANSWER = whole(chat("hi", [11, 12], prompt=[1, 2]))
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def test_a_freeze_waits_for_another_workers_call(tmp_path):
    """The worker that freezes sees it in the store, and its record is part of the snapshot."""
    generating = asyncio.Event()
    async with scripted_engine([ANSWER]) as engine:
        async with served(engine.url, tmp_path, 2, "--freeze-grace-s", "20") as made:
            one, two = list(made.agents.values())[:2]
            engine.scripts = [[generating, ANSWER]]
            running = asyncio.create_task(one.post(tagged("r1", "v1/chat/completions"), json=HELLO))
            while not (await two.get(tagged("r1", ""))).json()["open_intents"]:
                await asyncio.sleep(0.01)
            freezing = asyncio.create_task(two.post(tagged("r1", "freeze")))
            while '"t":"closing"' not in journal_text(made.root, "r1"):
                await asyncio.sleep(0.01)
            refused = await two.post(tagged("r1", "v1/chat/completions"), json=HELLO)
            generating.set()
            frozen, served_call = (await freezing).json(), await running

    assert (served_call.status_code, refused.status_code) == (200, 409)
    assert (frozen["calls"], frozen["incomplete"]) == (1, False)


async def test_sigterm_ends_all_gracefully(tmp_path):
    """The running call gets its answer and its record; nothing is left, the exit code is 0."""
    generating = asyncio.Event()
    async with scripted_engine([ANSWER]) as engine:
        async with served(engine.url, tmp_path, 2) as made:
            agent = next(iter(made.agents.values()))
            engine.scripts = [[generating, ANSWER]]
            running = asyncio.create_task(
                agent.post(tagged("r1", "v1/chat/completions"), json=HELLO)
            )
            while '"t":"intent"' not in journal_text(made.root, "r1"):
                await asyncio.sleep(0.01)
            pids = workers_of(made.parent.pid)
            os.kill(made.parent.pid, signal.SIGTERM)
            await asyncio.sleep(0.3)
            generating.set()
            answer = await running
            code = await asyncio.to_thread(made.parent.wait, 30)

    num_entries = journal_text(tmp_path / "store", "r1").count('"t":"entry"')
    assert (answer.status_code, code, num_entries) == (200, 0, 1)
    assert not any(map(is_there, pids))


async def test_a_killed_worker_is_replaced(tmp_path):
    """Its open call dangles at once, the others serve on, and there are two workers again."""
    async with scripted_engine([ANSWER]) as engine:
        async with served(engine.url, tmp_path, 2, "--freeze-grace-s", "30") as made:
            (killed, victim), (_, other) = list(made.agents.items())[:2]
            engine.scripts = [[60.0, RESET]]
            lost = asyncio.create_task(victim.post(tagged("r1", "v1/chat/completions"), json=HELLO))
            while not (await other.get(tagged("r1", ""))).json()["open_intents"]:
                await asyncio.sleep(0.01)
            os.kill(killed, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await lost
            engine.scripts = [[ANSWER]]
            began = time.monotonic()
            frozen = (await other.post(tagged("r1", "freeze"))).json()
            freeze_s = time.monotonic() - began
            again = await other.post(tagged("r2", "v1/chat/completions"), json=HELLO)
            async with asyncio.timeout(30):
                while len(set(workers_of(made.parent.pid)) - {killed}) < 2:
                    await asyncio.sleep(0.05)

    assert [r["code"] for r in frozen["incomplete_reasons"]] == ["dangling_intent"]
    assert freeze_s < 10
    assert again.status_code == 200


async def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    """Nobody serves an old release on a port that the next one wants."""
    async with scripted_engine([ANSWER]) as engine:
        async with served(engine.url, tmp_path, 2) as made:
            pids = workers_of(made.parent.pid)
            port = int(made.url.rpartition(":")[2])
            os.kill(made.parent.pid, signal.SIGKILL)
            await asyncio.to_thread(made.parent.wait)
            async with asyncio.timeout(30):
                while any(map(is_there, pids)):
                    await asyncio.sleep(0.05)
            socket.create_server(("127.0.0.1", port)).close()

    assert len(pids) == 2


def run_serve(*flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command, expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "capture_server.cli", "serve", "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(cwd), str(Path.cwd())))},
    )


def test_workers_that_cannot_start_end_the_server(tmp_path):
    """At the first start there is nobody to serve on: the reason is above, the exit code bad."""
    (tmp_path / "only_in_parent.py").write_text(
        "import multiprocessing\n"
        "from capture_server.stores.file import TokenCaptureStore\n"
        "from capture_server.stores.lineage import FileLineageStore\n"
        "class Store(TokenCaptureStore):\n"
        "    def __init__(self, **options):\n"
        "        assert multiprocessing.parent_process() is None, 'not in a worker'\n"
        "        super().__init__(**options)\n"
    )
    store = f"only_in_parent:Store?root={tmp_path / 'store'}"
    done = run_serve("--workers", "2", "--store", store, cwd=tmp_path)

    assert done.returncode == 2, done.stderr
    assert "not in a worker" in done.stderr
    assert "a worker could not start" in done.stderr


@pytest.mark.parametrize("store", ["memory:", "alone:Store"])
def test_stores_that_workers_cannot_share_are_refused(store, tmp_path, monkeypatch):
    """Before anything is bound; the message says what to configure."""
    (tmp_path / "alone.py").write_text(
        "from capture_server.stores.memory import MemoryCaptureStore\n"
        "class Store(MemoryCaptureStore):\n"
        "    is_process_shared = None\n"
        "    async def resolve(self, rollout_id, items): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"2 workers cannot share .* file:///"):
        check_workers(load_settings(store=store, workers=2))


def test_a_resolver_of_one_process_is_refused(tmp_path, monkeypatch):
    """A shared store alone is not enough: each worker would know its own calls only."""
    (tmp_path / "half.py").write_text(
        "from middleware.lineage import InMemoryLineageStore\n"
        "from capture_server.stores.file import TokenCaptureStore\n"
        "class Store:\n"
        "    async def put(self, entry): ...\n"
        "    async def mark_incomplete(self, rollout_id, model_call_id=''): ...\n"
        "    async def begin_call(self, rollout_id, model_call_id): ...\n"
        "    async def close(self): ...\n"
        "    def is_process_shared(self): return True\n"
        "    def open_resolver(self): return InMemoryLineageStore()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="lineage resolver"):
        check_workers(load_settings(store="half:Store", workers=2))
