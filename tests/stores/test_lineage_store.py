"""Resolvers over the stores: what was put can be continued, in every process, and nothing else."""

from __future__ import annotations

import pytest

from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.lineage import FileLineageStore, MemoryLineageStore
from capture_server.stores.memory import MemoryCaptureStore
from capture_server.stores.registry import open_resolver
from middleware.errors import ConfigurationError, InvalidIdError, StoreUnavailableError
from middleware.lineage import stamp_continuation
from middleware.records import ParentResolutionStatus, stamp_lineage

USER = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "more"}


@pytest.fixture
def stamped(entry):
    """Build a root record that a request can continue."""

    def build(call="c1", seed=1, text="hi", rollout="r1", **fields):
        made = entry(
            call, seed, rollout_id=rollout, output_items=[{"role": "assistant", "content": text}],
            token_item_index=0, **fields,
        )  # fmt: skip
        stamp_lineage(made, None, parent_resolution=ParentResolutionStatus.ROOT)
        return stamp_continuation(made, [USER])

    return build


def request(text="hi"):
    return [USER, {"role": "assistant", "content": text}, MORE]


@pytest.fixture
def resolver(store):
    """The resolver that belongs to the store."""
    return open_resolver("", store)


async def test_the_right_resolver_is_opened(tmp_path):
    """By the kind of store; a custom one must bring its own."""
    assert isinstance(open_resolver("x", TokenCaptureStore(tmp_path)), FileLineageStore)
    memory = open_resolver("memory:", MemoryCaptureStore())
    assert isinstance(memory, MemoryLineageStore)
    assert not memory.is_process_shared()
    with pytest.raises(ConfigurationError, match="resolve"):
        open_resolver("mine:Store", object())


async def test_put_is_visible_at_once(store, resolver, stamped):
    """Resolved after each put, whatever was looked up before."""
    assert (await resolver.resolve("r1", request())).match is None
    for index in range(3):
        await store.put(stamped(f"c{index}", index, f"answer {index}"))
        found = await resolver.resolve("r1", request(f"answer {index}"))

        assert found.match.model_call_id == f"c{index}"
        assert found.match.cumulative_token_ids == [index, 1, 2, 7, index]


async def test_asking_creates_nothing(store, resolver):
    """A lookup in an unknown rollout leaves no trace, and a bad id is refused."""
    assert (await resolver.resolve("r1", [USER])).status is ParentResolutionStatus.ROOT
    assert (await resolver.resolve("r1", request())).reason == "no_match"
    with pytest.raises(InvalidIdError):
        await resolver.resolve("../r1", request())
    assert await store.list_rollouts() == ([], None)


async def test_undelivered_sibling_falls_away(store, resolver, stamped):
    """The delivery note that came after the record decides between two equal answers."""
    await store.put(stamped("c1", 1))
    await store.put(stamped("c2", 2))
    assert (await resolver.resolve("r1", request())).reason == "ambiguous"
    await store.note_delivery("r1", "c1", {"delivered": False})
    await store.note_delivery("r1", "c2", {"delivered": True})

    assert (await resolver.resolve("r1", request())).match.model_call_id == "c2"


async def test_delivered_once_is_delivered(store, resolver, stamped):
    """A later false note does not take a true one back."""
    await store.put(stamped("c1", 1))
    await store.put(stamped("c2", 2))
    await store.note_delivery("r1", "c1", {"delivered": True})
    await store.note_delivery("r1", "c1", {"delivered": False, "sink_ms": 1.0})
    await store.note_delivery("r1", "c2", {"delivered": False})

    assert (await resolver.resolve("r1", request())).match.model_call_id == "c1"


