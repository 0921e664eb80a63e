"""Staging backends of a framework: a directory that several workers share, and a dictionary."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capture_server.staging.records import (
    StagedCallBaseSnapshot,
    StagedCallRecord,
    StagedCallSnapshot,
    StageResult,
    staging_key,
)


class DirectoryStaging:
    """One file per call, there completely or not at all; sink and source."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def stage(
        self, record: StagedCallRecord, *, attachments: Mapping[str, Any] | None = None
    ) -> StageResult:
        key = staging_key(record.rollout_id, record.model_call_id)
        path, data = self._path(key), record.model_dump_json().encode()
        handle, temporary = tempfile.mkstemp(dir=self._directory, prefix=".new")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # fails if there is one: no call is staged twice
        except FileExistsError:
            if path.read_bytes() != data:
                return StageResult(ok=False, error="another record of this call is staged")
        finally:
            os.unlink(temporary)
        return StageResult(ok=True, staging_key=key)

    def fetch(self, staging_keys: list[str]) -> list[StagedCallBaseSnapshot]:
        return [
            StagedCallSnapshot.model_validate(json.loads(self._path(key).read_bytes()))
            for key in staging_keys
        ]

    def _path(self, key: str) -> Path:
        return self._directory / hashlib.sha256(key.encode()).hexdigest()


class MemoryStaging:
    """The same in a dictionary; ``attachments`` are kept beside it."""

    def __init__(self) -> None:
        self.records: dict[str, StagedCallRecord] = {}
        self.attachments: dict[str, Any] = {}

    def stage(
        self, record: StagedCallRecord, *, attachments: Mapping[str, Any] | None = None
    ) -> StageResult:
        key = record.staging_key
        if self.records.setdefault(key, record) != record:
            return StageResult(ok=False, error="another record of this call is staged")
        if attachments is not None:
            self.attachments[key] = attachments
        return StageResult(ok=True, staging_key=key)

    def fetch(self, staging_keys: list[str]) -> list[StagedCallBaseSnapshot]:
        return [
            StagedCallSnapshot.model_validate(self.records[key].model_dump())
            for key in staging_keys
        ]


def memory_backend() -> tuple[MemoryStaging, MemoryStaging]:
    """For ``python -m capture_server.staging.conformance --backend``."""
    staging = MemoryStaging()
    return staging, staging
