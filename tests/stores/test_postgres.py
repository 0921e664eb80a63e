"""The PostgreSQL store beyond the common contract: schema, URLs, errors, rows, other writers."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_server.conformance import run_conformance
from capture_server.stores.fold import entry_record
from capture_server.stores.journal import Entry, Intent
from capture_server.stores.migrate import Migration, migrate, migrations
from capture_server.stores.postgres import PostgresCaptureStore
from capture_server.stores.postgres_connections import PostgresTarget
from capture_server.stores.postgres_records import entry_of, read_record, row_of
from capture_server.stores.registry import open_resolver, open_store
from capture_server.stores.views import slim_packed
from middleware.errors import (
    ConfigurationError,
    StoreClosedError,
    StoreError,
    StoreUnavailableError,
    TokenCaptureFrozenError,
)
from middleware.records import TokenEntry, canonical_bytes, payload_digest
from tests.stores.postgres_server import empty_database, query


@pytest.fixture
async def stores(database):
    """Two stores on one database, as two nodes have them."""
    pair = [PostgresCaptureStore(database), PostgresCaptureStore(database)]
    yield pair
    for store in pair:
        await store.close()


# --- schema ------------------------------------------------------------------------------------


@pytest.fixture
def empty(server_url):
    """A database without tables."""
    with empty_database(server_url, "token_capture_empty") as url:
        yield url


def test_migrating_twice_does_nothing(empty):
    """All files once, in order; then none."""
    applied = migrate(empty)

    assert applied == migrations()
    assert [m.version for m in applied] == list(range(1, len(applied) + 1))
    assert migrate(empty) == []


def test_stores_refuse_a_schema_that_is_not_theirs(empty):
    """Missing, older and newer are told apart, each with its remedy."""
    with pytest.raises(ConfigurationError, match=r"no tables.*run: token-capture migrate"):
        open_store(empty)
    migrate(empty)
    query(empty, "UPDATE token_capture_migrations SET version = 99 WHERE version = 1")
    for attempt in (open_store, migrate):
        with pytest.raises(ConfigurationError, match=r"version 99.*upgrade"):
            attempt(empty)
    query(empty, "UPDATE token_capture_migrations SET version = 0")
    with pytest.raises(ConfigurationError, match="run: token-capture migrate"):
        open_store(empty)


def test_a_failing_migration_changes_nothing(empty, monkeypatch):
    """Each run is one transaction."""
    broken = Migration(2, "broken", "CREATE TABLE half (a int); SELECT 1/0")
    known = [*migrations(), broken]
    monkeypatch.setattr("capture_server.stores.migrate.migrations", lambda: known)
    with pytest.raises(StoreError, match="division by zero"):
        migrate(empty)

    tables = query(empty, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
    assert tables == [(0,)]


async def test_every_key_starts_with_the_rollout(database):
    """What makes the tables distributable: no constraint and no index across rollouts."""
    indexes = query(
        database,
        "SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid "
        "AND a.attnum = i.indkey[0] WHERE i.indrelid IN "
        "('token_capture_rollouts'::regclass, 'token_capture_records'::regclass)",
    )
    others = query(
        database,
        "SELECT count(*) FROM pg_constraint WHERE contype NOT IN ('p', 'n') AND conrelid IN "
        "('token_capture_rollouts'::regclass, 'token_capture_records'::regclass)",
    )
    sequences = query(database, "SELECT count(*) FROM pg_sequences")

    assert len(indexes) == 3
    assert {name for (name,) in indexes} == {"rollout_id"}
    assert others == sequences == [(0,)]


def test_migrate_command(empty, monkeypatch):
    """The URL comes from the settings; a password on the command line is refused."""

    def run(*arguments):
        command = [sys.executable, "-m", "capture_server.cli", "migrate", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=50)

    monkeypatch.setenv("TOKEN_CAPTURE_STORE", empty)
    first, second = run(), run("--json")
    assert (first.returncode, first.stdout) == (0, "applied 1: rollouts and records\n")
    assert second.stdout == '{"applied": []}\n'
    refused = run("--store", "postgresql://u:sesame@h/db")
    assert refused.returncode == 2
    assert "sesame" not in refused.stderr
    assert run("--store", "memory:").returncode == 2


# --- URLs and errors ---------------------------------------------------------------------------


def test_the_password_is_shown_nowhere():
    """Neither in representations nor in errors, whatever the URL looks like."""
    url = "postgresql://user:s%40same@db.example:6432/tc?sslmode=require&max_connections=3"
    target = PostgresTarget(url)

    assert target.max_connections == 3
    assert repr(PostgresCaptureStore(url)) == "PostgresCaptureStore('db.example:6432/tc')"
    assert "s@same" in target._conninfo
    assert "sslmode=require" in target._conninfo
    for wrong in (
        "postgresql://u:x@sesame@h/db",
        "postgresql://u:x/sesame@h/db",
        "postgresql://u:sesame#x@h/db",
        "postgresql://u:x@h/db?sesame=1",
        "postgresql://u:sesame?x@h/db",
        "postgresql://u@h:sesame/db",
    ):
        with pytest.raises(ConfigurationError) as caught:
            PostgresTarget(wrong)
        assert "sesame" not in str(caught.value)
        assert caught.value.__cause__ is None
    with pytest.raises(ConfigurationError, match="max_connections"):
        PostgresTarget("postgresql://h/db?max_connections=0")


async def test_a_server_that_is_not_there(entry, caplog):
    """Typed, with the reason and without the password; the rollout is owed its mark."""
    store = PostgresCaptureStore("postgresql://u:sesame@127.0.0.1:1/db", retry_for_s=0.1)
    with pytest.raises(StoreUnavailableError, match="refused") as caught:
        await store.put(entry())
    with pytest.raises(StoreUnavailableError):
        await store.mark_incomplete("r1", "c1")

    assert "refused" in (await store.healthy() or "")
    assert store.statistics().unsaved_marks == 2
    await store.close()
    assert "sesame" not in caplog.text + str(caught.value) + repr(caught.value.__cause__)
    with pytest.raises(StoreClosedError):
        await store.put(entry())
    with pytest.raises(StoreUnavailableError):
        open_store("postgresql://u:sesame@127.0.0.1:1/db")


async def test_missing_tables_are_named(empty, entry):
    """Not a driver's error: ours, with the remedy, and at once."""
    store = PostgresCaptureStore(empty)
    with pytest.raises(StoreError, match="token-capture migrate"):
        await store.put(entry())
    assert "migrate" in (await store.healthy() or "")
    await store.close()


