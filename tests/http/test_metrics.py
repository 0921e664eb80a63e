"""``/metrics`` and traces over real HTTP: what an operator sees of calls, and that it is true."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from capture_server.stores.memory import MemoryCaptureStore
from capture_server.stores.remote import RemoteCaptureStore
from capture_server.stores.statistics import spill_usage
from capture_server.tracing import CallTracer
from middleware.context import CaptureContext
from middleware.observer import CallReport, CaptureObserver, Observers
from middleware.records import TokenEntry
from tests.http.capture_rig import CHAT, HELLO, STREAM, R, Sidecar, sidecar
from tests.http.upstream import (
    RESET,
    STREAM_HEAD,
    chat,
    chunk,
    delta,
    frame,
    scripted_engine,
    stream,
    usage,
    whole,
)

SECRET = "nobody may read this in a metric"


async def samples(car: Sidecar) -> dict[str, float]:
    """Every sample of ``/metrics``: ``name{label=value,...}`` without our prefix."""
    response = await car.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            name = sample.name.removeprefix("token_capture_")
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found


async def test_a_call_is_counted_with_its_tokens_and_times() -> None:
    """One whole call moves exactly the counters that it should."""
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        await car.http.post(CHAT, json=HELLO)
        await car.freeze()
        seen = await samples(car)

    assert seen["calls_total{dialect=chat,engine=openai,outcome=entry}"] == 1
    assert seen["resolutions_total{reason=,status=root}"] == 1
    assert seen["tokens_total{kind=prompt}"] == 2
    assert seen["tokens_total{kind=generated}"] == 2
    assert seen["put_seconds_count"] == 1
    assert seen["added_seconds_count{stage=before_dispatch}"] == 1
    assert seen["added_seconds_count{stage=held_end}"] == 1
    assert seen["store_healthy"] == 1
    assert seen["open_intents"] == 0
    assert "drifted_calls_total{dialect=chat}" not in seen


async def test_what_did_not_end_well_is_counted_by_kind() -> None:
    """A refused engine answer, ids that are missing, and a stream that broke off."""
    without_ids = chat()
    del without_ids["prompt_token_ids"]
    broken = [STREAM_HEAD + chunk(frame(delta("a", [11], prompt=[1, 2]))), RESET]
    scripts = ([whole({"error": "busy"}, status="503 Busy")], [whole(without_ids)], broken)
    async with scripted_engine(*scripts) as engine, sidecar(engine.url) as car:
        await car.http.post(CHAT, json=HELLO)
        await car.http.post(CHAT, json=HELLO)
        async with car.http.stream("POST", CHAT, json=STREAM) as response:
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in response.aiter_bytes():
                    pass
        reasons = await car.reasons()
        seen = await samples(car)

    assert seen["calls_total{dialect=chat,engine=openai,outcome=cancelled}"] == 1
    assert seen["calls_total{dialect=chat,engine=openai,outcome=incomplete}"] == 1
    assert seen["calls_total{dialect=chat,engine=openai,outcome=cut}"] == 1
    assert reasons == ["missing_prompt_token_ids"]
    assert seen["incomplete_total{code=missing_prompt_token_ids}"] == 1


async def test_freezing_and_retiring_are_counted_once() -> None:
    """Repeating either changes nothing; a batch counts each rollout."""
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        for name in ("r1", "r2"):
            await car.http.post(CHAT.replace("/r1/", f"/{name}/"), json=HELLO)
        frozen = await car.freeze()
        await car.freeze()
        await car.http.post("/ng-rollout:batch", json={"op": "freeze", "ids": ["r1", "r2"]})
        known = {key: frozen[key] for key in ("snapshot_id", "version")}
        for _ in range(2):
            assert (await car.http.post(R + "/retire", json=known)).json() == {"retired": True}
        seen = await samples(car)

    assert (seen["frozen_total"], seen["retired_total"]) == (2, 1)


async def test_what_waits_in_the_spill_is_shown(tmp_path: Path) -> None:
    """The remote store's sidecar is away: its marks wait on the local disk."""
    store = RemoteCaptureStore("http://127.0.0.1:9", spill_dir=tmp_path)
    assert spill_usage(store) == (0, 0)
    await store.mark_incomplete("r1", "c1", reason="lost")
    items, size = spill_usage(store)
    await store.close()
    assert (items, size > 0) == (1, True)
    assert spill_usage(MemoryCaptureStore()) == (0, 0)


async def test_refusals_are_counted_by_code() -> None:
    """A call on a frozen rollout is refused, and seen."""
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        await car.http.post(CHAT, json=HELLO)
        await car.freeze()
        refused = await car.http.post(CHAT, json=HELLO)
        seen = await samples(car)

    assert refused.status_code == 409
    assert seen["refused_total{code=rollout_frozen}"] == 1


