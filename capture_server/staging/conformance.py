"""The kit for framework authors: golden vectors, and checks of a sink and source.

``python -m capture_server.staging.conformance`` runs the vectors that ship with this package;
``--backend package.module:factory`` also checks a framework's own staging backend, where the
factory returns ``(sink, source)``. A framework that hashes in another language reads
``golden_vectors.json`` beside this file: one case a line, ``{"name", "input", "expected"}``.

Invariant: a vector that this package cannot reproduce fails loudly, with its name.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any, Final

from capture_server.staging.digest import (
    compute_chain_hash,
    compute_extras_digest,
    compute_staging_digest,
    encode_token_ids,
    hash_token_ids,
)
from capture_server.staging.protocols import StagingSink, StagingSource
from capture_server.staging.rebuild import ReceiptVerificationError, verify_and_linearize
from capture_server.staging.records import (
    CallRecord,
    RolloutReceipt,
    StagedCallBaseSnapshot,
    StagedCallRecord,
)
from capture_server.staging.routes import decode_routed_experts
from capture_server.staging.terminal import select_terminal_call

__all__ = [
    "StagingConformanceError",
    "assert_golden_vectors",
    "check_staging_backend",
    "evaluate_vector",
    "load_golden_vectors",
]

_VECTORS: Final = "golden_vectors.json"
_ERROR: Final = "error"


class StagingConformanceError(AssertionError):
    """``check_name`` failed; ``detail`` says what was expected."""

    def __init__(self, check_name: str, detail: str) -> None:
        super().__init__(f"{check_name}: {detail}")
        self.check_name = check_name
        self.detail = detail


# --- vectors -------------------------------------------------------------------------------------


def load_golden_vectors() -> dict[str, Any]:
    """The vectors by name: ``{name: {"name", "input", "expected"}}``."""
    text = resources.files(__package__).joinpath(_VECTORS).read_text(encoding="utf-8")
    return {case["name"]: case for case in json.loads(text)}


def assert_golden_vectors() -> None:
    """Run every vector.

    Raises:
        StagingConformanceError: (an ``AssertionError``) names the first vector that differs.
    """
    for name, case in load_golden_vectors().items():
        found = evaluate_vector(case["input"])
        if found != case["expected"]:
            raise StagingConformanceError(name, f"expected {case['expected']!r}, got {found!r}")


def evaluate_vector(given: Mapping[str, Any]) -> Any:
    """What this package makes of a vector's ``input``, in the form of its ``expected``."""
    arguments = {key: value for key, value in given.items() if key != "op"}
    if given["op"] == "verify_and_linearize":
        return _verified(arguments)
    try:
        return _OPERATIONS[given["op"]](arguments)
    except (ValueError, TypeError):
        return _ERROR


def _selected(arguments: Mapping[str, Any]) -> dict[str, Any]:
    rows = [CallRecord.model_validate(row) for row in arguments["records"]]
    return asdict(select_terminal_call(rows))


def _decoded(arguments: Mapping[str, Any]) -> dict[str, Any]:
    fragment = decode_routed_experts(arguments["payload"])
    return {
        "values": fragment.values.tolist(),
        "dtype": fragment.dtype,
        "num_layers": fragment.num_layers,
        "topk": fragment.topk,
    }


