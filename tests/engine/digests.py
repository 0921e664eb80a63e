"""The token digest of the wire contract, written here a second time on purpose."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any


def assert_sound(entry: dict[str, Any]) -> None:
    """An entry with its full prompt: lengths agree and its digest is that of its tokens."""
    prompt, generated = entry["prompt_token_ids"], entry["generation_token_ids"]
    assert len(generated) == len(entry["generation_log_probs"])
    assert entry["cum_len"] == len(prompt) + len(generated)
    assert entry["digest"] == token_digest(prompt + generated)


def token_digest(ids: Sequence[int]) -> str:
    """sha256 over the domain, version 1, the count, and each id as eight big-endian bytes."""
    body = b"".join(struct.pack(">Q", token) for token in ids)
    head = b"nemo-gym-tokens" + b"\x01" + struct.pack(">Q", len(ids))
    return hashlib.sha256(head + body).hexdigest()
