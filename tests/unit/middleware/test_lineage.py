"""The matcher and the resolvers: which call does a request continue, and never a guess."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from middleware.errors import CallIdConflictError
from middleware.lineage import (
    CursorReset,
    DeliveryNote,
    IncrementalLineageStore,
    InMemoryLineageStore,
    LineageIndex,
    RolloutLineage,
    SharedTokens,
    hash_request,
    stamp_continuation,
)
from middleware.protocols import LineageResolution, QueryResolver
from middleware.records import (
    ParentResolutionStatus,
    TokenEntry,
    TokenIds,
    compute_digest,
    stamp_lineage,
)

Items = list[dict[str, Any]]
ROOT, RESOLVED, UNRESOLVED = (
    ParentResolutionStatus.ROOT,
    ParentResolutionStatus.RESOLVED,
    ParentResolutionStatus.UNRESOLVED,
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(
    call_id: str,
    prompt: list[int],
    generated: list[int],
    request: Items | None = None,
    output: Items | None = None,
    **fields: Any,
) -> TokenEntry:
    """A committed full-prompt entry; chat request and output unless it is a token prompt."""
    entry = TokenEntry(
        rollout_id=fields.pop("rollout_id", "r"),
        model_call_id=call_id,
        prompt_token_ids=prompt,
        generation_token_ids=generated,
        generation_log_probs=[-0.5] * len(generated),
        output_items=output or [],
        **fields,
    )
    stamp_lineage(entry, entry.parent_call_id)
    if request is not None:
        stamp_continuation(entry, request)
    return entry


def delta(parent: TokenEntry, full: list[int], call_id: str, tail: list[int], generated: list[int],
          request: Items, output: Items) -> TokenEntry:  # fmt: skip
    """A committed delta entry; ``full`` are the parent's cumulative tokens."""
    entry = TokenEntry(
        rollout_id="r",
        model_call_id=call_id,
        prompt_token_ids=tail,
        generation_token_ids=generated,
        generation_log_probs=[-0.5] * len(generated),
        output_items=output,
        prompt_is_delta=True,
        parent_call_id=parent.model_call_id,
        parent_resolution=RESOLVED,
    )
    stamp_lineage(entry, parent.model_call_id, cumulative=full + tail + generated)
    return stamp_continuation(entry, request)


