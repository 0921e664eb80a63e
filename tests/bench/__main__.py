"""``python -m tests.bench [ROW...] [--short] [--json]``: measure, show, and with --short judge.

The long form reports; the short form takes under three minutes, asserts every row's bound with
slack, and exits with 1 if one is broken. JSON lines: the machine first, then one per row.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import orjson
from rich.console import Console
from rich.table import Table

from tests.bench import machine, rows_build, rows_http, rows_records, rows_stores
from tests.bench.measure import SLACK, Row

ROWS: dict[str, Callable[[bool], list[Row]]] = {
    "entry": rows_records.entry,
    "digest": rows_records.digest,
    "resolve": rows_records.resolve,
    "build": rows_build.build,
    "bytes": rows_stores.stored_bytes,
    "put": rows_stores.put,
    "put-wide": rows_stores.put_wide,
    "snapshot": rows_http.snapshot,
    "overhead": rows_http.overhead,
    "stream": rows_http.stream,
    "big": rows_http.big,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the named rows (all without a name); the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--short", action="store_true", help="less work, and assert the bounds")
    parser.add_argument("--json", action="store_true", help="JSON lines only, no table")
    asked = parser.parse_args(arguments)
    unknown = [name for name in asked.rows if name not in ROWS]
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}")

    about = machine.describe()
    _print_line({"machine": about})
    began = time.monotonic()
    rows: list[Row] = []
    for name in asked.rows or ROWS:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        measured = ROWS[name](asked.short)
        for row in measured:
            _print_line(row.to_json())
        rows += measured
    if not asked.json:
        _show(about, rows, time.monotonic() - began)
    return _judge(rows, to=sys.stderr if asked.json else sys.stdout) if asked.short else 0


def _print_line(line: dict[str, Any]) -> None:
    print(orjson.dumps(line).decode(), flush=True)


def _show(about: dict[str, Any], rows: list[Row], seconds: float) -> None:
    console = Console(width=None if sys.stdout.isatty() else 150)
    shown = ", ".join(f"{key} {value}" for key, value in about.items())
    console.print(f"{shown}; measured for {seconds:.0f} s", soft_wrap=True)
    table = Table("row", "work", "against", "ours", "baseline", "ratio", "target", "met")
    for row in rows:
        table.add_row(
            row.name,
            row.work + "".join(f"\n  {key}: {value}" for key, value in row.notes.items()),
            row.against,
            f"{row.ours:,.3g} {row.unit}",
            f"{row.baseline:,.3g} {row.unit}",
            f"{row.ratio:.3g}",
            "" if row.target is None else f"{row.sense} {row.target:.3g}",
            {True: "yes", False: "no", None: ""}[row.meets_target],
        )
    console.print(table)


def _judge(rows: list[Row], *, to: TextIO) -> int:
    broken = [row for row in rows if not row.holds]
    for row in broken:
        print(
            f"FAILED {row.name}: ratio {row.ratio:.3g} ({row.work}; against {row.against}), "
            f"must be {row.sense} {row.bound:.3g} with slack x{SLACK:g}",
            file=to,
        )
    print(f"{len(rows) - len(broken)} passed, {len(broken)} failed", file=to)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
