"""The steps of one captured call: decide the parent, note the intent, record the outcome.

Invariants: the parent is decided once, before dispatch; a capture failure after generation never
fails the model call; whatever the client may hold without a record makes the rollout incomplete.
Knows stores and resolvers by their protocols, nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from middleware.context import (
    CaptureContext,
    current_capture_context,
    reset_token_sink,
    set_token_sink,
)
from middleware.dialects.base import Answer, ChoiceAnswer
from middleware.engines.base import AnswerDefect, checked_ids, checked_log_probs
from middleware.errors import (
    ConflictError,
    InvalidInputError,
    StoreUnavailableError,
    TokenCaptureError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
)
from middleware.fingerprint import FINGERPRINT_VERSION, HashedRequest
from middleware.normalise import normalise_items
from middleware.outcome import Captured, Hole, Nothing, Outcome
from middleware.prompt_shape import system_digest
from middleware.protocols import (
    CallIntent,
    IntentTicket,
    LineageMatch,
    LineageResolution,
    LineageResolver,
    TokenSink,
    installed_lineage_store,
    installed_token_sink,
)
from middleware.records import (
    UNRESOLVED_PARENT_REASON,
    ParentResolutionStatus,
    TokenEntry,
    TokenIds,
    compute_log_probs_digest,
    extract_token_fields,
    response_to_output_items,
    stamp_lineage,
    strip_token_fields,
)
from middleware.staging_admission import admit_call

__all__ = [
    "NG_CAPTURE_FIELD",
    "NG_COMMIT_COORDS_FIELD",
    "UNRESOLVED_PARENT_REASON",
    "CaptureContext",
    "CaptureHealth",
    "capture_health_snapshot",
    "capture_tokens",
    "commit_entry",
    "current_capture_context",
    "decide_named_parent",
    "decide_parent",
    "mark_external_staging_committed",
    "open_intent",
    "record_outcome",
    "register_call_intent",
    "reset_token_sink",
    "resolve_parent",
    "set_token_sink",
]

logger = logging.getLogger(__name__)

NG_CAPTURE_FIELD: Final = "ng_capture"
NG_COMMIT_COORDS_FIELD: Final = "ng_commit_coords"

# Above this size hashing and array work leave the event loop: a thread hop costs about 50 us,
# one sha256 pass over this much about 100 us.
_OFF_LOOP_TOKENS: Final = 16_384
_OFF_LOOP_ITEMS_BYTES: Final = 65_536
# Third parties' stores and resolvers may hang; a call must not hang with them.
_MARK_TIMEOUT_S: Final = 30.0
_INTENT_TIMEOUT_S: Final = 30.0
_RESOLVE_TIMEOUT_S: Final = 10.0
_PUT_TIMEOUT_S: Final = 60.0


@dataclass(slots=True)
class CaptureHealth:
    """Counts since the process started; what ``capture_health_snapshot`` reports."""

    calls: int = 0
    entries: int = 0
    cancelled: int = 0
    holes: int = 0
    put_failures: int = 0
    mark_failures: int = 0
    late_writes: int = 0
    lookup_failures: int = 0
    intent_sync_failures: int = 0
    marks_failing: bool = False  # the last attempt to mark a lost call failed


health: Final = CaptureHealth()


def capture_health_snapshot() -> dict[str, Any]:
    """This process's capture counters. ``mark_failures`` above 0 needs a human."""
    return asdict(health)


# --- before dispatch ---------------------------------------------------------------------------


async def resolve_parent(request_messages: list[dict[str, Any]] | None) -> None:
    """Decide the current call's parent from the request as the agent sent it.

    Without a context (untagged traffic) nothing happens. With external staging this also admits
    the call (``staging_admission``), and a ledger that cannot be asked raises.
    """
    context = current_capture_context()
    if context is None:
        return
    if context.external_staging:
        await admit_call(context, request_messages or [])
    else:
        await decide_parent(context, request_messages or [])


async def decide_parent(
    context: CaptureContext, items: list[dict[str, Any]], *, size_hint: int = 0
) -> LineageResolution:
    """Hash the request once and ask the resolver; never raises, never guesses.

    Args:
        context: receives the decision and the hashes.
        items: the request's conversation items, unmodified.
        size_hint: bytes of the request body, to choose where the hashing runs.
    """
    resolution = await _decided(context, items, size_hint)
    context.parent_resolution = resolution
    return resolution


