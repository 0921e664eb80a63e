"""A slow and obvious twin of the trajectory build: lists, loops and spec 04, line by line.

It shares no code with the product but the record type, ``compute_digest`` and canonical bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from middleware.records import TokenEntry, canonical_bytes, compute_digest


@dataclass(eq=False)
class Ref:
    """One call of the reference build."""

    entry: TokenEntry
    delivered: bool | None
    prompt: list[int] | None = None  # None: cannot be rebuilt
    sound: bool = True  # nothing that this prompt was rebuilt through failed its digest
    parent: Ref | None = None
    failure: str = ""
    recovered: bool = False
    given: bool = False
    ambiguous: bool = False
    aside: str = ""
    quarantined: bool = False
    undecided: bool = False

    @property
    def id(self) -> str:
        return self.entry.model_call_id

    @property
    def gen(self) -> list[int]:
        return self.entry.generation_token_ids.tolist()

    @property
    def cum(self) -> list[int]:
        assert self.prompt is not None
        return self.prompt + self.gen

    @property
    def key(self) -> tuple[int, str]:
        assert self.prompt is not None
        return (len(self.prompt), self.id)

    def path(self) -> list[Ref]:
        return [*(self.parent.path() if self.parent else []), self]


@dataclass
class Reference:
    """The reference build's findings, in the product's words."""

    calls: list[Ref] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)
    terminal: Ref | None = None
    terminal_chain: str = ""
    fragment_only: bool = False
    unresolved: set[str] = field(default_factory=set)
    parallel: bool = False

    def paths(self, terminal: Ref | None) -> list[list[Ref]]:
        found = []
        for call in sorted(self.calls, key=lambda c: c.key):
            children = [c for c in self.calls if c.parent is call and not c.aside]
            if call.aside or children or any(c.quarantined for c in call.path()):
                continue
            found.append(call.path())
        if terminal is not None:
            found = [terminal.path()] + [p for p in found if terminal not in p]
        return found


def is_prefix(prefix: list[int], whole: list[int]) -> bool:
    return whole[: len(prefix)] == prefix


def own_digest_fits(call: Ref) -> bool:
    return not call.entry.digest or call.entry.digest == compute_digest(call.cum)


def link(entry: TokenEntry) -> str | None:
    status = entry.parent_resolution.value if entry.parent_resolution else None
    return (entry.parent_call_id or None) if status in ("resolved", None) else None


def reference_build(entries: list[TokenEntry], terminal_id: str | None = None) -> Reference:
    out = Reference()
    calls = _deduplicate(entries, out)
    for call in calls.values():
        _rebuild(call, calls, set())
    for call in list(calls.values()):
        if call.prompt is None:
            out.lost[call.id] = "delta_chain_unreconstructable"
            del calls[call.id]
    out.empty = sorted(c.id for c in calls.values() if not c.gen)
    decided = any(e.parent_resolution is not None for e in entries)
    out.calls = sorted((c for c in calls.values() if c.gen), key=lambda c: c.key)
    for call in out.calls:
        _find_parent(call, calls, out, decided)
    for call in out.calls:
        if call.entry.dialect == "completions" and not call.failure:
            _completions_test(call, list(calls.values()))
    _judge_terminal(out, terminal_id)
    _set_aside(out)
    _judge_retries(out, None)
    if out.terminal_chain in ("delivered", "broken"):
        out.unresolved = set()
    return out


def _deduplicate(entries: list[TokenEntry], out: Reference) -> dict[str, Ref]:
    calls = {}
    for call_id in {e.model_call_id for e in entries}:
        copies = sorted((e for e in entries if e.model_call_id == call_id), key=canonical_bytes)
        first = copies[0]
        for other in copies[1:]:
            if (
                first.prompt_is_delta != other.prompt_is_delta
                or first.prompt_token_ids.tolist() != other.prompt_token_ids.tolist()
                or first.generation_token_ids.tolist() != other.generation_token_ids.tolist()
                or first.generation_log_probs.tolist() != other.generation_log_probs.tolist()
            ):
                out.lost[call_id] = "duplicate_call_id_conflict"
        digests = {copy.digest for copy in copies if copy.digest}
        if first.prompt_is_delta and len(digests) > 1:
            out.lost[call_id] = "duplicate_call_id_conflict"
        if call_id not in out.lost:
            notes = {c.delivered for c in copies}
            delivered = True if True in notes else False if False in notes else None
            calls[call_id] = Ref(first, delivered)
    return calls


def _rebuild(call: Ref, calls: dict[str, Ref], open_ids: set[str]) -> None:
    if call.prompt is not None:
        return
    if not call.entry.prompt_is_delta:
        call.prompt = call.entry.prompt_token_ids.tolist()
        call.sound = own_digest_fits(call)
        return
    base = calls.get(link(call.entry) or "")
    if base is None or base.id in open_ids or not call.entry.digest:
        return
    _rebuild(base, calls, open_ids | {call.id})
    if base.prompt is None or not base.sound:
        return
    call.prompt = base.cum + call.entry.prompt_token_ids.tolist()
    if not own_digest_fits(call):
        call.prompt = None


def _find_parent(call: Ref, calls: dict[str, Ref], out: Reference, decided: bool) -> None:
    entry = call.entry
    status = entry.parent_resolution.value if entry.parent_resolution else None
    if status == "root":
        return
    if status == "unresolved":
        if entry.first_call and entry.parent_resolution_reason == "no_match":
            call.given = True
        else:
            call.failure = "parent_unresolved"
        return
    if link(entry) is None:
        if decided:
            call.failure = "missing_resolution"
            return
        prefixes = [c for c in out.calls if is_prefix(c.cum, call.prompt or [])]
        longest = max((len(c.cum) for c in prefixes), default=0)
        candidates = [c for c in prefixes if len(c.cum) == longest]
        if candidates:
            call.parent = min(candidates, key=lambda c: c.id)
            call.ambiguous = call.quarantined = len(candidates) > 1
            if not own_digest_fits(call.parent):
                call.parent, call.failure = None, "parent_digest_mismatch"
                call.ambiguous = call.quarantined = False
        return
    named, seen = link(entry), set()
    while named in out.empty and named not in seen:
        seen.add(named)
        named = link(calls[named].entry)
    parent = calls.get(named or "")
    if parent is None or not parent.gen:
        call.failure = "parent_call_id_missing"
    elif (
        not is_prefix(parent.cum, call.prompt or [])
        or not own_digest_fits(parent)
        or parent.entry.cum_len not in (None, len(parent.cum))
    ):
        call.failure = "parent_digest_mismatch"
    else:
        call.parent, call.recovered = parent, bool(seen)


def _completions_test(call: Ref, others: list[Ref]) -> None:
    assert call.prompt is not None
    known = len(call.parent.cum) if call.parent else 0
    for other in others:
        assert other.prompt is not None
        earlier = (
            not other.entry.created_at
            or not call.entry.created_at
            or other.entry.created_at < call.entry.created_at
        )
        proper = is_prefix(other.prompt, call.prompt) and len(other.prompt) < len(call.prompt)
        long_enough = len(other.prompt) >= known
        if earlier and proper and long_enough and not is_prefix(other.cum, call.prompt):
            call.parent, call.failure = None, "prompt_holds_unrecognised_text"
            call.recovered = call.given = call.ambiguous = call.quarantined = False
            return


def _judge_terminal(out: Reference, terminal_id: str | None) -> None:
    if terminal_id is None:
        return
    out.terminal = next((c for c in out.calls if c.id == terminal_id), None)
    out.terminal_chain = "not_captured"
    if out.terminal is None:
        return
    path = out.terminal.path()
    aborted = out.terminal.entry.finish_reason == "abort"
    ambiguous = any(c.ambiguous for c in path)
    fragment = bool(path[0].failure)
    out.terminal_chain = "broken" if aborted or ambiguous or fragment else "delivered"
    out.fragment_only = fragment and not aborted and not ambiguous


def _set_aside(out: Reference) -> None:
    while True:
        for call in out.calls:
            is_leaf = not any(c.parent is call and not c.aside for c in out.calls)
            why = (
                "undelivered"
                if call.delivered is False
                else "aborted"
                if call.entry.finish_reason == "abort"
                else ""
            )
            if is_leaf and why and not call.aside and call is not out.terminal:
                call.aside = why
                break
        else:
            return


def extended(out: Reference, call: Ref) -> bool:
    return any(c.parent is call and not c.ambiguous for c in out.calls)


def are_siblings(one: Ref, other: Ref) -> bool:
    def suffix(call: Ref) -> str:
        found = re.search(r"\.(\d+)$", call.id)
        return found.group(1) if found else ""

    same_body = (
        bool(one.entry.request_digest)
        and one.entry.request_digest == other.entry.request_digest
        and suffix(one) == suffix(other)
    )
    return one.parent is other.parent and (one.prompt == other.prompt or same_body)


def _sibling_groups(calls: list[Ref]) -> list[list[Ref]]:
    groups: list[list[Ref]] = []
    for call in calls:
        joined = [g for g in groups if any(are_siblings(call, member) for member in g)]
        groups = [g for g in groups if g not in joined]
        groups.append([call, *(member for g in joined for member in g)])
    return groups


def _judge_retries(out: Reference, parent: Ref | None) -> None:
    on_path = out.terminal.path() if out.terminal else []
    spared = on_path if out.terminal_chain == "delivered" or out.fragment_only else []
    children = [c for c in out.calls if c.parent is parent and not c.ambiguous]
    for group in _sibling_groups(children):
        rest = [c for c in group if not c.aside]
        kept = rest
        if len(rest) > 1:
            kept = [c for c in rest if c in on_path] or [c for c in rest if extended(out, c)]
            if not kept:
                kept = [min(rest, key=lambda c: c.id)]
                for call in rest:
                    call.undecided = True
                    out.unresolved.add(call.id)
            for call in rest:
                call.quarantined = call not in kept
        for call in kept:
            total = (call.entry.timings or {}).get("total_ms")
            if not call.entry.created_at or total is None:
                continue
            asked_again = any(
                other.aside == "undelivered"
                and other.entry.created_at
                and other.entry.created_at > call.entry.created_at + total / 1000
                for other in group
            )
            if asked_again and not extended(out, call) and call not in spared:
                call.undecided = True
                out.unresolved.add(call.id)
        if parent is None and sum(extended(out, c) for c in kept) > 1:
            out.parallel = True
    for call in children:
        if not call.quarantined:
            _judge_retries(out, call)


# --- shown in the product's words ------------------------------------------------------------


def main_index(paths: list[list[Ref]], first: bool) -> int:
    if first:
        return 0
    ages = [(p[0].entry.created_at, p[0].id) for p in paths]
    return ages.index(min(ages))


def shown_build(entries: list[TokenEntry], terminal_id: str | None) -> dict[str, Any]:
    """Chains, quarantine and notes."""
    out = reference_build(entries, terminal_id)
    delivered = out.terminal_chain == "delivered"
    paths = out.paths(out.terminal if delivered else None)
    chains = []
    main = main_index(paths, delivered) if paths else -1
    branches = 0
    for at, path in enumerate(paths):
        name = "main" if at == main else f"branch-{branches}"
        branches += at != main
        links: list[list[int]] = [[]]
        for call in path[1:]:
            assert call.prompt is not None and call.parent is not None
            links.append(call.prompt[len(call.parent.cum) :])
        chains.append((name, [c.id for c in path], path[0].prompt, links))
    captured = sum(len(c.gen) for c in out.calls)
    kept = sum(len(c.gen) for c in paths[main]) if paths else 0
    failures = Counter(out.lost.values())
    failures.update(c.failure for c in out.calls if c.failure)
    failures.update("parent_call_id_missing_recovered" for c in out.calls if c.recovered)
    return {
        "chains": chains,
        "quarantined": sorted(c.id for c in out.calls if c.quarantined),
        "undecided": sorted(c.id for c in out.calls if c.undecided),
        "roots": sum(c.parent is None and not c.aside for c in out.calls),
        "generated_tokens_captured": captured,
        "generated_tokens_delivered": kept,
        "delivered_fraction": round(kept / captured, 4) if captured else 0.0,
        "unresolved_retries": sorted(out.unresolved),
        "terminal_chain": out.terminal_chain,
        "empty_generation_calls": out.empty,
        "parent_link_failures": dict(failures),
        "unresolved_parent_calls": sorted([*out.lost, *(c.id for c in out.calls if c.failure)]),
        "undelivered_calls": sorted(c.id for c in out.calls if c.aside == "undelivered"),
        "aborted_calls": sorted(c.id for c in out.calls if c.aside == "aborted"),
        "given_history": sorted(c.id for c in out.calls if c.given),
    }


def shown_rows(
    entries: list[TokenEntry], terminal_id: str | None, *, incomplete: bool, exclude: bool
) -> dict[str, Any]:
    """Rows of the compact form: (ids, tokens, mask, log-probs, starts, ends, cut, masked)."""
    out = reference_build(entries, terminal_id)
    scored = out.terminal if out.terminal_chain == "delivered" or out.fragment_only else None
    all_masked = incomplete or (bool(out.terminal_chain) and scored is None)
    all_masked = all_masked or (out.parallel and scored is None)
    paths = out.paths(scored)
    main = main_index(paths, scored is not None) if paths else -1
    drafts = []
    for at, path in enumerate(paths):
        held = []
        for call in path:
            if call.undecided:
                break
            held.append(call)
        cut = len(held) < len(path)
        doubtful = any(
            not own_digest_fits(c) or c.entry.cum_len not in (None, len(c.cum)) for c in held
        )
        masked = all_masked or (cut and scored is None) or doubtful
        is_scored = scored is not None and at == 0
        if exclude and path[0].failure and not is_scored:
            continue
        drafts.append((at, path, held, cut, masked, is_scored))
    order = [d for d in drafts if d[0] == main and not d[4]]
    order += [d for d in drafts if not d[4]] + [d for d in drafts if d[4]]
    owner: dict[str, int] = {}
    for at, _, held, *_ in order:
        for call in held:
            owner.setdefault(call.id, at)
    rows: list[tuple[Any, ...]] = []
    main_row = None
    for at, path, held, cut, masked, is_scored in drafts:
        trained = [c for c in held if owner[c.id] == at]
        if not trained:
            continue
        tokens = held[-1].cum
        mask, log_probs = [0] * len(tokens), [0.0] * len(tokens)
        for call in trained:
            start = len(call.prompt or [])
            for i, value in enumerate(call.entry.generation_log_probs):
                mask[start + i], log_probs[start + i] = 1, value
        if is_scored or (terminal_id is None and len(paths) == 1):
            main_row = len(rows)
        starts = path[0].failure or "root"
        ends = held[-1].entry.finish_reason
        ids = [c.id for c in held]
        rows.append((ids, tokens, mask, log_probs, starts, ends, cut, masked))
    return {"rows": rows, "main_row": main_row, "mask_sample": all(r[-1] for r in rows)}
