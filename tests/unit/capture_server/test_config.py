"""Settings: precedence, refusals, secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_server.config import (
    RELEASED_VALUES,
    Settings,
    is_loopback_host,
    load_settings,
)
from middleware.errors import ConfigurationError


def write_toml(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(**arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(**arguments)
    return str(caught.value)


def test_defaults_bind_loopback_and_need_no_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any configuration the sidecar is private and keeps its records in the home."""
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")

    settings = load_settings()

    assert (settings.host, settings.port, settings.upstream) == ("127.0.0.1", 8900, None)
    assert settings.store == "file:///home/someone/.local/share/token-capture"
    assert settings.freeze_grace_s == 3.0
    assert settings.control_is_open


def test_default_store_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_DATA_HOME moves the default store."""
    monkeypatch.setenv("XDG_DATA_HOME", "/data")

    assert load_settings().store == "file:///data/token-capture"


def test_relative_xdg_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative XDG_DATA_HOME is invalid and does not make the store depend on the cwd."""
    monkeypatch.setenv("XDG_DATA_HOME", "data")
    monkeypatch.setenv("HOME", "/home/someone")

    assert load_settings().store.startswith("file:///home/someone/")


def test_file_store_expands_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """``file://~/x`` means the user's home."""
    monkeypatch.setenv("HOME", "/home/someone")

    assert load_settings(store="file://~/tc").store == "file:///home/someone/tc"


def test_relative_file_store_is_refused() -> None:
    """A relative path would put records wherever the server happened to start."""
    assert "absolute path" in problems_of(store="file://data")


def test_precedence_is_file_then_environment_then_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer overrides the one before and leaves the rest alone."""
    file = write_toml(
        tmp_path / "sidecar.toml", 'port = 1\nhost = "localhost"\nlog_level = "debug"\n'
    )
    monkeypatch.setenv("TOKEN_CAPTURE_PORT", "2")
    monkeypatch.setenv("TOKEN_CAPTURE_HOST", "::1")

    settings = load_settings(config=file, port=3)

    assert (settings.port, settings.host, settings.log_level) == (3, "::1", "debug")


def test_the_environment_can_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TOKEN_CAPTURE_CONFIG stands for --config."""
    file = write_toml(tmp_path / "sidecar.toml", "port = 77\n")
    monkeypatch.setenv("TOKEN_CAPTURE_CONFIG", str(file))

    assert load_settings().port == 77


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files pass ``${UPSTREAM:-}``; that is no upstream."""
    monkeypatch.setenv("TOKEN_CAPTURE_UPSTREAM", "")
    monkeypatch.setenv("TOKEN_CAPTURE_CONTROL_TOKEN", "")

    settings = load_settings()

    assert settings.upstream is None
    assert settings.control_is_open


def test_unknown_variable_is_refused_with_the_closest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error in a variable does not silently leave the default in force."""
    monkeypatch.setenv("TOKEN_CAPTURE_UPSTREM", "http://engine:8000")

    message = problems_of()

    assert "unknown environment variable TOKEN_CAPTURE_UPSTREM" in message
    assert "TOKEN_CAPTURE_UPSTREAM" in message


def test_unknown_key_in_the_file_is_refused_with_the_closest_name(tmp_path: Path) -> None:
    """The same for the file."""
    file = write_toml(tmp_path / "sidecar.toml", 'up-stream = "http://engine:8000"\n')

    message = problems_of(config=file)

    assert "unknown setting up-stream" in message
    assert "closest known name is upstream" in message


