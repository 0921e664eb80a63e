"""The command line ``token-capture``.

Every command prints for a human, or one JSON object with ``--json``. Errors are one line with
the remedy, on stderr. The control token comes from the environment only
(TOKEN_CAPTURE_CONTROL_TOKEN or ..._FILE): arguments are visible to every user of a machine.
Imports of the server and the client wait until a command needs them.

Exit codes: 0 done; 1 done, but the answer is "do not train on this" (a failed demo check or
verification, ``--fail-if-masked``); 2 wrong usage or settings; 3 the sidecar refused; 4 the
sidecar or its store is not reachable; 5 a file could not be read or written.
"""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from capture_server import cli_offline, store_cli
from capture_server.cli_offline import write_snapshot
from capture_server.cli_support import (
    EXIT_CHECK_FAILED,
    EXIT_USAGE,
    client_of,
    errors_as_exit_codes,
    fail,
    print_fields,
    print_json,
    print_table,
    status_fields,
)

_EPILOG = (
    "Exit codes: 0 done; 1 a check failed; 2 wrong usage or settings; 3 the sidecar refused; "
    "4 the sidecar or its store is not reachable; 5 a file could not be read or written."
)

app = typer.Typer(
    name="token-capture",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Server = Annotated[
    str | None,
    typer.Option(
        envvar="TOKEN_CAPTURE_SERVER",
        help="Address of the sidecar (default http://127.0.0.1:8900).",
    ),
]
Rollout = Annotated[str, typer.Argument(metavar="ROLLOUT", help="Rollout id.")]


class TrajectoryFormat(StrEnum):
    """``--format`` of the trajectories command."""

    RESPONSES = "responses"
    TRACES = "traces"


def main() -> None:
    """Entry point of the console script."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from middleware._version import __version__

        typer.echo(f"token-capture {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Record the exact tokens of every model call of an RL rollout."""


# --- server commands ---------------------------------------------------------------------------


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    upstream: Annotated[str | None, typer.Option(help="Base URL of the engine.")] = None,
    store: Annotated[str | None, typer.Option(help="Store URL.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind (8900); 0: a free one.")] = None,
    control_port: Annotated[int | None, typer.Option(help="Own port for control routes.")] = None,
    control_host: Annotated[
        str | None, typer.Option(help="Address of --control-port (that of --host).")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Server processes (1).")] = None,
    root_path: Annotated[str | None, typer.Option(help="Path prefix of a gateway.")] = None,
    on_disconnect: Annotated[
        str | None, typer.Option(help="cancel or drain the engine's request of a gone agent.")
    ] = None,
    prefix_supply: Annotated[str | None, typer.Option(help="off, auto or require.")] = None,
    bridge: Annotated[str | None, typer.Option(help="auto, always or never.")] = None,
    external_staging: Annotated[
        str | None, typer.Option(help="off, vllm_worker or megatron_worker.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="auto, vllm, nemo_rl, ...")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Largest request body.")] = None,
    max_decoded_body_bytes: Annotated[
        int | None, typer.Option(help="Largest request body after decompression.")
    ] = None,
    freeze_grace_s: Annotated[
        float | None, typer.Option(help="How long a freeze waits for running calls (3).")
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Control routes without a token, anywhere.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning, error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json.")] = None,
) -> None:
    """Run the sidecar. Every option is also TOKEN_CAPTURE_<NAME> and a key of --config."""
    flags = dict(locals())
    with errors_as_exit_codes():
        from capture_server.config import load_settings
        from capture_server.store_urls import refuse_password_argument

        if store is not None:
            refuse_password_argument(store)
        settings = load_settings(**flags)
        from capture_server.app import serve as serve_app

        serve_app(settings)


@app.command()
def demo(as_json: Json = False) -> None:
    """Run the whole loop on this machine with the built-in engine; exit 0 only if it held."""
    with errors_as_exit_codes():
        from capture_server.demo.run import run_demo

        succeeded = run_demo(as_json=as_json)
    if not succeeded:
        raise typer.Exit(EXIT_CHECK_FAILED)


@app.command("config")
def show_config(
    show: Annotated[
        bool, typer.Option("--show", help="Print the effective settings, secrets hidden.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    as_json: Json = False,
) -> None:
    """Check the settings from file and environment; with --show print them."""
    with errors_as_exit_codes():
        from capture_server.config import load_settings

        values = load_settings(config=config).effective()
    if as_json:
        print_json(values)
    elif show:
        print_fields({k: "" if v is None else v for k, v in values.items()})
    else:
        typer.echo("the settings are valid; --show prints them")


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version of this program."""
    from middleware._version import __version__

    if as_json:
        print_json({"name": "token-capture", "version": __version__})
    else:
        typer.echo(f"token-capture {__version__}")


@app.command()
def migrate(
    store: Annotated[
        str | None,
        typer.Option(help="postgresql:// URL without password (default: the setting store)."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    as_json: Json = False,
) -> None:
    """Create or update the tables of a PostgreSQL store; run it again at any time."""
    with errors_as_exit_codes():
        from capture_server.config import load_settings
        from capture_server.stores.registry import migrate_store

        applied = migrate_store(given=store, configured=load_settings(config=config).store)
    if as_json:
        print_json({"applied": [{"version": m.version, "name": m.name} for m in applied]})
        return
    for migration in applied:
        typer.echo(f"applied {migration.version}: {migration.name.replace('_', ' ')}")
    if not applied:
        typer.echo("the tables are up to date")


# --- agent and trainer commands ----------------------------------------------------------------


@app.command()
def url(rollout: Rollout, server: Server = None, as_json: Json = False) -> None:
    """Print the base URL to give to the agent of a rollout."""
    with client_of(server) as client:
        base_url = client.base_url(rollout)
    if as_json:
        print_json({"rollout_id": rollout, "base_url": base_url})
    else:
        typer.echo(base_url)


@app.command()
def status(
    rollout: Annotated[str | None, typer.Argument(metavar="[ROLLOUT]", help="Rollout id.")] = None,
    state: Annotated[str | None, typer.Option(help="Only open, frozen or retired ones.")] = None,
    prefix: Annotated[str, typer.Option(help="Only ids that start with this.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 100,
    cursor: Annotated[str, typer.Option(help="next_cursor of the page before.")] = "",
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Show one rollout, or list rollouts."""
    with client_of(server) as client:
        if rollout is not None:
            one = client.status(rollout)
            print_json(one) if as_json else print_fields(status_fields(one))
            return
        page = client.list_rollouts(state=state, prefix=prefix, limit=limit, cursor=cursor)
    if as_json:
        print_json({"rollouts": page.rollouts, "next_cursor": page.next_cursor})
        return
    rows = [
        (
            r.rollout_id,
            r.state,
            str(r.calls),
            str(r.generated_tokens),
            "yes" if r.incomplete else "",
        )
        for r in page.rollouts
    ]
    print_table(rows, ("rollout", "state", "calls", "generated tokens", "incomplete"))
    if page.next_cursor:
        typer.echo(f"more: --cursor {page.next_cursor}", err=True)


@app.command()
def freeze(rollout: Rollout, server: Server = None, as_json: Json = False) -> None:
    """Refuse new calls and fix the snapshot of a rollout."""
    with client_of(server) as client:
        frozen = client.freeze(rollout)
    print_json(frozen) if as_json else print_fields(status_fields(frozen))


@app.command()
def snapshot(
    rollout: Rollout,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File: .jsonl, .arrow, .parquet, .safetensors or .npz."
        ),
    ] = None,
    full_prompts: Annotated[
        bool, typer.Option("--full-prompts", help="Rebuild prompts stored as suffixes.")
    ] = False,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Read the frozen snapshot: header line, then one entry per line."""
    with client_of(server) as client:
        if output is not None:
            written = write_snapshot(client, rollout, output, full_prompts=full_prompts)
        else:
            data = client.snapshot_ndjson(rollout, full_prompts=full_prompts)
            sys.stdout.buffer.write(_as_one_object(data) if as_json else data)
            sys.stdout.buffer.flush()
            return
    summary = {"file": str(output), "calls": len(written.entries), "version": written.version}
    if as_json:
        print_json({**summary, "snapshot_id": written.snapshot_id})
    else:
        typer.echo(f"{summary['calls']} calls -> {output}")


def _as_one_object(data: bytes) -> bytes:
    header, *entries = data.rstrip(b"\n").split(b"\n")
    return header[:-1] + b',"entries":[' + b",".join(entries) + b"]}\n"


@app.command()
def trajectories(
    rollout: Rollout,
    form: Annotated[
        TrajectoryFormat, typer.Option("--format", help="responses or traces.")
    ] = TrajectoryFormat.TRACES,
    builder: Annotated[str, typer.Option(help="prefix_merging or per_request.")] = "prefix_merging",
    terminal_call_id: Annotated[str | None, typer.Option(help="The call that was scored.")] = None,
    terminal_response_id: Annotated[
        str | None, typer.Option(help="The response id that the harness kept.")
    ] = None,
    fail_if_masked: Annotated[
        bool, typer.Option("--fail-if-masked", help="Exit 1 when nothing may be trained on.")
    ] = False,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Build training rows (or one response) from the frozen snapshot."""
    terminal: dict[str, Any] = {
        "builder": builder,
        "terminal_call_id": terminal_call_id,
        "terminal_response_id": terminal_response_id,
    }
    with client_of(server) as client:
        if form is TrajectoryFormat.TRACES:
            built: Any = client.traces(rollout, **terminal)
        else:
            built = client.trajectories(rollout, **terminal)
    if as_json:
        print_json(built.to_json() if form is TrajectoryFormat.TRACES else built)
    elif form is TrajectoryFormat.TRACES:
        _print_rows(built)
    else:
        print_fields(
            {
                "rollout": rollout,
                "masked": f"yes: {built.error or 'see metrics'}" if built.mask_sample else "no",
                "output items": len((built.rebuilt_response or {}).get("output", [])),
                "metrics": json.dumps(built.metrics),
            }
        )
    if fail_if_masked and built.mask_sample:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _print_rows(traces: Any) -> None:
    rows = [
        (
            f"{row.row_id}{' (main)' if index == traces.main_row else ''}",
            str(len(row.model_call_ids)),
            str(len(row.token_ids)),
            str(int(row.loss_mask.sum())),
            str(row.starts.get("kind", "")),
            str(row.ends),
            "yes" if row.mask_sample else "",
        )
        for index, row in enumerate(traces.rows)
    ]
    columns = ("row", "calls", "tokens", "trained", "starts", "ends", "masked")
    print_table(rows, columns)
    if traces.mask_sample:
        reasons = sorted({reason for row in traces.rows for reason in row.mask_reasons})
        why = ", ".join(reasons) or "no rows"
        typer.echo(f"masked: do not train on this rollout ({why})")


@app.command()
def retire(
    rollout: Rollout,
    snapshot_id: Annotated[str | None, typer.Option(help="The snapshot that was read.")] = None,
    snapshot_version: Annotated[
        int | None, typer.Option("--version", help="Its version, as it was read.")
    ] = None,
    current: Annotated[
        bool, typer.Option("--current", help="Retire whatever is frozen now, read or not.")
    ] = False,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Remove exactly the snapshot that was consumed."""
    given = (snapshot_id is not None, snapshot_version is not None)
    if current == any(given) or (any(given) and not all(given)):
        fail("give --snapshot-id and --version, or --current", EXIT_USAGE)
    with client_of(server) as client:
        if current:
            now = client.status(rollout)
            # An unfrozen rollout has no snapshot; the server then says what to do.
            snapshot_id, snapshot_version = now.snapshot_id or "none", now.version
        assert snapshot_id is not None
        assert snapshot_version is not None
        client.retire(rollout, snapshot_id=snapshot_id, version=snapshot_version)
    print_json({"retired": True}) if as_json else typer.echo(f"retired {rollout}")


@app.command()
def delete(rollout: Rollout, server: Server = None, as_json: Json = False) -> None:
    """Clear a rollout unconditionally, before its id is used again."""
    with client_of(server) as client:
        client.delete(rollout)
    print_json({"deleted": True}) if as_json else typer.echo(f"deleted {rollout}")


@app.command()
def sweep(
    older_than_s: Annotated[
        float, typer.Option(min=0, help="Minimum age of the tombstones in seconds.")
    ] = 86_400.0,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Remove the tombstones of rollouts retired long ago."""
    with client_of(server) as client:
        removed = client.sweep(older_than_seconds=older_than_s)
    print_json({"removed": removed}) if as_json else typer.echo(f"removed {removed} tombstones")


cli_offline.register(app)
app.add_typer(store_cli.app, name="store")

if __name__ == "__main__":
    main()
