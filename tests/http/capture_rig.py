"""The sidecar over real HTTP in front of a scripted engine, with its store at hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from capture_server.app import create_app
from capture_server.config import load_settings
from capture_server.in_thread import served_in_thread
from capture_server.stores.memory import MemoryCaptureStore
from middleware.protocols import CaptureStore, RolloutStatus
from middleware.records import TokenEntry

R = "/ng-rollout/r1/training-token-capture"
CHAT = R + "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
STREAM: dict[str, Any] = {**HELLO, "stream": True}


@dataclass
class Sidecar:
    """``http`` talks to it; the control routes are used through it as a trainer would."""

    url: str
    http: httpx.AsyncClient
    store: CaptureStore

    async def status(self) -> RolloutStatus:
        """The rollout's status, from the store."""
        return await self.store.status("r1")

    async def freeze(self) -> dict[str, Any]:
        """Freeze over HTTP: waits for the running calls of this process."""
        response = await self.http.post(R + "/freeze")
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    async def entries(self) -> list[TokenEntry]:
        """The frozen entries by time of dispatch."""
        await self.freeze()
        entries = (await self.store.snapshot("r1")).entries
        return sorted(entries, key=lambda entry: (entry.created_at, entry.model_call_id))

    async def reasons(self) -> list[str]:
        """The codes for which the rollout is incomplete, after freeze."""
        await self.freeze()
        snapshot = await self.store.snapshot("r1")
        assert snapshot.incomplete == bool(snapshot.incomplete_reasons)
        return [reason.code for reason in snapshot.incomplete_reasons]


@asynccontextmanager
async def sidecar(
    upstream: str | None, *, store: CaptureStore | None = None, **settings: Any
) -> AsyncIterator[Sidecar]:
    """Run one in front of ``upstream`` (a base URL)."""
    own = store or MemoryCaptureStore()
    config = load_settings(
        upstream=upstream,
        store="memory:",
        freeze_grace_s=settings.pop("freeze_grace_s", 2.0),
        **settings,
    )
    app = create_app(config, store=own)
    options = {"http": "httptools", "server_header": False, "date_header": False}
    async with served_in_thread(app, root_path=config.root_path, **options) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http:
            yield Sidecar(url, http, own)
    await own.close()