def test_every_problem_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One start shows all that has to be fixed, from all layers."""
    file = write_toml(tmp_path / "sidecar.toml", 'colour = "red"\nroot_path = "gw"\n')
    monkeypatch.setenv("TOKEN_CAPTURE_PORT", "none")
    monkeypatch.setenv("TOKEN_CAPTURE_SECRET", "x")

    message = problems_of(config=file, host="0.0.0.0", workers=0, upstream="engine:8000")

    for part in (
        "colour",
        "root_path",
        "port",
        "TOKEN_CAPTURE_SECRET",
        "0.0.0.0",
        "workers",
        "upstream",
    ):
        assert part in message


@pytest.mark.parametrize(
    "name",
    [
        "TOKEN_CAPTURE_SERVICE_HOST",
        "TOKEN_CAPTURE_SERVICE_PORT",
        "TOKEN_CAPTURE_SERVICE_PORT_HTTP",
        "TOKEN_CAPTURE_PORT_8900_TCP",
        "TOKEN_CAPTURE_PORT_8900_TCP_ADDR",
        "TOKEN_CAPTURE_PORT",
        "TOKEN_CAPTURE_SERVER",
    ],
)
def test_variables_that_are_not_settings_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes' service links and the client's own variable do not stop the server."""
    monkeypatch.setenv(name, "tcp://10.0.0.7:8900")

    assert load_settings().port == 8900


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bridge", "always"),
        ("engine", "sglang"),
        ("max_wait_s", 1.0),
        ("prefix_supply", "require"),
    ],
)
def test_settings_that_this_release_cannot_honour_are_refused(name: str, value: Any) -> None:
    """What would be ignored is refused, and the message says what works."""
    message = problems_of(**{name: value})

    assert f"{name}: {value!r} is not in this release; use " in message


@pytest.mark.parametrize("key", ["", "short", "x" * 31, "ü" * 40, f"{'x' * 40},short"])
def test_signed_urls_need_a_strong_key(key: str) -> None:
    """A missing, short or odd key is refused at the start, and never shown."""
    message = problems_of(agent_tokens="signed", agent_token_key=key)

    assert "agent_token_key" in message.lower()
    assert not key or key not in message


def test_keys_come_from_a_file_and_are_hidden(tmp_path: Path) -> None:
    """Rotation: several keys in one file; what is shown holds none of them."""
    file = tmp_path / "keys"
    file.write_text(f"{'n' * 40}\n{'o' * 40}\n")

    settings = load_settings(agent_tokens="signed", agent_token_key_file=file)

    assert settings.agent_token_keys == ("n" * 40, "o" * 40)
    shown = str(settings.effective()) + repr(settings)
    assert "nnn" not in shown
    assert "ooo" not in shown


def test_a_control_port_must_be_another_one() -> None:
    """Two listeners cannot share a port, and an address without a port means nothing."""
    assert "must differ" in problems_of(port=8900, control_port=8900)
    assert "control_port" in problems_of(control_host="127.0.0.1")


def test_a_control_host_of_its_own_keeps_control_private() -> None:
    """Agents may come from anywhere while control stays on this machine."""
    settings = load_settings(host="0.0.0.0", control_port=8901, control_host="127.0.0.1")

    assert settings.control_address == "127.0.0.1"
    assert "without a control token" in problems_of(host="0.0.0.0", control_port=8901)
    assert "without a control token" in problems_of(control_port=8901, control_host="0.0.0.0")


def test_the_release_limits_name_existing_settings() -> None:
    """The one table of limits cannot drift from the settings."""
    assert set(RELEASED_VALUES) <= set(Settings.model_fields)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "sidecar.example.org"])
