"""Fixtures of the suite inside vLLM: one engine per setting of prefix supply, started on demand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite(
    "tests.engine.inside.rig", "tests.engine.inside.talk", "tests.engine.inside.expect"
)

from tests.engine import prepare  # noqa: E402
from tests.engine.inside.rig import (  # noqa: E402
    Control,
    Inside,
    InsideEngine,
    InsideRollout,
    install_capture,
)
from tests.engine.rig import MODEL, Process  # noqa: E402

Start = Callable[..., Inside]


@pytest.fixture(scope="session")
def start_inside(
    tmp_path_factory: pytest.TempPathFactory, logs: Callable[[Process], None]
) -> Iterator[Start]:
    """Starts an engine with capture inside, and its control server; all end with the session."""
    subprocess.run([sys.executable, prepare.__file__], stdin=subprocess.DEVNULL, check=True)
    install_capture()
    started: list[Process] = []

    def start(directory: Path, settings: dict[str, str], *flags: str) -> Inside:
        store = f"file://{directory / 'store'}"
        engine = InsideEngine(directory, {"STORE": store, **settings}, *flags)
        control = Control(store, directory / "control.log")
        for process, within_s in ((control, 30), (engine, 180)):
            logs(process)
            started.append(process)
            process.start(within_s=within_s)
        # The first request compiles kernels; no test should be timed by that.
        engine.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2})
        return Inside(engine, control)

    yield start
    for process in started:
        process.stop()


@pytest.fixture(scope="session")
def inside(start_inside: Start, tmp_path_factory: pytest.TempPathFactory) -> Inside:
    """Capture inside vLLM with the default settings: prefixes are supplied where provable."""
    probe = ("--middleware", "tests.engine.inside.probe.LoopProbe")
    return start_inside(tmp_path_factory.mktemp("auto"), {}, *probe)


@pytest.fixture(scope="session")
def inside_off(start_inside: Start, tmp_path_factory: pytest.TempPathFactory) -> Inside:
    """Capture without prefix supply."""
    return start_inside(tmp_path_factory.mktemp("off"), {"PREFIX_SUPPLY": "off"})


@pytest.fixture(scope="session")
def inside_require(start_inside: Start, tmp_path_factory: pytest.TempPathFactory) -> Inside:
    """Capture that refuses continuations without an exact prefix; with a reasoning parser."""
    settings = {"PREFIX_SUPPLY": "require", "ON_DISCONNECT": "drain"}
    directory = tmp_path_factory.mktemp("require")
    return start_inside(
        directory, settings, *("--reasoning-parser", "deepseek_r1", "--no-enable-prefix-caching")
    )


@pytest.fixture
def rollout(inside: Inside) -> InsideRollout:
    """The test's rollout on the default engine."""
    return inside.rollout()
