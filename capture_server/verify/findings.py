"""What a verification finds and how it is told. Ids, places and numbers; never tokens or text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One thing that is not as it must be, and where.

    ``position`` is an index into the full sequence of a call or into a row's tokens, as the
    message says. Empty fields are unknown or do not apply.
    """

    code: str
    message: str
    file: str = ""
    line: int | None = None
    rollout_id: str = ""
    row_id: str = ""
    call_id: str = ""
    position: int | None = None

    def __str__(self) -> str:
        places = [
            self.file,
            f"line {self.line}" if self.line is not None else "",
            f"rollout {self.rollout_id}" if self.rollout_id else "",
            f"row {self.row_id}" if self.row_id else "",
            f"call {self.call_id}" if self.call_id else "",
            f"position {self.position}" if self.position is not None else "",
        ]
        return ": ".join([*(place for place in places if place), f"{self.code}: {self.message}"])

    def to_json(self) -> dict[str, Any]:
        """The fields that say something."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None)}


@dataclass(slots=True)
class Checked:
    """How much was looked at, and what is worth saying although it is no violation."""

    files: int = 0
    rollouts: int = 0
    calls: int = 0
    rows: int = 0
    tokens: int = 0  # of full sequences of calls, and of rows
    notices: list[str] = field(default_factory=list)
