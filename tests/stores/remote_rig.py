"""A sidecar over real HTTP for the remote store's tests: it can be stopped and started again."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from capture_server.app import create_app
from capture_server.config import load_settings
from capture_server.in_thread import served_in_thread
from capture_server.stores.remote import RemoteCaptureStore
from middleware.protocols import CaptureStore


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Sidecar:
    """A sidecar on a fixed port, over a store that outlives it."""

    def __init__(self, store: CaptureStore, **settings: Any) -> None:
        self.store = store
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._settings = {"store": "memory:", "freeze_grace_s": 0.05} | settings
        self._running: AsyncExitStack | None = None

    async def start(self) -> None:
        """Serve."""
        app = create_app(load_settings(**self._settings), store=self.store)
        self._running = AsyncExitStack()
        await self._running.enter_async_context(served_in_thread(app, port=self.port))

    async def stop(self) -> None:
        """Be away. Idempotent."""
        if self._running is not None:
            await self._running.aclose()
            self._running = None


@asynccontextmanager
async def sidecar(store: CaptureStore, **settings: Any) -> AsyncIterator[Sidecar]:
    """Run one; the caller closes the store."""
    made = Sidecar(store, **settings)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def remote(made: Sidecar, spill_dir: Path, **options: Any) -> RemoteCaptureStore:
    """A store over it, spilling to ``spill_dir``."""
    return RemoteCaptureStore(made.url, spill_dir=spill_dir, **options)
