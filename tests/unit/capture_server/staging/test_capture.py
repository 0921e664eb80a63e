"""The worker library: stage before acknowledge, once, and never an exception into the engine."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from capture_server.staging import protocols
from capture_server.staging.adapters.megatron import MegatronCaptureAdapter
from capture_server.staging.adapters.vllm import VLLMCaptureAdapter, extract_generation_token_info
from capture_server.staging.capture import (
    ActiveCall,
    CaptureError,
    CaptureHost,
    RolloutTokenCapture,
    StreamingUnsupportedError,
    install_capture,
)
from capture_server.staging.digest import hash_token_ids
from capture_server.staging.records import CaptureAdmission, CommitCoords, StageResult
from tests.e2e.staging_backend import MemoryStaging
from tests.unit.capture_server.staging.staged_calls import three_calls

ROOT = CaptureAdmission(rollout_id="r", model_call_id="a", mode="text")
CHILD = CaptureAdmission(
    rollout_id="r", model_call_id="b", parent_call_id="a", prev_len=3, mode="token_in",
    staging_chain=["r/a"], parent_chain_hash="0" * 64,
)  # fmt: skip
INLINE = CHILD.model_copy(
    update={"staging_chain": [], "required_prefix_token_ids": [1, 2, 3]}
)  # fmt: skip
SOUND: dict[str, Any] = {
    "prompt_token_ids": [1, 2, 3, 4], "generated_token_ids": [5], "generated_logprobs": [-0.5],
}  # fmt: skip


def capture(sink: Any = None, **more: Any) -> RolloutTokenCapture:
    return RolloutTokenCapture(
        sink=sink or MemoryStaging(), weight_version_fn=more.pop("version", lambda: 4), **more
    )


def begun(made: RolloutTokenCapture) -> ActiveCall:
    return made.begin_call(CHILD, prefix_token_ids=[1, 2, 3])


def test_a_call_is_staged_and_its_coordinates_name_it() -> None:
    """Identity and position are the admission's, hashes and key those of what was staged."""
    staging = MemoryStaging()
    coords = capture(staging).complete_call(
        capture(staging).begin_call(INLINE), **SOUND, extras={"n": 1}, attachments={"x": object()}
    )
    (record,) = staging.records.values()
    assert coords == CommitCoords(
        rollout_id="r", model_call_id="b", parent_call_id="a", prev_len=3, delta_len=2, cum_len=5,
        weight_version=4, digest=record.digest, extras_digest=record.extras_digest,
        staging_key="r/b", chain_hash=record.chain_hash, cumulative_hash=record.cumulative_hash,
    )  # fmt: skip
    assert record.token_ids_delta == [4, 5]
    assert record.cumulative_hash == hash_token_ids([1, 2, 3, 4, 5])
    assert list(staging.attachments) == ["r/b"]


def test_the_weight_version_is_the_one_at_the_beginning() -> None:
    """Weights that change while a call runs do not rename what it began under."""
    versions = iter([4, 5])
    made = capture(version=lambda: next(versions))
    call = begun(made)
    assert made.complete_call(call, **SOUND).weight_version == 4
    assert made.begin_call(ROOT, weight_version=9).weight_version == 9


@pytest.mark.parametrize(
    ("admission", "prefix"),
    [(CHILD, None), (CHILD, [1, 2]), (CHILD, [1, 2, 3, 4]), (INLINE, [1, 2, 4]), (ROOT, [1])],
)
def test_a_prefix_must_be_the_admitted_one(admission: CaptureAdmission, prefix: Any) -> None:
    """Missing, of another length, or contradicting the inline one."""
    with pytest.raises(CaptureError):
        capture().begin_call(admission, prefix_token_ids=prefix)


@pytest.mark.parametrize("prefix", [7, "abc", [1, 2, "3"], [1, 2, 3.0], [True, 2, 3], {1: 2}, [-1]])
def test_a_prefix_is_token_ids(prefix: Any) -> None:
    """Anything else is wrong use, named as such."""
    with pytest.raises(CaptureError):
        capture().begin_call(CHILD, prefix_token_ids=prefix)


