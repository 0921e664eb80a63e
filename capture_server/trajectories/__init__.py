"""From a frozen snapshot to training rows: build, attribute, mask, deliver.

Pure functions over frozen entries; nothing here captures, stores or retires on its own.
"""

from capture_server.trajectories.builder import (
    BuildNotes,
    BuildOutput,
    Chain,
    ChainLink,
    assert_prefix_contiguity,
    per_request,
    prefix_merging,
    project_chain_to_output_items,
    project_main_chain_response,
    run_builder,
)
from capture_server.trajectories.consumer import (
    build_from_snapshot,
    clear_token_captures_for_rollouts,
    token_id_capture_dirs_from_config,
    trajectories_for_rollout,
    trajectories_from_source,
)
from capture_server.trajectories.delivery import (
    MASK_SAMPLE_KEY,
    TERMINAL_CALL_KEY,
    TERMINAL_RESPONSE_ID_KEY,
    TOKEN_CAPTURE_KEY,
    capture_build_can_retire,
    finalize_rollout_token_capture,
    retire_rollout_token_capture,
    rollout_carries_token_ids,
)
from capture_server.trajectories.terminal import TerminalAttribution, resolve_terminal
from capture_server.trajectories.traces import CallSpan, RolloutTraces, TraceRow, build_traces

__all__ = [
    "MASK_SAMPLE_KEY",
    "TERMINAL_CALL_KEY",
    "TERMINAL_RESPONSE_ID_KEY",
    "TOKEN_CAPTURE_KEY",
    "BuildNotes",
    "BuildOutput",
    "CallSpan",
    "Chain",
    "ChainLink",
    "RolloutTraces",
    "TerminalAttribution",
    "TraceRow",
    "assert_prefix_contiguity",
    "build_from_snapshot",
    "build_traces",
    "capture_build_can_retire",
    "clear_token_captures_for_rollouts",
    "finalize_rollout_token_capture",
    "per_request",
    "prefix_merging",
    "project_chain_to_output_items",
    "project_main_chain_response",
    "resolve_terminal",
    "retire_rollout_token_capture",
    "rollout_carries_token_ids",
    "run_builder",
    "token_id_capture_dirs_from_config",
    "trajectories_for_rollout",
    "trajectories_from_source",
]
