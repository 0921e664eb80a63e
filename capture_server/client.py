"""Clients of the control API for trainers: ``RolloutClient`` (async), ``SyncRolloutClient``.

Same methods, same arguments, same results; what a method sends and how its answer is read is in
``capture_server.client_requests``. Errors are those of ``middleware.errors``, by their code.
Every call is idempotent, so a lost answer and a 503 are tried again with backoff. Proxies from
the environment are ignored: the sidecar is local. Token ids are never logged.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import anyio
import httpx

from capture_server import client_requests as calls
from capture_server.client_connection import Connection, answer_of
from capture_server.client_models import BuiltResponse, RolloutPage
from capture_server.client_requests import Call
from capture_server.errors import SidecarUnreachableError
from capture_server.trajectories.rows import RolloutTraces, TraceRow
from middleware.errors import StoreError, TokenCaptureError
from middleware.protocols import RolloutStatus, TokenCaptureSnapshot

__all__ = [
    "BuiltResponse",
    "RolloutClient",
    "RolloutPage",
    "RolloutTraces",
    "SyncRolloutClient",
    "TraceRow",
]

_READY_POLL_S: Final = 0.1

T = TypeVar("T")


class RolloutClient(Connection):
    """Asynchronous client; use as ``async with RolloutClient(url) as client``.

    Args:
        server: the sidecar's address; default TOKEN_CAPTURE_SERVER, then 127.0.0.1:8900.
        control_token: default TOKEN_CAPTURE_CONTROL_TOKEN or ..._FILE.
        timeout_s: longest silence of the server; above its ``freeze_grace_s``.
        retries: how often a lost answer or a 503 is tried again.
        transport: an httpx transport, for tests.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        control_token: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 4,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(server, control_token=control_token, timeout_s=timeout_s, retries=retries)
        self._http = httpx.AsyncClient(transport=transport, **self.client_options())

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._http.aclose()

    async def _send(self, call: Call[T], *, retries: int | None = None) -> T:
        delays = calls.retry_delays(self.retries if retries is None else retries)
        while True:
            delay_s = next(delays, None)
            try:
                answer = answer_of(await self._http.request(**self.request_options(call)))
            except httpx.TransportError as exc:
                if delay_s is None:
                    raise self.unreachable(exc) from exc
                wait_s: float | None = delay_s
            else:
                wait_s = None if delay_s is None else calls.wait_before_retry(answer, delay_s)
                if wait_s is None:
                    return call.read(answer)
            await anyio.sleep(wait_s or 0.0)

    async def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Return when the sidecar can capture calls.

        Raises:
            SidecarUnreachableError, StoreUnavailableError: its state when the time was up.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self._send(calls.ready(), retries=0)
            except (SidecarUnreachableError, StoreError):
                if time.monotonic() >= deadline:
                    raise
                await anyio.sleep(_READY_POLL_S)
            else:
                return

    async def version(self) -> dict[str, Any]:
        """The server's release and record formats."""
        return await self._send(calls.version())

    async def status(self, rollout_id: str) -> RolloutStatus:
        """Counts and state; ``unknown`` for an id never seen."""
        return await self._send(calls.status(rollout_id))

    async def freeze(self, rollout_id: str) -> RolloutStatus:
        """Refuse new calls, wait (bounded) for running ones, fix the snapshot. Idempotent.

        Raises:
            TokenCaptureRetiredError: only the tombstone is left.
        """
        return await self._send(calls.freeze(rollout_id))

    async def snapshot(
        self, rollout_id: str, *, full_prompts: bool = False
    ) -> TokenCaptureSnapshot:
        """The frozen rollout's entries; ``full_prompts`` rebuilds prompts stored as suffixes.

        Raises:
            NotFrozenError, TokenCaptureRetiredError
        """
        return await self._send(calls.snapshot(rollout_id, full_prompts=full_prompts))

    async def snapshot_ndjson(self, rollout_id: str, *, full_prompts: bool = False) -> bytes:
        """The snapshot as NDJSON for a file: the header line, then one entry per line."""
        return await self._send(calls.snapshot_ndjson(rollout_id, full_prompts=full_prompts))

    async def traces(
        self,
        rollout_id: str,
        *,
        verified_response: dict[str, Any] | None = None,
        terminal_call_id: str | None = None,
        terminal_response_id: str | None = None,
        fragments: str = "include",
        builder: str = "prefix_merging",
    ) -> RolloutTraces:
        """All training rows of a frozen rollout, as numpy arrays.

        Raises:
            NotFrozenError, TokenCaptureRetiredError
        """
        return await self._send(
            calls.traces(
                rollout_id,
                verified_response=verified_response,
                terminal_call_id=terminal_call_id,
                terminal_response_id=terminal_response_id,
                fragments=fragments,
                builder=builder,
            )
        )

    async def trajectories(
        self,
        rollout_id: str,
        *,
        verified_response: dict[str, Any] | None = None,
        terminal_call_id: str | None = None,
        terminal_response_id: str | None = None,
        builder: str = "prefix_merging",
    ) -> BuiltResponse:
        """The main chain as one Responses object with contiguous tokens.

        Raises:
            NotFrozenError, TokenCaptureRetiredError
        """
        return await self._send(
            calls.trajectories(
                rollout_id,
                verified_response=verified_response,
                terminal_call_id=terminal_call_id,
                terminal_response_id=terminal_response_id,
                builder=builder,
            )
        )

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Remove exactly the snapshot that was consumed; True, also the second time.

        Raises:
            StaleSnapshotError: it changed since (the error has the current id and version).
            NotFrozenError: open, or never seen.
        """
        return await self._send(calls.retire(rollout_id, snapshot_id=snapshot_id, version=version))

    async def delete(self, rollout_id: str) -> bool:
        """Clear a rollout unconditionally, before its id is used again."""
        return await self._send(calls.delete(rollout_id))

    async def list_rollouts(
        self, *, state: str | None = None, prefix: str = "", limit: int = 100, cursor: str = ""
    ) -> RolloutPage:
        """One page of rollouts in id order."""
        return await self._send(
            calls.list_rollouts(state=state, prefix=prefix, limit=limit, cursor=cursor)
        )

    async def freeze_many(
        self, rollout_ids: Iterable[str]
    ) -> dict[str, RolloutStatus | TokenCaptureError]:
        """Freeze each; a result or an error per id."""
        return await self._send(calls.freeze_many(rollout_ids))

    async def retire_many(
        self, consumed: Mapping[str, tuple[str, int]]
    ) -> dict[str, bool | TokenCaptureError]:
        """Retire each at its consumed (snapshot id, version)."""
        return await self._send(calls.retire_many(consumed))

    async def delete_many(self, rollout_ids: Iterable[str]) -> dict[str, bool | TokenCaptureError]:
        """Clear each unconditionally."""
        return await self._send(calls.delete_many(rollout_ids))

    async def sweep(self, *, older_than_seconds: float = 86_400.0) -> int:
        """Remove tombstones older than that; how many."""
        return await self._send(calls.sweep(older_than_seconds=older_than_seconds))


class SyncRolloutClient(Connection):
    """Blocking client; use as ``with SyncRolloutClient(url) as client``. See RolloutClient."""

    def __init__(
        self,
        server: str | None = None,
        *,
        control_token: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 4,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(server, control_token=control_token, timeout_s=timeout_s, retries=retries)
        self._http = httpx.Client(transport=transport, **self.client_options())

    def __enter__(self) -> Self:
        self._http.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def _send(self, call: Call[T], *, retries: int | None = None) -> T:
        delays = calls.retry_delays(self.retries if retries is None else retries)
        while True:
            delay_s = next(delays, None)
            try:
                answer = answer_of(self._http.request(**self.request_options(call)))
            except httpx.TransportError as exc:
                if delay_s is None:
                    raise self.unreachable(exc) from exc
                wait_s: float | None = delay_s
            else:
                wait_s = None if delay_s is None else calls.wait_before_retry(answer, delay_s)
                if wait_s is None:
                    return call.read(answer)
            time.sleep(wait_s or 0.0)

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """See ``RolloutClient.wait_ready``."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._send(calls.ready(), retries=0)
            except (SidecarUnreachableError, StoreError):
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_READY_POLL_S)
            else:
                return

    def version(self) -> dict[str, Any]:
        """See ``RolloutClient.version``."""
        return self._send(calls.version())

    def status(self, rollout_id: str) -> RolloutStatus:
        """See ``RolloutClient.status``."""
        return self._send(calls.status(rollout_id))

    def freeze(self, rollout_id: str) -> RolloutStatus:
        """See ``RolloutClient.freeze``."""
        return self._send(calls.freeze(rollout_id))

    def snapshot(self, rollout_id: str, *, full_prompts: bool = False) -> TokenCaptureSnapshot:
        """See ``RolloutClient.snapshot``."""
        return self._send(calls.snapshot(rollout_id, full_prompts=full_prompts))

    def snapshot_ndjson(self, rollout_id: str, *, full_prompts: bool = False) -> bytes:
        """See ``RolloutClient.snapshot_ndjson``."""
        return self._send(calls.snapshot_ndjson(rollout_id, full_prompts=full_prompts))

    def traces(
        self,
        rollout_id: str,
        *,
        verified_response: dict[str, Any] | None = None,
        terminal_call_id: str | None = None,
        terminal_response_id: str | None = None,
        fragments: str = "include",
        builder: str = "prefix_merging",
    ) -> RolloutTraces:
        """See ``RolloutClient.traces``."""
        return self._send(
            calls.traces(
                rollout_id,
                verified_response=verified_response,
                terminal_call_id=terminal_call_id,
                terminal_response_id=terminal_response_id,
                fragments=fragments,
                builder=builder,
            )
        )

    def trajectories(
        self,
        rollout_id: str,
        *,
        verified_response: dict[str, Any] | None = None,
        terminal_call_id: str | None = None,
        terminal_response_id: str | None = None,
        builder: str = "prefix_merging",
    ) -> BuiltResponse:
        """See ``RolloutClient.trajectories``."""
        return self._send(
            calls.trajectories(
                rollout_id,
                verified_response=verified_response,
                terminal_call_id=terminal_call_id,
                terminal_response_id=terminal_response_id,
                builder=builder,
            )
        )

    def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """See ``RolloutClient.retire``."""
        return self._send(calls.retire(rollout_id, snapshot_id=snapshot_id, version=version))

    def delete(self, rollout_id: str) -> bool:
        """See ``RolloutClient.delete``."""
        return self._send(calls.delete(rollout_id))

    def list_rollouts(
        self, *, state: str | None = None, prefix: str = "", limit: int = 100, cursor: str = ""
    ) -> RolloutPage:
        """See ``RolloutClient.list_rollouts``."""
        return self._send(
            calls.list_rollouts(state=state, prefix=prefix, limit=limit, cursor=cursor)
        )

    def freeze_many(
        self, rollout_ids: Iterable[str]
    ) -> dict[str, RolloutStatus | TokenCaptureError]:
        """See ``RolloutClient.freeze_many``."""
        return self._send(calls.freeze_many(rollout_ids))

    def retire_many(
        self, consumed: Mapping[str, tuple[str, int]]
    ) -> dict[str, bool | TokenCaptureError]:
        """See ``RolloutClient.retire_many``."""
        return self._send(calls.retire_many(consumed))

    def delete_many(self, rollout_ids: Iterable[str]) -> dict[str, bool | TokenCaptureError]:
        """See ``RolloutClient.delete_many``."""
        return self._send(calls.delete_many(rollout_ids))

    def sweep(self, *, older_than_seconds: float = 86_400.0) -> int:
        """See ``RolloutClient.sweep``."""
        return self._send(calls.sweep(older_than_seconds=older_than_seconds))