@pytest.mark.parametrize(
    "admission",
    [
        None,
        CHILD.model_dump(),
        CaptureAdmission.model_construct(rollout_id="r"),
        CHILD.model_copy(update={"prev_len": 3.0}),
        CHILD.model_copy(update={"parent_chain_hash": None}),
    ],
    ids=str,
)
def test_an_admission_is_a_valid_one(admission: Any) -> None:
    """Wire form, nothing, or a model that was never validated: wrong use."""
    with pytest.raises(CaptureError):
        capture().begin_call(admission, prefix_token_ids=[1, 2, 3])


@pytest.mark.parametrize("call", [None, {}, "b", CHILD])
def test_what_is_completed_was_begun(call: Any) -> None:
    """Only ``begin_call`` makes calls."""
    made = capture(adapter=VLLMCaptureAdapter())
    for end in (
        lambda: made.complete_call(call, **SOUND),
        lambda: made.complete_call_from_response(call, {}),
        lambda: made.fail_call(call, reason="x"),
    ):
        with pytest.raises(CaptureError, match="begin_call"):
            end()


def test_streams_are_refused() -> None:
    """With its own error, before the engine starts."""
    with pytest.raises(StreamingUnsupportedError, match="stream: false"):
        capture().begin_call(ROOT, stream=True)


@pytest.mark.parametrize(
    "version",
    [
        lambda: -1,
        lambda: True,
        lambda: 1.0,
        lambda: 1 / 0,
        lambda: 2**64,
        lambda: "7",
    ],
)
def test_a_call_needs_a_weight_version(version: Any) -> None:
    """A provider that fails or answers nonsense is the caller's fault."""
    with pytest.raises(CaptureError):
        capture(version=version).begin_call(ROOT)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": [1, 2, 4, 4]},
        {"prompt_token_ids": [1, 2]},
        {"generated_logprobs": []},
        {"generated_logprobs": [float("nan")]},
        {"generated_token_ids": [-1]},
        {"generated_token_ids": [True]},
        {"extras": {"a": (1,)}},
        {"extras": [1]},
        {"prompt_token_ids": None},
        {"generated_token_ids": {5: 5}},
        {"generated_logprobs": None},
        {"prompt_token_ids": [1, 2, 3], "generated_token_ids": [], "generated_logprobs": []},
    ],
    ids=str,
)
def test_arrays_that_cannot_be_the_calls_raise(changes: dict[str, Any]) -> None:
    """Nothing is staged, and the call can still be failed."""
    staging = MemoryStaging()
    made = capture(staging)
    call = begun(made)
    with pytest.raises(CaptureError):
        made.complete_call(call, **{**SOUND, **changes})
    assert staging.records == {}
    assert made.fail_call(call, reason="x").disposition == "capture_failed"


def test_a_call_completes_once() -> None:
    """Whichever way it ended."""
    made = capture(adapter=VLLMCaptureAdapter())
    for end in (
        lambda call: made.complete_call(call, **SOUND),
        lambda call: made.fail_call(call, reason="x"),
        lambda call: made.complete_call_from_response(call, {}),
    ):
        call = begun(made)
        end(call)
        for again in (
            lambda call: made.complete_call(call, **SOUND),
            lambda call: made.fail_call(call, reason="x"),
            lambda call: made.complete_call_from_response(call, {}),
        ):
            with pytest.raises(CaptureError, match="before"):
                again(call)


