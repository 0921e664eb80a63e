"""Verification: sound records pass; any single change of a number, link or mask is named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.journal import Entry, decode, encode
from capture_server.trajectories import export
from capture_server.trajectories.rows import RolloutTraces, TraceRow
from capture_server.trajectories.traces import build_traces
from capture_server.verify import (
    Checked,
    Violation,
    load_recorded,
    verify_path,
    verify_snapshot,
    verify_traces,
)
from middleware.errors import InvalidInputError
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import LogProbs, TokenEntry, TokenIds
from tests.unit.capture_server.rollout_factory import call, delta, rollouts


def snapshot(entries: Sequence[TokenEntry], **fields: Any) -> TokenCaptureSnapshot:
    given: dict[str, Any] = {"incomplete": False, "snapshot_id": "s", "version": 9}
    return TokenCaptureSnapshot(rollout_id="r", entries=list(entries), **{**given, **fields})


def conversation() -> list[TokenEntry]:
    """Root, two delta continuations that branch, a drifted one, a sub-agent, a root of its own."""
    a = call("a", [1, 2, 3], [4, 5], created_at=1.0, response_id="ra")
    b = delta(call("b", [1, 2, 3, 4, 5, 6], [7, 8], a, created_at=2.0), 5)
    c = delta(call("c", [1, 2, 3, 4, 5, 6, 7, 8, 9], [10], b, created_at=3.0), 8)
    d = delta(call("d", [1, 2, 3, 4, 5, 11], [12], a, created_at=4.0), 5)
    drifted = call("e", [1, 2, 3, 4, 99, 13], [14, 15], a, drift_at=4, created_at=5.0)
    other = call("f", [20], [21, 22], parent_resolution="unresolved", created_at=6.0,
                 parent_resolution_reason="no_match")  # fmt: skip
    alone = call("g", [30], [31], created_at=7.0)
    return [a, b, c, d, drifted, other, alone]


def of_entries(entries: Sequence[TokenEntry], **fields: Any) -> list[Violation]:
    return list(verify_snapshot(snapshot(entries, **fields), Checked()))


def of_rows(traces: RolloutTraces, entries: TokenCaptureSnapshot | None = None) -> list[Violation]:
    return list(verify_traces(traces, Checked(), entries))


def codes(found: Sequence[Violation]) -> list[str]:
    return [violation.code for violation in found]


def changed(entries: list[TokenEntry], call_id: str, **update: Any) -> list[TokenEntry]:
    return [e.model_copy(update=update) if e.model_call_id == call_id else e for e in entries]


# --- what is sound passes --------------------------------------------------------------------


def test_a_sound_rollout_passes_and_is_counted() -> None:
    """Deltas, branches, recorded drift and fragments are no violations."""
    entries = snapshot(conversation())
    checked = Checked()
    assert list(verify_snapshot(entries, checked)) == []
    assert (checked.rollouts, checked.calls) == (1, 7)
    assert list(verify_traces(build_traces(entries), checked, entries)) == []
    assert checked.rows == len(build_traces(entries).rows)


@given(rollouts(), st.sampled_from(["prefix_merging", "per_request"]))
@settings(max_examples=150)
def test_what_the_builder_makes_of_any_rollout_passes(
    rollout: tuple[list[TokenEntry], str | None], builder: str
) -> None:
    """Rows agree with themselves and with the entries, however odd the rollout is."""
    entries, terminal = rollout
    one = snapshot(entries)
    traces = build_traces(one, builder=builder, explicit_terminal_call_id=terminal)
    ids = [e.model_call_id for e in entries]
    # With several records of one call, which one counts is the builder's own decision.
    against = one if len(ids) == len(set(ids)) else None
    assert of_rows(traces, against) == []


def test_a_long_chain_needs_no_recursion() -> None:
    """3,000 turns, each a delta on the one before."""
    entries = [call("c0", [0], [1])]
    cum = [0, 1]
    for at in range(1, 3000):
        prompt = [*cum, 2]
        entries.append(delta(call(f"c{at}", prompt, [3], entries[-1]), len(cum)))
        cum = [*prompt, 3]
    assert of_entries(entries) == []


# --- entries: any single change is named -----------------------------------------------------


@st.composite
def one_change(draw: st.DrawFn) -> tuple[list[TokenEntry], str]:
    """The conversation with one number, digest or link changed, and the changed call's id."""
    entries = conversation()
    at = draw(st.integers(0, len(entries) - 1))
    entry = entries[at]
    what = draw(
        st.sampled_from(["prompt", "generated", "digest", "cum_len", "parent", "cut", "add"])
    )
    update: dict[str, Any] = {}
    if what in ("prompt", "generated"):
        name = "prompt_token_ids" if what == "prompt" else "generation_token_ids"
        ids = getattr(entry, name).tolist()
        place = draw(st.integers(0, len(ids) - 1))
        ids[place] += draw(st.sampled_from([1, 2**31, 2**63]))
        update = {name: ids}
    elif what in ("cut", "add"):
        ids = entry.prompt_token_ids.tolist()
        update = {"prompt_token_ids": ids[1:] if what == "cut" else [*ids, 5]}
    elif what == "digest":
        assert entry.digest is not None
        place = draw(st.integers(0, 63))
        digit = "0" if entry.digest[place] != "0" else "1"
        update = {"digest": entry.digest[:place] + digit + entry.digest[place + 1 :]}
    elif what == "cum_len":
        assert entry.cum_len is not None
        update = {"cum_len": entry.cum_len + draw(st.sampled_from([-1, 1, 1000]))}
    else:
        others = [e.model_call_id for e in entries if e.model_call_id != entry.parent_call_id]
        if entry.drift_at is not None:
            others = []  # it may have left several calls at that place: only seals find that
        update = {"parent_call_id": draw(st.sampled_from([*others, "gone"]))}
        if entry.parent_resolution is not None and entry.parent_call_id is None:
            update = {"drift_at": 0}
    return changed(entries, entry.model_call_id, **update), entry.model_call_id


