"""The kit that every store must pass; third parties run it against their own.

``run_conformance`` takes factories of handles (each call stands for another worker; all must
reach the same records). ``python -m capture_server.conformance --store URL`` does it for a store
URL, and adds what only other processes can show. The promises: ``conformance_checks``.

Invariant: a check that is reported as passed was really run; checks of optional methods are left
out of the list when the method is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Callable, Sequence

from capture_server.conformance_checks import (
    CORE,
    LINEAGE,
    OPTIONAL,
    Check,
)
from capture_server.conformance_kit import ConformanceError, Kit
from capture_server.conformance_processes import PROCESS_CHECKS
from capture_server.stores.registry import open_resolver, open_store
from middleware.errors import TokenCaptureError
from middleware.protocols import CaptureStore, LineageResolver, TokenSink, TokenSource

__all__ = ["ConformanceError", "main", "run_conformance"]


async def run_conformance(
    sink_factory: Callable[[], TokenSink],
    source_factory: Callable[[], TokenSource],
    lineage_factory: Callable[[], LineageResolver] | None = None,
    *,
    rollout_id: str = "conformance-rollout",
) -> list[str]:
    """Run every check that applies; return the names of those that passed.

    All handles are closed at the end (twice: closing is idempotent). A run leaves its rollouts
    behind under ids that start with ``rollout_id`` and a random part.

    Raises:
        ConformanceError: the first check that failed.
    """
    prefix = f"{rollout_id}.{secrets.token_hex(4)}"
    kit = Kit(sink_factory, source_factory, lineage_factory, prefix)
    probe = kit.sink()
    checks = list(CORE)
    checks += [c for names, c in OPTIONAL if all(hasattr(probe, name) for name in names)]
    checks += LINEAGE if lineage_factory is not None else ()
    passed = []
    try:
        for check in checks:
            kit.check = _name(check)
            await _run_check(kit, check)
            passed.append(kit.check)
    finally:
        for handle in [*kit.handles, *kit.handles]:
            await handle.close()
    return passed


def _name(check: Check) -> str:
    return str(getattr(check, "__name__", check)).removeprefix("_")


async def _run_check(kit: Kit, check: Check) -> None:
    try:
        await check(kit)
    except ConformanceError:
        raise
    except Exception as exc:
        raise ConformanceError(kit.check, f"unexpected {type(exc).__name__}: {exc}") from exc


# --- from the command line -------------------------------------------------------------------


async def _check_url(url: str) -> list[str]:
    store = open_store(url)
    opened = [store]  # also those that only a resolver was made from

    def handles() -> CaptureStore:
        if store.is_process_shared():
            opened.append(open_store(url))
        return opened[-1]

    passed = await run_conformance(
        handles, handles, lambda: open_resolver(url, handles()), rollout_id="conformance"
    )
    if store.is_process_shared():
        for name, check in PROCESS_CHECKS:
            await check(url)
            passed.append(name)
    for handle in opened:
        await handle.close()
    return passed


def main(argv: Sequence[str] | None = None) -> int:
    """Check the store of a URL; exit code 0 when it conforms, 1 when not."""
    parser = argparse.ArgumentParser(prog="python -m capture_server.conformance")
    parser.add_argument("--store", required=True, metavar="URL", help="the store to check")
    options = parser.parse_args(argv)
    try:
        passed = asyncio.run(_check_url(options.store))
    except (ConformanceError, TokenCaptureError) as exc:
        sys.stderr.write(f"FAIL {exc}\n")
        return 1
    sys.stdout.write("".join(f"ok   {name}\n" for name in passed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
