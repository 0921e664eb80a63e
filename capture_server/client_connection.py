"""What both clients are made of: where to, as whom, how patiently. Sends nothing itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import httpx

from capture_server.client_requests import Answer, Call
from capture_server.errors import SidecarUnreachableError
from middleware.agent_tokens import AgentTokens, split_keys
from middleware.errors import ConfigurationError
from middleware.paths import capture_base_url

DEFAULT_SERVER: Final = "http://127.0.0.1:8900"
_CONNECT_TIMEOUT_S: Final = 5.0


def token_from_environment() -> str | None:
    """The control token of this process: TOKEN_CAPTURE_CONTROL_TOKEN, or the file of ..._FILE.

    Of several (a rotation) the first is used.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    tokens = _secret_from_environment("TOKEN_CAPTURE_CONTROL_TOKEN").replace(",", " ").split()
    return tokens[0] if tokens else None


def agent_tokens_from_environment() -> AgentTokens | None:
    """What signs agents' URLs: TOKEN_CAPTURE_AGENT_TOKEN_KEY, or the file of ..._FILE.

    None without a key, and where TOKEN_CAPTURE_AGENT_TOKENS is ``off``.

    Raises:
        ConfigurationError: the key cannot be used, or URLs must be signed and there is none.
    """
    mode = os.environ.get("TOKEN_CAPTURE_AGENT_TOKENS", "").strip().lower()
    if mode == "off":
        return None
    try:
        keys = split_keys(_secret_from_environment("TOKEN_CAPTURE_AGENT_TOKEN_KEY"))
    except ValueError as exc:
        raise ConfigurationError(f"TOKEN_CAPTURE_AGENT_TOKEN_KEY: {exc}") from exc
    return AgentTokens(keys) if keys or mode == "signed" else None


def _secret_from_environment(name: str) -> str:
    text, file = os.environ.get(name, ""), os.environ.get(f"{name}_FILE", "")
    if text or not file:
        return text
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigurationError(f"cannot read {file}: {exc.strerror}") from exc


class Connection:
    """The common part of ``RolloutClient`` and ``SyncRolloutClient``."""

    def __init__(
        self,
        server: str | None = None,
        *,
        control_token: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 4,
    ) -> None:
        self._server = (server or os.environ.get("TOKEN_CAPTURE_SERVER") or DEFAULT_SERVER).rstrip(
            "/"
        )
        if not self._server.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"{self._server!r} is no server URL; use one like {DEFAULT_SERVER}"
            )
        token = control_token if control_token is not None else token_from_environment()
        self._auth = {"authorization": f"Bearer {token}"} if token else {}
        self._timeout = httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S)
        self.retries = retries

    @property
    def server(self) -> str:
        """The sidecar's address."""
        return self._server

    def base_url(self, rollout_id: str) -> str:
        """The base URL to give to the agent of this rollout (ends in ``/v1``).

        Signed where this process has the key (see ``agent_tokens_from_environment``).

        Raises:
            InvalidIdError: the id is not valid.
            ConfigurationError: the key cannot be used.
        """
        return capture_base_url(self._server, rollout_id, agent_tokens_from_environment())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._server!r})"

    def client_options(self) -> dict[str, Any]:
        """Arguments for the httpx client."""
        return {"timeout": self._timeout, "trust_env": False, "headers": self._auth}

    def request_options(self, call: Call[Any]) -> dict[str, Any]:
        """Arguments for one httpx request."""
        return {
            "method": call.method,
            "url": self._server + call.path,
            "params": dict(call.query),
            "content": call.content,
            "headers": call.headers,
        }

    def unreachable(self, exc: Exception) -> SidecarUnreachableError:
        """The error after the last attempt got no answer."""
        return SidecarUnreachableError(
            f"no answer from {self._server} ({type(exc).__name__}: {exc}); is the sidecar running "
            "there? (token-capture serve)"
        )


def answer_of(response: httpx.Response) -> Answer:
    """The part of a response that parsing needs."""
    return Answer(status=response.status_code, headers=response.headers, body=response.content)
