"""The trainer's clients, against a real server and against servers that misbehave."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from capture_server import client_requests
from capture_server.client import RolloutClient, SyncRolloutClient
from capture_server.config import load_settings
from capture_server.errors import (
    SidecarResponseError,
    SidecarUnreachableError,
    UnauthorizedError,
    error_body,
    error_from_body,
    status_of,
)
from capture_server.stores.file import TokenCaptureStore
from middleware import errors as errors_module
from middleware.errors import (
    ConfigurationError,
    InvalidIdError,
    NotFrozenError,
    StaleSnapshotError,
    StoreUnavailableError,
    TokenCaptureError,
    TokenCaptureRetiredError,
    UnsupportedParameterError,
)
from tests.http.control_rig import WHOLE, application, entry, record, serving, three_turns


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TokenCaptureStore]:
    made = TokenCaptureStore(tmp_path / "s")
    yield made
    await made.close()


@pytest.fixture
def server(store: TokenCaptureStore) -> Iterator[str]:
    settings = load_settings(freeze_grace_s=0, control_token="t0ken")
    with serving(application(store, settings)) as address:
        yield address


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries wait as long as they are told to, which is not at all."""

    def delays(retries: int, *, base_s: float = 0.0) -> Iterator[float]:
        return iter([0.0] * retries)

    monkeypatch.setattr(client_requests, "retry_delays", delays)
    monkeypatch.setattr(client_requests, "_MAX_BACKOFF_S", 0.0)


# --- the whole loop ----------------------------------------------------------------------------


async def test_a_trainer_reads_builds_and_retires(server: str, store: TokenCaptureStore) -> None:
    """Freeze, read, build, retire: typed all the way, tokens exact."""
    records = three_turns("r1")
    await record(store, records)

    async with RolloutClient(server, control_token="t0ken") as client:
        assert (await client.status("r1")).state == "open"
        frozen = await client.freeze("r1")
        snapshot = await client.snapshot("r1")
        full = await client.snapshot("r1", full_prompts=True)
        traces = await client.traces("r1", terminal_call_id="c3")
        built = await client.trajectories("r1")
        assert await client.retire(
            "r1", snapshot_id=traces.snapshot_id or "", version=traces.version or 0
        )
        assert (await client.status("r1")).state == "retired"

    assert (snapshot.snapshot_id, snapshot.version) == (frozen.snapshot_id, frozen.version)
    assert {e.model_call_id: e for e in snapshot.entries} == {e.model_call_id: e for e in records}
    last = next(e for e in full.entries if e.model_call_id == "c3")
    assert last.prompt_token_ids == WHOLE[:-1]
    assert traces.main_row == 0
    row = traces.rows[0]
    assert row.token_ids.tolist() == WHOLE
    assert row.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 1]
    np.testing.assert_array_equal(row.log_probs, [0, 0, 0, -0.5, -1, 0, -0.5, -1, -1.5, 0, 0, -0.5])
    assert [(s.model_call_id, s.start, s.end) for s in row.call_spans] == [
        ("c1", 3, 5),
        ("c2", 6, 9),
        ("c3", 11, 12),
    ]
    assert not row.token_ids.flags.writeable
    assert not (traces.mask_sample or row.mask_sample or built.mask_sample)
    assert built.rebuilt_response is not None
    assert built.rebuilt_response["usage"]["output_tokens"] == 6


def test_the_blocking_client_does_the_same(server: str, tmp_path: Path) -> None:
    """Without an event loop."""
    store = TokenCaptureStore(tmp_path / "s")  # the server's store is safe to share
    store.append(entry("r1", "c1", [1, 2], [3]))
    store.close_now()

    with SyncRolloutClient(server, control_token="t0ken") as client:
        frozen = client.freeze("r1")
        assert len(client.snapshot("r1").entries) == 1
        assert client.traces("r1").rows[0].token_ids.tolist() == [1, 2, 3]
        assert client.trajectories("r1").error is None
        assert client.retire("r1", snapshot_id=frozen.snapshot_id or "", version=frozen.version)


