"""Step 1 of a build: one call per call id, or none that can be trusted.

At-least-once transports deliver copies. Copies that agree in tokens and log-probs are one call;
copies that disagree prove that something is wrong with all of them, so none is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from capture_server.trajectories.calls import Call
from middleware.records import TokenEntry, canonical_bytes, entry_to_json_bytes


def one_call_per_id(entries: Iterable[TokenEntry]) -> tuple[dict[str, Call], list[str]]:
    """The de-duplicated calls by id, and the ids whose copies contradict each other."""
    copies: dict[str, list[TokenEntry]] = {}
    for entry in entries:
        copies.setdefault(entry.model_call_id, []).append(entry)
    calls: dict[str, Call] = {}
    conflicts: list[str] = []
    for call_id, found in copies.items():
        if not copies_agree(found):
            conflicts.append(call_id)
        else:
            calls[call_id] = Call(_smallest(found), delivered=_delivered(found))
    return calls, conflicts


def copies_agree(copies: Sequence[TokenEntry]) -> bool:
    """Whether all copies of one call have the same tokens and log-probs, as far as they say."""
    if len(copies) == 1:
        return True
    if any(not _same_stored(copies[0], other) for other in copies[1:]):
        return False
    # Equal suffixes are equal prompts only after equal prefixes, which the digests stand for.
    return not copies[0].prompt_is_delta or len({c.digest for c in copies if c.digest}) <= 1


def _smallest(copies: list[TokenEntry]) -> TokenEntry:
    if len(copies) == 1:
        return copies[0]
    # The full JSON breaks ties between copies that differ only in later notes.
    return min(copies, key=lambda entry: (canonical_bytes(entry), entry_to_json_bytes(entry)))


def _delivered(copies: list[TokenEntry]) -> bool | None:
    known = [entry.delivered for entry in copies if isinstance(entry.delivered, bool)]
    return any(known) if known else None


def _same_stored(one: TokenEntry, other: TokenEntry) -> bool:
    return (
        one.prompt_is_delta == other.prompt_is_delta
        and one.prompt_token_ids == other.prompt_token_ids
        and one.generation_token_ids == other.generation_token_ids
        and one.generation_log_probs == other.generation_log_probs
    )
