"""The content witness of terminal attribution, over token entries and ledger rows alike.

A call is a candidate when the response is the conversation up to its answer, or its answer, or
ends in its answer. Comparing is by fingerprint; surrounding whitespace, which harnesses trim, may
only ever make a match ambiguous, never make one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from capture_server.trajectories.duplicates import copies_agree
from middleware.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint, is_model_authored
from middleware.normalise import normalise_items
from middleware.records import TokenEntry, compute_digest, cumulative_tokens

Item = dict[str, Any]

_TEXT_KEYS: Final = ("text", "content", "refusal")


class _Copy:
    """What attribution reads of one entry or ledger row."""

    __slots__ = ("_entry",)

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def get(self, name: str) -> Any:
        if isinstance(self._entry, Mapping):
            return self._entry.get(name)
        return getattr(self._entry, name, None)

    @property
    def entry(self) -> Any:
        """The entry itself."""
        return self._entry

    @property
    def is_ledger_row(self) -> bool:
        """Whether tokens and content are elsewhere, so that recorded fingerprints must do."""
        return bool(self.get("cumulative_hash"))

    @property
    def hashes_like_us(self) -> bool:
        """Whether its recorded fingerprints are of our version (no stamp counts as ours)."""
        return (self.get("fingerprint_version") or FINGERPRINT_VERSION) == FINGERPRINT_VERSION

    @property
    def continuation(self) -> str:
        """The recorded fingerprint of the conversation up to and with its answer, or ""."""
        return (self.get("continuation_fingerprint") or "") if self.hashes_like_us else ""

    def output(self, spelling: Spelling) -> str:
        """The fingerprint of its own answer, "" if it has none."""
        if self.is_ledger_row:
            return (self.get("output_fingerprint") or "") if self.hashes_like_us else ""
        try:
            return spelling(self.get("output_items") or [])
        except ValueError:  # an answer that cannot be hashed matches nothing
            return ""

    def sequence(self) -> tuple[str, Any] | None:
        """Equal for identical full token sequences; None if it does not say."""
        if self.is_ledger_row:
            return ("ledger", (self.get("cum_len"), self.get("cumulative_hash")))
        if isinstance(self._entry, TokenEntry) and not self._entry.prompt_is_delta:
            return ("tokens", compute_digest(cumulative_tokens(self._entry)))
        digest = self.get("digest")
        return ("tokens", digest) if digest else None


class Candidate:
    """All copies of one call; what costs is computed when asked.

    Whatever is read of it is the same in every order of the copies.
    """

    __slots__ = ("_copies", "_sequence", "call_id")

    def __init__(self, call_id: str, entries: Iterable[Any]) -> None:
        self.call_id = call_id
        self._copies = [_Copy(entry) for entry in entries]
        self._sequence: tuple[str, Any] | None = None

    def has_response_id(self, response_id: str) -> bool:
        """Whether this (not empty) response id was recorded for the call."""
        return bool(response_id) and any(c.get("response_id") == response_id for c in self._copies)

    @property
    def delivered(self) -> bool | None:
        """True if any copy's is, else False if any is, else None."""
        notes = [copy.get("delivered") for copy in self._copies]
        return True if True in notes else False if False in notes else None

    @property
    def is_ledger_row(self) -> bool:
        """Whether it is known from a ledger, by fingerprints only."""
        return any(copy.is_ledger_row for copy in self._copies)

    @property
    def continuations(self) -> set[str]:
        """The recorded fingerprints of the conversation up to and with its answer."""
        return {copy.continuation for copy in self._copies} - {""}

    def outputs(self, spelling: Spelling) -> set[str]:
        """The fingerprints of its own answer."""
        return {copy.output(spelling) for copy in self._copies} - {""}

    def sequence(self) -> tuple[str, Any]:
        """Equal for calls with identical full token sequences.

        Of a call whose copies contradict each other nothing is known: it equals no other.
        """
        if self._sequence is None:
            self._sequence = self._sequence_key()
        return self._sequence

    def _sequence_key(self) -> tuple[str, Any]:
        entries = [copy.entry for copy in self._copies if isinstance(copy.entry, TokenEntry)]
        found = {copy.sequence() for copy in self._copies} - {None}
        known = found.pop() if found else None
        if known is None or found or (entries and not copies_agree(entries)):
            return ("call", self.call_id)
        return known

    def is_same_sequence(self, other: Candidate) -> bool:
        """Whether both are the same call, or indistinguishable by tokens."""
        return self.call_id == other.call_id or self.sequence() == other.sequence()


