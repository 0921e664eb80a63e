"""Build a whole frozen rollout into one response, under the strict single-chain policy.

The seed's delivery: one chain, or a masked result that says why. What this policy masks is often
sound training data all the same; ``traces`` delivers it row by row. Nothing here retires records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread

from capture_server.trajectories.builder import (
    BuildOutput,
    project_main_chain_response,
    run_builder,
)
from capture_server.trajectories.digests import DIGEST_MISMATCH
from capture_server.trajectories.rollout_ids import rollout_id_of
from capture_server.trajectories.soundness import require_entries
from capture_server.trajectories.summary import build_metrics, failed_metrics
from capture_server.trajectories.terminal import TerminalAttribution, resolve_terminal
from middleware.errors import InvalidRecordError, TokenCaptureError
from middleware.protocols import TokenCaptureSnapshot, TokenSource

if TYPE_CHECKING:
    from capture_server.stores.file import TokenCaptureStore

NO_RECORDS: Final = "no model call of this rollout was captured"
NO_CHAIN: Final = "no captured call can be put into a chain"
FOREIGN_ENTRY: Final = "the snapshot holds records of another rollout"
ONE_RESPONSE_ONLY: Final = (
    "per_request gives one sequence per call and cannot be one response; use prefix_merging, "
    "or ask for traces"
)


def build_from_snapshot(
    snapshot: TokenCaptureSnapshot,
    *,
    builder: str = "prefix_merging",
    model: str = "",
    verified_response: Mapping[str, Any] | None = None,
    explicit_terminal_call_id: str | None = None,
    declared_response_id: str | None = None,
) -> dict[str, Any]:
    """The rebuilt response of a frozen rollout with metrics and the masking verdict. Pure.

    Returns:
        ``rollout_id, builder, rebuilt_response, mask_sample, metrics, unresolved_retries,
        unresolved_parent_calls, _capture_snapshot``; ``error`` when nothing could be built
        (``rebuilt_response`` is None then); and ``recorded_digest_mismatch``, call ids, when
        records of the main chain contradict their own digest or length. A doubtful or failed
        build has ``mask_sample`` set; it is not raised.
    """
    entries = snapshot.entries
    if not entries:
        return _failed(snapshot, builder, NO_RECORDS, 0, None)
    try:
        require_entries(entries)
    except InvalidRecordError as error:
        return _failed(snapshot, builder, str(error), len(entries), None)
    n_calls = len({entry.model_call_id for entry in entries})
    foreign = next((e.rollout_id for e in entries if e.rollout_id != snapshot.rollout_id), None)
    if foreign is not None:
        return _failed(snapshot, builder, f"{FOREIGN_ENTRY} ({foreign!r})", n_calls, None)
    attribution = resolve_terminal(
        entries,
        verified_response,
        explicit_terminal_call_id,
        declared_response_id=declared_response_id,
    )
    if builder == "per_request":
        return _failed(snapshot, builder, ONE_RESPONSE_ONLY, n_calls, attribution)
    try:
        out = run_builder(entries, builder, attribution.model_call_id)
        if not out.chains:
            return _failed(snapshot, builder, NO_CHAIN, n_calls, attribution, out)
        response = project_main_chain_response(snapshot.rollout_id, out, model)
    except (TokenCaptureError, ValueError) as error:
        return _failed(snapshot, builder, str(error), n_calls, attribution)
    declared = declared_response_id is not None
    built = {
        "rollout_id": snapshot.rollout_id,
        "builder": builder,
        "rebuilt_response": response,
        "mask_sample": snapshot.incomplete or not _is_certain(out, attribution, declared=declared),
        "metrics": build_metrics(out, attribution, n_calls=n_calls, incomplete=snapshot.incomplete),
        "unresolved_retries": out.notes.unresolved_retries,
        "unresolved_parent_calls": out.notes.unresolved_parent_calls,
        "_capture_snapshot": _identity(snapshot),
    }
    if out.notes.digest_mismatches:
        # Beside the metrics: those have a fixed set of keys.
        built[DIGEST_MISMATCH] = out.notes.digest_mismatches
    return built


def _is_certain(out: BuildOutput, attribution: TerminalAttribution, *, declared: bool) -> bool:
    """Whether the main chain is what was recorded, and is known to be what was scored."""
    notes = out.notes
    if not notes.generated_tokens_delivered or notes.digest_mismatches:
        return False
    if attribution.attributed or declared:
        return notes.terminal_chain == "delivered"
    return (
        notes.roots == notes.chains == 1
        and not notes.unresolved_retries
        and not notes.unresolved_parent_calls
    )


def _failed(
    snapshot: TokenCaptureSnapshot,
    builder: str,
    error: str,
    n_calls: int,
    attribution: TerminalAttribution | None,
    out: BuildOutput | None = None,
) -> dict[str, Any]:
    return {
        "rollout_id": snapshot.rollout_id,
        "builder": builder,
        "rebuilt_response": None,
        "mask_sample": True,
        "error": error,
        "metrics": failed_metrics(n_calls, attribution, incomplete=snapshot.incomplete),
        "unresolved_retries": out.notes.unresolved_retries if out is not None else [],
        "unresolved_parent_calls": out.notes.unresolved_parent_calls if out is not None else [],
        "_capture_snapshot": _identity(snapshot),
    }


def _identity(snapshot: TokenCaptureSnapshot) -> dict[str, Any]:
    return {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}


async def trajectories_from_source(
    rollout_id: str,
    source: TokenSource,
    *,
    builder: str = "prefix_merging",
    model: str = "",
    verified_response: dict[str, Any] | None = None,
    explicit_terminal_call_id: str | None = None,
    declared_response_id: str | None = None,
) -> dict[str, Any] | None:
    """Freeze a rollout and build it (see ``build_from_snapshot``); the work runs in a thread.

    Raises:
        TokenCaptureError: the source cannot freeze (retired, unavailable).
    """
    snapshot = await source.freeze(rollout_id)

    def build() -> dict[str, Any]:
        return build_from_snapshot(
            snapshot,
            builder=builder,
            model=model,
            verified_response=verified_response,
            explicit_terminal_call_id=explicit_terminal_call_id,
            declared_response_id=declared_response_id,
        )

    return await anyio.to_thread.run_sync(build)


def trajectories_for_rollout(
    rollout_id: str,
    token_capture_dirs: Sequence[Path],
    *,
    builder: str = "prefix_merging",
    model: str = "",
    verified_response: dict[str, Any] | None = None,
    explicit_terminal_call_id: str | None = None,
    declared_response_id: str | None = None,
) -> dict[str, Any] | None:
    """Freeze and build from local file stores; None only when no directory is given.

    Raises:
        TokenCaptureError: a store cannot freeze (retired, unavailable).
    """
    if not token_capture_dirs:
        return None
    snapshots = [_file_store(root).freeze_now(rollout_id) for root in token_capture_dirs]
    # A hole in any of the directories is a hole in the rollout.
    holding = [snapshot for snapshot in snapshots if snapshot.entries or snapshot.incomplete]
    snapshot = holding[0] if holding else snapshots[0]
    if len(holding) > 1:
        error = f"{len(holding)} directories hold records of this rollout; which is whole?"
        n_calls = len({e.model_call_id for found in holding for e in found.entries})
        return _failed(snapshot, builder, error, n_calls, None)
    return build_from_snapshot(
        snapshot,
        builder=builder,
        model=model,
        verified_response=verified_response,
        explicit_terminal_call_id=explicit_terminal_call_id,
        declared_response_id=declared_response_id,
    )


def clear_token_captures_for_rollouts(
    records: Sequence[Mapping[str, Any]], token_capture_dirs: Sequence[Path]
) -> None:
    """Remove what earlier attempts left under the ids of rollouts about to be dispatched.

    ``records`` are the rows ready for dispatch, attempt suffixes assigned; rows without any id
    are skipped.

    Raises:
        ValueError: a row carries a malformed id; nothing was removed.
    """
    found = [rollout_id_of(record) for record in records]
    rollout_ids = [rollout_id for rollout_id in found if rollout_id is not None]
    for root in token_capture_dirs:
        store = _file_store(root)
        # All at once, then waited for: on an event loop too, they are gone when this returns.
        for deletion in [store.delete(rollout_id) for rollout_id in rollout_ids]:
            deletion.result()


def token_id_capture_dirs_from_config(global_config_dict: Any) -> list[Path]:
    """The directory of the enabled file store, or an empty list."""
    from capture_server.config import token_id_capture_config

    config = token_id_capture_config(global_config_dict)
    directory = config.resolved_dir() if config.enabled else None
    return [] if directory is None else [directory]


def _file_store(root: Path) -> TokenCaptureStore:
    # Only this form of delivery needs a store; frameworks with their own source do not.
    from capture_server.stores.file import TokenCaptureStore

    return TokenCaptureStore(root)