class Backend(IncrementalLineageStore):
    """A list of entries; counts what is fetched and loaded."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log: list[TokenEntry | DeliveryNote] = []
        self.loaded: list[str] = []
        self.fetches: list[Any] = []
        self.reset_next = False
        self.swapped: dict[int, TokenEntry] = {}

    def _fetch_new_entries(self, rollout_id: str, cursor: Any) -> tuple[list[Any], Any]:
        self.fetches.append(cursor)
        if self.reset_next and cursor is not None:
            self.reset_next = False
            raise CursorReset
        new = list(enumerate(self.log))[cursor or 0 :]
        found: list[Any] = []
        for at, item in new:
            if isinstance(item, DeliveryNote):
                found.append(item)
            elif item.rollout_id == rollout_id:
                found.append((item, at))
        return found, len(self.log)

    def _load_entry(self, rollout_id: str, ref: Any) -> TokenEntry:
        entry = self.swapped.get(ref, self.log[ref])
        assert isinstance(entry, TokenEntry)
        self.loaded.append(entry.model_call_id)
        return entry

    async def put(self, entry: TokenEntry) -> None:
        self.log.append(entry)


STORES: list[Callable[[], Any]] = [InMemoryLineageStore, Backend]


def outcome(found: LineageResolution) -> tuple[str, str | None, str]:
    match = found.match
    return found.status.value, match.model_call_id if match else None, found.reason


async def resolved(entries: list[TokenEntry], request: Items) -> tuple[str, str | None, str]:
    """The answer of both resolvers, for every order of commits (up to four)."""
    answers = set()
    orders = list(itertools.permutations(entries)) if len(entries) <= 4 else [entries]
    for make_store, order in itertools.product(STORES, orders):
        store = make_store()
        assert isinstance(store, QueryResolver)
        for entry in order:
            await store.put(entry)
        answers.add(outcome(await store.resolve("r", request)))
    assert len(answers) == 1, answers
    return answers.pop()


FIRST = [user("sum 2+2")]


async def test_rewritten_user_text_is_no_continuation() -> None:
    """The same answer under another question does not resolve to the old call (C04)."""
    entry = call("a", [1, 2], [3], FIRST, [said("four")])
    assert await resolved([entry], [user("sum 3+1"), said("four"), user("next")]) == (
        "unresolved", None, "no_match",
    )  # fmt: skip
    assert await resolved([entry], [*FIRST, said("four"), user("next")]) == ("resolved", "a", "")


TOOL = {"id": "k", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize("content", [None, "", [], "absent", [{"type": "text", "text": ""}]])
async def test_an_echoed_tool_turn_may_change_its_empty_content(content: Any) -> None:
    """Every spelling of no text next to tool calls finds the same parent (C10)."""
    served = {"role": "assistant", "content": None, "tool_calls": [TOOL]}
    entry = call("a", [1], [2], FIRST, [served])
    echo = {"role": "assistant", "content": content, "tool_calls": [TOOL]}
    if content == "absent":
        del echo["content"]
    follow = {"role": "tool", "tool_call_id": "k", "content": "x"}
    assert await resolved([entry], [*FIRST, echo, follow]) == ("resolved", "a", "")
    blank = echo | {"content": " "}
    assert (await resolved([entry], [*FIRST, blank, follow]))[2] == "no_match"


async def test_an_answer_given_in_a_longer_context_is_another_call() -> None:
    """What follows the context must be exactly one run of model-authored items."""
    first = call("a", [1], [2], FIRST, [said("ok")])
    longer = [*FIRST, said("ok"), user("more"), said(""), user("x")]
    assert (await resolved([first], longer))[2] == "no_match"
    # Fingerprints are equal here (an empty answer adds nothing): only the run tells.
    second = call("b", [1, 2, 5], [], longer[:3], [said("")])
    assert await resolved([first, second], longer) == ("resolved", "b", "")


async def test_prefilled_context_may_end_in_the_models_own_item() -> None:
    """A context that ends with an assistant prefix still has its answer as one run."""
    request = [*FIRST, said("half")]
    entry = call("a", [1], [2], request, [said("rest")])
    assert await resolved([entry], [*request, said("rest"), user("go")]) == ("resolved", "a", "")


async def test_candidates_without_proof_do_not_count() -> None:
    """No stamp, no context digest, or another hash version: never a candidate."""
    request = [*FIRST, said("ok"), user("go")]
    for change in (
        {"continuation_fingerprint": ""}, {"continuation_context_digest": ""},
        {"fingerprint_version": 2}, {"fingerprint_version": 4}, {"continuation_context_len": 2},
    ):  # fmt: skip
        entry = call("a", [1], [2], FIRST, [said("ok")]).model_copy(update=change)
        assert (await resolved([entry], request))[2] == "no_match", change
    unversioned = call("a", [1], [2], FIRST, [said("ok")])
    unversioned.fingerprint_version = None
    assert await resolved([unversioned], request) == ("resolved", "a", "")


async def test_identical_sequences_count_as_one() -> None:
    """Twins with the same tokens are one parent (smallest id); other tokens are ambiguous."""
    request = [*FIRST, said("ok"), user("go")]
    twins = [call(i, [1], [2], FIRST, [said("ok")]) for i in ("b", "a", "c")]
    assert await resolved(twins, request) == ("resolved", "a", "")
    other = call("d", [1], [9], FIRST, [said("ok")])
    assert await resolved([*twins, other], request) == ("unresolved", None, "ambiguous")


async def test_calls_that_nobody_received_fall_away() -> None:
    """Undelivered and aborted candidates yield while another remains, and only then (C02)."""
    request = [*FIRST, said("ok"), user("go")]
    kept = call("a", [1], [2], FIRST, [said("ok")])
    lost = call("b", [1], [3], FIRST, [said("ok")], delivered=False)
    cut = call("c", [1], [4], FIRST, [said("ok")], finish_reason="abort")
    assert await resolved([kept, lost, cut], request) == ("resolved", "a", "")
    assert (await resolved([lost, cut], request))[2] == "ambiguous"
    assert await resolved([lost], request) == ("resolved", "b", "")


async def test_a_late_delivery_note_decides() -> None:
    """``delivered`` that became known after the record is used by later decisions."""
    request = [*FIRST, said("ok"), user("go")]
    one, two = (call(i, [1], [g], FIRST, [said("ok")]) for i, g in (("a", 2), ("b", 3)))
    memory, backend = InMemoryLineageStore(), Backend()
    for store in (memory, backend):
        await store.put(one)
        await store.put(two)
        assert (await store.resolve("r", request)).reason == "ambiguous"
    memory.note_delivery("r", "a", delivered=False)
    backend.log.append(DeliveryNote("a", delivered=False))
    for store in (memory, backend):
        assert outcome(await store.resolve("r", request)) == ("resolved", "b", "")


async def test_conflicting_copies_of_one_call_are_no_candidate() -> None:
    """Two payloads under one id count as nothing; an identical copy changes nothing."""
    request = [*FIRST, said("ok"), user("go")]
    entry = call("a", [1], [2], FIRST, [said("ok")])
    other = call("a", [1], [3], FIRST, [said("ok")])
    assert await resolved([entry, entry], request) == ("resolved", "a", "")
    assert (await resolved([entry, other], request))[2] == "no_match"
    assert (await resolved([entry, other, entry], request))[2] == "no_match"


async def test_a_changed_prompt_setting_is_no_continuation() -> None:
    """Other tools in front of the same history: reported as such, where both digests exist."""
    request = hash_request([*FIRST, said("ok"), user("go")])
    entry = call("a", [1], [2], FIRST, [said("ok")], prompt_config_digest="A")
    for store in (InMemoryLineageStore(), Backend()):
        await store.put(entry)
        changed = await store.resolve_query("r", request.query("B"))
        assert outcome(changed) == ("unresolved", None, "prompt_config_changed")
        for digest in ("A", ""):
            found = await store.resolve_query("r", request.query(digest))
            assert outcome(found) == ("resolved", "a", "")
        assert found.match is not None
        assert found.match.prompt_config_digest == "A"


async def test_interleaved_agents_keep_to_their_own_calls() -> None:
    """Main agent and sub-agent in one rollout resolve to their own parents (C15)."""
    p1 = call("p1", [1, 2], [3], [user("main")], [said("m1")])
    s1 = call("s1", [50], [51], [user("sub")], [said("s1")])
    assert await resolved([p1, s1], [user("main"), said("m1"), user("t")]) == ("resolved", "p1", "")
    assert await resolved([p1, s1], [user("sub"), said("s1"), user("t")]) == ("resolved", "s1", "")
    assert await resolved([p1, s1], [user("title?")]) == ("root", None, "")


async def test_a_request_that_cannot_be_hashed_is_an_error_before_all() -> None:
    """ValueError even where the answer would have been root; nothing is looked up."""
    for store in (InMemoryLineageStore(), Backend()):
        for bad in ([{"role": "user", "content": 5}], ["x"], [user("\ud800")]):
            with pytest.raises(ValueError):
                await store.resolve("r", bad)  # type: ignore[arg-type]
    assert store.fetches == []


async def test_a_reasoning_item_alone_is_history() -> None:
    """Root means: no model-authored and no reasoning item in the request as sent."""
    reasoning = {"type": "reasoning", "summary": []}
    assert await resolved([], [user("a")]) == ("root", None, "")
    assert await resolved([], [user("a"), reasoning, user("b")]) == (
        "unresolved", None, "no_match",
    )  # fmt: skip
    entry = call("a", [1], [2], [user("a")], [reasoning])
    for echo in ([reasoning], [said("")], [said("<think>x</think>")], [reasoning, said("")]):
        found = await resolved([entry], [user("a"), *echo, user("b")])
        assert found == ("resolved", "a", ""), echo


# --- token prompts ------------------------------------------------------------------------------


async def by_tokens(entries: list[TokenEntry], prompt: list[int], at: float = 100.0) -> Any:
    answers = set()
    for make_store, order in itertools.product(STORES, itertools.permutations(entries)):
        store = make_store()
        for entry in order:
            await store.put(entry)
        found = await store.resolve_tokens("r", TokenIds(prompt), dispatched_at=at)
        if found.match is not None:
            assert TokenIds(prompt).startswith(found.match.cumulative_token_ids)
        answers.add(outcome(found))
    assert len(answers) == 1, answers
    return answers.pop()


async def test_token_prompts_take_the_longest_prefix() -> None:
    """The parent is the call with the longest sequence that the prompt starts with."""
    a = call("a", [1, 2], [3], created_at=1.0)
    b = call("b", [1, 2, 3, 4], [5], created_at=2.0)
    assert await by_tokens([a, b], [1, 2, 3, 4, 5, 6]) == ("resolved", "b", "")
    assert await by_tokens([a, b], [1, 2, 3, 4, 5]) == ("resolved", "b", "")
    assert await by_tokens([a, b], [1, 2, 3, 9]) == ("resolved", "a", "")
    assert await by_tokens([a, b], [7]) == ("root", None, "")
    assert await by_tokens([], [7]) == ("root", None, "")


async def test_a_cut_or_retokenised_answer_is_ambiguous() -> None:
    """An earlier call's prompt is there but its answer is not: policy text may stand there."""
    a = call("a", [1, 2], [3, 4], created_at=1.0)
    assert await by_tokens([a], [1, 2, 3, 9]) == ("unresolved", None, "ambiguous")
    assert await by_tokens([a], [1, 2, 3, 9], at=1.0) == ("root", None, "")  # not earlier
    assert await by_tokens([a], [1, 2]) == ("root", None, "")  # the same prompt again
    b = call("b", [1, 2, 3, 4, 5], [6, 7], created_at=2.0)
    assert await by_tokens([a, b], [1, 2, 3, 4, 5, 6, 8]) == ("unresolved", None, "ambiguous")
    # A prompt that does not reach beyond the parent hides nothing.
    c = call("c", [1, 2], [8], created_at=1.5)
    assert await by_tokens([a, c], [1, 2, 3, 4, 5]) == ("resolved", "a", "")


