"""Passwords in store URLs: kept out of what is shown, refused in what every user can read."""

from __future__ import annotations

import re
from typing import Final

from middleware.errors import ConfigurationError

# Greedy up to the last "@": a bare "#", "?" or "/" in a password must not end it early.
_IN_AUTHORITY: Final = re.compile(r"(://[^:/?#@]*:).*@")
_IN_QUERY: Final = re.compile(r"([?&]password=)[^&]*", re.IGNORECASE)


def shown_url(url: str) -> str:
    """The URL as it may be printed."""
    return _IN_QUERY.sub(r"\1***", _IN_AUTHORITY.sub(r"\1***@", url))


def refuse_password_argument(url: str) -> str:
    """Return a URL that came from the command line, unless it holds a password.

    Raises:
        ConfigurationError: says where to put the password instead.
    """
    if shown_url(url) != url:
        raise ConfigurationError(
            "a password in an argument is visible to every user of this machine: set "
            "TOKEN_CAPTURE_STORE to the URL, or PGPASSWORD or PGPASSFILE beside --store"
        )
    return url
