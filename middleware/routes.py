"""What a request below a rollout's tag is: the routing table of spec 05 as a pure function."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final
from urllib.parse import unquote_to_bytes

from middleware.dialects import CAPTURED_ROUTES, IN_ENGINE_ROUTES
from middleware.dialects.base import Dialect

CONTROL_NAMES: Final = frozenset(
    {
        "",
        "freeze",
        "snapshot",
        "trajectories",
        "retire",
        "manifest",
        "intents",
        "entries",
        "incomplete",
        "fence",
        "resolve",
    }
)

NON_GENERATING: Final = (
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/score",
    "/v1/tokenize",
    "/v1/detokenize",
    "/tokenize",
    "/detokenize",
    "/rerank",
    "/score",
    "/api/event_logging/*",
    "/v1/event_logging/*",
)
"""POST routes that make no model text; a trailing ``*`` covers everything below."""

_READ_ROUTES: Final = re.compile(r"/v1/models(/.*)?")
_SLASHES: Final = re.compile(rb"/{2,}")


class Kind(Enum):
    """What is done with a request."""

    CAPTURED = auto()
    FORWARD = auto()  # no intent, no entry
    UNOBSERVED = auto()  # may generate, cannot be read: intent, and incomplete unless it failed
    DELETE = auto()  # forwarded while the rollout is open
    HEAD = auto()  # answered by us
    CONTROL = auto()  # not model traffic: left to the control routes
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Route:
    """The decision. ``raw_path`` is what is passed on; ``dialect`` is set when captured."""

    kind: Kind
    raw_path: bytes = b""
    dialect: Dialect | None = None


def classify(
    method: str,
    rest: bytes,
    non_generating: tuple[str, ...] = NON_GENERATING,
    captured: Mapping[str, Dialect] = CAPTURED_ROUTES,
) -> Route:
    """Route a request by what follows ``.../training-token-capture`` (percent-encoded).

    Client base URLs come with and without ``/v1``, with doubled slashes and doubled ``/v1``:
    known routes are recognised in all of these, everything else passes byte for byte.
    """
    if method == "HEAD":
        return Route(Kind.HEAD)
    clean = _SLASHES.sub(b"/", rest).rstrip(b"/")
    segments = [unquote_to_bytes(part).decode("utf-8", "replace") for part in clean.split(b"/")][1:]
    first = segments[0] if segments else ""
    if first in CONTROL_NAMES:
        return Route(Kind.CONTROL, clean)
    plain = "/" + "/".join(segments)
    as_v1 = _as_v1(segments)
    if method == "POST" and as_v1 in captured:
        return Route(Kind.CAPTURED, as_v1.encode(), captured[as_v1])
    if method in ("GET", "OPTIONS") and (_READ_ROUTES.fullmatch(as_v1) or as_v1 in captured):
        return Route(Kind.FORWARD, as_v1.encode())
    if method == "POST" and _matches(plain, non_generating):
        return Route(Kind.FORWARD, rest)
    if first not in ("v1", "api"):
        return Route(Kind.UNKNOWN)
    if method in ("GET", "OPTIONS"):
        return Route(Kind.FORWARD, rest)
    return Route(Kind.DELETE if method == "DELETE" else Kind.UNOBSERVED, rest)


def dialect_of_path(path: str) -> Dialect | None:
    """Whose error shape a refused request gets, before its path is understood."""
    clean = path.rstrip("/")
    return next((d for route, d in IN_ENGINE_ROUTES.items() if clean.endswith(route[3:])), None)


def _as_v1(segments: list[str]) -> str:
    start = 0
    while start < len(segments) and segments[start] == "v1":
        start += 1
    return "/v1/" + "/".join(segments[start:])


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    if {".", ".."} & set(path.split("/")):
        return False  # somebody behind us may resolve them to another route
    return any(
        path.startswith(pattern[:-1]) if pattern.endswith("*") else path == pattern
        for pattern in patterns
    )
