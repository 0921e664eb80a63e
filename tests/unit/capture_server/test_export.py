"""Exports: what comes back is what went in, bit for bit, or an error with a name."""

from __future__ import annotations

import json
import struct
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture_server.trajectories import export
from capture_server.trajectories.formats import packets
from capture_server.trajectories.rows import RolloutTraces
from capture_server.trajectories.traces import build_traces
from middleware.errors import ConfigurationError, InvalidInputError, UnsupportedSchemaError
from middleware.protocols import IncompleteReason, TokenCaptureSnapshot
from middleware.records import TokenEntry, TokenIds, canonical_bytes
from tests.unit.capture_server.rollout_factory import call, delta, rollouts

BINARY = [s for s in export.SUFFIXES if s not in (".jsonl", ".ndjson")]


def snapshot(
    entries: Sequence[TokenEntry], rollout_id: str = "r", **fields: Any
) -> TokenCaptureSnapshot:
    given: dict[str, Any] = {"incomplete": False, "snapshot_id": f"s-{rollout_id}", "version": 7}
    own = [entry.model_copy(update={"rollout_id": rollout_id}) for entry in entries]
    return TokenCaptureSnapshot(rollout_id=rollout_id, entries=own, **{**given, **fields})


def three_calls() -> list[TokenEntry]:
    """A root, its continuation as a delta, and a sub-agent's call whose history is not proven."""
    first = call("a", [1, 2], [3], created_at=1.5, agent_id="main", weight_version=4)
    second = delta(call("b", [1, 2, 3, 9], [5, 6], first, weight_version="w5"), 3)
    other = call("c", [7], [8], parent_resolution="unresolved", parent_resolution_reason="no_match")
    return [first, second, other]


def odd_snapshots() -> list[TokenCaptureSnapshot]:
    """What is rare but allowed: no entries, ids and numbers beyond every width, odd text."""
    wide = call("wide", [2**31, 0, 2**63 + 5, 2**64 - 1], [2**40, 1])
    content = [{"type": "message", "content": "\ud800 \u2028 é", "n": 2**90, "f": -0.0, "x": None}]
    text = call("text", [1], [2], output_items=content, token_item_index=0, usage={"z": 1, "a": 2})
    why = [IncompleteReason(code="dangling_intent", model_call_id="c9", detail="é", at=1.25)]
    return [
        snapshot([], "none", incomplete=True, incomplete_reasons=why),
        snapshot([wide], "wide"),
        snapshot([text, call("nothing", [4], [])], "text"),
        snapshot(three_calls(), "three"),
        snapshot([], "none2"),
    ]


def assert_same_entries(
    found: Sequence[TokenCaptureSnapshot], expected: Sequence[TokenCaptureSnapshot]
) -> None:
    assert [s.rollout_id for s in found] == [s.rollout_id for s in expected]
    for one, other in zip(found, expected, strict=True):
        assert [canonical_bytes(e) for e in one.entries] == [
            canonical_bytes(e) for e in other.entries
        ]
        assert [e.generation_log_probs.array.tobytes() for e in one.entries] == [
            e.generation_log_probs.array.tobytes() for e in other.entries
        ]
        assert (one.incomplete, one.snapshot_id, one.version) == (
            other.incomplete, other.snapshot_id, other.version,
        )  # fmt: skip
        assert list(one.incomplete_reasons) == list(other.incomplete_reasons)


def assert_same_rows(found: Sequence[RolloutTraces], expected: Sequence[RolloutTraces]) -> None:
    assert [t.to_json() for t in found] == [t.to_json() for t in expected]
    for one, other in zip(found, expected, strict=True):
        for row, known in zip(one.rows, other.rows, strict=True):
            assert row.log_probs.tobytes() == known.log_probs.tobytes()
            assert (row.token_ids.dtype, row.loss_mask.dtype) == (known.token_ids.dtype, np.uint8)
            assert row.call_spans == known.call_spans
            assert not row.token_ids.flags.writeable


