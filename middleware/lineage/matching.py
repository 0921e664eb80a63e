"""The matcher: which committed call of one rollout does a request continue?

``RolloutLineage`` holds one ``LineageNode`` per committed call and decides by hashes, lengths
and notes alone; tokens are touched only for the single winner. Source: spec 02.4 and 02.6.

Invariant: never a guess. What cannot be proven is ``unresolved`` with a reason, and the answer
does not depend on the order in which calls were committed. Not thread-safe: its owner locks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from middleware.fingerprint import FINGERPRINT_VERSION, HashedRequest
from middleware.lineage.tokens import SharedTokens
from middleware.normalise import normalise_items
from middleware.protocols import LineageMatch, LineageQuery, LineageResolution
from middleware.records import (
    ParentResolutionStatus,
    TokenEntry,
    TokenIds,
    payload_digest,
)

NO_MATCH: Final = "no_match"
AMBIGUOUS: Final = "ambiguous"
PROMPT_CONFIG_CHANGED: Final = "prompt_config_changed"
LOOKUP_ERROR: Final = "lookup_error"

# The client did not get the whole answer, or the engine did not finish it.
_CUT_OFF: Final = frozenset({"abort", "client_disconnect", "upstream_error", "truncated"})

Verdict = tuple[ParentResolutionStatus, "LineageNode | None", str]


def hash_request(request_items: list[dict[str, Any]] | None) -> HashedRequest:
    """Normalise and hash request items as the agent sent them.

    Raises:
        InvalidInputError: (a ``ValueError``) the items cannot be hashed.
    """
    return HashedRequest(normalise_items(request_items))


def stamp_continuation(
    entry: TokenEntry,
    request_items: list[dict[str, Any]],
    *,
    hashed: HashedRequest | None = None,
) -> TokenEntry:
    """Add what a later request is matched by; the entry is changed in place and returned.

    ``request_items`` as the agent sent them; ``hashed`` is ``hash_request`` of them where the
    caller has it (they are not hashed again then).

    Raises:
        InvalidInputError: (a ``ValueError``) request or output items cannot be hashed.
    """
    hashed = hashed or hash_request(request_items)
    stamp = hashed.continuation(normalise_items(entry.output_items))
    entry.continuation_fingerprint, entry.continuation_context_len = stamp[0], stamp[1]
    entry.continuation_context_digest = stamp[2]
    entry.fingerprint_version = FINGERPRINT_VERSION
    return entry


@dataclass(slots=True, eq=False)
class LineageNode:
    """What is remembered of one committed call: lookup metadata, and tokens only if kept.

    ``entry_offset`` is whatever handle its store can load the entry by. ``cum_len`` counts
    prompt + generation, ``prompt_len`` the full prompt (delta or not).
    """

    call_id: str
    cum_len: int
    digest: str
    entry_offset: Any = -1
    fingerprint: str = ""
    context_len: int = 0
    context_digest: str = ""
    parent_call_id: str | None = None
    prompt_is_delta: bool = False
    staging_key: str = ""
    staging_chain: tuple[str, ...] = ()
    chain_hash: str = ""
    prompt_len: int = 0
    created_at: float = 0.0
    response_id: str = ""
    finish_reason: str = ""
    delivered: bool | None = None
    prompt_config_digest: str = ""
    system_digest: str = ""
    payload_digest: str = ""
    conflicting: bool = False
    tokens: SharedTokens | None = None
    prompt_key: bytes = b""
    sequence_key: bytes = b""
    sequence_hash: Any = field(default=None, repr=False)

    @property
    def cum_tokens(self) -> TokenIds:
        """Prompt + generation where they are kept, else empty."""
        return self.tokens.ids if self.tokens is not None else TokenIds()

    def match(self, cumulative_token_ids: TokenIds | None = None) -> LineageMatch:
        """This call as a proven parent."""
        ids = self.cum_tokens if cumulative_token_ids is None else cumulative_token_ids
        return LineageMatch(
            model_call_id=self.call_id,
            cumulative_token_ids=ids,
            digest=self.digest,
            staging_chain=self.staging_chain,
            prev_len=self.cum_len,
            chain_hash=self.chain_hash,
            prompt_config_digest=self.prompt_config_digest,
            system_digest=self.system_digest,
            finish_reason=self.finish_reason,
        )


@dataclass(slots=True)
class RolloutLineage:
    """An append-only index of one rollout's calls, and the decision rules over it."""

    by_fingerprint: dict[str, list[LineageNode]] = field(default_factory=dict)
    by_call_id: dict[str, LineageNode] = field(default_factory=dict)
    total_tokens: int = 0
    by_response_id: dict[str, list[LineageNode]] = field(default_factory=dict)

    # --- what was committed ------------------------------------------------------------------

    def add_entry(
        self,
        entry: TokenEntry,
        *,
        store_tokens: bool = True,
        entry_offset: Any = -1,
        payload: str = "",
    ) -> None:
        """Index a committed entry; ``store_tokens=False`` leaves its tokens to the store.

        The same call again is a no-op (a newer ``delivered`` counts); another payload under
        its id takes the call out of all matching. ``payload``: the entry's ``payload_digest``,
        where the caller has it.
        """
        payload = payload or payload_digest(entry)
        known = self.by_call_id.get(entry.model_call_id)
        if known is not None:
            if known.payload_digest != payload:
                known.conflicting = True
            elif entry.delivered is not None:
                known.delivered = entry.delivered
            return
        node = _node_of(entry, entry_offset, payload)
        parent = self.by_call_id.get(entry.parent_call_id or "")
        if store_tokens:
            self._keep_tokens(node, entry, parent)
        _key_by_tokens(node, entry, parent)
        if entry.cum_len is not None:
            # A record that miscounts itself proves nothing.
            node.conflicting = bool(node.sequence_key) and node.cum_len != entry.cum_len
            node.cum_len = entry.cum_len
        if entry.fingerprint_version not in (None, FINGERPRINT_VERSION):
            node.fingerprint = ""  # hashed by other rules: comparable with nothing of ours
        self._insert(node)

    def record(
        self,
        call_id: str,
        messages: list[dict[str, Any]],
        cum_tokens: object,
        digest: str,
        context_len: int | None = None,
        *,
        staging_key: str = "",
        parent_staging_chain: Iterable[str] | None = None,
        cum_len: int | None = None,
        chain_hash: str = "",
    ) -> None:
        """Index a call from its conversation: request items, then its own output items.

        ``context_len`` counts the request items; without it the last item is the output.
        ``cum_len`` must be given for rows without tokens (custody elsewhere).

        Raises:
            InvalidInputError: (a ``ValueError``) the items cannot be hashed.
        """
        split = len(messages) - 1 if context_len is None else context_len
        hashed = hash_request(messages[:split])
        stamp = hashed.continuation(normalise_items(messages[split:]))
        tokens = SharedTokens.start(TokenIds.of(cum_tokens))
        chain = (*(parent_staging_chain or ()), *((staging_key,) if staging_key else ()))
        node = LineageNode(
            call_id=call_id,
            cum_len=len(tokens) if cum_len is None else cum_len,
            digest=digest,
            fingerprint=stamp[0],
            context_len=stamp[1],
            context_digest=stamp[2],
            staging_key=staging_key,
            staging_chain=chain,
            chain_hash=chain_hash,
            payload_digest=repr((digest, len(tokens), cum_len, stamp, chain, chain_hash)),
            tokens=tokens,
        )
        known = self.by_call_id.get(call_id)
        if known is None:
            self.total_tokens += len(tokens)
            self._insert(node)
        elif known.payload_digest != node.payload_digest:
            known.conflicting = True

    def add_node(self, node: LineageNode) -> None:
        """Index a call that was stamped before (a row of a ledger); its id must be new."""
        self._insert(node)

    def note_delivery(self, call_id: str, delivered: bool) -> None:
        """Whether the client got the answer, known after the record; unknown ids are ignored."""
        node = self.by_call_id.get(call_id)
        if node is not None:
            node.delivered = delivered

    def _insert(self, node: LineageNode) -> None:
        self.by_call_id[node.call_id] = node
        if node.fingerprint:
            self.by_fingerprint.setdefault(node.fingerprint, []).append(node)
        if node.response_id:
            self.by_response_id.setdefault(node.response_id, []).append(node)

    def _keep_tokens(
        self, node: LineageNode, entry: TokenEntry, parent: LineageNode | None
    ) -> None:
        above = parent.tokens if parent is not None else None
        prompt, generation = entry.prompt_token_ids, entry.generation_token_ids
        if entry.prompt_is_delta:
            if above is None:
                return  # unprovable until its parent is there: never a silent half sequence
            node.tokens, stored = above.extended(prompt, generation)
        elif above is not None and prompt.startswith(above.ids):
            node.tokens, stored = above.extended(prompt[len(above) :], generation)
        else:
            node.tokens = SharedTokens.start(prompt, generation)
            stored = len(node.tokens)
        self.total_tokens += stored

    # --- decisions by content ----------------------------------------------------------------

    def resolve(self, messages: list[dict[str, Any]]) -> LineageResolution:
        """The decision for a request, with the parent's tokens.

        A parent whose tokens are not kept here (``store_tokens=False``) is a ``lookup_error``;
        ``resolve_node`` gives the decision alone.

        Raises:
            InvalidInputError: (a ``ValueError``) the items cannot be hashed.
        """
        return resolution(self.resolve_node(messages))

    def resolve_node(self, messages: list[dict[str, Any]]) -> Verdict:
        """The decision without touching tokens: (status, node, reason)."""
        return self.decide(hash_request(messages).query())

    def decide(self, query: LineageQuery) -> Verdict:
        """``resolve_node`` for a request that was hashed already."""
        if query.is_root:
            return ParentResolutionStatus.ROOT, None, ""
        found = [
            node
            for node in self.by_fingerprint.get(query.fingerprint, ())
            if not node.conflicting
            and node.context_digest
            and query.context_digests.get(node.context_len) == node.context_digest
        ]
        if not found:
            return _unresolved(NO_MATCH)
        wanted = query.prompt_config_digest
        found = [
            node
            for node in found
            if not wanted or not node.prompt_config_digest or node.prompt_config_digest == wanted
        ]
        if not found:
            return _unresolved(PROMPT_CONFIG_CHANGED)
        return _the_one(found)

    # --- decisions by name and by tokens -----------------------------------------------------

    def find_by_response_id(self, response_id: str) -> Verdict:
        """The call that served this response id; metadata only."""
        found = [n for n in self.by_response_id.get(response_id, ()) if not n.conflicting]
        return _the_one(found) if found else _unresolved(NO_MATCH)

    def find_by_call_id(self, call_id: str) -> Verdict:
        """The call of this id; metadata only."""
        node = self.by_call_id.get(call_id)
        if node is None or node.conflicting:
            return _unresolved(NO_MATCH)
        return ParentResolutionStatus.RESOLVED, node, ""

    def decide_by_tokens(self, prompt: TokenIds, dispatched_at: float) -> Verdict:
        """The parent of a token prompt: the longest sequence that is a prefix of it.

        ``ambiguous`` where policy text may stand in the prompt unrecognised: another call,
        dispatched earlier, asked with a prefix of this prompt that reaches beyond the parent,
        and its own sequence is not there.
        """
        nodes = [node for node in self.by_call_id.values() if not node.conflicting]
        if any(not node.sequence_key for node in nodes):
            return _unresolved(LOOKUP_ERROR)  # a delta whose parent this index never saw
        lengths = {node.cum_len for node in nodes} | {node.prompt_len for node in nodes}
        keys = prefix_keys(prompt, lengths)
        within = [n for n in nodes if keys.get(n.cum_len) == n.sequence_key]
        candidates = [n for n in within if n.cum_len > n.prompt_len]
        reach = max((n.cum_len for n in candidates), default=0)
        found = set(map(id, within))
        for node in nodes:
            if (
                id(node) not in found
                and node.created_at < dispatched_at
                and reach <= node.prompt_len < len(prompt)
                and keys.get(node.prompt_len) == node.prompt_key
            ):
                return _unresolved(AMBIGUOUS)
        if not candidates:
            return ParentResolutionStatus.ROOT, None, ""
        # Prefixes of one length are one sequence: identical calls count as one.
        parent = min((n for n in candidates if n.cum_len == reach), key=lambda n: n.call_id)
        return ParentResolutionStatus.RESOLVED, parent, ""