async def test_registry_opens_store_and_resolver(database):
    """By URL; the resolver uses the store's connections and sees what every process put."""
    store = open_store(database)
    resolver = open_resolver(database, store)

    assert isinstance(store, PostgresCaptureStore)
    assert store.is_process_shared()
    assert resolver.is_process_shared()
    await store.close()


async def test_postgres_store_conforms(database):
    """The public kit, every handle a store of its own."""
    owner = PostgresCaptureStore(database)
    passed = await run_conformance(
        lambda: PostgresCaptureStore(database),
        lambda: PostgresCaptureStore(database),
        owner.open_resolver,
    )
    await owner.close()

    assert {"late_put", "similar_ids", "lineage", "delta_round_trip", "first_calls"} <= set(passed)


async def test_commits_wait_for_the_disk_whatever_the_database_says(database, entry):
    """A database set to lose recent commits in a crash is overruled, except for notes."""
    name = query(database, "SELECT current_database()")[0][0]
    query(database, f'ALTER DATABASE "{name}" SET synchronous_commit = off')
    query(
        database,
        b"CREATE TABLE seen AS SELECT 0 AS pos, '' AS setting WHERE false; "
        b"CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO seen "
        b"VALUES (NEW.pos, current_setting('synchronous_commit')); RETURN NEW; END $$; "
        b"CREATE TRIGGER see BEFORE INSERT ON token_capture_records FOR EACH ROW "
        b"EXECUTE FUNCTION see()",
    )
    store = PostgresCaptureStore(database)
    try:
        await store.put(entry())
        await store.note_delivery("r1", "c1", {"delivered": True})
        await store.freeze("r1")
        seen = query(database, "SELECT pos, setting FROM seen ORDER BY pos")
    finally:
        await store.close()
        query(database, f'ALTER DATABASE "{name}" RESET synchronous_commit')
        query(database, b"DROP FUNCTION see CASCADE; DROP TABLE seen")

    assert seen == [(0, "on"), (1, "off"), (2, "on")]


# --- rows --------------------------------------------------------------------------------------

_IDS = st.lists(st.integers(0, 2**64 - 1), max_size=5)


@given(prompt=_IDS, generated=_IDS, extra=st.one_of(st.none(), st.text(), st.integers()))
def test_rows_give_the_record_back(prompt, generated, extra):
    """Equal records, equal canonical bytes, whatever width the ids need."""
    entry = TokenEntry.model_validate(
        {
            "rollout_id": "r",
            "model_call_id": "c",
            "prompt_token_ids": prompt,
            "generation_token_ids": generated,
            "generation_log_probs": [-0.1 * i for i in range(len(generated))],
            "extra": extra,
        }
    )
    record = entry_record(
        entry, payload=payload_digest(entry), closes="c", packed=slim_packed(entry)
    )
    line, arrays = row_of(record)
    back = read_record(line, arrays)

    assert isinstance(back, Entry)
    assert back == record
    assert canonical_bytes(entry_of(back, {})) == canonical_bytes(entry)


def test_rows_that_do_not_fit_are_errors(entry):
    """Arrays of another length, a damaged line."""
    made = entry()
    line, arrays = row_of(entry_record(made, payload="p", closes="c1", packed=slim_packed(made)))
    assert arrays is not None
    with pytest.raises(StoreError, match="length"):
        read_record(line, arrays + b"x")
    assert read_record(line.replace(b"c1", b"cX", 1), arrays) is None
    assert row_of(Intent(call="c1"))[1] is None


