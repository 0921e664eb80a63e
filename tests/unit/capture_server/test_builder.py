"""Building chains: properties against the slow reference, and the rules case by case."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capture_server.trajectories.builder import (
    BuildOutput,
    per_request,
    prefix_merging,
    run_builder,
)
from capture_server.trajectories.chains import Chain, ChainLink
from middleware.errors import InvalidInputError, InvalidRecordError
from middleware.records import LogProbs, TokenEntry, TokenIds, canonical_bytes, compute_digest
from tests.unit.capture_server.reference_builder import shown_build
from tests.unit.capture_server.rollout_factory import call, delta, rollouts


def shown(out: BuildOutput) -> dict[str, Any]:
    """The build in the reference's form."""
    notes = out.notes
    names = [
        "roots", "generated_tokens_captured", "generated_tokens_delivered", "delivered_fraction",
        "unresolved_retries", "terminal_chain", "empty_generation_calls", "parent_link_failures",
        "unresolved_parent_calls", "undelivered_calls", "aborted_calls", "given_history",
    ]  # fmt: skip
    return {
        "chains": [
            (
                chain.chain_id,
                chain.call_ids,
                chain.root_prompt.tolist(),
                [link.interstitial.tolist() for link in chain.links],
            )
            for chain in out.chains
        ],
        "quarantined": out.quarantined,
        "undecided": out.undecided,
        **{name: getattr(notes, name) for name in names},
    }


def paths(out: BuildOutput) -> dict[str, list[str]]:
    return {chain.chain_id: chain.call_ids for chain in out.chains}


# --- properties ------------------------------------------------------------------------------


@given(rollouts())
@settings(max_examples=250, deadline=None)
def test_build_agrees_with_the_slow_reference(rollout: tuple[list[TokenEntry], str | None]) -> None:
    """Any small rollout gives exactly what the rules, read line by line, give."""
    entries, terminal = rollout
    assert shown(prefix_merging(entries, terminal)) == shown_build(entries, terminal)