async def test_empty_generations_and_twins_by_tokens() -> None:
    """A call without generated tokens is no parent; identical sequences are one."""
    empty = call("a", [1, 2], [], created_at=1.0)
    assert await by_tokens([empty], [1, 2, 3]) == ("root", None, "")
    twins = [call(i, [1], [2], created_at=1.0) for i in ("c", "b")]
    assert await by_tokens(twins, [1, 2, 3]) == ("resolved", "b", "")


async def test_delta_entries_are_found_by_tokens_too() -> None:
    """The sequence of a delta entry is known without loading its chain."""
    a = call("a", [1, 2], [3], FIRST, [said("x")], created_at=1.0)
    b = delta(a, [1, 2, 3], "b", [4], [5], [*FIRST, said("x"), user("y")], [said("z")])
    for make in STORES:
        store = make()
        await store.put(a)
        await store.put(b)
        found = await store.resolve_tokens("r", TokenIds([1, 2, 3, 4, 5, 6]), dispatched_at=9.0)
        assert outcome(found) == ("resolved", "b", "")
        assert found.match.cumulative_token_ids == [1, 2, 3, 4, 5]


async def test_explicit_parents() -> None:
    """By response id and by call id; unknown and conflicting ones are ``no_match``."""
    a = call("a", [1], [2], response_id="resp_1")
    b = call("b", [1], [3], response_id="resp_2")
    twice = call("c", [1], [4], response_id="resp_2")
    for make in STORES:
        store = make()
        for entry in (a, b, twice):
            await store.put(entry)
        assert outcome(await store.resolve_response_id("r", "resp_1")) == ("resolved", "a", "")
        assert (await store.resolve_response_id("r", "resp_2")).reason == "ambiguous"
        assert (await store.resolve_response_id("r", "nope")).reason == "no_match"
        assert (await store.resolve_response_id("other", "resp_1")).reason == "no_match"
        found = await store.resolve_call_id("r", "b")
        assert found.match.cumulative_token_ids == [1, 3]
        assert (await store.resolve_call_id("r", "z")).reason == "no_match"


