"""One sidecar as seen from another process: a pooled connection, retries, typed errors.

Invariant: ``send`` ends within its deadline with the parsed answer or one of our errors. What the
contract of a store names (conflicts, fences, wrong input) keeps its class; everything else (no
answer, a full disk over there, a wrong token, an old release) is ``StoreUnavailableError``.
Requests are idempotent by contract, so all may be repeated. Proxies from the environment are
ignored: the sidecar is in the cluster.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from capture_server.client_connection import token_from_environment
from capture_server.client_requests import Answer, Call, retry_delays, wait_before_retry
from middleware.errors import (
    ConfigurationError,
    ConflictError,
    InvalidInputError,
    StoreClosedError,
    StoreError,
    StoreUnavailableError,
    TokenCaptureError,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CONNECT_TIMEOUT_S: Final = 2.0
# Below uvicorn's 5 s, so that we close an idle connection before the sidecar does.
_KEEPALIVE_S: Final = 4.0
_CONNECTIONS: Final = 256
_BIG_BODY: Final = 1 << 18
_RETRIES: Final = 64  # the deadline ends them
_RETRIES_WHILE_AWAY: Final = 1  # one, for a connection that went stale with the old sidecar
_FIRST_DELAY_S: Final = 0.05
_NOT_NOW: Final = frozenset({502, 503, 504})  # the sidecar's own, or of a gateway before it


class NoAnswerError(StoreUnavailableError):
    """The request may have been carried out: no answer, or a failure that leaves it open."""


class SidecarLink:
    """Sends calls to one sidecar. Belongs to the event loop that uses it first.

    Args:
        server: the sidecar's address, perhaps with a gateway's path prefix.
        control_token: default TOKEN_CAPTURE_CONTROL_TOKEN or ..._FILE; never part of the URL.

    Raises:
        ConfigurationError: no such address.
    """

    def __init__(self, server: str, *, control_token: str | None = None) -> None:
        parts = urlsplit(server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"{server!r} is no sidecar address like http://sidecar:8900")
        if parts.username or parts.password:
            raise ConfigurationError(
                "a sidecar's URL holds no credentials: set TOKEN_CAPTURE_CONTROL_TOKEN"
            )
        if parts.query or parts.fragment:
            raise ConfigurationError(f"store URL {server!r}: a remote store takes no options")
        self.server = server.rstrip("/")
        token = control_token if control_token is not None else token_from_environment()
        self._auth = {"authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.away: str | None = None  # why the last call failed for good; None: it did not

    async def send(self, call: Call[T], *, deadline_s: float) -> T:
        """Send until there is a final answer; waits at most about ``deadline_s``.

        While the sidecar is known to be away, one repetition is all that is tried.

        Raises:
            TokenCaptureError: what the sidecar answered, or ``StoreUnavailableError``.
        """
        ends_at = time.monotonic() + deadline_s
        retries = _RETRIES_WHILE_AWAY if self.away else _RETRIES
        may_be_done = False
        for delay_s in (*retry_delays(retries, base_s=_FIRST_DELAY_S), None):
            left_s = ends_at - time.monotonic()
            outcome, wait_s = await self._attempt(call, max(left_s, 0.001), delay_s)
            if isinstance(outcome, Answer):
                self._is_back()
                return self._read(call, outcome)
            may_be_done |= isinstance(outcome, NoAnswerError)
            if wait_s is None or time.monotonic() + wait_s >= ends_at:
                self._is_away(outcome)
                raise NoAnswerError(str(outcome)) if may_be_done else outcome
            await asyncio.sleep(wait_s)
        raise AssertionError("the last attempt decides")

    async def _attempt(
        self, call: Call[Any], timeout_s: float, delay_s: float | None
    ) -> tuple[Answer | StoreUnavailableError, float | None]:
        """A final answer, or why there is none and how long to wait (None: no more)."""
        try:
            answer = await self._once(call, timeout_s)
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            # Without a connection nothing was sent.
            kind = StoreUnavailableError if _is_unconnected(exc) else NoAnswerError
            reason = str(exc) or type(exc).__name__
            return kind(f"no answer from the sidecar {self.server}: {reason}"), delay_s
        if answer.status in _NOT_NOW:
            wait_s = None if delay_s is None else wait_before_retry(answer, delay_s) or delay_s
            # A store whose sync failed may have the line; a gateway knows nothing.
            return NoAnswerError(str(self._failure(call, answer))), wait_s
        return answer, None

    async def _once(self, call: Call[Any], timeout_s: float) -> Answer:
        content = call.content
        # Bytes would be written in one go; a file object goes out in pieces.
        is_big = content is not None and len(content) > _BIG_BODY
        async with self._open_session().request(
            call.method,
            URL(self.server + call.path, encoded=True).with_query(dict(call.query)),
            data=io.BytesIO(content or b"") if is_big else content,
            headers=call.headers | self._auth,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S),
            allow_redirects=False,
        ) as response:
            body = await response.read()
            return Answer(status=response.status, headers=response.headers, body=body)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise StoreClosedError("the store is closed: this process is shutting down")
        loop = asyncio.get_running_loop()
        if self._session is None:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_CONNECTIONS, keepalive_timeout=_KEEPALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        if self._loop is not loop:
            raise StoreError("a remote store belongs to one event loop: open one in each")
        return self._session

    def _read(self, call: Call[T], answer: Answer) -> T:
        try:
            return call.read(answer)
        except (ConflictError, InvalidInputError, StoreError):
            raise
        except TokenCaptureError as exc:
            raise StoreUnavailableError(
                f"the sidecar {self.server} does not serve this process: {exc} [{exc.code}]"
            ) from exc

    def _failure(self, call: Call[Any], answer: Answer) -> StoreUnavailableError:
        try:
            self._read(call, answer)
        except StoreUnavailableError as exc:
            return exc
        except TokenCaptureError as exc:
            return StoreUnavailableError(str(exc))
        raise AssertionError("a 503 is an error")

    def _is_away(self, failure: StoreUnavailableError) -> None:
        if self.away is None:
            logger.error(
                "the sidecar %s is away: %s",
                self.server,
                failure,
                extra={"action": "sidecar_away", "server": self.server},
            )
        self.away = str(failure)

    def _is_back(self) -> None:
        if self.away is not None:
            logger.warning(
                "the sidecar %s is back",
                self.server,
                extra={"action": "sidecar_back", "server": self.server},
            )
        self.away = None

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        self._closed = True
        if self._session is not None:
            await self._session.close()


def _is_unconnected(exc: Exception) -> bool:
    return isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


def link_to(server: str | SidecarLink, control_token: str | None) -> SidecarLink:
    """A link to that address, or the shared link that was given."""
    if isinstance(server, SidecarLink):
        return server
    return SidecarLink(server, control_token=control_token)
