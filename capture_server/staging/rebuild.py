"""Verify a receipt against what was staged, and lay the terminal's chain out as one row.

Invariant: a row that is returned is token for token what the workers staged, in the order of the
chain, and every link of it is proven by hashes; anything else raises with a stable ``code``.
Linear: each token is hashed a constant number of times, the cumulative sequence once. Extras are
never read; their commitments are handed on. Response ids, fingerprints, times and staging keys are
covered by no hash and are not judged. Nor are ``reward`` and ``terminal_selection``, which only
the receipt's own validation checks: they do not change the row. Source: spec 07.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from capture_server.staging.digest import (
    EXTRAS_DIGEST_VERSION,
    STAGING_DIGEST_VERSION,
    STAGING_SCHEMA_VERSION,
    compute_chain_hash,
    hash_token_ids,
)
from capture_server.staging.records import (
    CallRecord,
    RolloutReceipt,
    StagedCallBaseSnapshot,
    staging_digest_of,
)
from capture_server.staging.terminal import select_terminal_call
from middleware.errors import TokenCaptureError

__all__ = [
    "EXTRAS_DIGEST_VERSION",
    "STAGING_DIGEST_VERSION",
    "STAGING_SCHEMA_VERSION",
    "ExtrasCommitment",
    "LinearizedRow",
    "RebuildError",
    "ReceiptVerificationError",
    "WeightVersionSpan",
    "linearize",
    "verify_and_linearize",
]

# Shared by a manifest row and its snapshot, in the order in which they are compared.
_SHARED_FIELDS: Final = (
    "schema_version",
    "digest_version",
    "extras_digest_version",
    "parent_call_id",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "digest",
    "extras_digest",
    "mode",
    "chain_hash",
    "cumulative_hash",
)
_DELTAS: Final = ("token_ids_delta", "token_mask_delta", "generation_log_probs_delta")


class ReceiptVerificationError(TokenCaptureError):
    """The receipt, its manifest and the staged calls do not prove each other.

    ``code`` is stable (spec 07 lists all); ``detail`` is for humans and holds no token ids.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.detail)


class RebuildError(ReceiptVerificationError):
    """The calls are what was staged, but do not form a trainable chain."""


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """Positions ``[start, end)`` of the row were staged by one call under one weight version."""

    model_call_id: str
    start: int
    end: int
    weight_version: int


@dataclass(frozen=True, slots=True)
class ExtrasCommitment:
    """What a call's extras must hash to, for whoever fetches them."""

    model_call_id: str
    extras_digest_version: int
    extras_digest: str


@dataclass(frozen=True, slots=True)
class LinearizedRow:
    """One training row.

    ``token_ids``, ``token_mask`` (1.0 = generated) and ``logprobs`` (0.0 where the mask is) are
    parallel. ``prompt_len`` counts the first call's carried tokens. Per call, root first:
    ``weight_versions``, ``weight_version_spans``, ``link_spans`` (call id, carried, generated)
    and ``extras_commitments``.
    """

    rollout_id: str
    token_ids: list[int]
    token_mask: list[float]
    logprobs: list[float]
    model_call_ids: list[str]
    prompt_len: int
    weight_versions: list[int]
    weight_version_spans: list[WeightVersionSpan]
    link_spans: list[tuple[str, int, int]]
    extras_commitments: list[ExtrasCommitment]

    @property
    def call_ids(self) -> list[str]:
        """The calls of the chain, root first."""
        return self.model_call_ids


def verify_and_linearize(
    receipt: RolloutReceipt, snapshots: Sequence[StagedCallBaseSnapshot]
) -> LinearizedRow:
    """The training row that an unpoisoned receipt stands for.

    Args:
        receipt: validated or not; what the row depends on is judged here again (not its
            ``reward`` and ``terminal_selection``).
        snapshots: the staged calls, one per manifest row, in the manifest's order.

    Raises:
        ReceiptVerificationError: with ``code``; see the module.
    """
    with _half_built_is_invalid():
        _check_receipt(receipt)
        named = receipt.terminal_model_call_id
        # Without a hint ``linearize`` would select one: a receipt has to name it.
        terminal_hint = "" if named is None else named
        return linearize(
            receipt.rollout_id, list(snapshots), receipt.manifest, terminal_hint=terminal_hint
        )


