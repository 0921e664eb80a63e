"""The remote store over a real sidecar: the contract, lost answers, errors by their code."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from capture_server.app import create_app
from capture_server.config import load_settings
from capture_server.conformance import run_conformance
from capture_server.in_thread import served_in_thread
from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.memory import MemoryCaptureStore
from capture_server.stores.registry import open_resolver, open_store
from capture_server.stores.remote import (
    HttpLineageResolver,
    HttpTokenSink,
    HttpTokenSource,
    RemoteCaptureStore,
)
from capture_server.stores.remote_link import SidecarLink
from middleware.errors import (
    CallIdConflictError,
    ConfigurationError,
    InvalidIdError,
    InvalidRecordError,
    NotFrozenError,
    StoreClosedError,
    StoreError,
    StoreUnavailableError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
)
from middleware.lineage import stamp_continuation
from middleware.protocols import CaptureStore, QueryResolver, TokenSink, TokenSource
from middleware.records import (
    ParentResolutionStatus,
    TokenIds,
    canonical_bytes,
    cumulative_tokens,
    stamp_lineage,
)
from tests.stores.remote_rig import remote, sidecar


@pytest.fixture
async def central(tmp_path):
    """A sidecar over a file store."""
    store = TokenCaptureStore(tmp_path / "store")
    async with sidecar(store) as made:
        yield made
    await store.close()


@pytest.fixture
async def far(central, tmp_path):
    """A remote store over it."""
    made = remote(central, tmp_path / "spill")
    yield made
    await made.close()


async def test_remote_store_conforms(central, tmp_path):
    """All checks, every handle a client of its own."""
    passed = await run_conformance(
        lambda: remote(central, tmp_path / "spill"),
        lambda: remote(central, tmp_path / "spill"),
        lambda: HttpLineageResolver(central.url),
    )

    assert len(passed) == 25


async def test_each_part_serves_alone(central, tmp_path, entry):
    """A sink, a source and a resolver of their own, as an engine and a trainer would hold them."""
    sink = HttpTokenSink(central.url, spill_dir=tmp_path / "spill")
    source, resolver = HttpTokenSource(central.url), HttpLineageResolver(central.url)
    assert isinstance(sink, TokenSink)
    assert isinstance(source, TokenSource)
    assert isinstance(resolver, QueryResolver)
    assert isinstance(remote(central, tmp_path), CaptureStore)

    await sink.put(entry("c1", note=2**80))
    found = await resolver.resolve_call_id("r1", "c1")
    frozen = await source.freeze("r1")
    for part in (sink, source, resolver, sink, source, resolver):
        await part.close()

    assert found.match is not None
    assert found.match.cumulative_token_ids == cumulative_tokens(entry("c1"))
    assert [canonical_bytes(e) for e in frozen.entries] == [
        canonical_bytes(entry("c1", note=2**80))
    ]


async def test_store_urls_open_it(central, tmp_path, entry):
    """``http://`` is a store URL; its resolver goes over the same connections."""
    store = open_store(central.url + "/", spill_dir=tmp_path)
    assert isinstance(store, RemoteCaptureStore)
    resolver = open_resolver(central.url, store)
    await store.put(entry("c1", response_id="resp"))

    assert (await resolver.resolve_response_id("r1", "resp")).match.model_call_id == "c1"
    assert (store.is_process_shared(), resolver.is_process_shared()) == (True, True)
    await resolver.close()
    assert (await store.status("r1")).calls == 1
    await store.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://user:secret@host", "no credentials"),
        ("http://host?x=1", "no options"),
        ("http://", "no sidecar address"),
    ],
)
def test_unfit_addresses_are_refused(url, message):
    """At start, and without repeating a secret."""
    with pytest.raises(ConfigurationError, match=message) as caught:
        open_store(url)

    assert "secret" not in str(caught.value)


# --- lost answers ------------------------------------------------------------------------------


class Lossy:
    """Lets the application act, then breaks the connection off before its answer is whole."""

    def __init__(self, app, times: int) -> None:
        self._app = app
        self._times = times
        self._seen: dict[str, int] = {}

    async def __call__(self, scope, receive, send):
        key = f"{scope.get('method')} {scope.get('raw_path')} {scope.get('query_string')}"
        self._seen[key] = self._seen.get(key, 0) + 1
        if scope["type"] != "http" or self._seen[key] > self._times:
            await self._app(scope, receive, send)
            return

        async def lose(message):
            if message["type"] == "http.response.start":
                lost = [(b"content-length", b"999999")]
                await send({"type": "http.response.start", "status": 200, "headers": lost})
                await send({"type": "http.response.body", "body": b"{", "more_body": True})

        await self._app(scope, receive, lose)


