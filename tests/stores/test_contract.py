"""The contract of ``CaptureStore``, over memory and file alike."""

from __future__ import annotations

import pytest

from capture_server.stores.file import TokenCaptureStore
from middleware.errors import (
    CallIdConflictError,
    InvalidIdError,
    InvalidInputError,
    NotFrozenError,
    StoreClosedError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
)
from middleware.protocols import CaptureStore, IncompleteReason
from middleware.records import canonical_bytes


def reasons_of(snapshot):
    return [(r.code, r.model_call_id) for r in snapshot.incomplete_reasons]


def calls_of(snapshot):
    return sorted(e.model_call_id for e in snapshot.entries)


async def retire(store, rollout="r1"):
    frozen = await store.freeze(rollout)
    assert await store.drop(rollout, snapshot_id=frozen.snapshot_id, version=frozen.version)
    return frozen


async def test_store_has_every_method_of_the_protocol(store):
    """Our stores are CaptureStores."""
    assert isinstance(store, CaptureStore)


async def test_put_keeps_the_record_exactly(store, entry):
    """What was put comes back with equal canonical bytes, unknown fields included."""
    put = entry(output_items=[{"role": "assistant", "content": "x"}], note="kept", big=[2**80])
    await store.put(put)
    snapshot = await store.freeze("r1")

    assert [canonical_bytes(put)] == [canonical_bytes(e) for e in snapshot.entries]
    assert not snapshot.incomplete


async def test_same_payload_again_is_no_op(store, entry):
    """A repeated put moves neither entries nor version."""
    await store.put(entry())
    before = await store.status("r1")
    await store.put(entry())

    assert before == await store.status("r1")


async def test_other_payload_conflicts_and_masks(store, entry):
    """The first payload is kept, the second refused, the rollout incomplete."""
    await store.put(entry(seed=1))
    with pytest.raises(CallIdConflictError):
        await store.put(entry(seed=2))
    snapshot = await store.freeze("r1")

    assert reasons_of(snapshot) == [("call_id_conflict", "c1")]
    assert list(snapshot.entries[0].prompt_token_ids) == [1, 1, 2]
    assert store.statistics().conflicts == 1


async def test_later_notes_are_no_part_of_the_payload(store, entry):
    """Two puts that differ in ``delivered`` only are the same payload."""
    await store.put(entry())
    await store.put(entry(delivered=False))

    assert not (await store.freeze("r1")).incomplete


async def test_put_after_freeze_is_refused_without_a_mark(store, entry):
    """A late record is counted; the snapshot stays what it was."""
    await store.put(entry())
    frozen = await store.freeze("r1")
    with pytest.raises(TokenCaptureFrozenError):
        await store.put(entry("late"))
    after = await store.freeze("r1")

    assert (frozen.snapshot_id, frozen.version) == (after.snapshot_id, after.version)
    assert calls_of(after) == ["c1"]
    assert not after.incomplete
    assert store.statistics().late_records == 1


async def test_everything_on_a_retired_rollout_meets_the_fence(store, entry, intent):
    """The tombstone refuses records, calls, freezes and snapshots."""
    await store.put(entry())
    await retire(store)
    for attempt in (
        store.put(entry("late")),
        store.open_intent(intent("c9")),
        store.freeze("r1"),
        store.snapshot("r1"),
        store.fence("r1"),
    ):
        with pytest.raises(TokenCaptureRetiredError):
            await attempt
    await store.mark_incomplete("r1", "c1")
    await store.cancel_call("r1", "c1")
    status = await store.status("r1")

    assert (status.state, status.calls) == ("retired", 0)


async def test_freeze_is_idempotent_and_fences_unknown_rollouts(store, entry):
    """An unknown id freezes to nothing, once."""
    first, second = await store.freeze("r1"), await store.freeze("r1")

    assert first == second
    assert list(first.entries) == []
    with pytest.raises(TokenCaptureFrozenError):
        await store.put(entry())


async def test_dangling_intent_masks_with_its_call(store, entry, intent):
    """A call without an outcome is named at freeze."""
    await store.open_intent(intent("c1"))
    await store.open_intent(intent("c2"))
    await store.put(entry("c1"))
    snapshot = await store.freeze("r1")

    assert reasons_of(snapshot) == [("dangling_intent", "c2")]