async def test_drift_is_counted_by_dialect() -> None:
    """The second prompt does not start with the first call's tokens."""
    second = chat("more", ids=[21, 22], prompt=[1, 2, 99, 4])
    async with scripted_engine([whole(chat("hi"))], [whole(second)]) as engine:
        async with sidecar(engine.url) as car:
            await car.http.post(CHAT, json=HELLO)
            said = [
                *HELLO["messages"],
                {"role": "assistant", "content": "hi"},
                {"role": "user", "content": "go on"},
            ]
            await car.http.post(CHAT, json={**HELLO, "messages": said})
            status = await car.status()
            seen = await samples(car)

    assert status.drifted_calls == 1
    assert seen["drifted_calls_total{dialect=chat}"] == 1
    assert seen["resolutions_total{reason=,status=resolved}"] == 1
    assert seen["tokens_total{kind=prompt}"] == 2 + 4


async def test_no_rollout_and_no_text_is_in_the_metrics() -> None:
    """Labels are bounded, and nobody reads prompts there."""
    async with scripted_engine([whole(chat(SECRET))]) as engine, sidecar(engine.url) as car:
        body = {**HELLO, "messages": [{"role": "user", "content": SECRET}]}
        await car.http.post(CHAT.replace("/r1/", "/rollout-77/"), json=body)
        text = (await car.http.get("/metrics")).text

    assert "calls_total" in text
    assert SECRET not in text
    assert "rollout-77" not in text


async def test_promtool_accepts_the_text() -> None:
    """Prometheus' own linter finds nothing."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (bash .ci/system_packages)")
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        await car.http.post(CHAT, json=HELLO)
        text = (await car.http.get("/metrics")).content
    done = await asyncio.to_thread(
        subprocess.run, [promtool, "check", "metrics"], input=text, capture_output=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


class Broken(CaptureObserver):
    """Fails at every chance."""

    def recorded(self, entries: Sequence[TokenEntry]) -> None:
        raise ZeroDivisionError

    def ended(self, report: CallReport) -> None:
        raise ZeroDivisionError

    def hole(self, code: str) -> None:
        raise ZeroDivisionError

    def late_write(self) -> None:
        raise ZeroDivisionError

    def refused(self, code: str) -> None:
        raise ZeroDivisionError


async def test_a_failing_observer_costs_nothing_but_a_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The call is served and recorded all the same."""
    monkeypatch.setattr("capture_server.app.Metrics.recorded", Broken.recorded)
    monkeypatch.setattr("capture_server.app.Metrics.ended", Broken.ended)
    monkeypatch.setattr("capture_server.app.Metrics.refused", Broken.refused)
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        response = await car.http.post(CHAT, json=HELLO)
        (entry,) = await car.entries()
        refused = await car.http.post(CHAT, json=HELLO)

    assert response.status_code == 200
    assert entry.generation_token_ids == [11, 12]
    assert refused.status_code == 409
    assert caplog.text.count("an observer of calls failed") == 3


def test_one_failing_observer_does_not_keep_the_next_from_being_told() -> None:
    """Each is told for itself."""
    told: list[str] = []

    class Listening(CaptureObserver):
        def refused(self, code: str) -> None:
            told.append(code)

        def hole(self, code: str) -> None:
            told.append(code)

    both = Observers([Broken(), Listening()])
    both.refused("a")
    both.hole("b")
    both.late_write()
    assert told == ["a", "b"]


async def test_a_call_becomes_a_span_below_the_agents_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same trace, the right parent, times in order, and the header goes on to the engine."""
    exporter = InMemorySpanExporter()
    tracer = CallTracer(exporter)
    monkeypatch.setattr("capture_server.app.CallTracer", lambda: tracer)
    trace_parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = [stream(delta("a", [11], prompt=[1, 2]), delta("b", [12], finish="stop"), usage(2, 2))]
    async with scripted_engine(answer) as engine, sidecar(engine.url, traces="otlp") as car:
        response = await car.http.post(CHAT, json=STREAM, headers={"traceparent": trace_parent})
        assert response.status_code == 200
        await car.freeze()
        (request,) = engine.seen
    (span,) = exporter.get_finished_spans()

    assert request.header("traceparent") == trace_parent
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == trace_parent.split("-")[1]
    assert f"{span.parent.span_id:016x}" == trace_parent.split("-")[2]
    assert span.attributes is not None
    assert span.attributes["token_capture.rollout_id"] == "r1"
    assert span.attributes["token_capture.outcome"] == "entry"
    assert [event.name for event in span.events] == ["dispatched", "first token"]
    assert span.start_time is not None
    assert span.end_time is not None
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert times == sorted(times)


def test_a_broken_trace_header_starts_a_trace_of_its_own() -> None:
    """Nonsense in a header is no reason to fail."""
    exporter = InMemorySpanExporter()
    tracer = CallTracer(exporter)
    context = CaptureContext(rollout_id="r1", model_call_id="c1", trace_parent="nonsense")
    tracer.ended(
        CallReport(
            context=context,
            outcome="incomplete",
            reason="missing_token_ids",
            started_at=1.0,
            total_s=2.0,
            before_dispatch_s=0.5,
            first_token_s=None,
            put_s=None,
            held_s=None,
            delivered=None,
        )
    )
    tracer.close()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert not span.status.is_ok
    assert (span.start_time, span.end_time) == (1_000_000_000, 3_000_000_000)
