"""The base of resolvers over any backend that holds committed entries.

A backend gives two hooks and inherits matcher, index, locking and token materialisation. The
backend is the truth: this side keeps metadata of recently used rollouts and a bounded cache of
cumulative tokens, and loads only the winning call's chain. Source: spec 02.7.

Invariant: a parent's tokens are delivered only if they hash to the digest it was committed with;
otherwise the answer is ``unresolved`` with ``lookup_error``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread

from middleware.arrays import TokenIds
from middleware.lineage.ledger import LedgerRows, StampedRow
from middleware.lineage.matching import (
    LOOKUP_ERROR,
    LineageNode,
    RolloutLineage,
    Verdict,
    hash_request,
    resolution,
)
from middleware.lineage.threads import is_large_request, run_sized
from middleware.lineage.tokens import SharedTokens
from middleware.protocols import LineageQuery, LineageResolution
from middleware.records import ParentResolutionStatus, TokenEntry, compute_digest


class CursorReset(Exception):  # noqa: N818 - a signal of the seed's API, not a failure
    """Raised by ``_fetch_new_entries``: the cursor describes the backend no longer."""


@dataclass(frozen=True, slots=True)
class DeliveryNote:
    """May stand among fetched entries: a call's ``delivered`` became known."""

    model_call_id: str
    delivered: bool