async def test_cancel_closes_an_intent_only(store, entry, intent):
    """Cancelling is for intents; a record, an unknown call and a frozen rollout do not mind."""
    await store.open_intent(intent("c1"))
    await store.cancel_call("r1", "c1", "refused")
    await store.put(entry("c2"))
    await store.cancel_call("r1", "c2")
    await store.cancel_call("r1", "c3")
    version = (await store.freeze("r1")).version
    await store.cancel_call("r1", "c1")
    snapshot = await store.snapshot("r1")

    assert (["c2"], [], version) == (calls_of(snapshot), reasons_of(snapshot), snapshot.version)


async def test_cancelling_in_an_unknown_rollout_leaves_no_trace(store):
    """Nothing comes into being by a cancel, a note or a drop."""
    await store.cancel_call("r1", "c1")
    await store.note_delivery("r1", "c1", {"delivered": True})
    dropped = await store.drop("r1", snapshot_id="s", version=0)

    assert (dropped, (await store.status("r1")).state) == (False, "unknown")
    assert await store.list_rollouts() == ([], None)


async def test_unobserved_intent_masks_unless_cancelled(store, intent):
    """A request that nobody could read is a hole of its own kind."""
    await store.open_intent(intent("c1", observed=False))
    await store.open_intent(intent("c2", observed=False))
    await store.cancel_call("r1", "c2", "404")

    assert reasons_of(await store.freeze("r1")) == [("unobserved_path", "c1")]


async def test_mark_with_a_call_settles_its_intent(store, intent):
    """A call that is known to be lost is reported once, and nobody waits for it."""
    await store.open_intent(intent("c1"))
    await store.mark_incomplete("r1", "c1", "missing_token_ids", "no ids in the answer")

    assert list(await store.fence("r1")) == []
    reasons = list((await store.freeze("r1")).incomplete_reasons)
    at = reasons[0].at
    expected = IncompleteReason(
        code="missing_token_ids", model_call_id="c1", detail="no ids in the answer", at=at
    )
    assert [expected] == reasons


async def test_mark_after_freeze_moves_the_version_once(store, entry):
    """Each new mark shows in the version; its repetition does not."""
    await store.mark_incomplete("r1", "c1")
    frozen = await store.freeze("r1")
    await store.mark_incomplete("r1", "c1")
    marked = await store.snapshot("r1")
    await store.mark_incomplete("r1", "c1")
    again = await store.snapshot("r1")

    assert frozen.version < marked.version == again.version
    assert frozen.snapshot_id == again.snapshot_id
    assert not await store.drop("r1", snapshot_id=frozen.snapshot_id, version=frozen.version)
    assert await store.drop("r1", snapshot_id=again.snapshot_id, version=again.version)


async def test_repeated_mark_is_one_reason(store):
    """A retried mark changes nothing."""
    await store.mark_incomplete("r1", "c1", "x")
    version = (await store.status("r1")).version
    await store.mark_incomplete("r1", "c1", "x", "told again")

    assert version == (await store.status("r1")).version
    assert reasons_of(await store.freeze("r1")) == [("x", "c1")]


@pytest.mark.parametrize("taken", ["intent", "entry", "cancelled", "choices"])
async def test_used_call_ids_are_refused(store, entry, intent, taken):
    """A call id is good for one call, whatever became of it."""
    if taken == "entry":
        await store.put(entry("c1"))
    elif taken == "choices":
        await store.put_choices([entry("c1.0"), entry("c1.1")], "c1")
    else:
        await store.open_intent(intent("c1"))
    if taken == "cancelled":
        await store.cancel_call("r1", "c1")
    with pytest.raises(CallIdConflictError):
        await store.open_intent(intent("c1"))


async def test_first_call_until_another_body_is_held(store, entry, intent):
    """Retries of the first body and calls after cancelled ones are first calls."""
    first = [(await store.open_intent(intent("c1", "other"))).first_call]
    await store.cancel_call("r1", "c1")
    first.append((await store.open_intent(intent("c2", "body"))).first_call)
    first.append((await store.open_intent(intent("c3", "body"))).first_call)
    await store.put(entry("c2", request_digest="body"))
    first.append((await store.open_intent(intent("c4", "body"))).first_call)
    first.append((await store.open_intent(intent("c5", "new"))).first_call)

    assert first == [True, True, True, True, False]


