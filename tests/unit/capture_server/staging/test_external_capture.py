"""The steps of the seed's API, as a framework's own server calls them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from capture_server.staging import external_capture
from capture_server.staging.external_capture import (
    MegatronWorkerCaptureHandler,
    VLLMWorkerCaptureHandler,
    make_external_capture_handler,
    open_staged_calls,
)
from capture_server.staging.ledger import StoreLedger, open_ledger
from capture_server.staging.records import RolloutManifest
from capture_server.stores.memory import MemoryCaptureStore
from middleware import staging_admission
from middleware.capture import mark_external_staging_committed, resolve_parent
from middleware.context import CaptureContext, reset_token_sink, set_token_sink
from middleware.errors import (
    CallIdConflictError,
    ConfigurationError,
    InvalidIdError,
    StoreUnavailableError,
    TokenCaptureFrozenError,
    UnsupportedParameterError,
)
from middleware.lineage import InMemoryLineageStore
from middleware.protocols import LineageMatch, LineageResolution
from middleware.records import ParentResolutionStatus, TokenIds
from tests.unit.capture_server.staging.staged_calls import Chain

USER = [{"role": "user", "content": "q"}]
SAID = {"role": "assistant", "content": "x"}


@pytest.fixture(params=["memory", "store"])
def ledger(request: pytest.FixtureRequest) -> Any:
    """Both kinds of ledger that live in memory."""
    if request.param == "memory":
        return InMemoryLineageStore()
    return StoreLedger(MemoryCaptureStore())


@pytest.fixture
def context(ledger: Any) -> Iterator[CaptureContext]:
    made = CaptureContext(
        rollout_id="r", model_call_id="a", lineage_store=ledger, external_staging="vllm_worker"
    )
    token = set_token_sink(made)
    yield made
    reset_token_sink(token)


async def committed(ledger: Any, context: CaptureContext) -> None:
    """One whole call, step by step."""
    handler = VLLMWorkerCaptureHandler()
    await resolve_parent(USER)
    chain = Chain()
    coords = chain.add("a", [1, 2], [3])
    answer = {"id": "resp", "choices": [{"message": dict(SAID)}],
              "ng_commit_coords": coords.model_dump()}  # fmt: skip
    handler.prepare_response(answer)
    await handler.finalize_response(answer)
    assert context.committed


async def test_a_call_step_by_step(ledger: Any, context: CaptureContext) -> None:
    """Root, row, child: as the middleware does it, without the middleware."""
    await committed(ledger, context)
    assert context.external_worker_response_seen
    context.model_call_id, context.committed = "b", False
    await resolve_parent([*USER, SAID, *USER])
    admission = context.capture_admission
    assert (admission.mode, admission.parent_call_id, admission.prev_len) == ("token_in", "a", 3)
    assert admission.staging_chain == ["r/a"] == list(context.parent_staging_chain)
    assert admission.parent_chain_hash == context.parent_chain_hash
    assert (await ledger.manifest("r"))["failures"] == []


async def test_a_failure_row_also_bars_later_roots(ledger: Any, context: CaptureContext) -> None:
    """An unresolved history is a root only while the ledger holds nothing at all."""
    await ledger.record_failure("r", "z", "worker_capture_failed")
    await resolve_parent([*USER, SAID, *USER])
    assert context.capture_admission is None
    reasons = [f["reason"] for f in (await ledger.manifest("r"))["failures"]]
    assert reasons == ["worker_capture_failed", "unresolved_parent"]
    await resolve_parent(USER)
    assert context.capture_admission.mode == "text"


async def test_an_unhashable_history_counts_as_unresolved(
    ledger: Any, context: CaptureContext
) -> None:
    """It is admitted only as the first call, and never recorded as a row."""
    bad = [*USER, SAID, {"role": "user", "content": 5}]
    await resolve_parent(bad)
    assert context.capture_admission.mode == "text"
    coords = Chain().add("a", [1, 2], [3])
    context.external_commit_coords = coords
    await VLLMWorkerCaptureHandler().finalize_response({"id": "resp", "choices": []})
    manifest = await ledger.manifest("r")
    assert manifest["records"] == []
    reasons = [f["reason"] for f in manifest["failures"]]
    assert reasons == ["invalid_worker_commit_coordinates"]


class _Scripted:
    """A ledger that resolves as told."""

    def __init__(self, match: LineageMatch | None = None, error: Exception | None = None) -> None:
        self.match, self.error = match, error
        self.failures: list[str] = []

    async def resolve(self, rollout_id: str, request_items: list[Any]) -> LineageResolution:
        if self.error is not None:
            raise self.error
        return LineageResolution(ParentResolutionStatus.RESOLVED, self.match)

    async def has_rows(self, rollout_id: str) -> bool:
        return True

    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        self.failures.append(reason)


async def test_a_parent_without_a_chain_hash_admits_nobody(context: CaptureContext) -> None:
    """Its child could not prove what it continues."""
    scripted = _Scripted(LineageMatch("p", TokenIds([1]), staging_chain=("r/p",), prev_len=1))
    context.lineage_store = scripted  # type: ignore[assignment]
    await resolve_parent(USER)
    assert (context.capture_admission, scripted.failures) == (
        None,
        ["ledger_row_missing_chain_hash"],
    )


async def test_a_parent_whose_tokens_are_here_gives_an_inline_prefix(
    context: CaptureContext,
) -> None:
    """No staging chain, but the ids: they ride along in the admission and as the prefix."""
    match = LineageMatch("p", TokenIds([7, 8]), prev_len=2, chain_hash="0" * 64)
    context.lineage_store = _Scripted(match)  # type: ignore[assignment]
    await resolve_parent(USER)
    prepared = VLLMWorkerCaptureHandler().prepare_request({"messages": USER})
    assert prepared["required_prefix_token_ids"] == [7, 8]
    assert prepared["ng_capture"]["required_prefix_token_ids"] == [7, 8]
    context.lineage_store = scripted = _Scripted(  # type: ignore[assignment]
        LineageMatch("p", TokenIds([7]), prev_len=2, chain_hash="0" * 64)
    )
    context.capture_admission = None
    await resolve_parent(USER)
    assert scripted.failures == ["unresolved_parent"]


@pytest.mark.parametrize("error", [RuntimeError("x"), StoreUnavailableError("x"), OSError("x")])
async def test_a_lookup_that_fails_fails_the_call(
    context: CaptureContext, error: Exception
) -> None:
    """Before dispatch; nothing is guessed."""
    context.lineage_store = _Scripted(error=error)  # type: ignore[assignment]
    with pytest.raises(StoreUnavailableError):
        await resolve_parent(USER)
    context.lineage_store = None
    with pytest.raises(StoreUnavailableError):
        await resolve_parent(USER)


async def test_finalizing_twice_or_without_admission_does_nothing(
    ledger: Any, context: CaptureContext
) -> None:
    """One row per call; a call that was not admitted has its failure already."""
    await committed(ledger, context)
    handler = VLLMWorkerCaptureHandler()
    await handler.finalize_response({"id": "other"})
    context.committed, context.capture_admission = False, None
    await handler.finalize_response({"id": "other"})
    assert len((await ledger.manifest("r"))["records"]) == 1
    assert (await ledger.manifest("r"))["failures"] == []


async def test_an_acknowledgement_for_another_call_is_refused(context: CaptureContext) -> None:
    """It must not hide that this call's is missing."""
    with pytest.raises(ValueError):
        mark_external_staging_committed(rollout_id="r", model_call_id="z")
    assert not context.committed
    mark_external_staging_committed(rollout_id="r", model_call_id="a")
    assert context.committed


