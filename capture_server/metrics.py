"""Prometheus metrics of the sidecar: what became of calls, and what it costs.

Labels are small fixed sets: never a rollout, a model text or a token. With several workers
the values live in files that all of them write (``prometheus_client``'s multiprocess mode,
``shared_metrics``), so that whichever worker answers ``/metrics`` answers for all.
Source: spec 08, "Metrics".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from fastapi import APIRouter
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from starlette.responses import Response

from capture_server.freezing import Lifecycle
from middleware._version import __version__
from middleware.observer import CallReport, CaptureObserver
from middleware.records import ParentResolutionStatus, TokenEntry

_SHARED_DIR: Final = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it at its import
_PREFIX: Final = "token_capture_"
_GaugeMode = Literal["livesum", "livemin", "livemax"]

_SAMPLE_S: Final = 0.5
_HEALTH_EVERY: Final = 10  # samples between two looks at the store

_ADDED: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_DISK: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_LAG: Final = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Where the sampled values come from; each is asked on the event loop and must be quick."""

    running_calls: Callable[[], int]
    connections: Callable[[], tuple[int, int]]  # in use, idle
    spill: Callable[[], tuple[int, int]]  # records, bytes
    unhealthy: Callable[[], Awaitable[str | None]]  # why the store takes no writes