def linearize(
    rollout_id: str,
    snapshots: list[StagedCallBaseSnapshot],
    manifest: list[CallRecord],
    *,
    terminal_hint: str | None = None,
) -> LinearizedRow:
    """``verify_and_linearize`` without a receipt.

    ``terminal_hint`` names the terminal call; None selects one by the parent links.

    Raises:
        ReceiptVerificationError: with ``code``; see the module.
    """
    with _half_built_is_invalid():
        _check_manifest(manifest)
        _check_identities(manifest, snapshots)
        for row, snapshot in zip(manifest, snapshots, strict=True):
            _check_shared_fields(rollout_id, row, snapshot)
        for snapshot in snapshots:
            _check_digest(snapshot)
        by_id = {snapshot.model_call_id: snapshot for snapshot in snapshots}
        _check_graph(by_id)
        return _row(rollout_id, _chain(by_id, _terminal_id(manifest, terminal_hint)))


@contextmanager
def _half_built_is_invalid() -> Iterator[None]:
    """Objects built without validation may lack what is read, or hold what cannot be."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        raise ReceiptVerificationError(
            "invalid_snapshot", f"a receipt, row or staged call is not whole: {error}"
        ) from error


# --- receipt and manifest ------------------------------------------------------------------------


def _check_receipt(receipt: RolloutReceipt) -> None:
    for code, given, known in (
        ("unsupported_schema", receipt.schema_version, STAGING_SCHEMA_VERSION),
        ("unsupported_digest", receipt.digest_version, STAGING_DIGEST_VERSION),
        ("unsupported_extras_digest", receipt.extras_digest_version, EXTRAS_DIGEST_VERSION),
    ):
        if not _same(given, known):
            raise ReceiptVerificationError(code, f"version {given!r}; this one speaks {known}")
    if receipt.failure_reason is not None:
        raise ReceiptVerificationError("rollout_failed", str(receipt.failure_reason))
    if receipt.capture_poisoned is not False:
        raise ReceiptVerificationError("capture_poisoned", "the receipt is marked as poisoned")


def _check_manifest(manifest: Sequence[CallRecord]) -> None:
    if not manifest:
        raise ReceiptVerificationError("empty_manifest", "the ledger has no committed call")
    for field, code in (
        ("model_call_id", "duplicate_manifest_row"),
        ("staging_key", "duplicate_staging_key"),
    ):
        seen: set[str] = set()
        for row in manifest:
            value = getattr(row, field)
            if type(value) is not str:
                raise ReceiptVerificationError(f"wrong_{field}", "it must be a string")
            if value in seen:
                raise ReceiptVerificationError(code, f"{value!r} stands in two rows")
            seen.add(value)


def _check_identities(
    manifest: Sequence[CallRecord], snapshots: Sequence[StagedCallBaseSnapshot]
) -> None:
    wanted = [row.model_call_id for row in manifest]
    found = [snapshot.model_call_id for snapshot in snapshots]
    if len(wanted) != len(found):
        raise ReceiptVerificationError(
            "row_count_mismatch", f"{len(wanted)} manifest rows but {len(found)} staged calls"
        )
    if any(type(call_id) is not str for call_id in found):
        raise ReceiptVerificationError("wrong_model_call_id", "it must be a string")
    if len(set(found)) != len(found):
        raise ReceiptVerificationError("duplicate_snapshot", "a staged call was given twice")
    if set(found) != set(wanted):
        raise ReceiptVerificationError(
            "snapshot_identity_mismatch", f"not in the manifest: {set(found) - set(wanted)}"
        )
    if found != wanted:
        raise ReceiptVerificationError(
            "snapshot_order_mismatch", "staged calls must be in the manifest's order"
        )


def _check_shared_fields(
    rollout_id: str, row: CallRecord, snapshot: StagedCallBaseSnapshot
) -> None:
    if not _same(snapshot.rollout_id, rollout_id):
        raise ReceiptVerificationError(
            "wrong_rollout", f"{row.model_call_id} was staged for {snapshot.rollout_id!r}"
        )
    for name in _SHARED_FIELDS:
        if not _same(getattr(row, name), getattr(snapshot, name)):
            raise ReceiptVerificationError(
                f"wrong_{name}", f"{row.model_call_id}: the ledger and the staged call differ"
            )


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)


def _check_digest(snapshot: StagedCallBaseSnapshot) -> None:
    for name in _DELTAS:
        if type(getattr(snapshot, name)) is not list:
            raise ReceiptVerificationError(
                "invalid_snapshot", f"{snapshot.model_call_id}: {name} is no list"
            )
    try:
        digest = staging_digest_of(snapshot)
    except (ValueError, TypeError) as error:
        raise ReceiptVerificationError(
            "invalid_snapshot", f"{snapshot.model_call_id}: {error}"
        ) from error
    if digest != snapshot.digest:
        raise ReceiptVerificationError(
            "corrupt_digest", f"{snapshot.model_call_id}: the content is not what was staged"
        )


# --- the chain -----------------------------------------------------------------------------------


def _check_graph(by_id: dict[str, StagedCallBaseSnapshot]) -> None:
    for call_id, call in by_id.items():
        if call.parent_call_id is not None and call.parent_call_id not in by_id:
            raise RebuildError("missing_parent", f"{call_id}: {call.parent_call_id} is absent")
    for call_id, call in by_id.items():
        if call.parent_call_id is not None:
            ends = by_id[call.parent_call_id].cum_len
            if ends != call.prev_len:
                raise RebuildError(
                    "parent_length_mismatch",
                    f"{call_id} starts at {call.prev_len}, its parent ends at {ends}",
                )
    # With lengths that add up no cycle can be left; asked all the same, it costs one pass.
    sound: set[str] = set()
    for call_id in by_id:
        path: dict[str, None] = {}
        at: str | None = call_id
        while at is not None and at not in sound:
            if at in path:
                raise RebuildError("lineage_cycle", f"{at} is its own ancestor")
            path[at] = None
            at = by_id[at].parent_call_id
        sound.update(path)


def _terminal_id(manifest: Sequence[CallRecord], hint: str | None) -> str:
    if hint is not None:
        return hint
    selection = select_terminal_call(manifest)
    if selection.terminal_model_call_id is None:
        raise RebuildError("missing_terminal", f"none can be selected: {selection.reason}")
    return selection.terminal_model_call_id


def _chain(by_id: dict[str, StagedCallBaseSnapshot], end: str) -> list[StagedCallBaseSnapshot]:
    if type(end) is not str or end not in by_id:
        raise RebuildError("missing_terminal", "the terminal call is not in the manifest")
    chain = []
    at: str | None = end
    while at is not None:
        chain.append(by_id[at])
        at = by_id[at].parent_call_id
    return chain[::-1]


def _row(rollout_id: str, chain: Sequence[StagedCallBaseSnapshot]) -> LinearizedRow:
    row = LinearizedRow(rollout_id, [], [], [], [], 0, [], [], [], [])
    parent_hash: str | None = None
    for call in chain:
        if compute_chain_hash(parent_hash, call.token_ids_delta) != call.chain_hash:
            raise RebuildError(
                "chain_hash_mismatch", f"{call.model_call_id} does not extend its parent's tokens"
            )
        parent_hash = call.chain_hash
        _append(row, call, _num_carried(call))
    if not row.token_ids:
        raise RebuildError("empty_training_row", "the chain has no tokens")
    if hash_token_ids(row.token_ids) != chain[-1].cumulative_hash:
        raise RebuildError(
            "cumulative_hash_mismatch",
            f"the row is not the sequence that {chain[-1].model_call_id} was generated in",
        )
    prompt_len = row.link_spans[0][1]
    return LinearizedRow(**{**_fields(row), "prompt_len": prompt_len})


def _num_carried(call: StagedCallBaseSnapshot) -> int:
    """How many tokens of the delta are carried: the mask is that many 0.0, then 1.0."""
    mask = call.token_mask_delta
    generated = mask.count(1.0)
    carried = len(mask) - generated
    # A 1.0 among the first ``carried`` values leaves a 0.0 behind them.
    if 1.0 in mask[:carried]:
        raise RebuildError(
            "invalid_mask_order", f"{call.model_call_id}: carried tokens follow generated ones"
        )
    if not generated:
        raise RebuildError("empty_generation", f"{call.model_call_id} generated nothing")
    return carried


def _append(row: LinearizedRow, call: StagedCallBaseSnapshot, carried: int) -> None:
    start = len(row.token_ids)
    row.token_ids.extend(call.token_ids_delta)
    row.token_mask.extend(call.token_mask_delta)
    row.logprobs.extend(call.generation_log_probs_delta)
    row.model_call_ids.append(call.model_call_id)
    row.weight_versions.append(call.weight_version)
    row.weight_version_spans.append(
        WeightVersionSpan(call.model_call_id, start, len(row.token_ids), call.weight_version)
    )
    row.link_spans.append((call.model_call_id, carried, call.delta_len - carried))
    row.extras_commitments.append(
        ExtrasCommitment(call.model_call_id, call.extras_digest_version, call.extras_digest)
    )


def _fields(row: LinearizedRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}