def test_binding_elsewhere_needs_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control routes are never opened to the network by accident."""
    assert "without a control token" in problems_of(host=host)

    monkeypatch.setenv("TOKEN_CAPTURE_CONTROL_TOKEN", "t0ken")
    assert not load_settings(host=host).control_is_open


def test_insecure_overrides_the_refusal() -> None:
    """An operator may accept the risk, in so many words."""
    settings = load_settings(host="0.0.0.0", insecure=True)

    assert settings.control_is_open


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("LOCALHOST.", True),
        ("a.localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("localhost.example.org", False),
        ("notlocalhost", False),
        ("", False),
    ],
)
def test_loopback_hosts(host: str, expected: bool) -> None:
    """Only names and addresses that cannot leave the machine count."""
    assert is_loopback_host(host) is expected


def test_several_tokens_stand_for_a_rotation(tmp_path: Path) -> None:
    """Commas and lines separate tokens; each is accepted, duplicates once."""
    file = tmp_path / "tokens"
    file.write_text("new-token\nold-token\n\nnew-token\n", encoding="utf-8")

    assert load_settings(control_token_file=file).control_tokens == ("new-token", "old-token")
    assert load_settings(control_token="a, b").control_tokens == ("a", "b")


def test_secrets_come_from_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mounted secrets need no environment variable with their content."""
    file = tmp_path / "key"
    file.write_text("sk-engine\n", encoding="utf-8")
    monkeypatch.setenv("TOKEN_CAPTURE_UPSTREAM_API_KEY_FILE", str(file))

    assert load_settings().engine_api_key == "sk-engine"


def test_a_secret_given_twice_is_refused(tmp_path: Path) -> None:
    """Which of the two counts would be a guess."""
    file = tmp_path / "token"
    file.write_text("a", encoding="utf-8")

    assert "keep one of the two" in problems_of(control_token="b", control_token_file=file)


@pytest.mark.parametrize("content", [b"", b" \n", "tökén".encode(), b"\xff\xfe"])
def test_unusable_token_files_are_refused(content: bytes, tmp_path: Path) -> None:
    """An empty or unreadable secret would mean no protection, or no access."""
    file = tmp_path / "token"
    file.write_bytes(content)

    assert "control_token_file" in problems_of(control_token_file=file, host="0.0.0.0")


def test_a_missing_token_file_is_refused(tmp_path: Path) -> None:
    """A secret that was not mounted stops the start."""
    assert "cannot read" in problems_of(control_token_file=tmp_path / "absent")


def test_secrets_show_nowhere(tmp_path: Path) -> None:
    """Neither the printed settings, nor the repr, nor an error quotes a secret."""
    settings = load_settings(
        control_token="sesame-1",
        upstream_api_key="sesame-2",
        store="postgresql://user:sesame-3@db/tc",
    )
    message = problems_of(control_token="sesame-4 \x01", port=-1)

    shown = f"{settings.effective()} {settings!r} {message}"
    assert "sesame" not in str(settings.effective())
    assert "sesame-1" not in shown
    assert "sesame-2" not in shown
    assert "sesame-4" not in shown
    assert settings.effective()["store"] == "postgresql://user:***@db/tc"


@pytest.mark.parametrize(
    "upstream",
    ["engine:8000", "ftp://engine", "http://", "http://e/?a=1", "http://e/#x", "http://u:p@e/"],
)
def test_unusable_upstreams_are_refused(upstream: str) -> None:
    """What cannot be a base URL is said at start, not at the first call."""
    assert "upstream" in problems_of(upstream=upstream)


def test_upstream_loses_its_trailing_slash() -> None:
    """Paths are appended to it."""
    assert load_settings(upstream="http://e:8000/v1/").upstream == "http://e:8000/v1"


@pytest.mark.parametrize("text", ["port = ", "port = 1\nport = 2", "config = 'other.toml'"])
def test_broken_files_are_refused(text: str, tmp_path: Path) -> None:
    """A file that is no TOML, or points on, is one clear error."""
    file = write_toml(tmp_path / "sidecar.toml", text)

    assert "sidecar.toml" in problems_of(config=file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A --config that is not there is not the same as no --config."""
    assert "cannot read" in problems_of(config=tmp_path / "absent.toml")


def test_settings_are_frozen() -> None:
    """They are built once at the edge; nobody changes them in flight."""
    settings = load_settings()

    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


@given(st.text(min_size=1, max_size=30))
def test_any_unknown_name_is_refused(name: str) -> None:
    """No spelling of an unknown key slips through."""
    if name in Settings.model_fields:
        return
    with pytest.raises(ConfigurationError):
        load_settings(**{name: "x"})
