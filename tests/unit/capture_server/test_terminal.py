"""Terminal attribution beyond the golden vectors: normalising, trimming, delivery notes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_server.trajectories.terminal import TerminalAttribution, resolve_terminal
from middleware.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint
from middleware.normalise import normalise_items
from middleware.records import TokenEntry
from tests.unit.capture_server.rollout_factory import call, delta

Item = dict[str, Any]


def said(text: Any, **more: Any) -> Item:
    return {"type": "message", "role": "assistant", "content": text, **more}


def answered(call_id: str, tokens: list[int], *items: Item, **fields: Any) -> TokenEntry:
    """A root call with this answer, stamped as capture stamps it."""
    context = [{"role": "user", "content": "q"}]
    stamp = assistant_fingerprint(normalise_items([*context, *items]))
    return call(
        call_id, [1, 2], tokens, output_items=list(items), response_id=f"resp-{call_id}",
        continuation_fingerprint=stamp, fingerprint_version=FINGERPRINT_VERSION, **fields,
    )  # fmt: skip


def named(entries: list[Any], *items: Item, **asked: Any) -> tuple[str | None, str]:
    found = resolve_terminal(entries, {"output": list(items)}, **asked)
    return found.model_call_id, found.reason


@pytest.mark.parametrize(
    "echo",
    [
        [{"type": "reasoning", "summary": []}, said("ok")],
        [said("<think>r</think>ok")],
        [said([{"type": "output_text", "text": "ok", "annotations": []}], status="completed")],
        [{"role": "assistant", "content": "ok", "reasoning_content": "r"}],
    ],
)
def test_reasoning_and_volatile_fields_do_not_hide_the_answer(echo: list[Item]) -> None:
    """The verified response is compared after the same normalising as the stamps."""
    entries = [answered("a", [3], said("ok")), answered("b", [4], said("no"))]
    assert named(entries, *echo) == ("a", "response_has_no_id")


def test_trimmed_twin_makes_content_ambiguous() -> None:
    """Harnesses trim answers: two that differ only in whitespace cannot be told apart."""
    entries = [answered("a", [3], said("ok")), answered("b", [4], said("ok\n"))]
    assert named(entries, said("ok")) == (None, "response_has_no_id,content_ambiguous")
    blocks = [
        answered("a", [3], said("ok")),
        answered("b", [4], said([{"type": "text", "text": " ok"}])),
    ]
    assert named(blocks, said("ok")) == (None, "response_has_no_id,content_ambiguous")


def test_trimming_alone_names_no_call() -> None:
    """Whitespace is content: an exact match is needed to name a call."""
    entries = [answered("a", [3], said("ok "))]
    assert named(entries, said("ok")) == (None, "response_has_no_id,no_content_match")


def test_undelivered_call_is_not_named_by_content_alone() -> None:
    """Of two attempts with one text, the delivered one is meant."""
    lost = answered("a", [3], said("ok"), delivered=False)
    kept = answered("b", [4], said("ok"))
    assert named([lost], said("ok")) == (None, "response_has_no_id,no_content_match")
    assert named([lost, kept], said("ok")) == ("b", "response_has_no_id")


def test_reported_response_id_proves_delivery() -> None:
    """Then content may corroborate it, and its twin no longer speaks against it."""
    lost = answered("a", [3], said("ok"), delivered=False)
    response = {"id": "resp-a", "output": [said("ok")]}
    assert resolve_terminal([lost], response) == TerminalAttribution(
        "a", "response_id", "corroborated_by=content_cumulative"
    )
    twin = answered("b", [4], said("ok"))
    assert resolve_terminal([lost, twin], response).model_call_id == "a"


def test_reasoning_only_response_is_not_model_authored() -> None:
    """It must not match calls that said nothing either."""
    entries = [answered("a", [3], {"type": "reasoning", "summary": []})]
    assert named(entries, {"type": "reasoning", "summary": []}) == (
        None,
        "response_has_no_id,no_model_authored_output",
    )


def test_output_that_cannot_be_hashed_abstains() -> None:
    """A broken response attributes nothing and raises nothing."""
    nested: Any = "x"
    for _ in range(3000):
        nested = [{"type": "tool_result", "content": nested}]
    for content in (5, [5], [{"text": "x", "type": 3}], "\ud800", nested):
        assert named([answered("a", [3], said("ok"))], said(content))[0] is None


def test_unknown_explicit_call_is_noted_before_a_failing_declaration() -> None:
    """Reasons stand in naming order."""
    found = resolve_terminal([], None, "gone", declared_response_id="gone")
    assert found.reason == "explicit_terminal_not_captured,declared_terminal_not_captured"


def test_ledger_rows_may_be_objects_or_mappings() -> None:
    """A manifest's rows are attributed by their recorded fingerprints."""
    items = [said("ok")]
    row = {
        "model_call_id": "m1", "response_id": "r1", "cum_len": 2, "cumulative_hash": "h1",
        "output_fingerprint": assistant_fingerprint(items), "continuation_fingerprint": None,
        "fingerprint_version": 0,
    }  # fmt: skip
    as_object = type("Row", (), row)()
    for entry in (row, as_object):
        found = resolve_terminal([entry], {"output": items})
        assert (found.model_call_id, found.method) == ("m1", "content")