@given(one_change())
@settings(max_examples=300)
def test_any_single_change_of_a_record_is_found(change: tuple[list[TokenEntry], str]) -> None:
    """Token, prompt, digest, length, parent: the first violation is the call or one below it."""
    entries, call_id = change
    found = of_entries(entries)
    assert found
    assert call_id in {violation.call_id for violation in found}


@pytest.mark.parametrize(
    ("call_id", "update", "code", "position"),
    [
        ("a", {"generation_token_ids": [4, 6]}, "digest_mismatch", None),
        ("g", {"digest": None}, "digest_missing", None),
        ("g", {"cum_len": None}, "length_missing", None),
        ("g", {"cum_len": 3}, "length_mismatch", 2),
        ("e", {"drift_at": None}, "parent_mismatch", 4),
        ("e", {"drift_at": 3}, "drift_mismatch", 4),
        ("e", {"drift_at": True}, "record_invalid", None),
        ("b", {"drift_at": 5}, "drift_mismatch", None),
        ("b", {"parent_call_id": "x"}, "parent_missing", None),
        ("b", {"continuation_fingerprint": "abc"}, "stamp_malformed", None),
        ("b", {"continuation_context_len": -1}, "stamp_malformed", None),
        ("b", {"request_digest": "X" * 64}, "stamp_malformed", None),
        ("b", {"rollout_id": "q"}, "foreign_rollout_id", None),
        ("b", {"model_call_id": "../b"}, "invalid_call_id", None),
    ],
)
def test_each_violation_has_its_name_and_place(
    call_id: str, update: dict[str, Any], code: str, position: int | None
) -> None:
    """The first violation names the call and, where there is one, the position."""
    entries = changed(conversation(), call_id, **update)
    found = next(iter(verify_snapshot(snapshot(entries), Checked())))
    assert (found.code, found.position) == (code, position)
    assert found.call_id == update.get("model_call_id", call_id)
    assert found.rollout_id == "r"


def test_cycles_and_copies_are_named() -> None:
    """Parents that lead back, and two records of one call."""
    entries = conversation()
    circle = changed(changed(entries, "b", parent_call_id="c"), "c", parent_call_id="b")
    assert {v.call_id for v in of_entries(circle) if v.code == "parent_cycle"} == {"b", "c"}
    assert codes(of_entries([*entries, entries[0]])) == ["duplicate_call_id"]
    own = changed(entries, "d", parent_call_id="d")
    assert codes(of_entries(own))[0] == "parent_cycle"


