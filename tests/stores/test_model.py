"""The file store against a dictionary: any order of operations, through two stores on one root."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.filesystem import FileSystem
from middleware.errors import (
    CallIdConflictError,
    TokenCaptureError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
)
from middleware.protocols import CallIntent
from middleware.records import TokenEntry

CALLS = st.sampled_from(["a", "b", "c"])
ROLLOUTS = st.sampled_from(["r", "R"])
STORES = st.integers(0, 1)


class Unsynced(FileSystem):
    def sync(self, fd: int) -> None: ...

    def sync_directory(self, path: Path) -> None: ...


class Model:
    """What a rollout should be."""

    def __init__(self) -> None:
        self.state = "open"
        self.intents: dict[str, bool] = {}  # open?
        self.entries: dict[str, int] = {}
        self.marks: set[tuple[str, str, bool]] = set()
        self.snapshot: Any = None

    def refusal(self) -> type[TokenCaptureError] | None:
        return {"frozen": TokenCaptureFrozenError, "retired": TokenCaptureRetiredError}.get(
            self.state
        )


class StoreMachine(RuleBasedStateMachine):
    """Two stores on one root take turns; both must always agree with the model."""

    @initialize()
    def open_stores(self) -> None:
        self.root = tempfile.mkdtemp()
        self.stores = [TokenCaptureStore(self.root, fs=Unsynced(), max_threads=1) for _ in "ab"]
        self.models: dict[str, Model] = {}

    def model(self, rollout: str) -> Model:
        return self.models.setdefault(rollout, Model())

    def run(self, awaitable: Any) -> Any:
        """Drive a coroutine that only waits for the store's threads."""
        import asyncio

        return asyncio.run(awaitable)

    def expect(self, error: type[Exception] | None, awaitable: Any) -> bool:
        if error is None:
            self.run(awaitable)
            return True
        with pytest.raises(error):
            self.run(awaitable)
        return False

    @rule(which=STORES, rollout=ROLLOUTS, call=CALLS)
    def open_intent(self, which: int, rollout: str, call: str) -> None:
        model = self.model(rollout)
        error = model.refusal()
        if error is None and (call in model.intents or call in model.entries):
            error = CallIdConflictError
        intent = CallIntent(rollout_id=rollout, model_call_id=call)
        if self.expect(error, self.stores[which].open_intent(intent)):
            model.intents[call] = True

    @rule(which=STORES, rollout=ROLLOUTS, call=CALLS)
    def cancel(self, which: int, rollout: str, call: str) -> None:
        model = self.model(rollout)
        self.run(self.stores[which].cancel_call(rollout, call))
        if model.state == "open" and call in model.intents:
            model.intents[call] = False

    @rule(which=STORES, rollout=ROLLOUTS, call=CALLS, seed=st.integers(0, 1))
    def put(self, which: int, rollout: str, call: str, seed: int) -> None:
        model = self.model(rollout)
        entry = TokenEntry(
            rollout_id=rollout,
            model_call_id=call,
            prompt_token_ids=[seed],
            generation_token_ids=[1],
            generation_log_probs=[-1.0],
        )
        error = model.refusal()
        if error is None and model.entries.get(call, seed) != seed:
            error = CallIdConflictError
            model.marks.add(("call_id_conflict", call, False))
            model.intents[call] = False
        if self.expect(error, self.stores[which].put(entry)):
            model.entries[call] = seed
            model.intents[call] = False

    @rule(which=STORES, rollout=ROLLOUTS, call=CALLS)
    def mark(self, which: int, rollout: str, call: str) -> None:
        model = self.model(rollout)
        self.run(self.stores[which].mark_incomplete(rollout, call, "lost"))
        if model.state != "retired":
            model.marks.add(("lost", call, model.state == "frozen"))
            if call in model.intents:
                model.intents[call] = False

    @rule(which=STORES, rollout=ROLLOUTS)
    def freeze(self, which: int, rollout: str) -> None:
        model = self.model(rollout)
        if model.state == "retired":
            self.expect(TokenCaptureRetiredError, self.stores[which].freeze(rollout))
            return
        model.state = "frozen"
        snapshot = self.run(self.stores[which].freeze(rollout))
        seen = {e.model_call_id: int(e.prompt_token_ids[0]) for e in snapshot.entries}
        reasons = {(r.code, r.model_call_id) for r in snapshot.incomplete_reasons}
        expected = {(code, call) for code, call, _ in model.marks}
        expected |= {
            ("dangling_intent", call) for call, is_open in model.intents.items() if is_open
        }
        assert (model.entries, expected) == (seen, reasons)
        model.snapshot = snapshot

    @rule(which=STORES, rollout=ROLLOUTS, stale=st.booleans())
    def drop(self, which: int, rollout: str, stale: bool) -> None:
        model = self.model(rollout)
        if model.snapshot is None:
            return
        known, version = model.snapshot, model.snapshot.version + stale
        current = self.run(self.stores[which].status(rollout)).version
        done = self.run(
            self.stores[which].drop(rollout, snapshot_id=known.snapshot_id, version=version)
        )
        assert done == (version == current)
        if done:
            model.state = "retired"

    @rule(which=STORES, rollout=ROLLOUTS)
    def delete(self, which: int, rollout: str) -> None:
        self.run(self._delete(which, rollout))
        self.models.pop(rollout, None)

    async def _delete(self, which: int, rollout: str) -> None:
        await self.stores[which].delete(rollout)

    @rule(which=STORES)
    def reopen(self, which: int) -> None:
        self.stores[which].close_now()
        self.stores[which] = TokenCaptureStore(self.root, fs=Unsynced(), max_threads=1)

    @invariant()
    def stores_agree(self) -> None:
        for rollout in getattr(self, "models", {}):
            rows = [self.run(store.status(rollout)) for store in self.stores]
            assert rows[0] == rows[1]

    def teardown(self) -> None:
        for store in getattr(self, "stores", ()):
            store.close_now()
        shutil.rmtree(getattr(self, "root", ""), ignore_errors=True)


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestStoreMachine = StoreMachine.TestCase