@dataclass(slots=True, eq=False)
class _Rollout:
    """What is cached of one rollout."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    lineage: RolloutLineage = field(default_factory=RolloutLineage)
    ledger: LedgerRows | None = None  # a rollout of external staging: its tokens are elsewhere
    cursor: Any = None
    tokens: dict[str, SharedTokens] = field(default_factory=dict)
    verified: set[str] = field(default_factory=set)
    cached_tokens: int = 0
    counted_tokens: int = 0  # of them, what the store's total holds

    def forget_tokens(self) -> None:
        self.tokens = {}
        self.verified = set()
        self.cached_tokens = 0

    def forget(self) -> None:
        self.lineage = RolloutLineage()
        self.ledger = None
        self.cursor = None
        self.forget_tokens()


class IncrementalLineageStore:
    """``QueryResolver`` over a backend; see the hooks below.

    At most ``max_cached_rollouts`` rollouts' metadata and about ``max_cached_tokens`` tokens
    are kept, least recently used out first; what was evicted is fetched again when needed.
    Hooks are called in at most ``max_threads`` threads, never on the event loop, and for one
    rollout never at the same time.
    """

    def __init__(
        self,
        *,
        max_cached_rollouts: int = 65_536,
        max_cached_tokens: int = 8_000_000,
        max_threads: int = 8,
    ) -> None:
        self._max_rollouts = max_cached_rollouts
        self._max_tokens = max_cached_tokens
        self._threads = anyio.CapacityLimiter(max_threads)
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()
        self._holders: OrderedDict[int, _Rollout] = OrderedDict()  # by identity, least used first
        self._held_tokens = 0
        self._lock = threading.Lock()  # guards the four above; never held for IO

    # --- hooks -------------------------------------------------------------------------------

    def _fetch_new_entries(
        self, rollout_id: str, cursor: Any
    ) -> tuple[Sequence[tuple[TokenEntry, Any] | DeliveryNote | StampedRow], Any]:
        """Entries committed since ``cursor`` (None: all), each with a handle, and the new cursor.

        Rows of an external-staging ledger may stand among them, without a handle.

        Raises:
            CursorReset: the cursor is void; it is called again with None.
        """
        raise NotImplementedError

    def _load_entry(self, rollout_id: str, ref: Any) -> TokenEntry:
        """One committed entry by the handle that came with it."""
        raise NotImplementedError

    def _load_entries(self, rollout_id: str, refs: Sequence[Any]) -> Sequence[TokenEntry]:
        """Several entries of one chain, in the given order; override to load them in one go."""
        return [self._load_entry(rollout_id, ref) for ref in refs]

    def _read_locked(self, rollout_id: str) -> AbstractContextManager[Any]:
        """Held around fetch and load, for backends with a read lock."""
        return nullcontext()

    # --- the resolver ------------------------------------------------------------------------

    def is_process_shared(self) -> bool:
        """True: a backend exists to be shared."""
        return True

    async def close(self) -> None:
        """Forget what is cached. Idempotent."""
        with self._lock:
            self._rollouts.clear()
            self._holders.clear()
            self._held_tokens = 0

    def drop(self, rollout_id: str) -> None:
        """Forget what is cached of a rollout (its records were retired)."""
        with self._lock:
            self._discard(self._rollouts.pop(rollout_id, None))

    async def resolve(
        self, rollout_id: str, request_items: list[dict[str, Any]]
    ) -> LineageResolution:
        """See ``LineageResolver``."""
        query = await run_sized(
            is_large_request(request_items),
            lambda: hash_request(request_items).query(),
            self._threads,
        )
        return await self.resolve_query(rollout_id, query)

    async def resolve_query(self, rollout_id: str, query: LineageQuery) -> LineageResolution:
        """See ``QueryResolver``."""
        if query.is_root:
            return LineageResolution(ParentResolutionStatus.ROOT)
        return await self._decide(rollout_id, lambda lineage: lineage.decide(query))

    async def resolve_tokens(
        self, rollout_id: str, prompt_token_ids: TokenIds, *, dispatched_at: float
    ) -> LineageResolution:
        """See ``QueryResolver``."""
        return await self._decide(
            rollout_id, lambda lineage: lineage.decide_by_tokens(prompt_token_ids, dispatched_at)
        )

    async def resolve_response_id(self, rollout_id: str, response_id: str) -> LineageResolution:
        """See ``QueryResolver``."""
        return await self._decide(
            rollout_id, lambda lineage: lineage.find_by_response_id(response_id)
        )

    async def resolve_call_id(self, rollout_id: str, model_call_id: str) -> LineageResolution:
        """See ``QueryResolver``."""
        return await self._decide(
            rollout_id, lambda lineage: lineage.find_by_call_id(model_call_id)
        )

    async def find_by_response_id(self, rollout_id: str, response_id: str) -> Verdict:
        """The call that served this response id: (status, node, reason); no tokens are loaded."""

        def work() -> Verdict:
            rollout = self._rollout(rollout_id)
            with rollout.lock, self._read_locked(rollout_id):
                self._refresh(rollout_id, rollout)
                return rollout.lineage.find_by_response_id(response_id)

        return await anyio.to_thread.run_sync(work, limiter=self._threads)

    async def _decide(
        self, rollout_id: str, decision: Callable[[RolloutLineage], Verdict]
    ) -> LineageResolution:
        return await anyio.to_thread.run_sync(
            lambda: self.decide_now(rollout_id, decision), limiter=self._threads
        )

    def decide_now(
        self, rollout_id: str, decision: Callable[[RolloutLineage], Verdict]
    ) -> LineageResolution:
        """Fetch what is new, decide, and load the winner's tokens. Blocks."""
        rollout = self._rollout(rollout_id)
        with rollout.lock:
            with self._read_locked(rollout_id):
                self._refresh(rollout_id, rollout)
                if rollout.ledger is not None:
                    return rollout.ledger.decide(decision)
                verdict = decision(rollout.lineage)
                node = verdict[1]
                if node is None:
                    return resolution(verdict)
                ids = self._materialised(rollout_id, rollout, node)
            if ids is None:
                return LineageResolution(ParentResolutionStatus.UNRESOLVED, reason=LOOKUP_ERROR)
            self._keep_within_bounds(rollout)
            return resolution(verdict, ids)

    # --- metadata ----------------------------------------------------------------------------

    def _rollout(self, rollout_id: str) -> _Rollout:
        with self._lock:
            rollout = self._rollouts.setdefault(rollout_id, _Rollout())
            self._rollouts.move_to_end(rollout_id)
            while len(self._rollouts) > max(1, self._max_rollouts):
                self._discard(self._rollouts.popitem(last=False)[1])
            return rollout

    def _discard(self, rollout: _Rollout | None) -> None:
        if rollout is not None:
            self._holders.pop(id(rollout), None)
            self._held_tokens -= rollout.counted_tokens
            rollout.counted_tokens = 0

    def _refresh(self, rollout_id: str, rollout: _Rollout) -> None:
        try:
            fetched, cursor = self._fetch_new_entries(rollout_id, rollout.cursor)
        except CursorReset:
            rollout.forget()
            fetched, cursor = self._fetch_new_entries(rollout_id, None)
        for item in fetched:
            if isinstance(item, DeliveryNote):
                rollout.lineage.note_delivery(item.model_call_id, item.delivered)
            elif isinstance(item, StampedRow):
                rollout.ledger = rollout.ledger or LedgerRows(rollout_id)
                rollout.ledger.add(item)
            else:
                entry, ref = item
                rollout.lineage.add_entry(entry, store_tokens=False, entry_offset=ref)
        rollout.cursor = cursor

    # --- tokens ------------------------------------------------------------------------------

    def _materialised(
        self, rollout_id: str, rollout: _Rollout, node: LineageNode
    ) -> TokenIds | None:
        """The call's cumulative tokens, verified by its digest; None if they cannot be proven."""
        if node.call_id not in rollout.verified:
            if not self._load_chain(rollout_id, rollout, node):
                return None
            ids = rollout.tokens[node.call_id].ids
            if node.digest and compute_digest(ids) != node.digest:
                rollout.forget_tokens()  # any segment below may be the wrong one
                return None
            rollout.verified.add(node.call_id)
        return rollout.tokens[node.call_id].ids

    def _load_chain(self, rollout_id: str, rollout: _Rollout, node: LineageNode) -> bool:
        chain = _missing_chain(rollout, node)
        if chain is None:
            return False
        entries = self._load_entries(rollout_id, [link.entry_offset for link in chain])
        if len(entries) != len(chain):
            return False
        for link, entry in zip(chain, entries, strict=True):
            if entry.model_call_id != link.call_id:
                return False  # the handle is stale
            above = rollout.tokens.get(link.parent_call_id or "")
            tokens, stored = _joined(above, entry)
            if len(tokens) != link.cum_len:
                return False
            rollout.tokens[link.call_id] = tokens
            rollout.cached_tokens += stored
        return True

    def _keep_within_bounds(self, rollout: _Rollout) -> None:
        """Count what this rollout now caches and evict others', least recently used first."""
        with self._lock:
            self._held_tokens += rollout.cached_tokens - rollout.counted_tokens
            rollout.counted_tokens = rollout.cached_tokens
            self._holders[id(rollout)] = rollout
            self._holders.move_to_end(id(rollout))
            if self._held_tokens <= self._max_tokens:
                return
            for holder in list(self._holders.values()):
                if self._held_tokens <= self._max_tokens:
                    return
                # Another thread's rollout in use is left alone; ours is locked by ourselves.
                if holder is rollout or holder.lock.acquire(blocking=False):
                    holder.forget_tokens()
                    self._discard(holder)
                    if holder is not rollout:
                        holder.lock.release()


def _missing_chain(rollout: _Rollout, node: LineageNode) -> list[LineageNode] | None:
    """The links to load, root first: up to a cached ancestor or an entry with a full prompt."""
    chain: list[LineageNode] = []
    seen: set[str] = set()
    link: LineageNode | None = node
    while link is not None and link.call_id not in rollout.tokens:
        if link.call_id in seen:
            return None
        seen.add(link.call_id)
        chain.append(link)
        if not link.prompt_is_delta:
            break
        link = rollout.lineage.by_call_id.get(link.parent_call_id or "")
        if link is None or link.conflicting:
            return None
    return chain[::-1]


def _joined(above: SharedTokens | None, entry: TokenEntry) -> tuple[SharedTokens, int]:
    prompt, generation = entry.prompt_token_ids, entry.generation_token_ids
    if entry.prompt_is_delta:
        assert above is not None  # _missing_chain starts at a full prompt or below a cached one
        return above.extended(prompt, generation)
    if above is not None and prompt.startswith(above.ids):
        return above.extended(prompt[len(above) :], generation)
    own = SharedTokens.start(prompt, generation)
    return own, len(own)
