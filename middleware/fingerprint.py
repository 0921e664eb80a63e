"""The two lineage hashes, and a one-pass hasher of a whole request.

``assistant_fingerprint`` finds the calls that may have produced a history,
``conversation_digest`` proves the context they answered. Both are wire contracts
(``FINGERPRINT_VERSION``): another implementation hashes the same bytes. Source: spec 02.3.

Pure functions: nothing is normalised here (``middleware.normalise`` does that before), and
nothing is decided (``middleware.lineage``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from middleware.canonical import (
    canonical_json,
    canonicalize_tool_arguments,
    encode_arguments,
    sized,
    utf8,
)
from middleware.errors import InvalidInputError
from middleware.prompt_shape import SYSTEM_ROLES, prompt_config_digest, system_digest
from middleware.protocols import LineageQuery

Item = dict[str, Any]

__all__ = [
    "FINGERPRINT_VERSION",
    "HashedRequest",
    "assistant_fingerprint",
    "canonicalize_tool_arguments",
    "conversation_digest",
    "is_model_authored",
    "prompt_config_digest",
    "system_digest",
]

FINGERPRINT_VERSION: Final = 3

_FINGERPRINT_DOMAIN: Final = b"nemo-gym-lineage"
_CONTEXT_DOMAIN: Final = b"nemo-gym-lineage-context"

# Tuples, not sets: what is looked up may be any JSON value, hashable or not.
TEXT_BLOCKS: Final = ("", "text", "input_text", "output_text")


class _Call(NamedTuple):
    """One tool call; each field with its length in front."""

    id: bytes
    name: bytes
    arguments: bytes


# --- what one item says ----------------------------------------------------------------------


def is_model_authored(item: Mapping[str, Any]) -> bool:
    """Whether the model wrote this item (role ``assistant``, or a call of whatever type).

    What says that it is the system's or the developer's is not, of whatever type.
    """
    role = item.get("role")
    if role == "assistant":
        return True
    kind = item.get("type")
    if kind == "function_call":
        return role not in SYSTEM_ROLES
    return not role and isinstance(kind, str) and kind.endswith("_call")


def _label(value: Any) -> bytes:
    return _NO_SIZE if value is None else sized(utf8(value))


def _objects(items: Any) -> Sequence[Item]:
    if items is None:
        return ()
    if not isinstance(items, (list, tuple)):
        raise InvalidInputError(f"items must be a list, not {type(items).__name__}")
    for at, item in enumerate(items):
        if not isinstance(item, dict):
            raise InvalidInputError(f"item {at} is no object but {type(item).__name__}")
    return items


def _blocks(content: Any, kind: str) -> Iterator[Item]:
    if isinstance(content, list):
        for block in content:
            if isinstance(block, dict) and block.get("type") == kind:
                yield block


def _parts(content: list[Any]) -> list[tuple[bytes, bytes]]:
    """(type, payload) of each content part."""
    return [part for block in content if (part := _part(block)) is not None]


def _part(block: Any) -> tuple[bytes, bytes] | None:
    if isinstance(block, str):
        return (b"text", utf8(block)) if block else None
    if not isinstance(block, dict):
        raise InvalidInputError(f"a content block of type {type(block).__name__} cannot be hashed")
    kind = block.get("type")
    if kind is None:
        kind = ""
    text = block.get("text")
    if kind in TEXT_BLOCKS and isinstance(text, str):
        return (b"text", utf8(text)) if text else None
    if kind in ("tool_use", "tool_result"):
        return None
    if not kind or not isinstance(kind, str):
        raise InvalidInputError("a content block without a type cannot be hashed")
    return utf8(kind), canonical_json(block)


def _calls(item: Item, content: Any) -> list[_Call]:
    calls = []
    if item.get("type") == "function_call":
        name = item.get("name")
        if item.get("namespace"):
            joined = utf8(item["namespace"]) + b"__" + utf8("" if name is None else name)
            name = joined.decode("utf-8")
        calls.append(_call(item.get("call_id") or item.get("id"), name, item.get("arguments")))
    for block in _blocks(content, "tool_use"):
        calls.append(_call(block.get("id"), block.get("name"), block.get("input")))  # noqa: PERF401
    if item.get("tool_calls"):
        calls += map(_chat_call, _objects(item["tool_calls"]))
    return calls


def _call(call_id: Any, name: Any, arguments: Any) -> _Call:
    return _Call(_label(call_id), _label(name), sized(encode_arguments(arguments)))


def _chat_call(call: Item) -> _Call:
    function = call.get("function") or {}
    if not isinstance(function, dict):
        raise InvalidInputError("a tool call's function is no object")
    return _call(call.get("id"), function.get("name"), function.get("arguments"))


def _results(item: Item, content: Any) -> Iterator[tuple[Any, Any]]:
    """(call id, output) of each tool result."""
    if item.get("type") == "function_call_output":
        yield item.get("call_id"), item.get("output")
    if item.get("role") == "tool":
        yield item.get("tool_call_id"), content
    for block in _blocks(content, "tool_result"):
        yield block.get("tool_use_id"), block.get("content")


# --- framing: a tag byte and a length in front of every field ---------------------------------


def _role_field(item: Item) -> bytes:
    role = item.get("role") or item.get("type") or ""
    return b"\x00" + sized(utf8(role))


_NO_SIZE: Final = bytes(8)
_TEXT: Final = sized(b"text")
_TEXT_IN_FINGERPRINT: Final = b"\x00" + _TEXT + b"\x01"
_TEXT_IN_CONTEXT: Final = b"\x01" + _TEXT + b"\x02"
_USUAL_ROLE_FIELDS: Final = {
    role: _role_field({"role": role})
    for role in ("system", "developer", "user", "assistant", "tool")
}


def _framed(item: Item) -> tuple[list[bytes], list[bytes]]:
    """What an item adds to the conversation digest and, if authored, to the fingerprint.

    Both hold the same fields under tags that differ by one, so they are framed side by side.
    This runs for every item of every request: payloads are neither encoded nor copied twice.
    """
    role, content, kind = item.get("role"), item.get("content"), item.get("type")
    usual = type(role) is str and _USUAL_ROLE_FIELDS.get(role)
    if usual and len(item) == 2 and type(content) is str and content and role != "tool":
        text = utf8(content)  # nothing but a role and a text: the commonest item by far
        size = len(text).to_bytes(8, "big")
        return [usual, _TEXT_IN_CONTEXT, size, text], [_TEXT_IN_FINGERPRINT, size, text]
    context, own = [usual or _role_field(item)], list[bytes]()
    text, size = b"", _NO_SIZE
    if type(content) is str:
        if content:
            text = utf8(content)
            size = len(text).to_bytes(8, "big")
            context += (_TEXT_IN_CONTEXT, size, text)
            own += (_TEXT_IN_FINGERPRINT, size, text)
    elif isinstance(content, list):
        for part, payload in _parts(content):
            part_size, payload_size = len(part).to_bytes(8, "big"), len(payload).to_bytes(8, "big")
            context += (b"\x01", part_size, part, b"\x02", payload_size, payload)
            own += (b"\x00", part_size, part, b"\x01", payload_size, payload)
    elif content is not None:
        raise InvalidInputError(f"content of type {type(content).__name__} cannot be hashed")
    if kind is not None or "tool_calls" in item or type(content) is list:
        for call in _calls(item, content):
            context += (b"\x03", call.id, b"\x04", call.name, b"\x05", call.arguments)
            own += (b"\x02", call.id, b"\x03", call.name, b"\x04", call.arguments)
    if type(content) is str and role == "tool" and kind is None:
        context += (b"\x06", _label(item.get("tool_call_id")), b"\x07", size, text)
    elif kind is not None or role == "tool" or type(content) is list:
        for call_id, output in _results(item, content):
            result = utf8(output) if isinstance(output, str) else canonical_json(output)
            context += (b"\x06", _label(call_id), b"\x07", sized(result))
    return context, own


def _context_bytes(item: Item) -> bytes:
    # Of a system item only the role counts; its content may be anything.
    if item.get("role") in SYSTEM_ROLES:
        return _role_field(item)
    return b"".join(_framed(item)[0])


def _own_bytes(item: Item) -> bytes:
    return b"".join(_framed(item)[1])


# --- the hashes ------------------------------------------------------------------------------


def assistant_fingerprint(messages: list[Item] | None) -> str:
    """sha256 hex over the model-authored items, or "" if there is none.

    Raises:
        InvalidInputError: (a ``ValueError``) an item or its content cannot be hashed.
    """
    hasher = hashlib.sha256(_FINGERPRINT_DOMAIN)
    authored = False
    for item in _objects(messages):
        if is_model_authored(item):
            authored = True
            hasher.update(_own_bytes(item))
    return hasher.hexdigest() if authored else ""


def conversation_digest(messages: list[Item] | None) -> str:
    """sha256 hex over every item; of system and developer items only the role.

    Raises:
        InvalidInputError: (a ``ValueError``) an item or its content cannot be hashed.
    """
    hasher = hashlib.sha256(_CONTEXT_DOMAIN)
    for item in _objects(messages):
        hasher.update(_context_bytes(item))
    return hasher.hexdigest()


class HashedRequest:
    """Both hashes of a (normalised) request in one pass, with every prefix digest.

    ``len`` is the number of items. The last run of model-authored items stands at
    ``run_start <= i < run_end`` (both 0 without one): a parent's context ends inside it.
    Only hash states are kept, about 250 bytes per item, no text.

    Raises:
        InvalidInputError: (a ``ValueError``) an item or its content cannot be hashed.
    """

    __slots__ = ("_fingerprint", "_prefixes", "is_root", "run_end", "run_start")

    def __init__(self, items: list[Item] | None) -> None:
        prefix = hashlib.sha256(_CONTEXT_DOMAIN)
        prefixes = [prefix]
        authored_fields = [_FINGERPRINT_DOMAIN]  # hashed in one go: their prefixes matter to nobody
        run_start = run_end = 0
        for at, item in enumerate(_objects(items)):
            prefix = prefix.copy()
            prefixes.append(prefix)
            authored = is_model_authored(item)
            if item.get("role") in SYSTEM_ROLES:  # never model-authored
                prefix.update(_role_field(item))
                continue
            context, own = _framed(item)
            prefix.update(b"".join(context))
            if authored:
                authored_fields += own
                run_start, run_end = (run_start if run_end == at else at), at + 1
        fingerprint = hashlib.sha256(b"".join(authored_fields))
        if not run_end:
            run_start = 0
        self._fingerprint = fingerprint
        self._prefixes = prefixes
        self.run_start, self.run_end = run_start, run_end
        self.is_root = not run_end

    def __len__(self) -> int:
        return len(self._prefixes) - 1

    @property
    def fingerprint(self) -> str:
        """``assistant_fingerprint`` of all items."""
        return "" if self.is_root else self._fingerprint.hexdigest()

    def prefix_digest(self, count: int) -> str:
        """``conversation_digest`` of the first ``count`` items."""
        return self._prefixes[count].hexdigest()

    def query(self, prompt_config_digest: str = "") -> LineageQuery:
        """What the matcher needs to know of this request (see ``LineageQuery``)."""
        return LineageQuery(
            is_root=self.is_root,
            fingerprint=self.fingerprint,
            context_digests={
                at: self.prefix_digest(at) for at in range(self.run_start, self.run_end)
            },
            prompt_config_digest=prompt_config_digest,
        )

    def continuation(self, output_items: list[Item]) -> tuple[str, int, str]:
        """What a child will be matched by: (fingerprint, context_len, context_digest).

        ``output_items`` are this call's own, normalised; the request is not hashed again.

        Raises:
            InvalidInputError: (a ``ValueError``) an output item cannot be hashed.
        """
        hasher = self._fingerprint.copy()
        authored = not self.is_root
        for item in _objects(output_items):
            if is_model_authored(item):
                authored = True
                hasher.update(_own_bytes(item))
        fingerprint = hasher.hexdigest() if authored else ""
        return fingerprint, len(self), self.prefix_digest(len(self))
