"""The sink/resolver RPC: every answer's status, code and shape, and what it does to the store."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from capture_server.config import Settings, load_settings
from capture_server.control_routes import install_control_routes
from capture_server.store_rpc import install_store_rpc
from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.memory import MemoryCaptureStore
from capture_server.stores.registry import open_resolver
from middleware.errors import StoreUnavailableError
from middleware.protocols import CaptureStore
from middleware.records import TokenEntry, TokenIds, canonical_bytes, pack_entry
from tests.http.control_rig import entry, http_to, root, three_turns

INTENT = {"v": 1, "attempt": "t1", "request_digest": "d", "created_at": 5.0}
RPC_ROUTES = [
    ("PUT", root("r1", "intents/c1"), INTENT),
    ("DELETE", root("r1", "intents/c1"), None),
    ("PUT", root("r1", "entries/c1"), {"v": 1, "entries": []}),
    ("PATCH", root("r1", "entries/c1"), {"v": 1, "notes": {"delivered": True}}),
    ("POST", root("r1", "incomplete"), {"v": 1}),
    ("POST", root("r1", "fence"), None),
    ("POST", root("r1", "resolve"), {"v": 1, "by": "model_call_id", "model_call_id": "c1"}),
]


def application(store: CaptureStore, settings: Settings | None = None) -> FastAPI:
    """The control side with the RPC, as the sidecar wires it."""
    chosen = settings or load_settings(freeze_grace_s=0.05)
    app = FastAPI(redirect_slashes=False)
    install_store_rpc(app, store, open_resolver("", store), chosen)
    install_control_routes(app, store, chosen)
    return app


@pytest.fixture(params=["memory", "file"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[CaptureStore]:
    made: CaptureStore = (
        MemoryCaptureStore() if request.param == "memory" else TokenCaptureStore(tmp_path / "s")
    )
    yield made
    await made.close()


@pytest.fixture
async def http(store: CaptureStore) -> AsyncIterator[httpx.AsyncClient]:
    async with http_to(application(store)) as client:
        yield client


def records(*entries: TokenEntry) -> dict[str, Any]:
    return {"v": 1, "entries": [pack_entry(one) for one in entries]}


def error_of(answer: httpx.Response, status: int, code: str) -> str:
    """Check the one error shape; the message."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    return str(error["message"])


