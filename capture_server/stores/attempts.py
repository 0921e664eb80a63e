"""Which attempt of a call this process opened: what a cancel that comes late may close.

Invariant: an attempt names one ``open_intent``. A cancel that could not be written at once (owed
or spilled) closes the intent of its own attempt only; where the attempt is not known any more it
closes none that has one, and the rollout is masked without need, never wrongly whole.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from typing import Final

_MOST: Final = 65_536  # calls under way; the oldest are forgotten


def new_attempt() -> str:
    """A name that no other ``open_intent`` has."""
    return secrets.token_hex(8)


class OpenAttempts:
    """By rollout and call, until the call is closed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts: OrderedDict[tuple[str, str], str] = OrderedDict()

    def opened(self, rollout_id: str, call: str, attempt: str) -> None:
        """This process's intent is written."""
        with self._lock:
            self._attempts[rollout_id, call] = attempt
            if len(self._attempts) > _MOST:
                self._attempts.popitem(last=False)

    def closed(self, rollout_id: str, call: str) -> str:
        """Its call ends: the attempt, "" if it was not opened here."""
        with self._lock:
            return self._attempts.pop((rollout_id, call), "")

    def __contains__(self, key: object) -> bool:
        return key in self._attempts
