"""The kit passes over our stores and names what a broken one breaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from capture_server import conformance, conformance_checks
from capture_server.conformance import run_conformance
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

    assert len(passed) == 21
    assert {"late_put", "similar_ids", "lineage", "delta_round_trip", "first_calls"} <= set(passed)


async def test_memory_store_conforms(monkeypatch):
    """The in-memory twin keeps the same contract, twice with one rollout id."""
    monkeypatch.setattr(conformance_checks, "BIG_TOKENS", 1000)
    for _ in range(2):
        store = MemoryCaptureStore()
        passed = await run_conformance(
            lambda s=store: s, lambda s=store: s, lambda s=store: MemoryLineageStore(s)
        )
    assert len(passed) == 21


async def test_a_minimal_sink_is_checked_for_what_it_has(monkeypatch):
    """A transport without intents passes the core checks; the optional ones are not claimed."""
    monkeypatch.setattr(conformance_checks, "BIG_TOKENS", 1000)
    inner = MemoryCaptureStore()

    class Minimal:
        put, mark_incomplete, close = inner.put, inner.mark_incomplete, inner.close
        freeze, drop = inner.freeze, inner.drop

    passed = await run_conformance(Minimal, Minimal, rollout_id="mine")

    assert len(passed) == 11
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
    """For a shared store another process must see what was put."""
    done = subprocess.run(
        [sys.executable, "-m", "capture_server.conformance", "--store", str(tmp_path / "s")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("ok   fresh_process\n")
