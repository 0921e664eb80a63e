"""Writes ``docs/reference/`` from the code: settings, command line, HTTP API.

``python -m tests.reference`` writes the pages; ``tests/e2e/test_reference.py`` fails while one is
out of date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined
from typer.main import get_command

from capture_server.app import create_app
from capture_server.cli import app as cli
from capture_server.config import ENV_PREFIX, Settings, load_settings

PLACE = Path(__file__).parents[1] / "docs" / "reference"
_METHODS = ("get", "put", "post", "delete", "head")


def pages() -> dict[str, str]:
    """File name -> content."""
    return {
        "settings.md": "\n".join(_settings()),
        "cli.md": "\n".join(_commands()),
        "http-api.md": "\n".join(_routes()),
    }


def _settings() -> Iterator[str]:
    yield "# Settings"
    yield ""
    yield "Made from the code. Arguments win over the environment, the environment over the file."
    yield "A setting `a_b` is `TOKEN_CAPTURE_A_B` in the environment and `a_b` in the TOML file."
    yield ""
    yield "| setting | environment | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, "", PydanticUndefined) else f"`{field.default}`"
        about = (field.description or "").replace("|", "\\|")
        yield f"| `{name}` | `{ENV_PREFIX}{name.upper()}` | {default} | {about} |"
    yield ""


def _commands() -> Iterator[str]:
    yield "# Command line"
    yield ""
    yield "Made from the code; `token-capture COMMAND --help` says the same."
    for words, command in _command_names(get_command(cli)):
        # Not the help's own layout: that changes with the library that draws it.
        arguments = " ".join(
            p.name.upper() for p in command.params if not p.opts[0].startswith("-")
        )
        yield ""
        yield f"## `token-capture {' '.join(words)}{' ' if arguments else ''}{arguments}`"
        yield ""
        yield " ".join((command.help or "").split())
        options = [p for p in command.params if p.opts[0].startswith("-")]
        if options:
            yield ""
            yield "| option | meaning |"
            yield "|---|---|"
        for option in options:
            names = ", ".join(f"`{name}`" for name in option.opts)
            yield f"| {names} | {' '.join((option.help or '').split())} |"
    yield ""


def _command_names(group: Any, *path: str) -> Iterator[tuple[list[str], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _command_names(command, *path, name)
        else:
            yield [*path, name], command


def _routes() -> Iterator[str]:
    yield "# HTTP API"
    yield ""
    yield "Made from the code; `/openapi.json` of a running sidecar has the bodies and all answers."
    yield "Model traffic is not in it: agents use the engine's own API below a rollout's base URL."
    yield ""
    yield "| request | what it does | answers |"
    yield "|---|---|---|"
    document = create_app(load_settings(store="memory:")).openapi()
    for path, methods in document["paths"].items():
        for method in _METHODS:
            if (route := methods.get(method)) is None:
                continue
            about = " ".join(route.get("description", "").split("\n\n")[0].split())
            codes = ", ".join(code for code in route["responses"] if code.isdecimal())
            yield f"| `{method.upper()} {path}` | {about} | {codes} |".replace("||", "| |")
    yield ""


if __name__ == "__main__":
    PLACE.mkdir(parents=True, exist_ok=True)
    for name, content in pages().items():
        (PLACE / name).write_text(content, encoding="utf-8")
