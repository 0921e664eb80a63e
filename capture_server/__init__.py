"""What happens to captured records: custody, control over HTTP, and training rows.

The public names; everything else may move between releases. Imported lazily, so that reading one
name does not load the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from middleware._lazy import lazy_attributes
from middleware._version import __version__

if TYPE_CHECKING:
    from capture_server.app import create_app, serve
    from capture_server.client import RolloutClient, SyncRolloutClient
    from capture_server.config import Settings, load_settings
    from capture_server.conformance import ConformanceError, run_conformance
    from capture_server.stores.file import TokenCaptureStore, make_token_store
    from capture_server.stores.lineage import FileLineageStore
    from capture_server.stores.memory import MemoryCaptureStore
    from capture_server.stores.registry import open_resolver, open_store
    from capture_server.stores.remote import (
        HttpLineageResolver,
        HttpTokenSink,
        HttpTokenSource,
        RemoteCaptureStore,
    )
    from capture_server.trajectories import (
        BuildNotes,
        BuildOutput,
        Chain,
        ChainLink,
        RolloutTraces,
        TerminalAttribution,
        TraceRow,
        assert_prefix_contiguity,
        build_traces,
        finalize_rollout_token_capture,
        prefix_merging,
        project_chain_to_output_items,
        project_main_chain_response,
        resolve_terminal,
        retire_rollout_token_capture,
        run_builder,
        trajectories_for_rollout,
        trajectories_from_source,
    )

__getattr__ = lazy_attributes(
    __name__,
    {
        "BuildNotes": "capture_server.trajectories",
        "BuildOutput": "capture_server.trajectories",
        "Chain": "capture_server.trajectories",
        "ChainLink": "capture_server.trajectories",
        "ConformanceError": "capture_server.conformance",
        "FileLineageStore": "capture_server.stores.lineage",
        "HttpLineageResolver": "capture_server.stores.remote",
        "HttpTokenSink": "capture_server.stores.remote",
        "HttpTokenSource": "capture_server.stores.remote",
        "MemoryCaptureStore": "capture_server.stores.memory",
        "RolloutClient": "capture_server.client",
        "RemoteCaptureStore": "capture_server.stores.remote",
        "RolloutTraces": "capture_server.trajectories",
        "Settings": "capture_server.config",
        "SyncRolloutClient": "capture_server.client",
        "TerminalAttribution": "capture_server.trajectories",
        "TokenCaptureStore": "capture_server.stores.file",
        "TraceRow": "capture_server.trajectories",
        "assert_prefix_contiguity": "capture_server.trajectories",
        "build_traces": "capture_server.trajectories",
        "create_app": "capture_server.app",
        "finalize_rollout_token_capture": "capture_server.trajectories",
        "load_settings": "capture_server.config",
        "make_token_store": "capture_server.stores.file",
        "open_resolver": "capture_server.stores.registry",
        "open_store": "capture_server.stores.registry",
        "prefix_merging": "capture_server.trajectories",
        "project_chain_to_output_items": "capture_server.trajectories",
        "project_main_chain_response": "capture_server.trajectories",
        "resolve_terminal": "capture_server.trajectories",
        "retire_rollout_token_capture": "capture_server.trajectories",
        "run_builder": "capture_server.trajectories",
        "run_conformance": "capture_server.conformance",
        "serve": "capture_server.app",
        "trajectories_for_rollout": "capture_server.trajectories",
        "trajectories_from_source": "capture_server.trajectories",
    },
)

__all__ = [
    "BuildNotes",
    "BuildOutput",
    "Chain",
    "ChainLink",
    "ConformanceError",
    "FileLineageStore",
    "HttpLineageResolver",
    "HttpTokenSink",
    "HttpTokenSource",
    "MemoryCaptureStore",
    "RemoteCaptureStore",
    "RolloutClient",
    "RolloutTraces",
    "Settings",
    "SyncRolloutClient",
    "TerminalAttribution",
    "TokenCaptureStore",
    "TraceRow",
    "__version__",
    "assert_prefix_contiguity",
    "build_traces",
    "create_app",
    "finalize_rollout_token_capture",
    "load_settings",
    "make_token_store",
    "open_resolver",
    "open_store",
    "prefix_merging",
    "project_chain_to_output_items",
    "project_main_chain_response",
    "resolve_terminal",
    "retire_rollout_token_capture",
    "run_builder",
    "run_conformance",
    "serve",
    "trajectories_for_rollout",
    "trajectories_from_source",
]