# --- tokens: sharing, bounds, proof ---------------------------------------------------------------


def test_children_share_their_parents_array() -> None:
    """A chain of calls keeps one array; a fork keeps its own and changes nobody's."""
    a = SharedTokens.start(TokenIds(range(100)))
    b, stored = a.extended(TokenIds([1, 2]))
    seen = b.ids
    c, _ = b.extended(TokenIds([3]))
    fork, forked = a.extended(TokenIds([9]))
    assert (stored, forked) == (2, 101)
    assert c.ids == [*range(100), 1, 2, 3]
    assert fork.ids == [*range(100), 9]
    assert seen == [*range(100), 1, 2]
    d = c
    for _ in range(50):
        d, _ = d.extended(TokenIds([7]))
    e, _ = d.extended(TokenIds([8]))
    assert np.shares_memory(d.ids.array, e.ids.array)
    assert seen == [*range(100), 1, 2]
    wide, _ = e.extended(TokenIds([2**40]))
    assert wide.ids[-2:] == [8, 2**40]


def test_full_prompts_of_a_chain_are_kept_once() -> None:
    """An index over growing full prompts stores the conversation, not its square."""
    lineage = RolloutLineage()
    tokens: list[int] = []
    parent = None
    for turn in range(100):
        tokens = [*tokens, *range(turn, turn + 10)]
        entry = call(f"c{turn:03}", tokens, [turn], parent_call_id=parent,
                     parent_resolution="resolved" if parent else "root")  # fmt: skip
        lineage.add_entry(entry)
        tokens = [*tokens, turn]
        parent = entry.model_call_id
        assert lineage.by_call_id[parent].cum_tokens == tokens
    assert lineage.total_tokens == len(tokens)


