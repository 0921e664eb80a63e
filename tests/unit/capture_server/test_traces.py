"""Training rows: properties against the slow reference, and the delivery rules case by case."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_server.trajectories.rows import RolloutTraces, TraceRow
from capture_server.trajectories.traces import build_traces
from middleware.errors import InvalidInputError
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import TokenEntry, compute_digest
from tests.unit.capture_server.reference_builder import shown_rows
from tests.unit.capture_server.rollout_factory import call, delta, rollouts

Rollout = tuple[list[TokenEntry], str | None]


def snapshot(entries: list[TokenEntry], *, incomplete: bool = False) -> TokenCaptureSnapshot:
    return TokenCaptureSnapshot("r", entries, incomplete, snapshot_id="s1", version=3)


def traces(entries: list[TokenEntry], terminal: str | None = None, **options: Any) -> RolloutTraces:
    return build_traces(entries, explicit_terminal_call_id=terminal, **options)


def known(entries: list[TokenEntry], terminal: str | None) -> str | None:
    """An explicit call id that no entry has is only a note (terminal.py)."""
    return terminal if any(e.model_call_id == terminal for e in entries) else None


def shown(row: TraceRow) -> tuple[Any, ...]:
    starts = "root" if row.starts["kind"] == "root" else row.starts["reason"]
    arrays = row.token_ids.tolist(), row.loss_mask.tolist(), row.log_probs.tolist()
    cut = row.cut == "undecided"
    return (row.model_call_ids, *arrays, starts, row.ends, cut, row.mask_sample)


def ids(built: RolloutTraces) -> list[list[str]]:
    return [row.model_call_ids for row in built.rows]


# --- properties ------------------------------------------------------------------------------


@given(rollouts(), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_rows_agree_with_the_slow_reference(
    rollout: Rollout, incomplete: bool, exclude: bool
) -> None:
    """Any small rollout gives exactly the rows, masks and main row that the rules give."""
    entries, terminal = rollout
    built = build_traces(
        snapshot(entries, incomplete=incomplete),
        explicit_terminal_call_id=terminal,
        fragments="exclude" if exclude else "include",
    )
    expected = shown_rows(entries, known(entries, terminal), incomplete=incomplete, exclude=exclude)
    assert [shown(row) for row in built.rows] == expected["rows"]
    assert built.main_row == expected["main_row"]
    assert built.mask_sample == (incomplete or expected["mask_sample"])


@given(rollouts(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_rows_do_not_depend_on_the_order_of_entries(
    rollout: Rollout, shuffler: random.Random
) -> None:
    """The JSON form of shuffled entries is byte for byte the same."""
    entries, terminal = rollout
    first = orjson.dumps(
        build_traces(snapshot(entries), explicit_terminal_call_id=terminal).to_json()
    )
    shuffler.shuffle(entries)
    again = build_traces(snapshot(entries), explicit_terminal_call_id=terminal)
    assert orjson.dumps(again.to_json()) == first


@given(rollouts(), st.sampled_from(["prefix_merging", "per_request"]))
@settings(max_examples=100, deadline=None)
def test_every_trained_token_is_one_sampled_token_with_its_own_log_prob(
    rollout: Rollout, builder: str
) -> None:
    """Mask 1 stands exactly on the trained calls' generations, each call in one row at most."""
    entries, terminal = rollout
    by_id = {entry.model_call_id: entry for entry in entries}
    trained: list[str] = []
    for row in traces(entries, terminal, builder=builder).rows:
        assert row.token_ids.shape == row.loss_mask.shape == row.log_probs.shape
        left = row.loss_mask.copy()
        for span in row.call_spans:
            entry, place = by_id[span.model_call_id], slice(span.start, span.end)
            assert row.token_ids[place].tolist() == entry.generation_token_ids.tolist()
            if span.trained:
                assert row.log_probs[place].tolist() == entry.generation_log_probs.tolist()
                assert row.loss_mask[place].all()
                left[place] = 0
                trained.append(span.model_call_id)
        assert not left.any()
        assert not row.log_probs[row.loss_mask == 0].any()
    assert len(trained) == len(set(trained))


@given(rollouts())
@settings(max_examples=100, deadline=None)
def test_per_request_trains_the_same_calls_as_prefix_merging(rollout: Rollout) -> None:
    """Only the cut into rows differs: same calls, same masking, same scored call."""
    entries, terminal = rollout
    merged = traces(entries, terminal)
    single = traces(entries, terminal, builder="per_request")

    def trained(built: RolloutTraces) -> set[tuple[str, bool]]:
        return {
            (span.model_call_id, row.mask_sample)
            for row in built.rows
            for span in row.call_spans
            if span.trained
        }

    assert trained(single) == trained(merged)
    assert all(len(row.call_spans) == 1 for row in single.rows)


