"""Small pure operations on ASGI messages, and reading a request body with a bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Message, Receive

from middleware.errors import BodyTooLargeError


class ClientGone(Exception):  # noqa: N818 - an event, not an error
    """The client left before its request was complete."""


def changed_headers(start: Message, *, remove: Iterable[str], put: Mapping[str, str]) -> Message:
    """A copy of a response start with headers removed and set (names in lower case)."""
    gone = {name.encode() for name in (*remove, *put)}
    headers = [(name, value) for name, value in start["headers"] if name.lower() not in gone]
    headers += [(name.encode(), value.encode("latin-1")) for name, value in put.items()]
    return {**start, "headers": headers}


def json_messages(
    status: int, content: Any, headers: Mapping[str, str] | None = None
) -> tuple[Message, Message]:
    """The two messages of a JSON response."""
    response = JSONResponse(content, status, headers)
    return (
        {"type": "http.response.start", "status": status, "headers": response.raw_headers},
        {"type": "http.response.body", "body": bytes(response.body), "more_body": False},
    )


async def read_body(receive: Receive, limit: int | None) -> bytes:
    """The whole request body.

    Raises:
        BodyTooLargeError: more than ``limit`` bytes; nothing more is read.
        ClientGone: the client left first.
    """
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if limit is not None and size > limit:
            raise BodyTooLargeError(f"the request body exceeds {limit} bytes: send less")
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