async def test_many_rollouts_at_once(server: str, store: TokenCaptureStore) -> None:
    """Batch answers are typed per id; errors stand where they belong."""
    for name in ("a", "b", "c"):
        await record(store, [entry(name, "c1", [1], [2])])

    async with RolloutClient(server, control_token="t0ken") as client:
        page = await client.list_rollouts(limit=2)
        assert [r.rollout_id for r in page.rollouts] == ["a", "b"]
        rest = await client.list_rollouts(cursor=page.next_cursor or "")
        assert ([r.rollout_id for r in rest.rollouts], rest.next_cursor) == (["c"], None)

        frozen = await client.freeze_many(["a", "b", "-"])
        assert isinstance(frozen["-"], InvalidIdError)
        a, b = frozen["a"], frozen["b"]
        assert not isinstance(a, TokenCaptureError)
        assert not isinstance(b, TokenCaptureError)
        retired = await client.retire_many(
            {"a": (a.snapshot_id or "", a.version), "b": ("other", 1), "c": ("x", 1)}
        )
        assert retired["a"] is True
        assert isinstance(retired["b"], StaleSnapshotError)
        assert retired["b"].version == b.version
        assert isinstance(retired["c"], NotFrozenError)
        assert await client.sweep(older_than_seconds=0) == 1
        assert await client.delete_many(["b", "c"]) == {"b": True, "c": True}
        assert await client.delete("a")
        assert (await client.list_rollouts()).rollouts == ()


async def test_readiness_and_version(server: str) -> None:
    """Both need no token."""
    async with RolloutClient(server) as client:
        await client.wait_ready(timeout_s=5)
        assert (await client.version())["name"] == "token-capture"


def test_the_agents_url() -> None:
    """What is handed to the agent, with the id checked first."""
    with SyncRolloutClient("http://sidecar:8900/") as client:
        expected = "http://sidecar:8900/ng-rollout/r1/training-token-capture/v1"
        assert client.base_url("r1") == expected
        with pytest.raises(InvalidIdError):
            client.base_url("../r1")


# --- errors ------------------------------------------------------------------------------------


async def test_errors_arrive_as_their_own_class(server: str, store: TokenCaptureStore) -> None:
    """A trainer can tell what to do from the class alone."""
    await record(store, three_turns("r1"))

    async with RolloutClient(server, control_token="t0ken") as client:
        with pytest.raises(NotFrozenError):
            await client.snapshot("r1")
        frozen = await client.freeze("r1")
        with pytest.raises(StaleSnapshotError) as stale:
            await client.retire("r1", snapshot_id="other", version=1)
        assert (stale.value.snapshot_id, stale.value.version) == (
            frozen.snapshot_id,
            frozen.version,
        )
        await client.retire("r1", snapshot_id=frozen.snapshot_id or "", version=frozen.version)
        with pytest.raises(TokenCaptureRetiredError):
            await client.freeze("r1")
        with pytest.raises(InvalidIdError):
            await client.freeze("not an id")
        with pytest.raises(UnsupportedParameterError):
            await client.list_rollouts(state="closed")
    async with RolloutClient(server, control_token="wrong") as client:
        with pytest.raises(UnauthorizedError):
            await client.status("r1")


def error_classes() -> list[type[TokenCaptureError]]:
    own = [
        value
        for value in vars(errors_module).values()
        if isinstance(value, type) and issubclass(value, TokenCaptureError)
    ]
    return [cls for cls in own if cls not in (TokenCaptureError, StaleSnapshotError)]


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_every_error_survives_the_wire(cls: type[TokenCaptureError]) -> None:
    """Its code, message and status come back, as the same class or its nearest parent."""
    sent = cls("what happened")
    got = error_from_body(status_of(sent), error_body(sent), fallback="GET /x")

    assert (got.code, str(got)) == (sent.code, "what happened")
    assert isinstance(got, cls) or issubclass(cls, type(got).__mro__[1])
    assert status_of(got) == status_of(sent)