@given(st.integers(0, 4), st.integers(0, 40), st.booleans())
@settings(max_examples=150, deadline=None)
def test_changed_token_is_never_trained_unmasked_with_what_it_changed(
    at: int, index: int, as_delta: bool
) -> None:
    """Whatever token of a stamped chain changes, no unmasked row holds the changed record."""
    entries = chain_of(5, as_delta=as_delta)
    tokens = [*entries[at].prompt_token_ids, *entries[at].generation_token_ids]
    index %= len(tokens)
    tokens[index] += 1
    cut = len(entries[at].prompt_token_ids)
    entries[at] = TokenEntry.model_validate(
        entries[at].model_dump()
        | {"prompt_token_ids": tokens[:cut], "generation_token_ids": tokens[cut:]}
    )
    for row in traces(entries).rows:
        assert row.mask_sample or f"c{at}" not in row.model_call_ids


def chain_of(calls: int, *, as_delta: bool = False) -> list[TokenEntry]:
    entries: list[TokenEntry] = []
    cum: list[int] = []
    for at in range(calls):
        prompt, generated = [*cum, 10 + at, 20 + at], [at, at + 1]
        entry = call(f"c{at}", prompt, generated, entries[-1] if entries else None)
        entries.append(delta(entry, len(cum)) if as_delta and at else entry)
        cum = prompt + generated
    return entries


# --- shape -----------------------------------------------------------------------------------


def test_row_is_laid_out_as_documented() -> None:
    """Ids, mask, log-probs and spans of a two-call chain, in arrays and in JSON."""
    first = call("a", [5, 6], [7, 8], weight_version=3, finish_reason="tool_calls")
    sampling = {"temperature": 0.7, "logprobs_mode": "raw_logprobs"}
    second = call(
        "b", [5, 6, 7, 8, 9], [10], first, weight_version=3, weight_version_end=4,
        agent_id="planner", sampling=sampling, guided=True,
    )  # fmt: skip
    built = build_traces(snapshot([second, first]))
    (row,) = built.rows
    assert row.token_ids.dtype == np.int32
    assert row.loss_mask.dtype == np.uint8
    assert row.log_probs.dtype == np.float64
    shown_row = row.to_json()
    spans = shown_row.pop("call_spans")
    assert shown_row == {
        "row_id": "main",
        "model_call_ids": ["a", "b"],
        "token_ids": [5, 6, 7, 8, 9, 10],
        "loss_mask": [0, 0, 1, 1, 0, 1],
        "log_probs": [0.0, 0.0, -0.25, -0.5, 0.0, -0.25],
        "starts": {"kind": "root"},
        "ends": "stop",
        "mask_sample": False,
        "mask_reasons": [],
        "weight_version_min": 3,
        "weight_version_max": 4,
    }
    assert spans[0] == {
        "model_call_id": "a", "start": 2, "end": 4, "weight_version": 3, "agent_id": None,
        "sampling": None, "logprobs_mode": None, "guided": False, "finish_reason": "tool_calls",
        "trained": True,
    }  # fmt: skip
    assert spans[1] == {
        "model_call_id": "b", "start": 5, "end": 6, "weight_version": 3, "agent_id": "planner",
        "sampling": sampling, "logprobs_mode": "raw_logprobs", "guided": True,
        "finish_reason": "stop", "trained": True, "weight_version_end": 4, "mixed": True,
    }  # fmt: skip
    answer = built.to_json(arrays=True)
    written = orjson.loads(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY))
    assert written == built.to_json()
    assert (written["main_row"], written["snapshot_id"], written["version"]) == (0, "s1", 3)


