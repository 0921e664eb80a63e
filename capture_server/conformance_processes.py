"""The checks that need other threads and processes, each with a store of its own.

They take a store URL. Invariant: the URL, which may hold a password, reaches another process on
its standard input, never as an argument.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from capture_server.conformance_kit import ConformanceError, make_entry
from capture_server.stores.registry import open_store
from middleware.errors import TokenCaptureError
from middleware.protocols import CaptureStore, TokenCaptureSnapshot

_NUM_WRITERS: Final = 3
_TIMEOUT_S: Final = 60.0


# --- the checks --------------------------------------------------------------------------------


async def _fresh_process(url: str) -> None:
    """Another process sees the record as soon as ``put`` returned."""
    rollout = _new_rollout("fresh_process")
    store = open_store(url)
    await store.put(make_entry(rollout, "c1"))
    process = await _start("freeze", rollout, "reader")
    found, _ = await asyncio.wait_for(process.communicate(f"{url}\n".encode()), _TIMEOUT_S)
    await store.close()
    if process.returncode != 0 or found.split() != [b"c1"]:
        raise ConformanceError("fresh_process", f"another process sees {found!r}")


async def _race_of_threads(url: str) -> None:
    """A freeze among puts of many threads splits them into kept and refused ones."""
    rollout, store = _new_rollout("race_of_threads"), open_store(url)
    last, begun = threading.Event(), threading.Barrier(_NUM_WRITERS + 1)

    def writer(name: str) -> list[str]:
        acknowledged: list[str] = []
        begun.wait(_TIMEOUT_S)
        asyncio.run(_write(url, rollout, name, last.is_set, acknowledged.append))
        return acknowledged

    racers = [asyncio.create_task(asyncio.to_thread(writer, f"t{i}")) for i in range(_NUM_WRITERS)]
    try:
        await asyncio.to_thread(begun.wait, _TIMEOUT_S)
        frozen = await store.freeze(rollout)
    finally:
        last.set()
    acknowledged = {call for calls in await asyncio.gather(*racers) for call in calls}
    await _judge("race_of_threads", store, frozen, acknowledged)


async def _race_of_processes(url: str) -> None:
    """A freeze among puts of many processes splits them into kept and refused ones."""
    rollout, store = _new_rollout("race_of_processes"), open_store(url)
    writers = [await _start("write", rollout, f"p{i}") for i in range(_NUM_WRITERS)]
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            acknowledged, frozen = await _raced(writers, url, store, rollout)
    finally:
        for process in writers:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if any(process.returncode for process in writers):
        raise ConformanceError("race_of_processes", "a put failed that no freeze refused")
    await _judge("race_of_processes", store, frozen, acknowledged)


async def _raced(
    writers: Sequence[Process], url: str, store: CaptureStore, rollout: str
) -> tuple[set[str], TokenCaptureSnapshot]:
    """Freeze when every writer has put something; all acknowledged ids, and the snapshot."""
    heard = []
    for process in writers:
        assert process.stdin is not None
        process.stdin.write(f"{url}\n".encode())
        await process.stdin.drain()
    for process in writers:
        assert process.stdout is not None
        heard.append(await process.stdout.readline())
    frozen = await store.freeze(rollout)
    outputs = await asyncio.gather(*(process.communicate(b"last\n") for process in writers))
    lines = b"".join([*heard, *(out for out, _ in outputs)])
    return set(lines.decode().split()), frozen


async def _judge(
    check: str, store: CaptureStore, frozen: TokenCaptureSnapshot, acknowledged: set[str]
) -> None:
    kept = {entry.model_call_id for entry in frozen.entries}
    after = await store.freeze(frozen.rollout_id)
    await store.close()
    lost = acknowledged - kept
    if lost and after.version == frozen.version:
        raise ConformanceError(check, f"{len(lost)} acknowledged puts are in no snapshot")
    if kept - acknowledged:
        raise ConformanceError(check, f"{len(kept - acknowledged)} refused puts are kept")


PROCESS_CHECKS: Final[tuple[tuple[str, Callable[[str], Awaitable[None]]], ...]] = (
    ("fresh_process", _fresh_process),
    ("race_of_threads", _race_of_threads),
    ("race_of_processes", _race_of_processes),
)


# --- the other side ----------------------------------------------------------------------------


async def _start(role: str, rollout_id: str, name: str) -> Process:
    command = ("-m", "capture_server.conformance_processes", role, rollout_id, name)
    return await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    )


def _new_rollout(check: str) -> str:
    return f"conformance.{secrets.token_hex(4)}.{check}"


async def _write(
    url: str,
    rollout_id: str,
    name: str,
    is_last: Callable[[], bool],
    acknowledge: Callable[[str], object],
) -> None:
    """Put until one is refused; from ``is_last`` on only one more, behind the freeze."""
    store = open_store(url)
    number, ends = 0, False
    while not ends:
        ends = is_last()
        call = f"{name}-{number}"
        try:
            await store.put(make_entry(rollout_id, call, number))
        except TokenCaptureError:
            break
        acknowledge(call)
        number += 1
    await store.close()


async def _write_as_process(url: str, rollout_id: str, name: str) -> None:
    told = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    await _write(url, rollout_id, name, told.done, _say)
    await told  # the parent always says when; leaving earlier would break its pipe


async def _freeze(url: str, rollout_id: str) -> None:
    store = open_store(url)
    snapshot = await store.freeze(rollout_id)
    await store.close()
    for entry in snapshot.entries:
        _say(entry.model_call_id)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _main(role: str, rollout_id: str, name: str) -> None:
    url = sys.stdin.readline().rstrip("\n")
    work = (
        _freeze(url, rollout_id) if role == "freeze" else _write_as_process(url, rollout_id, name)
    )
    asyncio.run(work)


if __name__ == "__main__":
    _main(*sys.argv[1:])
