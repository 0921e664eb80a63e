"""Random small rollouts for property tests: trees, retries, deltas, losses, drift, copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from middleware.records import ParentResolutionStatus, TokenEntry, TokenIds, compute_digest

ROLLOUT = "r"


def call(
    call_id: str,
    prompt: list[int],
    generated: list[int],
    parent: TokenEntry | str | None = None,
    **fields: Any,
) -> TokenEntry:
    """A stamped entry: root without ``parent``, else resolved to it. ``fields`` override."""
    whole = prompt + generated
    given: dict[str, Any] = {
        "rollout_id": ROLLOUT,
        "model_call_id": call_id,
        "prompt_token_ids": prompt,
        "generation_token_ids": generated,
        "generation_log_probs": [-0.25 * (i + 1) for i in range(len(generated))],
        "cum_len": len(whole),
        "digest": compute_digest(whole),
        "parent_resolution": "root",
        "finish_reason": "stop",
    }
    if parent is not None:
        parent_id = parent if isinstance(parent, str) else parent.model_call_id
        given |= {"parent_resolution": "resolved", "parent_call_id": parent_id}
    given |= fields
    return TokenEntry.model_validate({k: v for k, v in given.items() if v is not None})


def delta(entry: TokenEntry, parent_len: int) -> TokenEntry:
    """The same call with its prompt stored as a suffix after its parent's sequence."""
    suffix = entry.prompt_token_ids[parent_len:]
    return entry.model_copy(update={"prompt_token_ids": suffix, "prompt_is_delta": True})


@dataclass
class _Made:
    entry: TokenEntry
    prompt: list[int]
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def cum(self) -> list[int]:
        return self.prompt + self.entry.generation_token_ids.tolist()


_tokens = st.lists(st.integers(0, 2), max_size=3)
_step: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "shape": st.sampled_from(
            ["root", "child", "child", "child", "child", "retry", "drift", "rewrite"]
        ),
        "of": st.integers(0, 30),
        "more": _tokens,
        "generated": st.sampled_from([[1], [2], [1, 2], [0, 1, 2], [1], [2], []]),
        "status": st.sampled_from(
            ["true"] * 8 + ["unresolved", "first", "none", "bare", "lost", "self"]
        ),
        "delta": st.booleans(),
        "digest": st.sampled_from(["right"] * 9 + ["wrong", "absent", "length", "zero"]),
        "delivered": st.sampled_from([None, None, None, True, False]),
        "finish": st.sampled_from(["stop", "stop", "stop", None, "abort"]),
        "time": st.integers(0, 6),
        "total_ms": st.sampled_from([None, None, 500, 1500]),
        "body": st.sampled_from([None, None, None, "b1", "b2"]),
        "suffix": st.sampled_from(["", "", ".0", ".1"]),
        "dialect": st.sampled_from(["chat", "chat", "completions"]),
        "copy": st.sampled_from(
            ["no"] * 8 + ["same", "later", "other", "tokens", "bare", "digest"]
        ),
        "dropped": st.sampled_from([False] * 9 + [True]),
    }
)


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[list[TokenEntry], str | None]:
    """Entries in any order, and a terminal call id that may or may not exist."""
    steps = draw(st.lists(_step, max_size=9))
    undecided_writer = draw(st.sampled_from([False, False, False, True]))
    made: list[_Made] = []
    entries: list[TokenEntry] = []
    for at, step in enumerate(steps):
        one = _make(at, step, made, undecided_writer)
        made.append(one)
        if step["dropped"]:
            continue
        entries.append(one.entry)
        if step["copy"] != "no":
            entries += _copies(one.entry, step["copy"])
    ids = [e.model_call_id for e in entries]
    terminal = draw(st.sampled_from([None, None, "gone", *ids]))
    return draw(st.permutations(entries)), terminal


