"""The reference pages say what the code says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITE = "python -m tests.reference"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as the code makes them now, in a clean environment and terminal."""
    place = tmp_path_factory.mktemp("reference")
    program = (
        "import sys, pathlib, tests.reference as r\n"
        "for name, text in r.pages().items(): (pathlib.Path(sys.argv[1]) / name).write_text(text)"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("TOKEN_CAPTURE_")}
    done = subprocess.run(
        [sys.executable, "-c", program, str(place)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.parametrize("page", ["settings.md", "cli.md", "http-api.md"])
def test_the_page_is_up_to_date(page: str, written: Path) -> None:
    """Run the writer after changing a setting, a command or a route."""
    known = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    assert known == (written / page).read_text(encoding="utf-8"), f"run: {WRITE}"


def test_every_setting_has_a_meaning(written: Path) -> None:
    """No row of the table is left without words."""
    rows = (written / "settings.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in rows if row.startswith("| `") and row.endswith("|  |")] == []
