"""``token-capture store check|dump``: what they find, what they print, how they end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capture_server.cli import app
from capture_server.cli_support import EXIT_CHECK_FAILED, EXIT_FILE, EXIT_USAGE
from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.inspection import check_root
from capture_server.stores.journal import Entry, encode, scan, seal
from middleware.records import TokenEntry


def run(*args: str):
    return CliRunner().invoke(app, ["store", *args])


def findings(root: Path) -> list[tuple[str, str, int]]:
    """(severity, code, line) of all files."""
    return [(f.severity, f.code, f.line) for report in check_root(root) for f in report.findings]


@pytest.fixture
def root(tmp_path, entry, intent):
    """A root with a frozen, an open, a retired rollout and one whose file name is hashed."""

    async def fill() -> None:
        store = TokenCaptureStore(tmp_path / "store")
        for rollout in ("frozen", "open", "gone", "UPPER"):
            await store.open_intent(intent("c1", rollout_id=rollout))
            await store.put(entry("c1", rollout_id=rollout, note=2**80))
            await store.note_delivery(rollout, "c1", {"delivered": True})
            await store.put(entry("c2", seed=3, rollout_id=rollout))
        await store.freeze("frozen")
        frozen = await store.freeze("gone")
        await store.drop("gone", snapshot_id=frozen.snapshot_id, version=frozen.version)
        await store.close()

    asyncio.run(fill())
    return tmp_path / "store"


def path_of(root: Path, rollout: str) -> Path:
    return TokenCaptureStore(root).path_for(rollout)


def test_a_sound_root(root):
    """Every journal is counted by state; nothing is found; exit 0."""
    plain, as_json = run("check", str(root)), run("check", f"file://{root}", "--json")

    assert (plain.exit_code, as_json.exit_code) == (0, 0)
    assert plain.stdout.startswith("4 journals (1 frozen, 2 open, 1 retired), ")
    assert "0 problems, 0 notes" in plain.stdout
    body = json.loads(as_json.stdout)
    assert body["states"] == {"frozen": 1, "open": 2, "retired": 1}
    assert (body["journals"], body["problems"], body["files"]) == (4, 0, [])
    assert body["records"] == 3 * 5 + 1 + 2
    assert body["bytes"] == sum(path.stat().st_size for path in root.rglob("*.jsonl"))


def test_checking_changes_nothing(root):
    """Not a byte, not a file, not a time stamp, also where something is wrong."""
    path = path_of(root, "open")
    path.write_bytes(path.read_bytes() + b'{"t":"ent')
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*.jsonl")}
    run("check", str(root))
    run("dump", str(root), "--unpack")

    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*.jsonl")}


def test_a_torn_tail_is_a_note(root):
    """It was never acknowledged: said with its line, and no failure."""
    path = path_of(root, "open")
    path.write_bytes(path.read_bytes() + b'{"t":"entry","call":"c3"')
    done = run("check", str(root))

    assert done.exit_code == 0
    assert f"note     {path.relative_to(root)}:6  torn_tail: 24 bytes" in done.stdout
    assert findings(root) == [("note", "torn_tail", 6)]


def test_corruption_is_a_problem_with_its_line(root):
    """A damaged line before whole ones masks its rollout; the others are sound."""
    path = path_of(root, "frozen")
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b"c1", b"cX", 1)
    path.write_bytes(b"\n".join(lines))
    done = run("check", str(root), "--json")

    assert done.exit_code == EXIT_CHECK_FAILED
    (report,) = json.loads(done.stdout)["files"]
    assert (report["rollout_id"], report["state"], report["incomplete"]) == (
        "frozen", "frozen", True,
    )  # fmt: skip
    (found,) = report["findings"]
    assert (found["code"], found["line"]) == ("corrupt", 3)
    assert found["offset"] == len(b"\n".join(lines[:2])) + 1


def test_the_check_agrees_with_the_store(root):
    """Version and state after damage are those that the store would answer."""
    path = path_of(root, "open")
    lines = path.read_bytes().split(b"\n")
    lines[1:3] = [b"garbage", b"\0\0\0"]
    path.write_bytes(b"\n".join(lines))

    async def ask():
        store = TokenCaptureStore(root)
        try:
            return await store.status("open")
        finally:
            await store.close()

    status = asyncio.run(ask())
    (report,) = [r for r in check_root(root) if r.rollout_id == "open"]

    assert (report.state, report.version, report.calls, report.incomplete) == (
        status.state, status.version, status.calls, status.incomplete,
    )  # fmt: skip
    assert [(f.code, f.line) for f in report.findings] == [("corrupt", 2)]


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda path: path.rename(path.with_name("other.jsonl")), "misplaced"),
        (lambda path: path.write_bytes(path.read_bytes().split(b"\n", 1)[1]), "no_header"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'"v":1', b'"v":9')), "corrupt"),
    ],
    ids=["moved", "without-header", "header-changed"],
)
def test_files_that_are_not_what_they_seem(root, damage, code):
    """Each is a problem by name."""
    damage(path_of(root, "open"))

    assert code in {found for severity, found, _ in findings(root) if severity == "problem"}


def test_a_newer_format_is_a_problem(root):
    """A line that this release does not understand is not called damage."""
    path = path_of(root, "open")
    path.write_bytes(path.read_bytes() + seal({"t": "from_the_future", "x": 1}))

    assert findings(root) == [("problem", "unsupported", 0)]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"payload": "0" * 64},
        {"gen_len": 9},
        {"prompt_len": 1},
        {"entry": {"rollout_id": "open"}},
    ],
)
def test_a_record_that_is_not_what_its_line_says(root, change):
    """The checksum is right and the content is not: only reading the record shows it."""
    path = path_of(root, "open")
    data = path.read_bytes()
    span = next(span for span in scan(data) if isinstance(span.record, Entry))
    assert isinstance(span.record, Entry)
    line = encode(dataclasses.replace(span.record, **change))
    path.write_bytes(data[: span.start] + line + data[span.end :])

    assert findings(root) == ([("problem", "bad_record", 3)] if change else [])


def test_leftovers_are_notes(root):
    """An empty journal, a temporary file, a foreign file: nothing that hurts a rollout."""
    (root / "ab").mkdir(exist_ok=True)
    (root / "ab" / "x.jsonl").touch()
    (root / "ab" / ".y.jsonl.tmp").write_bytes(b"half")
    (root / "README").write_text("hands off")

    assert sorted(findings(root)) == [
        ("note", "empty", 0),
        ("note", "leftover", 0),
        ("note", "leftover", 0),
    ]
    assert run("check", str(root)).exit_code == 0


def test_a_file_that_cannot_be_read(root, fs):
    """It is a problem of that file, and the others are checked."""
    fs.fail("read")
    reports = list(check_root(root, fs=fs))

    assert [f.code for report in reports for f in report.findings] == ["unreadable"]
    assert len(reports) == 4


# --- dump --------------------------------------------------------------------------------------


def test_dump_prints_every_record(root):
    """One JSON object a line, with rollout, file, line and offset, exactly as it is stored."""
    done = run("dump", str(root), "--rollout", "UPPER")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    data = path_of(root, "UPPER").read_bytes()

    assert done.exit_code == 0
    assert [row["t"] for row in rows] == ["journal", "intent", "entry", "note", "entry"]
    assert [row["line"] for row in rows] == [1, 2, 3, 4, 5]
    assert {row["rollout_id"] for row in rows} == {"UPPER"}
    assert {data[row["offset"] :][:5] for row in rows} == {b'{"t":', b'{"j":'}
    assert rows[2]["entry"]["note"] == 2**80
    assert set(rows[2]["entry"]["prompt_token_ids"]) == {"dtype", "b64"}


def test_dump_unpacks_arrays(root):
    """With the option, token ids and log-probs are lists: the record can be read back."""
    done = run("dump", str(root), "--unpack")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    entries = [TokenEntry.model_validate(row["entry"]) for row in rows if row["t"] == "entry"]

    assert len(entries) == 6
    assert {tuple(entry.prompt_token_ids) for entry in entries} == {(0, 1, 2), (3, 1, 2)}
    assert {row["rollout_id"] for row in rows} == {"frozen", "open", "gone", "UPPER"}


def test_dump_shows_damage(root):
    """Where bytes are no record, it says so and goes on."""
    path = path_of(root, "open")
    lines = path.read_bytes().split(b"\n")
    lines[1] = b"garbage"
    path.write_bytes(b"\n".join(lines) + b"torn")
    printed = run("dump", str(root), "--rollout", "open").stdout
    rows = [json.loads(line) for line in printed.splitlines()]

    damaged = [row for row in rows if row["t"] == "damaged"]
    assert [(row["line"], row["length"], row["newline"]) for row in damaged] == [
        (2, 8, True),
        (6, 4, False),
    ]
    assert [row["t"] for row in rows[2:5]] == ["entry", "note", "entry"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("check", "/no/such/directory"), EXIT_FILE, "there is no directory /no/such/directory"),
        (("check", "postgresql://host/db"), EXIT_USAGE, "is no file store"),
        (("dump", "file://host/dir"), EXIT_USAGE, "is no file store"),
    ],
)
def test_wrong_roots(args, code, message):
    """One line with the reason."""
    done = run(*args)

    assert done.exit_code == code
    assert message in done.stderr


def test_dump_of_an_unknown_rollout(root):
    """Named, with the file that was looked for; a hostile id never becomes a path."""
    unknown = run("dump", str(root), "--rollout", "r9")
    hostile = run("dump", str(root), "--rollout", "../x")

    assert (unknown.exit_code, hostile.exit_code) == (EXIT_FILE, EXIT_USAGE)
    assert "r9.jsonl" in unknown.stderr
