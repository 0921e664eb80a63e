"""The plain ways of doing the same, that the rows are measured against.

They are written as one would write them first, and not slower than that. None of them gives the
guarantees of the real thing.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class ListEntry(BaseModel):
    """A record whose arrays are Python lists, as pydantic validates them."""

    model_config = ConfigDict(extra="allow")

    rollout_id: str
    model_call_id: str
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]


class JsonlStore:
    """(S) Appends each record to its rollout's JSONL file, syncs it, rewrites the state file."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._state: dict[str, dict[str, Any]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def put(self, entry: ListEntry) -> None:
        """Return when the record is on disk."""
        lock = self._locks.setdefault(entry.rollout_id, asyncio.Lock())
        async with lock:
            await asyncio.to_thread(self._put, entry)

    def _put(self, entry: ListEntry) -> None:
        state = self._state.setdefault(entry.rollout_id, {"calls": {}, "incomplete": False})
        state["calls"][entry.model_call_id] = {
            "prompt_len": len(entry.prompt_token_ids),
            "generation_len": len(entry.generation_token_ids),
        }
        with (self._root / f"{entry.rollout_id}.jsonl").open("a") as file:
            file.write(entry.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary = self._root / f"{entry.rollout_id}.state.tmp"
        temporary.write_text(json.dumps(state))
        temporary.replace(self._root / f"{entry.rollout_id}.state.json")


class TrieBuilder:
    """(T) Finds each call's parent by walking a trie of dicts, one node per token."""

    def __init__(self, calls: list[ListEntry]) -> None:
        self._calls = sorted(calls, key=lambda call: len(call.prompt_token_ids))
        self._root: dict[Any, Any] = {}

    def chains(self) -> list[dict[str, list[Any]]]:
        """Per leaf: tokens, mask and log-probs of its path."""
        parents: dict[str, ListEntry | None] = {}
        for call in self._calls:
            parents[call.model_call_id] = self._insert(call)
        inner = {parent.model_call_id for parent in parents.values() if parent is not None}
        leaves = [call for call in self._calls if call.model_call_id not in inner]
        return [_laid_out(leaf, parents) for leaf in leaves]

    def _insert(self, call: ListEntry) -> ListEntry | None:
        node, parent = self._root, None
        for token in call.prompt_token_ids:
            node = node.setdefault(token, {})
            parent = node.get("call", parent)
        for token in call.generation_token_ids:
            node = node.setdefault(token, {})
        node["call"] = call
        return parent


def _laid_out(leaf: ListEntry, parents: dict[str, ListEntry | None]) -> dict[str, list[Any]]:
    path: list[ListEntry] = []
    call: ListEntry | None = leaf
    while call is not None:
        path.append(call)
        call = parents[call.model_call_id]
    tokens: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    for call in reversed(path):
        between = call.prompt_token_ids[len(tokens) :]
        tokens += between + call.generation_token_ids
        mask += [0] * len(between) + [1] * len(call.generation_token_ids)
        log_probs += [0.0] * len(between) + call.generation_log_probs
    return {"token_ids": tokens, "loss_mask": mask, "log_probs": log_probs}