@given(rollouts(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_order_of_entries_has_no_influence(
    rollout: tuple[list[TokenEntry], str | None], shuffler: random.Random
) -> None:
    """Shuffled entries give the same chains, quarantine and notes."""
    entries, terminal = rollout
    expected = shown(prefix_merging(entries, terminal))
    shuffler.shuffle(entries)
    assert shown(prefix_merging(entries, terminal)) == expected


@given(rollouts())
@settings(max_examples=100, deadline=None)
def test_building_changes_no_entry_and_repeats_itself(
    rollout: tuple[list[TokenEntry], str | None],
) -> None:
    """Entries keep their bytes, and a second build of them gives the same result."""
    entries, terminal = rollout
    before = [canonical_bytes(entry) for entry in entries]
    first = shown(prefix_merging(entries, terminal))
    assert shown(prefix_merging(entries, terminal)) == first
    assert [canonical_bytes(entry) for entry in entries] == before


@given(rollouts())
@settings(max_examples=100, deadline=None)
def test_chain_tokens_are_exactly_what_each_engine_call_saw(
    rollout: tuple[list[TokenEntry], str | None],
) -> None:
    """In a chain's one sequence every call's stored prompt ends where its generation begins."""
    entries, terminal = rollout
    for out in (prefix_merging(entries, terminal), per_request(entries, terminal)):
        for chain in out.chains:
            tokens = chain.token_ids
            for entry, start, end in chain.generation_spans():
                assert tokens[start:end] == entry.generation_token_ids
                stored = entry.prompt_token_ids
                assert tokens[start - len(stored) : start] == stored
                assert entry.prompt_is_delta or start == len(stored)


@given(st.integers(0, 5), st.integers(0, 30), st.booleans())
@example(at=0, index=0, as_delta=True)
def test_one_changed_token_is_never_delivered_behind_another_call(
    at: int, index: int, as_delta: bool
) -> None:
    """Changing any token of a stamped chain breaks the chain at or right after that call."""
    entries = linear_chain(6, as_delta=as_delta)
    ids = entries[at].prompt_token_ids.tolist() + entries[at].generation_token_ids.tolist()
    index %= len(ids)
    ids[index] += 1
    cut = len(entries[at].prompt_token_ids)
    entries[at] = changed(entries[at], prompt_token_ids=ids[:cut], generation_token_ids=ids[cut:])
    out = prefix_merging(entries)
    whole = ["c0", "c1", "c2", "c3", "c4", "c5"]
    if at == 5 and index >= 20 and not as_delta:
        assert paths(out) == {"main": whole}  # no child contradicts it; rows look at its digest
    else:
        assert whole not in paths(out).values()
        assert out.notes.parent_link_failures


def linear_chain(calls: int, *, as_delta: bool, per_call: int = 2) -> list[TokenEntry]:
    """``c0`` to ``c<n-1>``, each adding some prompt tokens and a generation."""
    entries: list[TokenEntry] = []
    cum: list[int] = []
    for at in range(calls):
        prompt, generated = cum + [10 + at] * per_call, [at, at + 1]
        entry = call(f"c{at}", prompt, generated, entries[-1] if entries else None)
        entries.append(delta(entry, len(cum)) if as_delta and at else entry)
        cum = prompt + generated
    return entries


def changed(entry: TokenEntry, **fields: Any) -> TokenEntry:
    """A copy whose recorded digest still speaks of the old tokens."""
    return TokenEntry.model_validate({**entry.model_dump(), **fields})


# --- copies ----------------------------------------------------------------------------------


def test_same_id_with_other_log_probs_is_trusted_in_no_copy() -> None:
    """Both copies are set aside, and the child that names the call starts a fragment."""
    root = call("a", [1], [2])
    other = changed(root, generation_log_probs=[-7.0])
    out = prefix_merging([root, call("b", [1, 2, 3], [4], root), other])
    assert paths(out) == {"main": ["b"]}
    assert out.notes.parent_link_failures == {
        "duplicate_call_id_conflict": 1,
        "parent_call_id_missing": 1,
    }
    assert out.notes.unresolved_parent_calls == ["a", "b"]
    assert out.notes.generated_tokens_captured == 1


def test_same_id_once_as_delta_and_once_in_full_is_a_conflict() -> None:
    """Even if both would rebuild to the same tokens."""
    root = call("a", [1], [2])
    child = call("b", [1, 2, 3], [4], root)
    out = prefix_merging([root, child, delta(child, 2)])
    assert out.notes.parent_link_failures == {"duplicate_call_id_conflict": 1}
    assert paths(out) == {"main": ["a"]}


@pytest.mark.parametrize(
    ("notes", "kept"), [([False, True], True), ([None, False], False), ([None, None], True)]
)
def test_copies_count_as_delivered_when_any_is(notes: list[bool | None], kept: bool) -> None:
    """One true delivery note is enough; one false note among unknown ones is a false."""
    copies = [call("a", [1], [2], delivered=note) for note in notes]
    for ordered in (copies, copies[::-1]):
        out = prefix_merging(ordered)
        assert paths(out) == ({"main": ["a"]} if kept else {})
        assert out.notes.undelivered_calls == ([] if kept else ["a"])


# --- deltas ----------------------------------------------------------------------------------


def test_delta_rebuilt_through_a_record_that_failed_its_digest_is_not_believed() -> None:
    """A wrong digest in the middle costs everything rebuilt through it, even if that one fits."""
    entries = linear_chain(5, as_delta=True)
    entries[2] = changed(entries[2], digest=compute_digest([99]))
    out = prefix_merging(entries)
    assert paths(out) == {"main": ["c0", "c1"]}
    assert out.notes.parent_link_failures == {"delta_chain_unreconstructable": 3}


def test_delta_over_a_full_record_with_a_wrong_digest_is_not_believed() -> None:
    """The full record itself stays: it stands for its own tokens."""
    entries = linear_chain(3, as_delta=True)
    entries[0] = changed(entries[0], digest=compute_digest([99]))
    out = prefix_merging(entries)
    assert paths(out) == {"main": ["c0"]}
    assert out.notes.parent_link_failures == {"delta_chain_unreconstructable": 2}


def test_delta_without_a_digest_of_its_own_cannot_be_rebuilt() -> None:
    """Nothing would prove that its base is the right one."""
    entries = linear_chain(2, as_delta=True)
    entries[1] = changed(entries[1], digest=None)
    out = prefix_merging(entries)
    assert out.notes.parent_link_failures == {"delta_chain_unreconstructable": 1}


def test_deltas_that_name_each_other_end() -> None:
    """A cycle of deltas has no anchor; none of it is rebuilt and nothing hangs."""
    one = delta(call("a", [1, 2], [3], "b"), 1)
    two = delta(call("b", [1, 2], [3], "a"), 1)
    itself = delta(call("c", [1, 2], [3], "c"), 1)
    out = prefix_merging([one, two, itself])
    assert out.notes.parent_link_failures == {"delta_chain_unreconstructable": 3}
    assert out.chains == []


def test_full_record_that_names_a_delta_is_verified_against_the_rebuilt_tokens() -> None:
    """Full and delta records mix freely in one chain."""
    entries = linear_chain(6, as_delta=True)
    full = linear_chain(6, as_delta=False)
    entries[3], entries[5] = full[3], full[5]
    out = prefix_merging(entries)
    assert paths(out) == {"main": [f"c{i}" for i in range(6)]}
    assert out.chains[0].token_ids == full[5].prompt_token_ids + full[5].generation_token_ids


@pytest.mark.parametrize("as_delta", [False, True])
def test_wrong_digest_is_found_among_much_to_hash(as_delta: bool) -> None:
    """Hashing on several threads gives each call its own verdict."""
    entries = linear_chain(40, as_delta=as_delta, per_call=2_000)
    assert len(prefix_merging(entries).chains[0].links) == 40
    entries[25] = changed(entries[25], digest=entries[24].digest)
    out = prefix_merging(entries)
    kept = 25 if as_delta else 26
    assert out.main_chain is not None
    assert out.main_chain.call_ids == [f"c{i}" for i in range(kept)]


@pytest.mark.parametrize("as_delta", [False, True])
def test_ten_thousand_turns_need_no_recursion(as_delta: bool) -> None:
    """A chain longer than any recursion limit is built and projected as one."""
    entries, cum = [], np.empty(0, np.int32)
    for at in range(10_000 if as_delta else 3_000):
        generated = np.array([at], np.int32)
        entry = TokenEntry(
            rollout_id="r",
            model_call_id=f"c{at:05}",
            prompt_token_ids=cum[:0] if as_delta and at else cum,
            generation_token_ids=generated,
            generation_log_probs=[-1.0],
            prompt_is_delta=as_delta and at > 0,
            parent_resolution="resolved" if at else "root",
            parent_call_id=f"c{at - 1:05}" if at else None,
        )
        cum = np.concatenate([cum, generated])
        if as_delta:
            entry.digest = compute_digest(cum)
        entries.append(entry)
    out = prefix_merging(entries[::-1])
    assert [len(chain.links) for chain in out.chains] == [len(entries)]
    assert out.chains[0].token_ids.array.tolist() == cum.tolist()


# --- parents ---------------------------------------------------------------------------------


def test_lost_call_is_not_recovered_by_prefix() -> None:
    """Grandparent tokens fit, but the lost call's tokens would become prompt: a fragment."""
    root = call("a", [1], [2])
    grandchild = call("c", [1, 2, 3, 4, 5], [6], "b")
    out = prefix_merging([root, grandchild])
    assert paths(out) == {"main": ["a"], "branch-0": ["c"]}
    assert out.notes.parent_link_failures == {"parent_call_id_missing": 1}


def test_drift_is_reported_with_call_and_position() -> None:
    """A template that drops earlier reasoning gives two rows and the index where they part."""
    first = call("a", [1, 2], [30, 31, 32, 5])
    second = call("b", [1, 2, 5, 9], [33, 6], first)
    out = prefix_merging([first, second])
    assert paths(out) == {"main": ["a"], "branch-0": ["b"]}
    assert out.notes.drift == {"b": 2}
    assert prefix_merging([first, changed(second, drift_at=1)]).notes.drift == {"b": 1}


def test_first_call_with_given_history_is_a_root() -> None:
    """A dataset dialogue matches nothing, but nothing was lost either."""
    fields = {"parent_resolution": "unresolved", "parent_resolution_reason": "no_match"}
    first = call("a", [1], [2], first_call=True, **fields)
    later = call("b", [8], [9], first_call=False, **fields)
    out = prefix_merging([first, later])
    assert out.notes.given_history == ["a"]
    assert out.notes.parent_link_failures == {"parent_unresolved": 1}
    ambiguous = fields | {"parent_resolution_reason": "ambiguous"}
    refused = prefix_merging([call("a", [1], [2], first_call=True, **ambiguous)])
    assert refused.notes.parent_link_failures == {"parent_unresolved": 1}


def test_completion_prompt_with_text_of_another_call_in_it_is_no_root() -> None:
    """A client that re-tokenised an answer would have policy text trained as prompt."""
    fields: dict[str, Any] = {"dialect": "completions"}
    first = call("a", [1, 2], [3, 4], created_at=1.0, **fields)
    cut = call("b", [1, 2, 3, 9], [5], created_at=2.0, **fields)
    out = prefix_merging([first, cut])
    assert out.notes.parent_link_failures == {"prompt_holds_unrecognised_text": 1}
    later = changed(first, created_at=3.0)
    assert prefix_merging([later, cut]).notes.parent_link_failures == {}
    unknown = changed(first, created_at=0.0)
    assert prefix_merging([unknown, cut]).notes.unresolved_parent_calls == ["b"]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_many_look_alikes_are_told_apart(data: st.DataObject) -> None:
    """Sequences that share ends and middles are still compared in full (prefix-only snapshots)."""
    entries = []
    for at in range(data.draw(st.integers(6, 14))):
        middle = data.draw(st.lists(st.integers(0, 1), min_size=5, max_size=5))
        entries.append(
            call(f"c{at:02}", [1, *middle[:2], 1, *middle[2:]], [1, 1], parent_resolution=None)
        )
    base = data.draw(st.sampled_from(entries))
    prompt = [*base.prompt_token_ids, *base.generation_token_ids, 3]
    entries.append(call("child", prompt, [4], parent_resolution=None))
    assert shown(prefix_merging(entries)) == shown_build(entries, None)


# --- retries ---------------------------------------------------------------------------------

BASE = call("p", [1], [2], created_at=1.0)


def retry(call_id: str, generated: list[int], **fields: Any) -> TokenEntry:
    return call(call_id, [1, 2, 3], generated, BASE, **fields)


def test_orphaned_retry_is_kept_as_evidence_but_in_no_chain() -> None:
    """The attempt that the agent went on with is kept, whichever came first."""
    first, second = retry("a", [7, 8]), retry("b", [7, 9])
    turn = call("c", [1, 2, 3, 7, 9, 20], [5], second)
    out = prefix_merging([BASE, first, second, turn])
    assert paths(out) == {"main": ["p", "b", "c"]}
    assert (out.quarantined, out.undecided, out.notes.unresolved_retries) == (["a"], [], [])


def test_final_retry_without_notes_is_undecided() -> None:
    """Nothing says which answer the agent kept: the smallest id is only a placeholder."""
    out = prefix_merging([BASE, retry("a", [7, 8]), retry("b", [7, 9])])
    assert paths(out) == {"main": ["p", "a"]}
    assert (out.quarantined, out.undecided) == (["b"], ["a", "b"])
    assert out.notes.unresolved_retries == ["a", "b"]


def test_final_retry_of_an_undelivered_attempt_is_decided() -> None:
    """Known as undelivered: the other answer ends the chain."""
    lost = retry("a", [7, 8], delivered=False, created_at=2.0)
    kept = retry("b", [7, 9], created_at=3.0, timings={"total_ms": 10.0})
    out = prefix_merging([BASE, lost, kept])
    assert paths(out) == {"main": ["p", "b"]}
    assert (out.notes.undelivered_calls, out.undecided) == (["a"], [])


@pytest.mark.parametrize(
    ("begun", "total_ms", "undecided"),
    [(4.0, 900.0, True), (2.5, 900.0, False), (4.0, None, False)],
)
def test_asking_again_after_the_answer_had_ended_makes_it_doubtful(
    begun: float, total_ms: float | None, undecided: bool
) -> None:
    """The agent asked again for what it had, or for what a proxy had buffered."""
    timings = {"total_ms": total_ms} if total_ms else None
    kept = retry("a", [7], created_at=2.0, timings=timings)
    again = retry("b", [8], created_at=begun, delivered=False)
    out = prefix_merging([BASE, kept, again])
    assert out.undecided == (["a"] if undecided else [])
    assert out.notes.unresolved_retries == out.undecided
    assert prefix_merging([BASE, kept, again], "a").undecided == []


def test_same_body_with_another_rendering_is_a_retry_and_choices_are_kept_apart() -> None:
    """A clock in the prompt does not hide a retry; choices of a batch are no retries."""
    one = call("x.0", [1, 2, 3], [7], BASE, request_digest="d")
    two = call("x.1", [1, 2, 4], [8], BASE, request_digest="d")
    again = call("y.0", [1, 2, 5], [9], BASE, request_digest="d")
    out = prefix_merging([BASE, one, two, again])
    assert out.quarantined == ["y.0"]
    assert out.undecided == ["x.0", "y.0"]
    assert paths(out) == {"main": ["p", "x.0"], "branch-0": ["p", "x.1"]}


def test_same_request_at_another_place_is_no_retry() -> None:
    """Compaction may recreate an identical prompt later; only siblings are each other's retry."""
    first = call("a", [1], [5, 6], request_digest="d")
    middle = call("b", [1, 5, 6, 2], [3], first)
    again = call("c", [1, 5, 6, 2, 3, 1], [5, 8], middle, request_digest="d")
    out = prefix_merging([first, middle, again])
    assert paths(out) == {"main": ["a", "b", "c"]}
    assert out.quarantined == []


def test_below_a_quarantined_call_nothing_is_listed() -> None:
    """Its descendants are in no chain, and their own retries are not judged."""
    lost, kept = call("a", [1], [7]), call("b", [1], [8])
    below = [call(f"d{i}", [1, 7, 2], [i], lost) for i in (3, 4)]
    end = call("e", [1, 8, 2], [5], kept)
    out = prefix_merging([lost, kept, *below, end], "e")
    assert paths(out) == {"main": ["b", "e"]}
    assert (out.quarantined, out.undecided) == (["a"], [])


# --- leaves that nobody kept ------------------------------------------------------------------


def test_aborted_turn_ends_no_chain_but_may_be_continued() -> None:
    """Resumed with exactly its tokens it is an ordinary link with an empty interstitial."""
    cut = call("a", [1], [4, 5], finish_reason="abort")
    assert prefix_merging([cut]).chains == []
    assert prefix_merging([cut]).notes.aborted_calls == ["a"]
    resumed = call("b", [1, 4, 5], [6], cut)
    out = prefix_merging([cut, resumed])
    assert paths(out) == {"main": ["a", "b"]}
    assert out.chains[0].token_ids == [1, 4, 5, 6]


def test_aborted_call_without_tokens_is_accepted_and_marked() -> None:
    """An engine that aborts before the first token leaves an empty call."""
    out = prefix_merging([BASE, retry("a", [], finish_reason="abort")])
    assert paths(out) == {"main": ["p"]}
    assert out.notes.empty_generation_calls == ["a"]


def test_what_a_set_aside_leaf_extended_ends_the_chain() -> None:
    """And counts as extended among its own retries."""
    first, second = retry("a", [7]), retry("b", [8])
    leaf = call("c", [1, 2, 3, 8, 4], [5], second, delivered=False)
    out = prefix_merging([BASE, first, second, leaf])
    assert paths(out) == {"main": ["p", "b"]}
    assert out.quarantined == ["a"]


def test_attributed_terminal_is_never_set_aside() -> None:
    """A response id that the agent reports proves delivery, whatever the note says."""
    last = retry("a", [7], delivered=False)
    assert paths(prefix_merging([BASE, last])) == {"main": ["p"]}
    out = prefix_merging([BASE, last], "a")
    assert paths(out) == {"main": ["p", "a"]}
    assert out.notes.terminal_chain == "delivered"


# --- chains ----------------------------------------------------------------------------------


def test_calls_after_the_terminal_are_in_no_chain() -> None:
    """Main ends at the scored call; branches that do not pass it stay."""
    scored = retry("a", [7])
    after = [call(f"d{i}", [1, 2, 3, 7, i], [5], scored) for i in (1, 2)]
    branch = call("side", [1, 2, 9], [5], BASE)
    out = prefix_merging([BASE, scored, *after, branch], "a")
    assert paths(out) == {"main": ["p", "a"], "branch-0": ["p", "side"]}


def test_sub_agents_get_chains_of_their_own() -> None:
    """Interleaved agents are told apart by their links, not by the order of calls."""
    p1, s1 = call("p1", [1, 2], [3], created_at=1.0), call("s1", [50], [51], created_at=2.0)
    p2 = call("p2", [1, 2, 3, 4], [5], p1, created_at=3.0)
    s2 = call("s2", [50, 51, 52], [53], s1, created_at=4.0)
    out = prefix_merging([p1, s1, p2, s2])
    assert paths(out) == {"main": ["p1", "p2"], "branch-0": ["s1", "s2"]}


def test_side_call_is_no_parent_by_coincidence_of_tokens() -> None:
    """A recorded root stays a root although another call's tokens are its prefix."""
    side = call("t", [1], [2], created_at=1.0)
    main = call("p1", [1, 2, 7, 8], [9], created_at=2.0)
    assert len(prefix_merging([side, main]).chains) == 2


@pytest.mark.parametrize(
    ("terminal", "state"),
    [("frag", "broken"), ("ab", "broken"), ("void", "not_captured"), ("gone", "not_captured")],
)
def test_terminal_that_cannot_be_delivered_leaves_the_chains_alone(
    terminal: str, state: str
) -> None:
    """No chain is cut or put first; main is chosen as without a terminal."""
    entries = [
        BASE,
        call("frag", [60], [61], parent_resolution="unresolved", created_at=9.0),
        call("ab", [1, 2, 9], [5], BASE, finish_reason="abort"),
        call("void", [1, 2, 8], [], BASE),
    ]
    out = prefix_merging(entries, terminal)
    assert out.notes.terminal_chain == state
    assert out.main_chain is not None
    assert out.main_chain.call_ids[0] == "p"


def test_per_request_gives_one_chain_per_call_by_prompt_length() -> None:
    """Deltas are rebuilt; nothing is joined."""
    entries = linear_chain(4, as_delta=True)
    out = run_builder(entries[::-1], "per_request")
    assert paths(out) == {f"req-{i}": [f"c{i}"] for i in range(4)}
    full = linear_chain(4, as_delta=False)
    assert [c.root_prompt for c in out.chains] == [e.prompt_token_ids for e in full]
    # One array serves all: the prompts are views of the longest.
    bases = {id(chain.root_prompt.array.base) for chain in out.chains[1:3]}
    assert bases == {id(out.chains[3].root_prompt.array.base)}


def test_unknown_builder_is_refused() -> None:
    """The message names the builders there are."""
    with pytest.raises(InvalidInputError, match="per_request, prefix_merging"):
        run_builder([], "guess")


def test_chain_with_uneven_log_probs_does_not_validate() -> None:
    """A chain made by hand, of records made without validation, is caught before projection."""
    entry = call("a", [1], [2, 3])
    entry.__dict__["generation_log_probs"] = LogProbs([-1.0])
    with pytest.raises(InvalidRecordError, match="2 generated tokens but 1 log-probs"):
        Chain("main", [ChainLink(entry, TokenIds(()))], entry.prompt_token_ids).validate()


# --- copies and self-links -------------------------------------------------------------------


@pytest.mark.parametrize("as_delta", [False, True])
def test_copies_of_a_delta_agree_only_if_all_their_digests_do(as_delta: bool) -> None:
    """One without a digest does not hide that two others contradict each other."""
    a = call("a", [1], [2])
    b = call("b", [1, 2, 3], [4], a)
    b = delta(b, 2) if as_delta else b
    bare, wrong = changed(b, digest=None), changed(b, digest=compute_digest([9]))
    for copies in itertools.permutations([b, bare, wrong]):
        failures = prefix_merging([a, *copies]).notes.parent_link_failures
        assert failures == ({"duplicate_call_id_conflict": 1} if as_delta else {})
    for copies in itertools.permutations([b, bare, b]):
        failures = prefix_merging([a, *copies]).notes.parent_link_failures
        assert "duplicate_call_id_conflict" not in failures


def test_a_call_that_names_itself_is_a_mismatch() -> None:
    """Its parent is in the snapshot, and no prompt starts with its own answer."""
    out = prefix_merging([call("a", [1], [2], "a")])
    assert out.notes.parent_link_failures == {"parent_digest_mismatch": 1}
    assert paths(out) == {"main": ["a"]}


def test_a_recorded_length_of_zero_is_a_length() -> None:
    """A parent that says so is not crossed."""
    a = call("a", [1], [2], cum_len=0)
    b = call("b", [1, 2, 3], [4], a)
    out = prefix_merging([a, b])
    assert out.notes.parent_link_failures == {"parent_digest_mismatch": 1}
    assert prefix_merging([a]).notes.digest_mismatches == ["a"]
