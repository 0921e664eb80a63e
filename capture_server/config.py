"""The sidecar's settings: one frozen object, built once at the edge and passed in.

Precedence: TOML file < environment ``TOKEN_CAPTURE_*`` < arguments (the CLI's flags). Nothing is
ignored silently: unknown names, settings that this release cannot honour and unsafe combinations
are refused, all problems in one message. Secrets are never printed. This module opens no store
and binds no port. Source: spec 08 "Configuration", spec 05 "Who may do what".
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, SecretStr, ValidationError, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from capture_server.seed_config import (
    TOKEN_ID_CAPTURE_BLOCK,
    NonGeneratingRequest,
    TokenIdCaptureConfig,
    TokenIdCaptureSettings,
    token_id_capture_config,
    token_id_capture_enabled_for_agent,
)
from capture_server.store_urls import shown_url
from middleware.agent_tokens import split_keys
from middleware.errors import ConfigurationError

__all__ = [
    "TOKEN_ID_CAPTURE_BLOCK",
    "NonGeneratingRequest",
    "Settings",
    "TokenIdCaptureConfig",
    "TokenIdCaptureSettings",
    "is_loopback_host",
    "load_settings",
    "token_id_capture_config",
    "token_id_capture_enabled_for_agent",
]

ENV_PREFIX: Final = "TOKEN_CAPTURE_"

# Read by other parts of the product (the CLI's client side, this module's file argument).
_OTHER_ENV: Final = frozenset({"TOKEN_CAPTURE_SERVER", "TOKEN_CAPTURE_CONFIG"})

# Kubernetes injects these for a Service called "token-capture"; they are not ours.
_SERVICE_LINK: Final = re.compile(r"TOKEN_CAPTURE_(SERVICE_(HOST|PORT.*)|PORT_\d+_.*)")

#: What this release can honour of settings whose full range comes later. To lift a limit, delete
#: or widen its row; the setting's type already holds the full range.
RELEASED_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "bridge": ("auto", "never"),
    "engine": ("auto", "vllm", "openai", "nemo_rl"),
    "max_wait_s": (60.0,),
    "prefix_supply": ("off",),
    "replay_retries": (False,),
}


def is_loopback_host(host: str) -> bool:
    """Whether binding to (or connecting from) ``host`` stays on this machine."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _default_store() -> str:
    base = os.environ.get("XDG_DATA_HOME", "")
    # The XDG specification ignores relative values.
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "share"
    return f"file://{root / 'token-capture'}"