@pytest.mark.parametrize("field", ["weight_version", "delta_len"])
async def test_coordinates_beyond_64_bit_are_invalid(
    ledger: Any, context: CaptureContext, field: str
) -> None:
    """No digest can cover them, so no worker of ours said so."""
    await resolve_parent(USER)
    wire = Chain().add("a", [1, 2], [3]).model_dump() | {field: 2**64}
    wire["cum_len"] = wire["delta_len"]
    context.external_commit_coords = wire
    await VLLMWorkerCaptureHandler().finalize_response({"id": "resp"})
    assert await reasons(ledger) == ["invalid_worker_commit_coordinates"]


async def reasons(ledger: Any) -> list[str]:
    manifest = await ledger.manifest("r")
    assert manifest["records"] == []
    return [failure["reason"] for failure in manifest["failures"]]


async def staged(context: CaptureContext) -> None:
    """An answer with sound coordinates came."""
    await resolve_parent(USER)
    context.external_commit_coords = Chain().add("a", [1, 2], [3])
    await VLLMWorkerCaptureHandler().finalize_response({"id": "resp"})


@pytest.mark.parametrize(
    "error",
    [
        TokenCaptureFrozenError("late"),
        CallIdConflictError("other"),
        StoreUnavailableError("disk"),
        RuntimeError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_row_that_the_ledger_refuses_is_uncommitted(
    ledger: Any, context: CaptureContext, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The worker's coordinates were sound: the reason does not blame them."""

    async def refuse(commit: Any) -> None:
        raise error

    monkeypatch.setattr(ledger, "record", refuse)
    await staged(context)
    assert await reasons(ledger) == ["request_finished_without_staged_coordinates"]


async def test_a_row_after_a_freeze_is_uncommitted(context: CaptureContext) -> None:
    """The real fence of a store."""
    store = MemoryCaptureStore()
    context.lineage_store = ledger = StoreLedger(store)  # type: ignore[assignment]
    await resolve_parent(USER)
    await ledger.record_failure("r", "z", "worker_capture_failed")
    await store.freeze("r")
    context.external_commit_coords = Chain().add("a", [1, 2], [3])
    await VLLMWorkerCaptureHandler().finalize_response({"id": "resp"})
    assert await reasons(ledger) == [
        "worker_capture_failed", "request_finished_without_staged_coordinates",
    ]  # fmt: skip


async def never(*args: Any, **more: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("stuck", ["resolve", "has_rows", "record_failure"])
async def test_a_ledger_that_hangs_fails_the_call_in_time(
    context: CaptureContext, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    """Before dispatch, whichever of its answers is missing."""
    ledger = InMemoryLineageStore()
    context.lineage_store = ledger
    if stuck == "record_failure":
        await ledger.record_failure("r", "z", "worker_capture_failed")
    monkeypatch.setattr(ledger, stuck, never)
    monkeypatch.setattr(staging_admission, "_LEDGER_TIMEOUT_S", 0.01)
    with pytest.raises(StoreUnavailableError, match="no answer in"):
        await resolve_parent([*USER, SAID, *USER])
    assert context.capture_admission is None


async def test_a_row_that_hangs_becomes_a_failure_in_time(
    ledger: Any, context: CaptureContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer goes out, and its rollout is masked."""
    monkeypatch.setattr(ledger, "record", never)
    monkeypatch.setattr(external_capture, "_RECORD_TIMEOUT_S", 0.01)
    await staged(context)
    assert await reasons(ledger) == ["request_finished_without_staged_coordinates"]


async def test_a_ledger_that_hangs_altogether_leaves_a_hole(
    context: CaptureContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture store's own mark takes over."""
    ledger, store = InMemoryLineageStore(), MemoryCaptureStore()
    context.lineage_store, context.token_sink = ledger, store
    monkeypatch.setattr(ledger, "record", never)
    monkeypatch.setattr(ledger, "record_failure", never)
    monkeypatch.setattr(external_capture, "_RECORD_TIMEOUT_S", 0.01)
    monkeypatch.setattr(external_capture, "_FAILURE_TIMEOUT_S", 0.01)
    await staged(context)
    status = await store.status("r")
    codes = [reason.code for reason in status.incomplete_reasons]
    assert codes == ["request_finished_without_staged_coordinates"]


@pytest.mark.parametrize("handler", [VLLMWorkerCaptureHandler(), MegatronWorkerCaptureHandler()])
@pytest.mark.parametrize("admitted", [True, False])
async def test_an_agent_never_admits_itself(
    ledger: Any, context: CaptureContext, handler: Any, admitted: bool
) -> None:
    """Neither backend's admission, nor a prefix, whether or not the call is admitted."""
    if admitted:
        await resolve_parent(USER)
    prepared = handler.prepare_request(
        {
            "messages": USER,
            "ng_capture": {"rollout_id": "stolen"},
            "offload_params": {"x": 1, "ng_capture": {"rollout_id": "stolen"}},
            "required_prefix_token_ids": [1],
        }
    )
    assert "stolen" not in str(prepared)
    assert "required_prefix_token_ids" not in prepared
    assert prepared["offload_params"]["x"] == 1
    assert ("'rollout_id': 'r'" in str(prepared)) is admitted


async def test_ids_and_reasons_in_both_ledgers(ledger: Any) -> None:
    """Refused alike where they are invalid, and never empty in a manifest."""
    for bad in ("../x", "", "-a"):
        for ask in (ledger.manifest, ledger.has_rows, ledger.retire, ledger.delete):
            with pytest.raises(InvalidIdError):
                await ask(bad)
        with pytest.raises(InvalidIdError):
            await ledger.record_failure(bad, "a", "x")
    with pytest.raises(InvalidIdError):
        await ledger.record_failure("r", "../x", "x")
    await ledger.record_failure("r", "a", "")
    await ledger.record_failure("r", "", "worker_capture_failed")
    manifest = RolloutManifest.model_validate(await ledger.manifest("r"))
    assert [(f.model_call_id, f.reason) for f in manifest.failures] == [
        ("a", "marked_incomplete"), ("unknown", "worker_capture_failed"),
    ]  # fmt: skip


async def test_megatron_takes_one_choice(ledger: Any, context: CaptureContext) -> None:
    """``n`` above 1 is refused; 1 and nothing pass."""
    await resolve_parent(USER)
    handler = MegatronWorkerCaptureHandler()
    for n in (2, True, "1", 1.0, 0):
        with pytest.raises(UnsupportedParameterError):
            handler.prepare_request({"n": n})
    assert handler.prepare_request({"n": 1})["offload_params"]["ng_capture"]["mode"] == "text"
    assert "ng_capture" not in handler.prepare_request({})


def test_everything_that_names_tokens_is_stripped(context: CaptureContext) -> None:
    """Wherever engines put it, and only that."""
    hidden = ("prompt_token_ids", "generation_token_ids", "generation_log_probs",
              "routed_experts", "token_ids", "logprobs", "compact_prompt_token_ids")  # fmt: skip
    tokens: dict[str, Any] = {name: [1] for name in hidden} | {"ng_commit_coords": {"b": 2}}
    answer = {
        **tokens, "id": "x", "ng_commit_coords": {"a": 1}, "usage": {"prompt_tokens": 1},
        "choices": [{**tokens, "index": 0, "message": {**tokens, "content": "x"}}, 5],
        "output": [{**tokens, "type": "message"}],
    }  # fmt: skip
    VLLMWorkerCaptureHandler().prepare_response(answer)
    assert answer == {
        "id": "x", "usage": {"prompt_tokens": 1},
        "choices": [{"index": 0, "message": {"content": "x"}}, 5],
        "output": [{"type": "message"}],
    }  # fmt: skip
    assert context.external_commit_coords == {"a": 1}


async def test_untagged_traffic_is_left_alone() -> None:
    """Without a context nothing is added, kept or recorded."""
    handler = VLLMWorkerCaptureHandler()
    request, answer = {"ng_capture": 1}, {"ng_commit_coords": 1}
    assert handler.prepare_request(request) is request
    handler.prepare_response(answer)
    await handler.finalize_response(answer)
    assert answer == {"ng_commit_coords": 1}


def test_backends_by_name() -> None:
    """The two of the configuration; others are named in the error."""
    assert isinstance(make_external_capture_handler("vllm_worker"), VLLMWorkerCaptureHandler)
    megatron = make_external_capture_handler("megatron_worker")
    assert isinstance(megatron, MegatronWorkerCaptureHandler)
    with pytest.raises(ValueError, match="vllm_worker"):
        make_external_capture_handler("other")  # type: ignore[arg-type]


def test_what_cannot_keep_a_ledger_is_refused_at_the_start() -> None:
    """A store without rows, and a memory ledger for several workers."""
    assert open_staged_calls("off", SimpleNamespace()) is None
    with pytest.raises(ConfigurationError, match="ledger"):
        open_staged_calls("vllm_worker", SimpleNamespace())
    with pytest.raises(ConfigurationError, match="several workers"):
        open_ledger(MemoryCaptureStore(), workers=2)
    assert not open_ledger(MemoryCaptureStore()).is_process_shared()
