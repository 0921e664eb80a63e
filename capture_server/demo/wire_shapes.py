"""Pieces of vLLM 0.32 answers that chat and completions share: log-probs, usage, events.

Key order and nulls are those of the raw samples in ``tests/data/vllm-0.32.0``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from capture_server.demo.engine import VERSION, PromptLogprobs
from capture_server.demo.generation import NamedLogprob, Step

SYSTEM_FINGERPRINT = f"vllm-{VERSION}-demo"
DONE_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that open every answer and every chunk."""

    response_id: str
    kind: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A new answer or chunk around ``choices``."""
        return {
            "id": self.response_id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def event(chunk: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def token_name(token_id: int, text: str, *, as_id: bool) -> str:
    """The ``token`` string: text, or ``token_id:N`` under ``return_tokens_as_token_ids``."""
    return f"token_id:{token_id}" if as_id else text


def chat_logprobs(
    steps: Iterable[Step], *, num_top: int | None, as_ids: bool
) -> dict[str, Any] | None:
    """``choices[].logprobs`` of chat; None when log-probs were not asked for."""
    if num_top is None:
        return None
    return {"content": [_chat_entry(step, num_top, as_ids) for step in steps]}


def _chat_entry(step: Step, num_top: int, as_ids: bool) -> dict[str, Any]:
    # vLLM counts the sampled token among the alternatives, so the last one can be cut off.
    shown = step.top if num_top < 0 else step.top[:num_top]
    return {
        "token": token_name(step.token_id, step.token_text, as_id=as_ids),
        "logprob": step.logprob,
        "bytes": list(step.token_text.encode()),
        "top_logprobs": [_alternative(entry, as_ids) for entry in shown],
    }


def _alternative(entry: NamedLogprob, as_ids: bool) -> dict[str, Any]:
    name = token_name(entry.token_id, entry.text, as_id=as_ids)
    return {"token": name, "logprob": entry.logprob, "bytes": list(name.encode())}


def prompt_logprobs_json(found: PromptLogprobs | None) -> list[dict[str, Any] | None] | None:
    """``prompt_logprobs``: per position a map from id (a string) to what is known of it."""
    if found is None:
        return None
    return [None if entries is None else _prompt_position(entries) for entries in found]


def _prompt_position(entries: tuple[tuple[NamedLogprob, int], ...]) -> dict[str, Any]:
    return {
        str(entry.token_id): {
            "logprob": entry.logprob,
            "rank": rank,
            "decoded_token": entry.text,
        }
        for entry, rank in entries
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The three counts, in vLLM's order."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
