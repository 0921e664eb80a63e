"""Commands on recorded rollouts: verify, tree, export; and files in the formats of ``export``.

Each takes what a server has frozen, or files: a store's root, one journal, an exported file. What
names an existing path is a path, anything else is a rollout id. ``register`` adds them to the
program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from capture_server.cli_support import (
    EXIT_CHECK_FAILED,
    EXIT_FILE,
    EXIT_USAGE,
    client_of,
    errors_as_exit_codes,
    fail,
    print_json,
)

if TYPE_CHECKING:
    from capture_server.client import SyncRolloutClient
    from capture_server.verify import Checked, Violation
    from middleware.protocols import TokenCaptureSnapshot

T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Server = Annotated[
    str | None,
    typer.Option(
        envvar="TOKEN_CAPTURE_SERVER",
        help="Address of the sidecar (default http://127.0.0.1:8900).",
    ),
]
Target = Annotated[
    str, typer.Argument(metavar="PATH|ROLLOUT", help="A path, or the id of a frozen rollout.")
]
_PAGE = 1000
_PIPED_WIDTH = 10_000


class ExportKind(StrEnum):
    """``--kind`` of the export command."""

    ROWS = "rows"
    ENTRIES = "entries"


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(verify)
    app.command()(tree)
    app.command()(export)


@contextlib.contextmanager
def file_errors(writing: Path | None = None) -> Iterator[None]:
    """What goes wrong with files becomes one line and an exit code.

    ``writing``: the only file that is touched, under whatever temporary name.
    """
    from middleware.errors import UnsupportedSchemaError

    with errors_as_exit_codes():
        try:
            yield
        except UnsupportedSchemaError as exc:
            fail(str(exc), EXIT_USAGE)
        except OSError as exc:
            place = f"cannot write {writing}" if writing is not None else exc.filename or "file"
            fail(f"{place}: {exc.strerror or exc}", EXIT_FILE)


# --- verify ------------------------------------------------------------------------------------


def verify(
    target: Target,
    snapshot: Annotated[
        Path | None,
        typer.Option(help="Entries (export, journal or root) that exported rows must agree with."),
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="List every violation, not only the first.")
    ] = False,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Recompute every digest, link and mask of records or rows; exit 1 if one does not hold."""
    from capture_server.verify import Checked

    checked = Checked()
    with file_errors():
        found = _violations(target, snapshot, server, checked)
        violations = list(found if show_all else islice(found, 1))
    _report(violations, checked, as_json=as_json)
    if violations:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _violations(
    target: str, snapshot: Path | None, server: str | None, checked: Checked
) -> Iterator[Violation]:
    from capture_server.verify import load_recorded, verify_path, verify_snapshot, verify_traces

    recorded = load_recorded(snapshot) if snapshot is not None else None
    if Path(target).exists():
        yield from verify_path(Path(target), checked, recorded=recorded)
        return
    _require_rollout(target)
    with client_of(server) as client:
        entries = client.snapshot(target)
        traces = client.traces(target)
    yield from verify_snapshot(entries, checked)
    yield from verify_traces(traces, checked, entries)


def _report(violations: list[Violation], checked: Checked, *, as_json: bool) -> None:
    counted = {
        "files": checked.files,
        "rollouts": checked.rollouts,
        "calls": checked.calls,
        "rows": checked.rows,
        "tokens": checked.tokens,
    }
    if as_json:
        print_json(
            {
                "ok": not violations,
                "violations": [violation.to_json() for violation in violations],
                "checked": counted,
                "notices": checked.notices,
            }
        )
        return
    for notice in checked.notices:
        typer.echo(f"note: {notice}", err=True)
    for violation in violations:
        typer.echo(f"violation: {violation}", err=True)
    if not violations:
        typer.echo("verified: " + ", ".join(f"{n} {name}" for name, n in counted.items() if n))


def _require_rollout(target: str) -> None:
    """A path that is not there is no rollout id."""
    from middleware.errors import InvalidIdError
    from middleware.paths import validate_rollout_id

    try:
        validate_rollout_id(target)
    except InvalidIdError:
        fail(f"{target}: no such file or directory, and no rollout id", EXIT_USAGE)


# --- tree --------------------------------------------------------------------------------------