def test_records_without_stamps_of_older_writers_pass() -> None:
    """Who decides nothing stamps nothing: there is nothing to recompute."""
    bare = [
        e.model_copy(update={"digest": None, "cum_len": None, "parent_resolution": None,
                             "parent_call_id": None})
        for e in conversation() if not e.prompt_is_delta and e.drift_at is None
    ]  # fmt: skip
    assert of_entries(bare) == []


# --- rows: any single change is named --------------------------------------------------------


def with_row(traces: RolloutTraces, at: int, **update: Any) -> RolloutTraces:
    rows = list(traces.rows)
    rows[at] = dataclasses.replace(rows[at], **update)
    return dataclasses.replace(traces, rows=rows)


def with_number(row: TraceRow, name: str, at: int, value: float) -> dict[str, Any]:
    numbers = np.array(getattr(row, name))
    numbers[at] = value
    return {name: numbers}


@given(st.data())
@settings(max_examples=300)
def test_any_single_change_of_a_row_is_found(data: st.DataObject) -> None:
    """Token, log-prob (by one bit), mask, span: named with row and position against the entries."""
    entries = snapshot(conversation())
    traces = build_traces(entries)
    index = data.draw(st.integers(0, len(traces.rows) - 1))
    row = traces.rows[index]
    last = row.call_spans[-1].end - 1
    at = data.draw(st.integers(0, last))
    what = data.draw(
        st.sampled_from(["token_ids", "loss_mask", "log_probs", "start", "end", "call"])
    )
    if what == "token_ids":
        update = with_number(row, what, at, int(row.token_ids[at]) + 1)
    elif what == "loss_mask":
        update = with_number(row, what, at, 1 - int(row.loss_mask[at]))
    elif what == "log_probs":
        update = with_number(row, what, at, np.nextafter(row.log_probs[at], -1.0))
    else:
        spans = list(row.call_spans)
        place = data.draw(st.integers(0, len(spans) - 1))
        span = spans[place]
        new: dict[str, Any] = {"model_call_id": "zz"} if what == "call" else {
            what: getattr(span, what) + data.draw(st.sampled_from([-1, 1]))
        }  # fmt: skip
        spans[place] = dataclasses.replace(span, **new)
        update = {"call_spans": spans}
    found = of_rows(with_row(traces, index, **update), entries)
    assert found
    assert any(violation.row_id == row.row_id for violation in found)


@pytest.mark.parametrize(
    ("update", "code"),
    [
        (lambda row: with_number(row, "loss_mask", 0, 1), "mask_mismatch"),
        (lambda row: with_number(row, "log_probs", 0, -0.5), "log_prob_of_masked"),
        (lambda row: with_number(row, "log_probs", 0, -0.0), "log_prob_of_masked"),
        (lambda row: with_number(row, "log_probs", 3, np.nan), "log_prob_unusable"),
        (lambda row: with_number(row, "log_probs", 3, -np.inf), "log_prob_unusable"),
        (lambda row: with_number(row, "log_probs", 3, np.inf), "log_prob_unusable"),
        (lambda row: with_number(row, "log_probs", 3, -9999.0), "log_prob_unusable"),
        (lambda row: {"log_probs": row.log_probs[:-1]}, "length_mismatch"),
        (lambda row: {"call_spans": row.call_spans[::-1]}, "span_misplaced"),
        (lambda row: {"model_call_ids": ["x"]}, "span_calls_mismatch"),
        (lambda row: {"ends": "length"}, "end_mismatch"),
        (lambda row: {"starts": {}}, "start_malformed"),
        (lambda row: {"row_id": "branch-0"}, "duplicate_row_id"),
    ],
)
def test_rows_are_checked_without_their_entries(
    update: Callable[[TraceRow], dict[str, Any]], code: str
) -> None:
    """What contradicts itself in a row needs no snapshot to be found."""
    traces = build_traces(snapshot(conversation()))
    at, row = next((at, row) for at, row in enumerate(traces.rows) if len(row.call_spans) == 3)
    assert code in codes(of_rows(with_row(traces, at, **update(row))))


