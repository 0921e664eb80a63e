"""``token-capture demo``: the whole loop in one command, for a human and for a machine."""

from __future__ import annotations

import json
import subprocess
import sys


def demo(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "capture_server.cli", "demo", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_demo_as_json() -> None:
    """One object with the promised keys; exit code 0 because every check held."""
    done = demo("--json")

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["failures"] == []
    assert len(result["checks"]) >= 7
    assert (result["calls"], result["incomplete"], result["retired"]) == (5, False, True)
    assert result["rows"] >= 1
    assert result["trainable_tokens"] > 0
    assert result["prompt_tokens"] > 0
    assert set(result) >= {"rollout_id", "snapshot_id", "version"}


def test_demo_for_a_human() -> None:
    """Each step is told; the checks are listed."""
    done = demo()

    assert done.returncode == 0, done.stderr
    for part in ("sidecar", "tool call", "retry", "trainable_tokens", "ok  "):
        assert part in done.stdout
