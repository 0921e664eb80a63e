"""Which recorded call produced the response that the verifier scored?

Independent witnesses are asked: ids that the harness names, the response's own id, its content.
They must agree; a doubt attributes nothing and says why. Nothing here raises, and nothing is
guessed: a wrong attribution would put a reward on tokens that did not earn it. Rules: spec 04.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from capture_server.trajectories.witnesses import (
    Candidate,
    ContentMatch,
    candidates_of,
    match_content,
    one_of,
)

__all__ = ["TerminalAttribution", "resolve_terminal"]

_NO_RESPONSE: Final = "no_response_object"


@dataclass(frozen=True, slots=True)
class TerminalAttribution:
    """``method`` is the first witness that named the call ("" when none did)."""

    model_call_id: str | None = None
    method: str = ""
    reason: str = ""

    @property
    def attributed(self) -> bool:
        """Whether a call was named."""
        return self.model_call_id is not None


def resolve_terminal(
    entries: Iterable[Any],
    response: Mapping[str, Any] | None,
    explicit_call_id: str | None = None,
    *,
    declared_response_id: str | None = None,
) -> TerminalAttribution:
    """Attribute ``response`` to one of ``entries``: token entries or rows of a ledger.

    ``explicit_call_id`` names a call (unknown: only a note); ``declared_response_id`` is the
    response id that the harness says it kept (unknown: nothing is attributed). Entries may be
    objects or mappings; their order has no influence. Never raises.
    """
    candidates = candidates_of(entries)
    reasons: list[str] = []
    witnesses: list[tuple[str, Candidate]] = []
    if explicit_call_id is not None:
        known = [c for c in candidates if c.call_id == explicit_call_id]
        if known:
            witnesses.append(("explicit", known[0]))
        else:
            reasons.append("explicit_terminal_not_captured")
    if declared_response_id is not None:
        named = [c for c in candidates if c.has_response_id(declared_response_id)]
        declared = one_of(named)
        if declared is None:
            reasons.append("declared_ambiguous" if named else "declared_terminal_not_captured")
            return TerminalAttribution(reason=",".join(reasons))
        witnesses.append(("declared", declared))
    if not isinstance(response, Mapping):
        reasons.append(_NO_RESPONSE)
    else:
        _ask_response_id(candidates, response, witnesses, reasons)
        _ask_content(candidates, response, witnesses, reasons)
    return _verdict(witnesses, reasons)


def _ask_response_id(
    candidates: Sequence[Candidate],
    response: Mapping[str, Any],
    witnesses: list[tuple[str, Candidate]],
    reasons: list[str],
) -> None:
    response_id = str(response.get("id") or "")
    named = [c for c in candidates if c.has_response_id(response_id)]
    found = one_of(named)
    if found is not None:
        witnesses.append(("response_id", found))
    elif not response_id:
        reasons.append("response_has_no_id")
    else:
        reasons.append("response_id_ambiguous" if named else "response_id_no_match")


def _ask_content(
    candidates: Sequence[Candidate],
    response: Mapping[str, Any],
    witnesses: list[tuple[str, Candidate]],
    reasons: list[str],
) -> None:
    # An id that the harness reports proves that it holds the answer, whatever the note says.
    proven = {witness.call_id for _, witness in witnesses}
    usable = [c for c in candidates if c.delivered is not False or c.call_id in proven]
    found = match_content(usable, response.get("output"))
    if isinstance(found, ContentMatch):
        witnesses.append((found.method, found.candidate))
    else:
        reasons.append(found)


def _verdict(witnesses: list[tuple[str, Candidate]], reasons: list[str]) -> TerminalAttribution:
    if not witnesses:
        return TerminalAttribution(reason=",".join(reasons))
    method, named = witnesses[0]
    if any(not named.is_same_sequence(other) for _, other in witnesses[1:]):
        heard = ";".join(f"{name}={candidate.call_id}" for name, candidate in witnesses)
        reasons.append(f"witness_disagreement[{heard}]")
        return TerminalAttribution(reason=",".join(reasons))
    if len(witnesses) > 1:
        reasons.append("corroborated_by=" + "+".join(name for name, _ in witnesses[1:]))
    return TerminalAttribution(named.call_id, method, ",".join(reasons))