def _make(at: int, step: dict[str, Any], made: list[_Made], undecided_writer: bool) -> _Made:
    before = made[step["of"] % len(made)] if made else None
    parent: TokenEntry | str | None = None
    prompt = [at % 3, *step["more"]]
    if before is not None and step["shape"] != "root":
        parent = before.entry
        prompt = before.cum + step["more"]
        if step["shape"] == "retry":
            prompt, parent = before.prompt, before.entry.parent_call_id
        elif step["shape"] == "drift" and prompt:
            prompt = [*prompt[:-2], 7, *prompt[-1:]]
        elif step["shape"] == "rewrite":
            prompt = [8, *step["more"]]
    fields = _fields(step, undecided_writer, prompt, parent)
    if fields.get("parent_resolution") not in (None, "resolved") or parent is None:
        fields.setdefault("parent_resolution", "root")
        fields.setdefault("parent_call_id", None)
    if fields.pop("no_decision", False):
        fields["parent_resolution"] = None
    call_id = f"c{at}{step['suffix']}"
    if step["status"] == "self" and fields.get("parent_resolution") is None and parent is not None:
        fields["parent_call_id"] = call_id
    entry = call(call_id, prompt, step["generated"], parent, **fields)
    resolved = entry.parent_resolution is ParentResolutionStatus.RESOLVED
    if step["delta"] and resolved and before is not None and step["shape"] == "child":
        entry = delta(entry, len(before.cum))
    return _Made(entry, prompt)


def _fields(
    step: dict[str, Any], undecided_writer: bool, prompt: list[int], parent: Any
) -> dict[str, Any]:
    whole = prompt + step["generated"]
    fields: dict[str, Any] = {
        "created_at": float(step["time"]),
        "delivered": step["delivered"],
        "finish_reason": step["finish"],
        "request_digest": step["body"],
        "dialect": step["dialect"],
        "timings": step["total_ms"] and {"total_ms": step["total_ms"]},
    }
    if step["digest"] == "wrong":
        fields["digest"] = compute_digest([*whole, 9])
    elif step["digest"] == "absent":
        fields |= {"digest": None, "cum_len": None}
    elif step["digest"] == "length":
        fields["cum_len"] = len(whole) + 1
    elif step["digest"] == "zero":
        fields["cum_len"] = 0
    status = step["status"]
    if undecided_writer:
        fields |= {"no_decision": True, "parent_call_id": None}
    elif status in ("unresolved", "first"):
        fields |= {"parent_resolution": "unresolved", "parent_call_id": None}
        fields["parent_resolution_reason"] = "no_match"
        fields["first_call"] = True if status == "first" else None
    elif status == "none":
        fields |= {"no_decision": True, "parent_call_id": None}
    elif status == "bare" and parent is not None:
        fields["no_decision"] = True
    elif status == "lost" and parent is not None:
        fields["parent_call_id"] = "lost"
    return fields


def _copies(entry: TokenEntry, how: str) -> list[TokenEntry]:
    """Further records of the same call: agreeing, saying less, or contradicting it."""
    bare = entry.model_copy(update={"digest": None})
    if how == "bare":
        return [bare]
    if how == "digest":
        return [bare, entry.model_copy(update={"digest": compute_digest([6])})]
    if how == "tokens":
        other = entry.prompt_token_ids + TokenIds([4])
        return [entry.model_copy(update={"prompt_token_ids": other})]
    return [_copy(entry, how)]


def _copy(entry: TokenEntry, how: str) -> TokenEntry:
    if how == "same":
        return entry.model_copy()
    if how == "later":
        return entry.model_copy(update={"created_at": entry.created_at + 1.0})
    log_probs = [-9.0] * len(entry.generation_token_ids)
    if not log_probs:
        return entry.model_copy(update={"prompt_token_ids": entry.prompt_token_ids + TokenIds([5])})
    return TokenEntry.model_validate({**entry.model_dump(), "generation_log_probs": log_probs})
