"""vLLM does not start with settings that it cannot honour, and says why in one line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.engine.inside.rig import InsideEngine


@pytest.mark.usefixtures("start_inside")  # which installs what is needed
def test_wrong_settings_stop_vllm_at_start(tmp_path: Path) -> None:
    """A misspelt name and a store that only one process could see, both named, exit code not 0."""
    settings = {"PREFIX_SUPLY": "require", "STORE": "memory:"}
    engine = InsideEngine(tmp_path, settings)
    done = subprocess.run(
        list(engine.command),
        env=engine.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
    )
    (line,) = [line for line in done.stdout.splitlines() if "token capture:" in line]
    assert "TOKEN_CAPTURE_PREFIX_SUPLY is no setting" in line
    assert "did you mean TOKEN_CAPTURE_PREFIX_SUPPLY" in line
    assert "TOKEN_CAPTURE_STORE: a memory store" in line
    assert done.returncode != 0
