"""Whether a framework's worker may capture a call, decided before dispatch (external staging).

One proven parent: the child of its staging chain. No model-authored history: a root. Anything
else: a root only while the rollout has no ledger rows; after that it would train the policy's own
words as prompt, so the call is served, not captured, and its rollout poisoned with the reason.
A ledger that does not answer (in time) fails the call: it has cost nothing yet.
Source: spec 07 "A call".
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final, cast

from middleware.context import CaptureContext
from middleware.errors import StoreUnavailableError, TokenCaptureError
from middleware.lineage.matching import LOOKUP_ERROR
from middleware.protocols import (
    CaptureLedger,
    LineageMatch,
    LineageResolution,
    installed_lineage_store,
)
from middleware.records import (
    LEDGER_ROW_MISSING_CHAIN_HASH_REASON,
    UNRESOLVED_PARENT_REASON,
    ParentResolutionStatus,
)
from middleware.staging_wire import CaptureAdmission

logger = logging.getLogger(__name__)

_LEDGER_TIMEOUT_S: Final = 10.0


def ledger_of(context: CaptureContext) -> CaptureLedger:
    """The ledger that a call's rows go to.

    Raises:
        StoreUnavailableError: there is none.
    """
    ledger = context.lineage_store or installed_lineage_store()
    if ledger is None or not hasattr(ledger, "record_failure"):
        raise StoreUnavailableError("external staging has no ledger: install a CaptureLedger")
    return cast("CaptureLedger", ledger)


async def admit_call(context: CaptureContext, items: list[dict[str, Any]]) -> None:
    """Decide the parent and set the context's admission, or record why there is none.

    Args:
        context: gets ``parent_resolution``, ``capture_admission`` (None: not admitted),
            ``admitted_at`` and the parent's chain.
        items: the conversation as the agent sent it.

    Raises:
        StoreUnavailableError: the ledger could not be asked or written; refuse the call.
    """
    ledger = ledger_of(context)
    context.request_items = items
    context.admitted_at = time.time()
    bound = asyncio.timeout(_LEDGER_TIMEOUT_S)
    try:
        async with bound:
            await _decide(ledger, context, items)
    except TokenCaptureError:
        raise
    except Exception as error:
        told = f"no answer in {_LEDGER_TIMEOUT_S:g} s" if bound.expired() else str(error)
        raise StoreUnavailableError(f"the ledger failed: {told}") from error


async def _decide(
    ledger: CaptureLedger, context: CaptureContext, items: list[dict[str, Any]]
) -> None:
    context.parent_resolution = resolution = await _resolved(ledger, context, items)
    match = resolution.match
    if match is not None:
        reason = _admit_child(context, match)
    elif resolution.status is ParentResolutionStatus.ROOT or not await ledger.has_rows(
        context.rollout_id
    ):
        _admit(context, mode="text")
        reason = ""
    else:
        reason = UNRESOLVED_PARENT_REASON
    if reason:
        await _refuse(ledger, context, reason)


async def _resolved(
    ledger: CaptureLedger, context: CaptureContext, items: list[dict[str, Any]]
) -> LineageResolution:
    try:
        return await ledger.resolve(context.rollout_id, items)
    except ValueError as error:
        logger.warning("the request cannot be hashed: %s", error, extra=_ids(context))
        return LineageResolution(ParentResolutionStatus.UNRESOLVED, None, LOOKUP_ERROR)


def _admit_child(context: CaptureContext, match: LineageMatch) -> str:
    """Admit behind a proven parent; the reason where its row does not allow that."""
    if not match.chain_hash:
        return LEDGER_ROW_MISSING_CHAIN_HASH_REASON
    chain = list(match.staging_chain)
    inline = [] if chain else match.cumulative_token_ids.tolist()
    if not chain and len(inline) != match.prev_len:
        return UNRESOLVED_PARENT_REASON  # nobody could say what the prefix is
    context.parent_staging_chain = tuple(chain)
    context.parent_chain_hash = match.chain_hash
    _admit(
        context,
        mode="token_in",
        parent_call_id=match.model_call_id,
        prev_len=match.prev_len,
        required_prefix_token_ids=inline,
        staging_chain=chain,
        parent_chain_hash=match.chain_hash,
    )
    return ""


def _admit(context: CaptureContext, **fields: Any) -> None:
    context.capture_admission = CaptureAdmission(
        rollout_id=context.rollout_id, model_call_id=context.model_call_id, **fields
    )


async def _refuse(ledger: CaptureLedger, context: CaptureContext, reason: str) -> None:
    logger.warning("call served without capture: %s", reason, extra=_ids(context))
    await ledger.record_failure(context.rollout_id, context.model_call_id, reason)


def _ids(context: CaptureContext) -> dict[str, str]:
    return {
        "action": "staging_not_admitted",
        "rollout_id": context.rollout_id,
        "model_call_id": context.model_call_id,
    }
