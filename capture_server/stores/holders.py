"""Who holds an intent: the name of a process that stays unambiguous after the process is gone.

``<boot id>:<pid namespace>:<pid>:<start time>``. Invariant: ``is_known_dead`` is True only when
no process that carries the name can still be running; in doubt (another host, another container,
no ``/proc``) it is False and the freeze waits its grace period.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_START_TIME_FIELD: Final = 21  # proc(5): field 22 of /proc/<pid>/stat, counted from one


def current_holder() -> str:
    """This process's name; "" where the system does not tell."""
    return _holder_of(os.getpid())


@lru_cache(maxsize=4)  # keyed by pid: a forked child gets a name of its own
def _holder_of(pid: int) -> str:
    machine = _machine()
    started = _start_time(pid)
    return f"{machine}:{pid}:{started}" if machine and started else ""


def is_known_dead(holder: str) -> bool:
    """Whether the holder ran on this boot, in this pid namespace, and is gone."""
    machine, _, process = holder.rpartition(":")
    machine, _, pid = machine.rpartition(":")
    if not machine or machine != _machine() or not pid.isdecimal():
        return False
    return _start_time(int(pid)) != process


def _machine() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - no file, a kernel name
        boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return f"{boot_id}:{namespace.rpartition(':')[2].strip('[]')}"


def _start_time(pid: int) -> str:
    """Clock ticks after boot at which the process began; "" when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The command name (field 2) may itself hold spaces and brackets: count from its last one.
    rest = stat.rpartition(")")[2].split()
    state, started = rest[0], rest[_START_TIME_FIELD - 2]
    return "" if state in {"Z", "X"} else started