async def test_first_call_does_not_trust_unknown_bodies(store, intent):
    """Without a digest nobody can say that two bodies are equal."""
    first = (await store.open_intent(intent("c1"))).first_call
    second = (await store.open_intent(intent("c2"))).first_call

    assert (first, second) == (True, False)


async def test_a_record_without_an_intent_counts_as_a_held_call(store, entry, intent):
    """``put`` alone is allowed, and later calls know of it."""
    await store.put(entry("c1", request_digest="body"))

    assert not (await store.open_intent(intent("c2", "new"))).first_call


async def test_fence_refuses_calls_but_takes_records(store, entry, intent):
    """Between fence and freeze the state is open and running calls may end."""
    await store.open_intent(intent("c1"))

    assert list(await store.fence("r1")) == ["c1"]
    with pytest.raises(TokenCaptureFrozenError):
        await store.open_intent(intent("c2"))
    assert (await store.status("r1")).state == "open"
    version = (await store.status("r1")).version
    await store.put(entry("c1"))
    assert list(await store.fence("r1")) == []
    snapshot = await store.freeze("r1")
    assert (False, version + 2) == (snapshot.incomplete, snapshot.version)


async def test_fencing_a_frozen_rollout_waits_for_nothing(store, intent):
    """What was open at the freeze dangles already."""
    await store.open_intent(intent("c1"))
    frozen = await store.freeze("r1")

    assert list(await store.fence("r1")) == []
    assert await store.snapshot("r1") == frozen


async def test_choices_close_their_intent_with_the_last(store, entry, intent):
    """One intent, several records, stored as one."""
    await store.open_intent(intent("c1"))
    choices = [entry("c1.0", 1), entry("c1.1", 2)]
    await store.put_choices(choices, "c1")
    await store.put_choices(choices, "c1")
    status = await store.status("r1")

    assert (status.calls, list(status.open_intents)) == (2, [])


async def test_conflicting_choices_store_nothing(store, entry, intent):
    """Either all choices of a request are taken, or none and a mark."""
    await store.put(entry("c1.1", 9))
    with pytest.raises(CallIdConflictError):
        await store.put_choices([entry("c1.0", 1), entry("c1.1", 2)], "c1")
    with pytest.raises(CallIdConflictError):
        await store.put_choices([entry("c2.0", 1), entry("c2.0", 2)], "c2")

    assert calls_of(await store.freeze("r1")) == ["c1.1"]


async def test_choices_must_be_of_one_rollout(store, entry):
    """No choice, or choices of two rollouts, are a caller's mistake."""
    with pytest.raises(InvalidInputError):
        await store.put_choices([], "c1")
    with pytest.raises(InvalidInputError):
        await store.put_choices([entry("c1.0"), entry("c1.1", rollout_id="r2")], "c1")


async def test_notes_merge_and_true_wins(store, entry):
    """Any delivery counts as delivered; other notes: the last one."""
    await store.put(entry(timings={"ttft_ms": 1.0}))
    for notes in ({"delivered": False}, {"delivered": True, "sink_ms": 2.0}, {"delivered": False}):
        await store.note_delivery("r1", "c1", notes)
    merged = (await store.freeze("r1")).entries[0]

    assert True is merged.delivered
    assert merged.timings == {"ttft_ms": 1.0, "sink_ms": 2.0}


async def test_true_in_the_record_beats_a_false_note(store, entry):
    """The note cannot take back what the record says."""
    await store.put(entry(delivered=True))
    await store.note_delivery("r1", "c1", {"delivered": False})

    assert True is (await store.freeze("r1")).entries[0].delivered


async def test_note_of_a_request_reaches_all_its_choices(store, entry):
    """The client has one id for n choices."""
    await store.put_choices([entry("c1.0"), entry("c1.1")], "c1")
    await store.note_delivery("r1", "c1", {"delivered": True})

    assert [e.delivered for e in (await store.freeze("r1")).entries] == [True, True]