def test_arrays_of_a_row_are_read_only() -> None:
    """Nobody downstream can change a row by accident."""
    (row,) = traces(chain_of(2)).rows
    for array in (row.token_ids, row.loss_mask, row.log_probs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize("wrong", [{"builder": "guess"}, {"fragments": "some"}])
def test_unknown_choices_are_refused(wrong: dict[str, Any]) -> None:
    """The message names the choices there are."""
    with pytest.raises(InvalidInputError, match="use one of"):
        build_traces([], **wrong)


# --- shared calls ----------------------------------------------------------------------------


def test_call_shared_by_branches_is_trained_in_the_main_row_only() -> None:
    """The branch holds it as context with mask 0."""
    root = call("a", [1], [2])
    left, right = call("l", [1, 2, 3], [4], root), call("r", [1, 2, 5, 5], [6], root)
    rows = traces([root, left, right], "r").rows
    assert [row.model_call_ids for row in rows] == [["a", "r"], ["a", "l"]]
    assert rows[0].loss_mask.tolist() == [0, 1, 0, 0, 1]
    assert rows[1].loss_mask.tolist() == [0, 0, 0, 1]
    assert [span.trained for span in rows[1].call_spans] == [False, True]


def test_row_that_trains_nothing_of_its_own_is_left_out() -> None:
    """A chain cut back to what another row trains would only repeat it."""
    root = call("a", [1], [2])
    side = call("s", [1, 2, 9, 9, 9], [5], root)
    retries = [call(f"r{i}", [1, 2, 3], [i], root) for i in (7, 8)]
    built = traces([root, side, *retries])
    # Main is the chain with the undecided retry: masked, so its first call is trained elsewhere.
    assert ids(built) == [["a", "s"]]
    assert built.rows[0].loss_mask.tolist() == [0, 1, 0, 0, 0, 1]
    assert built.main_row is None
    assert built.metrics["no_main_chain"] is True


# --- undecided, undelivered ------------------------------------------------------------------


def test_row_ends_before_an_undecided_call_and_is_masked_without_terminal() -> None:
    """The reward may belong to an answer that cannot be known."""
    root = call("a", [1], [2], finish_reason="tool_calls")
    retries = [call(f"r{i}", [1, 2, 3], [i], root) for i in (7, 8)]
    (row,) = traces([root, *retries]).rows
    assert (row.model_call_ids, row.ends, row.cut) == (["a"], "tool_calls", "undecided")
    assert row.mask_reasons == ["undecided"]
    assert row.to_json()["cut"] == "undecided"


def test_undecided_first_call_leaves_no_row() -> None:
    """A rollout of nothing but an unknown retry is masked."""
    built = traces([call("a", [1], [2]), call("b", [1], [3])])
    assert (built.rows, built.mask_sample, built.main_row) == ([], True, None)


def test_undecided_branch_is_trained_up_to_the_doubt_beside_a_delivered_terminal() -> None:
    """What the verifier scored is known, so the cut branch is sound."""
    root = call("a", [1], [2])
    end = call("z", [1, 2, 9], [5], root)
    side = call("s", [50], [51])
    retries = [call(f"r{i}", [50, 51, 3], [i], side) for i in (7, 8)]
    built = traces([root, end, side, *retries], "z")
    assert ids(built) == [["a", "z"], ["s"]]
    assert [row.mask_sample for row in built.rows] == [False, False]
    assert built.rows[1].cut == "undecided"


def test_undelivered_leaf_is_in_no_row() -> None:
    """The row ends where the client's knowledge ends."""
    root = call("a", [1], [2])
    built = traces([root, call("b", [1, 2, 3], [4], root, delivered=False)])
    assert ids(built) == [["a"]]
    assert built.metrics["undelivered_calls"] == ["b"]


# --- fragments -------------------------------------------------------------------------------


def test_fragment_is_a_sound_row_of_its_own() -> None:
    """It names the link failure and the resolver's reason; earlier turns in it have mask 0."""
    first = call("a", [1], [2])
    cut = call(
        "b", [1, 2, 7], [8], parent_resolution="unresolved", parent_resolution_reason="no_match"
    )
    built = traces([first, cut])
    assert [row.starts for row in built.rows] == [
        {"kind": "root"},
        {"kind": "fragment", "reason": "parent_unresolved", "resolution_reason": "no_match"},
    ]
    assert built.rows[1].loss_mask.tolist() == [0, 0, 0, 1]
    assert built.mask_sample is False
    assert ids(traces([first, cut], fragments="exclude")) == [["a"]]


def test_compaction_does_not_cost_the_scored_row() -> None:
    """A terminal whose path begins at a fragment is the main row, also without fragments."""
    first = call("a", [1], [2])
    compacted = call("b", [70, 71], [8], parent_resolution="unresolved")
    end = call("c", [70, 71, 8, 9], [10], compacted)
    after = call("d", [70, 71, 8, 9, 10, 3], [11], end)
    for fragments in ("include", "exclude"):
        built = traces([first, compacted, end, after], "c", fragments=fragments)
        assert ids(built) == [["b", "c"], ["a"]]
        assert (built.main_row, built.mask_sample) == (0, False)
        assert built.metrics["terminal_attribution"]["chain"] == "broken"


def test_lost_call_is_reported_in_the_fragment_behind_it() -> None:
    """The record that named it starts a row with that reason."""
    built = traces([call("a", [1], [2]), call("c", [1, 2, 3, 4, 5], [6], "b")])
    assert built.rows[1].starts == {"kind": "fragment", "reason": "parent_call_id_missing"}


def test_dropped_reasoning_gives_two_rows_and_names_the_break() -> None:
    """C14: no assertion, no slicing by length; call and position are reported."""
    first = call("a", [1, 2], [30, 31, 32, 5])
    second = call("b", [1, 2, 5, 9], [33, 6], first)
    built = traces([first, second])
    assert [row.loss_mask.sum() for row in built.rows] == [4, 2]
    assert built.metrics["drift"] == [{"model_call_id": "b", "drift_at": 2, "parent_call_id": "a"}]
    assert built.metrics["parent_link_failures"] == {"parent_digest_mismatch": 1}


# --- what masks a rollout ---------------------------------------------------------------------


def reasons(built: RolloutTraces) -> set[tuple[str, ...]]:
    return {tuple(row.mask_reasons) for row in built.rows}


def test_incomplete_rollout_has_masked_rows() -> None:
    """A client may hold model text whose tokens are unknown."""
    built = build_traces(snapshot(chain_of(2), incomplete=True))
    assert reasons(built) == {("capture_incomplete",)}
    assert built.mask_sample is True
    assert built.metrics["capture_incomplete"] is True


def test_declared_response_that_nobody_captured_masks_all_rows() -> None:
    """The reward belongs to text that cannot be shown."""
    built = build_traces(chain_of(2), declared_response_id="resp-gone")
    assert reasons(built) == {("declared_terminal_not_matched",)}
    assert (built.mask_sample, built.main_row) == (True, None)


@pytest.mark.parametrize(
    "scored",
    [call("x", [1, 2, 9], [], "a"), call("x", [1, 2, 9], [5], "a", finish_reason="abort")],
)
def test_terminal_that_cannot_be_shown_masks_all_rows(scored: TokenEntry) -> None:
    """An empty or aborted scored call."""
    built = traces([call("a", [1], [2]), scored], "x")
    assert {"terminal_not_delivered"} == {r for row in built.rows for r in row.mask_reasons}
    assert (built.mask_sample, built.main_row) == (True, None)


def test_two_attempts_under_one_id_are_masked() -> None:
    """Sibling roots that both went on; a delivered terminal says which one counts."""
    one, two = call("a", [1], [2]), call("b", [1], [3])
    ends = [call("c", [1, 2, 9], [4], one), call("d", [1, 3, 9], [5], two)]
    built = traces([one, two, *ends])
    assert reasons(built) == {("parallel_attempts",)}
    assert built.metrics["parallel_attempts"] is True
    scored = traces([one, two, *ends], "d")
    assert (ids(scored), scored.mask_sample) == ([["b", "d"]], False)


@pytest.mark.parametrize("wrong", [{"digest": compute_digest([9])}, {"cum_len": 99}])
def test_last_record_that_contradicts_itself_masks_its_row(wrong: dict[str, Any]) -> None:
    """No child checks the last call of a chain, so the row does."""
    entries = chain_of(3)
    entries[2] = entries[2].model_copy(update=wrong)
    assert reasons(traces(entries)) == {("recorded_digest_mismatch",)}


def test_no_records_is_no_row_and_masked() -> None:
    """An empty snapshot answers in the usual shape."""
    answer = build_traces(snapshot([])).to_json()
    assert (answer["rows"], answer["mask_sample"], answer["main_row"]) == ([], True, None)
    assert answer["metrics"]["n_calls"] == 0


# --- the main row -----------------------------------------------------------------------------


def test_main_row_without_terminal_needs_the_only_chain() -> None:
    """A harness's title request often finishes first, so no chain is preferred."""
    chain, side = chain_of(2), call("t", [50], [51])
    assert traces(chain).main_row == 0
    assert traces([*chain, side]).main_row is None
    assert traces([*chain, side], "c1").main_row == 0
    assert traces(chain, builder="per_request").main_row is None
    assert traces(chain[:1], builder="per_request").main_row == 0


def test_per_request_main_row_is_the_scored_call() -> None:
    """Calls after the scored one are left out there too."""
    built = traces(chain_of(4), "c2", builder="per_request")
    assert ids(built) == [["c0"], ["c1"], ["c2"]]
    assert built.main_row == 2
    assert [row.row_id for row in built.rows] == ["req-0", "req-1", "req-2"]


def test_scored_row_is_cut_behind_the_terminal() -> None:
    """What the agent asked after its final answer is not trained."""
    built = traces(chain_of(4), "c1")
    assert ids(built) == [["c0", "c1"]]


def test_a_recorded_length_of_zero_masks_its_row() -> None:
    """Zero contradicts the tokens; an absent length says nothing."""
    (row,) = traces([call("a", [1], [2], cum_len=0)]).rows
    assert row.mask_reasons == ["recorded_digest_mismatch"]
    (row,) = traces([call("a", [1], [2], cum_len=None)]).rows
    assert row.mask_reasons == []


def test_the_choice_of_fragments_is_recorded() -> None:
    """Whoever verifies rows can tell left out from forgotten."""
    entries = [call("a", [1], [2])]
    assert traces(entries).metrics["fragments"] == "include"
    assert traces(entries, fragments="exclude").metrics["fragments"] == "exclude"
