"""Rows entry, digest and resolve: what one call costs apart from the disk and the wire."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from middleware.lineage import RolloutLineage, stamp_continuation
from middleware.lineage.matching import hash_request
from middleware.prompt_shape import prompt_config_digest
from middleware.records import (
    TokenEntry,
    compute_digest,
    entry_from_json_bytes,
    entry_to_json_bytes,
    pack_entry,
    stamp_lineage,
    unpack_entry,
)
from tests.bench import data
from tests.bench.measure import Row, compare, side_by_side
from tests.bench.naive import ListEntry

PROMPT = 100_000
_ENTRY = f"validate + dump + load, {PROMPT // 1000}k prompt"


def entry(short: bool) -> list[Row]:
    """The packed form is what stores write and read; the JSON form is what HTTP carries."""
    rounds = 7 if short else 21
    (made,) = data.growing_rollout(1, PROMPT + 256, generated_share=256 / (PROMPT + 256))
    form = made.model_dump(mode="json")

    def packed() -> TokenEntry:
        first = TokenEntry.model_validate(form)
        return unpack_entry(orjson.loads(orjson.dumps(pack_entry(first))))

    def as_json() -> TokenEntry:
        return entry_from_json_bytes(entry_to_json_bytes(TokenEntry.model_validate(form)))

    def lists() -> ListEntry:
        return ListEntry.model_validate_json(ListEntry.model_validate(form).model_dump_json())

    assert packed() == as_json() == made
    against = "pydantic list[int]"
    return [
        compare(
            "entry",
            f"{_ENTRY}, packed",
            side_by_side(packed, lists, rounds=rounds),
            unit="ms",
            scale=1000,
            target=1 / 3,
            against=against,
        ),
        compare(
            "entry-json",
            f"{_ENTRY}, JSON",
            side_by_side(as_json, lists, rounds=rounds),
            unit="ms",
            scale=1000,
            target=None,
            bound=1.0,
            against=against,
        ),
    ]


def digest(short: bool) -> list[Row]:
    """The digest is sha256 over 8 bytes per id; more than that is ours."""
    (made,) = data.growing_rollout(1, PROMPT)
    ids = made.prompt_token_ids
    raw = ids.array.astype(">u8").tobytes()
    taken = side_by_side(
        lambda: compute_digest(ids),
        lambda: hashlib.sha256(raw).hexdigest(),
        rounds=11 if short else 51,
    )
    work = f"compute_digest of {PROMPT // 1000}k ids"
    return [
        compare("digest", work, taken, unit="ms", scale=1000, target=2.0, against="bare sha256")
    ]


def resolve(short: bool) -> list[Row]:
    """One request against 50 calls that gave the very same answers in other contexts."""
    return [
        _resolve("resolve", "plain text", tools=False, short=short),
        _resolve("resolve-tools", "a tool call a turn", tools=True, short=short),
    ]


def _resolve(name: str, what: str, *, tools: bool, short: bool) -> Row:
    messages = data.chat_messages(100, 400_000, tools=tools)
    body: dict[str, Any] = {"model": "m", "messages": messages, "temperature": 1.0}
    raw = orjson.dumps(body)
    lineage = _committed(messages, 50)

    def decide() -> object:
        query = hash_request(messages).query(prompt_config_digest(body))
        return lineage.decide(query)

    def one_pass() -> object:
        return hashlib.sha256(raw).hexdigest(), orjson.loads(raw)

    status, node, reason = lineage.decide(hash_request(messages).query())
    assert node is not None, (status, reason)
    assert node.call_id == "call-0"
    return compare(
        name,
        f"100 turns, {len(raw) // 1000} KB, 50 candidates, {what}",
        side_by_side(decide, one_pass, rounds=15 if short else 51),
        unit="ms",
        scale=1000,
        target=2.0,
        bound=3.0 if tools else 2.0,  # arguments are JSON in JSON: parsed, sorted, printed again
        against="sha256 + orjson of the body",
        items=len(messages),
    )


def _committed(messages: list[dict[str, Any]], candidates: int) -> RolloutLineage:
    """The true parent, and calls of equal fingerprint in contexts of their own."""
    lineage = RolloutLineage()
    last = max(at for at, item in enumerate(messages) if item["role"] == "assistant")
    context, output = messages[:last], messages[last]
    for at in range(candidates):
        asked = [*context]
        if at:
            asked[1] = {"role": "user", "content": f"another question {at}"}
        (made,) = data.growing_rollout(1, 64 + at)
        made.model_call_id = f"call-{at}"
        made.output_items = [output]
        stamp_lineage(made, None)
        lineage.add_entry(stamp_continuation(made, asked))
    return lineage
