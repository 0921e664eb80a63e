"""Registration of a rollout before its first call, and what becomes of it when its time is up.

Budgets are enforced where intents are decided, under the rollout's lock: ``max_calls`` exactly,
over all workers; ``max_generated_tokens`` counts finished calls, so that those which run side by
side may pass it once, by what they generate together. From ``expires_at`` on no call begins, and
whoever freezes the rollout first makes it incomplete; until then it is shown as open only to
those who read the store itself: every look over HTTP settles it (``settled``). No background
task, nothing to elect. Source: spec 05, ``PUT R``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from capture_server.control_models import RegisterRequest
from capture_server.stores.decisions import Decision, decide_register
from capture_server.stores.fold import RolloutFold
from capture_server.stores.journal import Record, Registered
from middleware.errors import (
    TokenCaptureRetiredError,
    UnsupportedParameterError,
)
from middleware.protocols import CaptureStore, RolloutStatus


@runtime_checkable
class RuleStore(Protocol):
    """A store that appends what a pure rule decides on a rollout's state."""

    async def apply_rule(
        self,
        rollout_id: str,
        rule: Callable[[RolloutFold], Decision],
        *,
        call: str = "",
        owed: Sequence[Record] = (),
    ) -> None:
        """Durable on return; raises the decision's error."""


async def register_rollout(
    store: CaptureStore, rollout_id: str, asked: RegisterRequest, *, external_staging: bool
) -> RolloutStatus:
    """Register the id, if nothing is recorded under it; durable on return.

    Raises:
        RolloutExistsError: it has records (or a tombstone), or was registered before.
        UnsupportedParameterError: this server cannot enforce what was asked for.
    """
    if asked.max_generated_tokens is not None and external_staging:
        raise UnsupportedParameterError(
            "max_generated_tokens cannot be enforced with external staging: its tokens are not "
            "counted here; use max_calls"
        )
    if not isinstance(store, RuleStore):
        raise UnsupportedParameterError(
            "this server's store takes no registrations: register at the server that holds it"
        )
    now = time.time()
    registered = Registered(
        at=now,
        max_calls=asked.max_calls,
        max_generated_tokens=asked.max_generated_tokens,
        expires_at=None if asked.ttl_s is None else now + asked.ttl_s,
        labels=asked.labels,
    )
    await store.apply_rule(rollout_id, lambda fold: decide_register(fold, registered))
    return await store.status(rollout_id)


async def settled(store: CaptureStore, status: RolloutStatus) -> RolloutStatus:
    """The status, after the rollout was frozen if its time is up."""
    is_due = status.expires_at is not None and status.expires_at <= time.time()
    if status.state != "open" or not is_due:
        return status
    with contextlib.suppress(TokenCaptureRetiredError):  # at this very moment
        await store.freeze(status.rollout_id)
    return await store.status(status.rollout_id)


async def settle_all(store: CaptureStore) -> None:
    """Freeze every open rollout whose time is up (``:sweep``)."""
    cursor = ""
    while True:
        rows, next_cursor = await store.list_rollouts(state="open", cursor=cursor)
        for row in rows:
            await settled(store, row)
        if next_cursor is None:
            return
        cursor = next_cursor
