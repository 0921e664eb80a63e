"""Who may look: the control token as a header, or a cookie that was given for it.

The cookie holds a time and its HMAC under one of the control tokens, never a token: any worker
can check it, it ends by itself, and a token that is rotated out ends its sessions. Pages change
nothing, so a cookie cannot be abused to change something; it is HttpOnly and SameSite=Strict.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from typing import Final

from starlette.requests import Request

from capture_server.auth import ControlGuard
from capture_server.errors import UnauthorizedError

COOKIE: Final = "token_capture_ui"
SESSION_S: Final = 12 * 3600
_PURPOSE: Final = b"token-capture dashboard session until "
_MAX_COOKIE: Final = 200


class DashboardSessions:
    """Checks callers of the dashboard. Stateless.

    Args:
        guard: decides on bearer tokens, and where none is set on local callers.
        tokens: the control tokens; empty: none is asked for.
    """

    def __init__(
        self, guard: ControlGuard, tokens: tuple[str, ...], clock: Callable[[], float] = time.time
    ) -> None:
        self._guard = guard
        self._keys = tuple(hashlib.sha256(token.encode()).digest() for token in tokens)
        self._clock = clock

    def allows(self, request: Request) -> bool:
        """Whether this request may see a page; False: it should log in.

        Raises:
            UnauthorizedError: no token is set, and the caller is not on this machine.
        """
        if not self._guard.needs_token:
            self._guard.check(request.scope)
            return True
        if self._is_valid(request.cookies.get(COOKIE, "")):
            return True
        try:
            self._guard.check(request.scope)
        except UnauthorizedError:
            return False
        return True

    def open(self, token: str) -> str | None:
        """The cookie for this control token; None if it is none."""
        given = hashlib.sha256(token.strip().encode("utf-8", "surrogatepass")).digest()
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            return None
        until = str(int(self._clock()) + SESSION_S)
        return f"{until}.{_mac(given, until)}"

    def _is_valid(self, cookie: str) -> bool:
        until, _, mac = cookie[:_MAX_COOKIE].partition(".")
        given = mac.encode("utf-8", "surrogatepass")
        # Every key is compared, so that time does not tell which one fits.
        matches = [hmac.compare_digest(given, _mac(key, until).encode()) for key in self._keys]
        return any(matches) and until.isdecimal() and int(until) > self._clock()


def _mac(key: bytes, until: str) -> str:
    message = _PURPOSE + until.encode("utf-8", "surrogatepass")
    return hmac.new(key, message, hashlib.sha256).hexdigest()
