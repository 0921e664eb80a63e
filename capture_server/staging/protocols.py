"""What a framework brings to external staging: a sink, a source, a weight version, an adapter.

All are called by the worker library or by a finalizer, synchronously. Invariant of the sink: when
``stage`` has returned ``ok``, the source finds the call under the returned key from any process,
whatever dies afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from capture_server.staging.records import StagedCallBaseSnapshot, StagedCallRecord, StageResult

__all__ = [
    "CaptureAdapter",
    "StagingSink",
    "StagingSource",
    "WeightVersionProvider",
    "install_capture",
]


@runtime_checkable
class StagingSink(Protocol):
    """Where a worker puts a call's delta."""

    def stage(
        self, record: StagedCallRecord, *, attachments: Mapping[str, Any] | None = None
    ) -> StageResult:
        """Store one call durably, then answer.

        Idempotent: the same record again is ``ok`` with the same key; another record for the
        same call is refused. ``attachments`` are the framework's own and covered by no hash.
        """


@runtime_checkable
class StagingSource(Protocol):
    """Where a finalizer, or a worker that continues a call, reads deltas."""

    def fetch(self, staging_keys: list[str]) -> list[StagedCallBaseSnapshot]:
        """The staged calls in the order of the keys, each validated; raises if one is missing."""


@runtime_checkable
class WeightVersionProvider(Protocol):
    """Tells under which weights the worker samples now."""

    def __call__(self) -> int:
        """A number that never falls, 0 or more."""


@runtime_checkable
class CaptureAdapter(Protocol):
    """Knows where one engine's payloads hold prompt ids, generation and extras.

    The extractions raise ``ValueError`` where a payload lacks what they are to read.
    """

    def enter_prefix(
        self, request_payload: dict[str, Any], prefix_ids: list[int]
    ) -> dict[str, Any]:
        """A copy of the request that makes the engine start from exactly these ids."""

    def extract_prompt_ids(self, response_payload: Any) -> list[int]:
        """The ids of the whole prompt as the engine saw it."""

    def extract_generation(self, response_payload: Any) -> tuple[list[int], list[float]]:
        """The sampled ids and their log-probs, parallel."""

    def extract_extras(self, response_payload: Any) -> dict[str, Any] | None:
        """What else is staged with the call; None: nothing."""


def install_capture(
    serving_layer: Any,
    *,
    sink: StagingSink,
    weight_version_fn: WeightVersionProvider,
    adapter: CaptureAdapter | None = None,
) -> Any:
    """See ``capture_server.staging.capture.install_capture``."""
    # Here, not above: the worker library itself is typed by these protocols.
    from capture_server.staging.capture import install_capture as install

    return install(serving_layer, sink=sink, weight_version_fn=weight_version_fn, adapter=adapter)
