"""What happens to captured records: custody, control over HTTP, and training rows.

The public names; everything else may move between releases. Imported lazily, so that reading one
name does not load the server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

_HOME = {
    "create_app": "app",
    "serve": "app",
    "RolloutClient": "client",
    "SyncRolloutClient": "client",
    "Settings": "config",
    "load_settings": "config",
    "ConformanceError": "conformance",
    "run_conformance": "conformance",
    "TokenCaptureStore": "stores.file",
    "make_token_store": "stores.file",
    "FileLineageStore": "stores.lineage",
    "MemoryCaptureStore": "stores.memory",
    "open_resolver": "stores.registry",
    "open_store": "stores.registry",
}

__all__ = [
    "BuildNotes",
    "BuildOutput",
    "Chain",
    "ChainLink",
    "ConformanceError",
    "FileLineageStore",
    "MemoryCaptureStore",
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'trajectories')}"), name)
