"""Put recorded tokens into a finished rollout record, and retire what was handed over.

Invariant: a record is never half-finalised and never silently without tokens: either its
``response.output`` carries the rebuilt chain, or ``mask_sample`` is set and ``_ng_token_capture``
says why. Retiring is a step of its own, after the caller has stored the record durably.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from capture_server.trajectories.consumer import trajectories_from_source
from capture_server.trajectories.digests import DIGEST_MISMATCH
from capture_server.trajectories.rollout_ids import rollout_id_of
from middleware.errors import InvalidIdError
from middleware.protocols import TokenSource

TOKEN_CAPTURE_KEY: Final = "_ng_token_capture"  # noqa: S105 - the name of a record field
MASK_SAMPLE_KEY: Final = "mask_sample"
TERMINAL_CALL_KEY: Final = "_ng_terminal_model_call_id"
TERMINAL_RESPONSE_ID_KEY: Final = "terminal_response_id"
_REDUNDANT_CAPTURE_KEY: Final = "_redundant_capture"
_SNAPSHOT_KEY: Final = "_capture_snapshot"

logger = logging.getLogger(__name__)


def rollout_carries_token_ids(result: dict[str, Any]) -> bool:
    """Whether any output item of the record carries generated token ids already."""
    response = result.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    if not isinstance(output, list):
        return False
    return any(isinstance(item, dict) and item.get("generation_token_ids") for item in output)


async def finalize_rollout_token_capture(
    result: dict[str, Any], source: TokenSource | None
) -> dict[str, Any] | None:
    """Rebuild ``result["response"]["output"]`` from the rollout's recorded tokens, in place.

    Freezes the rollout and never retires it. Besides the output only ``mask_sample`` and
    ``_ng_token_capture`` are written; a record that carries token ids already is left alone, and
    its own, now redundant records may be retired. Never raises: what goes wrong masks the record.

    Returns:
        The build (see ``build_from_snapshot``), or None when ``source`` is None.
    """
    if source is None:
        return None
    try:
        rollout_id = rollout_id_of(result)
    except InvalidIdError as error:
        return None if rollout_carries_token_ids(result) else _unusable(result, f"bad id: {error}")
    if rollout_carries_token_ids(result):
        return await _redundant(rollout_id, source)
    if rollout_id is None:
        return _unusable(result, "the record carries no rollout id and no task/rollout index")
    response = result.get("response")
    verified = response if isinstance(response, dict) else None
    try:
        built = await trajectories_from_source(
            rollout_id,
            source,
            model=str((verified or {}).get("model") or ""),
            verified_response=verified,
            explicit_terminal_call_id=_text(result.get(TERMINAL_CALL_KEY)),
            declared_response_id=_text(result.get(TERMINAL_RESPONSE_ID_KEY)),
        )
    except Exception as error:
        # One rollout must not take its batch down, whatever a foreign source raises.
        logger.exception("rollout could not be built", extra={"rollout_id": rollout_id})
        return _unusable(result, f"{type(error).__name__}: {error}")
    if built is None:
        return _unusable(result, "nothing was recorded for this rollout")
    _write_back(result, built)
    return built


def _text(value: Any) -> str | None:
    return str(value) if value else None


async def _redundant(rollout_id: str | None, source: TokenSource) -> dict[str, Any] | None:
    """Name the frozen records of a rollout that has its tokens from elsewhere."""
    if rollout_id is None:
        return None
    try:
        snapshot = await source.freeze(rollout_id)
    except Exception:
        # The record itself is fine; its leftover records merely stay.
        logger.exception("redundant records cannot be frozen", extra={"rollout_id": rollout_id})
        return None
    return {
        "rollout_id": rollout_id,
        "rebuilt_response": None,
        MASK_SAMPLE_KEY: False,
        _REDUNDANT_CAPTURE_KEY: True,
        _SNAPSHOT_KEY: {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version},
    }


def _unusable(result: dict[str, Any], error: str) -> dict[str, Any]:
    """Mask a record that needed tokens and cannot get them."""
    logger.warning("rollout is masked: %s", error, extra={"action": "rollout_masked"})
    metrics = {"n_calls": 0, "error": error}
    result[MASK_SAMPLE_KEY] = True
    result[TOKEN_CAPTURE_KEY] = metrics
    return {"rebuilt_response": None, MASK_SAMPLE_KEY: True, "error": error, "metrics": metrics}


def _write_back(result: dict[str, Any], built: dict[str, Any]) -> None:
    metrics = dict(built["metrics"])
    if built.get("error"):
        metrics["error"] = built["error"]
    if built.get(DIGEST_MISMATCH):
        metrics[DIGEST_MISMATCH] = built[DIGEST_MISMATCH]
    rebuilt, response = built["rebuilt_response"], result.get("response")
    if rebuilt is not None and isinstance(response, dict):
        response["output"] = rebuilt["output"]
    elif rebuilt is not None:
        result["response"] = rebuilt
    if built[MASK_SAMPLE_KEY]:
        result[MASK_SAMPLE_KEY] = True
        logger.warning(
            "rollout is masked: captured incompletely or ambiguously",
            extra={"action": "rollout_masked", "rollout_id": built["rollout_id"]},
        )
    result[TOKEN_CAPTURE_KEY] = metrics


def capture_build_can_retire(built: dict[str, Any] | None) -> bool:
    """Whether the records were consumed (or are redundant): masked ones stay as evidence."""
    if built is None or built.get(MASK_SAMPLE_KEY):
        return False
    return built.get("rebuilt_response") is not None or bool(built.get(_REDUNDANT_CAPTURE_KEY))


async def retire_rollout_token_capture(
    rollout_id: str, source: TokenSource | None, built: dict[str, Any] | None
) -> bool:
    """Retire exactly the snapshot that ``built`` consumed, after its durable hand-over.

    Returns:
        False when nothing was retired: a masked or failed build, a snapshot that changed since,
        a source that fails (logged; retiring again later is safe).
    """
    if source is None or built is None or not capture_build_can_retire(built):
        return False
    snapshot = built.get(_SNAPSHOT_KEY)
    if not isinstance(snapshot, dict):
        return False
    try:
        return await source.drop(
            rollout_id, snapshot_id=snapshot["snapshot_id"], version=snapshot["version"]
        )
    except Exception:
        # The sample is handed over already; leftover records only cost space.
        logger.exception("records could not be retired", extra={"rollout_id": rollout_id})
        return False
