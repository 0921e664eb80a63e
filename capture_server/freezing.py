"""Freeze and retire as operations over a store: the waiting and the answers' meaning.

A freeze first refuses new calls, then gives running ones a bounded time to end, then lets the
store judge what is still open. It can be repeated or interrupted at any point: until the
snapshot exists the rollout stays ``open``, and the next freeze goes on. Knows no HTTP.
"""

from __future__ import annotations

import contextlib
import time
from typing import Final, Protocol

import anyio

from middleware.errors import (
    NotFrozenError,
    StaleSnapshotError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
)
from middleware.protocols import CaptureStore, RolloutStatus

_FIRST_POLL_S = 0.01
_MAX_POLL_S = 0.2


class OpenCalls(Protocol):
    """What the process that serves the calls knows about those still running."""

    def fence(self, rollout_id: str) -> None:
        """A freeze is under way: close the calls whose client is gone.

        Refusing new calls is the store's part; this must not outlive the freeze, because the id
        may be deleted and used again.
        """

    async def wait_closed(self, rollout_id: str, timeout_s: float) -> bool:
        """Wait until no call of the rollout runs here and its delivery notes are written.

        False when the time is up first. Returns at once when nothing runs.
        """


class Lifecycle:
    """Told what was done here; does nothing by itself."""

    def frozen(self) -> None:
        """A rollout was frozen by this call, not by an earlier one."""

    def retired(self) -> None:
        """A rollout's records were removed by this call."""


NOBODY: Final = Lifecycle()


async def freeze_rollout(
    store: CaptureStore,
    calls: OpenCalls | None,
    rollout_id: str,
    *,
    grace_s: float,
    told: Lifecycle = NOBODY,
) -> RolloutStatus:
    """Fence, wait at most ``grace_s`` for running calls, freeze; idempotent.

    Raises:
        TokenCaptureRetiredError: only the tombstone is left.
        StoreUnavailableError: nothing was decided; try again.
    """
    status = await store.status(rollout_id)
    if status.state == "frozen":
        return status
    if status.state == "retired":
        raise TokenCaptureRetiredError(
            f"rollout {rollout_id} is retired; delete it before its id is used again"
        )
    # Frozen meanwhile by someone else: then there is nothing left to wait for.
    with contextlib.suppress(TokenCaptureFrozenError):
        await _wait_for_calls(store, calls, rollout_id, grace_s)
    await store.freeze(rollout_id)
    told.frozen()
    return await store.status(rollout_id)


async def _wait_for_calls(
    store: CaptureStore, calls: OpenCalls | None, rollout_id: str, grace_s: float
) -> None:
    deadline = time.monotonic() + grace_s
    waiting_for = await store.fence(rollout_id)
    if calls is not None:
        calls.fence(rollout_id)
        await calls.wait_closed(rollout_id, grace_s)
    poll_s = _FIRST_POLL_S
    while waiting_for:
        # What other processes (workers, engines) run shows only in the store. Fencing again is
        # a read; it leaves out the calls of a process that died in the meantime.
        waiting_for = await store.fence(rollout_id)
        left_s = deadline - time.monotonic()
        if not waiting_for or left_s <= 0:
            return
        await anyio.sleep(min(poll_s, left_s))
        poll_s = min(poll_s * 2, _MAX_POLL_S)


async def retire_rollout(
    store: CaptureStore,
    rollout_id: str,
    *,
    snapshot_id: str,
    version: int,
    told: Lifecycle = NOBODY,
) -> None:
    """Retire exactly the snapshot that was consumed; again is fine.

    Raises:
        NotFrozenError: open, or never seen.
        StaleSnapshotError: the rollout changed since, or another state of it was retired;
            nothing was removed.
    """
    before = await _require_frozen(store, rollout_id)
    if await store.drop(rollout_id, snapshot_id=snapshot_id, version=version):
        if before.state == "frozen":
            told.retired()
        return
    status = await store.status(rollout_id)
    now = f"at version {status.version} of snapshot {status.snapshot_id}"
    if status.state == "retired":
        if (status.snapshot_id or snapshot_id, status.version) == (snapshot_id, version):
            return  # retired before, or by someone who was faster with the same request
        message = f"rollout {rollout_id} was retired {now}; mask what was built from another state"
    else:
        message = f"rollout {rollout_id} is {now}; read that and build from it, or mask it"
    raise StaleSnapshotError(message, snapshot_id=status.snapshot_id, version=status.version)


async def retire_current(store: CaptureStore, rollout_id: str, told: Lifecycle = NOBODY) -> None:
    """Retire whatever the rollout is frozen at now.

    Raises:
        NotFrozenError: open, or never seen.
        StaleSnapshotError: it changed at this very moment; nothing was removed.
    """
    status = await _require_frozen(store, rollout_id)
    if status.state == "frozen":
        await retire_rollout(
            store,
            rollout_id,
            snapshot_id=status.snapshot_id or "",
            version=status.version,
            told=told,
        )


async def _require_frozen(store: CaptureStore, rollout_id: str) -> RolloutStatus:
    status = await store.status(rollout_id)
    if status.state in ("unknown", "open"):
        raise NotFrozenError(
            f"rollout {rollout_id} is {status.state}: freeze it, read its snapshot, then retire"
        )
    return status