def refused_record(answer: httpx.Response) -> None:
    """Nothing was stored, and the answer says what the record lacks."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["stored"], body["error"]["code"]) == (False, "invalid_record")
    assert len(body["error"]["message"]) > 10


# --- intents -----------------------------------------------------------------------------------


async def test_the_life_of_a_call(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """Intent, record, note, freeze: what a local store would hold."""
    only = entry("r1", "c1", [1, 2], [3])
    opened = await http.put(root("r1", "intents/c1"), json=INTENT)
    durable = await http.put(root("r1", "intents/c1?durable=true"), json=INTENT)
    stored = await http.put(root("r1", "entries/c1"), json=records(only))
    notes = {"delivered": True, "sink_ms": 2}
    noted = await http.patch(root("r1", "entries/c1"), json={"v": 1, "notes": notes})
    frozen = await http.post(root("r1", "freeze"))
    snapshot = await store.snapshot("r1")

    assert opened.json()["first_call"] is True
    assert durable.json() == {"first_call": True, "durable": True}
    assert (stored.json(), noted.json()) == ({"stored": True}, {"noted": True})
    assert frozen.json()["incomplete"] is False
    assert [canonical_bytes(one) for one in snapshot.entries] == [canonical_bytes(only)]
    assert (snapshot.entries[0].timings or {}).get("sink_ms") == 2.0


async def test_an_intent_is_refused_with_its_code(http: httpx.AsyncClient) -> None:
    """Before compute is spent: taken id, fence, freeze, tombstone."""
    await http.put(root("r1", "intents/c1"), json=INTENT)
    other = {**INTENT, "attempt": "t2"}
    error_of(await http.put(root("r1", "intents/c1"), json=other), 409, "call_id_conflict")
    fence = await http.post(root("r1", "fence"))
    assert fence.json() == {"open_intents": ["c1"]}
    error_of(await http.put(root("r1", "intents/c2"), json=INTENT), 409, "rollout_frozen")
    frozen = (await http.post(root("r1", "freeze"))).json()
    error_of(await http.put(root("r1", "intents/c1"), json=INTENT), 409, "rollout_frozen")
    named = {key: frozen[key] for key in ("snapshot_id", "version")}
    assert (await http.post(root("r1", "retire"), json=named)).status_code == 200
    error_of(await http.put(root("r1", "intents/c3"), json=INTENT), 410, "rollout_retired")
    error_of(await http.post(root("r1", "fence")), 410, "rollout_retired")


async def test_an_intent_can_be_cancelled(http: httpx.AsyncClient) -> None:
    """Any number of times, known or not."""
    await http.put(root("r1", "intents/c1"), json=INTENT)
    for call in ("c1", "c1", "never-begun"):
        answer = await http.delete(root("r1", f"intents/{call}?reason=no%20room"))
        assert answer.json() == {"cancelled": True}

    assert (await http.post(root("r1", "freeze"))).json()["incomplete"] is False


# --- records -----------------------------------------------------------------------------------


async def test_records_may_be_plain_or_packed(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """The same record in either form is the same payload; choices come together."""
    only = entry("r1", "c1", [1, 2**40], [3], note=2**80, text="\ud800")
    plain = {"v": 1, "entries": [only.model_dump(mode="json")]}
    for body in (plain, records(only)):
        content = json.dumps(body)  # httpx's own does not take what JSON does
        assert (await http.put(root("r1", "entries/c1"), content=content)).status_code == 200
    choices = [entry("r1", f"c2.{i}", [i], [i]) for i in range(11)]
    await http.put(root("r1", "intents/c2"), json=INTENT)
    assert (await http.put(root("r1", "entries/c2"), json=records(*choices))).status_code == 200
    snapshot = await store.freeze("r1")

    assert not snapshot.incomplete
    assert {canonical_bytes(e) for e in snapshot.entries} == {
        canonical_bytes(e) for e in (only, *choices)
    }


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"v":1}',
        b'{"v":1,"entries":[]}',
        b'{"v":1,"entries":[3]}',
        b'{"v":2,"entries":[{}]}',
        b'{"v":1,"entries":[{}],"more":1}',
        b"\xff\xfe",
    ],
)
async def test_bodies_that_hold_no_records(http: httpx.AsyncClient, body: bytes) -> None:
    """400 with what is wrong; the rollout is as before."""
    error_of(await http.put(root("r1", "entries/c1"), content=body), 400, "invalid_body")

    assert (await http.get(root("r1"))).json()["state"] == "unknown"


async def test_records_that_belong_elsewhere(http: httpx.AsyncClient) -> None:
    """The path names rollout and call; the records must agree, array by array.

    The form is right, so the answer is 200 and says that nothing was stored, and why.
    """
    good = entry("r1", "c1", [1], [2])
    broken = {**pack_entry(good), "generation_log_probs": {"dtype": "<f4", "b64": "AA=="}}
    mixed = {**pack_entry(good), "prompt_token_ids": [1]}
    for form in ({}, broken, mixed):
        answer = await http.put(root("r1", "entries/c1"), json={"v": 1, "entries": [form]})
        refused_record(answer)
    for call, entries in (
        ("c1", [entry("r2", "c1", [1], [2])]),
        ("c2", [good]),
        ("c1", [good, entry("r1", "c1.1", [1], [2])]),
        ("c1", [entry("r1", "c1.x", [1], [2])]),
        ("c1", [entry("r1", "c10", [1], [2])]),
    ):
        answer = await http.put(root("r1", f"entries/{call}"), json=records(*entries))
        refused_record(answer)

    assert (await http.get(root("r1"))).json()["state"] == "unknown"


async def test_a_conflicting_record_masks(http: httpx.AsyncClient) -> None:
    """As with a local store."""
    await http.put(root("r1", "entries/c1"), json=records(entry("r1", "c1", [1], [2])))
    again = await http.put(root("r1", "entries/c1"), json=records(entry("r1", "c1", [9], [2])))

    error_of(again, 409, "call_id_conflict")
    assert (await http.get(root("r1"))).json()["incomplete"] is True


async def test_a_late_replay_needs_its_open_intent(http: httpx.AsyncClient) -> None:
    """``if_open``: nothing stray gets into a rollout that has moved on."""
    body = records(entry("r1", "c1", [1], [2]))
    path = root("r1", "entries/c1?if_open=true")
    assert (await http.put(path, json=body)).json() == {"stored": False}
    assert (await http.get(root("r1"))).json()["state"] == "unknown"
    await http.put(root("r1", "intents/c1"), json=INTENT)
    assert (await http.put(path, json=body)).json() == {"stored": True}
    assert (await http.put(path, json=body)).json() == {"stored": True}  # compared: the same
    await http.post(root("r1", "freeze"))
    late = records(entry("r1", "c2", [1], [2]))
    error_of(
        await http.put(root("r1", "entries/c2?if_open=true"), json=late), 409, "rollout_frozen"
    )


async def test_a_record_may_be_larger_than_a_control_body(
    store: CaptureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is that of decoded request bodies; it is a limit."""
    monkeypatch.setattr("capture_server.guarded_route.MAX_CONTROL_BODY_BYTES", 1000)
    app = application(store, load_settings(max_decoded_body_bytes=50_000))
    async with http_to(app) as http:
        fits = entry("r1", "c1", range(5000), [2])
        large = entry("r1", "c2", range(50_000), [2])
        assert (await http.put(root("r1", "entries/c1"), json=records(fits))).status_code == 200
        answer = await http.put(root("r1", "entries/c2"), json=records(large))
        error_of(answer, 413, "body_too_large")


