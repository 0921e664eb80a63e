"""A sidecar's store from another process: ``HttpTokenSink``, ``HttpTokenSource``, the resolver.

For capture inside an engine on another node, and for trainers. Invariant: what is acknowledged
here is durable in the sidecar's store. When the sidecar is away, the promises hold as follows:

- before dispatch (``open_intent``, ``resolve``): ``StoreUnavailableError``; the call is refused
  with 503 and no compute is spent;
- ``wait_durable``: the intent goes to the local disk in place of the sidecar's;
- ``put``: fails, and the call is served. The record waits in the local spill if its intent is
  known to be in the sidecar's store. If it gets there before the freeze, the rollout is whole;
  if not, the open intent makes it incomplete;
- ``mark_incomplete``, ``cancel_call``: kept in the local spill, then sent; they fail only if the
  local disk fails, too. A mark that comes after the freeze moves the version.

Later operations on a rollout wait for what is spilled of it, so that its order holds.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from capture_server import client_requests
from capture_server.stores import remote_calls as calls
from capture_server.stores.attempts import OpenAttempts, new_attempt
from capture_server.stores.fold import STORE_FAILURE
from capture_server.stores.holders import current_holder
from capture_server.stores.remote_link import NoAnswerError, SidecarLink, link_to
from capture_server.stores.remote_replay import CANCEL, INTENT, MARK, RECORDS, Replayer
from capture_server.stores.remote_source import HttpTokenSource
from capture_server.stores.spill import DEFAULT_MAX_BYTES, SpillLog, spill_directory
from middleware.errors import (
    ConflictError,
    InvalidInputError,
    StoreError,
    StoreUnavailableError,
)
from middleware.lineage.matching import hash_request
from middleware.lineage.threads import is_large_request, run_sized
from middleware.paths import validate_call_id, validate_rollout_id
from middleware.protocols import (
    CallIntent,
    LineageQuery,
    LineageResolution,
    TokenCaptureSnapshot,
)
from middleware.records import TokenEntry, TokenIds

__all__ = [
    "HttpLineageResolver",
    "HttpTokenSink",
    "HttpTokenSource",
    "RemoteCaptureStore",
    "RemoteIntentTicket",
]

logger = logging.getLogger(__name__)

BEFORE_DISPATCH_S: Final = 3.0  # an agent waits, and nothing was spent yet
AFTER_DISPATCH_S: Final = 10.0  # tokens were generated: worth a sidecar's restart
_BIG_TOKENS: Final = 16_384  # above this encoding leaves the event loop


@dataclass(frozen=True, slots=True)
class RemoteIntentTicket:
    """See ``middleware.protocols.IntentTicket``."""

    first_call: bool
    _link: SidecarLink
    _replayer: Replayer
    _intent: CallIntent
    _durable: bool

    async def wait_durable(self) -> None:
        """Ask again and wait; the sidecar has been syncing since the first answer.

        While it is away, the local spill remembers the call in its place.

        Raises:
            StoreUnavailableError: the intent is not known to be on any disk.
        """
        if self._durable:
            return
        try:
            await self._link.send(
                calls.open_intent(self._intent, durable=True), deadline_s=AFTER_DISPATCH_S
            )
        except ConflictError as exc:
            # Frozen or retired meanwhile: the freeze has seen the intent and judged it.
            logger.info("the intent of %s was judged: %s", self._intent.model_call_id, exc)
        except StoreUnavailableError as exc:
            rollout_id, call_id = self._intent.rollout_id, self._intent.model_call_id
            await self._replayer.keep(rollout_id, INTENT, call_id, asdict(self._intent))
            logger.warning("the intent of %s is kept here, not there: %s", call_id, exc)


class HttpTokenSink:
    """Records, intents and marks to a sidecar, with a local spill. See the module.

    Args:
        server: the sidecar's address, or a link that others share.
        control_token: default TOKEN_CAPTURE_CONTROL_TOKEN or ..._FILE.
        spill_dir: base of the local spill; default see ``spill.spill_directory``.
        max_spill_bytes: beyond that nothing more is spilled, loudly.
    """

    def __init__(
        self,
        server: str | SidecarLink,
        *,
        control_token: str | None = None,
        spill_dir: Path | None = None,
        max_spill_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self._link = link_to(server, control_token)
        directory = spill_directory(self._link.server, spill_dir)
        self._spill = SpillLog(directory, max_bytes=max_spill_bytes)
        self._replayer = Replayer(self._link, self._spill)
        self._open = OpenAttempts()  # the intents that this process wrote

    def spill_usage(self) -> tuple[int, int]:
        """See ``SpillingStore``."""
        return len(self._spill), self._spill.num_bytes

    def is_process_shared(self) -> bool:
        """Every process that uses the same sidecar sees the same records."""
        return True

    async def open_intent(self, intent: CallIntent) -> RemoteIntentTicket:
        """See ``CaptureStore.open_intent``."""
        sent = replace(
            intent,
            created_at=intent.created_at or time.time(),
            holder=intent.holder or current_holder(),
            attempt=intent.attempt or new_attempt(),
        )
        call = calls.open_intent(sent)
        await self.send_spilled(intent.rollout_id)
        try:
            first_call, durable = await self._link.send(call, deadline_s=BEFORE_DISPATCH_S)
        except NoAnswerError:
            # It may stand over there, and this call will never be made. Where even the local
            # disk fails, it dangles: the rollout is masked without need, never wrongly whole.
            body = {"reason": STORE_FAILURE, "attempt": sent.attempt}
            with contextlib.suppress(StoreUnavailableError):
                await self._replayer.keep(intent.rollout_id, CANCEL, intent.model_call_id, body)
            raise
        self._open.opened(intent.rollout_id, intent.model_call_id, sent.attempt)
        return RemoteIntentTicket(first_call, self._link, self._replayer, sent, durable)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """See ``CaptureStore.begin_call``."""
        ticket = await self.open_intent(
            CallIntent(rollout_id=rollout_id, model_call_id=model_call_id)
        )
        await ticket.wait_durable()

    async def cancel_call(self, rollout_id: str, model_call_id: str, reason: str = "") -> None:
        """See ``CaptureStore.cancel_call``; spilled when the sidecar is away."""
        attempt = self._open.closed(rollout_id, model_call_id)
        await self._cancel(rollout_id, model_call_id, attempt or None, reason)

    async def cancel_attempt(
        self, rollout_id: str, model_call_id: str, attempt: str, reason: str = ""
    ) -> None:
        """``cancel_call`` that comes late: it closes the intent of this attempt or none."""
        await self._cancel(rollout_id, model_call_id, attempt, reason)

    async def _cancel(
        self, rollout_id: str, model_call_id: str, attempt: str | None, reason: str
    ) -> None:
        reason = calls.encodable(reason)[:1000]
        call = calls.cancel_intent(rollout_id, model_call_id, reason, attempt)
        body = {"reason": reason, "attempt": attempt or ""}
        await self._send_or_spill(call, rollout_id, CANCEL, model_call_id, body)

    async def put(self, entry: TokenEntry) -> None:
        """See ``TokenSink.put`` and the module."""
        await self._put([entry], entry.model_call_id)

    async def put_choices(self, entries: Sequence[TokenEntry], intent_id: str) -> None:
        """See ``CaptureStore.put_choices``."""
        if not entries:
            raise InvalidInputError("put_choices needs at least one entry")
        if any(entry.rollout_id != entries[0].rollout_id for entry in entries):
            raise InvalidInputError("the choices of one request belong to one rollout")
        await self._put(entries, intent_id)

    async def _put(self, entries: Sequence[TokenEntry], call_id: str) -> None:
        rollout_id = validate_rollout_id(entries[0].rollout_id)
        for entry in entries:
            validate_call_id(entry.model_call_id)
        form = await run_sized(_are_big(entries), lambda: calls.records_form(entries))
        body = await run_sized(_are_big(entries), lambda: calls.encode(form))
        call = calls.put_entries(rollout_id, call_id, body)
        try:
            await self.send_spilled(rollout_id)
            answer = await self._link.send(call, deadline_s=AFTER_DISPATCH_S)
            answer.outcome()
        except StoreUnavailableError as exc:
            if (rollout_id, call_id) not in self._open:
                raise  # without its intent nobody would miss the record: the mark must say it
            self._open.closed(rollout_id, call_id)
            await self._replayer.keep(rollout_id, RECORDS, call_id, form)
            raise StoreUnavailableError(
                f"{exc}; the record waits in {self._spill.directory} and is sent again"
            ) from exc
        self._open.closed(rollout_id, call_id)

    async def note_delivery(
        self, rollout_id: str, model_call_id: str, notes: Mapping[str, Any]
    ) -> None:
        """See ``CaptureStore.note_delivery``."""
        call = calls.note_delivery(rollout_id, model_call_id, notes)
        await self._link.send(call, deadline_s=BEFORE_DISPATCH_S)

    async def mark_incomplete(
        self, rollout_id: str, model_call_id: str = "", reason: str = "", detail: str = ""
    ) -> None:
        """See ``CaptureStore.mark_incomplete``; spilled when the sidecar is away.

        Raises:
            StoreUnavailableError: the local spill failed, too.
        """
        reason, detail = calls.encodable(reason)[:200], calls.encodable(detail)[:20_000]
        call = calls.mark_incomplete(rollout_id, model_call_id, reason, detail)
        waits = self._spill.holds(rollout_id, RECORDS, model_call_id)
        if waits and reason == STORE_FAILURE:
            return  # the record itself waits; until it arrives its open intent says the same
        body = {"reason": reason, "detail": detail}
        await self._send_or_spill(call, rollout_id, MARK, model_call_id, body)
        self._open.closed(rollout_id, model_call_id)

    async def _send_or_spill(
        self, call: client_requests.Call[Any], rollout_id: str, kind: str, call_id: str, body: Any
    ) -> None:
        try:
            await self.send_spilled(rollout_id)
            await self._link.send(call, deadline_s=AFTER_DISPATCH_S)
        except StoreUnavailableError as exc:
            await self._replayer.keep(rollout_id, kind, call_id, body)
            logger.error(  # noqa: TRY400 - the reason is in the message
                "the sidecar is away: a %s of rollout %s is spilled (%s)",
                kind,
                rollout_id,
                exc,
                extra={"action": "spilled", "rollout_id": rollout_id, "kind": kind},
            )

    async def fence(self, rollout_id: str) -> Sequence[str]:
        """See ``CaptureStore.fence``."""
        call = calls.fence(rollout_id)
        await self.send_spilled(rollout_id)
        return await self._link.send(call, deadline_s=AFTER_DISPATCH_S)

    async def send_spilled(self, rollout_id: str) -> None:
        """What is spilled of this rollout goes first."""
        await self._replayer.adopt()
        await self._replayer.send_pending(rollout_id)

    async def healthy(self) -> str | None:
        """None when the sidecar takes calls and the spill works, else the reason."""
        await self._replayer.adopt()
        if self._spill.failure is not None:
            return self._spill.failure
        try:
            await self._link.send(client_requests.ready(), deadline_s=BEFORE_DISPATCH_S)
        except StoreError as exc:
            return str(exc)
        return None

    async def close(self) -> None:
        """Close the connections; what is spilled stays on disk. Idempotent."""
        await self._replayer.close()
        await self._link.close()


class RemoteCaptureStore(HttpTokenSink, HttpTokenSource):
    """A whole ``CaptureStore`` over one sidecar: what ``http(s)://`` store URLs mean."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """See ``HttpTokenSource.freeze``; what this process spilled goes first."""
        validate_rollout_id(rollout_id)
        await self.send_spilled(rollout_id)
        return await super().freeze(rollout_id)

    def open_resolver(self) -> HttpLineageResolver:
        """The resolver over the same connections."""
        return HttpLineageResolver(self._link, sink=self)