def test_a_call_is_trained_exactly_once() -> None:
    """Twice, or nowhere: both are named with the call."""
    traces = build_traces(snapshot(conversation()))
    shared = next(at for at, row in enumerate(traces.rows) if not row.call_spans[0].trained)
    row = traces.rows[shared]
    spans = [dataclasses.replace(span, trained=True) for span in row.call_spans]
    twice = of_rows(with_row(traces, shared, call_spans=spans))
    assert ("trained_twice", "a") in {(v.code, v.call_id) for v in twice}
    firsts = [row.call_spans[0] for row in traces.rows]
    owner = next(at for at, s in enumerate(firsts) if s.trained and s.model_call_id == "a")
    spans = [dataclasses.replace(s, trained=False) for s in traces.rows[owner].call_spans[:1]]
    spans += traces.rows[owner].call_spans[1:]
    never = of_rows(with_row(traces, owner, call_spans=spans))
    assert ("never_trained", "a") in {(v.code, v.call_id) for v in never}


def test_rows_of_another_or_an_incomplete_snapshot() -> None:
    """Version, masking and choice of calls are compared too."""
    entries = snapshot(conversation())
    traces = build_traces(entries)
    assert codes(of_rows(traces, snapshot(conversation(), version=10))) == ["other_snapshot"]
    incomplete = snapshot(conversation(), incomplete=True)
    assert "incomplete_not_masked" in codes(of_rows(traces, incomplete))
    unmasked = [dataclasses.replace(row, mask_reasons=[]) for row in build_traces(incomplete).rows]
    lying = dataclasses.replace(traces, rows=unmasked)
    assert "call_not_trainable" in codes(of_rows(lying, incomplete))


def test_the_rollouts_own_mask_follows_from_its_rows() -> None:
    """A rollout that says it may be trained on while every row is masked contradicts itself."""
    traces = build_traces(snapshot(conversation(), incomplete=True))
    assert codes(of_rows(dataclasses.replace(traces, mask_sample=False))) == [
        "mask_sample_mismatch"
    ]
    assert codes(of_rows(dataclasses.replace(traces, main_row=99))) == ["main_row_missing"]


@pytest.mark.parametrize("builder", ["prefix_merging", "per_request"])
def test_the_main_row_is_the_attributed_calls(builder: str) -> None:
    """Another row, none, or one where nothing is attributed, is named."""
    entries = snapshot(conversation())
    traces = build_traces(entries, builder=builder, explicit_terminal_call_id="c")
    assert traces.main_row is not None
    assert of_rows(traces, entries) == []
    for main_row in (None, *(at for at in range(len(traces.rows)) if at != traces.main_row)):
        moved = dataclasses.replace(traces, main_row=main_row)
        assert codes(of_rows(moved, entries)) == ["main_row_mismatch"]
    unattributed = build_traces(entries, builder=builder)
    assert unattributed.main_row is None
    moved = dataclasses.replace(unattributed, main_row=0)
    assert codes(of_rows(moved, entries)) == ["main_row_mismatch"]
    only = snapshot([call("a", [1], [2])])
    traces = build_traces(only, builder=builder)
    assert of_rows(traces, only) == []
    moved = dataclasses.replace(traces, main_row=None)
    assert codes(of_rows(moved, only)) == ["main_row_mismatch"]


@pytest.mark.parametrize(
    "asked",
    [
        {"declared_response_id": "gone"},
        {"declared_response_id": "ra", "explicit_terminal_call_id": "c"},
    ],
)
def test_rows_of_an_unmatched_declaration_are_masked(asked: dict[str, Any]) -> None:
    """What the harness kept is in no record, or the witnesses disagree: nothing is trained."""
    entries = snapshot(conversation())
    traces = build_traces(entries, **asked)
    assert of_rows(traces, entries) == []
    rows = [dataclasses.replace(row, mask_reasons=[]) for row in traces.rows]
    lying = dataclasses.replace(traces, rows=rows, mask_sample=False)
    assert codes(of_rows(lying, entries)) == ["declared_not_masked"]


