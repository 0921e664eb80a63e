"""verify, tree and export on the command line: from a server, and from files alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from capture_server import cli, cli_support
from capture_server.config import load_settings
from capture_server.stores.file import TokenCaptureStore
from capture_server.trajectories import export
from tests.http.control_rig import application, entry, serving, three_turns


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TokenCaptureStore]:
    """Two frozen rollouts and an open one."""
    made = TokenCaptureStore(tmp_path / "store")
    for rollout in ("r1", "r2", "open"):
        for one in three_turns(rollout):
            made.append(one)
    made.freeze_now("r1")
    made.freeze_now("r2")
    yield made
    made.close_now()


@pytest.fixture
def server(store: TokenCaptureStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(application(store, load_settings(freeze_grace_s=0))) as address:
        monkeypatch.setenv("TOKEN_CAPTURE_SERVER", address)
        yield address


def run(*arguments: object, code: int = 0) -> Result:
    texts = [str(argument) for argument in arguments]
    result = CliRunner().invoke(cli.app, texts, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def run_json(*arguments: object, code: int = 0) -> Any:
    (line,) = run(*arguments, "--json", code=code).stdout.splitlines()
    return json.loads(line)


def corrupted(path: Path) -> int:
    """Change one byte of the second entry; its line number."""
    lines = path.read_bytes().splitlines(keepends=True)
    number = [at for at, line in enumerate(lines) if b'"t":"entry"' in line][1]
    lines[number] = lines[number].replace(b"c2", b"c9", 1)
    path.write_bytes(b"".join(lines))
    return number + 1


# --- verify ----------------------------------------------------------------------------------


def test_a_root_verifies_without_a_server(store: TokenCaptureStore) -> None:
    """Exit 0 and what was looked at."""
    assert "3 rollouts, 9 calls" in run("verify", store.root).stdout
    told = run_json("verify", store.root)
    assert (told["ok"], told["violations"], told["checked"]["files"]) == (True, [], 3)


def test_the_first_violation_is_named(store: TokenCaptureStore) -> None:
    """Exit 1; one line with file, line and rollout; all of them on request."""
    path = store.path_for("r1")
    line = corrupted(path)
    result = run("verify", store.root, code=cli_support.EXIT_CHECK_FAILED)
    (told,) = result.stderr.splitlines()
    assert told.startswith(f"violation: {path}: line {line}: rollout r1: corrupt_line: ")
    first = run_json("verify", store.root, code=1)["violations"]
    every = run_json("verify", store.root, "--all", code=1)["violations"]
    assert (len(first), first[0]) == (1, every[0])
    assert "parent_missing" in [violation["code"] for violation in every]


def test_a_rollout_is_verified_through_the_server(server: str) -> None:
    """Its entries, and the rows that the server builds against them."""
    told = run_json("verify", "r1")
    assert (told["ok"], told["checked"]["calls"], told["checked"]["rows"]) == (True, 3, 1)
    run("verify", "open", code=cli_support.EXIT_REFUSED)


def test_rows_are_compared_with_their_snapshot(store: TokenCaptureStore, tmp_path: Path) -> None:
    """An export of rows against the root, a journal or an export of entries."""
    rows, other = tmp_path / "rows.jsonl", tmp_path / "other.parquet"
    run("export", "r1", "--from", store.root, "-o", rows)
    run("export", "--from", store.root, "-o", other, "--kind", "entries")
    for recorded in (store.root, store.path_for("r1"), other):
        run("verify", rows, "--snapshot", recorded)
    head, line = rows.read_text().splitlines()
    row = json.loads(line)
    row["log_probs"][3] -= 0.25
    rows.write_text(f"{head}\n{json.dumps(row)}\n")
    (found,) = run_json("verify", rows, "--snapshot", other, code=1)["violations"]
    assert (found["code"], found["call_id"], found["position"]) == ("log_prob_mismatch", "c1", 3)


@pytest.mark.parametrize("name", ["no/such/file", "absent.parquet", "-"])
def test_what_is_neither_file_nor_rollout(name: str, tmp_path: Path) -> None:
    """A path that is not there says so; a name that could be an id is asked for."""
    code = cli_support.EXIT_UNREACHABLE if name == "absent.parquet" else cli_support.EXIT_USAGE
    run("verify", "--server", "http://127.0.0.1:9", "--", name, code=code)


# --- tree ------------------------------------------------------------------------------------


def test_the_tree_of_a_rollout(server: str, store: TokenCaptureStore) -> None:
    """From the server or a journal, for humans and programs."""
    shown = run("tree", "r1").stdout
    assert "rollout r1: 3 calls, 6 of 6 sampled tokens can be trained (100.0%)" in shown
    assert "c2  [resolved]  1 new + 3 sampled  stop  trained" in shown
    assert run("tree", store.path_for("r1")).stdout == shown
    assert run("tree", store.root, "--rollout", "r1").stdout == shown
    told = run_json("tree", "r1")
    assert [(c["model_call_id"], c["parent_call_id"]) for c in told["calls"]] == [
        ("c1", None), ("c2", "c1"), ("c3", "c2"),
    ]  # fmt: skip
    assert "give --rollout" in run("tree", store.root, code=cli_support.EXIT_USAGE).stderr


# --- export ----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", export.SUFFIXES)
@pytest.mark.parametrize("kind", ["rows", "entries"])
def test_export_of_many_rollouts(
    suffix: str, kind: str, server: str, store: TokenCaptureStore, tmp_path: Path
) -> None:
    """By name, by prefix, or from the files; open rollouts are left out, all verify."""
    target = tmp_path / f"x{suffix}"
    for source in (["r1", "r2"], ["--prefix", ""], ["--from", store.root]):
        told = run_json("export", *source, "-o", target, "--kind", kind)
        assert told["rollouts"] == 2
        load = export.load_rows if kind == "rows" else export.load_entries
        assert [one.rollout_id for one in load(target)] == ["r1", "r2"]
        run("verify", target)


def test_an_export_is_a_source(store: TokenCaptureStore, tmp_path: Path) -> None:
    """Entries exported once give rows later, or another format, without the store."""
    kept, rows = tmp_path / "kept.arrow", tmp_path / "rows.npz"
    run("export", "--from", store.root, "-o", kept, "--kind", "entries", "--full-prompts")
    (first, _) = export.load_entries(kept)
    assert not any(one.prompt_is_delta for one in first.entries)
    assert run_json("export", "r2", "--from", kept, "-o", rows)["rollouts"] == 1
    run("verify", rows, "--snapshot", kept)


def test_damaged_open_and_unknown_rollouts_are_not_exported(
    store: TokenCaptureStore, tmp_path: Path
) -> None:
    """Nothing is written, and the reason is one line."""
    target = tmp_path / "x.jsonl"
    for name, code in (("open", cli_support.EXIT_USAGE), ("r3", cli_support.EXIT_USAGE)):
        result = run("export", name, "--from", store.root, "-o", target, code=code)
        assert len(result.stderr.splitlines()) == 1
    corrupted(store.path_for("r1"))
    result = run("export", "--from", store.root, "-o", target, code=cli_support.EXIT_CHECK_FAILED)
    assert "corrupt_line" in result.stderr
    assert not target.exists()


def test_files_that_cannot_be_written_or_read(store: TokenCaptureStore, tmp_path: Path) -> None:
    """Their own exit code, and the system's words."""
    absent = tmp_path / "no" / "x.jsonl"
    result = run("export", "--from", store.root, "-o", absent, code=cli_support.EXIT_FILE)
    assert "No such file" in result.stderr
    run("export", "--from", tmp_path / "none", "-o", absent, code=cli_support.EXIT_FILE)


def test_drift_shows_in_status(server: str, store: TokenCaptureStore) -> None:
    """Which call, and after how many of its parent's tokens."""
    first = entry("d", "c1", [1, 2], [3])
    second = entry("d", "c2", [1, 2, 9], [4], parent=first, parent_tokens=[])
    second.prompt_is_delta = False
    second.drift_at = 2
    for one in (first, second):
        store.append(one)
    assert "1 (c2 at 2)" in run("status", "d").stdout
    assert run_json("status", "d")["drifted"] == [
        {"model_call_id": "c2", "drift_at": 2, "parent_call_id": "c1"}
    ]