class HttpLineageResolver:
    """Resolves over a sidecar: hashes go there, never the conversation (``QueryResolver``).

    Args:
        server: the sidecar's address, or a link that others share (it stays open on ``close``).
        control_token: default TOKEN_CAPTURE_CONTROL_TOKEN or ..._FILE.
        sink: this process's sink, whose spilled records of a rollout go first.
    """

    def __init__(
        self,
        server: str | SidecarLink,
        *,
        control_token: str | None = None,
        sink: HttpTokenSink | None = None,
    ) -> None:
        self._link = link_to(server, control_token)
        self._owns_link = not isinstance(server, SidecarLink)
        self._sink = sink

    def is_process_shared(self) -> bool:
        """The sidecar's resolver sees every acknowledged record."""
        return True

    async def resolve(
        self, rollout_id: str, request_items: list[dict[str, Any]]
    ) -> LineageResolution:
        """See ``LineageResolver``."""
        query = await run_sized(
            is_large_request(request_items), lambda: hash_request(request_items).query()
        )
        return await self.resolve_query(rollout_id, query)

    async def resolve_query(self, rollout_id: str, query: LineageQuery) -> LineageResolution:
        """See ``QueryResolver``."""
        return await self._ask(rollout_id, calls.resolve_query(rollout_id, query))

    async def resolve_tokens(
        self, rollout_id: str, prompt_token_ids: TokenIds, *, dispatched_at: float
    ) -> LineageResolution:
        """See ``QueryResolver``."""
        call = calls.resolve_tokens(rollout_id, prompt_token_ids, dispatched_at)
        return await self._ask(rollout_id, call)

    async def resolve_response_id(self, rollout_id: str, response_id: str) -> LineageResolution:
        """See ``QueryResolver``."""
        return await self._ask(rollout_id, calls.resolve_response_id(rollout_id, response_id))

    async def resolve_call_id(self, rollout_id: str, model_call_id: str) -> LineageResolution:
        """See ``QueryResolver``."""
        return await self._ask(rollout_id, calls.resolve_call_id(rollout_id, model_call_id))

    async def _ask(
        self, rollout_id: str, call: client_requests.Call[LineageResolution]
    ) -> LineageResolution:
        if self._sink is not None:
            await self._sink.send_spilled(rollout_id)
        return await self._link.send(call, deadline_s=BEFORE_DISPATCH_S)

    async def close(self) -> None:
        """Close own connections. Idempotent."""
        if self._owns_link:
            await self._link.close()


def _are_big(entries: Sequence[TokenEntry]) -> bool:
    sizes = (len(e.prompt_token_ids) + len(e.generation_token_ids) for e in entries)
    return sum(sizes) > _BIG_TOKENS