_OPERATIONS: Final[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = {
    "encode_token_ids": lambda a: encode_token_ids(a["token_ids"]).hex(),
    "hash_token_ids": lambda a: hash_token_ids(a["token_ids"]),
    "compute_chain_hash": lambda a: compute_chain_hash(a["parent"], a["delta"]),
    "compute_extras_digest": lambda a: compute_extras_digest(a["extras"]),
    "compute_staging_digest": lambda a: compute_staging_digest(**a),
    "select_terminal_call": _selected,
    "decode_routed_experts": _decoded,
}


def _verified(arguments: Mapping[str, Any]) -> dict[str, Any]:
    build = _validated if arguments["construct"] == "validated" else _unchecked
    try:
        receipt, snapshots = build(arguments["receipt"], arguments["snapshots"])
    except ValueError:
        return {_ERROR: "validation"}
    try:
        row = asdict(verify_and_linearize(receipt, snapshots))
    except ReceiptVerificationError as error:
        return {_ERROR: error.code}
    row["link_spans"] = [list(span) for span in row["link_spans"]]
    return row


_Built = tuple[RolloutReceipt, list[StagedCallBaseSnapshot]]


def _validated(receipt: Mapping[str, Any], snapshots: Sequence[Mapping[str, Any]]) -> _Built:
    return RolloutReceipt.model_validate(receipt), [
        StagedCallBaseSnapshot.model_validate(snapshot) for snapshot in snapshots
    ]


def _unchecked(receipt: Mapping[str, Any], snapshots: Sequence[Mapping[str, Any]]) -> _Built:
    rows = [CallRecord.model_construct(**row) for row in receipt["manifest"]]
    return RolloutReceipt.model_construct(**{**receipt, "manifest": rows}), [
        StagedCallBaseSnapshot.model_construct(**snapshot) for snapshot in snapshots
    ]


# --- a framework's backend -----------------------------------------------------------------------


def check_staging_backend(
    sink: StagingSink, source: StagingSource, *, rollout_id: str = "staging-conformance"
) -> list[str]:
    """Check that what was staged can be fetched, unchanged; returns the names of the checks.

    Stages a few calls under ``rollout_id``, which must be unused.

    Raises:
        StagingConformanceError: names the check that failed.
    """
    # Here, not above: only this half of the kit stages anything.
    from capture_server.staging.capture import RolloutTokenCapture
    from middleware.staging_wire import CaptureAdmission

    recorder = _Recorder(sink)
    capture = RolloutTokenCapture(sink=recorder, weight_version_fn=lambda: 3)
    first = CaptureAdmission(rollout_id=rollout_id, model_call_id="c1", mode="text")
    extras = {"routed_experts": "nrlre1:int8:1x1x1:Bw==", "media_spans": [], "n": 1, "x": 1.0}
    root = capture.complete_call(
        capture.begin_call(first),
        prompt_token_ids=[1, (1 << 32) + 1],
        generated_token_ids=[3, 4],
        generated_logprobs=[-0.1, -1e-7],
        extras=extras,
        attachments={"note": "covered by no hash"},
    )
    _require("stage", root.disposition == "staged", "the sink did not stage a sound call")
    child_admission = CaptureAdmission(
        rollout_id=rollout_id,
        model_call_id="c2",
        parent_call_id="c1",
        prev_len=4,
        mode="token_in",
        staging_chain=[str(root.staging_key)],
        parent_chain_hash=root.chain_hash,
    )
    child = capture.complete_call(
        capture.begin_call(child_admission, prefix_token_ids=[1, (1 << 32) + 1, 3, 4]),
        prompt_token_ids=[1, (1 << 32) + 1, 3, 4, 5],
        generated_token_ids=[6],
        generated_logprobs=[-0.5],
    )
    _require("stage_child", child.disposition == "staged", "a child was not staged")
    keys = [str(root.staging_key), str(child.staging_key)]
    _check_reads(source, keys, recorder.records)
    _check_writes(sink, source, keys, recorder.records)
    return ["stage", "stage_child", "fetch", "fetch_order", "fetch_unknown", "repeat", "conflict"]


class _Recorder:
    """Remembers what was staged on its way to the sink under test."""

    def __init__(self, sink: StagingSink) -> None:
        self._sink = sink
        self.records: list[StagedCallRecord] = []

    def stage(
        self, record: StagedCallRecord, *, attachments: Mapping[str, Any] | None = None
    ) -> Any:
        self.records.append(record)
        return self._sink.stage(record, attachments=attachments)


def _check_reads(
    source: StagingSource, keys: list[str], records: Sequence[StagedCallRecord]
) -> None:
    fetched = source.fetch(keys)
    same = [_base(found) == _base(staged) for found, staged in zip(fetched, records, strict=False)]
    _require("fetch", len(fetched) == 2 and all(same), "what is fetched is not what was staged")
    turned = [snapshot.model_call_id for snapshot in source.fetch(keys[::-1])]
    _require("fetch_order", turned == ["c2", "c1"], "calls must come in the order of the keys")
    try:
        found_unknown = source.fetch([keys[0], keys[0] + "-unknown"])
    except Exception:  # noqa: BLE001 - whatever the source raises, it did not make up a call
        return
    raise StagingConformanceError("fetch_unknown", f"unknown key gave {len(found_unknown)} calls")


def _check_writes(
    sink: StagingSink,
    source: StagingSource,
    keys: list[str],
    records: Sequence[StagedCallRecord],
) -> None:
    again = sink.stage(records[0])
    _require("repeat", again.ok and again.staging_key == keys[0], "the same record again is fine")
    other = StagedCallRecord.model_validate(
        {**records[1].model_dump(), "model_call_id": "c1", "digest": _digest_as(records[1], "c1")}
    )
    try:
        refused = not sink.stage(other).ok
    except Exception:  # noqa: BLE001 - refusing by raising is as good
        refused = True
    kept = _base(source.fetch([keys[0]])[0]) == _base(records[0])
    _require("conflict", refused and kept, "another record of a call must be refused")


def _digest_as(record: StagedCallRecord, call_id: str) -> str:
    fields = record.model_dump(exclude={"digest", "extras"})
    return compute_staging_digest(**{**fields, "model_call_id": call_id})


def _base(snapshot: StagedCallBaseSnapshot) -> dict[str, Any]:
    return {name: getattr(snapshot, name) for name in StagedCallBaseSnapshot.model_fields}


def _require(check_name: str, holds: bool, detail: str) -> None:
    if not holds:
        raise StagingConformanceError(check_name, detail)


# --- command line --------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kit; 0 when everything holds."""
    parser = argparse.ArgumentParser(
        prog="python -m capture_server.staging.conformance",
        description="Golden vectors of external staging, and checks of a staging backend.",
    )
    parser.add_argument(
        "--backend",
        metavar="MODULE:FACTORY",
        help="a callable that returns (sink, source); its backend is written to",
    )
    given = parser.parse_args(arguments)
    try:
        assert_golden_vectors()
        _say(f"{len(load_golden_vectors())} golden vectors hold")
        if given.backend:
            module_name, _, attribute = given.backend.partition(":")
            sink, source = getattr(importlib.import_module(module_name), attribute)()
            _say(f"backend checks hold: {', '.join(check_staging_backend(sink, source))}")
    except StagingConformanceError as error:
        _say(f"FAILED {error}")
        return 1
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
