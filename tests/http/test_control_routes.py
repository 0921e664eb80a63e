"""The control routes against both built-in stores: every answer's status, code and shape."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from capture_server.config import load_settings
from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.memory import MemoryCaptureStore
from middleware.errors import StoreUnavailableError, TokenCaptureFrozenError
from middleware.protocols import CallIntent, CaptureStore
from middleware.records import TokenEntry
from tests.http.control_rig import WHOLE, application, entry, http_to, record, root, three_turns

STATUS_KEYS = [
    "rollout_id",
    "state",
    "calls",
    "open_intents",
    "prompt_tokens",
    "generated_tokens",
    "incomplete",
    "incomplete_reasons",
    "resolutions",
    "drifted_calls",
    "drifted",
    "first_call_at",
    "last_call_at",
    "snapshot_id",
    "version",
    "labels",
    "max_calls",
    "max_generated_tokens",
    "expires_at",
]


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


def error_of(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Check the one error shape and return the whole body."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body["error"]) >= {"type", "code", "message"}
    assert body["error"]["code"] == code
    assert len(body["error"]["message"]) > 10
    return body


async def frozen(http: httpx.AsyncClient, store: CaptureStore, rollout_id: str) -> dict[str, Any]:
    await record(store, three_turns(rollout_id))
    answer = await http.post(root(rollout_id, "freeze"))
    assert answer.status_code == 200
    return answer.json()


# --- status and freeze -------------------------------------------------------------------------


async def test_an_unknown_rollout_has_a_status(http: httpx.AsyncClient) -> None:
    """Asking is no error and creates nothing."""
    answer = await http.get(root("r1"))

    assert answer.status_code == 200
    assert list(answer.json()) == STATUS_KEYS
    assert answer.json()["state"] == "unknown"
    assert (await http.get("/ng-rollout")).json()["rollouts"] == []


async def test_status_counts_calls_and_tokens(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """Prompt tokens are those of the full prompts, although suffixes are stored."""
    await record(store, three_turns("r1"))
    await store.open_intent(CallIntent(rollout_id="r1", model_call_id="c9", created_at=99.0))

    body = (await http.get(root("r1"))).json()

    assert (body["state"], body["calls"], body["open_intents"]) == ("open", 3, ["c9"])
    assert (body["prompt_tokens"], body["generated_tokens"]) == (3 + 6 + 11, 2 + 3 + 1)
    assert body["resolutions"] == {"root": 1, "resolved": 2, "unresolved": 0}
    assert body["snapshot_id"] is None
    assert not any("token_ids" in key for key in body)


async def test_freeze_is_idempotent(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """The second freeze answers with the first one's snapshot, at once."""
    first = await frozen(http, store, "r1")
    second = (await http.post(root("r1", "freeze"))).json()

    assert first == second
    assert list(first) == STATUS_KEYS
    assert first["state"] == "frozen"
    assert first["snapshot_id"]


