"""Several processes on one root: kill -9, races, locks, few descriptors."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.holders import current_holder, is_known_dead
from middleware.errors import StoreError, StoreUnavailableError

ENTRY = """
import asyncio, sys
from capture_server.stores.file import TokenCaptureStore
from middleware.errors import TokenCaptureError, TokenCaptureFrozenError
from middleware.protocols import CallIntent
from middleware.records import TokenEntry

def entry(rollout, call):
    return TokenEntry(rollout_id=rollout, model_call_id=call, prompt_token_ids=[1, 2, 3],
                      generation_token_ids=[4], generation_log_probs=[-0.5])
"""

WRITER = (
    ENTRY
    + """
async def main(root, first):
    store = TokenCaptureStore(root)
    for i in range(int(first), 10**9):
        rollout = f"r{i % 3}"
        await store.open_intent(CallIntent(rollout_id=rollout, model_call_id=f"c{i}"))
        print("intent", rollout, f"c{i}", flush=True)
        await store.put(entry(rollout, f"c{i}"))
        print("put", rollout, f"c{i}", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""
)

RACER = (
    ENTRY
    + """
async def main(root, rounds):
    store = TokenCaptureStore(root)
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(int(rounds)):
        try:
            await store.put(entry(f"r{i}", "c1"))
            print("kept", flush=True)
        except TokenCaptureFrozenError:
            print("refused", flush=True)
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""
)

MANY = (
    ENTRY
    + """
import os, resource
os.fsync = lambda fd: None  # the disk is not what is tested

async def main(root, count):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    store = TokenCaptureStore(root)
    for start in range(0, int(count), 250):
        rollouts = [f"r{i}" for i in range(start, start + 250)]
        await asyncio.gather(*(store.begin_call(r, "c1") for r in rollouts))
    await asyncio.gather(*(store.put(entry(f"r{i}", "c1")) for i in range(int(count))))
    row = await store.status("r0")
    print(row.calls, list(row.open_intents), len(os.listdir("/proc/self/fd")) < 128)
    await store.close()
    print(len(os.listdir("/proc/self/fd")) < 16)

asyncio.run(main(*sys.argv[1:]))
"""
)

PEER = (
    ENTRY
    + """
async def main(root):
    store = TokenCaptureStore(root)
    for i in range(60):
        await store.put(entry("shared", f"p{sys.argv[2]}-{i}"))
    await store.close()

asyncio.run(main(sys.argv[1]))
"""
)


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def test_kill_at_any_moment_loses_nothing_acknowledged(tmp_path):
    """Every acknowledged put is there, every announced intent is known, nothing is half there."""
    clock, seed = time.monotonic(), random.Random(7)
    acknowledged: dict[str, set[str]] = {"intent": set(), "put": set()}
    next_call = kills = 0
    while kills < 24 and time.monotonic() - clock < 12:
        writer = start(WRITER, str(tmp_path), str(next_call))
        assert writer.stdout is not None
        first = writer.stdout.readline()
        time.sleep(seed.uniform(0, 0.03))
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.communicate()[0]
        for line in (first + rest).splitlines():
            if line.count(" ") == 2:  # the last line may be cut by the kill
                kind, rollout, call = line.split()
                acknowledged[kind].add(f"{rollout} {call}")
                next_call = max(next_call, int(call[1:]) + 1)
        next_call += 1  # the call under way when it was killed may have its intent
        kills += 1
    store = TokenCaptureStore(tmp_path)
    kept, dangling = set(), set()
    for rollout in ("r0", "r1", "r2"):
        snapshot = store.freeze_now(rollout)
        kept |= {f"{rollout} {e.model_call_id}" for e in snapshot.entries}
        dangling |= {f"{rollout} {r.model_call_id}" for r in snapshot.incomplete_reasons}
        assert {"dangling_intent"} >= {r.code for r in snapshot.incomplete_reasons}
    store.close_now()

    assert kills >= 3  # on a very busy machine; usually 24
    assert acknowledged["put"] <= kept
    assert acknowledged["intent"] <= kept | dangling
    assert not kept & dangling


def test_put_and_freeze_race_between_processes(tmp_path):
    """Each put is in the snapshot or refused, never neither and never both."""
    rounds = 300
    racer = start(RACER, str(tmp_path), str(rounds))
    assert racer.stdout is not None and racer.stdin is not None
    assert racer.stdout.readline() == "ready\n"
    store = TokenCaptureStore(tmp_path)
    racer.stdin.write("go\n")
    racer.stdin.flush()
    snapshots = [store.freeze_now(f"r{i}") for i in range(rounds)]
    outcomes = racer.communicate()[0].split()
    store.close_now()

    assert [len(s.entries) == 1 for s in snapshots] == [o == "kept" for o in outcomes]
    assert not any(s.incomplete for s in snapshots)


def test_processes_append_to_one_rollout(tmp_path):
    """Writers in several processes share a rollout without losing or tearing a line."""
    peers = [start(PEER, str(tmp_path), str(i)) for i in range(3)]
    assert [peer.wait() for peer in peers] == [0, 0, 0]
    for peer in peers:
        peer.communicate()
    store = TokenCaptureStore(tmp_path)
    snapshot = store.freeze_now("shared")
    store.close_now()

    expected = {f"p{p}-{i}" for p in range(3) for i in range(60)}
    assert (expected, 181) == ({e.model_call_id for e in snapshot.entries}, snapshot.version)
    assert (store.statistics().torn_tails, store.statistics().corrupt_places) == (0, 0)


def test_few_descriptors_are_enough_for_many_rollouts(tmp_path):
    """5,000 open rollouts need no more than a part of 256 descriptors."""
    peer = start(MANY, str(tmp_path), "5000")
    output = peer.communicate()[0]

    assert output == "1 [] True\nTrue\n"


async def test_held_locks_block_their_own_rollouts_only(tmp_path, entry):
    """More rollouts locked elsewhere than there are threads: the others go on."""
    store = TokenCaptureStore(tmp_path, max_threads=2)
    locked = [f"locked{i}" for i in range(5)]
    held = []
    for rollout in locked:
        await store.put(entry("c1", rollout_id=rollout))
        fd = os.open(store.path_for(rollout), os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        held.append(fd)
    waiting = [asyncio.create_task(store.put(entry("c2", rollout_id=r))) for r in locked]
    for i in range(5):
        await store.put(entry("c1", rollout_id=f"free{i}"))
    assert not any(task.done() for task in waiting)
    for fd in held:
        os.close(fd)
    await asyncio.gather(*waiting)
    await store.close()


async def test_a_lock_that_is_never_given_back_fails_closed(tmp_path, entry, monkeypatch):
    """The call is told, the rollout is masked, and the store as a whole stays healthy."""
    monkeypatch.setattr("capture_server.stores.journal_file.LOCK_TIMEOUT_S", 0.05)
    store = TokenCaptureStore(tmp_path)
    await store.put(entry("c1"))
    fd = os.open(store.path_for("r1"), os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(StoreUnavailableError, match="lock"):
        await store.put(entry("c2"))
    await store.put(entry("c1", rollout_id="r2"))
    os.close(fd)
    assert await store.healthy() is None
    snapshot = await store.freeze("r1")
    await store.close()

    assert [(r.code, r.model_call_id) for r in snapshot.incomplete_reasons] == [
        ("store_failure", "c2")
    ]


async def test_a_forked_child_is_refused(file_store, entry):
    """Threads and locks are not inherited: the child is told at once instead of hanging."""
    await file_store.put(entry())
    file_store._committer._pid += 1
    with pytest.raises(StoreError, match="fork"):
        await file_store.put(entry("c2"))
    file_store._committer._pid -= 1


def test_holders_name_processes():
    """A running process is alive, a finished one dead, anything unknown not known to be dead."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = current_holder()
    machine = own.rpartition(":")[0].rpartition(":")[0]
    started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    holder = f"{machine}:{child.pid}:{started}"

    assert not is_known_dead(own)
    assert not is_known_dead(holder)
    assert is_known_dead(f"{machine}:{child.pid}:1")
    child.communicate(b"\n")
    assert is_known_dead(holder)
    for unknown in ("", "x", "another-boot:1:2:3", f"{machine}:x:1", f"{machine}0:1:1"):
        assert not is_known_dead(unknown)
