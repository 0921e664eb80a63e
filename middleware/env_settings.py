"""Settings of the capture inside an engine's process: ``TOKEN_CAPTURE_*`` and nothing else.

Engines construct a middleware class without arguments, so the environment is the only way in.
Nothing is ignored silently: unknown names and unusable values are refused, all in one line;
settings that belong to ``token-capture serve`` alone are named in the log. Source: spec 06 A, 08.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from middleware.agent_tokens import AgentTokens, split_keys
from middleware.errors import ConfigurationError

ENV_PREFIX: Final = "TOKEN_CAPTURE_"

PrefixSupplyMode = Literal["off", "auto", "require"]

# Kubernetes injects these for a Service called "token-capture"; they are not ours.
_SERVICE_LINK: Final = re.compile(r"(SERVICE_(HOST|PORT.*)|PORT(_\d+_.*)?)")

# They configure the server that stands beside the engine, or the command line.
_SERVER_ONLY: Final = frozenset(
    {
        "CONFIG",
        "SERVER",
        "UPSTREAM",
        "HOST",
        "PORT",
        "CONTROL_PORT",
        "CONTROL_HOST",
        "WORKERS",
        "ROOT_PATH",
        "BRIDGE",
        "ENGINE",
        "FREEZE_GRACE_S",
        "LOG_LEVEL",
        "LOG_FORMAT",
        "UPSTREAM_API_KEY",
        "UPSTREAM_API_KEY_FILE",
        "INSECURE",
        "MAX_WAIT_S",
    }
)
# Read by the stores themselves.
_STORE_NAMES: Final = frozenset({"CONTROL_TOKEN", "CONTROL_TOKEN_FILE", "SPILL_DIR"})
# They promise agents something that this mode does not do yet; safe values are accepted.
_NOT_HERE: Final = {"REPLAY_RETRIES": ("false", "0", "off", "no")}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How calls are captured inside an engine. ``ignored``: names that mean nothing here."""

    store: str
    prefix_supply: PrefixSupplyMode = "auto"
    drain_on_disconnect: bool = False
    max_body_bytes: int | None = None
    max_decoded_body_bytes: int = 1 << 30
    delta_records: bool = True
    agent_tokens: AgentTokens | None = None  # set: rollout ids in URLs must be signed
    ignored: tuple[str, ...] = ()


def default_store() -> str:
    """The file store that ``token-capture serve`` uses when it is told nothing."""
    base = os.environ.get("XDG_DATA_HOME", "")
    # The XDG specification ignores relative values.
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "share"
    return f"file://{root / 'token-capture'}"


def engine_settings(environment: Mapping[str, str] | None = None) -> EngineSettings:
    """Read the settings.

    Raises:
        ConfigurationError: one line that names every problem and what to do.
    """
    given = os.environ if environment is None else environment
    names = {
        name.removeprefix(ENV_PREFIX): value.strip()
        for name, value in given.items()
        if name.startswith(ENV_PREFIX) and value.strip()
    }
    values: dict[str, Any] = {"store": default_store()}
    ignored: list[str] = []
    problems: list[str] = []
    for name, text in sorted(names.items()):
        if name in _READERS:
            field, read = _READERS[name]
            try:
                values[field] = read(text)
            except ValueError as error:
                problems.append(f"{ENV_PREFIX}{name}: {error}")
        elif name in _SERVER_ONLY or _SERVICE_LINK.fullmatch(name):
            ignored.append(f"{ENV_PREFIX}{name}")
        elif name not in _STORE_NAMES and text.lower() not in _NOT_HERE.get(name, ()):
            problems.append(_unknown(name))
    signs = values.pop("signs", False)
    keys = values.pop("agent_token_keys", ())
    if not problems and signs:
        values["agent_tokens"] = AgentTokens(keys)
    if problems:
        raise ConfigurationError("; ".join(problems))
    return EngineSettings(**values, ignored=tuple(ignored))


def _unknown(name: str) -> str:
    if name in _NOT_HERE:
        return f"{ENV_PREFIX}{name} is not available inside an engine: unset it"
    near = difflib.get_close_matches(name, [*_READERS, *_SERVER_ONLY], 1)
    hint = f" (did you mean {ENV_PREFIX}{near[0]}?)" if near else ""
    return f"{ENV_PREFIX}{name} is no setting{hint}"


def _store(text: str) -> str:
    scheme, separator, rest = text.partition("://")
    scheme = scheme.lower()
    if scheme == "memory" or text.startswith("memory:"):
        raise ValueError(
            "a memory store ends with the engine's process and nobody else can read it; use "
            "file:///absolute/directory"
        )
    if not separator:
        # package.module:Class, or a path
        if not Path(text).is_absolute() and ":" not in text:
            raise ValueError("give a URL like file:///var/lib/token-capture")
        return text
    if scheme == "file" and not rest.startswith("/"):
        raise ValueError("a file store needs an absolute path: file:///var/lib/token-capture")
    if scheme in ("http", "https") and not urlsplit(text).hostname:
        raise ValueError("give a URL like http://127.0.0.1:8900")
    return text


def _one_of(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"{text!r} is not one of {', '.join(allowed)}")
        return text.lower()

    return read


def _agent_tokens(text: str) -> bool:
    return _one_of("off", "signed")(text) == "signed"


def _key_file(text: str) -> tuple[str, ...]:
    try:
        return split_keys(Path(text).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {text}: {error.strerror}") from error


def _on_disconnect(text: str) -> bool:
    return _one_of("cancel", "drain")(text) == "drain"


def _flag(text: str) -> bool:
    word = text.lower()
    if word not in ("true", "1", "yes", "on", "false", "0", "no", "off"):
        raise ValueError(f"{text!r} is neither true nor false")
    return word in ("true", "1", "yes", "on")


def _bytes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is no positive number of bytes")
    return int(text)


_READERS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "STORE": ("store", _store),
    "PREFIX_SUPPLY": ("prefix_supply", _one_of("off", "auto", "require")),
    "ON_DISCONNECT": ("drain_on_disconnect", _on_disconnect),
    "MAX_BODY_BYTES": ("max_body_bytes", _bytes),
    "MAX_DECODED_BODY_BYTES": ("max_decoded_body_bytes", _bytes),
    "DELTA_RECORDS": ("delta_records", _flag),
    "AGENT_TOKENS": ("signs", _agent_tokens),
    "AGENT_TOKEN_KEY": ("agent_token_keys", split_keys),
    "AGENT_TOKEN_KEY_FILE": ("agent_token_keys", _key_file),
}
