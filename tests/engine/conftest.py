"""Fixtures of the engine suite: one vLLM and one sidecar per session, one rollout per test.

Not collected by a plain ``pytest`` (see ``testpaths``): run ``make engine``.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

# Before they are imported: their asserts should explain themselves like a test's own.
pytest.register_assert_rewrite(
    "tests.engine.checks", "tests.engine.digests", "tests.engine.rig", "tests.engine.agent"
)

from tests.engine import prepare  # noqa: E402
from tests.engine.rig import MODEL, Engine, Process, Rollout, Sidecar  # noqa: E402

HERE = Path(__file__).parent
_processes = pytest.StashKey[list[Process]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests, and give them time for the engine's start and first request."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(900))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of every process's log with a failure."""
    report = yield
    if report.failed:
        for process in item.config.stash.get(_processes, []):
            report.sections.append((f"{process.name} log", process.log_tail()))
    return report


@pytest.fixture(scope="session")
def logs(request: pytest.FixtureRequest) -> Callable[[Process], None]:
    """Register a process whose log belongs into failure reports."""
    return request.config.stash.setdefault(_processes, []).append


@pytest.fixture(scope="session")
def engine(
    tmp_path_factory: pytest.TempPathFactory, logs: Callable[[Process], None]
) -> Iterator[Engine]:
    """A warm vLLM serving the tiny model; installed and made first if need be.

    ``ENGINE_URL`` names one that runs already (started with ``rig.ENGINE_FLAGS``): it saves a
    minute per run while tests are written.
    """
    subprocess.run([sys.executable, prepare.__file__], stdin=subprocess.DEVNULL, check=True)
    log = tmp_path_factory.mktemp("engine") / "vllm.log"
    running = os.environ.get("ENGINE_URL", "")
    process = Engine(prepare.engine_venv() / "bin/vllm", prepare.model_dir(), log, running)
    logs(process)
    try:
        if not running:
            process.start(within_s=180)
        # The first request compiles kernels for about 20 s; no test should be timed by that.
        process.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2})
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="session")
def sidecar(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, logs: Callable[[Process], None]
) -> Iterator[Sidecar]:
    """A sidecar on a file store, shared by all tests that do not kill it."""
    directory = tmp_path_factory.mktemp("sidecar")
    process = Sidecar(engine.url, directory / "store", directory / "sidecar.log")
    logs(process)
    try:
        process.start(within_s=30)
        yield process
    finally:
        process.stop()


@pytest.fixture
def mortal_sidecar(
    engine: Engine, tmp_path: Path, logs: Callable[[Process], None]
) -> Iterator[Sidecar]:
    """A sidecar of the test's own, to be killed and started again on the same store and port."""
    process = Sidecar(engine.url, tmp_path / "store", tmp_path / "sidecar.log")
    logs(process)
    try:
        process.start(within_s=30)
        yield process
    finally:
        process.stop()


_numbers = itertools.count(1)


@pytest.fixture
def new_rollout(sidecar: Sidecar) -> Callable[[], Rollout]:
    """Makes rollouts with fresh ids."""
    return lambda: Rollout(f"engine-{next(_numbers)}", sidecar)


@pytest.fixture
def rollout(new_rollout: Callable[[], Rollout]) -> Rollout:
    """The test's rollout."""
    return new_rollout()


@pytest.fixture
def openai_client() -> Iterator[Callable[[str], openai.OpenAI]]:
    """Makes official clients that never retry by themselves; all are closed at the end."""
    clients: list[openai.OpenAI] = []

    def make(base_url: str) -> openai.OpenAI:
        client = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=120)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def agent(rollout: Rollout, openai_client: Callable[[str], openai.OpenAI]) -> openai.OpenAI:
    """The agent's client: pointed at the tagged URL, knowing nothing of us."""
    return openai_client(rollout.base_url)


@pytest.fixture(scope="session")
def words(engine: Engine) -> dict[str, Any]:
    """Request options under which the random model writes whole words, or ends its turn.

    Every allowed token is a whole word with its leading space. Such text tokenizes back to the
    very tokens that were sampled, so a conversation of it does not drift.
    """
    vocabulary: dict[str, int] = json.loads(
        (prepare.model_dir() / "tokenizer.json").read_text(encoding="utf-8")
    )["model"]["vocab"]
    candidates = {
        token_id: f" {text[1:]}"
        for text, token_id in vocabulary.items()
        if text.startswith("Ġ") and len(text) > 3 and text[1:].isalpha() and text.isprintable()
    }
    whole = [id_ for id_, text in candidates.items() if engine.tokenize(prompt=text) == [id_]]
    assert len(whole) > 20
    end_of_turn = vocabulary["<|im_end|>"]
    # The bias makes about one turn in two end by itself, the others by length.
    return {
        "allowed_token_ids": [end_of_turn, *sorted(whole)],
        "logit_bias": {str(end_of_turn): 1.5},
    }
