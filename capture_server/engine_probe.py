"""Finds out what kind of engine stands behind the proxy (``--engine auto``).

Asked at start and again, at most every few seconds, until the engine has answered; a call never
waits for it longer than the first question takes. Only facts that the engine states count: a
wrong guess would change what agents see.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import aiohttp
import orjson

from capture_server.proxy import UpstreamProxy
from middleware.engines import EngineProfile, engine_profile

logger = logging.getLogger(__name__)

_TIMEOUT: Final = aiohttp.ClientTimeout(total=2.0)
_ASK_EVERY_S: Final = 5.0
_VLLM_OWNERS: Final = frozenset({"vllm", "token-capture-demo"})


class EngineProbe:
    """An async callable that answers with the engine's profile; ``openai`` while it is unknown."""

    def __init__(self, proxy: UpstreamProxy, *, api_key: str | None = None) -> None:
        self._proxy = proxy
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._known: EngineProfile | None = None
        self._asking: asyncio.Task[None] | None = None
        self._first_answer = asyncio.Event()
        self._next_at = 0.0

    async def __call__(self) -> EngineProfile:
        """The profile; waits only while nothing at all has been heard yet."""
        if self._known is None:
            self.start()
            await self._first_answer.wait()
        return self._known or engine_profile("openai")

    def start(self) -> None:
        """Ask in the background, unless that was done a moment ago."""
        now = time.monotonic()
        if self._known is None and now >= self._next_at:
            self._next_at = now + _ASK_EVERY_S
            self._asking = asyncio.create_task(self._ask(), name="token-capture-engine-probe")

    async def close(self) -> None:
        """Stop asking."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait((self._asking,))

    async def _ask(self) -> None:
        try:
            owners = await self._owners()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            kind = type(error).__name__
            logger.info("the engine cannot be asked yet: %s", kind, extra={"action": "probe"})
        else:
            name = "vllm" if owners & _VLLM_OWNERS else "openai"
            logger.info("engine profile: %s", name, extra={"action": "probe", "engine": name})
            self._known = engine_profile(name)
        finally:
            self._first_answer.set()

    async def _owners(self) -> set[Any]:
        """Who owns the served models.

        Raises:
            ClientError: no answer, or one that says nothing about the engine (401, 5xx).
        """
        url = f"{self._proxy.base}/v1/models"
        async with self._proxy.session.get(
            url, headers=self._headers, timeout=_TIMEOUT
        ) as response:
            response.raise_for_status()
            models = orjson.loads(await response.read())
        rows = models.get("data") if isinstance(models, dict) else None
        return {
            row["owned_by"]
            for row in rows or ()
            if isinstance(row, dict) and isinstance(row.get("owned_by"), str)
        }