async def decide_parent_by_response(
    context: CaptureContext, items: list[dict[str, Any]], response_id: str
) -> LineageResolution:
    """Find the call that a ``previous_response_id`` names; never raises, never guesses.

    The conversation is not in the request, so it is not hashed: the call's own children are
    recognised by its response id, not by content (spec 02.5).
    """
    context.request_items = items
    context.parent_by = "response_id"
    resolver = context.lineage_store or installed_lineage_store()
    resolve = getattr(resolver, "resolve_response_id", None)
    resolution = _unresolved("resolver_unavailable")
    try:
        context.system_digest = system_digest(items)
        if resolve is not None:
            resolution = await resolve(context.rollout_id, response_id)
    except ValueError as error:
        logger.warning("lineage lookup failed: %s", error, extra=_ids(context, "lookup_error"))
        resolution = _unresolved("lookup_error")
    except Exception:
        health.lookup_failures += 1
        logger.exception("the lineage resolver failed", extra=_ids(context, "resolver_unavailable"))
    context.parent_resolution = resolution
    return resolution


async def _decided(
    context: CaptureContext, items: list[dict[str, Any]], size_hint: int
) -> LineageResolution:
    context.request_items = items
    try:
        if size_hint > _OFF_LOOP_ITEMS_BYTES:
            hashed, context.system_digest = await asyncio.to_thread(_hash_request, items)
        else:
            hashed, context.system_digest = _hash_request(items)
    except ValueError as error:
        logger.warning(
            "the request cannot be hashed: %s", error, extra=_ids(context, "lookup_error")
        )
        return _unresolved("lookup_error")
    context.hashed_request = hashed
    if hashed.is_root:
        return LineageResolution(ParentResolutionStatus.ROOT)
    resolver = context.lineage_store or installed_lineage_store()
    if resolver is None:
        return _unresolved("resolver_unavailable")
    return await _ask(resolver, context, hashed, items)


async def _ask(
    resolver: LineageResolver,
    context: CaptureContext,
    hashed: HashedRequest,
    items: list[dict[str, Any]],
) -> LineageResolution:
    resolve_query = getattr(resolver, "resolve_query", None)
    if resolve_query is None:
        return await _looked_up(context, resolver.resolve(context.rollout_id, items))
    query = hashed.query(context.prompt_config_digest)
    return await _looked_up(context, resolve_query(context.rollout_id, query))


async def _looked_up(
    context: CaptureContext, lookup: Awaitable[LineageResolution]
) -> LineageResolution:
    """A resolver's answer within bounds; its failures are decisions too."""
    try:
        async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
            return await lookup
    except ValueError as error:
        logger.warning("lineage lookup failed: %s", error, extra=_ids(context, "lookup_error"))
        return _unresolved("lookup_error")
    except Exception:
        health.lookup_failures += 1
        logger.exception("the lineage resolver failed", extra=_ids(context, "resolver_unavailable"))
        return _unresolved("resolver_unavailable")


async def decide_named_parent(context: CaptureContext) -> LineageResolution:
    """Take the parent that the agent names (``x-parent-model-call-id``); tokens will verify it.

    Called after ``decide_parent``, whose hashes stay; its decision is replaced.
    """
    resolver = context.lineage_store or installed_lineage_store()
    resolve = getattr(resolver, "resolve_call_id", None)
    if resolve is None:
        resolution = _unresolved("resolver_unavailable")
    else:
        lookup = resolve(context.rollout_id, context.explicit_parent_call_id)
        resolution = await _looked_up(context, lookup)
    context.parent_by = "call_id"
    context.parent_resolution = resolution
    return resolution


def _hash_request(items: list[dict[str, Any]]) -> tuple[HashedRequest, str]:
    return HashedRequest(normalise_items(items)), system_digest(items)


def _unresolved(reason: str) -> LineageResolution:
    return LineageResolution(ParentResolutionStatus.UNRESOLVED, None, reason)