async def test_tokens_are_stored_as_plain_bytes(stores, database, entry):
    """Four bytes an id, four a log-prob that fits."""
    await stores[0].put(entry(prompt_token_ids=[1] * 1000))
    sizes = query(database, "SELECT length(arrays) FROM token_capture_records")

    assert sizes == [(4 * 1000 + 2 * 4 + 2 * 4,)]


async def test_a_damaged_record_masks_its_rollout_only(stores, database, entry, caplog):
    """Reported with its position by every process that reads it; others live on."""
    for call in ("c1", "c2"):
        await stores[0].put(entry(call))
    await stores[0].put(entry("c1", rollout_id="r2"))
    query(
        database,
        "UPDATE token_capture_records SET line = set_byte(line, 3, 0) "
        "WHERE rollout_id = 'r1' AND pos = 0",
    )
    with caplog.at_level(logging.ERROR):
        snapshot = await stores[1].freeze("r1")

    assert [(r.code, r.detail) for r in snapshot.incomplete_reasons] == [
        ("corrupt_journal", "the record at position 0 is damaged")
    ]
    assert [e.model_call_id for e in snapshot.entries] == ["c2"]
    assert "record_corrupt" in {getattr(r, "action", "") for r in caplog.records}
    assert not (await stores[1].freeze("r2")).incomplete


# --- other writers -----------------------------------------------------------------------------


async def test_what_others_append_is_taken_in(stores, entry, intent):
    """Two stores take turns; each decides on what the other did."""
    one, two = stores
    await one.put(entry("c1"))
    await two.put(entry("c2"))
    await one.put(entry("c2"))  # the same payload: no-op, although never read here before
    assert list(await two.fence("r1")) == []
    with pytest.raises(TokenCaptureFrozenError):
        await one.open_intent(intent("c3"))
    frozen = await one.freeze("r1")
    with pytest.raises(TokenCaptureFrozenError):
        await two.put(entry("c3"))

    assert [e.model_call_id for e in frozen.entries] == ["c1", "c2"]
    assert await two.drop("r1", snapshot_id=frozen.snapshot_id, version=frozen.version)
    assert (await one.status("r1")).state == "retired"


async def test_an_id_that_was_deleted_elsewhere_is_new(stores, entry):
    """Equal lengths do not fool anybody: the head names the history."""
    one, two = stores
    await one.put(entry("c1", seed=1))
    await two.delete("r1")
    await two.put(entry("c1", seed=2))
    await one.put(entry("c2"))
    snapshot = await one.freeze("r1")

    assert [e.prompt_token_ids[0] for e in snapshot.entries] == [2, 0]
    assert not snapshot.incomplete


async def test_a_failover_that_lost_the_end_is_noticed(stores, database, entry):
    """A standby without the last commits: what it has counts, and nothing is folded twice."""
    one, two = stores
    for call in ("c1", "c2"):
        await one.put(entry(call))
    await two.status("r1")
    token = query(database, "SELECT token FROM token_capture_records WHERE pos = 0")[0][0]
    query(database, "DELETE FROM token_capture_records WHERE pos = 1")
    query(database, "UPDATE token_capture_rollouts SET head = %s", [token])
    await one.put(entry("c3", seed=3))
    await two.put(entry("c2", seed=9))
    snapshot = await two.freeze("r1")

    assert [e.model_call_id for e in snapshot.entries] == ["c1", "c3", "c2"]
    assert snapshot == await one.freeze("r1")
    assert not snapshot.incomplete


async def test_evicted_states_are_read_again(database, entry):
    """A bound on known rollouts bounds memory, not knowledge."""
    store = PostgresCaptureStore(database, max_cached=2)
    for call in ("c1", "c2", "c3"):
        for rollout in "abcd":
            await store.put(entry(call, rollout_id=rollout))

    assert [(await store.status(r)).calls for r in "abcd"] == [3, 3, 3, 3]
    assert len(store._committer._histories) == 2
    await store.close()


async def test_a_forked_child_is_refused(database, entry):
    """Connections are not inherited: the child is told at once."""
    store = PostgresCaptureStore(database)
    store._committer._pid += 1
    with pytest.raises(StoreError, match="fork"):
        await store.put(entry())
    await store.close()


async def test_batch_forms(stores, entry):
    """``retire_many`` and ``delete_many`` answer per rollout."""
    store = stores[0]
    for rollout in ("a", "b"):
        await store.put(entry(rollout_id=rollout))
    frozen = await store.freeze("a")
    done = await store.retire_many({"a": (frozen.snapshot_id, frozen.version), "b": ("x", 1)})

    assert done == {"a": True, "b": False}
    assert await store.delete_many(["a", "b", "c"]) == {"a": True, "b": True, "c": False}


async def test_sweep_spares_what_was_used_again(stores, entry):
    """Only tombstones of that age go, whoever made them."""
    one, two = stores
    frozen = await one.freeze("done")
    await one.drop("done", snapshot_id=frozen.snapshot_id, version=frozen.version)
    assert await two.sweep_retired(3600) == 0
    assert await two.sweep_retired(-1) == 1
    await two.put(entry(rollout_id="done"))

    assert await one.sweep_retired(-1) == 0
    assert (await one.status("done")).calls == 1
