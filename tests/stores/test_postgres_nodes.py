"""Two nodes, each a sidecar process and an engine, one database between them."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from capture_server.client import RolloutClient
from capture_server.demo.agent import DemoAgent
from capture_server.demo.engine import DemoEngine
from capture_server.demo.server import running_engine
from middleware.paths import capture_base_url


@asynccontextmanager
async def node(store_url: str) -> AsyncIterator[str]:
    """An engine and a sidecar process in front of it; gives the sidecar's URL."""
    async with running_engine(DemoEngine()) as engine_url:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "capture_server.cli", "serve"],
            *["--port", "0", "--upstream", engine_url],
            stderr=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "TOKEN_CAPTURE_STORE": store_url,
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
        )
        assert process.stderr is not None
        try:
            url = ""
            while not url:
                line = (await process.stderr.readline()).decode()
                assert line, "the sidecar ended while it started"
                found = re.search(r"listening on (http://\S+)", line)
                url = found[1] if found else ""
            yield url
        finally:
            process.terminate()
            await process.communicate()


async def test_one_rollout_over_two_nodes(database):
    """Calls alternate between the nodes, lineage resolves, either node freezes and builds."""
    rollout = "two-nodes"
    async with node(database) as one, node(database) as two:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            agent = DemoAgent(http, capture_base_url(one, rollout), "demo")
            for turn in range(6):
                agent.base_url = capture_base_url([one, two][turn % 2], rollout)
                await agent.say(f"Question {turn}?", seed=turn, tool_choice="none")
        async with RolloutClient(one) as first, RolloutClient(two) as second:
            await second.freeze(rollout)
            snapshot = await first.snapshot(rollout)
            traces = [await client.traces(rollout) for client in (first, second)]
            status = await first.status(rollout)
            retired = await first.retire(
                rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version
            )
            left = await second.status(rollout)

    entries = sorted(snapshot.entries, key=lambda entry: entry.created_at)
    ids = [turn.model_call_id for turn in agent.turns]
    assert ids == [entry.model_call_id for entry in entries]
    assert [entry.parent_call_id for entry in entries] == [None, *ids[:-1]]
    assert (status.calls, dict(status.resolutions)) == (
        6,
        {"root": 1, "resolved": 5, "unresolved": 0},
    )
    assert not snapshot.incomplete
    # A row may end where the engine itself took the text for other tokens; none is lost for it.
    rows = [[list(row.model_call_ids) for row in built.rows] for built in traces]
    assert rows[0] == rows[1]
    assert [call for row in rows[0] for call in row] == ids
    assert len(rows[0]) == 1 + status.drifted_calls
    assert not any(built.mask_sample for built in traces)
    assert retired
    assert left.state == "retired"


async def test_a_node_without_the_tables_does_not_start(server_url):
    """It says what to run, and not the password."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "capture_server.cli", "serve", "--port", "0"],
        stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "TOKEN_CAPTURE_STORE": server_url,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
    )
    _, stderr = await process.communicate()

    assert process.returncode == 2
    assert b"run: token-capture migrate" in stderr