async def register_call_intent() -> None:
    """Durably note that the current call is about to generate (the seed's form).

    Sinks without intents cannot report a lost call; then nothing happens. A failure propagates:
    the call has cost nothing yet.
    """
    context = current_capture_context()
    if context is None:
        return
    ticket = await open_intent(context)
    if ticket is not None:
        await ticket.wait_durable()


async def open_intent(context: CaptureContext, *, observed: bool = True) -> IntentTicket | None:
    """Write the call's intent; returns once it is visible and survives a kill.

    Raises:
        ConflictError: the id is taken, or the rollout is frozen or retired.
        StoreError: nothing was written; refuse the call.
    """
    try:
        async with asyncio.timeout(_INTENT_TIMEOUT_S):
            return await _opened(context, observed)
    except TokenCaptureError:
        raise
    except Exception as error:
        logger.exception("writing an intent failed", extra=_ids(context, "intent_failed"))
        raise StoreUnavailableError(
            f"the call's intent could not be written ({type(error).__name__}); retry later"
        ) from error


async def _opened(context: CaptureContext, observed: bool) -> IntentTicket | None:
    sink = _sink(context)
    if (open_ := getattr(sink, "open_intent", None)) is not None:
        ticket: IntentTicket = await open_(
            CallIntent(
                rollout_id=context.rollout_id,
                model_call_id=context.model_call_id,
                request_digest=context.request_digest,
                created_at=context.created_at,
                observed=observed,
            )
        )
        context.first_call = ticket.first_call
        return ticket
    if (begin := getattr(sink, "begin_call", None)) is not None:
        await begin(context.rollout_id, context.model_call_id)
    return None


# --- after the answer --------------------------------------------------------------------------


async def record_outcome(
    context: CaptureContext, outcome: Outcome, *, timings: Mapping[str, float] | None = None
) -> list[str]:
    """Make the outcome durable; returns the ids of the entries that were stored.

    Never raises (cancellation apart): what cannot be stored makes the rollout incomplete, and
    what cannot even be marked is logged and counted.
    """
    if isinstance(outcome, Nothing):
        await cancel_intent(context, outcome.reason)
        return []
    if isinstance(outcome, Hole):
        await mark_hole(context, outcome.code, outcome.detail)
        return []
    try:
        entries = await _entries(context, outcome, timings or {})
    except TokenCaptureError as error:
        await mark_hole(context, error.code, str(error))
        return []
    except Exception as error:
        logger.exception("building a record failed", extra=_ids(context, "record_failed"))
        await mark_hole(context, "internal_error", type(error).__name__)
        return []
    return await _store(context, entries)


async def cancel_intent(context: CaptureContext, reason: str) -> None:
    """Close the intent of a call of which nothing generated reached the client."""
    cancel = getattr(_sink(context), "cancel_call", None)
    if cancel is None:
        return
    health.cancelled += 1
    try:
        await cancel(context.rollout_id, context.model_call_id, reason)
    except ConflictError:
        # Frozen meanwhile: the freeze has judged the intent already.
        health.late_writes += 1
        context.observer.late_write()
    except Exception:
        logger.exception("closing an intent failed", extra=_ids(context, "cancel_failed"))


async def mark_hole(context: CaptureContext, code: str, detail: str = "") -> None:
    """Durably make the rollout incomplete; loud when even that fails."""
    health.holes += 1
    context.observer.hole(code)
    logger.warning("rollout incomplete: %s (%s)", code, detail, extra=_ids(context, code))
    sink = _sink(context)
    if sink is None:
        return
    try:
        async with asyncio.timeout(_MARK_TIMEOUT_S):
            if hasattr(sink, "open_intent"):
                await sink.mark_incomplete(  # type: ignore[call-arg]
                    context.rollout_id, context.model_call_id, reason=code, detail=detail
                )
            else:
                await sink.mark_incomplete(context.rollout_id, context.model_call_id)
        health.marks_failing = False
    except Exception:
        health.mark_failures += 1
        health.marks_failing = True
        logger.critical(
            "a lost call could not be marked: rollout %s must be masked by hand",
            context.rollout_id,
            exc_info=True,
            extra=_ids(context, "mark_failed"),
        )


