"""External staging end to end: sidecars, workers and a finalizer as processes, kills included."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture_server.staging.control import RolloutControlClient
from capture_server.staging.rebuild import (
    LinearizedRow,
    ReceiptVerificationError,
    verify_and_linearize,
)
from capture_server.staging.records import RolloutManifest, RolloutReceipt
from capture_server.staging.terminal import make_receipt
from tests.e2e.processes import free_port, process, sidecar_process
from tests.e2e.staging_backend import DirectoryStaging

FLAGS = ("--external-staging", "vllm_worker")


@dataclass
class Cluster:
    """Two workers behind a sidecar each; one store, one staging directory."""

    path: Path
    urls: list[str] = field(default_factory=list)
    sidecars: list[Any] = field(default_factory=list)

    @property
    def store(self) -> str:
        return f"file://{self.path / 'store'}"

    def sampled(self, response_id: str) -> dict[str, Any]:
        """What the engine sampled for a response."""
        found = json.loads((self.path / "sampled" / f"{response_id}.json").read_text())
        (choice,) = found
        return choice


@contextmanager
def worker(path: Path, name: str, weight_version: int = 7) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    args = ["tests.e2e.staging_worker", "--port", str(port), "--staging", str(path / "staged")]
    args += ["--sampled", str(path / "sampled"), "--weight-version", str(weight_version)]
    with process(*args, ready=f"{url}/health", log=path / f"{name}.log"):
        yield url


@contextmanager
def cluster(path: Path, size: int = 2) -> Iterator[Cluster]:
    with ExitStack() as stack:
        made = Cluster(path)
        for number in range(size):
            engine = stack.enter_context(worker(path, f"worker{number}", 7 + number))
            log = path / f"sidecar{number}.log"
            url, running = stack.enter_context(sidecar_process(engine, made.store, log, *FLAGS))
            made.urls.append(url)
            made.sidecars.append(running)
        yield made


class Agent:
    """A harness that knows nothing; it may be sent to another sidecar every turn."""

    def __init__(self, rollout: str) -> None:
        self.rollout = rollout
        self.messages: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.ids: list[str] = []

    def say(self, url: str, text: str, *, seed: int = 1, die: str = "") -> httpx.Response:
        self.messages.append({"role": "user", "content": text})
        return self.ask(url, seed=seed, die=die)

    def ask(self, url: str, *, seed: int = 1, die: str = "") -> httpx.Response:
        body = {"model": "demo", "messages": self.messages, "max_tokens": 12, "seed": seed}
        response = httpx.post(
            f"{url}/ng-rollout/{self.rollout}/training-token-capture/v1/chat/completions",
            json=body,
            headers={"x-test-die": die} if die else {},
            timeout=30,
            trust_env=False,
        )
        if response.status_code == 200:
            self.answers.append(response.json())
            self.ids.append(response.headers["x-model-call-id"])
            self.messages.append(self.answers[-1]["choices"][0]["message"])
        return response


async def manifest_of(url: str, rollout: str) -> RolloutManifest:
    async with RolloutControlClient(url, auth_token="unused", request_timeout_s=20) as control:
        return await control.manifest(rollout)


def control(method: str, url: str, rollout: str, verb: str) -> Any:
    path = f"{url}/ng-rollout/{rollout}/training-token-capture/{verb}"
    return httpx.request(method, path, timeout=20, trust_env=False).json()


def lose_a_call(made: Cluster, agent: Agent) -> None:
    """Kill the first sidecar while its worker generates."""
    # Generates until the context is full, far longer than the sidecar lives.
    body = {"model": "demo", "messages": agent.messages, "max_tokens": 8000, "ignore_eos": True}
    path = f"{made.urls[0]}/ng-rollout/{agent.rollout}/training-token-capture/v1/chat/completions"
    killer = threading.Timer(1.0, made.sidecars[0].send_signal, [signal.SIGKILL])
    killer.start()
    with pytest.raises(httpx.TransportError):
        httpx.post(path, json=body, timeout=30, trust_env=False)
    killer.join()
    made.sidecars[0].wait(5)


def linearized(made: Cluster, receipt: RolloutReceipt) -> LinearizedRow:
    source = DirectoryStaging(made.path / "staged")
    return verify_and_linearize(receipt, source.fetch([r.staging_key for r in receipt.manifest]))


def assert_equals_what_was_sampled(made: Cluster, agent: Agent, row: LinearizedRow) -> None:
    """Token for token and log-prob for log-prob, against the engines' own records."""
    expected_ids: list[int] = []
    expected_mask: list[float] = []
    expected_log_probs: list[float] = []
    for answer in agent.answers:
        sampled = made.sampled(answer["id"])
        carried = sampled["prompt_token_ids"][len(expected_ids) :]
        assert sampled["prompt_token_ids"][: len(expected_ids)] == expected_ids
        expected_ids += carried + sampled["token_ids"]
        expected_mask += [0.0] * len(carried) + [1.0] * len(sampled["token_ids"])
        expected_log_probs += [0.0] * len(carried) + sampled["logprobs"]
    assert row.token_ids == expected_ids
    assert row.token_mask == expected_mask
    assert row.logprobs == expected_log_probs


