"""Sixty-four agents at once: nothing is lost, and the event loop never stands still for us."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import httpx

from tests.engine.inside.expect import cumulative
from tests.engine.inside.rig import Inside, InsideRollout
from tests.engine.inside.test_prefix import own_end_only
from tests.engine.rig import MODEL

ROLLOUTS, TURNS, TOKENS = 64, 10, 16
STALL_S = 0.05


async def play(
    client: httpx.AsyncClient, base_url: str, number: int, options: dict[str, Any]
) -> list[str]:
    """One agent: ten streamed turns; its call ids (empty past the tag)."""
    messages: list[dict[str, Any]] = []
    call_ids = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Agent {number}, turn {turn}."})
        body = {"model": MODEL, "messages": messages, "stream": True, "ignore_eos": True}
        body |= {"max_tokens": TOKENS, **options}
        text = ""
        async with client.stream("POST", f"{base_url}/chat/completions", json=body) as response:
            assert response.status_code == 200
            call_ids.append(response.headers.get("x-model-call-id", ""))
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content") or ""
        messages.append({"role": "assistant", "content": text})
    return call_ids


async def play_all(urls: list[str], options: dict[str, Any]) -> list[list[str]]:
    """All agents at once."""
    limits = httpx.Limits(max_connections=ROLLOUTS, max_keepalive_connections=ROLLOUTS)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        tasks = (play(client, url, number, options) for number, url in enumerate(urls))
        return list(await asyncio.gather(*tasks))


def measured(inside: Inside, urls: list[str]) -> tuple[dict[str, Any], list[list[str]], float]:
    """The probe's report about one run of all agents."""
    httpx.get(f"{inside.engine.url}/loop-probe", timeout=30)
    options = own_end_only(inside.engine, "own")
    began = time.monotonic()
    call_ids = asyncio.run(play_all(urls, options))
    took = time.monotonic() - began
    report: dict[str, Any] = httpx.get(f"{inside.engine.url}/loop-probe", timeout=30).json()
    return report, call_ids, took


def test_many_agents_at_once(inside: Inside) -> None:
    """No call is lost or mixed up; ours are a small part of the loop's time, and never stall it."""
    httpx.get(f"{inside.engine.url}/loop-probe", timeout=30)
    before = httpx.get(f"{inside.engine.url}/loop-probe", timeout=30).json()["cpu_s"]
    plain, _, plain_s = measured(inside, [f"{inside.engine.url}/v1"] * ROLLOUTS)
    rollouts = [inside.rollout() for _ in range(ROLLOUTS)]
    report, call_ids, took = measured(inside, [rollout.base_url for rollout in rollouts])

    tokens = ROLLOUTS * TURNS * TOKENS
    # By the thread's CPU time: on two cores that six processes share, a thread also waits for
    # its turn, and that is nobody's code.
    in_ours = [min(length, cpu) * ours / seen for length, ours, seen, cpu in report["gaps"] if seen]
    ours_us = report["ours"] / max(1, report["samples"]) * took / tokens * 1e6
    cpu_us = (report["cpu_s"] - plain["cpu_s"]) / tokens * 1e6
    plain_us = (plain["cpu_s"] - before) / tokens * 1e6
    print(f"\n{tokens} tokens: {took:.1f} s captured, {plain_s:.1f} s past the tag")
    print(f"in our code {ours_us:.0f} us of the loop's time per token; server process CPU per")
    print(f"token {cpu_us:.0f} us captured, {plain_us:.0f} us past the tag")
    print(f"longest gaps {_longest(report)} captured, {_longest(plain)} past the tag")
    print(f"most time in our code within one gap: {max(in_ours, default=0) * 1000:.0f} ms")
    assert max(in_ours, default=0) < STALL_S
    for rollout, ids in zip(rollouts, call_ids, strict=True):
        assert_whole_chain(rollout, ids)


def _longest(report: dict[str, Any]) -> str:
    """The longest gaps: how long, and how much of that the loop's thread was on the CPU."""
    longest = sorted(report["gaps"], reverse=True)[:3]
    return ", ".join(f"{length:.3f} s ({cpu:.3f} on the CPU)" for length, _, _, cpu in longest)


def assert_whole_chain(rollout: InsideRollout, ids: list[str]) -> None:
    """Ten entries, each the exact child of the one before, and one row of all of them."""
    calls = rollout.frozen_calls()
    assert set(calls) == set(ids)
    for parent, child in itertools.pairwise(ids):
        assert calls[child]["parent_call_id"] == parent
        so_far = cumulative(calls[parent])
        assert calls[child]["prompt_token_ids"][: len(so_far)] == so_far
    for entry in calls.values():
        assert len(entry["generation_token_ids"]) == TOKENS
    (row,) = rollout.rows()["rows"]
    assert row["model_call_ids"] == ids