def answering(*answers: httpx.Response | Exception) -> tuple[httpx.MockTransport, list[Any]]:
    """A server that gives these answers in turn, and what it was asked."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        given = answers[min(len(asked), len(answers)) - 1]
        if isinstance(given, Exception):
            raise given
        return given

    return httpx.MockTransport(answer), asked


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(502, text="<html>bad gateway</html>"),
        httpx.Response(404, json={"detail": "Not Found"}),
        httpx.Response(418, json={"error": {"code": "teapot", "message": "short"}}),
        httpx.Response(400, json={"error": "text"}),
        httpx.Response(200, text="not json"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"state": "open"}),
        httpx.Response(302, headers={"location": "http://elsewhere/"}),
    ],
)
def test_foreign_answers_are_a_typed_error(answer: httpx.Response) -> None:
    """A gateway's page or another service on that port is no crash and no result."""
    transport, _ = answering(answer)

    with (
        SyncRolloutClient(transport=transport) as client,
        pytest.raises(SidecarResponseError) as got,
    ):
        client.status("r1")

    assert got.value.status == answer.status_code


def ndjson(header: dict[str, Any], *lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in (header, *lines))


HEADER = {
    "rollout_id": "r1",
    "snapshot_id": "s",
    "version": 1,
    "incomplete": False,
    "incomplete_reasons": [],
    "calls": 1,
}
ENTRY = entry("r1", "c1", [1], [2]).model_dump(mode="json")


@pytest.mark.parametrize(
    "body",
    [
        ndjson({**HEADER, "calls": 2}, ENTRY),
        ndjson(HEADER),
        ndjson({"rollout_id": "r1"}, ENTRY),
        ndjson(HEADER, {**ENTRY, "generation_log_probs": []}),
        ndjson(HEADER, ENTRY)[:-10],
        b"",
    ],
)
def test_a_truncated_snapshot_is_an_error(body: bytes) -> None:
    """Fewer entries than announced are never taken for the rollout."""
    transport, _ = answering(httpx.Response(200, content=body))

    with SyncRolloutClient(transport=transport) as client:
        with pytest.raises(SidecarResponseError):
            client.snapshot("r1")
        with pytest.raises(SidecarResponseError):
            client.snapshot_ndjson("r1")


@pytest.mark.parametrize(
    "change",
    [
        {"loss_mask": [0]},
        {"log_probs": [0.0, None]},
        {"token_ids": [1, -2]},
        {"token_ids": [1, 2.5]},
        {"token_ids": "12"},
    ],
)
def test_rows_that_do_not_fit_together_are_an_error(change: dict[str, Any]) -> None:
    """Never padded or zipped."""
    row = {
        "row_id": "main",
        "model_call_ids": ["c1"],
        "token_ids": [1, 2],
        "loss_mask": [0, 1],
        "log_probs": [0.0, -0.5],
        "call_spans": [],
        "starts": {"kind": "root"},
        "ends": "stop",
        "mask_sample": False,
    }
    body = {
        "rollout_id": "r1",
        "builder": "prefix_merging",
        "mask_sample": False,
        "rows": [{**row, **change}],
        "main_row": 0,
        "metrics": {},
        "snapshot_id": "s",
        "version": 1,
    }
    transport, _ = answering(httpx.Response(200, json=body))

    with SyncRolloutClient(transport=transport) as client, pytest.raises(SidecarResponseError):
        client.traces("r1")


# --- patience ----------------------------------------------------------------------------------

DOWN_BODY = {"error": {"type": "x", "code": "capture_unavailable", "message": "disk full"}}


def down() -> httpx.Response:
    return httpx.Response(503, json=DOWN_BODY, headers={"retry-after": "1"})


STATUS = {"rollout_id": "r1", "state": "open", "calls": 1, "a_newer_key": True}


@pytest.mark.parametrize(
    "fail", [down, lambda: httpx.ConnectError("refused"), lambda: httpx.ReadTimeout("")]
)
async def test_lost_answers_and_503_are_tried_again(fail: Callable[[], Any]) -> None:
    """The calls are idempotent, so both clients ask again."""
    transport, asked = answering(fail(), fail(), httpx.Response(200, json=STATUS))
    async with RolloutClient(transport=transport) as client:
        assert (await client.status("r1")).calls == 1
    assert len(asked) == 3

    transport, asked = answering(fail(), fail(), httpx.Response(200, json=STATUS))
    with SyncRolloutClient(transport=transport) as blocking:
        assert blocking.status("r1").calls == 1
    assert len(asked) == 3


