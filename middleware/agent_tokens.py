"""Signed rollout ids: ``<id>~<signature>``, so that an agent can use no path but its own.

The signature is HMAC-SHA256 over the id, in base64url without padding (43 characters), keyed by a
secret of its own. Several keys stand for a rotation: the first signs, each is accepted. The
signature says which rollout, not until when: a retired or frozen rollout refuses calls by itself,
and a key is withdrawn by taking it off the list. Source: spec 05 "Who may do what".
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Sequence
from typing import Final

from middleware.errors import ConfigurationError, UnauthorizedError

SEPARATOR: Final = "~"
MIN_KEY_LENGTH: Final = 32

# What is signed here can mean nothing anywhere else, whoever shares the key.
_PURPOSE: Final = b"token-capture agent url v1\0"
_KEY: Final = re.compile(r"[!-~]+")


class AgentTokens:
    """Signs and verifies rollout ids. Holds the keys; its ``repr`` does not show them."""

    def __init__(self, keys: Sequence[str]) -> None:
        """Args:
            keys: see ``split_keys``; the first signs.

        Raises:
            ConfigurationError: no key.
        """
        if not keys:
            raise ConfigurationError(
                "signed agent URLs need a key: set TOKEN_CAPTURE_AGENT_TOKEN_KEY (or _FILE) to "
                "32 or more random characters, e.g. of `openssl rand -hex 32`"
            )
        self._keys = tuple(key.encode("ascii") for key in keys)

    def __repr__(self) -> str:
        return f"AgentTokens({len(self._keys)} keys)"

    def sign(self, rollout_id: str) -> str:
        """``<id>~<signature>``: what stands for the id in an agent's URL."""
        return f"{rollout_id}{SEPARATOR}{_signature(self._keys[0], rollout_id).decode()}"

    def verify(self, rollout_id: str, signature: str) -> None:
        """Return if one of the keys made the signature; as fast for a near miss as for a far one.

        Raises:
            UnauthorizedError: none did.
        """
        given = signature.encode("utf-8", "surrogatepass")
        # Every key is tried, so that time does not tell which one fits.
        matches = [hmac.compare_digest(given, _signature(key, rollout_id)) for key in self._keys]
        if not any(matches):
            raise UnauthorizedError(
                "the rollout id in this URL is not signed for this server: give the agent the "
                "base URL that `token-capture url ROLLOUT` prints"
            )


def split_keys(text: str) -> tuple[str, ...]:
    """The keys of a setting: separated by commas or white space.

    Raises:
        ValueError: a key is shorter than 32 characters or has others than visible ASCII.
    """
    keys = tuple(dict.fromkeys(part for part in re.split(r"[,\s]+", text) if part))
    for key in keys:
        if len(key) < MIN_KEY_LENGTH or _KEY.fullmatch(key) is None:
            raise ValueError(
                f"a key has {MIN_KEY_LENGTH} or more visible ASCII characters; make one with "
                "`openssl rand -hex 32`"
            )
    return keys


def _signature(key: bytes, rollout_id: str) -> bytes:
    digest = hmac.new(key, _PURPOSE + rollout_id.encode("ascii"), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=")