def resolution(verdict: Verdict, cumulative: TokenIds | None = None) -> LineageResolution:
    """A verdict in the protocol's form; a parent without its tokens is a ``lookup_error``."""
    status, node, reason = verdict
    if node is not None and node.tokens is None and cumulative is None:
        status, node, reason = _unresolved(LOOKUP_ERROR)
    return LineageResolution(status, node.match(cumulative) if node is not None else None, reason)


def _unresolved(reason: str) -> Verdict:
    return ParentResolutionStatus.UNRESOLVED, None, reason


def _the_one(found: list[LineageNode]) -> Verdict:
    if len(found) > 1:
        kept = [n for n in found if n.delivered is not False and n.finish_reason not in _CUT_OFF]
        found = kept or found
    # An unstamped record has no digest; then the hash of its tokens, if known, stands for it.
    if len({(n.digest or n.sequence_key or n.call_id, n.cum_len) for n in found}) > 1:
        return _unresolved(AMBIGUOUS)
    return ParentResolutionStatus.RESOLVED, min(found, key=lambda n: n.call_id), ""


def _node_of(entry: TokenEntry, entry_offset: Any, payload: str) -> LineageNode:
    return LineageNode(
        call_id=entry.model_call_id,
        cum_len=0,
        digest=entry.digest or "",
        entry_offset=entry_offset,
        fingerprint=entry.continuation_fingerprint,
        context_len=entry.continuation_context_len,
        context_digest=entry.continuation_context_digest,
        parent_call_id=entry.parent_call_id,
        prompt_is_delta=entry.prompt_is_delta,
        created_at=entry.created_at,
        response_id=entry.response_id or "",
        finish_reason=entry.finish_reason or "",
        delivered=entry.delivered,
        prompt_config_digest=entry.prompt_config_digest or "",
        system_digest=entry.system_digest or "",
        payload_digest=payload,
    )