async def test_patience_ends() -> None:
    """After the last retry the error is the server's own, or says that nobody answers."""
    transport, asked = answering(down())
    async with RolloutClient(transport=transport, retries=2) as client:
        with pytest.raises(StoreUnavailableError, match="disk full"):
            await client.status("r1")
    assert len(asked) == 3

    transport, asked = answering(httpx.ConnectError("refused"))
    with SyncRolloutClient(transport=transport, retries=1) as blocking:
        with pytest.raises(SidecarUnreachableError, match="token-capture serve"):
            blocking.status("r1")
        assert len(asked) == 2
        with pytest.raises(SidecarUnreachableError):
            blocking.wait_ready(timeout_s=0)


@pytest.mark.parametrize("status", [400, 401, 404, 409, 410, 500])
def test_final_answers_are_not_tried_again(status: int) -> None:
    """Asking again would not change them."""
    transport, asked = answering(httpx.Response(status, json={}))

    with SyncRolloutClient(transport=transport) as client, pytest.raises(TokenCaptureError):
        client.status("r1")

    assert len(asked) == 1


def test_backoff_doubles_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits grow, spread, and never exceed five seconds; Retry-After counts."""
    monkeypatch.undo()

    delays = list(client_requests.retry_delays(12))

    assert all(0.05 <= delays[0] <= 0.1 and delay <= 5.0 for delay in delays)
    assert delays[-1] >= 2.5
    answer = client_requests.Answer(status=503, headers={"retry-after": "3"}, body=b"")
    assert client_requests.wait_before_retry(answer, 0.1) == 3.0
    odd = client_requests.Answer(status=503, headers={"retry-after": "soon"}, body=b"")
    assert client_requests.wait_before_retry(odd, 0.1) == 0.1


# --- where to, as whom -------------------------------------------------------------------------


def test_server_and_token_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Arguments win; of several tokens the first is used; a file works too."""
    monkeypatch.setenv("TOKEN_CAPTURE_SERVER", "http://sidecar:1234")
    monkeypatch.setenv("TOKEN_CAPTURE_CONTROL_TOKEN", "first,second")
    transport, asked = answering(httpx.Response(200, json=STATUS))
    with SyncRolloutClient(transport=transport) as client:
        client.status("r1")
    monkeypatch.delenv("TOKEN_CAPTURE_CONTROL_TOKEN")
    file = tmp_path / "token"
    file.write_text("from-file\n", encoding="utf-8")
    monkeypatch.setenv("TOKEN_CAPTURE_CONTROL_TOKEN_FILE", str(file))
    with SyncRolloutClient(transport=transport) as client:
        client.status("r1")
    with SyncRolloutClient("http://other", control_token="arg", transport=transport) as client:
        client.status("r1")

    seen = [(r.url.host, r.headers["authorization"]) for r in asked]
    assert seen == [
        ("sidecar", "Bearer first"),
        ("sidecar", "Bearer from-file"),
        ("other", "Bearer arg"),
    ]


def test_proxies_of_the_environment_are_ignored(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster's HTTP proxy does not get to see the token."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")

    with SyncRolloutClient(server, control_token="t0ken", retries=0) as client:
        assert client.status("r1").state == "unknown"


@pytest.mark.parametrize("server", ["sidecar:8900", "ftp://x", "127.0.0.1"])
def test_a_server_that_is_no_url_is_refused(server: str) -> None:
    """With a hint, before anything is sent."""
    with pytest.raises(ConfigurationError, match="http://"):
        SyncRolloutClient(server)


def test_the_token_shows_in_no_repr() -> None:
    """Clients end up in logs."""
    with SyncRolloutClient(control_token="sesame") as client:
        assert "sesame" not in repr(client)


def test_both_clients_have_the_same_methods() -> None:
    """Names, parameters, defaults and results agree; only waiting differs."""

    def surface(cls: type) -> dict[str, str]:
        return {
            name: str(inspect.signature(member))
            for name, member in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_")
        }

    assert surface(RolloutClient) == surface(SyncRolloutClient)


def test_every_request_is_offered_by_the_clients() -> None:
    """A call that is described but not reachable would be dead."""
    builders: list[Callable[..., Any]] = [
        value
        for name, value in inspect.getmembers(client_requests, inspect.isfunction)
        if not name.startswith("_") and "Call[" in str(inspect.signature(value).return_annotation)
    ]

    names = {builder.__name__ for builder in builders}
    assert names >= {"status", "freeze", "retire"}
    assert names - {"ready"} <= set(dir(RolloutClient))
