"""Build the wheel, install it in an empty environment, and run the demo from there.

A script, not a test: ``make wheel``. It proves that the wheel alone, away from the source tree,
holds all that the product needs. The wheel is left in ``dist/``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PIP = ["-m", "pip", "-qq", "--disable-pip-version-check", "--no-input"]


def run(*command: str | Path, cwd: Path) -> str:
    """The command's standard output; its standard error passes through.

    Raises:
        SystemExit: it failed.
    """
    # Neither the source tree nor a developer's settings may help the installed product along.
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    kept = {k: v for k, v in os.environ.items() if k not in hidden and "TOKEN_CAPTURE" not in k}
    words = [str(part) for part in command]
    done = subprocess.run(
        words, cwd=cwd, env=kept, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False
    )
    if done.returncode != 0:
        sys.stderr.buffer.write(done.stdout)
        raise SystemExit(f"check_wheel: failed with {done.returncode}: {' '.join(words)}")
    return done.stdout.decode()


def build_wheel() -> Path:
    """Build into ``dist/`` (emptied first) with the declared build requirements."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", "dist", ".", cwd=ROOT)
    (wheel,) = (ROOT / "dist").glob("*.whl")
    return wheel


def demo_from(wheel: Path, directory: Path) -> dict[str, Any]:
    """Install the wheel in an environment of its own below ``directory`` and run the demo."""
    environment, elsewhere = directory / "environment", directory / "elsewhere"
    venv.create(environment, with_pip=True)
    elsewhere.mkdir()
    run(environment / "bin/python", *PIP, "install", wheel, cwd=elsewhere)
    answer = run(environment / "bin/token-capture", "demo", "--json", cwd=elsewhere)
    result: dict[str, Any] = json.loads(answer)
    return result


def problems_of(demo: dict[str, Any]) -> list[str]:
    """What the demo's own summary says went wrong."""
    expected = {
        "rollout_id": bool(demo.get("rollout_id")),
        "calls": demo.get("calls", 0) >= 3,
        "snapshot_id": bool(demo.get("snapshot_id")),
        "version": demo.get("version", 0) >= 1,
        "incomplete": demo.get("incomplete") is False,
        "rows": bool(demo.get("rows")),
        "prompt_tokens": demo.get("prompt_tokens", 0) > 0,
        "trainable_tokens": demo.get("trainable_tokens", 0) > 0,
        "retired": demo.get("retired") is True,
    }
    return [key for key, holds in expected.items() if not holds]


def main() -> None:
    """Build, install, run, judge.

    Raises:
        SystemExit: a step failed, or the demo's result is not what a sound loop gives.
    """
    wheel = build_wheel()
    with tempfile.TemporaryDirectory(prefix="token-capture-wheel-") as directory:
        demo = demo_from(wheel, Path(directory))
    if wrong := problems_of(demo):
        raise SystemExit(f"check_wheel: {', '.join(wrong)} wrong in {json.dumps(demo)}")
    print(f"{wheel.name}: {demo['calls']} calls, {demo['trainable_tokens']} trainable tokens")


if __name__ == "__main__":
    main()