async def test_freezing_an_unknown_rollout_fences_it(
    http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """A rollout without calls freezes with none; calls that come later are refused."""
    body = (await http.post(root("r1", "freeze"))).json()

    assert (body["state"], body["calls"], body["incomplete"]) == ("frozen", 0, False)
    with pytest.raises(TokenCaptureFrozenError):
        await store.open_intent(CallIntent(rollout_id="r1", model_call_id="c1"))


async def test_freeze_waits_for_a_running_call(store: CaptureStore) -> None:
    """A call that ends within the grace period is part of the snapshot."""
    only = entry("r1", "c1", [1], [2])
    await store.open_intent(CallIntent(rollout_id="r1", model_call_id="c1", created_at=1.0))
    app = application(store, load_settings(freeze_grace_s=20))

    async with http_to(app) as http:
        freezing = asyncio.create_task(http.post(root("r1", "freeze")))
        while await _takes_calls(store, "r1"):
            await asyncio.sleep(0.005)
        assert (await http.get(root("r1"))).json()["state"] == "open"
        await store.put(only)
        body = (await freezing).json()

    assert (body["calls"], body["incomplete"], body["open_intents"]) == (1, False, [])


async def _takes_calls(store: CaptureStore, rollout_id: str) -> bool:
    try:
        await store.open_intent(CallIntent(rollout_id=rollout_id, model_call_id="probe"))
    except TokenCaptureFrozenError:
        return False
    await store.cancel_call(rollout_id, "probe", "probe")
    return True


async def test_freeze_gives_up_on_a_call_that_stays_open(
    http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """After the grace period an open call makes the rollout incomplete, with a reason."""
    await record(store, three_turns("r1"))
    await store.open_intent(CallIntent(rollout_id="r1", model_call_id="c9", created_at=99.0))

    started = time.monotonic()
    body = (await http.post(root("r1", "freeze"))).json()

    assert time.monotonic() - started >= 0.2
    assert body["incomplete"]
    assert [r["model_call_id"] for r in body["incomplete_reasons"]] == ["c9"]
    assert set(body["incomplete_reasons"][0]) == {"code", "model_call_id", "detail", "at"}


class RecordingCalls:
    """Stands for the middleware: it is told of the freeze and ends its call then."""

    def __init__(self, store: CaptureStore, last: TokenEntry) -> None:
        self.log: list[Any] = []
        self._store, self._last = store, last

    def fence(self, rollout_id: str) -> None:
        self.log.append(("fence", rollout_id))

    async def wait_closed(self, rollout_id: str, timeout_s: float) -> bool:
        self.log.append(("wait", rollout_id, timeout_s))
        await self._store.put(self._last)
        return True


async def test_freeze_lets_this_process_close_its_calls(store: CaptureStore) -> None:
    """The running calls are told after the store refuses new ones, and waited for."""
    await store.open_intent(CallIntent(rollout_id="r1", model_call_id="c1", created_at=1.0))
    calls = RecordingCalls(store, entry("r1", "c1", [1], [2]))
    app = application(store, load_settings(freeze_grace_s=5), calls)

    async with http_to(app) as http:
        body = (await http.post(root("r1", "freeze"))).json()
        again = (await http.post(root("r1", "freeze"))).json()

    assert calls.log == [("fence", "r1"), ("wait", "r1", 5.0)]
    assert (body["calls"], body["incomplete"]) == (1, False)
    assert again == body


async def test_concurrent_freezes_agree(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """Many trainers freezing at once see one snapshot."""
    await record(store, three_turns("r1"))

    answers = await asyncio.gather(*(http.post(root("r1", "freeze")) for _ in range(8)))

    assert {a.status_code for a in answers} == {200}
    assert len({a.json()["snapshot_id"] for a in answers}) == 1


# --- snapshot ----------------------------------------------------------------------------------


async def test_snapshot_needs_a_freeze(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """Open and unknown rollouts have no snapshot."""
    error_of(await http.get(root("r1", "snapshot")), 409, "not_frozen")
    await record(store, three_turns("r1"))
    error_of(await http.get(root("r1", "snapshot")), 409, "not_frozen")


async def test_snapshot_holds_the_records_as_stored(
    http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """Every entry reads back as the record that was put."""
    summary = await frozen(http, store, "r1")
    answer = await http.get(root("r1", "snapshot"))
    body = answer.json()

    assert answer.headers["content-type"] == "application/json"
    assert {k: body[k] for k in ("rollout_id", "snapshot_id", "version", "incomplete")} == {
        k: summary[k] for k in ("rollout_id", "snapshot_id", "version", "incomplete")
    }
    assert body["incomplete_reasons"] == []
    expected = {e.model_call_id: e.model_dump(mode="json") for e in three_turns("r1")}
    assert {e["model_call_id"]: e for e in body["entries"]} == expected


async def test_snapshot_as_ndjson(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """First line the object without entries, then one entry a line."""
    await frozen(http, store, "r1")
    whole = (await http.get(root("r1", "snapshot"))).json()
    answer = await http.get(root("r1", "snapshot"), headers={"accept": "application/x-ndjson"})
    header, *entries = [json.loads(line) for line in answer.text.splitlines()]

    assert answer.headers["content-type"] == "application/x-ndjson"
    assert entries == whole.pop("entries")
    assert header == whole


async def test_snapshot_can_rebuild_prompts(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """``full_prompts`` gives each call the prompt that the engine saw."""
    await frozen(http, store, "r1")
    answer = await http.get(root("r1", "snapshot"), params={"full_prompts": "true"})
    by_id = {e["model_call_id"]: e for e in answer.json()["entries"]}

    assert by_id["c1"]["prompt_token_ids"] == WHOLE[:3]
    assert by_id["c2"]["prompt_token_ids"] == WHOLE[:6]
    assert by_id["c3"]["prompt_token_ids"] == WHOLE[:11]
    assert not any(e["prompt_is_delta"] for e in by_id.values())


async def test_a_prompt_that_does_not_fit_its_digest_stays_a_suffix(
    http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """What cannot be proven is not rebuilt, and says so."""
    first, second, _ = three_turns("r1")
    await record(store, [first, second.model_copy(update={"digest": "0" * 64})])
    orphan = second.model_copy(update={"model_call_id": "c4", "parent_call_id": "gone"})
    await record(store, [orphan])
    await http.post(root("r1", "freeze"))

    answer = await http.get(root("r1", "snapshot"), params={"full_prompts": "true"})
    by_id = {e["model_call_id"]: e for e in answer.json()["entries"]}

    for call_id in ("c2", "c4"):
        assert by_id[call_id]["prompt_is_delta"]
        assert by_id[call_id]["prompt_token_ids"] == [6]


async def test_snapshot_fields(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """Only the named fields; a suffix is never passed off as a prompt."""
    await frozen(http, store, "r1")
    url = root("r1", "snapshot")
    tokens = (await http.get(url, params={"fields": "model_call_id,generation_token_ids"})).json()
    prompts = (await http.get(url, params={"fields": "prompt_token_ids"})).json()
    extras = (await http.get(url, params={"fields": "finish_reason"})).json()

    assert {tuple(e) for e in tokens["entries"]} == {("model_call_id", "generation_token_ids")}
    assert sorted(map(str, prompts["entries"])) == sorted(
        map(
            str,
            [
                {"prompt_token_ids": [1, 2, 3]},
                {"prompt_is_delta": True, "prompt_token_ids": [6]},
                {"prompt_is_delta": True, "prompt_token_ids": [10, 11]},
            ],
        )
    )
    assert [e["finish_reason"] for e in extras["entries"]] == ["stop"] * 3


@pytest.mark.parametrize(
    "query",
    [
        "fields=model_call",
        "fields=",
        "fields=model,",
        "fields=model,x",
        "full_prompts=perhaps",
        "field=model",
    ],
)
async def test_snapshot_refuses_unknown_queries(
    query: str, http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """A typing error does not return something else than was asked."""
    await frozen(http, store, "r1")

    error_of(await http.get(f"{root('r1', 'snapshot')}?{query}"), 400, "unsupported_parameter")


async def test_snapshot_etag(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """A client that has this version is told so; a later mark changes it."""
    summary = await frozen(http, store, "r1")
    url = root("r1", "snapshot")
    etag = f'"{summary["snapshot_id"]}:{summary["version"]}"'

    assert (await http.get(url)).headers["etag"] == etag
    for tag in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        unchanged = await http.get(url, headers={"if-none-match": tag})
        assert (unchanged.status_code, unchanged.content) == (304, b"")
        assert unchanged.headers["etag"] == etag
    assert (await http.get(url, headers={"if-none-match": '"other"'})).status_code == 200

    await store.mark_incomplete("r1", "c3", "store_failure")
    changed = await http.get(url, headers={"if-none-match": etag})

    assert changed.status_code == 200
    assert changed.headers["etag"] != etag
    assert changed.json()["incomplete"]
    assert changed.json()["incomplete_reasons"][0]["code"] == "store_failure"


@pytest.mark.parametrize(
    ("accept_encoding", "expected"),
    [
        ("gzip", "gzip"),
        ("gzip, zstd", "zstd"),
        ("zstd;q=0, gzip", "gzip"),
        ("identity", None),
        ("br", None),
        ("", None),
        ("*", "zstd"),
    ],
)
async def test_snapshot_is_compressed_on_request(
    accept_encoding: str, expected: str | None, http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """The coded body holds the same bytes; without a wish it is plain."""
    await frozen(http, store, "r1")
    url = root("r1", "snapshot")
    plain = (await http.get(url, headers={"accept-encoding": "identity"})).content
    async with http.stream("GET", url, headers={"accept-encoding": accept_encoding}) as answer:
        raw = b"".join([piece async for piece in answer.aiter_raw()])

    assert answer.headers.get("content-encoding") == expected
    decoders = {
        "gzip": gzip.decompress,
        "zstd": lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data),
        None: bytes,
    }
    assert decoders[expected](raw) == plain


@pytest.mark.parametrize("verb", ["snapshot", "trajectories"])
async def test_a_server_without_pyarrow_says_so(
    verb: str, http: httpx.AsyncClient, store: CaptureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that insists on Arrow is told what there is; one that prefers it gets JSON."""
    monkeypatch.setattr("capture_server.control_routes._ARROW_OFFER", ())
    await frozen(http, store, "r1")
    arrow = "application/vnd.apache.arrow.stream"

    body = error_of(
        await http.get(root("r1", verb), headers={"accept": arrow}), 406, "not_acceptable"
    )
    both = await http.get(root("r1", verb), headers={"accept": f"{arrow}, application/json;q=0.5"})

    assert "token-capture[arrow]" in body["error"]["message"]
    assert both.headers["content-type"] == "application/json"


async def test_a_large_snapshot_is_streamed(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """It leaves in pieces, and the whole is valid JSON with every token."""
    ids = list(range(100_000))
    await record(store, [entry("r1", f"c{i}", ids, [i]) for i in range(4)])
    await http.post(root("r1", "freeze"))

    plain = {"accept-encoding": "identity"}
    async with http.stream("GET", root("r1", "snapshot"), headers=plain) as answer:
        pieces = [piece async for piece in answer.aiter_raw()]

    assert "content-length" not in answer.headers
    body = json.loads(b"".join(pieces))
    assert all(e["prompt_token_ids"] == ids for e in body["entries"])
    assert body["calls"] == 4


# --- trajectories ------------------------------------------------------------------------------


async def test_trajectories_as_one_response(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """The default form: one Responses object, the metrics and the verdict."""
    summary = await frozen(http, store, "r1")
    answers = [
        await http.get(root("r1", "trajectories")),
        await http.post(root("r1", "trajectories")),
        await http.post(root("r1", "trajectories"), json={"format": "responses"}),
    ]
    body = answers[0].json()

    assert all(answer.json() == body for answer in answers)
    assert set(body) >= {"rollout_id", "builder", "mask_sample", "rebuilt_response", "metrics"}
    assert (body["snapshot_id"], body["version"]) == (summary["snapshot_id"], summary["version"])
    assert not [key for key in body if key.startswith("_")]
    assert body["mask_sample"] is False
    assert body["rebuilt_response"]["output"][-1]["prompt_token_ids"] == WHOLE[:-1]


async def test_trajectories_as_rows(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """One row with the whole rollout, sampled tokens marked."""
    await frozen(http, store, "r1")
    got = await http.get(root("r1", "trajectories"), params={"format": "traces"})
    posted = await http.post(root("r1", "trajectories"), json={"format": "traces"})
    body = got.json()
    (row,) = body["rows"]

    assert posted.json() == body
    assert set(body) >= {"rollout_id", "builder", "mask_sample", "rows", "main_row", "metrics"}
    assert set(row) >= {
        "row_id", "model_call_ids", "token_ids", "loss_mask", "log_probs", "call_spans",
        "starts", "ends", "mask_sample",
    }  # fmt: skip
    assert row["token_ids"] == WHOLE
    assert [t for t, m in zip(row["token_ids"], row["loss_mask"], strict=True) if m] == [
        4, 5, 7, 8, 9, 12,
    ]  # fmt: skip
    assert (row["starts"], row["ends"]) == ({"kind": "root"}, "stop")
    assert (body["main_row"], body["mask_sample"], row["mask_sample"]) == (0, False, False)


async def test_trajectories_take_the_scored_call(
    http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """By call id, by response id, and by the response itself; the row ends there."""
    await frozen(http, store, "r1")
    url = root("r1", "trajectories")
    response = {"id": "resp-c2", "output": [{"type": "message", "content": "says c2"}]}
    for terminal in (
        {"terminal_call_id": "c2"},
        {"terminal_response_id": "resp-c2"},
        {"verified_response": response},
    ):
        body = (await http.post(url, json={"format": "traces", **terminal})).json()
        assert body["rows"][0]["model_call_ids"] == ["c1", "c2"]
        assert body["metrics"]["terminal_attribution"]["call_id"] == "c2"
    by_query = await http.get(url, params={"format": "traces", "terminal_call_id": "c2"})
    assert by_query.json()["rows"][0]["model_call_ids"] == ["c1", "c2"]


async def test_per_request_rows(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """One row per call."""
    await frozen(http, store, "r1")
    query = {"format": "traces", "builder": "per_request"}
    body = (await http.get(root("r1", "trajectories"), params=query)).json()

    assert [row["model_call_ids"] for row in body["rows"]] == [["c1"], ["c2"], ["c3"]]


async def test_an_empty_rollout_builds_a_masked_nothing(http: httpx.AsyncClient) -> None:
    """No rows is an answer, not an error."""
    await http.post(root("r1", "freeze"))
    rows = (await http.get(root("r1", "trajectories"), params={"format": "traces"})).json()
    response = (await http.get(root("r1", "trajectories"))).json()

    assert (rows["rows"], rows["main_row"], rows["mask_sample"]) == ([], None, True)
    assert (response["rebuilt_response"], response["mask_sample"]) == (None, True)
    assert response["error"]


async def test_an_incomplete_rollout_is_masked(
    http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """A hole masks both forms."""
    await record(store, three_turns("r1"))
    await store.mark_incomplete("r1", "c7", "missing_token_ids")
    await http.post(root("r1", "freeze"))

    for form in ("responses", "traces"):
        body = (await http.get(root("r1", "trajectories"), params={"format": form})).json()
        assert body["mask_sample"] is True


async def test_trajectories_need_a_freeze(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """Nothing is built from a rollout that may still grow."""
    await record(store, three_turns("r1"))

    error_of(await http.get(root("r1", "trajectories")), 409, "not_frozen")
    error_of(await http.post(root("r1", "trajectories")), 409, "not_frozen")


@pytest.mark.parametrize(
    "body",
    [
        {"builder": "longest"},
        {"format": "parquet"},
        {"fragments": "maybe"},
        {"terminal_call": "c2"},
        {"terminal_call_id": "not an id"},
        {"terminal_response_id": ""},
        {"verified_response": [1]},
        [],
        "traces",
    ],
)
async def test_trajectories_refuse_malformed_requests(
    body: Any, http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """A typing error must not choose another terminal silently."""
    await frozen(http, store, "r1")

    error_of(await http.post(root("r1", "trajectories"), json=body), 400, "invalid_body")
    if isinstance(body, dict) and "verified_response" not in body:
        answer = await http.get(root("r1", "trajectories"), params=body)
        error_of(answer, 400, "unsupported_parameter")


# --- retire, delete ----------------------------------------------------------------------------


async def test_retire_removes_exactly_what_was_read(
    http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """Retiring the read state works, again too, and leaves a tombstone."""
    summary = await frozen(http, store, "r1")
    consumed = {"snapshot_id": summary["snapshot_id"], "version": summary["version"]}

    for _ in range(2):
        answer = await http.post(root("r1", "retire"), json=consumed)
        assert (answer.status_code, answer.json()) == (200, {"retired": True})

    assert (await http.get(root("r1"))).json()["state"] == "retired"
    error_of(await http.get(root("r1", "snapshot")), 410, "rollout_retired")
    error_of(await http.post(root("r1", "freeze")), 410, "rollout_retired")
    error_of(await http.get(root("r1", "trajectories")), 410, "rollout_retired")


async def test_a_stale_retire_keeps_everything(
    http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """The answer names the state to read instead, beside the error."""
    summary = await frozen(http, store, "r1")
    consumed = {"snapshot_id": summary["snapshot_id"], "version": summary["version"]}
    await store.mark_incomplete("r1", "c3", "store_failure")

    body = error_of(await http.post(root("r1", "retire"), json=consumed), 409, "stale_snapshot")
    now = (await http.get(root("r1"))).json()

    assert set(body) == {"error", "snapshot_id", "version"}
    assert (body["snapshot_id"], body["version"]) == (now["snapshot_id"], now["version"])
    assert body["version"] > summary["version"]
    assert len((await http.get(root("r1", "snapshot"))).json()["entries"]) == 3


@pytest.mark.parametrize("change", [{"version": 999}, {"snapshot_id": "other"}])
async def test_retire_with_a_wrong_name_is_stale(
    change: dict[str, Any], http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """Both parts of the name have to fit, before and after somebody else retired it."""
    summary = await frozen(http, store, "r1")
    right = {"snapshot_id": summary["snapshot_id"], "version": summary["version"]}

    error_of(await http.post(root("r1", "retire"), json={**right, **change}), 409, "stale_snapshot")
    assert (await http.post(root("r1", "retire"), json=right)).status_code == 200
    error_of(await http.post(root("r1", "retire"), json={**right, **change}), 409, "stale_snapshot")


async def test_retire_needs_a_freeze(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """Open and unknown rollouts cannot be retired."""
    consumed = {"snapshot_id": "x", "version": 1}

    error_of(await http.post(root("r1", "retire"), json=consumed), 409, "not_frozen")
    await record(store, three_turns("r1"))
    error_of(await http.post(root("r1", "retire"), json=consumed), 409, "not_frozen")


async def test_retire_accepts_the_whole_freeze_answer(
    http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """A trainer may send back what freeze gave it."""
    summary = await frozen(http, store, "r1")

    assert (await http.post(root("r1", "retire"), json=summary)).json() == {"retired": True}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b'{"snapshot_id": "x"}',
        b'{"snapshot_id": 1, "version": 1}',
        b'{"snapshot_id": "x", "version": "1"}',
        b'{"snapshot_id": "x", "version": true}',
        b'{"snapshot_id": "x", "version": 1.5}',
        b'{"snapshot_id": "x", "version": null}',
        b"\xff\xfe{",
        b"[" * 50_000,
    ],
)
async def test_bodies_that_are_not_what_retire_needs(
    content: bytes, http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """Broken JSON and wrong types are 400, and nothing is removed."""
    await frozen(http, store, "r1")

    error_of(await http.post(root("r1", "retire"), content=content), 400, "invalid_body")
    assert (await http.get(root("r1"))).json()["state"] == "frozen"


@pytest.mark.parametrize(
    "content_type", ["application/x-www-form-urlencoded", "text/plain", None, "application/json"]
)
async def test_a_body_is_json_whatever_it_calls_itself(
    content_type: str | None, http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """``curl -d`` declares a form; it works."""
    summary = await frozen(http, store, "r1")
    body = {"snapshot_id": summary["snapshot_id"], "version": summary["version"]}
    headers = {"content-type": content_type} if content_type else {}

    answer = await http.post(root("r1", "retire"), content=json.dumps(body), headers=headers)

    assert answer.json() == {"retired": True}


async def test_coded_control_bodies_are_refused(http: httpx.AsyncClient) -> None:
    """Rather than being read as broken JSON."""
    answer = await http.post(
        root("r1", "retire"), content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"}
    )

    error_of(answer, 415, "unsupported_encoding")


async def test_control_bodies_are_bounded(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body above the limit is refused while it is read."""
    monkeypatch.setattr("capture_server.guarded_route.MAX_CONTROL_BODY_BYTES", 100)

    answer = await http.post(root("r1", "retire"), content=b" " * 101)

    error_of(answer, 413, "body_too_large")


async def test_delete_frees_the_id(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """After a delete the id starts anew, from every state."""
    await frozen(http, store, "r1")

    assert (await http.delete(root("r1"))).json() == {"deleted": True, "existed": True}
    assert (await http.delete(root("r1"))).json() == {"deleted": True, "existed": False}
    assert (await http.get(root("r1"))).json()["state"] == "unknown"
    await record(store, three_turns("r1"))
    assert (await http.get(root("r1"))).json()["calls"] == 3


# --- many rollouts -----------------------------------------------------------------------------


async def test_listing_pages_through_all_rollouts(
    http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """Pages follow each other in id order without gap or repetition."""
    for name in ("b2", "a1", "b1", "c1", "b3"):
        await record(store, [entry(name, "c1", [1], [2])])
    await http.post(root("b2", "freeze"))

    async def pages(**query: Any) -> list[str]:
        ids: list[str] = []
        cursor = ""
        while cursor is not None:
            body = (
                await http.get("/ng-rollout", params={"limit": 2, "cursor": cursor, **query})
            ).json()
            assert set(body) == {"rollouts", "next_cursor"}
            ids += [row["rollout_id"] for row in body["rollouts"]]
            cursor = body["next_cursor"]
        return ids

    assert await pages() == ["a1", "b1", "b2", "b3", "c1"]
    assert await pages(prefix="b") == ["b1", "b2", "b3"]
    assert await pages(state="frozen") == ["b2"]
    assert list((await http.get("/ng-rollout")).json()["rollouts"][0]) == STATUS_KEYS


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "state=closed", "sort=id"])
async def test_listing_refuses_unknown_queries(query: str, http: httpx.AsyncClient) -> None:
    """Wrong values are named."""
    error_of(await http.get(f"/ng-rollout?{query}"), 400, "unsupported_parameter")


async def test_batch_gives_each_id_its_own_answer(
    http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """One bad id does not stop the others."""
    await record(store, three_turns("r1"))
    await frozen(http, store, "r2")
    retired = await frozen(http, store, "r3")
    await http.post(
        root("r3", "retire"),
        json={"snapshot_id": retired["snapshot_id"], "version": retired["version"]},
    )

    body = {"op": "freeze", "ids": ["r1", "r2", "r3", "../r4", "r1"]}
    results = (await http.post("/ng-rollout:batch", json=body)).json()["results"]

    assert list(results) == ["r1", "r2", "r3", "../r4"]
    assert results["r1"]["state"] == results["r2"]["state"] == "frozen"
    assert results["r3"]["error"]["code"] == "rollout_retired"
    assert results["../r4"]["error"]["code"] == "invalid_rollout_id"


async def test_batch_retire_and_delete(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """Retire takes the consumed snapshots; without one it takes the current state."""
    await record(store, three_turns("open"))
    await frozen(http, store, "now")
    await frozen(http, store, "stale")
    exact = await frozen(http, store, "exact")

    retire = {
        "op": "retire",
        "ids": ["open", "now", "stale", "exact"],
        "snapshots": {
            "stale": {"snapshot_id": "x", "version": 1},
            "exact": {"snapshot_id": exact["snapshot_id"], "version": exact["version"]},
        },
    }
    results = (await http.post("/ng-rollout:batch", json=retire)).json()["results"]

    assert results["open"]["error"]["code"] == "not_frozen"
    assert results["now"] == results["exact"] == {"retired": True}
    assert results["stale"]["error"]["code"] == "stale_snapshot"
    assert results["stale"]["snapshot_id"]

    delete = {"op": "delete", "ids": ["open", "now"]}
    results = (await http.post("/ng-rollout:batch", json=delete)).json()["results"]
    assert [results[name]["deleted"] for name in ("open", "now")] == [True, True]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"op": "freeze"},
        {"op": "melt", "ids": []},
        {"op": "freeze", "ids": "r1"},
        {"op": "freeze", "ids": [1]},
        {"op": "freeze", "ids": ["a"] * 10_001},
        {"op": "freeze", "ids": [], "more": 1},
    ],
)
async def test_batch_refuses_malformed_bodies(
    body: dict[str, Any], http: httpx.AsyncClient
) -> None:
    """Nothing is done for a body that is not understood as a whole."""
    error_of(await http.post("/ng-rollout:batch", json=body), 400, "invalid_body")


async def test_sweep_removes_old_tombstones(http: httpx.AsyncClient, store: CaptureStore) -> None:
    """By default young ones stay: they still fence late writers."""
    summary = await frozen(http, store, "r1")
    await http.post(
        root("r1", "retire"),
        json={"snapshot_id": summary["snapshot_id"], "version": summary["version"]},
    )

    assert (await http.post("/ng-rollout:sweep")).json() == {"removed": 0}
    assert (await http.get(root("r1"))).json()["state"] == "retired"
    swept = await http.post("/ng-rollout:sweep", json={"older_than_seconds": 0})
    assert swept.json() == {"removed": 1}
    assert (await http.get(root("r1"))).json()["state"] == "unknown"


@pytest.mark.parametrize("age", [-1, "1", None, True])
async def test_sweep_refuses_wrong_ages(age: Any, http: httpx.AsyncClient) -> None:
    """A wrong age must not remove fences."""
    answer = await http.post("/ng-rollout:sweep", json={"older_than_seconds": age})

    error_of(answer, 400, "invalid_body")


# --- routing, ids, auth ------------------------------------------------------------------------

WRONG_METHODS = [
    ("GET", "freeze", "POST"),
    ("POST", "snapshot", "GET"),
    ("DELETE", "trajectories", "GET, POST"),
    ("GET", "retire", "POST"),
    ("PUT", "snapshot", "GET"),
    ("PATCH", "", "GET, PUT, DELETE"),
    ("GET", "freeze/", "POST"),
]


@pytest.mark.parametrize(("method", "verb", "allow"), WRONG_METHODS)
async def test_a_wrong_method_is_405(
    method: str, verb: str, allow: str, http: httpx.AsyncClient
) -> None:
    """With the methods that the route has."""
    answer = await http.request(method, root("r1", verb))

    error_of(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == allow


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
@pytest.mark.parametrize("segment", ["freez", "snapshots", "snapshot/x", "retire/now", "%2e%2e"])
async def test_an_unknown_segment_is_404(
    method: str, segment: str, http: httpx.AsyncClient
) -> None:
    """Whatever the method."""
    error_of(await http.request(method, root("r1", segment)), 404, "unknown_route")


async def test_a_trailing_slash_answers_without_a_redirect(http: httpx.AsyncClient) -> None:
    """Clients join URLs carelessly."""
    assert (await http.get(root("r1") + "/")).status_code == 200
    assert (await http.post(root("r1", "freeze/"))).status_code == 200
    assert (await http.get("/ng-rollout/")).status_code == 200


BAD_IDS = [
    "-r",
    ".r",
    "_r",
    "a b",
    "a%20b",
    "a%00",
    "r%0a",
    "ä",
    "%C3%A4",
    "a" * 201,
    "%2e%2e",
    "r1~x",
]


@pytest.mark.parametrize("rollout_id", BAD_IDS)
@pytest.mark.parametrize(
    ("method", "verb"),
    [
        ("GET", ""),
        ("POST", "freeze"),
        ("POST", "retire"),
        ("GET", "snapshot"),
        ("DELETE", ""),
        ("GET", "x"),
    ],
)
async def test_invalid_ids_are_refused_before_anything_else(
    rollout_id: str, method: str, verb: str, store: CaptureStore
) -> None:
    """Before the token, the body, and the store."""
    app = application(store, load_settings(control_token="t"))

    async with http_to(app) as http:
        answer = await http.request(method, root(rollout_id, verb), content=b"{")

    error_of(answer, 400, "invalid_rollout_id")


async def test_an_id_is_compared_after_one_decoding(
    http: httpx.AsyncClient, store: CaptureStore
) -> None:
    """``%31`` is ``1``; ``%2531`` is not decoded twice."""
    await record(store, three_turns("r1"))

    assert (await http.get(root("r%31"))).json()["calls"] == 3
    error_of(await http.get(root("r%2531")), 400, "invalid_rollout_id")


CONTROL_ROUTES = [
    ("GET", root("r1")),
    ("PUT", root("r1")),
    ("DELETE", root("r1")),
    ("POST", root("r1", "freeze")),
    ("GET", root("r1", "snapshot")),
    ("GET", root("r1", "trajectories")),
    ("POST", root("r1", "trajectories")),
    ("GET", root("r1", "manifest")),
    ("POST", root("r1", "retire")),
    ("GET", "/ng-rollout"),
    ("POST", "/ng-rollout:batch"),
    ("POST", "/ng-rollout:sweep"),
]


@pytest.mark.parametrize(("method", "path"), CONTROL_ROUTES)
async def test_every_control_route_needs_the_token(
    method: str, path: str, store: CaptureStore
) -> None:
    """Missing or wrong: 401 before the body is looked at; nothing was done."""
    await record(store, three_turns("r1"))
    app = application(store, load_settings(control_token="right, newer"))

    async with http_to(app) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"}):
            answer = await http.request(method, path, headers=headers, content=b"{")
            error_of(answer, 401, "unauthorized")
            assert answer.headers["www-authenticate"].startswith("Bearer")
        allowed = {"authorization": "Bearer newer"}
        status = (await http.get(root("r1"), headers=allowed)).json()
        assert (status["state"], status["calls"]) == ("open", 3)


async def test_the_table_of_routes_above_is_complete(http: httpx.AsyncClient) -> None:
    """A new control route cannot be left out of the authentication test."""
    document = (await http.get("/openapi.json")).json()
    documented = {
        (method.upper(), path.replace("{rollout_id}", "r1"))
        for path, methods in document["paths"].items()
        for method in methods
        if path.startswith("/ng-rollout")
    }

    assert documented == set(CONTROL_ROUTES)


async def test_health_needs_no_token(store: CaptureStore) -> None:
    """Probes carry no secrets, and the answers hold none."""
    async with http_to(application(store, load_settings(control_token="t"))) as http:
        for path, expected in (("/healthz", {"status": "ok"}), ("/readyz", {"status": "ready"})):
            assert (await http.get(path)).json() == expected
        version = (await http.get("/version")).json()

    assert version["name"] == "token-capture"
    assert version["record_schema_version"] == 1


async def test_readiness_turns_red_with_the_store(
    store: CaptureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unhealthy store, or any other check, makes the probe fail with the reason."""
    reasons: list[str | None] = ["marks cannot be written"]

    async def check() -> str | None:
        return reasons[0]

    async with http_to(application(store, readiness_checks=[check])) as http:
        body = error_of(await http.get("/readyz"), 503, "capture_unavailable")
        assert "marks cannot be written" in body["error"]["message"]
        reasons[0] = None
        assert (await http.get("/readyz")).status_code == 200

        async def unhealthy() -> str | None:
            return "disk full"

        monkeypatch.setattr(store, "healthy", unhealthy)

    async with http_to(application(store)) as http:
        answer = await http.get("/readyz")
        assert "disk full" in error_of(answer, 503, "capture_unavailable")["error"]["message"]
        assert answer.headers["retry-after"] == "1"


class BrokenStore(MemoryCaptureStore):
    """Every question to it fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def status(self, rollout_id: str) -> Any:
        raise self._error

    async def list_rollouts(self, **_: Any) -> Any:
        raise self._error


async def test_a_failing_store_is_503_with_retry_after() -> None:
    """Retry later is what the answer says."""
    async with http_to(
        application(BrokenStore(StoreUnavailableError("disk full: free some space")))
    ) as http:
        for answer in (await http.get(root("r1")), await http.post(root("r1", "freeze"))):
            error_of(answer, 503, "capture_unavailable")
            assert answer.headers["retry-after"] == "1"
        batch = await http.post("/ng-rollout:batch", json={"op": "freeze", "ids": ["r1"]})

    assert batch.json()["results"]["r1"]["error"]["code"] == "capture_unavailable"


async def test_a_bug_is_500_in_the_same_shape_and_quotes_nothing() -> None:
    """The text of an unexpected error may hold data; it stays in the log."""
    async with http_to(application(BrokenStore(RuntimeError("tokens 1 2 3")))) as http:
        answer = await http.get("/ng-rollout")

    error_of(answer, 500, "internal_error")
    assert "1 2 3" not in answer.text


async def test_no_text_of_a_secret_in_any_answer(store: CaptureStore) -> None:
    """Neither the right nor the wrong token is echoed."""
    async with http_to(application(store, load_settings(control_token="right-secret"))) as http:
        answer = await http.get(root("r1"), headers={"authorization": "Bearer wrong-secret"})

    assert "secret" not in answer.text


async def test_the_document_names_no_framework_error(http: httpx.AsyncClient) -> None:
    """Every documented error has our shape; 422 does not occur."""
    document = (await http.get("/openapi.json")).json()
    operations: Sequence[dict[str, Any]] = [
        operation for item in document["paths"].values() for operation in item.values()
    ]

    assert all("422" not in operation["responses"] for operation in operations)
    assert len({operation["operationId"] for operation in operations}) == len(operations)