copies = st.lists(
    st.fixed_dictionaries(
        {
            "call_id": st.sampled_from(["a", "a", "b"]),
            "tokens": st.sampled_from([[3], [3], [4]]),
            "said": st.sampled_from(["ok", "ok", "no", "ok "]),
            "response_id": st.sampled_from(["r1", "r2", None]),
            "delivered": st.sampled_from([None, None, True, False]),
            "delta": st.booleans(),
            "digest": st.booleans(),
        }
    ),
    max_size=5,
)


def copy_of(one: dict[str, Any]) -> TokenEntry:
    entry = answered(one["call_id"], one["tokens"], said(one["said"]), delivered=one["delivered"])
    update: dict[str, Any] = {"response_id": one["response_id"]}
    update |= {} if one["digest"] else {"digest": None}
    entry = entry.model_copy(update=update)
    return delta(entry, 1) if one["delta"] else entry


@given(
    copies, st.randoms(use_true_random=False), st.sampled_from(["r1", "r2", "", None]),
    st.sampled_from([None, "a", "b"]), st.sampled_from([None, None, "r1", "r2"]),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_attribution_does_not_depend_on_the_order_of_entries(
    drawn: list[dict[str, Any]], shuffler: random.Random, response_id: str | None,
    explicit: str | None, declared: str | None,
) -> None:  # fmt: skip
    """Copies of one call may contradict each other; which comes first decides nothing."""
    entries = [copy_of(one) for one in drawn]
    response = {"id": response_id, "output": [said("ok")]}
    first = resolve_terminal(entries, response, explicit, declared_response_id=declared)
    for _ in range(3):
        shuffler.shuffle(entries)
        again = resolve_terminal(entries, response, explicit, declared_response_id=declared)
        assert again == first


def test_a_call_whose_copies_disagree_is_no_ones_twin() -> None:
    """It would be counted with another call by one of its copies only."""
    one = answered("a", [3], said("ok"))
    twin = answered("b", [3], said("ok"))
    other = answered("a", [4], said("ok"))
    assert named([one, twin], said("ok"))[0] == "a"
    for entries in ([one, other, twin], [other, one, twin], [twin, other, one]):
        assert named(entries, said("ok")) == (None, "response_has_no_id,content_ambiguous")
        assert named(entries, said("ok"), explicit_call_id="b")[0] == "b"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "id", "output", "tool_calls"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(_json, _json)
def test_attribution_never_raises(output: Any, response_id: Any) -> None:
    """Whatever a verifier hands over as a response."""
    entries = [answered("a", [3], said("ok"))]
    found = resolve_terminal(entries, {"id": response_id, "output": output})
    assert found.model_call_id in (None, "a")
    assert resolve_terminal(entries, output if isinstance(output, dict) else None).reason
