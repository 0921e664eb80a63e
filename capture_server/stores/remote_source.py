"""A trainer's view of a sidecar's store: freeze, read, retire, list.

Invariant: nothing is kept here; every answer is the sidecar's, asked for when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from capture_server import client_requests
from capture_server.stores.remote_link import SidecarLink, link_to
from middleware.errors import NotFrozenError, StaleSnapshotError
from middleware.protocols import RolloutStatus, TokenCaptureSnapshot

T = TypeVar("T")

CONTROL_S: Final = 120.0  # a freeze waits for open calls; a snapshot may be large
_MAX_PAGE: Final = 1000


class HttpTokenSource:
    """Freeze, read and retire over a sidecar (``TokenSource``).

    Args:
        server: the sidecar's address, or a link that others share.
        control_token: default TOKEN_CAPTURE_CONTROL_TOKEN or ..._FILE.
    """

    def __init__(self, server: str | SidecarLink, *, control_token: str | None = None) -> None:
        self._link = link_to(server, control_token)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """See ``TokenSource.freeze``; the sidecar waits its grace period for open calls."""
        await self._control(client_requests.freeze(rollout_id))
        return await self.snapshot(rollout_id)

    async def snapshot(self, rollout_id: str) -> TokenCaptureSnapshot:
        """See ``CaptureStore.snapshot``."""
        return await self._control(client_requests.snapshot(rollout_id, full_prompts=False))

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """See ``TokenSource.drop``."""
        retire = client_requests.retire(rollout_id, snapshot_id=snapshot_id, version=version)
        try:
            return await self._control(retire)
        except (NotFrozenError, StaleSnapshotError):
            return False

    async def status(self, rollout_id: str) -> RolloutStatus:
        """See ``CaptureStore.status``."""
        return await self._control(client_requests.status(rollout_id))

    async def list_rollouts(
        self, *, state: str | None = None, prefix: str = "", limit: int = 100, cursor: str = ""
    ) -> tuple[Sequence[RolloutStatus], str | None]:
        """See ``CaptureStore.list_rollouts``; a page holds at most 1,000."""
        page = await self._control(
            client_requests.list_rollouts(
                state=state, prefix=prefix, limit=min(limit, _MAX_PAGE), cursor=cursor
            )
        )
        return page.rollouts, page.next_cursor

    async def delete(self, rollout_id: str) -> bool:
        """See ``CaptureStore.delete``."""
        return await self._control(client_requests.delete(rollout_id))

    async def sweep_retired(self, older_than_seconds: float) -> int:
        """See ``CaptureStore.sweep_retired``."""
        return await self._control(client_requests.sweep(older_than_seconds=older_than_seconds))

    async def _control(self, call: client_requests.Call[T]) -> T:
        return await self._link.send(call, deadline_s=CONTROL_S)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._link.close()
