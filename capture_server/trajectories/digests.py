"""Checking recorded digests of many nested sequences without converting each one anew.

The digest hashes the length first, so a parent's hash cannot be continued into its child's:
every record costs one pass of sha256. What can be shared is shared: calls on one path are
prefixes of the longest, so one big-endian buffer serves them all, and sha256 runs outside the
interpreter lock, on a few threads when there is much to hash.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

import numpy as np

from capture_server.trajectories.calls import Call
from middleware.records import DIGEST_VERSION, compute_digest, compute_log_probs_digest

DIGEST_MISMATCH: Final = "recorded_digest_mismatch"
"""Why a row or a response is masked in which a call contradicts its own record."""

_DOMAIN: Final = b"nemo-gym-tokens"  # with the encoding: wire contract, spec 01
_ID_BYTES: Final = 8
_PARALLEL_FROM_BYTES: Final = 4 << 20  # below, starting threads costs more than it saves
_MAX_THREADS: Final = 4


def check_digests(
    calls: Iterable[Call], before: Callable[[Call], Call | None] = lambda call: call.base
) -> None:
    """Set ``digest_fits`` on the calls that record a digest and were not checked yet.

    ``before(call)`` is the call whose full sequence the call's own one starts with, or None.
    """
    unchecked = {call for call in calls if call.entry.digest and call.digest_fits is None}
    work = sum(call.cum_len for call in unchecked) * _ID_BYTES
    with ExitStack() as stack:
        run: Callable[..., Iterable[bool]] = map
        if work >= _PARALLEL_FROM_BYTES and len(unchecked) > 1:
            threads = min(_MAX_THREADS, os.cpu_count() or 1)
            run = stack.enter_context(ThreadPoolExecutor(threads, "digest")).map
        for path in _nested_paths(unchecked, before):
            _check_path(path, run)


def contradicting(calls: Collection[Call]) -> set[Call]:
    """The calls that are not what their own recorded digests and ``cum_len`` say.

    Parents are checked when a child is linked to them; nobody else checks the last call of a
    chain. Absent stamps say nothing; a recorded length of 0 does.
    """
    check_digests(calls, lambda call: call.base or call.parent)
    return {
        call
        for call in calls
        if call.digest_fits is False or not length_fits(call) or not log_probs_fit(call)
    }


def log_probs_fit(call: Call) -> bool:
    """Whether the log-probs are those of the recorded digest, if there is one."""
    recorded = call.entry.log_probs_digest
    return recorded is None or recorded == compute_log_probs_digest(call.entry.generation_log_probs)


def length_fits(call: Call) -> bool:
    """Whether the recorded ``cum_len``, if there is one, is the length of the sequence."""
    return call.entry.cum_len is None or call.entry.cum_len == call.cum_len


def _nested_paths(calls: set[Call], before: Callable[[Call], Call | None]) -> Iterable[list[Call]]:
    """Split into lists, longest sequence first, each call a prefix of the list's first."""
    left = set(calls)
    for longest in sorted(calls, key=lambda call: (-call.cum_len, call.call_id)):
        path: list[Call] = []
        call: Call | None = longest
        while call is not None and (call in left or call not in calls):
            if call in left:
                left.remove(call)
                path.append(call)
            call = before(call)
        if path:
            yield path


def _check_path(path: list[Call], run: Callable[..., Iterable[bool]]) -> None:
    buffer = np.empty(path[0].cum_len, dtype=">u8")
    path[0].write_sequence(buffer)
    data = buffer.view(np.uint8).data

    def fits(call: Call) -> bool:
        count = call.cum_len
        if not count:
            return call.entry.digest == compute_digest(())
        hasher = hashlib.sha256(_DOMAIN + bytes([DIGEST_VERSION]) + count.to_bytes(8, "big"))
        hasher.update(data[: count * _ID_BYTES])
        return hasher.hexdigest() == call.entry.digest

    for call, result in zip(path, run(fits, path), strict=True):
        call.digest_fits = result
