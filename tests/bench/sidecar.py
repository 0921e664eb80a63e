"""The sidecar in a process of its own, which also tells the processor time that it has used.

``python -m tests.bench.sidecar ENGINE_URL STORE_ROOT`` prints its URL; ``GET /bench/cpu`` there.
"""

from __future__ import annotations

import asyncio
import cProfile
import os
import socket
import sys
import time

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from capture_server.app import create_app, tune_garbage_collector
from capture_server.config import load_settings
from middleware.asgi_messages import json_messages


def with_clock(app: ASGIApp) -> ASGIApp:
    """``app`` plus the one route."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") != "/bench/cpu":
            await app(scope, receive, send)
            return
        for message in json_messages(200, {"seconds": time.process_time()}):
            await send(message)

    return serve


async def _main(engine: str, root: str) -> None:
    settings = load_settings(upstream=engine, store=f"file://{root}", engine="vllm")
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tune_garbage_collector()
    config = uvicorn.Config(
        with_clock(create_app(settings)),
        http="httptools",
        log_level="warning",
        access_log=False,
        date_header=False,
        server_header=False,
    )
    server = uvicorn.Server(config)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)

    async def stop_with_parent() -> None:
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True

    watching = asyncio.create_task(stop_with_parent())
    await server.serve(sockets=[listener])
    await watching


if __name__ == "__main__":
    profile = os.environ.get("BENCH_PROFILE")
    profiler = cProfile.Profile() if profile else None
    if profiler is not None:
        profiler.enable()
    asyncio.run(_main(*sys.argv[1:]))
    if profiler is not None:
        profiler.disable()
        profiler.dump_stats(str(profile))
