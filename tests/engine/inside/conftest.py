"""Fixtures of the suite inside vLLM: one engine per setting of prefix supply, started on demand.

An engine takes 3 GB: only the default one lives as long as the session.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

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

Start = Callable[..., AbstractContextManager[Inside]]


@pytest.fixture(scope="session")
def start_inside(
    tmp_path_factory: pytest.TempPathFactory, logs: Callable[[Process], None]
) -> Start:
    """Starts an engine with capture inside, and its control server, for as long as they are used.

    vLLM and this project are installed first if need be.
    """
    subprocess.run([sys.executable, prepare.__file__], stdin=subprocess.DEVNULL, check=True)
    install_capture()

    @contextmanager
    def start(name: str, settings: dict[str, str], *flags: str) -> Iterator[Inside]:
        directory = tmp_path_factory.mktemp(name)
        store = f"file://{directory / 'store'}"
        engine = InsideEngine(directory, {"STORE": store, **settings}, *flags)
        control = Control(store, directory / "control.log")
        try:
            for process, within_s in ((control, 30), (engine, 180)):
                logs(process)
                process.start(within_s=within_s)
            # The first request compiles kernels; no test should be timed by that.
            engine.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2})
            yield Inside(engine, control)
        finally:
            engine.stop()
            control.stop()

    return start


@pytest.fixture(scope="session")
def inside(start_inside: Start) -> Iterator[Inside]:
    """Capture inside vLLM with the default settings: prefixes are supplied where provable."""
    probe = ("--middleware", "tests.engine.inside.probe.LoopProbe")
    with start_inside("auto", {}, *probe) as started:
        yield started


@pytest.fixture(scope="module")
def inside_off(start_inside: Start) -> Iterator[Inside]:
    """Capture without prefix supply."""
    with start_inside("off", {"PREFIX_SUPPLY": "off"}) as started:
        yield started


@pytest.fixture(scope="module")
def inside_require(start_inside: Start) -> Iterator[Inside]:
    """Capture that refuses continuations without an exact prefix; with a reasoning parser."""
    settings = {"PREFIX_SUPPLY": "require", "ON_DISCONNECT": "drain"}
    flags = ("--reasoning-parser", "deepseek_r1", "--no-enable-prefix-caching")
    with start_inside("require", settings, *flags) as started:
        yield started


@pytest.fixture
def rollout(inside: Inside) -> InsideRollout:
    """The test's rollout on the default engine."""
    return inside.rollout()