def candidates_of(entries: Iterable[Any]) -> list[Candidate]:
    """One candidate per call id, whatever the number and order of its copies."""
    copies: dict[str, list[Any]] = {}
    for entry in entries:
        copies.setdefault(_Copy(entry).get("model_call_id"), []).append(entry)
    return [Candidate(call_id, found) for call_id, found in copies.items()]


def distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """One per call id and per full token sequence, the smallest call id; sorted by call id."""
    by_id = {c.call_id: c for c in candidates}
    if len(by_id) < 2:
        return list(by_id.values())
    kept: dict[tuple[str, Any], Candidate] = {}
    for call_id in sorted(by_id):
        kept.setdefault(by_id[call_id].sequence(), by_id[call_id])
    return list(kept.values())


def one_of(candidates: Iterable[Candidate]) -> Candidate | None:
    """The only one, after counting identical sequences as one."""
    found = distinct(candidates)
    return found[0] if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class ContentMatch:
    """The call that the response's content names, and by what kind of match."""

    candidate: Candidate
    method: str


def match_content(candidates: Sequence[Candidate], output: Any) -> ContentMatch | str:
    """The call whose answer or conversation ``output`` is, or the reason for naming none."""
    items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
    if not items:
        return "response_has_no_output"
    # Judged as served: normalising gives a turn of mere reasoning an empty answer, which would
    # name any call that said nothing.
    if not any(map(is_model_authored, items)):
        return "no_model_authored_output"
    try:
        exact = _pool(candidates, items, fingerprint)
        trimmed = _pool(candidates, items, trimmed_fingerprint)
    except (ValueError, RecursionError):
        return "response_output_unfingerprintable"
    found = distinct(c for c, _ in exact)
    if len(found) > 1 or len(distinct(c for c, _ in trimmed)) > 1:
        return "content_ambiguous"
    if not found:
        return "no_content_match"
    if found[0].is_ledger_row:
        return ContentMatch(found[0], "content")
    cumulative = any(was_cumulative for _, was_cumulative in exact)
    return ContentMatch(found[0], "content_cumulative" if cumulative else "content_output")


def _pool(
    candidates: Sequence[Candidate], items: list[Item], spelling: Spelling
) -> list[tuple[Candidate, bool]]:
    """All hits, and whether each was by the recorded fingerprint of the whole conversation."""
    whole = spelling(items)
    # Writers that do not normalise stamped the conversation as it is.
    conversations = {whole, _as_served(items)} - {""}
    answers = {whole, spelling(_last_turn(items))} - {""}
    hits = [(c, True) for c in candidates if not c.continuations.isdisjoint(conversations)]
    hits += [(c, False) for c in candidates if not c.outputs(spelling).isdisjoint(answers)]
    return hits


def _last_turn(items: list[Item]) -> list[Item]:
    """The trailing run of model-authored items; reasoning within it does not end it."""
    turn: list[Item] = []
    for item in reversed(items):
        if is_model_authored(item) or item.get("type") == "reasoning":
            turn.append(item)
        elif turn:
            break
        else:
            return []
    turn.reverse()
    return turn


# --- spellings of one conversation -----------------------------------------------------------

Spelling = Callable[[list[Item]], str]


def fingerprint(items: list[Item]) -> str:
    """As calls are stamped: normalised, then hashed.

    Raises:
        ValueError: the items cannot be hashed.
    """
    return assistant_fingerprint(normalise_items(items))


def trimmed_fingerprint(items: list[Item]) -> str:
    """The same after trimming whitespace around every text.

    Raises:
        ValueError: the items cannot be hashed.
    """
    return assistant_fingerprint(normalise_items([_trimmed(i) for i in normalise_items(items)]))


def _as_served(items: list[Item]) -> str:
    try:
        return assistant_fingerprint(items)
    except ValueError:
        return ""


def _trimmed(value: Any) -> Any:
    """A copy of an item or block with its texts trimmed; tool calls and results stay."""
    changed = dict(value)
    for name in _TEXT_KEYS:
        inner = value.get(name)
        if isinstance(inner, str):
            changed[name] = inner.strip()
        elif isinstance(inner, list):
            changed[name] = [_trimmed_part(part) for part in inner]
    return changed


def _trimmed_part(part: Any) -> Any:
    if isinstance(part, str):
        return part.strip()
    return _trimmed(part) if isinstance(part, dict) else part