async def chain_of(store: Any, turns: int) -> tuple[Items, list[int]]:
    """Commit a chain of delta entries; return the request that continues it, and its tokens."""
    request: Items = [user("0")]
    tokens: list[int] = []
    parent: TokenEntry | None = None
    for turn in range(turns):
        tail, answer = [turn, turn + 1], [said(f"a{turn}")]
        if parent is None:
            parent = call("c0", tail, [7], request, answer, parent_resolution="root")
        else:
            parent = delta(parent, tokens, f"c{turn}", tail, [7], request, answer)
        await store.put(parent)
        tokens += [*tail, 7]
        request = [*request, *answer, user(str(turn + 1))]
    return request, tokens


@pytest.mark.parametrize("store_type", STORES)
async def test_delta_chains_are_rebuilt(store_type: Any) -> None:
    """The winner's cumulative tokens come out of its chain of deltas."""
    store = store_type()
    request, tokens = await chain_of(store, 30)
    found = await store.resolve("r", request)
    assert outcome(found) == ("resolved", "c29", "")
    assert found.match.cumulative_token_ids == tokens
    assert found.match.digest == compute_digest(tokens)
    assert found.match.prev_len == len(tokens)


async def test_ten_thousand_turns_need_no_recursion() -> None:
    """A very long chain is rebuilt iteratively and in linear time."""
    backend, lineage = Backend(), InMemoryLineageStore()
    tokens: list[int] = []
    shared = TokenIds()
    for turn in range(10_000):
        entry = TokenEntry(
            rollout_id="r", model_call_id=f"c{turn}", prompt_token_ids=[turn],
            generation_token_ids=[7], generation_log_probs=[-0.5], response_id=f"resp{turn}",
            prompt_is_delta=turn > 0, parent_call_id=f"c{turn - 1}" if turn else None,
            parent_resolution="resolved" if turn else "root", cum_len=2 * turn + 2,
        )  # fmt: skip
        tokens += [turn, 7]
        backend.log.append(entry)
        await lineage.put(entry)
    shared = TokenIds(tokens)
    last = backend.log[-1]
    assert isinstance(last, TokenEntry)
    last.digest = compute_digest(shared)
    started = time.perf_counter()
    for store in (backend, lineage):
        found = await store.resolve_response_id("r", "resp9999")
        assert found.match is not None
        assert found.match.cumulative_token_ids == shared
    assert time.perf_counter() - started < 20  # a square would take hours
    assert len(backend.loaded) == 10_000


async def test_only_the_winners_chain_is_loaded_and_only_once() -> None:
    """Metadata decides; a next turn loads one entry, and a root nothing at all."""
    store = Backend()
    request, _ = await chain_of(store, 5)
    for i in range(20):
        await store.put(call(f"x{i}", [9], [i], [user(f"x{i}")], [said("x")]))
    assert (await store.resolve("r", [user("new")])).status is ROOT
    assert store.loaded == []
    await store.resolve("r", request)
    assert store.loaded == ["c0", "c1", "c2", "c3", "c4"]
    await store.resolve("r", request)
    assert len(store.loaded) == 5
    first, second = [await store.resolve("r", request) for _ in range(2)]
    assert np.shares_memory(first.match.cumulative_token_ids.array,  # type: ignore[union-attr]
                            second.match.cumulative_token_ids.array)  # type: ignore[union-attr] # fmt: skip


