"""Exact prefixes: the parent's tokens plus the chat template's own tokens for what is new.

What is new is found by asking the template, never by counting: the conversation is rendered twice
more with the last answer replaced by two different markers. The longest token suffix that both
renderings share does not depend on the answer; behind the parent's tokens it continues the
conversation as the template would have. Works for any template that closes a turn with an
end-of-turn token.

Invariant: a prompt is returned only where all checks hold; every other case is a
``NoExactPrefixError`` with its reason. Pure: no IO; the same code serves calls inside an engine
and calls in front of one. Source: spec 06, "Prefix supply".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np

from middleware.context import CaptureContext
from middleware.fingerprint import is_model_authored
from middleware.prompt_shape import SYSTEM_ROLES
from middleware.records import TokenIds

# Letters and digits in turn: tokenizers cut between them, so that a marker is many short tokens.
# First and last characters differ, so that no token at a marker's edge is in both renderings.
MARKERS: Final = ("x7k2v9w4j8q3", "b5m1t6h9z2d7")

_CUT: Final = frozenset({"", "abort", "client_disconnect", "upstream_error", "truncated", "error"})


class NoExactPrefixError(Exception):
    """No exact prefix can be proven; ``reason`` goes onto the record."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def require_suppliable(context: CaptureContext) -> TokenIds:
    """The tokens that the call's prompt should start with.

    An engine echoes whatever prompt it is given, so a wrong supply would never show: every
    condition is checked here, on recorded facts.

    Raises:
        NoExactPrefixError: the link is sound enough to be recorded, not to be supplied.
    """
    match = context.parent_resolution.match if context.parent_resolution else None
    if match is None:
        raise NoExactPrefixError("no_parent")
    if not match.prompt_config_digest or not context.prompt_config_digest:
        raise NoExactPrefixError("prompt_config_unknown")
    if match.prompt_config_digest != context.prompt_config_digest:
        raise NoExactPrefixError("prompt_config_changed")
    if not match.system_digest or match.system_digest != context.system_digest:
        raise NoExactPrefixError("system_changed")
    if _has_new_system_item(context):
        raise NoExactPrefixError("system_changed")
    if match.finish_reason in _CUT:
        raise NoExactPrefixError("parent_was_cut")
    return match.cumulative_token_ids


def _has_new_system_item(context: CaptureContext) -> bool:
    items = context.request_items or []
    if context.parent_by == "response_id":
        new = items[1:]  # the answer is not among them; the first may be the instructions
    else:
        # Reasoning may be all that is left of an answer.
        authored = [
            i
            for i, item in enumerate(items)
            if is_model_authored(item) or item.get("type") == "reasoning"
        ]
        new = items[authored[-1] + 1 :] if authored else items
    return any(item.get("role") in SYSTEM_ROLES for item in new)


def with_last_answer(messages: Sequence[Any], text: str) -> list[Any] | None:
    """The chat messages with the last run of assistant messages replaced by one of that text.

    None if no message is the assistant's.
    """
    stop = len(messages)
    while stop and _role(messages[stop - 1]) != "assistant":
        stop -= 1
    start = stop
    while start and _role(messages[start - 1]) == "assistant":
        start -= 1
    if start == stop:
        return None
    answer = {"role": "assistant", "content": text}
    return [*messages[:start], answer, *messages[stop:]]


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else getattr(message, "role", None)


def exact_prompt(
    parent: TokenIds,
    rendered: TokenIds,
    marked: tuple[TokenIds, TokenIds],
    end_tokens: Collection[int],
) -> TokenIds:
    """The prompt that extends ``parent`` and continues as the template does.

    Args:
        parent: prompt and generation of the call that the request continues; not empty.
        rendered: the request as the template renders it.
        marked: the same with the last answer replaced by each of ``MARKERS``.
        end_tokens: ids that end a turn when the model samples them.

    Raises:
        NoExactPrefixError: see its reason.
    """
    tail = _answer_free_tail(rendered, marked)
    if not len(tail) or tail[0] not in end_tokens:
        raise NoExactPrefixError("no_end_of_turn")
    last = parent[-1]
    if last == tail[0]:
        return TokenIds.concat(parent, tail[1:])
    if last in end_tokens:
        raise NoExactPrefixError("other_end_token")
    # Cut by length or by a stop string: the template's end of turn closes the turn instead.
    return TokenIds.concat(parent, tail)


def _answer_free_tail(rendered: TokenIds, marked: tuple[TokenIds, TokenIds]) -> TokenIds:
    first, second = marked
    length = _common_suffix_len(first, second)
    differing = max(len(first), len(second)) - length - first.common_prefix_len(second)
    # Every token of a marker holds at least one of its characters. More tokens differ: the
    # template shows the answer in several places, and the tail would begin after the last.
    if differing > len(MARKERS[0]) + 1 or differing <= 0:
        raise NoExactPrefixError("answer_not_in_one_place")
    if _common_suffix_len(rendered, first) < length:
        raise NoExactPrefixError("tail_depends_on_answer")
    return first[len(first) - length :]


def _common_suffix_len(left: TokenIds, right: TokenIds) -> int:
    length = min(len(left), len(right))
    if not length:
        return 0
    same = left.array[: -length - 1 : -1] == right.array[: -length - 1 : -1]
    return length if same.all() else int(np.argmin(same))
