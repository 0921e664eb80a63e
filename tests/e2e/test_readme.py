"""The README's commands and programs run as they stand there, ports and paths apart."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import demo_engine, sidecar_process

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"<!-- test: (\w+) -->\n```\w+\n(.*?)```", re.DOTALL)
BLOCKS = dict(BLOCK.findall(README.read_text()))


@pytest.fixture(scope="module")
def sidecar_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The engine and the sidecar that the README tells to start, on free ports."""
    place = tmp_path_factory.mktemp("readme")
    words = BLOCKS["serve"].split()
    assert words[:2] == ["token-capture", "serve"]
    flags = dict(zip(words[2::2], words[3::2], strict=True))
    assert set(flags) == {"--upstream", "--store"}
    with demo_engine(place / "engine.log") as engine:
        store = f"file://{place / 'store'}"
        with sidecar_process(engine, store, place / "sidecar.log") as (url, _):
            yield url


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_agent_and_trainer(sidecar_url: str) -> None:
    """Two turns through the openai client; the trainer gets one row of both and retires."""
    for name in ("agent", "trainer"):
        program = BLOCKS[name].replace("http://127.0.0.1:8900", sidecar_url)
        output = run(sys.executable, "-c", program)
        assert output.strip()

    status = httpx.get(f"{sidecar_url}/ng-rollout/task7-try1/training-token-capture").json()
    assert status["state"] == "retired"


def test_curl(sidecar_url: str) -> None:
    """Call, status, freeze, snapshot, rows, retire, each with curl."""
    script = BLOCKS["curl"].replace("http://127.0.0.1:8900", sidecar_url)
    output = run("bash", "-euo", "pipefail", "-c", script)

    for part in ('"choices"', '"state":"frozen"', '"entries"', '"loss_mask"', '"retired":true'):
        assert part in output.replace(": ", ":"), part


def test_the_two_commands_exist() -> None:
    """``make demo`` and ``make test`` are what the README says that they are."""
    makefile = (README.parent / "Makefile").read_text()

    for target in ("demo", "test"):
        assert f"make {target}" in README.read_text()
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