# --- marks and questions -----------------------------------------------------------------------


async def test_marks(http: httpx.AsyncClient) -> None:
    """With and without a call, before and after the freeze."""
    body = {"v": 1, "model_call_id": "c1", "reason": "lost", "detail": "why"}
    assert (await http.post(root("r1", "incomplete"), json=body)).json() == {"incomplete": True}
    frozen = (await http.post(root("r1", "freeze"))).json()
    await http.post(root("r1", "incomplete"), json={"v": 1})
    after = (await http.get(root("r1"))).json()

    assert [(r["code"], r["model_call_id"], r["detail"]) for r in frozen["incomplete_reasons"]] == [
        ("lost", "c1", "why")
    ]
    assert after["version"] > frozen["version"]


async def test_resolving(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """By call, by response and by tokens; the parent's tokens come packed."""
    for one in three_turns("r1"):
        await store.put(one)
    whole = TokenIds.of([1, 2, 3, 4, 5])
    prompt = TokenIds.concat(whole, [7]).pack()
    answers = [
        (await http.post(root("r1", "resolve"), json={"v": 1, **question})).json()
        for question in (
            {"by": "model_call_id", "model_call_id": "c1"},
            {"by": "response_id", "response_id": "resp-c1"},
            {"by": "tokens", "prompt_token_ids": prompt, "dispatched_at": 9.0},
        )
    ]
    asked = {"v": 1, "by": "model_call_id", "model_call_id": "c1"}
    nobody = (await http.post(root("r2", "resolve"), json=asked)).json()
    first = {"v": 1, "by": "query", "query": {"is_root": True}}
    begins = (await http.post(root("r2", "resolve"), json=first)).json()

    for answer in answers:
        assert answer["status"] == "resolved"
        assert answer["match"]["model_call_id"] == "c1"
        assert TokenIds.unpack(answer["match"]["cumulative_token_ids"]) == whole
    assert nobody == {"status": "unresolved", "reason": "no_match", "match": None}
    assert begins == {"status": "root", "reason": "", "match": None}


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"by": "guess"},
        {"by": "model_call_id", "model_call_id": "c1", "response_id": "r"},
        {"by": "model_call_id", "model_call_id": "../x"},
        {"by": "query", "query": {}},
        {"by": "query", "query": {"is_root": False, "context_digests": {"1": "x"}}},
        {"by": "query", "query": {"is_root": 1}},
        {"by": "tokens", "prompt_token_ids": [1, 2]},
        {"by": "tokens", "prompt_token_ids": {"dtype": "<f4", "b64": ""}},
        {"by": "query", "query": {"is_root": True}, "messages": []},
    ],
)
async def test_questions_that_are_none(http: httpx.AsyncClient, question: dict[str, Any]) -> None:
    """400; a conversation is never taken."""
    answer = await http.post(root("r1", "resolve"), json={"v": 1, **question})

    error_of(answer, 400, "invalid_body")


