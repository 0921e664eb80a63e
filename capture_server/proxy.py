"""The proxy to the engine: an ASGI application that forwards one request and streams the answer.

Invariants: path, query, body and header values go through byte for byte (hop-by-hop headers
apart); chunks are passed on as they arrive; when the client leaves, the engine's request is
cancelled at once; a broken answer is never completed: the server closes the client's connection
(captured calls raise ``UpstreamError``, their exchange does the same).

aiohttp is the client because it was measured to move several times what httpx moves here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
from multidict import CIMultiDict
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from middleware.asgi import CALL_SCOPE_KEY, raw_path_of
from middleware.asgi_messages import json_messages
from middleware.dialects.choices import openai_error
from middleware.errors import InvalidInputError, UpstreamError

logger = logging.getLogger(__name__)

# Source: RFC 9110 7.6.1; "host" and the body's framing are set anew for each connection.
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_FORWARDED: Final = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
_AUTO_HEADERS: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_READ_BUFFER: Final = 1 << 18
_MAX_HEADER: Final = 1 << 16
# Below the engines' usual 5 s, so that we close an idle connection before they do.
_KEEPALIVE_S: Final = 4.0
_CONNECT_TIMEOUT_S: Final = 60.0


class UpstreamProxy:
    """Forwards to one engine. Use as an async context manager around its serving time.

    Args:
        upstream: base URL; a path in it is put in front of every request's path, except that a
            trailing ``/v1`` is dropped where the request brings its own.
        api_key: replaces the agents' ``Authorization`` when given.
    """

    def __init__(self, upstream: str, *, api_key: str | None = None) -> None:
        self._base = upstream_base(upstream)
        self._api_key = api_key
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # No limit on connections: a wave of rollouts must not queue behind a pool.
        connector = _CleanConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            read_bufsize=_READ_BUFFER,
            max_line_size=_MAX_HEADER,
            max_field_size=_MAX_HEADER,
            skip_auto_headers=_AUTO_HEADERS,
            trace_configs=[trace],
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The client session, for the start-up probe.

        Raises:
            UpstreamError: outside the context manager.
        """
        if self._session is None:
            raise UpstreamError("the proxy is not running")
        return self._session

    @property
    def connections(self) -> tuple[int, int]:
        """Connections to the engine: in use, and idle in the pool."""
        connector = self._session.connector if self._session is not None else None
        return connector.counts if isinstance(connector, _CleanConnector) else (0, 0)

    @property
    def base(self) -> str:
        """The engine's base URL without a trailing slash."""
        return self._base

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one HTTP request.

        Raises:
            UpstreamError: of a captured call, when the answer broke off or there was none.
        """
        if scope["type"] != "http":
            await _refuse_websocket(scope, receive, send)
            return
        exchange = _Forwarding(self, scope, receive, send)
        try:
            await exchange.run()
        except InvalidInputError as error:
            for message in json_messages(400, openai_error(400, error.code, str(error))):
                await send(message)
        except UpstreamError as error:
            if CALL_SCOPE_KEY in scope:
                raise
            logger.warning("an answer broke off: %s", error, extra={"action": "upstream_error"})
            if exchange.started:
                return  # without a last message: the server closes the client's connection
            body = openai_error(502, error.code, str(error))
            for message in json_messages(502, body):
                await send(message)

    def target(self, scope: Scope) -> URL:
        """Where the request goes: base, the path as it came, the query as it came.

        Raises:
            InvalidInputError: the target is no path.
        """
        path = raw_path_of(scope)
        if not path.startswith(b"/"):
            # "*@elsewhere/x" behind the base URL would name another host.
            raise InvalidInputError("the request target must be a path that starts with '/'")
        root = scope.get("root_path", "").encode()
        if root and path.startswith(root.rstrip(b"/") + b"/"):
            path = path[len(root.rstrip(b"/")) :]
        query: bytes = scope.get("query_string", b"")
        tail = path + (b"?" + query if query else b"")
        return URL(self._base + tail.decode("latin-1"), encoded=True)

    def headers(self, scope: Scope) -> CIMultiDict[str]:
        """The request's headers for the engine."""
        headers: CIMultiDict[str] = CIMultiDict()
        connection = _named_by_connection(scope["headers"])
        for name, value in scope["headers"]:
            if name.lower() not in _NOT_FORWARDED and name.lower() not in connection:
                headers.add(name.decode("latin-1"), _header_text(value))
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        return headers


