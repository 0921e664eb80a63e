"""What the commands share: exit codes, errors as one line, output for humans and programs.

Imports of the server, the client and rich wait until they are needed: ``--help`` stays fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from middleware.errors import (
    ConfigurationError,
    InvalidInputError,
    StoreError,
    TokenCaptureError,
)

if TYPE_CHECKING:
    from capture_server.client import SyncRolloutClient

EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_UNREACHABLE = 4
EXIT_FILE = 5


def fail(message: str, code: int) -> NoReturn:
    """End the command with one line on stderr."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Our errors become one line and their documented exit code; bugs keep their traceback."""
    from capture_server.errors import SidecarUnreachableError

    try:
        yield
    except (ConfigurationError, InvalidInputError) as exc:
        fail(str(exc), EXIT_USAGE)
    except (SidecarUnreachableError, StoreError) as exc:
        fail(str(exc), EXIT_UNREACHABLE)
    except TokenCaptureError as exc:
        fail(f"{exc} [{exc.code}]", EXIT_REFUSED)


@contextlib.contextmanager
def client_of(server: str | None) -> Iterator[SyncRolloutClient]:
    """A client whose errors end the command."""
    from capture_server.client import SyncRolloutClient

    with errors_as_exit_codes(), SyncRolloutClient(server, retries=2) as client:
        yield client


def print_json(value: Any) -> None:
    """One line for programs."""
    # ASCII: valid in every locale, and stable for other programs.
    typer.echo(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        return value.tolist()
    return dict(value)


def print_table(rows: Sequence[tuple[str, ...]], columns: tuple[str, ...]) -> None:
    """Columns for humans."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)


def print_fields(values: dict[str, Any]) -> None:
    """Name and value, one a line."""
    width = max(len(name) for name in values)
    for name, value in values.items():
        typer.echo(f"{name:<{width}}  {value}")


def status_fields(status: Any) -> dict[str, Any]:
    """A rollout's status in words."""
    reasons = [
        f"{r.code}{f' ({r.model_call_id})' if r.model_call_id else ''}"
        for r in status.incomplete_reasons
    ]
    drifted = ", ".join(f"{one['model_call_id']} at {one['drift_at']}" for one in status.drifted)
    resolutions = ", ".join(f"{count} {name}" for name, count in status.resolutions.items())
    return {
        "rollout": status.rollout_id,
        "state": status.state,
        "calls": f"{status.calls} ({resolutions})",
        "open calls": len(status.open_intents),
        "prompt tokens": status.prompt_tokens,
        "generated tokens": status.generated_tokens,
        "drifted calls": f"{status.drifted_calls}{f' ({drifted})' if drifted else ''}",
        "incomplete": f"yes: {', '.join(reasons)}" if status.incomplete else "no",
        "snapshot": status.snapshot_id or "-",
        "version": status.version,
    }
