"""Serve an ASGI application over real HTTP from a thread of this process.

For the demo, for tests and for notebooks; a deployment runs ``token-capture serve``.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import uvicorn
from starlette.types import ASGIApp

_START_TIMEOUT_S: Final = 30.0
_STOP_TIMEOUT_S: Final = 10.0


@asynccontextmanager
async def served_in_thread(
    app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0, **options: Any
) -> AsyncIterator[str]:
    """Run ``app`` under uvicorn; gives its base URL. ``port=0`` takes a free one.

    ``options`` go to ``uvicorn.Config``. On the way out the server is told to end and waited for.

    Raises:
        RuntimeError: the application did not start.
    """
    listener = socket.create_server((host, port), backlog=2048)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as in ``app.serve``
    config = uvicorn.Config(
        app,
        **{
            "log_level": "warning",
            "access_log": False,
            "timeout_graceful_shutdown": int(_STOP_TIMEOUT_S),
            **options,
        },
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="served", daemon=True)
    thread.start()
    try:
        with anyio.fail_after(_START_TIMEOUT_S):
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("the server ended while it started; see its log")
                await anyio.sleep(0.01)
        yield f"http://{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(thread.join, _STOP_TIMEOUT_S + 5)
        listener.close()