class _Forwarding:
    """One request under way."""

    def __init__(self, proxy: UpstreamProxy, scope: Scope, receive: Receive, send: Send) -> None:
        self._proxy = proxy
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body_read = asyncio.Event()
        self.started = False

    async def run(self) -> None:
        """Forward until the answer ends or the client leaves."""
        answering = asyncio.create_task(self._answer(), name="token-capture-proxy-answer")
        leaving = asyncio.create_task(self._client_left(), name="token-capture-proxy-client")
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            # Cancelling the answer closes the engine's connection.
            await asyncio.wait((answering, leaving))
        if not answering.cancelled() and (error := answering.exception()) is not None:
            raise error

    async def _client_left(self) -> None:
        await self._body_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _answer(self) -> None:
        try:
            data = await self._request_data()
            response = await self._request(data)
            async with response:
                await self._pass_on(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamError(_cause(error)) from error

    async def _request(self, data: bytes | AsyncIterator[bytes] | None) -> aiohttp.ClientResponse:
        proxy, scope = self._proxy, self._scope
        method, url, headers = scope["method"], proxy.target(scope), proxy.headers(scope)
        if isinstance(data, AsyncIterator):
            length = dict(scope["headers"]).get(b"content-length")
            if length is not None:
                headers["Content-Length"] = length.decode("latin-1")
        used: dict[str, bool] = {}
        may_repeat = not isinstance(data, AsyncIterator) and (
            CALL_SCOPE_KEY in scope or method in _IDEMPOTENT
        )
        while True:
            used.clear()
            try:
                return await proxy.session.request(
                    method,
                    url,
                    headers=headers,
                    data=data,
                    allow_redirects=False,
                    trace_request_ctx=used,
                )
            except aiohttp.ServerDisconnectedError:
                # Most likely a pooled connection that the engine closed at this very moment. A
                # model call may be asked again: nothing of a first answer reached anybody.
                if not (may_repeat and used.get("reused")):
                    raise
                may_repeat = False

    async def _request_data(self) -> bytes | AsyncIterator[bytes] | None:
        first = await self._receive()
        if first["type"] == "http.disconnect":
            raise UpstreamError("the client left before its request was complete")
        body: bytes = first.get("body", b"")
        if not first.get("more_body", False):
            self._body_read.set()
            return body or None
        return self._request_stream(body)

    async def _request_stream(self, first: bytes) -> AsyncIterator[bytes]:
        piece, more = first, True
        while True:
            if piece:
                yield piece
            if not more:
                self._body_read.set()
                return
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise UpstreamError("the client left before its request was complete")
            piece, more = message.get("body", b""), message.get("more_body", False)

    async def _pass_on(self, response: aiohttp.ClientResponse) -> None:
        connection = _named_by_connection(response.raw_headers)
        headers = [
            (name.lower(), value)
            for name, value in response.raw_headers
            if name.lower() not in _HOP_BY_HOP and name.lower() not in connection
        ]
        self.started = True
        await self._send(
            {"type": "http.response.start", "status": response.status, "headers": headers}
        )
        async for chunk in response.content.iter_any():
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class _CleanConnector(aiohttp.TCPConnector):
    """Never hands out a pooled connection on which the engine said something unasked.

    aiohttp checks only that it is connected; surplus bytes would become the next call's answer.
    """

    async def _get(self, key: Any, traces: Any) -> Any:
        while (connection := await super()._get(key, traces)) is not None:
            protocol = connection.protocol
            if protocol is None or not protocol.should_close:
                return connection
            connection.close()
        return None

    @property
    def counts(self) -> tuple[int, int]:
        """Connections in use, and idle."""
        return len(self._acquired), sum(map(len, self._conns.values()))


async def _note_reuse(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
    del session, params
    if context.trace_request_ctx is not None:
        context.trace_request_ctx["reused"] = True


def _header_text(value: bytes) -> str:
    """aiohttp writes headers as UTF-8; other bytes (Latin-1, obsolete) are sent re-encoded."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _cause(error: Exception) -> str:
    """What went wrong, without addresses and bytes of the engine's answer."""
    inner = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    detail = getattr(inner, "strerror", None)
    return f"{type(error).__name__}: {detail}" if detail else type(error).__name__


def upstream_base(upstream: str) -> str:
    """The base URL without trailing slash and without a trailing ``/v1`` (requests bring it)."""
    return upstream.rstrip("/").removesuffix("/v1")


def _named_by_connection(headers: object) -> frozenset[bytes]:
    """Header names that a Connection header declares to be hop-by-hop."""
    names: list[bytes] = []
    for name, value in headers:  # type: ignore[attr-defined]
        if name.lower() == b"connection":
            names += [part.strip().lower() for part in value.split(b",")]
    return frozenset(names)


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "websocket":
        return
    with suppress(asyncio.CancelledError):
        await receive()
    message: Message = {"type": "websocket.close", "code": 1011, "reason": "not proxied"}
    await send(message)
