"""Settings of the capture inside an engine, from the environment alone."""

from __future__ import annotations

import pytest

from middleware.env_settings import engine_settings
from middleware.errors import ConfigurationError


def test_everything_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """One flag mounts the middleware: the store is where ``token-capture serve`` looks for it."""
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    settings = engine_settings({"PATH": "/bin"})
    assert settings.store == "file:///data/token-capture"
    assert settings.prefix_supply == "auto"
    assert settings.delta_records is True
    assert settings.drain_on_disconnect is False
    assert settings.ignored == ()


def test_every_setting_is_read() -> None:
    """Names as those of the sidecar; empty values count as absent."""
    settings = engine_settings(
        {
            "TOKEN_CAPTURE_STORE": "file:///s",
            "TOKEN_CAPTURE_PREFIX_SUPPLY": "Require",
            "TOKEN_CAPTURE_ON_DISCONNECT": "drain",
            "TOKEN_CAPTURE_MAX_BODY_BYTES": "10",
            "TOKEN_CAPTURE_MAX_DECODED_BODY_BYTES": "20",
            "TOKEN_CAPTURE_DELTA_RECORDS": "false",
            "TOKEN_CAPTURE_AGENT_TOKENS": "off",
            "TOKEN_CAPTURE_CONTROL_TOKEN": "secret",
            "TOKEN_CAPTURE_HOST": "0.0.0.0",
            "TOKEN_CAPTURE_SERVICE_PORT_HTTP": "1",
            "TOKEN_CAPTURE_UPSTREAM": "",
        }
    )
    assert settings.store == "file:///s"
    assert settings.prefix_supply == "require"
    assert settings.drain_on_disconnect is True
    assert (settings.max_body_bytes, settings.max_decoded_body_bytes) == (10, 20)
    assert settings.delta_records is False
    assert settings.ignored == ("TOKEN_CAPTURE_HOST", "TOKEN_CAPTURE_SERVICE_PORT_HTTP")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PREFIX_SUPLY", "auto", "did you mean TOKEN_CAPTURE_PREFIX_SUPPLY"),
        ("PREFIX_SUPPLY", "always", "'always' is not one of off, auto, require"),
        ("ON_DISCONNECT", "wait", "not one of cancel, drain"),
        ("MAX_BODY_BYTES", "-1", "no positive number"),
        ("DELTA_RECORDS", "maybe", "neither true nor false"),
        ("STORE", "memory:", "a memory store ends with the engine's process"),
        ("STORE", "file://relative", "absolute path"),
        ("STORE", "relative", "file:///var/lib/token-capture"),
        ("STORE", "http://", "http://127.0.0.1:8900"),
        ("AGENT_TOKENS", "signed", "need a key"),
    ],
)
def test_what_cannot_be_honoured_is_refused(name: str, value: str, says: str) -> None:
    """One clear line, with what to do."""
    with pytest.raises(ConfigurationError) as refused:
        engine_settings({f"TOKEN_CAPTURE_{name}": value})
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_all_problems_are_named_at_once() -> None:
    """Nobody starts a large model twice to learn of the second mistake."""
    with pytest.raises(ConfigurationError) as refused:
        engine_settings({"TOKEN_CAPTURE_STORE": "memory:", "TOKEN_CAPTURE_WHAT": "x"})
    assert "TOKEN_CAPTURE_STORE" in str(refused.value)
    assert "TOKEN_CAPTURE_WHAT" in str(refused.value)