async def test_deleted_and_retired_rollouts_are_forgotten(store, resolver, stamped):
    """A new attempt under the old id never resolves to the old one."""
    await store.put(stamped("c1", 1))
    assert (await resolver.resolve("r1", request())).match is not None
    await store.delete("r1")
    assert (await resolver.resolve("r1", request())).reason == "no_match"
    await store.put(stamped("c1", 2, "other"))
    assert (await resolver.resolve("r1", request())).reason == "no_match"
    found = await resolver.resolve("r1", request("other"))
    assert found.match.cumulative_token_ids == [2, 1, 2, 7, 2]
    snapshot = await store.freeze("r1")
    await store.drop("r1", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    assert (await resolver.resolve("r1", request("other"))).reason == "no_match"


async def test_delete_and_reuse_between_two_looks(store, resolver, stamped):
    """Even when the new journal has the old one's inode number and is longer."""
    await store.put(stamped("c1", 1))
    assert (await resolver.resolve("r1", request())).match is not None
    await store.delete("r1")
    for index in range(3):
        await store.put(stamped(f"c{index}", index, f"new {index}"))

    assert (await resolver.resolve("r1", request())).reason == "no_match"
    assert (await resolver.resolve("r1", request("new 0"))).match.model_call_id == "c0"


async def test_other_process_sees_it(file_store, stamped):
    """A resolver over the same root, with a store of another process writing."""
    resolver = FileLineageStore(file_store.root)
    assert resolver.is_process_shared()
    await file_store.put(stamped())
    assert (await resolver.resolve("r1", request())).match.model_call_id == "c1"


async def test_rebuilt_journal_is_read_anew(faulty_store, fs, stamped):
    """After a failed sync the lines stand in another file, at other offsets."""
    resolver = FileLineageStore(faulty_store.root, max_cached_tokens=0)
    await faulty_store.put(stamped("c1", 1))
    assert (await resolver.resolve("r1", request())).match is not None
    with faulty_store.path_for("r1").open("ab") as journal:
        journal.write(b"torn")
    fs.fail("sync")
    with pytest.raises(StoreUnavailableError):
        await faulty_store.put(stamped("c2", 2, "two"))
    await faulty_store.put(stamped("c2", 2, "two"))

    for text, seed in (("hi", 1), ("two", 2)):
        found = await resolver.resolve("r1", request(text))
        assert found.match.cumulative_token_ids == [seed, 1, 2, 7, seed]


async def test_torn_and_damaged_lines_are_no_candidates(file_store, stamped):
    """A torn tail is ignored until it is whole; a damaged record proves nothing."""
    resolver = FileLineageStore(file_store.root)
    await file_store.put(stamped("c1", 1, "one"))
    await file_store.put(stamped("c2", 2, "two"))
    path = file_store.path_for("r1")
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:-30])
    assert (await resolver.resolve("r1", request("two"))).reason == "no_match"
    path.write_bytes(whole)
    assert (await resolver.resolve("r1", request("two"))).match.model_call_id == "c2"
    lines[1] = lines[1].replace(b"c1", b"cX", 1)
    path.write_bytes(b"".join(lines))
    fresh = FileLineageStore(file_store.root)
    assert (await fresh.resolve("r1", request("one"))).reason == "no_match"
    assert (await fresh.resolve("r1", request("two"))).match.model_call_id == "c2"


async def test_only_what_is_new_is_read(tmp_path, fs, stamped):
    """A look costs what was appended since, not the whole journal."""
    store = TokenCaptureStore(tmp_path)
    resolver = FileLineageStore(tmp_path, fs=fs)
    for index in range(50):
        await store.put(stamped(f"c{index}", index, f"a{index}", note="x" * 500))
    sizes: list[int] = []
    original = fs.read

    def read(fd, offset, length):
        data = original(fd, offset, length)
        sizes.append(len(data))
        return data

    fs.read = read
    await resolver.resolve("r1", request("a1"))
    first, sizes[:] = sum(sizes), []
    await store.put(stamped("c50", 50, "a50"))
    await resolver.resolve("r1", request("none"))
    await store.close()

    assert sum(sizes) < first / 10