async def test_note_after_freeze_is_dropped(store, entry):
    """The snapshot does not change under a trainer's hands."""
    await store.put(entry())
    frozen = await store.freeze("r1")
    await store.note_delivery("r1", "c1", {"delivered": True})

    assert frozen == await store.snapshot("r1")


async def test_snapshot_needs_a_freeze(store, entry):
    """Reading never freezes."""
    with pytest.raises(NotFrozenError):
        await store.snapshot("r1")
    await store.put(entry())
    with pytest.raises(NotFrozenError):
        await store.snapshot("r1")
    frozen = await store.freeze("r1")
    assert frozen == await store.snapshot("r1")


async def test_drop_wants_the_exact_snapshot(store, entry):
    """Wrong id, wrong version or an open rollout: False, and nothing is gone."""
    await store.put(entry())
    assert not await store.drop("r1", snapshot_id="x", version=1)
    frozen = await store.freeze("r1")
    assert not await store.drop("r1", snapshot_id="x", version=frozen.version)
    assert not await store.drop("r1", snapshot_id=frozen.snapshot_id, version=frozen.version + 1)
    assert frozen == await store.snapshot("r1")


async def test_dropping_the_same_snapshot_again_is_true(store, entry):
    """A retried retirement succeeds; another one does not."""
    await store.put(entry())
    frozen = await retire(store)
    again = await store.drop("r1", snapshot_id=frozen.snapshot_id, version=frozen.version)
    other = await store.drop("r1", snapshot_id="x", version=frozen.version)
    status = await store.status("r1")

    assert (again, other) == (True, False)
    assert (frozen.snapshot_id, frozen.version) == (status.snapshot_id, status.version)


async def test_delete_frees_the_id(store, entry):
    """A new attempt under the old id sees nothing of the first."""
    await store.put(entry(seed=1))
    await retire(store)

    assert await store.delete("r1")
    assert not await store.delete("r1")
    assert (await store.status("r1")).state == "unknown"
    await store.put(entry(seed=2))
    assert list((await store.freeze("r1")).entries[0].prompt_token_ids) == [2, 1, 2]


async def test_sweep_removes_old_tombstones_only(store, entry):
    """Live and young rollouts stay."""
    await store.put(entry(rollout_id="live"))
    await store.put(entry(rollout_id="done"))
    await retire(store, "done")

    assert await store.sweep_retired(3600) == 0
    assert await store.sweep_retired(0) == 1
    assert (
        (await store.status("live")).state, (await store.status("done")).state,
    ) == ("open", "unknown")  # fmt: skip


async def test_status_counts_without_tokens(store, entry, intent):
    """Lengths are of full prompts, deltas included."""
    await store.open_intent(intent("c9"))
    await store.put(entry("c1", created_at=1.0, parent_resolution="root"))
    await store.put(
        entry(
            "c2", created_at=9.0, parent_resolution="resolved", parent_call_id="c1",
            prompt_is_delta=True, cum_len=12, drift_at=4,
        )
    )  # fmt: skip
    status = await store.status("r1")

    assert (status.state, status.calls, list(status.open_intents)) == ("open", 2, ["c9"])
    assert (status.prompt_tokens, status.generated_tokens) == (3 + 10, 4)
    assert status.resolutions == {"root": 1, "resolved": 1, "unresolved": 0}
    assert (
        status.drifted_calls, status.first_call_at, status.last_call_at, status.snapshot_id,
    ) == (1, 1.0, 9.0, None)  # fmt: skip
    assert list(status.drifted) == [{"model_call_id": "c2", "drift_at": 4, "parent_call_id": "c1"}]


async def test_listing_pages_in_id_order(store, entry):
    """Every rollout comes once, whatever its file is called."""
    ids = sorted(["a1", "A1", "b", "c" * 200, "B" * 200, "z.1", "z.2"])
    for rollout in ids:
        await store.put(entry(rollout_id=rollout))
    await store.freeze("z.1")
    seen, cursor = [], ""
    while cursor is not None:
        page, cursor = await store.list_rollouts(limit=3, cursor=cursor)
        seen += [row.rollout_id for row in page]

    assert ids == seen
    assert [r.rollout_id for r in (await store.list_rollouts(state="frozen"))[0]] == ["z.1"]
    assert [r.rollout_id for r in (await store.list_rollouts(prefix="z."))[0]] == ["z.1", "z.2"]
    assert await store.list_rollouts(state="retired", limit=1) == ([], None)


