"""Processes and a lean HTTP client for the HTTP rows.

The client shares the machine with what it measures, so it does as little as it can: prebuilt
requests, keep-alive connections, no parsing beyond the framing.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import orjson

_READ_LIMIT = 1 << 26


@dataclass(frozen=True)
class Rig:
    """Engine and sidecar under way; ``root`` is the sidecar's store."""

    url: str
    root: Path


@contextmanager
def rig() -> Iterator[Rig]:
    """An engine and a sidecar, each in a process of its own."""
    with (
        tempfile.TemporaryDirectory() as root,
        _process("tests.bench.engine") as engine,
        _process("tests.bench.sidecar", engine, root) as sidecar,
    ):
        yield Rig(sidecar, Path(root))


@contextmanager
def _process(module: str, *arguments: str) -> Iterator[str]:
    """Run a module that prints its URL and ends with its standard input."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"{module} did not start")
        try:
            yield url
        finally:
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass(frozen=True)
class Reply:
    """An answer: its body, and when its first body bytes were read (``time.monotonic``)."""

    status: int
    body: bytes
    first_at: float


class Connection:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: str = "", marker: bytes = b""
    ) -> Reply:
        """Send a request, read its answer; ``first_at`` is the first chunk holding ``marker``."""
        self._writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"{headers}content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(b" ", 2)[1])
        if b"transfer-encoding: chunked" in head:
            first_at, whole = 0.0, bytearray()
            while size := int(await self._reader.readline(), 16):
                piece = (await self._reader.readexactly(size + 2))[:-2]
                if not first_at and marker in piece:
                    first_at = time.monotonic()
                whole += piece
            await self._reader.readline()
            return Reply(status, bytes(whole), first_at)
        length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
        return Reply(status, await self._reader.readexactly(length), time.monotonic())


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    """One connection to a server."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=_READ_LIMIT)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()


async def cpu_seconds(url: str) -> float:
    """Processor time of the sidecar so far; idle connections are closed, so on a new one."""
    async with connected(url) as line:
        return float(orjson.loads((await line.ask("GET", "/bench/cpu")).body)["seconds"])
