"""Log output of the server process: lines for humans or JSON objects. Never tokens or texts."""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

import orjson

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JSONFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and what was given as ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        row: dict[str, Any] = {
            "at": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        row |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(row, default=str).decode()


def configure_logging(level: str, form: str) -> None:
    """Send all logs to standard error at this level; ``form`` is ``text`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JSONFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
