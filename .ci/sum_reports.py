"""Add up JUnit reports and print one line: ``N passed, N failed, N skipped``.

A report that is missing or unreadable (the runner crashed, or was stopped) counts as one failure.
Exits non-zero unless something passed and nothing failed.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def counts(report: Path) -> tuple[int, int, int]:
    """Passed, failed (errors too) and skipped tests of one report."""
    try:
        suites = list(ET.parse(report).getroot().iter("testsuite"))
    except (OSError, ET.ParseError):
        return 0, 1, 0

    def total(key: str) -> int:
        return sum(int(suite.get(key, "0")) for suite in suites)

    failed, skipped = total("failures") + total("errors"), total("skipped")
    return total("tests") - failed - skipped, failed, skipped


def main(reports: list[str]) -> int:
    """Print the sum; the exit code."""
    passed, failed, skipped = (
        sum(column) for column in zip(*(counts(Path(report)) for report in reports), strict=True)
    )
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