# --- there and back --------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", export.SUFFIXES)
def test_entries_come_back(suffix: str, tmp_path: Path) -> None:
    """Every format keeps ids, log-probs, content, heads and the order of rollouts."""
    expected = odd_snapshots()
    path = tmp_path / f"e{suffix}"
    assert export.export_entries(path, iter(expected)) == len(expected)
    assert_same_entries(list(export.load_entries(path)), expected)


@pytest.mark.parametrize("suffix", export.SUFFIXES)
def test_rows_come_back(suffix: str, tmp_path: Path) -> None:
    """Every format keeps tokens, masks, spans, starts, reasons and metrics."""
    expected = [build_traces(one) for one in odd_snapshots()]
    path = tmp_path / f"r{suffix}"
    assert export.export_rows(path, iter(expected)) == len(expected)
    assert_same_rows(list(export.load_rows(path)), expected)


LOG_PROBS = st.floats(min_value=-9998.0, max_value=1e300, allow_nan=False)


@given(values=st.lists(LOG_PROBS, min_size=1, max_size=6), ids=st.lists(st.integers(0, 2**64 - 1)))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_number_survives(tmp_path: Path, values: list[float], ids: list[int]) -> None:
    """Denormals, -0.0 and ids of 64 bits too, in every format."""
    entry = TokenEntry(
        rollout_id="r", model_call_id="c", prompt_token_ids=ids,
        generation_token_ids=[i % 2**64 for i in range(len(values))], generation_log_probs=values,
        parent_resolution="root",
    )  # fmt: skip
    expected = [snapshot([entry])]
    for suffix in export.SUFFIXES:
        path = tmp_path / f"e{suffix}"
        export.export_entries(path, expected)
        assert_same_entries(list(export.load_entries(path)), expected)


@given(rollout=rollouts(), suffix=st.sampled_from(export.SUFFIXES))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_rollouts_come_back(
    tmp_path: Path, rollout: tuple[list[TokenEntry], str | None], suffix: str
) -> None:
    """Whatever a rollout holds, its rows are the same after a round trip."""
    entries, terminal = rollout
    expected = [build_traces(snapshot(entries), explicit_terminal_call_id=terminal)]
    export.export_rows(tmp_path / f"r{suffix}", expected)
    assert_same_rows(list(export.load_rows(tmp_path / f"r{suffix}")), expected)


@pytest.mark.parametrize("suffix", export.SUFFIXES)
def test_equal_exports_are_equal_bytes(suffix: str, tmp_path: Path) -> None:
    """A checksum of the file identifies what was exported."""
    for name in ("one", "two"):
        export.export_entries(tmp_path / f"{name}{suffix}", odd_snapshots())
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_the_format_is_told_by_the_bytes(tmp_path: Path) -> None:
    """A file under another name is read all the same."""
    expected = odd_snapshots()
    for suffix in export.SUFFIXES:
        path = tmp_path / f"e{suffix}"
        export.export_entries(path, expected)
        path.rename(tmp_path / "anything")
        assert_same_entries(list(export.load_entries(tmp_path / "anything")), expected)


def test_full_prompts_are_rebuilt_where_proven(tmp_path: Path) -> None:
    """A delta whose digest does not fit stays a delta and says so."""
    entries = three_calls()
    lost = entries[1].model_copy(update={"model_call_id": "d", "digest": "0" * 64})
    export.export_entries(tmp_path / "e.npz", [snapshot([*entries, lost])], full_prompts=True)
    (found,) = export.load_entries(tmp_path / "e.npz")
    shown = {
        e.model_call_id: (e.prompt_token_ids.tolist(), e.prompt_is_delta) for e in found.entries
    }
    assert shown["b"] == ([1, 2, 3, 9], False)
    assert shown["d"] == ([9], True)


def test_an_arrow_stream_of_one_rollout() -> None:
    """What the HTTP API sends is read back without a file."""
    expected = snapshot(three_calls())
    assert_same_entries(
        [export.entries_from_arrow(b"".join(export.arrow_stream(expected)))], [expected]
    )
    rows = build_traces(expected)
    assert_same_rows([export.rows_from_arrow(b"".join(export.arrow_stream(rows)))], [rows])


# --- what other programs see -----------------------------------------------------------------


