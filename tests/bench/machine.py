"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGES = ("numpy", "orjson", "pydantic", "uvicorn", "aiohttp")


def describe() -> dict[str, Any]:
    """Cores, load, versions, and what an fsync costs where the stores are measured."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "fsync_ms": round(fsync_seconds(Path(tempfile.gettempdir())) * 1000, 3),
    }


def fsync_seconds(directory: Path, times: int = 15) -> float:
    """Median time to append 4 KiB to a file and bring it to disk."""
    taken = []
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(times):
            file.write(bytes(4096))
            began = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
