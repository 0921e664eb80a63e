"""The answers of ``R/trajectories``: a build of a frozen snapshot, as JSON bytes.

Pure and synchronous; the caller runs it in a thread. Token arrays are written by orjson straight
from numpy. Source: spec 05 "Shapes", spec 04.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from capture_server.control_models import TrajectoriesRequest
from capture_server.trajectories.consumer import build_from_snapshot
from capture_server.trajectories.traces import RolloutTraces, build_traces
from middleware.protocols import TokenCaptureSnapshot


def build_trajectories(snapshot: TokenCaptureSnapshot, asked: TrajectoriesRequest) -> bytes:
    """Build what was asked for and write it as JSON."""
    if asked.format == "traces":
        return _dumps(build_rows(snapshot, asked).to_json(arrays=True))
    return _dumps(_response(snapshot, asked))


def build_rows(snapshot: TokenCaptureSnapshot, asked: TrajectoriesRequest) -> RolloutTraces:
    """The training rows that were asked for."""
    return build_traces(
        snapshot,
        builder=asked.builder,
        fragments=asked.fragments,
        verified_response=asked.verified_response,
        explicit_terminal_call_id=asked.terminal_call_id,
        declared_response_id=asked.terminal_response_id,
    )


def _response(snapshot: TokenCaptureSnapshot, asked: TrajectoriesRequest) -> dict[str, Any]:
    built = build_from_snapshot(
        snapshot,
        builder=asked.builder,
        verified_response=asked.verified_response,
        explicit_terminal_call_id=asked.terminal_call_id,
        declared_response_id=asked.terminal_response_id,
    )
    identity = built.pop("_capture_snapshot")
    return {**built, **identity}


def _dumps(value: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(value, default=_array, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        # Content may hold what orjson refuses: integers beyond 64 bits, lone surrogates.
        return json.dumps(value, default=_list, separators=(",", ":")).encode("ascii")


def _array(value: Any) -> Any:
    return value.array  # TokenIds and LogProbs


def _list(value: Any) -> Any:
    return value.tolist()  # these, and numpy arrays
