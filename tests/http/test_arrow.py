"""Arrow over HTTP: snapshots and training rows as IPC streams, by ``Accept``."""

from __future__ import annotations

import gzip
import io
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

from capture_server.stores.file import TokenCaptureStore
from capture_server.trajectories.export import entries_from_arrow, rows_from_arrow
from capture_server.trajectories.traces import build_traces
from middleware.records import TokenEntry, canonical_bytes
from tests.http.control_rig import WHOLE, application, entry, http_to, record, root, three_turns

ARROW = "application/vnd.apache.arrow.stream"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TokenCaptureStore]:
    made = TokenCaptureStore(tmp_path / "store")
    yield made
    await made.close()


@pytest.fixture
async def http(store: TokenCaptureStore) -> AsyncIterator[httpx.AsyncClient]:
    async with http_to(application(store)) as client:
        yield client


async def frozen(
    http: httpx.AsyncClient, store: TokenCaptureStore, entries: Sequence[TokenEntry] | None = None
) -> None:
    await record(store, three_turns("r1") if entries is None else entries)
    assert (await http.post(root("r1", "freeze"))).status_code == 200


async def asked(http: httpx.AsyncClient, verb: str, **params: Any) -> httpx.Response:
    answer = await http.get(root("r1", verb), params=params, headers={"accept": ARROW})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == ARROW
    return answer


def table_of(answer: httpx.Response) -> pa.Table:
    return pa.ipc.open_stream(io.BytesIO(answer.content)).read_all()


async def test_a_snapshot_comes_back_as_it_was_recorded(
    http: httpx.AsyncClient, store: TokenCaptureStore
) -> None:
    """The same entries, byte for byte, as the store's own snapshot; deltas stay deltas."""
    await frozen(http, store)
    answer = await asked(http, "snapshot")
    found, expected = entries_from_arrow(answer.content), await store.snapshot("r1")
    assert [canonical_bytes(e) for e in found.entries] == [
        canonical_bytes(e) for e in expected.entries
    ]
    assert [e.delivered for e in found.entries] == [True] * 3
    assert (found.snapshot_id, found.version) == (expected.snapshot_id, expected.version)
    assert "accept" in answer.headers["vary"]


async def test_full_prompts_and_fields(http: httpx.AsyncClient, store: TokenCaptureStore) -> None:
    """The query means the same as in JSON; columns that were not asked for are left out."""
    await frozen(http, store)
    whole = entries_from_arrow((await asked(http, "snapshot", full_prompts="true")).content)
    assert whole.entries[2].prompt_token_ids == WHOLE[:-1]
    table = table_of(await asked(http, "snapshot", fields="generation_token_ids,finish_reason"))
    assert table["generation_token_ids"].to_pylist() == [[4, 5], [7, 8, 9], [12]]
    assert "prompt_token_ids" not in table.column_names
    assert "generation_log_probs" not in table.column_names
    details = table["details"].to_pylist()
    assert details[0] == '{"finish_reason":"stop","model_call_id":"c1"}'
    prompts = table_of(await asked(http, "snapshot", fields="prompt_token_ids"))
    assert '"prompt_is_delta":true' in prompts["details"].to_pylist()[2]


async def test_training_rows(http: httpx.AsyncClient, store: TokenCaptureStore) -> None:
    """The rows of format ``traces``, which Arrow implies; POST takes the scored call."""
    await frozen(http, store)
    expected = build_traces(await store.snapshot("r1"))
    for params in ({}, {"format": "traces"}):
        found = rows_from_arrow((await asked(http, "trajectories", **params)).content)
        assert found.to_json() == expected.to_json()
        assert found.rows[0].log_probs.dtype == np.float64
    posted = await http.post(
        root("r1", "trajectories"),
        json={"format": "traces", "terminal_call_id": "c2"},
        headers={"accept": ARROW},
    )
    assert rows_from_arrow(posted.content).rows[0].model_call_ids == ["c1", "c2"]


async def test_a_rollout_without_rows_is_still_told(
    http: httpx.AsyncClient, store: TokenCaptureStore
) -> None:
    """No row: the rollout's head comes alone, masked."""
    await frozen(http, store, [])
    found = rows_from_arrow((await asked(http, "trajectories")).content)
    assert (found.rows, found.mask_sample, found.main_row) == ([], True, None)
    assert entries_from_arrow((await asked(http, "snapshot")).content).entries == []


async def test_a_response_has_no_arrow_form(
    http: httpx.AsyncClient, store: TokenCaptureStore
) -> None:
    """Asked for by name it is 406, with what to do."""
    await frozen(http, store)
    answer = await http.get(
        root("r1", "trajectories"), params={"format": "responses"}, headers={"accept": ARROW}
    )
    assert answer.status_code == 406
    assert "format=traces" in answer.json()["error"]["message"]


async def test_json_stays_the_default(http: httpx.AsyncClient, store: TokenCaptureStore) -> None:
    """Who accepts everything gets JSON; the quality values decide otherwise."""
    await frozen(http, store)
    for accept, expected in (
        ("*/*", "application/json"),
        (f"application/json, {ARROW};q=0.5", "application/json"),
        (f"application/json;q=0.5, {ARROW}", ARROW),
    ):
        for verb in ("snapshot", "trajectories"):
            answer = await http.get(root("r1", verb), headers={"accept": accept})
            assert answer.headers["content-type"] == expected


async def test_compressed_on_request_and_unchanged_by_etag(
    http: httpx.AsyncClient, store: TokenCaptureStore
) -> None:
    """Content coding and 304 work as for JSON."""
    await frozen(http, store)
    plain = await asked(http, "snapshot")
    headers = {"accept": ARROW, "accept-encoding": "gzip"}
    async with http.stream("GET", root("r1", "snapshot"), headers=headers) as answer:
        raw = b"".join([piece async for piece in answer.aiter_raw()])
        assert answer.headers["content-encoding"] == "gzip"
    assert gzip.decompress(raw) == plain.content
    again = {"accept": ARROW, "if-none-match": plain.headers["etag"]}
    assert (await http.get(root("r1", "snapshot"), headers=again)).status_code == 304


async def test_what_arrow_cannot_hold_is_an_error_before_the_first_byte(
    http: httpx.AsyncClient, store: TokenCaptureStore
) -> None:
    """No answer that begins with 200 and breaks off."""
    await frozen(http, store, [entry("r1", "c1", [1], [2], export_seal="x")])
    answer = await http.get(root("r1", "snapshot"), headers={"accept": ARROW})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_export")


async def test_a_large_snapshot_is_small_in_arrow(
    http: httpx.AsyncClient, store: TokenCaptureStore
) -> None:
    """Forty growing calls: a fraction of the JSON with full prompts."""
    entries = [entry("r1", "c0", range(100_000, 102_000), [1])]
    known = [*range(100_000, 102_000), 1]
    for at in range(1, 40):
        new = list(range(200_000, 200_200))
        entries.append(entry("r1", f"c{at}", new, [2, 3], parent=entries[-1], parent_tokens=known))
        known += [*new, 2, 3]
    await frozen(http, store, entries)
    arrow = (await asked(http, "snapshot")).content
    plain = (await http.get(root("r1", "snapshot"), params={"full_prompts": "true"})).content
    assert len(arrow) * 5 < len(plain)