class Metrics(CaptureObserver, Lifecycle):
    """All metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._calls = _counter(
            registry, "calls", "Captured calls that ended", ("dialect", "engine", "outcome")
        )
        self._resolutions = _counter(
            registry,
            "resolutions",
            "Records by how their parent was decided, and why not",
            ("status", "reason"),
        )
        self._drifted = _counter(
            registry,
            "drifted_calls",
            "Continued calls whose prompt does not start with their parent's tokens",
            ("dialect",),
        )
        self._tokens = _counter(registry, "tokens", "Recorded tokens", ("kind",))
        self._incomplete = _counter(
            registry, "incomplete", "Marks that make a rollout incomplete", ("code",)
        )
        self._refused = _counter(
            registry, "refused", "Tagged requests refused before the engine", ("code",)
        )
        self._late = _counter(registry, "late_writes", "Writes that came after a freeze")
        self._frozen = _counter(registry, "frozen", "Rollouts frozen by this sidecar")
        self._retired = _counter(registry, "retired", "Rollouts retired by this sidecar")
        self._put = _histogram(
            registry, "put", "Building and storing a call's record, until durable", _DISK
        )
        self._fsync = _histogram(registry, "fsync", "One sync of a journal to the disk", _DISK)
        self._added = _histogram(
            registry, "added", "Time that capture adds to a call", _ADDED, ("stage",)
        )
        self._lag = _histogram(
            registry, "event_loop_lag", "How late the event loop runs a timer", _LAG
        )
        self._open = _gauge(registry, "open_intents", "Captured calls that run now")
        self._connections = _gauge(
            registry, "upstream_connections", "Connections to the engine", ("state",)
        )
        self._spill_records = _gauge(
            registry, "spill_records", "Records and marks waiting in the local spill"
        )
        self._spill_bytes = _gauge(registry, "spill_bytes", "Size of the local spill")
        self._healthy = _gauge(
            registry, "store_healthy", "1 while the store takes writes", mode="livemin"
        )
        info = _gauge(registry, "build_info", "1, with the release", ("version",), mode="livemax")
        info.labels(__version__).set(1)
        if _SHARED_DIR not in os.environ:
            ProcessCollector(registry=registry)

    # --- CaptureObserver -----------------------------------------------------------------------

    def recorded(self, entries: Sequence[TokenEntry]) -> None:
        """See ``CaptureObserver``."""
        for entry in entries:
            status = entry.parent_resolution or ParentResolutionStatus.UNRESOLVED
            self._resolutions.labels(status.value, entry.parent_resolution_reason or "").inc()
            generated = len(entry.generation_token_ids)
            self._tokens.labels("generated").inc(generated)
            # The prompt's full length, also where only what is new is recorded.
            self._tokens.labels("prompt").inc(max(0, (entry.cum_len or 0) - generated))
            if entry.drift_at is not None:
                self._drifted.labels(entry.dialect or "").inc()

    def hole(self, code: str) -> None:
        """See ``CaptureObserver``."""
        self._incomplete.labels(code).inc()

    def late_write(self) -> None:
        """See ``CaptureObserver``."""
        self._late.inc()

    def refused(self, code: str) -> None:
        """See ``CaptureObserver``."""
        self._refused.labels(code).inc()

    def ended(self, report: CallReport) -> None:
        """See ``CaptureObserver``."""
        context = report.context
        self._calls.labels(context.dialect, context.engine, report.outcome).inc()
        self._added.labels("before_dispatch").observe(report.before_dispatch_s)
        if report.held_s is not None:
            self._added.labels("held_end").observe(report.held_s)
        if report.put_s is not None:
            self._put.observe(report.put_s)

    # --- what is no call -----------------------------------------------------------------------

    def synced(self, seconds: float) -> None:
        """A journal was synced to the disk. Any thread."""
        self._fsync.observe(seconds)

    def frozen(self) -> None:
        """See ``Lifecycle``."""
        self._frozen.inc()

    def retired(self) -> None:
        """See ``Lifecycle``."""
        self._retired.inc()

    async def sample(self, gauges: Gauges) -> None:
        """Measure the event loop and read the gauges until cancelled."""
        loop = asyncio.get_running_loop()
        turn = 0
        while True:
            if turn % _HEALTH_EVERY == 0:
                self._healthy.set(0 if await gauges.unhealthy() else 1)
            turn += 1
            self._open.set(gauges.running_calls())
            in_use, idle = gauges.connections()
            self._connections.labels("in_use").set(in_use)
            self._connections.labels("idle").set(idle)
            records, num_bytes = gauges.spill()
            self._spill_records.set(records)
            self._spill_bytes.set(num_bytes)
            due = loop.time() + _SAMPLE_S
            await asyncio.sleep(_SAMPLE_S)
            self._lag.observe(max(0.0, loop.time() - due))

    def exposition(self) -> bytes:
        """The text format, over all workers."""
        if _SHARED_DIR not in os.environ:
            return generate_latest(self._registry)
        shared = CollectorRegistry()
        MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
        return generate_latest(shared)


def metrics_router(metrics: Metrics) -> APIRouter:
    """``GET /metrics``: unauthenticated and free of tokens, as probes are."""
    router = APIRouter(tags=["operations"], generate_unique_id_function=lambda route: route.name)

    @router.get(
        "/metrics",
        name="metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    def metrics_text() -> Response:
        """Prometheus metrics of all workers, in the text format."""
        # A plain function: with several workers it reads files, so it runs in a thread.
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return router


@contextlib.contextmanager
def shared_metrics() -> Iterator[None]:
    """Around the life of worker processes: a directory in which their values add up.

    Set before they are spawned, because ``prometheus_client`` decides at its import.
    """
    with tempfile.TemporaryDirectory(prefix="token-capture-metrics-") as directory:
        os.environ[_SHARED_DIR] = directory
        try:
            yield
        finally:
            del os.environ[_SHARED_DIR]


def forget_worker(pid: int) -> None:
    """A worker died: its gauges go; what it counted stays."""
    if _SHARED_DIR in os.environ:
        mark_process_dead(pid)  # type: ignore[no-untyped-call]


def _counter(
    registry: CollectorRegistry, name: str, about: str, labels: Sequence[str] = ()
) -> Counter:
    return Counter(f"{_PREFIX}{name}_total", f"{about}.", labels, registry=registry)


def _histogram(
    registry: CollectorRegistry,
    name: str,
    about: str,
    buckets: Sequence[float],
    labels: Sequence[str] = (),
) -> Histogram:
    return Histogram(
        f"{_PREFIX}{name}_seconds", f"{about}.", labels, registry=registry, buckets=buckets
    )


def _gauge(
    registry: CollectorRegistry,
    name: str,
    about: str,
    labels: Sequence[str] = (),
    *,
    mode: _GaugeMode = "livesum",
) -> Gauge:
    return Gauge(f"{_PREFIX}{name}", f"{about}.", labels, registry=registry, multiprocess_mode=mode)
