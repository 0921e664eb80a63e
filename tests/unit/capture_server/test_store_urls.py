"""capture_server.store_urls: no password is printed, none is taken from the command line."""

from __future__ import annotations

import pytest

from capture_server.store_urls import refuse_password_argument, shown_url
from middleware.errors import ConfigurationError


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:SECRET@h/d",
        "postgresql://u:SEC/RET@h/d",
        "postgresql://u:SEC#RET?@h/d",
        "postgresql://u:SEC@RET@h/d",
        "postgresql://u@h/d?sslmode=require&password=SECRET",
        "redis://:SECRET@h",
    ],
)
def test_passwords_are_neither_shown_nor_taken_as_arguments(url: str) -> None:
    """Also with special characters that should have been percent-encoded."""
    assert "SEC" not in shown_url(url)
    assert "RET" not in shown_url(url)
    with pytest.raises(ConfigurationError, match="TOKEN_CAPTURE_STORE") as caught:
        refuse_password_argument(url)
    assert "SEC" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["file:///a:b", "memory:", "postgresql://u@h:5/d", "mod.x:Class", "/p"]
)
def test_other_urls_pass_as_they_are(url: str) -> None:
    """Ports, paths and class names are no passwords."""
    assert shown_url(url) == url
    assert refuse_password_argument(url) == url
