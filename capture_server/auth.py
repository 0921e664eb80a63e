"""Who may use the control routes.

With control tokens: a bearer token, compared in constant time; the same answer for a missing and
a wrong one. Without: only over a connection that stayed on this machine, and not for a web page
that a browser on this machine has open. Tokens are held as hashes and never logged.
Source: spec 05 "Who may do what".
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from capture_server.config import Settings, is_loopback_host
from capture_server.errors import UnauthorizedError

# Names that no one can register: a page of a stranger cannot have its name point here.
_PRIVATE_SUFFIXES: Final = (".localhost", ".local", ".internal", ".test")

_REMEDY: Final = "set TOKEN_CAPTURE_CONTROL_TOKEN on the server and send it as a bearer token"


class ControlGuard:
    """Decides for each request whether it may use a control route. Stateless, cheap."""

    def __init__(self, settings: Settings) -> None:
        self._digests = tuple(_digest(token) for token in settings.control_tokens)
        self._open_to_all = settings.control_is_open and settings.insecure

    @property
    def needs_token(self) -> bool:
        """Whether a token is asked for."""
        return bool(self._digests)

    def check(self, scope: Scope) -> None:
        """Pass, or refuse.

        Raises:
            UnauthorizedError: no valid token; without tokens: not a local caller.
        """
        headers = Headers(scope=scope)
        if self._digests:
            self._check_token(headers.get("authorization", ""))
        elif not self._open_to_all:
            _check_local(scope, headers)

    def _check_token(self, authorization: str) -> None:
        scheme, _, token = authorization.partition(" ")
        given = _digest(token.strip())
        # Every digest is compared, so that time does not tell which one fits.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise UnauthorizedError(
                "this route needs the control token: send 'Authorization: Bearer <token>'"
            )


def _check_local(scope: Scope, headers: Headers) -> None:
    server = scope.get("server")
    if server is not None and _is_foreign_address(str(server[0])):
        raise UnauthorizedError(
            f"without a control token, control routes are served on loopback only; {_REMEDY}"
        )
    host = headers.get("host", "")
    if not _names_this_machine(host):
        # DNS rebinding: a public name that resolves to 127.0.0.1 is some web page's name.
        raise UnauthorizedError(
            f"the Host header names a public host while no control token is set; {_REMEDY}"
        )
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        raise UnauthorizedError(
            f"a web page of another origin may not use control routes; {_REMEDY}"
        )


def _is_foreign_address(address: str) -> bool:
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False  # a name: the test client's, or a Unix socket's path
    return not is_loopback_host(address)


def _names_this_machine(host: str) -> bool:
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if "." not in name or name.endswith(_PRIVATE_SUFFIXES):
        return True  # a single label cannot be registered either
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True  # an address is not a name: nothing to rebind


def _digest(token: str) -> bytes:
    # Equal length for the comparison, whatever was sent.
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def exposure_notice(settings: Settings) -> tuple[int, str] | None:
    """What to log at start about unprotected control routes: (level, sentence); None: nothing."""
    if settings.control_tokens:
        return None
    if is_loopback_host(settings.control_address):
        return logging.INFO, (
            "no control token is set: control routes are served to this machine only"
        )
    return logging.WARNING, (
        f"INSECURE: everyone who can connect to {settings.control_address} may read and delete "
        "every rollout; set TOKEN_CAPTURE_CONTROL_TOKEN and drop insecure"
    )
