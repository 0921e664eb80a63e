"""``token-capture store check|dump``: a file store's root, looked at without a sidecar.

Both only read, and may run beside a sidecar. The rules are in ``stores.inspection``.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import typer

from capture_server.cli_support import (
    EXIT_CHECK_FAILED,
    EXIT_FILE,
    EXIT_USAGE,
    errors_as_exit_codes,
    fail,
    print_json,
)

app = typer.Typer(
    help="Look at a file store's root without a sidecar.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Root = Annotated[str, typer.Argument(metavar="ROOT", help="The store's directory, or its URL.")]


@app.command()
def check(
    root: Root,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Verify every journal: lines, checksums, records, state. Exit 1 if one has a problem.

    A torn tail is none: it was never acknowledged.
    """
    from capture_server.stores.inspection import check_root, summary_of

    directory = _directory(root)
    with errors_as_exit_codes():
        try:
            summary, found = summary_of(check_root(directory))
        except OSError as exc:
            fail(f"cannot read {directory}: {exc.strerror or exc}", EXIT_FILE)
    if as_json:
        print_json({"root": str(directory), **summary, "files": [asdict(r) for r in found]})
    else:
        for report in found:
            for finding in report.findings:
                where = f"{report.path}:{finding.line}" if finding.line else report.path
                typer.echo(f"{finding.severity:<7}  {where}  {finding.code}: {finding.detail}")
        states = ", ".join(f"{count} {state}" for state, count in summary["states"].items())
        typer.echo(
            f"{summary['journals']} journals ({states or 'none'}), {summary['records']} records, "
            f"{summary['bytes']} bytes; {summary['problems']} problems, {summary['notes']} notes"
        )
    if summary["problems"]:
        raise typer.Exit(EXIT_CHECK_FAILED)


@app.command()
def dump(
    root: Root,
    rollout: Annotated[str | None, typer.Option(help="Only this rollout.")] = None,
    unpack: Annotated[
        bool, typer.Option("--unpack", help="Token ids and log-probs as lists, not packed.")
    ] = False,
) -> None:
    """Print every record as a JSON line, with its rollout, file, line and offset."""
    from capture_server.stores.inspection import dump_root

    directory = _directory(root)
    with errors_as_exit_codes():
        try:
            for line in dump_root(directory, rollout_id=rollout, unpack=unpack):
                sys.stdout.buffer.write(line + b"\n")
        except BrokenPipeError:
            raise  # the reader has seen enough (head): no failure to report
        except FileNotFoundError as exc:
            fail(f"there is no {exc.filename}", EXIT_FILE)
        except OSError as exc:
            fail(f"cannot read {directory}: {exc.strerror or exc}", EXIT_FILE)


def _directory(root: str) -> Path:
    text = root
    if "://" in root:
        parts = urlsplit(root)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            fail(f"{root!r} is no file store: give a directory or a file:/// URL", EXIT_USAGE)
        text = unquote(parts.path)
    path = Path(text).expanduser()
    if not path.is_dir():
        fail(f"there is no directory {path}", EXIT_FILE)
    return path