async def test_every_operation_survives_a_lost_answer(tmp_path, entry, intent, caplog):
    """Sent again, each does what it would have done once; nothing conflicts with itself."""
    inner = MemoryCaptureStore()
    app = create_app(load_settings(store="memory:", freeze_grace_s=0.05), store=inner)
    async with served_in_thread(Lossy(app, times=2)) as url:
        store = RemoteCaptureStore(url, spill_dir=tmp_path)
        ticket = await store.open_intent(intent("c1", "body"))
        await ticket.wait_durable()
        await store.put(entry("c1"))
        await store.note_delivery("r1", "c1", {"delivered": True})
        await store.begin_call("r1", "c2")
        await store.cancel_call("r1", "c2", "refused: no room")
        await store.mark_incomplete("r1", "c3", "some_reason", "detail")
        assert await store.fence("r1") == []
        found = await store.open_resolver().resolve_call_id("r1", "c1")
        frozen = await store.freeze("r1")
        dropped = await store.drop("r1", snapshot_id=frozen.snapshot_id, version=frozen.version)
        await store.close()

    assert ticket.first_call
    assert found.status is ParentResolutionStatus.RESOLVED
    assert [e.delivered for e in frozen.entries] == [True]
    assert [(r.code, r.model_call_id) for r in frozen.incomplete_reasons] == [("some_reason", "c3")]
    assert dropped
    assert inner.statistics().conflicts == 0


async def test_an_intent_sent_again_is_no_first_call_twice(far, intent):
    """Another call with another body came in between: the answer for the same attempt is safe."""
    first = await far.open_intent(intent("c1", "a", attempt="t1"))
    await far.open_intent(intent("c2", "b"))
    again = await far.open_intent(intent("c1", "a", attempt="t1"))
    with pytest.raises(CallIdConflictError):
        await far.open_intent(intent("c1", "a", attempt="t2"))

    assert (first.first_call, again.first_call) == (True, False)
    assert list((await far.status("r1")).open_intents) == ["c1", "c2"]


async def test_an_attempt_is_repeated_during_a_fence_but_not_after_the_freeze(far, intent):
    """The fence came after the intent; the freeze has judged it."""
    sent = intent("c1", attempt="t1")
    await far.open_intent(sent)
    await far.fence("r1")
    await far.open_intent(sent)
    ticket = await far.open_intent(sent)
    frozen = await far.freeze("r1")
    with pytest.raises(TokenCaptureFrozenError):
        await far.open_intent(sent)
    await ticket.wait_durable()  # judged: nothing is left to wait for

    assert [r.code for r in frozen.incomplete_reasons] == ["dangling_intent"]


async def test_an_intent_may_be_on_disk_at_once(tmp_path, intent):
    """Then the ticket needs no second request: it can be waited for with the sidecar gone."""
    async with sidecar(MemoryCaptureStore()) as made:
        store = remote(made, tmp_path)
        ticket = await store.open_intent(intent("c1"))
        await made.stop()
        await ticket.wait_durable()
        await store.close()


# --- errors ------------------------------------------------------------------------------------


async def test_errors_keep_their_class(far, entry, intent):
    """What the contract names arrives as itself, so that capture treats it alike."""
    await far.put(entry("c1"))
    with pytest.raises(CallIdConflictError):
        await far.put(entry("c1", seed=5))
    with pytest.raises(NotFrozenError):
        await far.snapshot("r1")
    assert not await far.drop("r1", snapshot_id="x", version=1)
    frozen = await far.freeze("r1")
    with pytest.raises(TokenCaptureFrozenError):
        await far.put(entry("c2"))
    assert await far.drop("r1", snapshot_id=frozen.snapshot_id, version=frozen.version)
    with pytest.raises(TokenCaptureRetiredError):
        await far.open_intent(intent("c3"))
    with pytest.raises(TokenCaptureRetiredError):
        await far.freeze("r1")
    with pytest.raises(InvalidRecordError, match="no choice of call"):
        await far.put_choices([entry("c9.x")], "c9")
    with pytest.raises(InvalidIdError):
        await far.put(entry("c1", rollout_id="../x"))
    with pytest.raises(InvalidIdError):
        await far.mark_incomplete("r1", "a/b")


async def test_a_wrong_token_says_what_to_set(tmp_path, entry, monkeypatch):
    """To capture it is a store that is not there (503), not a bug."""
    monkeypatch.setenv("TOKEN_CAPTURE_CONTROL_TOKEN", "right")
    async with sidecar(MemoryCaptureStore()) as made:
        wrong = remote(made, tmp_path, control_token="wrong")
        with pytest.raises(StoreUnavailableError, match="control token"):
            await wrong.begin_call("r1", "c1")
        right = remote(made, tmp_path)
        await right.put(entry("c1"))
        for store in (wrong, right):
            await store.close()