def test_plain_arrow_and_parquet_readers_see_lists(tmp_path: Path) -> None:
    """Flat values with int64 offsets, named columns, versioned metadata: no code of ours needed."""
    traces = build_traces(snapshot(three_calls()))
    for suffix in (".arrow", ".parquet"):
        path = tmp_path / f"r{suffix}"
        export.export_rows(path, [traces])
        table = (
            pyarrow.parquet.read_table(path)
            if suffix == ".parquet"
            else pa.ipc.open_file(str(path)).read_all()
        )
        assert table.schema.metadata[b"format"] == b"token-capture.rows"
        assert table.schema.metadata[b"format_version"] == b"1"
        assert table.schema.field("token_ids").type == pa.large_list(
            pa.field("item", pa.int32(), nullable=False)
        )
        assert table["token_ids"].to_pylist() == [row.token_ids.tolist() for row in traces.rows]
        assert table["loss_mask"].to_pylist() == [row.loss_mask.tolist() for row in traces.rows]
        assert table["rollout_id"].to_pylist() == ["r"] * len(traces.rows)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_plain_numpy_readers_see_flat_arrays(suffix: str, tmp_path: Path) -> None:
    """Row i is ``token_ids[offsets[i]:offsets[i + 1]]``, offsets int64 of length N + 1."""
    traces = build_traces(snapshot(three_calls()))
    path = tmp_path / f"r{suffix}"
    export.export_rows(path, [traces, traces])
    arrays = dict(np.load(path)) if suffix == ".npz" else safetensors.numpy.load_file(path)
    offsets = arrays["token_offsets"]
    rows = [*traces.rows, *traces.rows]
    assert (offsets.dtype, len(offsets)) == (np.int64, len(rows) + 1)
    for at, row in enumerate(rows):
        place = slice(offsets[at], offsets[at + 1])
        assert np.array_equal(arrays["token_ids"][place], row.token_ids)
        assert np.array_equal(arrays["log_probs"][place], row.log_probs)


def test_an_http_snapshot_saved_as_it_came_is_read(tmp_path: Path) -> None:
    """``curl -H 'Accept: application/x-ndjson'`` makes a file that loads."""
    from capture_server.snapshot_body import EntryView, ndjson_pieces

    expected = snapshot(three_calls())
    path = tmp_path / "curl.ndjson"
    path.write_bytes(b"".join(ndjson_pieces(expected, EntryView())))
    assert_same_entries(list(export.load_entries(path)), [expected])


# --- memory and the disk ---------------------------------------------------------------------


