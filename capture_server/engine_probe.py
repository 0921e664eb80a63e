"""Finds out what kind of engine stands behind the proxy (``--engine auto``).

Asked when the first call needs it, then remembered; an engine that is down is asked again. Only
facts that the engine states count: a wrong guess would change what agents see.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import aiohttp
import orjson

from capture_server.proxy import UpstreamProxy
from middleware.engines import EngineProfile, engine_profile

logger = logging.getLogger(__name__)

_TIMEOUT: Final = aiohttp.ClientTimeout(total=2.0)
_VLLM_OWNERS: Final = frozenset({"vllm", "token-capture-demo"})


class EngineProbe:
    """An async callable that answers with the engine's profile."""

    def __init__(self, proxy: UpstreamProxy, *, api_key: str | None = None) -> None:
        self._proxy = proxy
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._known: EngineProfile | None = None
        self._asking = asyncio.Lock()

    async def __call__(self) -> EngineProfile:
        """The profile; ``openai`` as long as the engine does not answer."""
        if self._known is not None:
            return self._known
        async with self._asking:
            if self._known is None:
                self._known = await self._ask()
        return self._known or engine_profile("openai")

    async def _ask(self) -> EngineProfile | None:
        try:
            models = await self._get("/v1/models")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            logger.info("the engine cannot be asked yet: %s", error, extra={"action": "probe"})
            return None
        rows = models.get("data") if isinstance(models, dict) else None
        owners = {row.get("owned_by") for row in rows or () if isinstance(row, dict)}
        name = "vllm" if owners & _VLLM_OWNERS else "openai"
        logger.info("engine profile: %s", name, extra={"action": "engine_probed", "engine": name})
        return engine_profile(name)

    async def _get(self, path: str) -> Any:
        async with self._proxy.session.get(
            self._proxy.base + path, headers=self._headers, timeout=_TIMEOUT
        ) as response:
            if response.status >= 500:
                raise aiohttp.ClientError(f"status {response.status}")
            return orjson.loads(await response.read())