# --- sequences by hash: matching token prompts without keeping tokens --------------------------


def prefix_keys(ids: TokenIds, lengths: Iterable[int]) -> dict[int, bytes]:
    """A hash of the first ``n`` ids for each ``n`` of ``lengths`` that fits; one pass.

    Not the record digest: that starts with the count, so its prefixes cannot be streamed.
    """
    hasher, at, keys = hashlib.sha256(), 0, {}
    for length in sorted({n for n in lengths if n <= len(ids)}):
        hasher.update(_bytes_of(ids[at:length]))
        keys[length] = hasher.digest()
        at = length
    return keys


def _key_by_tokens(node: LineageNode, entry: TokenEntry, parent: LineageNode | None) -> None:
    start = 0
    hasher = hashlib.sha256()
    if entry.prompt_is_delta:
        if parent is None or parent.sequence_hash is None:
            return
        hasher, start = parent.sequence_hash.copy(), parent.cum_len
    hasher.update(_bytes_of(entry.prompt_token_ids))
    node.prompt_len = start + len(entry.prompt_token_ids)
    node.prompt_key = hasher.digest()
    hasher.update(_bytes_of(entry.generation_token_ids))
    node.cum_len = node.prompt_len + len(entry.generation_token_ids)
    node.sequence_key = hasher.digest()
    node.sequence_hash = hasher


def _bytes_of(ids: TokenIds) -> bytes:
    return ids.array.astype("<u8").tobytes()