@pytest.mark.parametrize("broken", ["tokens", "identity", "length"])
async def test_tokens_that_do_not_hash_to_their_digest_are_not_delivered(broken: str) -> None:
    """A stale or corrupt segment anywhere in the chain fails closed."""
    store = Backend()
    request, _ = await chain_of(store, 4)
    right = store.log[1]
    assert isinstance(right, TokenEntry)
    store.swapped[1] = right.model_copy(update={
        "tokens": {"prompt_token_ids": [8, 8]}, "identity": {"model_call_id": "zz"},
        "length": {"prompt_token_ids": [1, 2, 3]},
    }[broken])  # fmt: skip
    assert outcome(await store.resolve("r", request)) == ("unresolved", None, "lookup_error")
    store.swapped.clear()
    assert outcome(await store.resolve("r", request)) == ("resolved", "c3", "")


async def test_a_delta_whose_parent_is_missing_is_not_guessed() -> None:
    """Half a sequence is never delivered as a whole one."""
    for make in STORES:
        store = make()
        request, _ = await chain_of(Backend(), 1)
        orphan = delta(call("gone", [1], [2]), [1, 2], "b", [3], [4], request, [said("z")])
        await store.put(orphan)
        found = await store.resolve("r", [*request, said("z"), user("go")])
        assert outcome(found) == ("unresolved", None, "lookup_error")
        found = await store.resolve_tokens("r", TokenIds([1, 2, 3, 4, 5]), dispatched_at=9)
        assert outcome(found) == ("unresolved", None, "lookup_error")


async def test_an_entry_that_miscounts_itself_is_no_candidate() -> None:
    """A recorded ``cum_len`` that its own tokens do not have proves nothing."""
    entry = call("a", [1], [2], FIRST, [said("ok")])
    entry.cum_len = 7
    assert (await resolved([entry], [*FIRST, said("ok"), user("go")]))[2] == "no_match"


async def test_a_reset_cursor_starts_over() -> None:
    """After ``CursorReset`` the rollout is fetched from the beginning, once."""
    store = Backend()
    request, _ = await chain_of(store, 2)
    await store.resolve("r", request)
    store.reset_next = True
    assert outcome(await store.resolve("r", request)) == ("resolved", "c1", "")
    assert store.fetches == [None, 2, None]


async def test_evicted_caches_are_fetched_again() -> None:
    """Bounds on rollouts and tokens cost a refetch and never an answer."""
    store = Backend(max_cached_rollouts=2, max_cached_tokens=10)
    requests = {}
    for name in "pqst":
        entry = call("a", [1] * 8, [ord(name)], [user(name)], [said(name)], rollout_id=name)
        await store.put(entry)
        requests[name] = [user(name), said(name), user("go")]
    for _ in range(3):
        for name, request in requests.items():
            found = await store.resolve(name, request)
            assert found.match is not None
            assert found.match.cumulative_token_ids == [1] * 8 + [ord(name)]
    assert len(store._rollouts) == 2
    assert store._held_tokens <= 10
    store.drop("t")
    await store.close()
    assert store._held_tokens == 0
    assert (await store.resolve("p", requests["p"])).status is RESOLVED


async def test_concurrent_resolves_of_many_rollouts() -> None:
    """Threads, tiny bounds and evictions in each other's way never change an answer."""
    store = Backend(max_cached_rollouts=3, max_cached_tokens=40, max_threads=4)
    for number in range(8):
        await store.put(call("a", [number] * 9, [1], [user(str(number))], [said("x")],
                             rollout_id=f"r{number}"))  # fmt: skip

    async def one(number: int) -> None:
        found = await store.resolve(f"r{number}", [user(str(number)), said("x"), user("go")])
        assert found.match is not None
        assert found.match.cumulative_token_ids == [number] * 9 + [1]

    numbers = [number % 8 for number in range(160)]
    random.Random(5).shuffle(numbers)
    await asyncio.gather(*map(one, numbers))


