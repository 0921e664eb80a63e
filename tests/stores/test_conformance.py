"""The kit passes over our stores and names what a broken one breaks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from capture_server import conformance, conformance_checks
from capture_server.conformance import run_conformance
from capture_server.conformance_processes import PROCESS_CHECKS
from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.lineage import FileLineageStore, MemoryLineageStore
from capture_server.stores.memory import MemoryCaptureStore


async def test_file_store_conforms(tmp_path):
    """All checks, every handle a store of its own on one root."""
    passed = await run_conformance(
        lambda: TokenCaptureStore(tmp_path),
        lambda: TokenCaptureStore(tmp_path),
        lambda: FileLineageStore(tmp_path),
    )

    assert len(passed) == 26
    assert {"late_put", "similar_ids", "lineage", "delta_round_trip", "first_calls"} <= set(passed)


async def test_memory_store_conforms(monkeypatch):
    """The in-memory twin keeps the same contract, twice with one rollout id."""
    monkeypatch.setattr(conformance_checks, "BIG_TOKENS", 1000)
    for _ in range(2):
        store = MemoryCaptureStore()
        passed = await run_conformance(
            lambda s=store: s, lambda s=store: s, lambda s=store: MemoryLineageStore(s)
        )
    assert len(passed) == 25


async def test_a_minimal_sink_is_checked_for_what_it_has(monkeypatch):
    """A transport without intents passes the core checks; the optional ones are not claimed."""
    monkeypatch.setattr(conformance_checks, "BIG_TOKENS", 1000)
    inner = MemoryCaptureStore()

    class Minimal:
        put, mark_incomplete, close = inner.put, inner.mark_incomplete, inner.close
        freeze, drop = inner.freeze, inner.drop

    passed = await run_conformance(Minimal, Minimal, rollout_id="mine")

    assert len(passed) == 12
    assert "intents" not in passed


@pytest.mark.parametrize(
    ("url", "code"),
    [("memory:", 0), ("postgresql://127.0.0.1:1/y", 1)],
    ids=["memory", "unreachable"],
)
def test_command_line(url, code, capsys, monkeypatch):
    """Third parties run it with a store URL; the exit code tells."""
    monkeypatch.setattr(conformance_checks, "BIG_TOKENS", 1000)

    assert conformance.main(["--store", url]) == code
    captured = capsys.readouterr()
    assert ("ok   put_and_read" in captured.out) == (code == 0)
    assert captured.err.startswith("FAIL") == (code == 1)


def test_command_line_over_processes(tmp_path):
    """For a shared store, other threads and processes read, and race a freeze with their puts."""
    done = subprocess.run(
        [sys.executable, "-m", "capture_server.conformance", "--store", str(tmp_path / "s")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )

    assert done.returncode == 0, done.stderr
    names = ("fresh_process", "race_of_threads", "race_of_processes")
    assert done.stdout.endswith("".join(f"ok   {name}\n" for name in names))


async def test_no_other_process_is_given_the_url_as_an_argument(tmp_path, monkeypatch):
    """It may hold a password, and everybody on the machine can read arguments."""
    commands = []
    start = asyncio.create_subprocess_exec

    async def noted(*command, **options):
        commands.append(command)
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    for _, check in PROCESS_CHECKS:
        await check(str(tmp_path / "secret"))

    assert len(commands) == 4
    assert not any("secret" in argument for command in commands for argument in command)
