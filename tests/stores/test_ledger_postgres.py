"""The ledger over PostgreSQL when answers are lost: a row is there once, or its call is masked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from capture_server.staging.ledger import StoreLedger
from capture_server.stores.postgres import PostgresCaptureStore
from middleware.errors import StoreUnavailableError
from tests.stores.dropping_proxy import dropping_proxy
from tests.stores.test_ledger import calls, commit, conversation, failures


@pytest.fixture
async def through_proxy(database: str):
    """A store whose answers can be lost, and the proxy that loses them."""
    with dropping_proxy(database) as proxy:
        store = PostgresCaptureStore(proxy.url)
        yield store, proxy
        await store.close()


@pytest.mark.parametrize("times", [1, 3])
async def test_a_row_whose_answer_was_lost_is_stored_once(
    through_proxy: Any, database: str, times: int
) -> None:
    """Sent again as the write-once row that it is; visible to others when acknowledged."""
    store, proxy = through_proxy
    ledger = StoreLedger(store)
    await ledger.record(commit("a"))
    proxy.drop(times)
    await ledger.record(commit("b", "a"))
    assert proxy.dropped == times
    other = PostgresCaptureStore(database)
    assert await calls(StoreLedger(other)) == ["a", "b"]
    assert (await StoreLedger(other).resolve("r1", conversation("a", "b"))).match is not None
    assert await failures(StoreLedger(other)) == []
    await other.close()


async def test_concurrent_rows_over_a_bad_line(through_proxy: Any) -> None:
    """Many rows and failures, answers lost in between: each once."""
    store, proxy = through_proxy
    ledger = StoreLedger(store)
    proxy.drop(4)
    await asyncio.gather(
        *(ledger.record(commit(f"c{number}")) for number in range(20)),
        *(
            ledger.record_failure("r1", f"f{number}", "worker_capture_failed")
            for number in range(5)
        ),
    )
    assert sorted(await calls(ledger)) == sorted(f"c{number}" for number in range(20))
    assert sorted(await failures(ledger)) == [
        (f"f{number}", "worker_capture_failed") for number in range(5)
    ]


async def test_a_row_that_never_gets_through_masks_its_call(database: str) -> None:
    """The database is away for longer than we retry: an error, and the mark is owed."""
    with dropping_proxy(database) as proxy:
        store = PostgresCaptureStore(proxy.url, retry_for_s=0.3)
        ledger = StoreLedger(store)
        await ledger.record(commit("a"))
        proxy.drop(10_000)
        with pytest.raises(StoreUnavailableError):
            await ledger.record(commit("b", "a"))
        proxy.drop(0)
        assert await store.healthy() is None
        assert ("b", "store_failure") in await failures(ledger)
        await store.close()
