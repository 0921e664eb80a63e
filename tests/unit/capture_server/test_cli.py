"""The command line: output for humans and programs, exit codes, and nothing secret in argv."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from capture_server import cli, cli_support
from capture_server.config import Settings, load_settings
from capture_server.stores.file import TokenCaptureStore
from middleware.errors import ConfigurationError
from tests.http.control_rig import application, entry, serving, three_turns


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TokenCaptureStore]:
    made = TokenCaptureStore(tmp_path / "s")
    for one in three_turns("r1"):
        made.append(one)
    yield made
    made.close_now()


@pytest.fixture
def server(store: TokenCaptureStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(application(store, load_settings(freeze_grace_s=0))) as address:
        monkeypatch.setenv("TOKEN_CAPTURE_SERVER", address)
        yield address


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200"})


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def error_line(result: Result, code: int) -> str:
    """Exactly one line on stderr, nothing on stdout, and the documented exit code."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


# --- the loop ----------------------------------------------------------------------------------


def test_the_whole_loop_for_programs(server: str, tmp_path: Path) -> None:
    """status, freeze, snapshot, trajectories, retire, sweep, delete: one JSON object each."""
    assert run_json("status", "r1")["calls"] == 3
    frozen = run_json("freeze", "r1")
    assert frozen["state"] == "frozen"
    snapshot = run_json("snapshot", "r1")
    assert (snapshot["snapshot_id"], len(snapshot["entries"])) == (frozen["snapshot_id"], 3)
    rows = run_json("trajectories", "r1")
    assert rows["rows"][0]["token_ids"] == list(range(1, 13))
    response = run_json("trajectories", "r1", "--format", "responses")
    assert response["rebuilt_response"]["object"] == "response"
    retired = run_json(
        "retire", "r1", "--snapshot-id", frozen["snapshot_id"], "--version", str(frozen["version"])
    )
    assert retired == {"retired": True}
    assert run_json("sweep", "--older-than-s", "0") == {"removed": 1}
    assert run_json("delete", "r1") == {"deleted": True}
    assert run_json("status") == {"rollouts": [], "next_cursor": None}


def test_the_whole_loop_for_humans(server: str) -> None:
    """Words and tables, no JSON."""
    assert "3 (1 root, 2 resolved, 0 unresolved)" in run("status", "r1").stdout
    assert "frozen" in run("freeze", "r1").stdout
    table = run("status").stdout.splitlines()
    assert table[0].split() == ["rollout", "state", "calls", "generated", "tokens", "incomplete"]
    assert table[1].split() == ["r1", "frozen", "3", "6"]
    rows = run("trajectories", "r1").stdout
    assert "main (main)" in rows
    assert "12" in rows
    assert "output items" in run("trajectories", "r1", "--format", "responses").stdout
    assert run("retire", "r1", "--current").stdout == "retired r1\n"
    assert run("sweep", "--older-than-s", "0").stdout == "removed 1 tombstones\n"
    assert run("delete", "r1").stdout == "deleted r1\n"


def test_a_long_listing_names_the_next_page(server: str, store: TokenCaptureStore) -> None:
    """The cursor goes to stderr, so that the table can be piped."""
    store.append(entry("r2", "c1", [1], [2]))

    first = run("status", "--limit", "1")
    cursor = first.stderr.split()[-1]

    assert "more: --cursor" in first.stderr
    assert "r2" in run("status", "--cursor", cursor).stdout
    assert run_json("status", "--limit", "1")["next_cursor"] == cursor
    assert [r["rollout_id"] for r in run_json("status", "--prefix", "r2")["rollouts"]] == ["r2"]
    assert run_json("status", "--state", "frozen")["rollouts"] == []


def test_snapshot_to_a_file(server: str, tmp_path: Path) -> None:
    """JSON lines: the header, then the entries; prompts rebuilt on demand."""
    run("freeze", "r1")
    target = tmp_path / "r1.jsonl"

    assert "3 calls" in run("snapshot", "r1", "-o", str(target), "--full-prompts").stdout
    header, *entries = [json.loads(line) for line in target.read_text().splitlines()]
    assert header["calls"] == len(entries) == 3
    assert not any(e["prompt_is_delta"] for e in entries)
    assert list(tmp_path.glob(".*.part")) == []
    assert run_json("snapshot", "r1", "-o", str(target))["calls"] == 3
    shown = json.loads(run("snapshot", "r1").stdout.splitlines()[0])
    assert shown.items() <= header.items()


