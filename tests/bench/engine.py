"""An engine that answers at once, in vLLM's shapes: what is left to measure is the sidecar.

Run by the HTTP rows in a process of its own: ``python -m tests.bench.engine`` prints its URL.
The request's ``model`` chooses the answer; token ids and log-probs come only if asked for, as
from the real one. Streamed chunks carry the time at which they were sent.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

CHUNK_PAUSE_S = 0.0005
FIRST_CHUNK_AFTER_S = 0.02  # an engine's prefill: the intent's sync overlaps it


@dataclass(frozen=True)
class Answer:
    """``call-<prompt>-<generated>`` or ``stream-<prompt>-<chunks>``."""

    is_stream: bool
    prompt: list[int]
    generated: list[int]
    log_probs: list[float]


def answer_of(model: str) -> Answer:
    """The answer that a model name asks for."""
    kind, prompt, generated = model.split("-")
    rng = np.random.default_rng(3)
    return Answer(
        kind == "stream",
        rng.integers(0, 150_000, int(prompt)).tolist(),
        rng.integers(0, 150_000, int(generated)).tolist(),
        (-rng.exponential(0.5, int(generated)).astype(np.float32)).astype(float).tolist(),
    )


def _log_prob(value: float) -> dict[str, Any]:
    return {"token": " tok", "logprob": value, "bytes": [32, 116, 111, 107], "top_logprobs": []}


def whole_body(answer: Answer, with_tokens: bool) -> bytes:
    """A whole chat answer."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": " tok" * len(answer.generated)},
        "logprobs": None,
        "finish_reason": "stop",
        "token_ids": None,
    }
    if with_tokens:
        choice["logprobs"] = {"content": [_log_prob(value) for value in answer.log_probs]}
        choice["token_ids"] = answer.generated
    return orjson.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(answer.prompt),
                "completion_tokens": len(answer.generated),
            },
            "prompt_token_ids": answer.prompt if with_tokens else None,
        }
    )


def stream_frames(answer: Answer, with_tokens: bool) -> list[bytes]:
    """The frames of a streamed answer, one token each."""
    last = len(answer.generated) - 1
    frames = [_frame({"role": "assistant", "content": ""}, None, with_tokens, answer.prompt)]
    for at, (token, value) in enumerate(zip(answer.generated, answer.log_probs, strict=True)):
        finish = "stop" if at == last else None
        frames.append(_frame({"content": " tok"}, (token, value), with_tokens, None, finish))
    return [*frames, b"data: [DONE]\n\n"]


def _frame(
    delta: dict[str, Any],
    token: tuple[int, float] | None,
    with_tokens: bool,
    prompt: list[int] | None,
    finish: str | None = None,
) -> bytes:
    choice: dict[str, Any] = {
        "index": 0,
        "delta": delta,
        "logprobs": None,
        "finish_reason": finish,
        "token_ids": None,
    }
    payload = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    if with_tokens and token is not None:
        choice["logprobs"] = {"content": [_log_prob(token[1])]}
        choice["token_ids"] = [token[0]]
    if prompt is not None:
        payload["prompt_token_ids"] = prompt if with_tokens else None
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class Engine:
    """Prepares each answer once and sends it as often as asked."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[str, bool], Any] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(line.partition(b":")[2])
                        for line in head.split(b"\r\n")
                        if line.lower().startswith(b"content-length:")
                    ),
                    0,
                )
                raw = await reader.readexactly(length)
                if head.startswith(b"GET"):
                    writer.write(_http(b'{"object":"list","data":[{"id":"m"}]}'))
                else:
                    await self._answer(orjson.loads(raw), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        key = (body["model"], body.get("return_token_ids") is True)
        if key not in self._prepared:
            answer = answer_of(key[0])
            prepare = stream_frames if answer.is_stream else whole_body
            prepared = prepare(answer, key[1])
            self._prepared[key] = prepared if answer.is_stream else _http(prepared)  # type: ignore[arg-type]
        prepared = self._prepared[key]
        if isinstance(prepared, bytes):
            writer.write(prepared)
            await writer.drain()
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        await asyncio.sleep(FIRST_CHUNK_AFTER_S)
        for frame in prepared:
            sent = b": sent %.9f\n\n" % time.monotonic() + frame if frame is prepared[1] else frame
            writer.write(b"%x\r\n%b\r\n" % (len(sent), sent))
            await asyncio.sleep(CHUNK_PAUSE_S)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _http(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


async def _main() -> None:
    server = await asyncio.start_server(Engine().serve, "127.0.0.1", 0, limit=1 << 24)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        # Ends with the process that started it, also when that one is killed.
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main())