async def note_delivery(
    context: CaptureContext, call_ids: Sequence[str], notes: Mapping[str, Any]
) -> None:
    """Add later notes to stored records. Losing one loses no data: it is only logged."""
    note = getattr(_sink(context), "note_delivery", None)
    if note is None:
        return
    for call_id in call_ids:
        try:
            await note(context.rollout_id, call_id, notes)
        except Exception:
            logger.exception("a delivery note was lost", extra=_ids(context, "note_failed"))


async def _store(context: CaptureContext, entries: list[TokenEntry]) -> list[str]:
    sink = _sink(context)
    if sink is None:
        return []
    put_choices = getattr(sink, "put_choices", None)
    try:
        async with asyncio.timeout(_PUT_TIMEOUT_S):
            if len(entries) == 1 and entries[0].model_call_id == context.model_call_id:
                await sink.put(entries[0])
            elif put_choices is not None:
                await put_choices(entries, context.model_call_id)
            else:
                for entry in entries:
                    await sink.put(entry)
                await cancel_intent(context, "recorded_per_choice")
    except (TokenCaptureFrozenError, TokenCaptureRetiredError) as error:
        # The freeze has judged the open intent; a late record must not change the snapshot.
        health.late_writes += 1
        context.observer.late_write()
        logger.warning("late record refused: %s", error, extra=_ids(context, error.code))
        return []
    except Exception as error:
        health.put_failures += 1
        logger.exception("storing a record failed", extra=_ids(context, "put_failed"))
        code = error.code if isinstance(error, ConflictError) else "store_failure"
        await mark_hole(context, code, f"{type(error).__name__}: {error}")
        return []
    context.committed = True
    health.entries += len(entries)
    context.observer.recorded(entries)
    return [entry.model_call_id for entry in entries]


def _sink(context: CaptureContext) -> TokenSink | None:
    return context.token_sink or installed_token_sink()


# --- building entries --------------------------------------------------------------------------


async def _entries(
    context: CaptureContext, outcome: Captured, timings: Mapping[str, float]
) -> list[TokenEntry]:
    choices = [choice for choice in outcome.answer.choices if outcome.whole or choice.token_ids]
    parents = [
        _choice_before(context, outcome.answer, choice)
        if choice.continues
        else await _parent_of(context, choice)
        for choice in choices
    ]
    split = context.num_choices > 1 or any(choice.index for choice in choices)

    def build() -> list[TokenEntry]:
        return [
            _entry(context, outcome, choice, parent, timings, split=split)
            for choice, parent in zip(choices, parents, strict=True)
        ]

    num_tokens = sum(len(choice.prompt_token_ids) for choice in choices)
    if num_tokens > _OFF_LOOP_TOKENS:
        return await asyncio.to_thread(build)
    return build()


async def _parent_of(context: CaptureContext, choice: ChoiceAnswer) -> LineageResolution:
    """The decision made before dispatch; completions are resolved by their prompt's tokens."""
    decided = context.parent_resolution
    if decided is not None:
        if context.parent_by == "response_id" and decided.match is not None:
            # Only tokens can confirm what an id claims (spec 02.5).
            named = decided.match.cumulative_token_ids
            return decided if choice.prompt_token_ids.startswith(named) else _unresolved("no_match")
        return decided
    resolver = context.lineage_store or installed_lineage_store()
    resolve_tokens = getattr(resolver, "resolve_tokens", None)
    if resolve_tokens is None:
        return _unresolved("resolver_unavailable")
    try:
        resolution: LineageResolution = await resolve_tokens(
            context.rollout_id, choice.prompt_token_ids, dispatched_at=context.created_at
        )
    except Exception:
        health.lookup_failures += 1
        logger.exception("the lineage resolver failed", extra=_ids(context, "lookup_error"))
        return _unresolved("lookup_error")
    return resolution


def _choice_before(
    context: CaptureContext, answer: Answer, choice: ChoiceAnswer
) -> LineageResolution:
    """The parent of a sub-generation: the one before it in the same request, by construction."""
    before = next((other for other in answer.choices if other.index == choice.index - 1), None)
    if before is None:
        return _unresolved("no_match")
    tokens = TokenIds.concat(before.prompt_token_ids, before.token_ids)
    match = LineageMatch(f"{context.model_call_id}.{before.index}", tokens)
    return LineageResolution(ParentResolutionStatus.RESOLVED, match)


