"""One model call inside a build: its tokens as shared arrays, and what the build decided on it.

Invariant: a call's full sequence is ``full_prompt() + generated``; arrays are never copied or
written to as long as nobody asks for a delta's full prompt, and then one array serves the whole
path down to that call. Entries are never changed. Nothing here decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from middleware.records import ParentResolutionStatus, TokenEntry, TokenIds

CallKey = tuple[int, str]


@dataclass(slots=True, eq=False)
class Call:
    """A de-duplicated entry plus the build's findings. Compared by identity."""

    entry: TokenEntry
    delivered: bool | None = None  # of all copies; None: nobody knows
    prompt_len: int = 0  # of the full prompt
    base: Call | None = None  # delta prompts: the call whose sequence comes before the stored part
    digest_fits: bool | None = None  # None: not checked yet
    parent: Call | None = None  # verified by tokens and digest
    failure: str = ""  # why this call starts a fragment; "": root or child
    recovered: bool = False  # the named parent generated nothing; ``parent`` is its ancestor
    given_history: bool = False
    ambiguous: bool = False  # several identical candidates (snapshots without decisions)
    set_aside: str = ""  # "undelivered" or "aborted": a leaf that nobody kept
    extended: bool = False  # some call continues this one
    quarantined: bool = False
    undecided: bool = False  # a retry sibling was kept although none could be known
    children: list[Call] = field(default_factory=list)
    rebuilt_prompt: TokenIds | None = None  # cache of ``full_prompt``

    @property
    def call_id(self) -> str:
        return self.entry.model_call_id

    @property
    def stored_prompt(self) -> TokenIds:
        """The prompt as recorded: the suffix only, for a delta."""
        return self.entry.prompt_token_ids

    @property
    def generated(self) -> TokenIds:
        return self.entry.generation_token_ids

    @property
    def cum_len(self) -> int:
        """Length of prompt plus generation."""
        return self.prompt_len + len(self.entry.generation_token_ids)

    @property
    def key(self) -> CallKey:
        """The order of every listing: (prompt length, call id)."""
        return (self.prompt_len, self.entry.model_call_id)

    @property
    def aborted(self) -> bool:
        return self.entry.finish_reason == "abort"

    @property
    def is_fragment(self) -> bool:
        return self.parent is None and self.failure != ""

    @property
    def interstitial(self) -> TokenIds:
        """Prompt tokens after the parent's sequence (a view); the full prompt without a parent."""
        if self.parent is not None and self.base is self.parent:
            return self.stored_prompt
        start = self.parent.cum_len if self.parent is not None else 0
        return self.full_prompt()[start:]

    def full_prompt(self) -> TokenIds:
        """The whole prompt. For a delta it is built once, in one array shared along its path."""
        if self.base is None:
            return self.stored_prompt
        if self.rebuilt_prompt is None:
            self._materialise(self.base)
        assert self.rebuilt_prompt is not None
        return self.rebuilt_prompt

    def _materialise(self, base: Call) -> None:
        path = [self]
        while base.base is not None and base.rebuilt_prompt is None:
            path.append(base)
            base = base.base
        pieces = [base.full_prompt(), base.generated]
        for call in reversed(path):
            pieces += [call.stored_prompt, call.generated]
        whole = TokenIds.concat(*pieces[:-1])  # the last call's generation is no prompt
        for call in path:
            call.rebuilt_prompt = whole[: call.prompt_len]

    def write_sequence(self, out: npt.NDArray[np.uint64]) -> None:
        """Fill ``out`` (length ``cum_len``) with the full sequence, without building arrays."""
        call = self
        while True:
            out[call.prompt_len : call.cum_len] = call.generated.array
            if call.base is None or call.rebuilt_prompt is not None:
                out[: call.prompt_len] = call.full_prompt().array
                return
            out[call.base.cum_len : call.prompt_len] = call.stored_prompt.array
            call = call.base

    def is_prefix_of(self, prompt: TokenIds) -> bool:
        """Whether ``prompt`` starts with this call's full sequence."""
        if self.cum_len > len(prompt):
            return False
        # The short part first: it decides most comparisons that fail.
        if prompt[self.prompt_len : self.cum_len] != self.generated:
            return False
        return prompt[: self.prompt_len] == self.full_prompt()

    def path(self) -> list[Call]:
        """The calls from this chain's first to this one."""
        calls: list[Call] = []
        call: Call | None = self
        while call is not None:
            calls.append(call)
            call = call.parent
        calls.reverse()
        return calls


def linked_id(entry: TokenEntry) -> str | None:
    """The parent that a record names: a resolved one, or one named without any decision."""
    if entry.parent_resolution in (ParentResolutionStatus.RESOLVED, None):
        return entry.parent_call_id or None
    return None
