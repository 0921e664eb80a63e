"""Brings what was spilled to the sidecar when it is back: intents, marks, cancels, records.

Invariant: an item leaves the spill only after the sidecar has it, or has said that it means
nothing any more. The items of one rollout go in the order in which they were spilled. A record
is stored only while its intent is still open, and an intent is confirmed but never made: the
rollout may have been frozen, retired, or its id given to another attempt since, and nothing
stray must get into that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final, TypeVar

from capture_server import client_requests
from capture_server.client_requests import Call
from capture_server.stores import remote_calls as calls
from capture_server.stores.fold import STORE_FAILURE
from capture_server.stores.remote_link import SidecarLink
from capture_server.stores.spill import SpilledItem, SpillLog
from middleware.errors import (
    ConflictError,
    StoreClosedError,
    StoreUnavailableError,
    TokenCaptureError,
)
from middleware.protocols import CallIntent

logger = logging.getLogger(__name__)
T = TypeVar("T")

INTENT_LOST: Final = "intent_lost"

INTENT: Final = "intent"
MARK: Final = "mark"
CANCEL: Final = "cancel"
RECORDS: Final = "records"

_DEADLINE_S: Final = 5.0
_FIRST_WAIT_S: Final = 0.2
_LONGEST_WAIT_S: Final = 5.0


class Replayer:
    """Owns the background task of one store; ``close`` ends it."""

    def __init__(self, link: SidecarLink, spill: SpillLog) -> None:
        self._link = link
        self._spill = spill
        self._sending = asyncio.Lock()  # one item at a time: their order holds
        self._task: asyncio.Task[None] | None = None
        self._adopting = asyncio.Lock()
        self._adopted = False
        self._closed = False
        self.num_replayed = 0
        self.num_dropped = 0  # records that were there already, or came after the freeze

    async def keep(self, rollout_id: str, kind: str, call: str, body: Any) -> None:
        """Spill an item; it is sent as soon as the sidecar is back.

        Raises:
            StoreUnavailableError: the local disk failed, too.
        """
        await asyncio.to_thread(self._spill.add, rollout_id, kind, call, body)
        self._start()

    async def adopt(self) -> None:
        """Once: take over what an earlier process left; nobody goes on before that is known."""
        if self._adopted:
            return
        async with self._adopting:
            if self._adopted:
                return
            found = await asyncio.to_thread(self._spill.adopt)
            self._adopted = True
        if found:
            self._start()

    def _start(self) -> None:
        if not self._closed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="token-capture-replay")

    async def _run(self) -> None:
        wait_s = _FIRST_WAIT_S
        while len(self._spill):
            try:
                await self.send_pending()
            except StoreClosedError:
                return
            except StoreUnavailableError:
                await asyncio.sleep(wait_s)  # the link has said so in the log
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def send_pending(self, rollout_id: str | None = None) -> None:
        """Send what waits, of one rollout or all.

        Raises:
            StoreUnavailableError: the sidecar is (still) away; the rest stays.
        """
        if not self._spill.pending(rollout_id):
            return
        async with self._sending:
            for item in self._spill.pending(rollout_id):
                await self._send(item)
                await asyncio.to_thread(self._spill.settle, item)
                self.num_replayed += 1

    async def _send(self, item: SpilledItem) -> None:
        rollout_id, call = item.rollout_id, item.call
        try:
            body = await asyncio.to_thread(self._spill.load, item)
            if item.kind == RECORDS:
                await self._send_records(rollout_id, call, body)
            elif item.kind == INTENT:
                await self._confirm_intent(CallIntent(**body))
            elif item.kind == MARK:
                await self._deliver(
                    calls.mark_incomplete(rollout_id, call, body["reason"], body["detail"])
                )
            elif item.kind == CANCEL:
                attempt = body.get("attempt", "")
                await self._deliver(calls.cancel_intent(rollout_id, call, body["reason"], attempt))
            else:
                logger.error("a spilled %r is not understood; it is dropped", item.kind)
        except (StoreUnavailableError, StoreClosedError):
            raise
        except TokenCaptureError as exc:
            # Trying again cannot help: the item is damaged, or not understood over there.
            logger.critical(
                "a spilled %s cannot be delivered: rollout %s must be masked by hand (%s)",
                item.kind,
                rollout_id,
                exc,
                extra={"action": "replay_refused", "rollout_id": rollout_id},
            )

    async def _confirm_intent(self, intent: CallIntent) -> None:
        """Bring it to the sidecar's disk; where it is gone, the rollout misses a call."""
        rollout_id, call = intent.rollout_id, intent.model_call_id
        status = await self._deliver(client_requests.status(rollout_id))
        if status.state == "retired":
            return
        if call in status.open_intents:
            # Frozen meanwhile: the freeze has seen and judged it.
            with contextlib.suppress(ConflictError):
                await self._deliver(calls.open_intent(intent, durable=True))
            return
        detail = "the call began, and the sidecar came back without its intent"
        await self._deliver(calls.mark_incomplete(rollout_id, call, INTENT_LOST, detail))

    async def _send_records(self, rollout_id: str, call: str, body: Any) -> None:
        try:
            encoded = await asyncio.to_thread(calls.encode, body)
            put = calls.put_entries(rollout_id, call, encoded, if_open=True)
            stored = (await self._deliver(put)).outcome()
        except (StoreUnavailableError, StoreClosedError):
            raise
        except ConflictError as exc:  # frozen, retired, or the id holds another payload
            stored = False
            logger.warning("a spilled record is not taken: %s", exc)
        except TokenCaptureError as exc:
            detail = f"the record was refused when it was sent again: {exc}"
            await self._deliver(calls.mark_incomplete(rollout_id, call, STORE_FAILURE, detail))
            return
        if not stored:
            self.num_dropped += 1
        logger.warning(
            "a spilled record of rollout %s %s",
            rollout_id,
            "has reached the sidecar" if stored else "was there already, or came too late",
            extra={"action": "record_replayed", "rollout_id": rollout_id, "stored": stored},
        )

    async def _deliver(self, call: Call[T]) -> T:
        return await self._link.send(call, deadline_s=_DEADLINE_S)

    async def close(self) -> None:
        """End the task; what is left stays on disk for the next process. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if left := len(self._spill):
            logger.error(
                "%d spilled items have not reached the sidecar; they wait in %s",
                left,
                self._spill.directory,
                extra={"action": "spill_left", "items": left},
            )
        await asyncio.to_thread(self._spill.close)