async def test_tokens_that_cannot_be_read_prove_nothing(http: httpx.AsyncClient) -> None:
    """Broken base64, half an element, a negative id: unresolved, as any lookup that failed."""
    for b64 in ("?", "AAA=", "/////w=="):
        packed = {"dtype": "<i4", "b64": b64}
        asked = {"v": 1, "by": "tokens", "prompt_token_ids": packed}
        answer = (await http.post(root("r1", "resolve"), json=asked)).json()
        assert answer == {"status": "unresolved", "reason": "lookup_error", "match": None}


# --- every route -------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path", "body"), RPC_ROUTES)
async def test_every_route_needs_the_token(
    method: str, path: str, body: Any, store: CaptureStore
) -> None:
    """Missing or wrong: 401 before the body is looked at; with it: something else."""
    async with http_to(application(store, load_settings(control_token="right"))) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            answer = await http.request(method, path, headers=headers, content=b"{")
            error_of(answer, 401, "unauthorized")
        allowed = {"authorization": "Bearer right"}
        assert (await http.get(root("r1"), headers=allowed)).json()["state"] == "unknown"
        answer = await http.request(method, path, headers=allowed, json=body)

    assert answer.status_code != 401


@pytest.mark.parametrize(("method", "path", "body"), RPC_ROUTES)
async def test_ids_versions_and_slashes(
    method: str, path: str, body: Any, http: httpx.AsyncClient
) -> None:
    """Hostile ids have their code, another version is refused, a trailing slash is not."""
    hostile = path.replace("/r1/", "/.r1/")
    error_of(await http.request(method, hostile, json=body), 400, "invalid_rollout_id")
    if "/c1" in path:
        hostile = path.replace("/c1", "/%2e%2e")
        error_of(await http.request(method, hostile, json=body), 400, "invalid_call_id")
    if body is not None:
        error_of(await http.request(method, path, json={**body, "v": 2}), 400, "invalid_body")
    plain = await http.request(method, path, json=body)
    slashed = await http.request(method, f"{path}/", json=body)
    assert slashed.status_code == plain.status_code


async def test_wrong_methods(http: httpx.AsyncClient) -> None:
    """405 with what is allowed."""
    for verb, allowed in (
        ("intents/c1", "PUT, DELETE"),
        ("entries/c1", "PUT, PATCH"),
        ("resolve", "POST"),
    ):
        answer = await http.get(root("r1", verb))
        error_of(answer, 405, "method_not_allowed")
        assert answer.headers["allow"] == allowed
    error_of(await http.put(root("r1", "intents"), json=INTENT), 404, "unknown_route")


async def test_a_store_that_is_down_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Retry-After, on intents, records and questions alike."""
    store = MemoryCaptureStore()

    def down(*_: Any, **__: Any) -> Any:
        raise StoreUnavailableError("disk full: free some space")

    app = application(store)
    for name in ("open_intent", "put", "view"):
        monkeypatch.setattr(store, name, down)
    async with http_to(app) as http:
        answers = [
            await http.put(root("r1", "intents/c1"), json=INTENT),
            await http.put(root("r1", "entries/c1"), json=records(entry("r1", "c1", [1], [2]))),
            await http.post(*RPC_ROUTES[-1][1:2], json=RPC_ROUTES[-1][2]),
        ]
    for answer in answers:
        assert "disk full" in error_of(answer, 503, "capture_unavailable")
        assert answer.headers["retry-after"] == "1"


async def test_the_document_holds_the_rpc(http: httpx.AsyncClient) -> None:
    """Each route, its body, its errors in our shape; the table above is complete."""
    document = (await http.get("/openapi.json")).json()
    tagged = {
        (method.upper(), path): operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if operation["tags"] == ["store"]
    }
    shown = {
        (method, path.replace("{rollout_id}", "r1").replace("{model_call_id}", "c1"))
        for method, path in tagged
    }

    assert shown == {(method, path) for method, path, _ in RPC_ROUTES}
    for (method, path), operation in tagged.items():
        assert "422" not in operation["responses"]
        takes_body = method != "DELETE" and not path.endswith("fence")
        assert ("requestBody" in operation) == takes_body
    put = tagged["PUT", root("{rollout_id}", "entries/{model_call_id}")]
    schema = put["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["required"]) == {"v", "entries"}