def tree(
    target: Target,
    rollout: Annotated[
        str | None, typer.Option(help="Which rollout of a path that holds several.")
    ] = None,
    terminal_call_id: Annotated[str | None, typer.Option(help="The call that was scored.")] = None,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Draw the calls of a rollout: what each continues and why, drift, masks, tokens, times."""
    from capture_server.call_tree import call_tree, drawn

    with file_errors():
        built = call_tree(_one_snapshot(target, rollout, server), terminal_call_id=terminal_call_id)
    if as_json:
        print_json(built.to_json())
        return
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH  # a line per call, never cut
    console.print(drawn(built))


def _one_snapshot(target: str, rollout: str | None, server: str | None) -> TokenCaptureSnapshot:
    from capture_server.verify import load_recorded

    if not Path(target).exists():
        _require_rollout(target)
        with client_of(server) as client:
            return client.snapshot(target)
    found = load_recorded(Path(target))
    if rollout is None and len(found) == 1:
        return next(iter(found.values()))
    if rollout is None or rollout not in found:
        some = ", ".join(sorted(found)[:5])
        fail(f"{target} holds {len(found)} rollouts ({some}...); give --rollout", EXIT_USAGE)
    return found[rollout]


# --- export ------------------------------------------------------------------------------------


def export(
    rollouts: Annotated[
        list[str] | None, typer.Argument(metavar="[ROLLOUT]...", help="Ids of frozen rollouts.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help=".jsonl .arrow .arrows .parquet .safetensors .npz"),
    ] = None,
    kind: Annotated[
        ExportKind, typer.Option(help="rows: training rows; entries: calls as recorded.")
    ] = ExportKind.ROWS,
    source: Annotated[
        Path | None, typer.Option("--from", help="Take them from a store's root or a file.")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(help="All frozen rollouts whose id starts with this.")
    ] = None,
    full_prompts: Annotated[
        bool, typer.Option("--full-prompts", help="entries: rebuild prompts stored as suffixes.")
    ] = False,
    builder: Annotated[str, typer.Option(help="prefix_merging or per_request.")] = "prefix_merging",
    fragments: Annotated[str, typer.Option(help="rows: include or exclude.")] = "include",
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Write many frozen rollouts into one file, in the format that its suffix names."""
    from capture_server.trajectories.export import check_suffix, export_entries, export_rows
    from capture_server.trajectories.traces import build_traces

    if output is None:
        fail("give the file to write: --output FILE", EXIT_USAGE)
    with file_errors(), _snapshots(rollouts or [], prefix, source, server) as found:
        check_suffix(output)
        if kind is ExportKind.ENTRIES:
            written = export_entries(output, found, full_prompts=full_prompts)
        else:
            rows = (
                build_traces(s, builder=builder, fragments=_fragments(fragments)) for s in found
            )
            written = export_rows(output, rows)
    if as_json:
        print_json({"file": str(output), "kind": kind.value, "rollouts": written})
    else:
        typer.echo(f"{written} rollouts -> {output}")


def _fragments(value: str) -> Any:
    return value  # build_traces refuses what it does not know


@contextlib.contextmanager
def _snapshots(
    rollouts: list[str], prefix: str | None, source: Path | None, server: str | None
) -> Iterator[Iterable[TokenCaptureSnapshot]]:
    """The snapshots to export, read one at a time."""
    if source is not None:
        yield _with_progress(_from_path(source, rollouts, prefix or ""), None)
        return
    if not rollouts and prefix is None:
        fail("name rollouts, or give --prefix, or --from PATH", EXIT_USAGE)
    with client_of(server) as client:
        ids = list(rollouts) if prefix is None else [*rollouts, *_frozen_ids(client, prefix)]
        ids = list(dict.fromkeys(ids))
        yield _with_progress(map(client.snapshot, ids), len(ids))


def _frozen_ids(client: SyncRolloutClient, prefix: str) -> Iterator[str]:
    cursor: str | None = ""
    while cursor is not None:
        page = client.list_rollouts(state="frozen", prefix=prefix, limit=_PAGE, cursor=cursor)
        yield from (status.rollout_id for status in page.rollouts)
        cursor = page.next_cursor


def _from_path(path: Path, rollouts: list[str], prefix: str) -> Iterator[TokenCaptureSnapshot]:
    """Frozen rollouts only: others still change. Asked for by name, they are refused."""
    from capture_server.trajectories.export import load_entries
    from capture_server.verify.journals import journal_paths, read_journal

    if not path.is_dir():
        yield from (s for s in load_entries(path) if _is_wanted(s.rollout_id, rollouts, prefix))
        return
    left = set(rollouts)
    for journal in journal_paths(path):
        reading = read_journal(journal)
        left.discard(reading.rollout_id)
        if not _is_wanted(reading.rollout_id, rollouts, prefix) or reading.snapshot is None:
            continue
        if reading.violations:
            fail(f"not exported: {reading.violations[0]}", EXIT_CHECK_FAILED)
        if reading.state == "frozen":
            yield reading.snapshot
        elif rollouts:
            fail(f"rollout {reading.rollout_id} is {reading.state}, not frozen", EXIT_USAGE)
    if left:
        fail(f"{path} holds no rollout {min(left)}", EXIT_USAGE)


def _is_wanted(rollout_id: str, rollouts: list[str], prefix: str) -> bool:
    return rollout_id.startswith(prefix) and (not rollouts or rollout_id in rollouts)


def _with_progress(items: Iterable[T], total: int | None) -> Iterator[T]:
    """A progress bar on stderr, where a human is watching."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(
        items, "exporting", total=total, console=console, disable=not console.is_terminal
    )


# --- snapshot -o -------------------------------------------------------------------------------


def write_snapshot(
    client: SyncRolloutClient, rollout: str, output: Path, *, full_prompts: bool
) -> TokenCaptureSnapshot:
    """One frozen rollout's entries to a file; the snapshot that was written."""
    from capture_server.trajectories.export import check_suffix, export_entries

    with file_errors(writing=output):
        check_suffix(output)
        found = client.snapshot(rollout)
        export_entries(output, [found], full_prompts=full_prompts)
    return found