def _entry(
    context: CaptureContext,
    outcome: Captured,
    choice: ChoiceAnswer,
    parent: LineageResolution,
    timings: Mapping[str, float],
    *,
    split: bool,
) -> TokenEntry:
    """One choice as a stamped record; the prompt as a delta where the parent is extended."""
    prompt = choice.prompt_token_ids
    parent_tokens = parent.match.cumulative_token_ids if parent.match else None
    extends = parent_tokens is not None and prompt.startswith(parent_tokens)
    # A sub-generation's parent is stored in the same breath: its prompt is kept whole.
    may_be_delta = context.delta_records and not choice.continues
    is_delta = bool(extends and parent_tokens and may_be_delta)
    call_id = f"{context.model_call_id}.{choice.index}" if split else context.model_call_id
    entry = TokenEntry(
        rollout_id=context.rollout_id,
        model_call_id=call_id,
        model=outcome.answer.model or context.model,
        prompt_token_ids=prompt[len(parent_tokens or ()) :] if is_delta else prompt,
        generation_token_ids=choice.token_ids,
        generation_log_probs=choice.log_probs,
        routed_experts=choice.routed_experts,
        output_items=choice.output_items,
        token_item_index=choice.token_item_index,
        response_id=outcome.answer.response_id,
        created_at=context.created_at,
        prefix_requested=context.prefix_requested and not choice.continues,
        prefix_supplied=context.prefix_supplied and not choice.continues,
        parent_resolution=parent.status,
        parent_call_id=parent.match.model_call_id if parent.match else None,
        parent_resolution_reason=parent.reason,
        prompt_is_delta=is_delta,
    )
    _stamp_extras(entry, context, outcome, choice, timings, split=split)
    if parent_tokens is not None and not extends:
        entry.drift_at = prompt.common_prefix_len(parent_tokens)
    # Only the last of several sub-generations ends an answer that a request can repeat.
    if choice.output_items or "sub_generation" not in choice.extras:
        _stamp_continuation(entry, context)
    return stamp_lineage(
        entry,
        entry.parent_call_id,
        parent_resolution=parent.status,
        cumulative=TokenIds.concat(prompt, choice.token_ids),
    )


def _stamp_extras(
    entry: TokenEntry,
    context: CaptureContext,
    outcome: Captured,
    choice: ChoiceAnswer,
    timings: Mapping[str, float],
    *,
    split: bool,
) -> None:
    entry.dialect = context.dialect or None
    entry.engine = context.engine or None
    entry.finish_reason = choice.finish_reason or outcome.cut or None
    entry.delivered = outcome.delivered
    entry.agent_id = context.agent_id
    entry.request_digest = context.request_digest or None
    entry.prompt_config_digest = context.prompt_config_digest or None
    entry.system_digest = context.system_digest or None
    entry.first_call = context.first_call or None
    entry.sampling = context.sampling or None
    entry.guided = context.guided or None
    entry.weight_version = context.weight_version
    entry.usage = outcome.answer.usage
    entry.log_probs_digest = compute_log_probs_digest(choice.log_probs)
    entry.timings = dict(timings) or None
    if context.prefix_requested and not context.prefix_supplied:
        entry.prefix_reason = context.prefix_reason or None
    for name, value in choice.extras.items():
        setattr(entry, name, value)
    if split:
        entry.choice_index = choice.index


def _stamp_continuation(entry: TokenEntry, context: CaptureContext) -> None:
    """What a child will be matched by; continues the request's hashes, hashes nothing twice."""
    if context.hashed_request is None:
        return
    try:
        fingerprint, length, digest = context.hashed_request.continuation(
            normalise_items(entry.output_items)
        )
    except ValueError as error:
        # The record is sound; only its children cannot be recognised by content.
        logger.warning("the answer cannot be hashed: %s", error, extra=_ids(context, "unhashable"))
        return
    entry.continuation_fingerprint = fingerprint
    entry.continuation_context_len = length
    entry.continuation_context_digest = digest
    entry.fingerprint_version = FINGERPRINT_VERSION


