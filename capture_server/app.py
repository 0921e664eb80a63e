"""The sidecar's application: capture middleware, proxy, control routes and their lifetimes.

``create_app`` builds an ASGI application that any server can run; ``serve`` runs it under
uvicorn as the CLI does. All wiring is here and nowhere else.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from capture_server.auth import exposure_notice
from capture_server.config import Settings
from capture_server.control_door import ControlDoor
from capture_server.control_routes import install_control_routes
from capture_server.engine_probe import EngineProbe
from capture_server.logs import configure_logging
from capture_server.metrics import Gauges, Metrics, metrics_router, shared_metrics
from capture_server.proxy import UpstreamProxy
from capture_server.staging.external_capture import open_staged_calls
from capture_server.store_rpc import install_store_rpc
from capture_server.stores.registry import open_resolver, open_store
from capture_server.stores.statistics import CountingStore, spill_usage
from capture_server.tracing import CallTracer
from capture_server.ui import install_dashboard
from capture_server.workers import check_workers, serve_workers
from middleware._version import __version__
from middleware.agent_tokens import AgentTokens
from middleware.asgi import CaptureMiddleware, CaptureOptions
from middleware.asgi_messages import json_messages
from middleware.capture import health
from middleware.dialects.choices import openai_error
from middleware.engines import EngineProfile, engine_profile
from middleware.observer import Observers
from middleware.open_calls import OpenCallRegistry
from middleware.protocols import CaptureStore
from middleware.token_origin import EngineProvider

logger = logging.getLogger(__name__)

_DRAIN_S: Final = 10.0
_GRACEFUL_S: Final = 30


def create_app(settings: Settings, *, store: CaptureStore | None = None) -> FastAPI:
    """The sidecar as an ASGI application.

    Args:
        settings: validated settings; ``upstream`` None serves control routes only.
        store: use this open store (the caller closes it) in place of ``settings.store``.

    Raises:
        ConfigurationError: the store or resolver cannot be opened with these settings.
    """
    own_store = store is None
    capture_store = (
        open_store(settings.store, spill_dir=settings.spill_dir) if store is None else store
    )
    resolver = open_resolver(settings.store, capture_store)
    calls = OpenCallRegistry()
    proxy = (
        UpstreamProxy(settings.upstream, api_key=_api_key(settings)) if settings.upstream else None
    )

    engine = _engine(settings, proxy)
    metrics = Metrics()
    tracer = CallTracer() if settings.traces == "otlp" else None
    if isinstance(capture_store, CountingStore):
        capture_store.statistics().on_sync = metrics.synced
    gauges = Gauges(
        running_calls=lambda: len(calls),
        connections=lambda: proxy.connections if proxy is not None else (0, 0),
        spill=lambda: spill_usage(capture_store),
        unhealthy=capture_store.healthy,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with _sampling(metrics, gauges):
                if proxy is None:
                    yield
                else:
                    async with proxy, _asking(engine):
                        yield
        finally:
            # Calls that the server cut at its deadline still write their records.
            if not await calls.wait_idle(_DRAIN_S):
                logger.error("%d calls still ran at shutdown", len(calls))
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
            await resolver.close()
            if own_store:
                await capture_store.close()

    app = FastAPI(
        title="Token Capture",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.router.redirect_slashes = False
    engine_app: ASGIApp = proxy if proxy is not None else _no_upstream
    door = ControlDoor(settings.control_port)
    app.router.default = door.default_app(engine_app)
    install_store_rpc(app, capture_store, resolver, settings)
    app.include_router(metrics_router(metrics))
    install_dashboard(app, capture_store, settings, lambda: len(calls))
    install_control_routes(
        app, capture_store, settings, calls, readiness_checks=[_lost_marks], told=metrics
    )
    app.add_middleware(door.middleware, engine_app=engine_app)
    app.add_middleware(
        CaptureMiddleware,
        engine_app=engine_app,
        sink=capture_store,
        resolver=resolver,
        engine=engine,
        agent_tokens=(
            AgentTokens(settings.agent_token_keys) if settings.agent_tokens == "signed" else None
        ),
        takes_calls=door.takes_calls,
        staging=open_staged_calls(
            settings.external_staging, capture_store, workers=settings.workers
        ),
        options=CaptureOptions(
            max_body_bytes=settings.max_body_bytes,
            max_decoded_body_bytes=settings.max_decoded_body_bytes,
            drain_on_disconnect=settings.on_disconnect == "drain",
            delta_records=settings.delta_records,
        ),
        calls=calls,
        observer=Observers([metrics, tracer] if tracer is not None else [metrics]),
    )
    return app


def serve(settings: Settings) -> None:
    """Run the sidecar until SIGTERM or SIGINT, in ``settings.workers`` processes.

    Raises:
        ConfigurationError: it cannot start with these settings.
    """
    configure_logging(settings.log_level, settings.log_format)
    if settings.workers > 1:
        check_workers(settings)
    listeners = [_bind(settings.host, settings.port)]
    if settings.control_port is not None:
        listeners.append(_bind(settings.control_address, settings.control_port))
        # Port 0 takes a free one: the application tells the two apart by their numbers.
        control_port = listeners[1].getsockname()[1]
        settings = settings.model_copy(update={"control_port": control_port})
    app = create_app(settings) if settings.workers == 1 else None
    if (notice := exposure_notice(settings)) is not None:
        logger.log(*notice, extra={"action": "exposure"})
    shown = ", control on ".join(map(_url_of, listeners))
    print(f"token-capture {__version__} listening on {shown}", file=sys.stderr)  # noqa: T201
    if app is not None:
        run_server(app, settings, listeners)
    else:
        with shared_metrics():
            serve_workers(settings, listeners, stop_timeout_s=_GRACEFUL_S + 2 * _DRAIN_S)


def run_server(app: FastAPI, settings: Settings, listeners: Sequence[socket.socket]) -> bool:
    """Serve in this process until SIGTERM or SIGINT; False if it could not begin to."""
    tune_garbage_collector()
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        log_config=None,
        access_log=False,
        # The engine's own Date and Server reach the agent; none is added.
        date_header=False,
        server_header=False,
        root_path=settings.root_path,
        timeout_graceful_shutdown=_GRACEFUL_S,
    )
    # uvicorn raises the signal that ended it once more; being told to end is no failure.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server = uvicorn.Server(config)
    server.run(sockets=list(listeners))
    return server.started


def tune_garbage_collector() -> None:
    """Collect rarely: answers are large trees without cycles, walked in vain at every threshold.

    Parsing an answer of 65k tokens takes about a third of the time that it takes by default.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048, reuse_port=False)
    # Accepted sockets inherit it. asyncio sets it itself only where the socket's protocol is
    # named; without it an answer's second write waits 40 ms for the client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _engine(settings: Settings, proxy: UpstreamProxy | None) -> EngineProfile | EngineProvider:
    if settings.engine == "auto" and proxy is not None:
        return EngineProbe(proxy, api_key=_api_key(settings))
    return engine_profile("vllm" if settings.engine == "auto" else settings.engine)


@asynccontextmanager
async def _asking(engine: EngineProfile | EngineProvider) -> AsyncIterator[None]:
    """Ask the engine at start what it is; the first call need not wait for it."""
    if not isinstance(engine, EngineProbe):
        yield
        return
    engine.start()
    try:
        yield
    finally:
        await engine.close()


@asynccontextmanager
async def _sampling(metrics: Metrics, gauges: Gauges) -> AsyncIterator[None]:
    task = asyncio.create_task(metrics.sample(gauges), name="token-capture-metrics")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _api_key(settings: Settings) -> str | None:
    return settings.engine_api_key


async def _lost_marks() -> str | None:
    """Red while a lost call could not even be marked (spec 03, ``mark_incomplete``)."""
    if not health.marks_failing:
        return None
    return "a lost call could not be marked incomplete; see the log for its rollout"


async def _no_upstream(scope: Scope, receive: Receive, send: Send) -> None:
    message = "this sidecar has no engine behind it: start it with --upstream URL"
    for part in json_messages(404, openai_error(404, "unknown_route", message)):
        await send(part)