async def test_a_full_disk_over_there_is_unavailable_here(tmp_path, entry, fs, monkeypatch):
    """The sidecar's 503 is tried again for a while, then told; health is red with its reason."""
    monkeypatch.setattr("capture_server.stores.remote.AFTER_DISPATCH_S", 1.0)
    monkeypatch.setattr("capture_server.stores.remote.BEFORE_DISPATCH_S", 1.0)
    inner = TokenCaptureStore(tmp_path / "store", fs=fs)
    async with sidecar(inner) as made:
        store = remote(made, tmp_path / "spill")
        assert await store.healthy() is None
        fs.fail("write", times=-1)
        with pytest.raises(StoreUnavailableError, match="Input/output error"):
            await store.put(entry("c1"))
        assert "not ready" in (await store.healthy() or "")
        fs.heal()
        await store.put(entry("c2"))
        assert await store.healthy() is None
        await store.close()
    await inner.close()


async def test_after_close_nothing_is_sent(far, entry):
    """A closed store says so."""
    await far.close()
    with pytest.raises(StoreClosedError):
        await far.put(entry("c1"))


def test_a_link_belongs_to_one_loop(monkeypatch):
    """A second event loop is told, instead of hanging on the first one's connections."""
    monkeypatch.setattr("capture_server.stores.remote_source.CONTROL_S", 0.05)
    link = SidecarLink("http://127.0.0.1:9")
    source = HttpTokenSource(link)

    async def ask():
        with pytest.raises(StoreError) as caught:
            await source.sweep_retired(1.0)
        return caught.value

    with asyncio.Runner() as first, asyncio.Runner() as second:
        assert isinstance(first.run(ask()), StoreUnavailableError)
        assert "one event loop" in str(second.run(ask()))
        first.run(link.close())


# --- lineage and holders -----------------------------------------------------------------------


async def test_continuations_resolve_by_hashes(far, entry):
    """All four questions find the parent with its exact tokens; the conversation stays here."""
    request = [{"role": "user", "content": "What is 2 + 2?"}]
    first = entry("c1", output_items=[{"role": "assistant", "content": "4"}], response_id="resp")
    stamp_lineage(first, None, parent_resolution=ParentResolutionStatus.ROOT)
    first = stamp_continuation(first, request)
    await far.put(first)
    resolver = far.open_resolver()
    continued = [*request, *first.output_items, {"role": "user", "content": "And 3 + 3?"}]
    whole = cumulative_tokens(first)

    answers = [
        await resolver.resolve("r1", continued),
        await resolver.resolve_tokens("r1", TokenIds.concat(whole, [9]), dispatched_at=9.0),
        await resolver.resolve_response_id("r1", "resp"),
        await resolver.resolve_call_id("r1", "c1"),
    ]
    root = await resolver.resolve("r1", request)
    unknown = await resolver.resolve_response_id("r1", "other")

    for answer in answers:
        assert answer.match is not None
        assert answer.match.cumulative_token_ids == whole
        assert answer.match.digest == first.digest
    assert root.status is ParentResolutionStatus.ROOT
    assert (unknown.status.value, unknown.reason) == ("unresolved", "no_match")
    with pytest.raises(ValueError):
        await resolver.resolve("r1", [{"role": "user", "content": 3}])


HOLDER = """
import asyncio, sys
from pathlib import Path
from capture_server.stores.remote import RemoteCaptureStore

async def main(url, spill):
    store = RemoteCaptureStore(url, spill_dir=Path(spill))
    await store.begin_call("r1", "c1")
    print("begun", flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_dead_engine_is_not_waited_for(tmp_path):
    """The holder of an intent is the engine's process, not the sidecar that wrote it down."""
    inner = TokenCaptureStore(tmp_path / "store")
    async with sidecar(inner, freeze_grace_s=30.0) as made:
        engine = subprocess.Popen(
            [sys.executable, "-c", HOLDER, made.url, str(tmp_path / "spill")],
            stdout=subprocess.PIPE,
        )
        assert engine.stdout is not None
        assert await asyncio.to_thread(engine.stdout.readline) == b"begun\n"
        assert await inner.fence("r1") == ["c1"]
        os.kill(engine.pid, signal.SIGKILL)
        engine.communicate()
        store = remote(made, tmp_path / "spill")
        began = time.monotonic()
        frozen = await store.freeze("r1")
        await store.close()
    await inner.close()

    assert time.monotonic() - began < 10
    assert [r.code for r in frozen.incomplete_reasons] == ["dangling_intent"]