class Settings(BaseSettings):
    """Every setting of the sidecar. Unknown names and unsafe combinations are refused."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        env_ignore_empty=True,
        hide_input_in_errors=True,
        validate_default=True,
    )

    config: Path | None = Field(None, description="TOML file with settings of these names")
    upstream: str | None = Field(
        None, description="base URL of the engine; without it only control routes are served"
    )
    store: str = Field(default_factory=_default_store, description="store URL")
    spill_dir: Path | None = Field(
        None, description="local directory for what cannot reach the store; not on its disk"
    )
    host: str = Field("127.0.0.1", min_length=1, description="address to bind")
    port: int = Field(8900, ge=0, le=65535, description="port to bind; 0 takes a free one")
    control_port: int | None = Field(
        None, ge=0, le=65535, description="serve control routes on a port of their own"
    )
    control_host: str | None = Field(
        None, min_length=1, description="address of control_port; unset: that of host"
    )
    workers: int = Field(1, ge=1, le=1024, description="server processes")
    root_path: str = Field("", description="path prefix under which a gateway serves us")
    on_disconnect: Literal["cancel", "drain"] = Field(
        "cancel", description="what happens to the engine's request when the agent leaves"
    )
    prefix_supply: Literal["off", "auto", "require"] = Field(
        "off", description="give the engine the parent's exact tokens"
    )
    bridge: Literal["auto", "always", "never"] = Field(
        "auto", description="serve responses and messages over the engine's chat route"
    )
    external_staging: Literal["off", "vllm_worker", "megatron_worker"] = Field(
        "off", description="tokens stay with the framework's workers of this kind; we keep a ledger"
    )
    engine: Literal["auto", "vllm", "openai", "sglang", "llama_cpp", "nemo_rl"] = Field(
        "auto", description="how the engine is asked for token ids"
    )
    max_body_bytes: int | None = Field(
        None, ge=1, description="largest request body as sent; unset: unlimited"
    )
    max_decoded_body_bytes: int = Field(
        1 << 30, ge=1, description="largest request body after decompression"
    )
    freeze_grace_s: float = Field(
        3.0, ge=0, le=3600, description="how long a freeze waits for running calls"
    )
    max_wait_s: float = Field(
        60.0, ge=0, le=3600, description="how long a call waits while the rollouts are paused"
    )
    delta_records: bool = Field(True, description="store prompts as suffixes of their parents")
    replay_retries: bool = Field(
        False, description="answer a marked retry with the attempt that it repeats"
    )
    agent_tokens: Literal["off", "signed"] = Field(
        "off", description="require a signature in the rollout id of an agent's URL"
    )
    agent_token_key: SecretStr | None = Field(
        None, description="key of the signatures; several: the first signs, each is accepted"
    )
    agent_token_key_file: Path | None = Field(None, description="file holding agent_token_key")
    traces: Literal["off", "otlp"] = Field(
        "off", description="send a span per captured call to an OpenTelemetry collector"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="what is logged, from this level up"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="lines for humans, or JSON objects"
    )
    control_token: SecretStr | None = Field(
        None, description="bearer token of the control routes; several: comma or line separated"
    )
    control_token_file: Path | None = Field(None, description="file holding control_token")
    upstream_api_key: SecretStr | None = Field(
        None, description="replaces the agent's own Authorization towards the engine"
    )
    upstream_api_key_file: Path | None = Field(None, description="file holding upstream_api_key")
    # Declared last: its validator sees every field that the combination is judged by.
    insecure: bool = Field(False, description="serve control routes to anyone who can connect")

    _agent_keys: tuple[str, ...] = PrivateAttr(())
    _control_tokens: tuple[str, ...] = PrivateAttr(())
    _upstream_key: str | None = PrivateAttr(None)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the environment, then the TOML file that one of them names."""
        given = init_settings().get("config") or os.environ.get(ENV_PREFIX + "CONFIG")
        from_file = _read_toml(Path(str(given))) if given else {}
        return (
            init_settings,
            _StrictEnvironment(settings_cls),
            InitSettingsSource(settings_cls, from_file),
        )

    @field_validator(*RELEASED_VALUES)
    @classmethod
    def _released(cls, value: Any, info: Any) -> Any:
        allowed = RELEASED_VALUES[info.field_name]
        if value not in allowed:
            raise _problem(
                f"{value!r} is not in this release; "
                f"use {' or '.join('nothing' if v is None else repr(v) for v in allowed)}"
            )
        return value

    @field_validator("upstream")
    @classmethod
    def _upstream(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _problem("give a URL like http://127.0.0.1:8000")
        if parts.query or parts.fragment:
            raise _problem("an engine's base URL has no query and no fragment")
        if parts.username or parts.password:
            raise _problem("put credentials into upstream_api_key, not into the URL")
        return value.rstrip("/")

    @field_validator("store")
    @classmethod
    def _store(cls, value: str) -> str:
        scheme, sep, rest = value.partition("://")
        if scheme == "file" and sep:
            path = Path(rest).expanduser()
            if not path.is_absolute():
                raise _problem("a file store needs an absolute path: file:///var/lib/token-capture")
            return f"file://{path}"
        return value

    @field_validator("root_path")
    @classmethod
    def _root_path(cls, value: str) -> str:
        if value and not value.startswith("/"):
            raise _problem("a root path starts with '/'")
        return value.rstrip("/")

    @field_validator("control_token_file", "upstream_api_key_file", "agent_token_key_file")
    @classmethod
    def _secret_file(cls, value: Path | None, info: Any) -> Path | None:
        if value is None:
            return None
        name = info.field_name.removesuffix("_file")
        if info.data.get(name) is not None:
            raise _problem(f"{name} is set too; keep one of the two")
        secret = _read_secret(value)
        if not secret:
            raise _problem(f"{value} is empty")
        if name == "control_token":
            _split_tokens(secret)
        if name == "agent_token_key":
            _split_keys(secret)
        return value

    @field_validator("insecure")
    @classmethod
    def _exposure(cls, value: bool, info: Any) -> bool:
        data = info.data
        token_fields = ("control_token", "control_token_file")
        # A token field that failed its own check is missing here: its error says enough.
        judged = "host" in data and all(name in data for name in token_fields)
        if value or not judged or any(data[name] for name in token_fields):
            return value
        control_host = data.get("control_host") or data["host"]
        if data.get("control_port") is None:
            control_host = data["host"]
        if not is_loopback_host(control_host):
            raise _problem(
                f"binding {control_host} without a control token would open every rollout to the "
                "network: set TOKEN_CAPTURE_CONTROL_TOKEN (or _FILE), bind 127.0.0.1, or accept "
                "the risk with insecure"
            )
        return value

    @field_validator("agent_token_key")
    @classmethod
    def _keys_usable(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            _split_keys(value.get_secret_value())
        return value

    @field_validator("control_host")
    @classmethod
    def _control_host(cls, value: str | None, info: Any) -> str | None:
        port = info.data.get("control_port")
        if value is not None and "control_port" in info.data and port is None:
            raise _problem("control routes have no port of their own: set control_port too")
        return value

    @field_validator("insecure")
    @classmethod
    def _consistent(cls, value: bool, info: Any) -> bool:
        data = info.data
        key_fields = ("agent_token_key", "agent_token_key_file")
        judged = all(name in data for name in key_fields)
        has_key = any(data.get(name) for name in key_fields)
        if data.get("agent_tokens") == "signed" and judged and not has_key:
            raise _problem(
                "agent_tokens=signed needs a key: set TOKEN_CAPTURE_AGENT_TOKEN_KEY (or _FILE)"
            )
        if data.get("control_port") and data["control_port"] == data.get("port"):
            raise _problem("control_port and port must differ")
        return value

    @field_validator("control_token")
    @classmethod
    def _tokens_usable(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            _split_tokens(value.get_secret_value())
        return value

    def model_post_init(self, context: Any, /) -> None:
        """Read the secret files once; later changes need a restart."""
        self._control_tokens = _split_tokens(
            _secret(self.control_token, self.control_token_file) or ""
        )
        self._agent_keys = _split_keys(
            _secret(self.agent_token_key, self.agent_token_key_file) or ""
        )
        self._upstream_key = _secret(self.upstream_api_key, self.upstream_api_key_file)

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """The accepted control tokens, from the variable or the file; empty: none set."""
        return self._control_tokens

    @property
    def agent_token_keys(self) -> tuple[str, ...]:
        """The keys of agents' URLs, from the variable or the file; empty: none set."""
        return self._agent_keys

    @property
    def control_address(self) -> str:
        """The address on which control routes are served."""
        return (self.control_host or self.host) if self.control_port is not None else self.host

    @property
    def engine_api_key(self) -> str | None:
        """The key for the engine, from the variable or the file."""
        return self._upstream_key

    @property
    def control_is_open(self) -> bool:
        """Whether control routes are served without a token (loopback, or ``insecure``)."""
        return not self._control_tokens

    def effective(self) -> dict[str, Any]:
        """The settings as JSON values, secrets and URL passwords hidden."""
        shown = self.model_dump(mode="json")
        shown["store"] = shown_url(self.store)
        return shown


class _StrictEnvironment(EnvSettingsSource):
    """The environment, handing on unknown ``TOKEN_CAPTURE_*`` names so that they are refused."""

    def __call__(self) -> dict[str, Any]:
        values = super().__call__()
        if str(values.get("port", "")).startswith("tcp://"):
            del values["port"]  # a Kubernetes service link, see _SERVICE_LINK
        known = {ENV_PREFIX + name.upper() for name in self.settings_cls.model_fields}
        for name in os.environ:
            upper = name.upper()
            if not upper.startswith(ENV_PREFIX) or upper in known or upper in _OTHER_ENV:
                continue
            if _SERVICE_LINK.fullmatch(upper) is None:
                values[name] = os.environ[name]
        return values


def load_settings(**arguments: Any) -> Settings:
    """Build the settings from file, environment and arguments (``None`` = not given).

    Raises:
        ConfigurationError: with one line per problem.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as exc:
        problems = [_describe(dict(error)) for error in exc.errors()]
        raise ConfigurationError("; ".join(problems)) from exc


def _describe(error: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        message = str(error["msg"]).removeprefix("Value error, ")
        return f"{name}: {message}"
    if name.upper().startswith(ENV_PREFIX):
        what = "unknown environment variable"
        candidates = [ENV_PREFIX + field.upper() for field in Settings.model_fields]
        close = difflib.get_close_matches(name.upper(), candidates, n=1, cutoff=0.0)
    else:
        what = "unknown setting"
        asked = name.lower().replace("-", "_")
        close = difflib.get_close_matches(asked, list(Settings.model_fields), n=1, cutoff=0.0)
    return f"{what} {name}" + (f" (the closest known name is {close[0]})" if close else "")


def _problem(message: str) -> PydanticCustomError:
    # Braces would be read as placeholders of the message template.
    return PydanticCustomError("setting", "{text}", {"text": message})  # type: ignore[arg-type,unused-ignore]


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.expanduser().open("rb") as file:
            values = tomllib.load(file)
    except OSError as exc:
        raise ConfigurationError(f"cannot read the settings file {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"{path} is no valid TOML: {exc}") from exc
    if "config" in values:
        raise ConfigurationError(f"{path}: a settings file cannot name another one (config)")
    return values


def _read_secret(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise _problem(f"cannot read {path}: {reason}") from exc


def _secret(value: SecretStr | None, file: Path | None) -> str | None:
    if value is not None:
        return value.get_secret_value()
    return _read_secret(file) if file is not None else None


def _split_keys(text: str) -> tuple[str, ...]:
    try:
        return split_keys(text)
    except ValueError as exc:
        raise _problem(str(exc)) from exc


def _split_tokens(text: str) -> tuple[str, ...]:
    """Several tokens stand for a rotation: each is accepted."""
    tokens = tuple(dict.fromkeys(re.split(r"[,\s]+", text.strip()))) if text.strip() else ()
    tokens = tuple(token for token in tokens if token)
    if any(re.fullmatch(r"[!-~]+", token) is None for token in tokens):
        raise _problem("a control token is made of visible ASCII characters")
    return tokens
