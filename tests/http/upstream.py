"""A scripted engine on a real socket: it can do everything that real ones do wrong.

A script is a list of steps: bytes to send, a number of seconds to wait, an ``asyncio.Event`` to
wait for, ``RESET`` or ``CLOSE``. One script answers one request; the last one repeats.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

RESET = object()
CLOSE = object()
Step = object


@dataclass
class SeenRequest:
    """What the engine received."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> Any:
        """The parsed body."""
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        """A header's value."""
        return next((value for key, value in self.headers if key.lower() == name), None)


@dataclass
class ScriptedEngine:
    """``url`` is where it listens; ``seen`` what it got; ``hung_up`` counts clients that left."""

    scripts: list[Sequence[Step]]
    url: str = ""
    seen: list[SeenRequest] = field(default_factory=list)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            while (request := await _read_request(reader)) is not None:
                if request.line.startswith("GET /v1/models"):
                    writer.write(whole({"object": "list", "data": [{"id": "m"}]}))
                    continue
                self.seen.append(request)
                script = self.scripts[min(len(self.seen), len(self.scripts)) - 1]
                if not await self._play(script, reader, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            self.hung_up.set()
        finally:
            writer.close()

    async def _play(
        self, script: Sequence[Step], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        for step in script:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
                self.answered.set()
            elif isinstance(step, asyncio.Event | int | float):
                if await self._wait(step, reader):
                    return False
            elif step is RESET:
                raw: socket.socket = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                return False
            elif step is CLOSE:
                return False
        return True

    async def _wait(self, step: asyncio.Event | int | float, reader: asyncio.StreamReader) -> bool:
        """Wait for the step or for the client to hang up; True when it hung up."""
        leaving = asyncio.ensure_future(reader.read(1))
        waiting = asyncio.ensure_future(
            step.wait() if isinstance(step, asyncio.Event) else asyncio.sleep(step)
        )
        await asyncio.wait((leaving, waiting), return_when=asyncio.FIRST_COMPLETED)
        gone = leaving.done()
        for task in (leaving, waiting):
            task.cancel()
        await asyncio.wait((leaving, waiting))
        if gone:
            self.hung_up.set()
        return gone


@asynccontextmanager
async def scripted_engine(*scripts: Sequence[Step]) -> AsyncIterator[ScriptedEngine]:
    """Run one; each script is a sequence of steps."""
    engine = ScriptedEngine(list(scripts))
    server = await asyncio.start_server(engine.handle, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()


async def _read_request(reader: asyncio.StreamReader) -> SeenRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    lines = head.decode("latin-1").split("\r\n")
    headers = [(key, value.strip()) for key, _, value in (x.partition(":") for x in lines[1:] if x)]
    request = SeenRequest(lines[0], headers, b"")
    if (length := request.header("content-length")) is not None:
        request.body = await reader.readexactly(int(length))
    elif request.header("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            request.body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    return request


# --- answers -------------------------------------------------------------------------------------


def whole(
    body: Any,
    status: str = "200 OK",
    headers: Iterable[tuple[str, str]] = (("content-type", "application/json"),),
) -> bytes:
    """A complete response with a content-length; ``body`` bytes, or an object sent as JSON."""
    raw = (
        body
        if isinstance(body, bytes)
        else json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    )
    lines = [
        f"HTTP/1.1 {status}",
        *(f"{k}: {v}" for k, v in headers),
        f"content-length: {len(raw)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"server: engine\r\ntransfer-encoding: chunked\r\n\r\n"
)
STREAM_END = b"0\r\n\r\n"


def chunk(raw: bytes) -> bytes:
    """One piece of a chunked body."""
    return f"{len(raw):x}\r\n".encode() + raw + b"\r\n"


def frame(payload: Any) -> bytes:
    """One event, as vLLM writes it."""
    return (
        b"data: "
        + json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode()
        + b"\n\n"
    )


DONE = b"data: [DONE]\n\n"


def delta(
    text: str | None = None,
    ids: list[Any] | None = None,
    log_probs: list[Any] | None = None,
    *,
    finish: str | None = None,
    index: int = 0,
    prompt: list[int] | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """A chat chunk in vLLM's shape; log-probs default to -0.1 per id."""
    choice: dict[str, Any] = {
        "index": index,
        "delta": {} if text is None else {"content": text},
        "logprobs": None,
        "finish_reason": finish,
    } | extra
    if ids is not None:
        values = log_probs if log_probs is not None else [-0.1] * len(ids)
        choice["logprobs"] = {"content": [{"token": "t", "logprob": value} for value in values]}
        choice["token_ids"] = ids
    payload = {"id": "resp-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}
    if prompt is not None:
        choice["delta"] = {"role": "assistant", "content": ""}
        payload["prompt_token_ids"] = prompt
    return payload


def usage(completion: int, prompt: int) -> dict[str, Any]:
    """The usage chunk."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"id": "resp-1", "model": "m", "choices": [], "usage": counts}


def stream(*payloads: Any) -> bytes:
    """A whole streamed response; payloads are dicts or raw bytes."""
    pieces = [p if isinstance(p, bytes) else frame(p) for p in payloads]
    return STREAM_HEAD + b"".join(map(chunk, pieces)) + STREAM_END


def chat(
    text: str = "hi",
    ids: list[Any] | None = None,
    log_probs: list[Any] | None = None,
    *,
    prompt: list[int] | None = None,
    finish: str = "stop",
    response_id: str = "resp-1",
    **extra: Any,
) -> dict[str, Any]:
    """A whole chat answer in vLLM's shape."""
    ids = [11, 12] if ids is None else ids
    log_probs = [-0.1] * len(ids) if log_probs is None else log_probs
    prompt = [1, 2] if prompt is None else prompt
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": [{"token": "t", "logprob": value} for value in log_probs]},
        "finish_reason": finish,
        "token_ids": ids,
    }
    counts = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    return {
        "id": response_id,
        "object": "chat.completion",
        "model": "m",
        "choices": [choice],
        "usage": counts,
        "prompt_token_ids": prompt,
    } | extra