@pytest.mark.parametrize("suffix", ["arrow", "arrows", "parquet", "safetensors", "npz", "ndjson"])
def test_snapshot_in_every_format(suffix: str, server: str, tmp_path: Path) -> None:
    """The suffix chooses the format; what was written verifies."""
    run("freeze", "r1")
    target = tmp_path / f"r1.{suffix}"

    assert run_json("snapshot", "r1", "-o", str(target))["calls"] == 3
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith((".", "r1"))] == [target.name]
    assert run_json("verify", str(target))["checked"]["calls"] == 3


def test_snapshot_to_a_place_that_cannot_be_written(server: str, tmp_path: Path) -> None:
    """A file error has its own exit code."""
    run("freeze", "r1")

    missing = str(tmp_path / "absent" / "r1.jsonl")
    assert "cannot write" in error_line(run("snapshot", "r1", "-o", missing), cli_support.EXIT_FILE)


def test_masked_rollouts_can_fail_a_script(server: str, store: TokenCaptureStore) -> None:
    """By default a masked build is a result; with the flag it is exit code 1."""
    run("freeze", "empty")

    assert run("trajectories", "empty").exit_code == 0
    masked = run("trajectories", "empty", "--fail-if-masked")
    assert masked.exit_code == cli_support.EXIT_CHECK_FAILED
    assert "masked" in masked.stdout


def test_url_needs_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It only writes down where the agent has to go."""
    monkeypatch.setenv("TOKEN_CAPTURE_SERVER", "http://sidecar:8900")

    expected = "http://sidecar:8900/ng-rollout/r1/training-token-capture/v1"
    assert run("url", "r1").stdout == expected + "\n"
    assert run_json("url", "r1") == {"rollout_id": "r1", "base_url": expected}
    other = run("url", "r1", "--server", "http://127.0.0.1:1/")
    assert other.stdout.startswith("http://127.0.0.1:1/ng-rollout/")


# --- errors ------------------------------------------------------------------------------------


def test_an_unreachable_sidecar_is_exit_4() -> None:
    """With the address and the remedy."""
    result = run("status", "r1", "--server", "http://127.0.0.1:1")

    line = error_line(result, cli_support.EXIT_UNREACHABLE)
    assert "http://127.0.0.1:1" in line
    assert "token-capture serve" in line


@pytest.mark.parametrize("arguments", [("snapshot", "r1"), ("retire", "r1", "--current")])
def test_a_refusal_is_exit_3_with_its_code(arguments: tuple[str, ...], server: str) -> None:
    """What the sidecar says, in one line."""
    assert "[not_frozen]" in error_line(run(*arguments), cli_support.EXIT_REFUSED)


def test_a_stale_retire_is_refused(server: str) -> None:
    """Nothing is removed."""
    run("freeze", "r1")

    result = run("retire", "r1", "--snapshot-id", "other", "--version", "1")

    assert "[stale_snapshot]" in error_line(result, cli_support.EXIT_REFUSED)
    assert run_json("status", "r1")["state"] == "frozen"


@pytest.mark.parametrize(
    "arguments",
    [
        ("url", "../r1"),
        ("status", "a b"),
        ("retire", "r1"),
        ("retire", "r1", "--snapshot-id", "s"),
        ("retire", "r1", "--version", "1"),
        ("retire", "r1", "--current", "--version", "1"),
        ("snapshot", "r1", "-o", "r1.txt"),
        ("export", "r1"),
        ("export", "-o", "r1.npz"),
        ("verify", "no/such/file"),
        ("status", "--server", "sidecar:8900"),
    ],
)
def test_wrong_usage_is_exit_2_before_anything_is_sent(arguments: tuple[str, ...]) -> None:
    """With what to do instead."""
    error_line(run(*arguments), cli_support.EXIT_USAGE)


def test_tokens_come_from_the_environment_only(
    store: TokenCaptureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guarded sidecar is used with the variable; no command has an option for it."""
    with serving(application(store, load_settings(control_token="t0ken"))) as address:
        monkeypatch.setenv("TOKEN_CAPTURE_SERVER", address)
        assert "[unauthorized]" in error_line(run("status", "r1"), cli_support.EXIT_REFUSED)
        monkeypatch.setenv("TOKEN_CAPTURE_CONTROL_TOKEN", "t0ken")
        assert run_json("status", "r1")["calls"] == 3
    for command in cli.app.registered_commands:
        assert command.callback is not None
        options = set(inspect.signature(command.callback).parameters)
        assert not any("token" in name or "key" in name for name in options)


