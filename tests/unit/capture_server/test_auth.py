"""The guard in front of the control routes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_server.auth import ControlGuard, exposure_notice
from capture_server.config import load_settings
from capture_server.errors import UnauthorizedError


def scope_with(
    host: str = "127.0.0.1:8900", *, server: str = "127.0.0.1", **headers: str
) -> dict[str, Any]:
    raw = [(b"host", host.encode())]
    raw += [
        (name.replace("_", "-").encode(), value.encode("latin-1"))
        for name, value in headers.items()
    ]
    return {"type": "http", "headers": raw, "server": (server, 8900), "client": ("127.0.0.1", 1)}


def passes(guard: ControlGuard, scope: dict[str, Any]) -> bool:
    try:
        guard.check(scope)
    except UnauthorizedError:
        return False
    return True


def test_each_of_several_tokens_is_accepted() -> None:
    """During a rotation old and new tokens work."""
    guard = ControlGuard(load_settings(control_token="old,new"))

    assert passes(guard, scope_with(authorization="Bearer old"))
    assert passes(guard, scope_with(authorization="bearer  new "))


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "old",
        "Bearer",
        "Bearer ",
        "Bearer ol",
        "Bearer oldx",
        "Basic old",
        "Bearer old,new",
        "Bearer öld",
    ],
)
def test_everything_else_is_refused(authorization: str) -> None:
    """No prefix, no other scheme, no list, no missing header."""
    guard = ControlGuard(load_settings(control_token="old,new"))

    assert not passes(guard, scope_with(authorization=authorization))
    assert not passes(guard, scope_with())


@given(st.text(alphabet=st.characters(codec="latin-1"), max_size=20))
def test_no_guess_passes(token: str) -> None:
    """Whatever a client sends instead of the token, it is refused and nothing breaks."""
    guard = ControlGuard(load_settings(control_token="the-token"))

    assert passes(guard, scope_with(authorization=f"Bearer {token}")) is (
        token.strip() == "the-token"
    )


def test_a_token_is_needed_on_loopback_too_once_it_is_set() -> None:
    """Setting a token protects against other users of the machine."""
    guard = ControlGuard(load_settings(control_token="t"))

    assert not passes(guard, scope_with())


def test_insecure_with_a_token_still_needs_it() -> None:
    """``insecure`` excuses a missing token; it does not switch a set one off."""
    guard = ControlGuard(load_settings(control_token="t", insecure=True))

    assert not passes(guard, scope_with())


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8900",
        "localhost",
        "[::1]:8900",
        "sidecar:8900",
        "testserver",
        "x.local",
        "10.0.0.1",
        "",
    ],
)
def test_without_token_local_callers_pass(host: str) -> None:
    """Loopback, single-label names and addresses cannot be a stranger's web page."""
    assert passes(ControlGuard(load_settings()), scope_with(host))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8900", "127.0.0.1.nip.io", "a.localhost.example", "[::1"]
)
def test_without_token_public_host_names_are_refused(host: str) -> None:
    """A page whose name was re-bound to 127.0.0.1 cannot read tokens."""
    assert not passes(ControlGuard(load_settings()), scope_with(host))


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:9999"])
def test_without_token_other_origins_are_refused(origin: str) -> None:
    """A page of another site cannot freeze or delete by a cross-site request."""
    assert not passes(ControlGuard(load_settings()), scope_with(origin=origin))


def test_without_token_the_own_origin_passes() -> None:
    """Pages that the sidecar itself serves may use it."""
    scope = scope_with(origin="http://127.0.0.1:8900")

    assert passes(ControlGuard(load_settings()), scope)


@pytest.mark.parametrize("server", ["10.0.0.5", "::ffff:10.0.0.5", "fe80::1%eth0"])
def test_without_token_a_connection_from_outside_is_refused(server: str) -> None:
    """Whatever the settings say, the socket that took the connection decides."""
    assert not passes(ControlGuard(load_settings()), scope_with(server=server))


def test_insecure_serves_everyone() -> None:
    """The loud override is complete."""
    guard = ControlGuard(load_settings(host="0.0.0.0", insecure=True))

    assert passes(guard, scope_with("evil.example", server="10.0.0.5", origin="null"))


def test_tokens_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the right nor the wrong token appears in a log record or an error."""
    guard = ControlGuard(load_settings(control_token="right-secret"))

    with caplog.at_level(logging.DEBUG), pytest.raises(UnauthorizedError) as caught:
        guard.check(scope_with(authorization="Bearer wrong-secret"))

    text = caplog.text + str(caught.value) + repr(guard.__dict__)
    assert "wrong-secret" not in text
    assert "right-secret" not in text


def test_unprotected_control_routes_are_said_at_start() -> None:
    """Quietly on loopback, loudly elsewhere, not at all behind a token."""
    assert exposure_notice(load_settings(control_token="t", host="0.0.0.0")) is None
    level, text = exposure_notice(load_settings()) or (0, "")
    assert (level, "this machine only" in text) == (logging.INFO, True)
    level, text = exposure_notice(load_settings(host="0.0.0.0", insecure=True)) or (0, "")
    assert (level, "INSECURE" in text) == (logging.WARNING, True)
