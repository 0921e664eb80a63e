"""Keeping hashing and lookups off the event loop, in a bounded number of threads.

A hop to a thread costs some 100 µs, so small work stays inline; what may block on a backend
always hops. A cancelled caller waits for its thread: no work goes on unwatched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread

LARGE_TOKENS: Final = 16_384
_LARGE_ITEMS: Final = 32
_LARGE_CHARACTERS: Final = 65_536

R = TypeVar("R")


async def run_sized(
    large: bool, work: Callable[[], R], limiter: anyio.CapacityLimiter | None = None
) -> R:
    """``work()``, in a thread if it is large."""
    if not large:
        return work()
    return await anyio.to_thread.run_sync(work, limiter=limiter)


def is_large_request(items: list[dict[str, Any]] | None) -> bool:
    """A guess at whether hashing these items takes longer than a hop to a thread."""
    if not isinstance(items, list):
        return False
    return len(items) > _LARGE_ITEMS or sum(map(_characters, items)) > _LARGE_CHARACTERS


def _characters(item: Any) -> int:
    content = item.get("content") if isinstance(item, dict) else None
    if isinstance(content, str):
        return len(content)
    # Blocks may hold images: an exact size is not worth walking them.
    return 4096 * len(content) if isinstance(content, list) else 256
