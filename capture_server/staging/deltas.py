"""From an admission and arrays to what is staged, and from a sink's answer to coordinates.

The pure steps of ``capture``. Invariant: what adapters and sinks hand over is foreign and checked
again here, whatever type it claims to be; whatever is wrong with it is a ``ValueError``.
Source: spec 07 "Worker side".
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

from capture_server.staging.digest import (
    EXTRAS_DIGEST_VERSION,
    STAGING_DIGEST_VERSION,
    build_staging_delta,
    compute_chain_hash,
    compute_extras_digest,
    compute_staging_digest,
    hash_token_ids,
)
from capture_server.staging.records import (
    CaptureAdmission,
    CommitCoords,
    StagedCallRecord,
    StageResult,
)
from middleware.arrays import TokenIds
from middleware.errors import InvalidInputError
from middleware.staging_wire import STAGING_SCHEMA_VERSION, WireModel

__all__ = ["checked", "resolved_prefix", "staged_coords", "staged_record", "told"]

_MAX_TOLD: Final = 500  # characters of a foreign error's text

ModelT = TypeVar("ModelT", bound=WireModel)


def checked(kind: type[ModelT], value: Any) -> ModelT:
    """A model validated again: one built without validation, or a subclass's, may hold anything.

    Raises:
        ValueError: it is of another type, incomplete or invalid.
    """
    if not isinstance(value, kind):
        raise InvalidInputError(f"a {type(value).__name__} is no {kind.__name__}")
    absent = [name for name in kind.model_fields if not hasattr(value, name)]
    if absent:
        raise InvalidInputError(f"the {kind.__name__} lacks {', '.join(absent)}")
    return kind.model_validate({name: getattr(value, name) for name in kind.model_fields})


def told(error: BaseException) -> str:
    """What a foreign exception says, for a log line: its type and text."""
    try:
        text = str(error)[:_MAX_TOLD]
    except Exception:  # noqa: BLE001 - foreign code once more; the log line must go out
        text = "its text cannot be read"
    return f"{type(error).__name__}: {text}"


def resolved_prefix(admission: CaptureAdmission, given: list[int] | None) -> list[int]:
    """The admitted call's prefix: inline, or given for its staging chain.

    Raises:
        ValueError: no token ids, not the inline ones, or not ``prev_len`` of them.
    """
    inline = admission.required_prefix_token_ids
    prefix = inline if given is None else TokenIds.of(given).tolist()
    if inline and prefix != inline:
        raise InvalidInputError("the given prefix is not the one in the admission")
    if len(prefix) != admission.prev_len:
        raise InvalidInputError(
            f"call {admission.model_call_id} continues {admission.prev_len} tokens but has a "
            f"prefix of {len(prefix)}: fetch its staging chain and give prefix_token_ids"
        )
    return prefix


def staged_record(
    admission: CaptureAdmission,
    prefix: list[int],
    weight_version: int,
    prompt: list[int],
    generated: list[int],
    log_probs: list[float],
    extras: dict[str, Any] | None,
) -> StagedCallRecord:
    """What is staged: prompt and generation behind the admitted prefix.

    Raises:
        ValueError: the arrays contradict each other or the admission.
    """
    prompt_ids = TokenIds.of(prompt)
    if not prompt_ids.startswith(prefix):
        raise InvalidInputError("the prompt does not start with the admitted prefix")
    ids, mask, values = build_staging_delta(
        prompt_token_ids=prompt_ids,
        generated_token_ids=generated,
        generated_log_probs=log_probs,
        prev_len=admission.prev_len,
    )
    fields: dict[str, Any] = {
        "schema_version": STAGING_SCHEMA_VERSION,
        "digest_version": STAGING_DIGEST_VERSION,
        "extras_digest_version": EXTRAS_DIGEST_VERSION,
        "rollout_id": admission.rollout_id,
        "model_call_id": admission.model_call_id,
        "parent_call_id": admission.parent_call_id,
        "mode": admission.mode,
        "prev_len": admission.prev_len,
        "delta_len": len(ids),
        "cum_len": admission.prev_len + len(ids),
        "weight_version": weight_version,
        "token_ids_delta": ids,
        "token_mask_delta": mask,
        "generation_log_probs_delta": values,
        "extras_digest": compute_extras_digest(extras),
        "chain_hash": compute_chain_hash(admission.parent_chain_hash, ids),
        "cumulative_hash": hash_token_ids(TokenIds.concat(prompt_ids, generated)),
    }
    return StagedCallRecord(digest=compute_staging_digest(**fields), extras=extras, **fields)


def staged_coords(record: StagedCallRecord, answer: Any) -> CommitCoords:
    """The coordinates of a record that the sink says it staged.

    Raises:
        ValueError: the answer is no valid ``StageResult``, or says that it was not staged.
    """
    result = checked(StageResult, answer)
    if not result.ok:
        raise InvalidInputError(f"the sink did not stage the call: {result.error}")
    return CommitCoords(
        rollout_id=record.rollout_id,
        model_call_id=record.model_call_id,
        parent_call_id=record.parent_call_id,
        prev_len=record.prev_len,
        delta_len=record.delta_len,
        cum_len=record.cum_len,
        weight_version=record.weight_version,
        digest=record.digest,
        extras_digest=record.extras_digest,
        staging_key=result.staging_key,
        chain_hash=record.chain_hash,
        cumulative_hash=record.cumulative_hash,
    )