@pytest.mark.parametrize(
    "bad", ["", "..", "../x", "a/b", "%2e%2e", "a\x00b", "a\n", ".hidden", "é", "x" * 201, "CON "]
)
async def test_bad_ids_are_refused(store, entry, bad):
    """One rule for rollouts and calls, before anything is touched."""
    for attempt in (
        store.put(entry().model_copy(update={"rollout_id": bad})),
        store.put(entry().model_copy(update={"model_call_id": bad})),
        store.begin_call(bad, "c1"),
        store.begin_call("r1", bad),
        store.cancel_call("r1", bad),
        store.mark_incomplete(bad),
        store.freeze(bad),
        store.snapshot(bad),
        store.status(bad),
        store.drop(bad, snapshot_id="s", version=1),
    ):
        with pytest.raises(InvalidIdError):
            await attempt

    assert await store.list_rollouts() == ([], None)


async def test_similar_ids_do_not_share_records(store, entry):
    """Case, suffixes and long common prefixes keep rollouts apart."""
    ids = ["A1", "a1", "r1", "r1.tokens", "r1.jsonl", "x" * 199 + "a", "x" * 199 + "b", "con"]
    for seed, rollout in enumerate(ids):
        await store.put(entry(seed=seed, rollout_id=rollout))
    seeds = [(await store.freeze(r)).entries[0].prompt_token_ids[0] for r in ids]

    assert list(range(len(ids))) == seeds


async def test_closed_store_refuses_and_closes_again(store, entry):
    """Closing twice is fine; using it afterwards is an error of its own."""
    await store.close()
    await store.close()
    with pytest.raises(StoreClosedError):
        await store.put(entry())


async def test_healthy_store_has_no_complaint(store, entry):
    """Before and after the first write."""
    assert await store.healthy() is None
    await store.put(entry())
    assert await store.healthy() is None


async def test_snapshot_is_a_copy(store, entry):
    """Changing what was put, or what was read, changes nothing in the store."""
    put = entry(output_items=[{"role": "assistant", "content": "x"}])
    await store.put(put)
    put.output_items[0]["content"] = "y"
    (await store.freeze("r1")).entries[0].output_items[0]["content"] = "z"

    assert (await store.snapshot("r1")).entries[0].output_items[0]["content"] == "x"


def test_plain_functions_work_without_an_event_loop(tmp_path, entry):
    """The seed's blocking API gives plain results."""
    store = TokenCaptureStore(tmp_path)
    store.append(entry())
    store.append(entry("c2"))

    assert [e.model_call_id for e in store.read_entries("r1")] == ["c1", "c2"]
    assert not store.is_incomplete("r1")
    assert store.path_for("r1").exists()
    assert store.path_for("r1") == store.state_path_for("r1")
    frozen = store.freeze_now("r1")
    assert frozen == store.freeze_now("r1")
    store.delete("r1")
    assert not store.path_for("r1").exists()
    assert store.read_entries("r1") == []
    assert store.sweep_retired(0) == 0
    store.close_now()


async def test_plain_delete_on_a_running_loop_keeps_the_order(file_store, entry):
    """The seed's ``delete`` is not awaited; what follows on the rollout sees its effect."""
    await file_store.put(entry(seed=1))
    file_store.delete("r1")
    await file_store.put(entry(seed=2))

    assert list((await file_store.freeze("r1")).entries[0].prompt_token_ids) == [2, 1, 2]


async def test_batch_forms(file_store, entry):
    """``retire_many`` and ``delete_many`` answer per rollout."""
    for rollout in ("a", "b"):
        await file_store.put(entry(rollout_id=rollout))
    frozen = await file_store.freeze("a")
    done = await file_store.retire_many({"a": (frozen.snapshot_id, frozen.version), "b": ("x", 1)})

    assert done == {"a": True, "b": False}
    assert await file_store.delete_many(["a", "b", "c"]) == {"a": True, "b": True, "c": False}