async def test_memory_evicts_the_oldest_and_never_the_only_rollout() -> None:
    """An evicted rollout's continuations are unresolved; a single huge one stays."""
    store = InMemoryLineageStore(max_rollouts=2, max_tokens=20)
    follow = [*FIRST, said("ok"), user("go")]
    for name in ("p", "q", "s"):
        await store.put(call("a", [1], [2], FIRST, [said("ok")], rollout_id=name))
    assert (await store.resolve("p", follow)).reason == "no_match"
    assert (await store.resolve("s", follow)).status is RESOLVED
    await store.put(call("big", [1] * 100, [2], FIRST, [said("big")], rollout_id="t"))
    assert (await store.resolve("s", follow)).reason == "no_match"
    assert (await store.resolve("t", [*FIRST, said("big"), user("go")])).status is RESOLVED
    assert not store.is_process_shared()
    index = LineageIndex(max_rollouts=1)
    index.for_rollout("a")
    index.for_rollout("b")
    assert index.get("a") is None
    assert index.total_tokens == 0


async def test_large_requests_are_hashed_off_the_loop() -> None:
    """A long request resolves the same; size only decides where it is hashed."""
    items = [user("x" * 200_000), *([said("a"), user("b")] * 40)]
    entry = call("a", [1], [2], items, [said("ok")])
    assert await resolved([entry], [*items, said("ok"), user("go")]) == ("resolved", "a", "")


# --- the seed's own forms -------------------------------------------------------------------------


def test_record_indexes_a_conversation() -> None:
    """``record`` takes request and output in one list; the last item is the output by default."""
    lineage = RolloutLineage()
    lineage.record("a", [*FIRST, said("ok")], [1, 2, 3], compute_digest([1, 2, 3]))
    lineage.record(
        "b", [*FIRST, said("x"), said("y")], [], "d", 1,
        staging_key="k2", parent_staging_chain=["k1"], cum_len=9, chain_hash="h",
    )  # fmt: skip
    found = lineage.resolve([*FIRST, said("ok"), user("go")])
    assert found.match is not None
    assert found.match.cumulative_token_ids == [1, 2, 3]
    staged = lineage.resolve([*FIRST, said("x"), said("y"), user("go")]).match
    assert staged is not None
    assert (staged.staging_chain, staged.prev_len, staged.chain_hash) == (("k1", "k2"), 9, "h")
    status, node, reason = lineage.resolve_node([*FIRST, said("no"), user("go")])
    assert (status, node, reason) == (UNRESOLVED, None, "no_match")


async def test_the_ledger_is_write_once() -> None:
    """The same row is a no-op, another an error; failures and retired rows never resolve."""

    class Row(SimpleNamespace):
        def model_dump(self, mode: str) -> dict[str, Any]:
            return vars(self)

    def commit(call_id: str, **changes: Any) -> SimpleNamespace:
        row = Row(model_call_id=call_id, staging_key=f"k-{call_id}", cum_len=3, chain_hash="c",
                  cumulative_hash="h", response_id="resp", **changes)  # fmt: skip
        return SimpleNamespace(rollout_id="r", record=row, staging_chain=("k0",),
                               request_items=FIRST, response_items=[said(call_id)])  # fmt: skip

    store = InMemoryLineageStore()
    assert not await store.has_rows("r")
    await store.record(commit("a"))
    await store.record(commit("a"))
    with pytest.raises(CallIdConflictError):
        await store.record(commit("a", weight_version=2))
    await store.record_failure("r", "b", "worker_capture_failed")
    await store.record_failure("r", "b", "worker_capture_failed")
    manifest = await store.manifest("r")
    assert [row["model_call_id"] for row in manifest["records"]] == ["a"]
    assert [row["model_call_id"] for row in manifest["failures"]] == ["b"]
    found = await store.resolve("r", [*FIRST, said("a"), user("go")])
    assert found.match is not None
    assert (found.match.staging_chain, found.match.prev_len) == (("k0", "k-a"), 3)
    await store.retire("r")
    await store.record(commit("late"))
    assert not await store.has_rows("r")
    await store.delete("r")
    await store.record(commit("again"))
    assert await store.has_rows("r")