async def test_a_rollout_over_several_workers_is_linearized_as_sampled(tmp_path: Path) -> None:
    """Four turns, alternating workers and sidecars: one verified row, equal to what was sampled."""
    agent = Agent("r1")
    with cluster(tmp_path) as made:
        for turn in range(4):
            response = agent.say(made.urls[turn % 2], f"turn {turn}", seed=turn)
            assert response.status_code == 200, response.text
        manifest = await manifest_of(made.urls[0], "r1")
        twin = control("GET", made.urls[1], "r1", "manifest")
        status = control("POST", made.urls[1], "r1", "freeze")

    for answer in agent.answers:
        text = json.dumps(answer)
        assert not any(name in text for name in ('"ng_', "token_ids", '"logprobs', "log_probs"))
    assert RolloutManifest.model_validate(twin) == manifest
    assert (status["calls"], status["incomplete"], status["open_intents"]) == (4, False, [])
    assert status["resolutions"] == {"root": 1, "resolved": 3, "unresolved": 0}
    assert [row.model_call_id for row in manifest.records] == agent.ids
    assert [row.response_id for row in manifest.records] == [a["id"] for a in agent.answers]
    last = agent.answers[-1]
    scored = {"id": last["id"], "output": [last["choices"][0]["message"]]}
    for options, method in (
        ({"declared_response_id": last["id"]}, "declared"),
        ({"response": scored}, "response_id"),
        ({"response": {"output": scored["output"]}}, "content"),
        ({}, "heuristic"),
    ):
        receipt = make_receipt(manifest, reward=1.0, **options)
        assert (receipt.terminal_selection, receipt.terminal_model_call_id) == (
            method,
            agent.ids[-1],
        )
        row = linearized(made, receipt)
        assert row.model_call_ids == agent.ids
        assert row.weight_versions == [7, 8, 7, 8]
        assert_equals_what_was_sampled(made, agent, row)


@pytest.mark.parametrize("die", ["before_staging", "after_staging"])
async def test_a_killed_worker_poisons_its_rollout(tmp_path: Path, die: str) -> None:
    """Killed around staging: the agent gets 502, may retry, and the lost call is on record."""
    agent = Agent("r1")
    with cluster(tmp_path) as made:
        assert agent.say(made.urls[0], "one").status_code == 200
        assert agent.say(made.urls[1], "two", die=die).status_code == 502
        assert agent.ask(made.urls[0]).status_code == 200
        manifest = await manifest_of(made.urls[0], "r1")

    reason = "request_finished_without_staged_coordinates"
    assert [failure.reason for failure in manifest.failures] == [reason]
    assert [row.model_call_id for row in manifest.records] == agent.ids
    receipt = make_receipt(manifest, reward=1.0)
    assert (receipt.capture_poisoned, receipt.failure_reason) == (True, reason)
    with pytest.raises(ReceiptVerificationError, match="rollout_failed"):
        linearized(made, receipt)


async def test_a_killed_sidecar_loses_no_row_and_hides_no_call(tmp_path: Path) -> None:
    """Rows survive kill -9 and are continued elsewhere; the call it took along is a failure."""
    agent, other = Agent("r1"), Agent("r2")
    with cluster(tmp_path) as made:
        assert agent.say(made.urls[0], "one").status_code == 200
        made.sidecars[0].send_signal(signal.SIGKILL)
        made.sidecars[0].wait(5)
        assert agent.say(made.urls[1], "two").status_code == 200
        manifest = await manifest_of(made.urls[1], "r1")

        assert manifest.failures == []
        assert_equals_what_was_sampled(made, agent, linearized(made, make_receipt(manifest)))

    with cluster(tmp_path) as made:
        assert other.say(made.urls[0], "one").status_code == 200
        lose_a_call(made, other)
        frozen = control("POST", made.urls[1], "r2", "freeze")
        lost = await manifest_of(made.urls[1], "r2")

    assert frozen["incomplete"]
    assert [f.reason for f in lost.failures] == ["request_finished_without_staged_coordinates"]
    assert make_receipt(lost).capture_poisoned