def test_of_racing_completions_one_wins() -> None:
    """An engine that reports an end twice, from two threads."""
    made = capture()
    call = begun(made)
    barrier, results = threading.Barrier(8), []

    def complete() -> None:
        barrier.wait()
        try:
            results.append(made.complete_call(call, **SOUND).disposition)
        except CaptureError:
            results.append("refused")

    threads = [threading.Thread(target=complete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["refused"] * 7 + ["staged"]


class Unprintable(Exception):
    """Cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class _Sink:
    """Answers what it is told to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def stage(self, record: Any, *, attachments: Any = None) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        OSError("disk full"),
        KeyError("x"),
        None,
        {"ok": True, "staging_key": "k"},
        StageResult(ok=False, error="no"),
        StageResult.model_construct(ok=True, staging_key=None, error=None),
        StageResult.model_construct(ok=1, staging_key="k", error=None),
        StageResult.model_construct(ok=True, staging_key=7, error=None),
        StageResult.model_construct(ok=True, staging_key=Unprintable(), error=None),
        StageResult.model_construct(ok=True, staging_key="k", error="half of it"),
        StageResult.model_construct(ok=True, staging_key="k", error=None, schema_version=3),
        StageResult.model_construct(ok=True, staging_key="k", error=None, schema_version=2.0),
        StageResult.model_construct(staging_key="k"),
        StageResult.model_construct(ok=False, error=Unprintable()),
        Unprintable(),
    ],
    ids=[str(number) for number in range(15)],
)
def test_a_failing_or_lying_sink_fails_the_capture_only(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Coordinates that say so, and a log line without tokens."""
    made = capture(_Sink(answer))
    with caplog.at_level(logging.ERROR):
        coords = made.complete_call(begun(made), **SOUND)
    assert (coords.disposition, coords.delta_len, coords.cum_len) == ("capture_failed", 0, 3)
    assert (coords.digest, coords.staging_key) == (None, None)
    assert "capture failed" in caplog.text
    if isinstance(answer, Exception):
        assert type(answer).__name__ in caplog.text


@pytest.mark.parametrize(
    "payload",
    [
        {},
        None,
        {"choices": []},
        {"choices": [{}, {}]},
        {"choices": [{"message": {"generation_token_ids": [5]}}], "prompt_token_ids": [1, 2, 3]},
        {"choices": [{"message": {"generation_token_ids": [5], "generation_log_probs": [-0.5]}}],
         "prompt_token_ids": [9, 2, 3]},
    ],
    ids=str,
)  # fmt: skip
def test_an_answer_that_cannot_be_read_fails_the_capture_only(payload: Any) -> None:
    """The adapter's errors, and arrays that are not this call's."""
    made = capture(adapter=VLLMCaptureAdapter())
    assert made.complete_call_from_response(begun(made), payload).disposition == "capture_failed"


@pytest.mark.parametrize("error", [ZeroDivisionError(), Unprintable()], ids=["plain", "no text"])
def test_a_broken_adapter_fails_the_capture_only(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises, the log says of which type it is."""

    class Broken(VLLMCaptureAdapter):
        def extract_extras(self, response_payload: Any) -> Any:
            raise error

    made = capture(adapter=Broken())
    answer = {
        "choices": [{"message": {"generation_token_ids": [5], "generation_log_probs": [-0.5]}}],
        "prompt_token_ids": [1, 2, 3, 4],
    }
    assert made.complete_call_from_response(begun(made), answer).disposition == "capture_failed"
    assert type(error).__name__ in caplog.text
    with pytest.raises(CaptureError, match="adapter"):
        capture().complete_call_from_response(begun(made), answer)


# --- adapters ------------------------------------------------------------------------------------


def test_vllm_answers_of_either_shape() -> None:
    """NeMo-RL's bundle on the message, and vLLM's own places."""
    adapter = VLLMCaptureAdapter()
    bundle = {"prompt_token_ids": [1, 2], "generation_token_ids": ["token_id:5"],
              "generation_log_probs": [-0.5], "routed_experts": "r"}  # fmt: skip
    native = {
        "prompt_token_ids": [1, 2],
        "media_spans": [{"start": 0}],
        "choices": [
            {"message": {"content": "x"}, "token_ids": [5],
             "logprobs": {"content": [{"token": "x", "logprob": -0.5}]}}
        ],
    }  # fmt: skip
    for payload in ({"choices": [{"message": bundle}]}, native):
        assert adapter.extract_prompt_ids(payload) == [1, 2]
        assert adapter.extract_generation(payload) == ([5], [-0.5])
    assert adapter.extract_extras({"choices": [{"message": bundle}]}) == {"routed_experts": "r"}
    assert adapter.extract_extras(native) == {"media_spans": [{"start": 0}]}
    named = {"logprobs": {"content": [{"token": "token_id:7", "logprob": -1}]}}
    assert extract_generation_token_info(named) == ([7], [-1.0])
    entered = adapter.enter_prefix({"messages": []}, [1, 2])
    assert entered == {"messages": [], "required_prefix_token_ids": [1, 2]}


@pytest.mark.parametrize(
    "choice",
    [
        {"logprobs": {"content": [{"token": "hello", "logprob": -0.5}]}},
        {"token_ids": [5, 6], "logprobs": {"content": [{"token": "x", "logprob": -0.5}]}},
        {"token_ids": [5], "logprobs": {"content": [{"token": "x", "logprob": None}]}},
        {"token_ids": [5], "logprobs": {"content": [{"token": "x", "logprob": -9999.0}]}},
        {"token_ids": [5]},
        {"token_ids": [5], "logprobs": {"content": [{"token": "token_id:6", "logprob": -0.5}]}},
        {"token_ids": [], "logprobs": {"content": [{"token": "token_id:6", "logprob": -0.5}]}},
        {"message": {"generation_token_ids": [5, 6], "generation_log_probs": [-0.5]}},
        {"message": {"generation_token_ids": [5.0], "generation_log_probs": [-0.5]}},
    ],
    ids=str,
)
def test_vllm_generations_that_do_not_add_up(choice: dict[str, Any]) -> None:
    """Text in place of ids, other counts or ids, no or sentinel log-probs: never padded."""
    with pytest.raises(ValueError):
        extract_generation_token_info(choice)


def test_ids_that_vllm_gives_twice_must_agree() -> None:
    """They do, or the capture has failed; text beside ``token_ids`` says nothing."""

    def answer(*names: str) -> dict[str, Any]:
        content = [{"token": name, "logprob": -0.5} for name in names]
        choice = {"token_ids": [5, 6], "logprobs": {"content": content}}
        return {"prompt_token_ids": [1, 2, 3], "choices": [choice]}

    made = capture(adapter=VLLMCaptureAdapter())
    for names, disposition in (
        (("token_id:5", "token_id:6"), "staged"),
        (("a", "token_id:9"), "staged"),
        (("token_id:5", "token_id:7"), "capture_failed"),
        (("token_id:6", "token_id:5"), "capture_failed"),
    ):
        coords = made.complete_call_from_response(begun(made), answer(*names))
        assert coords.disposition == disposition


def test_megatron_payloads_are_mappings_or_objects() -> None:
    """Arrays too; what is missing or does not add up is refused."""

    class Generation:
        prompt_token_ids = np.array([1, 2])
        generated_token_ids = np.array([5])
        generated_log_probs = np.array([-0.5])

    adapter = MegatronCaptureAdapter()
    mapping = {"prompt_token_ids": [1, 2], "generated_token_ids": [5],
               "generated_log_probs": [-0.5], "routed_experts": [[[1]]]}  # fmt: skip
    for payload in (Generation(), mapping):
        assert adapter.extract_prompt_ids(payload) == [1, 2]
        assert adapter.extract_generation(payload) == ([5], [-0.5])
    assert adapter.extract_extras(mapping) == {"routed_experts": [[[1]]]}
    assert adapter.extract_extras(Generation()) is None
    assert adapter.enter_prefix({}, [1]) == {"required_prefix_token_ids": [1]}
    for broken in ({}, {**mapping, "generated_log_probs": []}):
        with pytest.raises(ValueError):
            adapter.extract_generation(broken)


# --- installing ----------------------------------------------------------------------------------


def test_installing_into_a_serving_layer() -> None:
    """Once per layer; a layer without a place for it is named."""
    host = CaptureHost()
    assert host.token_capture is None
    made = install_capture(host, sink=MemoryStaging(), weight_version_fn=lambda: 1)
    assert host.token_capture is made
    host.install_token_capture(made)
    with pytest.raises(CaptureError):
        protocols.install_capture(host, sink=MemoryStaging(), weight_version_fn=lambda: 1)
    with pytest.raises(CaptureError, match="install_token_capture"):
        install_capture(object(), sink=MemoryStaging(), weight_version_fn=lambda: 1)


def test_the_builders_chain_is_a_real_one() -> None:
    """What the other tests are built on."""
    chain = three_calls()
    assert [c.disposition for c in chain.coords.values()] == ["staged"] * 3


_BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"fastapi", "uvicorn", "httpx", "aiohttp", "typer",
                                      "psycopg"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
import capture_server.staging.adapters.megatron, capture_server.staging.adapters.vllm
import capture_server.staging.capture, capture_server.staging.conformance
import capture_server.staging.digest, capture_server.staging.protocols
import capture_server.staging.rebuild, capture_server.staging.records
import capture_server.staging.routes, capture_server.staging.terminal
from capture_server.staging.conformance import assert_golden_vectors
assert_golden_vectors()
print("fine")
"""


def test_the_worker_library_needs_no_web_framework() -> None:
    """Nor an HTTP client or a database driver: worker and finalizer import it in an engine."""
    done = subprocess.run(
        [sys.executable, "-c", _BLOCKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("fine", "")