@pytest.mark.parametrize("suffix", export.SUFFIXES)
def test_memory_does_not_grow_with_the_number_of_rollouts(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty rollouts of 200 KB pass through the memory of a few."""
    # A real row group (64 MiB) would hold them all.
    monkeypatch.setattr("capture_server.trajectories.formats.columnar._ROW_GROUP_BYTES", 1 << 20)
    tokens = TokenIds(np.arange(50_000, dtype=np.int32))
    rest = {
        "generation_token_ids": [1],
        "generation_log_probs": [-1.0],
        "parent_resolution": "root",
    }
    export.export_entries(tmp_path / f"warm{suffix}", [snapshot(three_calls())])

    def many() -> Iterator[TokenCaptureSnapshot]:
        for at in range(60):
            fresh = np.array(tokens.array) + at
            entry = TokenEntry(
                rollout_id=f"r{at}", model_call_id="c", prompt_token_ids=fresh, **rest
            )
            yield snapshot([entry], f"r{at}")

    tracemalloc.start()
    try:
        assert export.export_entries(tmp_path / f"e{suffix}", many()) == 60
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    whole = 60 * 50_000 * 4
    # Arrow collects batches of 2 MiB; everything else holds a rollout or two.
    assert peak < (whole if suffix in (".arrow", ".arrows", ".parquet") else whole / 3)


@pytest.mark.parametrize("suffix", export.SUFFIXES)
def test_a_failed_export_leaves_the_old_file(suffix: str, tmp_path: Path) -> None:
    """The new file appears whole or not at all, and nothing is left beside it."""
    path = tmp_path / f"e{suffix}"
    path.write_bytes(b"old")

    def failing() -> Iterator[TokenCaptureSnapshot]:
        yield snapshot(three_calls())
        raise RuntimeError("the source went away")

    with pytest.raises(RuntimeError, match="went away"):
        export.export_entries(path, failing())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# --- refusals --------------------------------------------------------------------------------


def test_an_unknown_suffix_names_the_known_ones(tmp_path: Path) -> None:
    """The error says what can be written."""
    with pytest.raises(InvalidInputError, match=r"\.parquet"):
        export.export_rows(tmp_path / "rows.csv", [])


@pytest.mark.parametrize(
    ("suffix", "module", "extra"),
    [(".parquet", "pyarrow", "arrow"), (".arrow", "pyarrow", "arrow"),
     (".safetensors", "safetensors.numpy", "safetensors")],
)  # fmt: skip
def test_a_missing_package_names_its_extra(
    suffix: str, module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy is in the message."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'token-capture\[{extra}\]'"):
        export.export_entries(tmp_path / f"e{suffix}", [snapshot(three_calls())])


@pytest.mark.parametrize("suffix", export.SUFFIXES)
def test_a_newer_version_is_refused(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer layout may mean something else by the same names."""
    from capture_server.trajectories.formats import columnar, flat, jsonl

    path = tmp_path / f"e{suffix}"
    with monkeypatch.context() as newer:
        for module in (columnar, flat, jsonl):
            newer.setattr(module, "FORMAT_VERSION", 2)
        export.export_entries(path, [snapshot(three_calls())])
    with pytest.raises(UnsupportedSchemaError, match="version"):
        list(export.load_entries(path))


@pytest.mark.parametrize("suffix", export.SUFFIXES)
def test_rows_are_no_entries(suffix: str, tmp_path: Path) -> None:
    """A file of one kind is not taken for the other."""
    path = tmp_path / f"e{suffix}"
    export.export_entries(path, [snapshot(three_calls())])
    with pytest.raises(export.InvalidExportError, match="entries, not rows"):
        list(export.load_rows(path))


@pytest.mark.parametrize("suffix", export.SUFFIXES)
def test_a_cut_file_raises(suffix: str, tmp_path: Path) -> None:
    """Wherever it was cut: an error, never fewer rollouts."""
    path = tmp_path / f"e{suffix}"
    export.export_entries(path, odd_snapshots())
    whole = path.read_bytes()
    ends = sorted({*range(1, len(whole), max(1, len(whole) // 40)), len(whole) - 1})
    for end in ends:
        path.write_bytes(whole[:end])
        try:
            found = list(export.load_entries(path))
        except InvalidInputError:
            continue
        # JSON lines and streams may be cut right behind a rollout.
        assert suffix in (".jsonl", ".ndjson", ".arrows")
        assert_same_entries(found, odd_snapshots()[: len(found)])


def bad_arrays() -> list[tuple[str, str, object]]:
    return [
        ("rows", "log_probs", [0.0, float("nan"), -0.1]),
        ("rows", "log_probs", [0.0, float("-inf"), -0.1]),
        ("rows", "log_probs", [0.0, -9999.0, -0.1]),
        ("rows", "log_probs", [0.0, "x", -0.1]),
        ("rows", "log_probs", [0.0, True, -0.1]),
        ("rows", "log_probs", [0.0, None, -0.1]),
        ("rows", "log_probs", [0.0, 0.0]),
        ("rows", "loss_mask", [0, 0, 2]),
        ("rows", "loss_mask", [0, 0, 0.5]),
        ("rows", "loss_mask", [0, 0, True]),
        ("rows", "loss_mask", [0, 0, -1]),
        ("rows", "token_ids", [1, 2, "3"]),
        ("rows", "token_ids", [1, 2, 2**64]),
        ("rows", "token_ids", [1, 2, -1]),
        ("rows", "token_ids", None),
        ("entries", "prompt_token_ids", [True, 2]),
        ("entries", "generation_log_probs", []),
        ("entries", "generation_token_ids", {"a": 1}),
    ]


@pytest.mark.parametrize(("kind", "column", "value"), bad_arrays())
def test_bad_numbers_in_a_file_raise(kind: str, column: str, value: object, tmp_path: Path) -> None:
    """Bools, texts, nulls, NaN, infinities, wrong lengths and ranges: named, never converted."""
    path = tmp_path / "x.jsonl"
    one = snapshot([call("a", [1, 2], [3])])
    if kind == "rows":
        export.export_rows(path, [build_traces(one)])
    else:
        export.export_entries(path, [one])
    head, line = path.read_text().splitlines()
    path.write_text(f"{head}\n{json.dumps({**json.loads(line), column: value})}\n")
    with pytest.raises(export.InvalidExportError, match="line 2"):
        list(export.read_packets(path))


def test_what_no_export_can_hold_is_refused(tmp_path: Path) -> None:
    """Values that are no JSON, foreign ids: an error with a name, and no file."""
    entry = call("a", [1], [2])
    strange = entry.model_copy(update={"agent_id": object()})
    for bad in (
        snapshot([strange]),
        TokenCaptureSnapshot("../up", [entry], False, "s", 1),
        snapshot([entry.model_copy(update={"export_seal": "x"})]),
    ):
        for suffix in export.SUFFIXES:
            with pytest.raises(InvalidInputError):
                export.export_entries(tmp_path / f"e{suffix}", [bad])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", BINARY)
def test_offsets_and_schemas_are_checked(suffix: str, tmp_path: Path) -> None:
    """Files of the right format that are no export of ours raise, whatever is missing."""
    path = tmp_path / f"x{suffix}"
    table = pa.table({"token_ids": [[1]]})
    header = np.frombuffer(b'{"format":"token-capture.rows","format_version":1}', np.uint8)
    for arrays in ({"a": np.arange(3)}, {"header": header}, {"header": header[:5]}):
        if suffix == ".npz":
            np.savez(path, **arrays)
        elif suffix == ".safetensors":
            safetensors.numpy.save_file(arrays, path)
        elif suffix == ".parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            opened = pa.ipc.new_file if suffix == ".arrow" else pa.ipc.new_stream
            with opened(str(path), table.schema) as writer:
                writer.write_table(table)
        with pytest.raises(export.InvalidExportError):
            list(export.read_packets(path))


@pytest.mark.parametrize("name", ["token_offsets", "details_offsets", "rollout_records"])
@pytest.mark.parametrize("change", ["short", "long", "negative", "beyond", "float", "absent"])
def test_offsets_that_do_not_cut_the_data_raise(name: str, change: str, tmp_path: Path) -> None:
    """Wrong lengths, orders and types of offsets are found before anything is cut."""
    path = tmp_path / "r.npz"
    export.export_rows(path, [build_traces(snapshot(three_calls()))])
    arrays = dict(np.load(path))
    good = arrays[name]
    arrays[name] = {
        "short": good[:-1],
        "long": np.append(good, good[-1]),
        "negative": np.concatenate([[-1], good[1:]]),
        "beyond": np.append(good[:-1], good[-1] + 1),
        "float": good.astype(np.float64),
        "absent": good,
    }[change]
    if change == "absent":
        del arrays[name]
    np.savez(path, **arrays)
    with pytest.raises(export.InvalidExportError):
        list(export.read_packets(path))


def test_absurd_sizes_in_a_file_raise(tmp_path: Path) -> None:
    """A header that announces more than there is: an error, no allocation of that size."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2**31) + b"{" + b" " * 64)
    with pytest.raises(export.InvalidExportError):
        list(export.read_packets(path))
    path.write_text('{"format":"token-capture.rows","format_version":1,"rollout_id":"r",'
                    '"records":1000000000000}\n')  # fmt: skip
    with pytest.raises(export.InvalidExportError, match="0 records"):
        list(export.read_packets(path))


def test_a_record_in_another_place_is_found(tmp_path: Path) -> None:
    """The seal covers the rollout and the place, not only the content."""
    packet = packets.pack_snapshot(snapshot(three_calls()))
    first = packet.records[0]
    kind = packet.kind
    assert first.seal == packets.record_seal(kind, "r", 0, first)
    assert first.seal != packets.record_seal(kind, "r", 1, first)
    assert first.seal != packets.record_seal(kind, "q", 0, first)