@pytest.mark.parametrize("builder", ["prefix_merging", "per_request"])
def test_rows_that_were_left_out_are_named(builder: str) -> None:
    """Unless they are fragments, and fragments were excluded when the rows were built."""
    entries = snapshot(conversation())
    traces = build_traces(entries, builder=builder)
    without = [row for row in traces.rows if "g" not in row.model_call_ids]
    found = of_rows(dataclasses.replace(traces, rows=without), entries)
    assert [(v.code, v.call_id) for v in found] == [("call_left_out", "g")]
    excluded = build_traces(entries, builder=builder, fragments="exclude")
    assert len(excluded.rows) < len(traces.rows)
    assert of_rows(excluded, entries) == []
    claimed = excluded.metrics | {"fragments": "include"}
    found = of_rows(dataclasses.replace(excluded, metrics=claimed), entries)
    assert {(v.code, v.call_id) for v in found} == {("call_left_out", "e"), ("call_left_out", "f")}


# --- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", export.SUFFIXES)
def test_exports_verify(suffix: str, tmp_path: Path) -> None:
    """Entries, rows, and rows against entries, in every format."""
    entries = snapshot(conversation())
    kept, rows = tmp_path / f"e{suffix}", tmp_path / f"r{suffix}"
    export.export_entries(kept, [entries])
    export.export_rows(rows, [build_traces(entries)])
    assert list(verify_path(kept)) == []
    assert list(verify_path(rows)) == []
    assert list(verify_path(rows, recorded=load_recorded(kept))) == []
    assert codes(list(verify_path(rows, recorded={}))) == ["entries_missing"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a JSON document that are neither objects nor arrays."""
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in leaves(v, (*path, k))]
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in leaves(v, (*path, i))]
    return [path]


def mutated(document: Any, path: tuple[Any, ...]) -> Any:
    for step in path[:-1]:
        document = document[step]
    old = document[path[-1]]
    if isinstance(old, bool):
        document[path[-1]] = not old
    elif isinstance(old, (int, float)):
        document[path[-1]] = old + 1
    else:
        document[path[-1]] = f"{old}x"
    return document


@given(st.data(), st.sampled_from(["rows", "entries"]))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_change_of_an_exported_value_is_found(
    tmp_path: Path, data: st.DataObject, kind: str
) -> None:
    """Whatever single value of the file is changed, head and log-probs too: a violation."""
    path = tmp_path / "x.jsonl"
    entries = snapshot(conversation())
    if kind == "rows":
        export.export_rows(path, [build_traces(entries)])
    else:
        export.export_entries(path, [entries])
    lines = path.read_text().splitlines()
    number = data.draw(st.integers(0, len(lines) - 1))
    document = json.loads(lines[number])
    mutated(document, data.draw(st.sampled_from(leaves(document))))
    lines[number] = json.dumps(document)
    path.write_text("".join(f"{line}\n" for line in lines))
    found = list(verify_path(path))
    assert found
    assert found[0].file == str(path)


@given(st.data(), st.sampled_from([".npz", ".safetensors", ".parquet", ".arrow", ".arrows"]))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bytes_never_pass_as_other_numbers(
    tmp_path: Path, data: st.DataObject, suffix: str
) -> None:
    """A flipped byte of a binary file: a violation, or (in padding) nothing at all changes."""
    path = tmp_path / f"x{suffix}"
    entries = snapshot(conversation())
    export.export_entries(path, [entries])
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.sampled_from([1, 4, 128]))
    path.write_bytes(raw)
    if not list(verify_path(path)):
        (back,) = export.load_entries(path)
        assert [e.model_dump() for e in back.entries] == [e.model_dump() for e in entries.entries]


# --- journals --------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store's root with a frozen and an open rollout."""
    store = TokenCaptureStore(tmp_path / "store")
    for entry in conversation():
        store.append(entry)
    store.append(call("z", [1], [2]).model_copy(update={"rollout_id": "open"}))
    store.freeze_now("r")
    store.close_now()
    return tmp_path / "store"


def journal(root: Path, rollout: str = "r") -> Path:
    return next(root.glob(f"*/{rollout}.jsonl"))


def test_a_root_and_a_journal_verify(root: Path) -> None:
    """All rollouts of a root, open ones too; or one journal by its path."""
    checked = Checked()
    assert list(verify_path(root, checked)) == []
    assert (checked.files, checked.rollouts, checked.calls) == (2, 2, 8)
    assert list(verify_path(journal(root))) == []
    assert load_recorded(root)["r"].snapshot_id == load_recorded(journal(root))["r"].snapshot_id


@given(st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_journal_line_is_named(root: Path, data: st.DataObject) -> None:
    """A changed byte before the last line: file and line; other rollouts are still verified."""
    path = journal(root)
    raw = path.read_bytes()
    lines = raw.splitlines(keepends=True)
    number = data.draw(st.integers(0, len(lines) - 2))
    at = data.draw(st.integers(0, len(lines[number]) - 2))
    line = bytearray(lines[number])
    line[at] ^= 1
    if b"\n" in line[:-1]:
        return
    try:
        path.write_bytes(b"".join([*lines[:number], bytes(line), *lines[number + 1 :]]))
        checked = Checked()
        found = list(verify_path(root, checked))
    finally:
        path.write_bytes(raw)
    assert (found[0].code, found[0].file, found[0].line) == ("corrupt_line", str(path), number + 1)
    assert checked.files == 2


def test_a_torn_tail_is_a_notice(root: Path) -> None:
    """What was never acknowledged is reported, and no violation."""
    with journal(root).open("ab") as file:
        file.write(b'{"t":"entry","call":"ha')
    checked = Checked()
    assert list(verify_path(root, checked)) == []
    assert len(checked.notices) == 1
    assert "torn tail" in checked.notices[0]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda e: e["entry"].update(generation_log_probs=LogProbs([-9.0, -9.0]).pack()),
         "payload_mismatch"),
        (lambda e: e["entry"].update(generation_token_ids=TokenIds([4, 6]).pack()),
         "payload_mismatch"),
        (lambda e: e["entry"].update(model="other"), "payload_mismatch"),
        (lambda e: e["entry"].update(generation_token_ids={"dtype": "<i4", "b64": "AAA"}),
         "record_invalid"),
        (lambda e: e.update(gen_len=7), "length_mismatch"),
        (lambda e: e.update(prompt_len=7), "length_mismatch"),
        (lambda e: e.update(call="other"), "call_id_mismatch"),
    ],
)  # fmt: skip
def test_a_record_written_anew_with_a_right_checksum_is_found(
    root: Path, change: Callable[[dict[str, Any]], None], code: str
) -> None:
    """The checksum guards against the disk, the payload's digest against editors."""
    path = journal(root)
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(at for at, line in enumerate(lines) if b'"t":"entry"' in line)
    record = decode(lines[number][:-1])
    assert isinstance(record, Entry)
    form: dict[str, Any] = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    form["entry"] = dict(form["entry"])
    change(form)
    lines[number] = encode(Entry(**form))
    path.write_bytes(b"".join(lines))
    found = list(verify_path(path))
    assert code in codes(found)
    assert (found[0].file, found[0].line) == (str(path), number + 1)


def test_a_moved_journal_is_named(root: Path) -> None:
    """A journal under another rollout's name would be served as that rollout."""
    journal(root).rename(journal(root).with_name("q.jsonl"))
    assert "journal_misplaced" in codes(list(verify_path(root)))


def test_a_newer_journal_is_not_understood(root: Path) -> None:
    """It is named as such, and not called damaged."""
    path = journal(root)
    from capture_server.stores.journal import Header

    path.write_bytes(encode(Header(rollout_id="r", uid="u", v=99)))
    assert codes(list(verify_path(path))) == ["unsupported_schema"]


def test_nothing_to_verify_is_an_error(tmp_path: Path) -> None:
    """An empty directory and a foreign file do not pass as verified."""
    with pytest.raises(InvalidInputError, match="no journals"):
        list(verify_path(tmp_path))
    (tmp_path / "x").write_bytes(b"hello world, this is no export")
    assert codes(list(verify_path(tmp_path / "x"))) == ["invalid_export"]
    (tmp_path / "empty").write_bytes(b"")
    assert codes(list(verify_path(tmp_path / "empty"))) == ["empty_export"]
    with pytest.raises(FileNotFoundError):
        list(verify_path(tmp_path / "absent"))