# --- the seed's entry points for code that holds a whole response --------------------------------


async def capture_tokens(
    response: Any, request_messages: list[dict[str, Any]] | None = None
) -> None:
    """Record the current call from a complete response that carries token fields.

    ``response`` is a dict or a pydantic model in Responses or Chat shape. Returns when the
    record is durable; without a context nothing happens. Missing or partial token fields make
    the rollout incomplete.
    """
    context = current_capture_context()
    if context is None:
        return
    payload = response.model_dump() if hasattr(response, "model_dump") else response
    if request_messages is not None and context.hashed_request is None:
        await decide_parent(context, request_messages)
    try:
        answer = _answer_of(payload)
    except AnswerDefect as defect:
        await mark_hole(context, defect.code, defect.detail)
        return
    await record_outcome(context, Captured(answer, whole=True))


def _answer_of(payload: Any) -> Answer:
    if not isinstance(payload, dict):
        raise AnswerDefect("unparsable_answer", "the response is no object")
    try:
        fields = extract_token_fields(payload)
        items, index = strip_token_fields(response_to_output_items(payload))
    except ValueError as error:
        detail = "the token fields are partial, or on several items"
        raise AnswerDefect("invalid_token_ids", detail) from error
    if fields is None:
        raise AnswerDefect("missing_token_ids", "the response carries no token fields")
    ids = checked_ids(fields["generation_token_ids"], "generation_token_ids")
    log_probs = checked_log_probs(fields["generation_log_probs"])
    if len(ids) != len(log_probs):
        raise AnswerDefect("length_mismatch", f"{len(ids)} ids but {len(log_probs)} log-probs")
    choice = ChoiceAnswer(
        index=0,
        prompt_token_ids=checked_ids(fields["prompt_token_ids"], "prompt_token_ids"),
        token_ids=ids,
        log_probs=log_probs,
        output_items=items,
        token_item_index=index,
        routed_experts=fields.get("routed_experts"),
    )
    response_id, model = payload.get("id"), payload.get("model")
    return Answer(
        choices=[choice],
        response_id=response_id if isinstance(response_id, str) else None,
        model=model if isinstance(model, str) else "",
    )


def mark_external_staging_committed(*, rollout_id: str, model_call_id: str) -> None:
    """Note that a framework's worker staged the current call and its ledger row is written.

    Raises:
        InvalidInputError: (a ``ValueError``) that is not the current call: a late or crossed
            acknowledgement must not hide that this one is missing.
    """
    context = current_capture_context()
    if context is None:
        return
    if (context.rollout_id, context.model_call_id) != (rollout_id, model_call_id):
        raise InvalidInputError(
            f"call {model_call_id} of rollout {rollout_id} is not the current one"
        )
    context.committed = True


async def commit_entry(
    entry: TokenEntry, *, parent_resolution: LineageResolution | None = None
) -> None:
    """Stamp and store a finished entry for the current call (the caller has the arrays).

    Without a context nothing happens; failures make the rollout incomplete, never the call fail.
    """
    context = current_capture_context()
    if context is None:
        return
    resolution = parent_resolution or context.parent_resolution or _unresolved("not_attempted")
    try:
        parent_id = resolution.match.model_call_id if resolution.match else None
        entry.parent_resolution_reason = resolution.reason
        if entry.prompt_is_delta and resolution.match is not None:
            cumulative: TokenIds | None = TokenIds.concat(
                resolution.match.cumulative_token_ids,
                entry.prompt_token_ids,
                entry.generation_token_ids,
            )
        else:
            cumulative = None
        stamp_lineage(entry, parent_id, parent_resolution=resolution.status, cumulative=cumulative)
        entry.log_probs_digest = compute_log_probs_digest(entry.generation_log_probs)
        if not entry.continuation_fingerprint:
            _stamp_continuation(entry, context)
    except TokenCaptureError as error:
        await mark_hole(context, error.code, str(error))
        return
    await _store(context, [entry])


def _ids(context: CaptureContext, action: str) -> dict[str, str]:
    return {
        "action": action,
        "rollout_id": context.rollout_id,
        "model_call_id": context.model_call_id,
    }
