"""The tagged URL: its grammar in one place, and the one validator of ids.

``/ng-rollout/<rollout id>/training-token-capture/v1/...``. Pure functions on strings and bytes;
what is done with a route is decided in ``middleware.asgi``. With ``AgentTokens`` the id of an
agent's URL is signed; everywhere behind this module it is the plain id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

from middleware.agent_tokens import SEPARATOR, AgentTokens
from middleware.errors import InvalidIdError

ROLLOUT_SEGMENT: Final = "ng-rollout"
CAPTURE_SEGMENT: Final = "training-token-capture"
MAX_ID_LENGTH: Final = 200

# fullmatch, not "$": the latter would allow a trailing newline.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def validate_rollout_id(rollout_id: str) -> str:
    """Return the id unchanged, or refuse it before it can touch a path or a query.

    Raises:
        InvalidIdError: not 1-200 ASCII letters, digits, ``.``, ``_``, ``-`` starting with a
            letter or digit. Source: spec 03, "Ids".
    """
    return _validated(rollout_id, "rollout id", "invalid_rollout_id")


def validate_call_id(model_call_id: str) -> str:
    """The same rule for model call ids.

    Raises:
        InvalidIdError: with code ``invalid_call_id``.
    """
    return _validated(model_call_id, "model call id", "invalid_call_id")


def _validated(value: object, what: str, code: str) -> str:
    # Callers outside the type checker's reach may hand over anything.
    if isinstance(value, str) and _ID.fullmatch(value) is not None:
        return value
    text = value if isinstance(value, str) else repr(value)
    shown = repr(text if len(text) <= 64 else text[:64] + "...")
    raise InvalidIdError(
        f"{shown} is no valid {what}: use 1-{MAX_ID_LENGTH} ASCII letters, digits, '.', '_' "
        "or '-', starting with a letter or digit",
        code=code,
    )


@dataclass(frozen=True, slots=True)
class TaggedPath:
    """A request path under ``/ng-rollout/<id>``, split at its borders.

    ``prefix`` is what stands before ``/ng-rollout`` (a gateway's mount path, usually empty);
    ``rest`` is what follows the tag, percent-encoding untouched: ``""`` or starting with ``/``
    (or ``:`` never; batch routes are not tagged). ``captured`` says whether the
    ``training-token-capture`` segment is present; ``signed`` whether the id carried a signature
    (it was right then).
    """

    prefix: bytes
    rollout_id: str
    captured: bool
    rest: bytes
    signed: bool = False


def parse_tagged_path(
    raw_path: bytes, root_path: bytes = b"", agent_tokens: AgentTokens | None = None
) -> TaggedPath | None:
    """Split a raw (still percent-encoded) path, or None if it is not tagged.

    The path may or may not repeat ``root_path`` in front (servers differ); both are understood.
    With ``agent_tokens`` the id may carry a signature; without, that is an invalid id.

    Raises:
        InvalidIdError: the path is tagged but its rollout id (after one percent-decoding) breaks
            the id rule.
        UnauthorizedError: the id's signature is wrong.
    """
    head = b""
    if root_path and raw_path.startswith(root_path.rstrip(b"/") + b"/"):
        head = root_path.rstrip(b"/")
    segments = raw_path[len(head) :].lstrip(b"/").split(b"/")
    if unquote_to_bytes(segments[0]) != ROLLOUT_SEGMENT.encode() or segments[1:] in ([], [b""]):
        return None
    # An empty id is invalid, not a slash too many: the next segment would become the id.
    rest = segments[1:]
    try:
        rollout_id = unquote_to_bytes(rest[0]).decode("ascii")
    except UnicodeDecodeError:
        rollout_id = unquote_to_bytes(rest[0]).decode("utf-8", "replace")
    signed = agent_tokens is not None and SEPARATOR in rollout_id
    if agent_tokens is not None and signed:
        rollout_id, _, signature = rollout_id.partition(SEPARATOR)
        agent_tokens.verify(validate_rollout_id(rollout_id), signature)
    validate_rollout_id(rollout_id)
    tail = rest[1:]
    # Doubled slashes after the id are tolerated: clients join base URLs carelessly.
    while len(tail) > 1 and tail[0] == b"":
        tail = tail[1:]
    captured = bool(tail) and unquote_to_bytes(tail[0]) == CAPTURE_SEGMENT.encode()
    if captured:
        tail = tail[1:]
    return TaggedPath(
        prefix=head,
        rollout_id=rollout_id,
        captured=captured,
        rest=b"/" + b"/".join(tail) if tail else b"",
        signed=signed,
    )


def capture_base_url(
    server_url: str, rollout_id: str, agent_tokens: AgentTokens | None = None
) -> str:
    """The OpenAI-style base URL (ending in ``/v1``) that an agent is given.

    Raises:
        InvalidIdError: the id is not valid.
    """
    validate_rollout_id(rollout_id)
    segment = rollout_id if agent_tokens is None else agent_tokens.sign(rollout_id)
    return f"{server_url.rstrip('/')}/{ROLLOUT_SEGMENT}/{segment}/{CAPTURE_SEGMENT}/v1"


def control_url(server_url: str, rollout_id: str) -> str:
    """``R``: the root of one rollout's routes.

    Raises:
        InvalidIdError: the id is not valid.
    """
    validate_rollout_id(rollout_id)
    return f"{server_url.rstrip('/')}/{ROLLOUT_SEGMENT}/{rollout_id}/{CAPTURE_SEGMENT}"
