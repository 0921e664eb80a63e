"""A store with a recorded rollout, and the control routes in front of it, without a network."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from capture_server.config import Settings, load_settings
from capture_server.control_routes import install_control_routes
from capture_server.freezing import OpenCalls
from capture_server.stores.file import TokenCaptureStore
from middleware.protocols import CallIntent, CaptureStore
from middleware.records import (
    ParentResolutionStatus,
    TokenEntry,
    TokenIds,
    cumulative_tokens,
    stamp_lineage,
)

BASE = "http://127.0.0.1:8900"


def root(rollout_id: str, verb: str = "") -> str:
    """``R`` of the specification."""
    path = f"/ng-rollout/{rollout_id}/training-token-capture"
    return f"{path}/{verb}" if verb else path


def entry(
    rollout_id: str,
    call_id: str,
    prompt: Sequence[int],
    generation: Sequence[int],
    *,
    parent: TokenEntry | None = None,
    parent_tokens: Sequence[int] = (),
    **more: Any,
) -> TokenEntry:
    """A record; with ``parent``, a delta behind ``parent_tokens``."""
    status = ParentResolutionStatus.RESOLVED if parent else ParentResolutionStatus.ROOT
    made = TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call_id,
        model="m",
        prompt_token_ids=TokenIds.of(list(prompt)),
        generation_token_ids=TokenIds.of(list(generation)),
        generation_log_probs=[-0.5 * (i + 1) for i in range(len(generation))],
        output_items=[
            {"type": "message", "role": "assistant", "content": f"says {call_id}"},
        ],
        token_item_index=0,
        response_id=f"resp-{call_id}",
        created_at=float(len(parent_tokens) + 1),
        parent_call_id=parent.model_call_id if parent else None,
        parent_resolution=status,
        prompt_is_delta=parent is not None,
        finish_reason="stop",
        delivered=True,
        **more,
    )
    whole = [*parent_tokens, *prompt, *generation] if parent else None
    return stamp_lineage(
        made,
        parent.model_call_id if parent else None,
        parent_resolution=status,
        cumulative=whole,
    )


def three_turns(rollout_id: str) -> list[TokenEntry]:
    """A root and two continuations whose prompts are stored as suffixes."""
    first = entry(rollout_id, "c1", [1, 2, 3], [4, 5])
    known = cumulative_tokens(first).tolist()
    second = entry(rollout_id, "c2", [6], [7, 8, 9], parent=first, parent_tokens=known)
    known += [6, 7, 8, 9]
    third = entry(rollout_id, "c3", [10, 11], [12], parent=second, parent_tokens=known)
    return [first, second, third]


WHOLE = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


async def record(store: CaptureStore, entries: Sequence[TokenEntry]) -> None:
    """Put them as the middleware would: intent, then entry."""
    for one in entries:
        intent = CallIntent(
            rollout_id=one.rollout_id,
            model_call_id=one.model_call_id,
            created_at=one.created_at,
            request_digest=one.model_call_id,
        )
        await store.open_intent(intent)
        await store.put(one)


def application(
    store: CaptureStore,
    settings: Settings | None = None,
    calls: OpenCalls | None = None,
    **more: Any,
) -> FastAPI:
    """Only what is under test: the control side."""
    app = FastAPI(redirect_slashes=False)
    install_control_routes(app, store, settings or load_settings(freeze_grace_s=0.2), calls, **more)
    return app


@asynccontextmanager
async def http_to(app: FastAPI, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client that calls the application directly."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=BASE, **options) as client:
        yield client


@asynccontextmanager
async def file_store(path: Path) -> AsyncIterator[TokenCaptureStore]:
    """The default store, closed at the end."""
    store = TokenCaptureStore(path)
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """A real server on a free loopback port, in a thread; its address."""
    config = uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            # The socket listens as soon as it is handed over; connecting waits for the server.
            listener.listen()
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
