"""Builders: staged calls, their rows and receipts, made by the worker library itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capture_server.staging.capture import RolloutTokenCapture
from capture_server.staging.records import (
    CallRecord,
    CaptureAdmission,
    CommitCoords,
    RolloutReceipt,
    StagedCallBaseSnapshot,
)
from tests.e2e.staging_backend import MemoryStaging


class Chain:
    """Stages calls one after the other; each new one continues ``parent`` (None: a root)."""

    def __init__(self, rollout_id: str = "r") -> None:
        self.rollout_id = rollout_id
        self.staging = MemoryStaging()
        self.weight_version = 1
        self.capture = RolloutTokenCapture(
            sink=self.staging, weight_version_fn=lambda: self.weight_version
        )
        self.coords: dict[str, CommitCoords] = {}
        self.tokens: dict[str, list[int]] = {}
        self.keys: dict[str, list[str]] = {}

    def admission(self, call_id: str, parent: str | None) -> CaptureAdmission:
        if parent is None:
            return CaptureAdmission(rollout_id=self.rollout_id, model_call_id=call_id, mode="text")
        return CaptureAdmission(
            rollout_id=self.rollout_id,
            model_call_id=call_id,
            parent_call_id=parent,
            prev_len=len(self.tokens[parent]),
            mode="token_in",
            staging_chain=self.keys[parent],
            parent_chain_hash=self.coords[parent].chain_hash,
        )

    def add(
        self,
        call_id: str,
        carried: Sequence[int],
        generated: Sequence[int],
        *,
        parent: str | None = None,
        extras: dict[str, Any] | None = None,
    ) -> CommitCoords:
        prefix = self.tokens.get(parent or "", [])
        call = self.capture.begin_call(
            self.admission(call_id, parent), prefix_token_ids=prefix or None
        )
        coords = self.capture.complete_call(
            call,
            prompt_token_ids=[*prefix, *carried],
            generated_token_ids=list(generated),
            generated_logprobs=[-0.5 - i for i in range(len(generated))],
            extras=extras,
        )
        self.coords[call_id] = coords
        self.tokens[call_id] = [*prefix, *carried, *generated]
        self.keys[call_id] = [*self.keys.get(parent or "", []), str(coords.staging_key)]
        return coords

    def row(self, call_id: str, **more: Any) -> CallRecord:
        coords = self.coords[call_id]
        mode = "text" if coords.parent_call_id is None else "token_in"
        shared = coords.model_dump(exclude={"rollout_id", "disposition"})
        return CallRecord(**{**shared, "mode": mode, "response_id": f"resp-{call_id}", **more})

    def snapshots(self) -> list[StagedCallBaseSnapshot]:
        return self.staging.fetch([str(c.staging_key) for c in self.coords.values()])

    def receipt(self, terminal: str, **more: Any) -> RolloutReceipt:
        fields: dict[str, Any] = {
            "rollout_id": self.rollout_id,
            "terminal_model_call_id": terminal,
            "terminal_selection": "declared",
            "manifest": [self.row(call_id) for call_id in self.coords],
        }
        return RolloutReceipt(**{**fields, **more})


def three_calls() -> Chain:
    """A root, a child and a grandchild, under two weight versions."""
    chain = Chain()
    chain.add("a", [1, 2], [3], extras={"routed_experts": "nrlre1:int8:1x1x1:Bw=="})
    chain.weight_version = 2
    chain.add("b", [4], [5, 6], parent="a")
    chain.add("c", [7, 8], [9], parent="b")
    return chain