# --- serve, demo, config -----------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What ``serve`` was started with, without a server."""
    seen: list[Settings] = []
    module = types.ModuleType("capture_server.app")
    module.serve = seen.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "capture_server.app", module)
    return seen


def test_serve_merges_file_environment_and_flags(
    served: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags win over the environment, that over the file."""
    file = tmp_path / "sidecar.toml"
    file.write_text('port = 1\nhost = "localhost"\nupstream = "http://a:1"\n', encoding="utf-8")
    monkeypatch.setenv("TOKEN_CAPTURE_UPSTREAM", "http://b:2")
    monkeypatch.setenv("TOKEN_CAPTURE_CONTROL_TOKEN", "t")

    result = run("serve", "--config", str(file), "--port", "0", "--store", "memory:")

    assert result.exit_code == 0, result.output
    (settings,) = served
    assert (settings.port, settings.host) == (0, "localhost")
    assert (settings.upstream, settings.store) == ("http://b:2", "memory:")
    assert settings.control_tokens == ("t",)


def test_serve_refuses_bad_settings(served: list[Settings]) -> None:
    """All problems in one line, before anything starts."""
    line = error_line(
        run("serve", "--host", "0.0.0.0", "--workers", "0", "--upstream", "engine"),
        cli_support.EXIT_USAGE,
    )

    assert all(part in line for part in ("0.0.0.0", "workers", "upstream"))
    assert served == []


def test_every_flag_of_serve_is_a_setting() -> None:
    """``--foo-bar`` is ``foo_bar`` in the file and TOKEN_CAPTURE_FOO_BAR; secrets are no flags."""
    flags = set(inspect.signature(cli.serve).parameters)

    assert flags <= set(Settings.model_fields)
    assert {"upstream", "store", "host", "port", "control_port", "workers", "root_path"} <= flags
    assert {"on_disconnect", "prefix_supply", "bridge", "engine", "config"} <= flags
    assert not flags & {"control_token", "upstream_api_key"}


@pytest.mark.parametrize("held", [True, False])
def test_demo_exits_by_its_checks(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 only if every check of the loop held."""
    module = types.ModuleType("capture_server.demo.run")
    module.run_demo = lambda *, as_json: held  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "capture_server.demo.run", module)

    assert run("demo").exit_code == (0 if held else cli_support.EXIT_CHECK_FAILED)


def test_config_shows_the_effective_settings_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In both forms."""
    monkeypatch.setenv("TOKEN_CAPTURE_CONTROL_TOKEN", "sesame")
    monkeypatch.setenv("TOKEN_CAPTURE_PORT", "1234")

    shown = run("config", "--show")
    assert "port" in shown.stdout
    assert "1234" in shown.stdout
    assert "sesame" not in shown.stdout
    assert run_json("config", "--show")["control_token"] == "**********"
    assert "valid" in run("config").stdout


def test_config_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same line that serve would print."""
    monkeypatch.setenv("TOKEN_CAPTURE_PROT", "1234")

    assert "TOKEN_CAPTURE_PORT" in error_line(run("config"), cli_support.EXIT_USAGE)
    with pytest.raises(ConfigurationError):
        load_settings()


def test_version() -> None:
    """As command and as option."""
    version = run_json("version")["version"]

    assert run("version").stdout == f"token-capture {version}\n"
    assert run("--version").stdout == f"token-capture {version}\n"


# --- the real program --------------------------------------------------------------------------


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "capture_server.cli", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_the_program_against_a_real_server(server: str) -> None:
    """One process per command, as a shell script would use it."""
    frozen = program("freeze", "r1", "--json")
    refused = program("freeze", "-x")

    assert json.loads(frozen.stdout)["state"] == "frozen"
    assert frozen.stderr == ""
    assert refused.returncode == cli_support.EXIT_USAGE
    snapshot = program("snapshot", "r1")
    assert json.loads(snapshot.stdout.partition("\n")[0])["calls"] == 3


def test_help_is_fast_and_documents_the_exit_codes() -> None:
    """No server, client or numerics are imported for it."""
    started = time.perf_counter()
    result = program("--help")
    elapsed_s = time.perf_counter() - started

    assert "Exit codes: 0 done; 1" in result.stdout
    assert elapsed_s < 2.0  # 0.15 s on an idle machine
    imports = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "capture_server.cli", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    ).stderr
    for heavy in ("fastapi", "httpx", "numpy", "uvicorn", "pydantic_settings"):
        assert f" {heavy}\n" not in imports
