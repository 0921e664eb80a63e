"""Terminal selection and the receipt; the published vectors run in ``test_digest``."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from capture_server.staging.records import CallRecord, ManifestFailure, RolloutManifest
from capture_server.staging.terminal import make_receipt, select_terminal_call
from middleware.fingerprint import assistant_fingerprint
from tests.unit.capture_server.staging.staged_calls import three_calls

HASH = "0" * 64


def row(call_id: str, parent: str | None = None, **more: Any) -> CallRecord:
    values = {
        "model_call_id": call_id, "parent_call_id": parent, "prev_len": 2 if parent else 0,
        "delta_len": 2, "cum_len": 4 if parent else 2, "weight_version": 1, "digest": HASH,
        "extras_digest": HASH, "staging_key": f"r/{call_id}", "chain_hash": HASH,
        "cumulative_hash": HASH, "response_id": f"resp-{call_id}",
        "mode": "token_in" if parent else "text",
    }  # fmt: skip
    return CallRecord(**{**values, **more})


def selected(*rows: CallRecord) -> tuple[str | None, str]:
    found = select_terminal_call(rows)
    return found.terminal_model_call_id, found.reason


def test_a_cycle_beside_a_root_refuses() -> None:
    """Any row that no root leads to leaves the rollout without a terminal."""
    assert selected(row("a"), row("x", "y"), row("y", "x")) == (None, "orphaned_row")


def test_a_missing_parent_is_named_before_a_missing_root() -> None:
    """Rows without any root: an absent parent says more than a cycle."""
    assert selected(row("c", "gone"), row("x", "y"), row("y", "x")) == (None, "orphaned_row")


def test_long_chains_are_no_problem() -> None:
    """Ten thousand turns, no recursion."""
    rows = [row("c0"), *(row(f"c{n}", f"c{n - 1}") for n in range(1, 10_000))]
    assert selected(*rows[::-1]) == ("c9999", "selected")


@given(st.lists(st.integers(-1, 8), min_size=1, max_size=9), st.randoms())
def test_the_order_of_the_rows_means_nothing_without_ties(parents: list[int], random: Any) -> None:
    """With distinct admission times every order gives the same answer."""
    rows = [
        row(f"c{n}", None if parent < 0 or parent >= n else f"c{parent}", admitted_at=float(n))
        for n, parent in enumerate(parents)
    ]
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert selected(*shuffled) == selected(*rows)


# --- receipts ------------------------------------------------------------------------------------


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def manifest(**failures: str) -> RolloutManifest:
    chain = three_calls()
    return RolloutManifest(
        rollout_id="r",
        records=[
            chain.row(
                call_id, output_fingerprint=assistant_fingerprint(said(call_id)),
                fingerprint_version=3,
            )
            for call_id in chain.coords
        ],
        failures=[ManifestFailure(model_call_id=c, reason=r) for c, r in failures.items()],
    )  # fmt: skip


def verdict(**options: Any) -> tuple[Any, ...]:
    receipt = make_receipt(manifest(), **options)
    return receipt.terminal_model_call_id, receipt.terminal_selection, receipt.failure_reason


def test_witnesses_come_before_the_links() -> None:
    """Declared, then the response's own id, then its content, then the links."""
    assert verdict(declared_response_id="resp-b") == ("b", "declared", None)
    assert verdict(response={"id": "resp-b", "output": []}) == ("b", "response_id", None)
    assert verdict(response={"output": said("b")}) == ("b", "content", None)
    assert verdict(response={"id": "mine", "output": said("other")}) == ("c", "heuristic", None)
    assert verdict() == ("c", "heuristic", None)


def test_a_doubt_poisons() -> None:
    """Witnesses that disagree and declared ids that nobody knows are never overruled by links."""
    disagreeing = make_receipt(
        manifest(), response={"id": "resp-a", "output": said("b")}, reward=1.0
    )
    assert disagreeing.capture_poisoned
    assert "witness_disagreement" in (disagreeing.failure_reason or "")
    unknown = make_receipt(manifest(), declared_response_id="nobody's")
    assert unknown.failure_reason == "declared_terminal_not_captured"


def test_a_failure_poisons_whatever_the_witnesses_say() -> None:
    """The first reason is the receipt's."""
    receipt = make_receipt(
        manifest(x="worker_capture_failed", y="unresolved_parent"), declared_response_id="resp-c"
    )
    assert (receipt.capture_poisoned, receipt.failure_reason) == (True, "worker_capture_failed")
    assert receipt.terminal_model_call_id is None


def test_an_empty_ledger_poisons() -> None:
    """A rollout of which nothing is known cannot be trained on."""
    receipt = make_receipt(RolloutManifest(rollout_id="r"))
    assert (receipt.capture_poisoned, receipt.failure_reason) == (True, "no_records")
