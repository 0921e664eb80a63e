"""``PUT R``: an id is registered once, and its budgets hold under a race."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.memory import MemoryCaptureStore
from middleware.errors import BudgetExhaustedError, TokenCaptureFrozenError
from middleware.protocols import CallIntent, CaptureStore
from tests.http.capture_rig import CHAT, HELLO, R, sidecar
from tests.http.control_rig import application, entry, http_to, record, root
from tests.http.upstream import chat, scripted_engine, whole


@pytest.fixture(params=["memory", "file"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[CaptureStore]:
    made: CaptureStore = (
        MemoryCaptureStore() if request.param == "memory" else TokenCaptureStore(tmp_path)
    )
    yield made
    await made.close()


@pytest.fixture
async def http(store: CaptureStore) -> AsyncIterator[httpx.AsyncClient]:
    async with http_to(application(store)) as client:
        yield client


def intent(call_id: str, at: float = 0.0) -> CallIntent:
    return CallIntent(rollout_id="r1", model_call_id=call_id, created_at=at)


async def test_a_registration_shows_in_status_and_listing(http: httpx.AsyncClient) -> None:
    """Budgets and labels are seen before the first call."""
    body = {"max_calls": 3, "max_generated_tokens": 9, "ttl_s": 60.0, "labels": {"task": "t7"}}
    answer = await http.put(root("r1"), json=body)
    listed = (await http.get("/ng-rollout")).json()["rollouts"]

    assert answer.status_code == 201
    status = answer.json()
    assert (status["state"], status["max_calls"], status["labels"]) == ("open", 3, {"task": "t7"})
    assert status["max_generated_tokens"] == 9
    assert time.time() < status["expires_at"] <= time.time() + 60
    assert listed == [status]


async def test_an_id_with_records_is_refused(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """Two attempts never mix: not after a call, a registration, a freeze or a retirement."""
    await record(store, [entry("r1", "c1", [1], [2])])
    assert (await http.put(root("r2"))).status_code == 201
    frozen = (await http.post(root("r3", "freeze"))).json()
    await store.drop("r3", snapshot_id=frozen["snapshot_id"], version=frozen["version"])

    for rollout_id in ("r1", "r2", "r3"):
        answer = await http.put(root(rollout_id), json={"max_calls": 1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "rollout_exists")
    await http.delete(root("r1"))
    assert (await http.put(root("r1"))).status_code == 201


@pytest.mark.parametrize(
    "body", [{"max_calls": -1}, {"max_calls": 1.5}, {"ttl_s": 0}, {"labels": {"a": 1}}, {"max": 1}]
)
async def test_nonsense_is_refused(http: httpx.AsyncClient, body: dict[str, object]) -> None:
    """A typing error must not silently mean "no limit"."""
    answer = await http.put(root("r1"), json=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_body")
    assert (await http.get(root("r1"))).json()["state"] == "unknown"


async def test_max_calls_holds_in_a_race(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """Of many calls at once exactly the budget begins; a cancelled one gives its place back."""
    await http.put(root("r1"), json={"max_calls": 3})

    begun = await asyncio.gather(
        *(store.open_intent(intent(f"c{i}")) for i in range(20)), return_exceptions=True
    )
    refused = [one for one in begun if isinstance(one, BudgetExhaustedError)]
    assert len(refused) == 17
    open_calls = (await store.status("r1")).open_intents
    await store.cancel_call("r1", open_calls[0], "nothing generated")
    await store.open_intent(intent("again"))
    with pytest.raises(BudgetExhaustedError):
        await store.open_intent(intent("over"))


async def test_max_calls_holds_over_two_processes(tmp_path: Path) -> None:
    """Stores that share a root share the budget."""
    one, other = TokenCaptureStore(tmp_path), TokenCaptureStore(tmp_path)
    async with http_to(application(one)) as http:
        await http.put(root("r1"), json={"max_calls": 5})
    begun = await asyncio.gather(
        *((one, other)[i % 2].open_intent(intent(f"c{i}")) for i in range(16)),
        return_exceptions=True,
    )
    await one.close()
    await other.close()

    assert sum(not isinstance(ticket, BaseException) for ticket in begun) == 5


async def test_generated_tokens_are_counted(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """The call after the one that used the budget up is refused."""
    await http.put(root("r1"), json={"max_generated_tokens": 2})
    await record(store, [entry("r1", "c1", [1], [2, 3])])

    with pytest.raises(BudgetExhaustedError, match="2 of its 2 generated tokens"):
        await store.open_intent(intent("c2"))


async def test_an_expired_rollout_is_frozen_incomplete(
    http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """No call begins after its time; whoever looks at it finds it frozen and masked."""
    await http.put(root("r1"), json={"ttl_s": 0.05})
    await store.open_intent(intent("c1", at=time.time() - 10))
    expires_at = (await store.status("r1")).expires_at
    assert expires_at is not None
    with pytest.raises(TokenCaptureFrozenError, match="ttl_s"):
        await store.open_intent(intent("c2", at=expires_at))
    while time.time() < expires_at:
        await asyncio.sleep(0.01)

    listed = (await http.get("/ng-rollout?state=open")).json()["rollouts"]
    status = (await http.get(root("r1"))).json()

    assert listed == []
    assert status["state"] == "frozen"
    codes = [reason["code"] for reason in status["incomplete_reasons"]]
    assert sorted(codes) == ["dangling_intent", "rollout_expired"]


async def test_a_freeze_in_time_is_not_masked(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """Only an open rollout expires."""
    await http.put(root("r1"), json={"ttl_s": 3600.0})
    await record(store, [entry("r1", "c1", [1], [2])])

    assert (await http.post(root("r1", "freeze"))).json()["incomplete"] is False


async def test_over_budget_is_429_before_compute() -> None:
    """The agent is told, and the engine is not asked."""
    async with scripted_engine([whole(chat())]) as engine, sidecar(engine.url) as car:
        await car.http.put(R, json={"max_calls": 1})
        first = await car.http.post(CHAT, json=HELLO)
        second = await car.http.post(CHAT, json=HELLO)

        assert first.status_code == 200
        assert second.status_code == 429
        assert second.json()["error"]["code"] == "rollout_budget_exhausted"
        assert len(engine.seen) == 1
        assert (await car.freeze())["incomplete"] is False
