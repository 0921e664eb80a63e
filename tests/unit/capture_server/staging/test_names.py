"""The seed's public names are found where users of the seed are told to look."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

from middleware.records import extract_token_fields

NAMES = {
    "middleware.records": """
        DIGEST_VERSION LEDGER_ROW_MISSING_CHAIN_HASH_REASON
        LEDGER_ROW_MISSING_RESPONSE_ID_REASON ParentResolutionStatus
        TOKEN_ENTRY_MIN_SCHEMA_VERSION TOKEN_ENTRY_RECORD_SCHEMA_VERSION TOKEN_FIELDS
        TokenEntry UNCOMMITTED_CALL_REASON UNRESOLVED_PARENT_REASON compute_digest
        cumulative_tokens encode_token_ids extract_token_fields response_to_output_items
        stamp_lineage strip_token_fields
    """,
    "middleware.fingerprint": """
        FINGERPRINT_VERSION assistant_fingerprint canonicalize_tool_arguments
        conversation_digest
    """,
    "middleware.lineage": """
        InMemoryLineageStore IncrementalLineageStore LineageIndex
        LineageNode RolloutLineage stamp_continuation
    """,
    "middleware.protocols": """
        CaptureLedger LineageMatch LineageResolution LineageResolver TokenCaptureSnapshot
        TokenSink TokenSource install_lineage_store install_token_sink install_token_source
        installed_lineage_store installed_token_sink installed_token_source
    """,
    "middleware.capture": """
        CaptureContext NG_CAPTURE_FIELD NG_COMMIT_COORDS_FIELD UNRESOLVED_PARENT_REASON
        capture_health_snapshot capture_tokens commit_entry current_capture_context
        mark_external_staging_committed register_call_intent reset_token_sink resolve_parent
        set_token_sink
    """,
    "capture_server.conformance": """
        ConformanceError run_conformance
    """,
    "capture_server.stores.file": """
        FileLineageStore TokenCaptureStore make_token_store validate_rollout_id
    """,
    "capture_server.trajectories.builder": """
        BuildNotes BuildOutput Chain ChainLink assert_prefix_contiguity prefix_merging
        project_chain_to_output_items project_main_chain_response run_builder
    """,
    "capture_server.trajectories.consumer": """
        clear_token_captures_for_rollouts token_id_capture_dirs_from_config
        trajectories_for_rollout trajectories_from_source
    """,
    "capture_server.trajectories.delivery": """
        MASK_SAMPLE_KEY TERMINAL_CALL_KEY TERMINAL_RESPONSE_ID_KEY TOKEN_CAPTURE_KEY
        capture_build_can_retire finalize_rollout_token_capture retire_rollout_token_capture
        rollout_carries_token_ids
    """,
    "capture_server.trajectories.terminal": """
        TerminalAttribution resolve_terminal
    """,
    "capture_server.config": """
        NonGeneratingRequest TOKEN_ID_CAPTURE_BLOCK TokenIdCaptureConfig
        TokenIdCaptureSettings token_id_capture_config token_id_capture_enabled_for_agent
    """,
    "capture_server.control_routes": """
        CONTROL_ROUTE_PREFIX RolloutControlClient install_rollout_control_routes
    """,
    "capture_server.staging.external_capture": """
        ExternalCaptureHandler INVALID_COMMIT_COORDS_REASON MegatronWorkerCaptureHandler
        NG_CAPTURE_FIELD NG_COMMIT_COORDS_FIELD TOKEN_FIELDS VLLMWorkerCaptureHandler
        WORKER_CAPTURE_FAILED_REASON WORKER_MISSING_COMMIT_COORDS_REASON
        make_external_capture_handler
    """,
    "capture_server.staging.adapters.vllm": """
        MEDIA_SPANS_FIELD PREFIX_IDS_FIELD PROMPT_IDS_FIELD ROUTED_EXPERTS_FIELD
        VLLMCaptureAdapter extract_generation_token_info
    """,
    "capture_server.staging.adapters.megatron": """
        GENERATED_IDS_FIELD GENERATED_LOGPROBS_FIELD MegatronCaptureAdapter PREFIX_IDS_FIELD
        PROMPT_IDS_FIELD
    """,
    "capture_server.staging.digest": """
        EMPTY_EXTRAS_DIGEST EXTRAS_DIGEST_VERSION STAGING_DIGEST_VERSION
        STAGING_SCHEMA_VERSION build_staging_delta compute_chain_hash compute_extras_digest
        compute_staging_digest encode_token_ids hash_token_ids
    """,
    "capture_server.staging.records": """
        CallRecord CaptureAdmission CaptureLedgerCommit CommitCoords EMPTY_EXTRAS_DIGEST
        EXTRAS_DIGEST_VERSION INVALID_COMMIT_COORDS_REASON
        LEDGER_ROW_MISSING_CHAIN_HASH_REASON LEDGER_ROW_MISSING_RESPONSE_ID_REASON
        ManifestFailure RolloutManifest RolloutReceipt STAGING_DIGEST_VERSION
        STAGING_SCHEMA_VERSION StageResult StagedCallBaseSnapshot StagedCallRecord
        StagedCallSnapshot TERMINAL_AMBIGUOUS TERMINAL_DUPLICATE_CALL_ID TERMINAL_NO_RECORDS
        TERMINAL_NO_ROOT TERMINAL_ORPHANED_ROW TERMINAL_SELECTED UNCOMMITTED_CALL_REASON
        UNRESOLVED_PARENT_REASON WORKER_CAPTURE_FAILED_REASON
        WORKER_MISSING_COMMIT_COORDS_REASON staging_key
    """,
    "capture_server.staging.capture": """
        ActiveCall CaptureError CaptureHost EXTRAS_DIGEST_VERSION RolloutTokenCapture
        STAGING_DIGEST_VERSION StreamingUnsupportedError install_capture
    """,
    "capture_server.staging.protocols": """
        CaptureAdapter StagingSink StagingSource WeightVersionProvider install_capture
    """,
    "capture_server.staging.rebuild": """
        EXTRAS_DIGEST_VERSION ExtrasCommitment LinearizedRow RebuildError
        ReceiptVerificationError STAGING_DIGEST_VERSION STAGING_SCHEMA_VERSION
        WeightVersionSpan linearize verify_and_linearize
    """,
    "capture_server.staging.routes": """
        MISSING_ROUTE_SENTINEL ROUTED_EXPERTS_ENVELOPE_VERSION ROUTED_EXPERTS_MAGIC
        RoutedExpertsFragment classify_route_span decode_routed_experts
        encode_routed_experts routed_experts_token_count
    """,
    "capture_server.staging.terminal": """
        AMBIGUOUS_TERMINAL DUPLICATE_CALL_ID NO_RECORDS NO_ROOT ORPHANED_ROW SELECTED
        TERMINAL_AMBIGUOUS TERMINAL_DUPLICATE_CALL_ID TERMINAL_NO_RECORDS TERMINAL_NO_ROOT
        TERMINAL_ORPHANED_ROW TERMINAL_SELECTED TerminalSelection select_terminal_call
    """,
    "capture_server.staging.conformance": """
        assert_golden_vectors load_golden_vectors
    """,
}


@pytest.mark.parametrize("module", NAMES)
def test_every_name_is_there(module: str) -> None:
    """Importable from the module itself, and not None."""
    found = importlib.import_module(module)
    missing = [name for name in NAMES[module].split() if getattr(found, name, None) is None]
    assert missing == []


@pytest.mark.parametrize("first", ["capture_server.stores.file", "capture_server.stores.lineage"])
def test_the_file_lineage_store_is_found_in_either_order(first: str) -> None:
    """It lives in a module that imports the one where users look for it."""
    code = (
        f"import {first}; from capture_server.stores.file import FileLineageStore as one; "
        "from capture_server.stores.lineage import FileLineageStore as other; assert one is other"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_parameters_that_may_be_passed_by_name() -> None:
    """Named as the seed names them."""
    assert list(inspect.signature(extract_token_fields).parameters) == ["response_json"]
    assert extract_token_fields(response_json={}) is None
