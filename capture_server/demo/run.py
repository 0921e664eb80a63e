"""``token-capture demo``: the whole loop on this machine, and a check of everything it shows.

Starts the built-in engine and a sidecar on free loopback ports, plays an agent, then the
trainer's side over HTTP. The engine keeps what it really sampled; the demo succeeds only if the
training rows hold exactly that.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console

from capture_server.app import create_app
from capture_server.client import RolloutClient
from capture_server.config import load_settings
from capture_server.demo.agent import DemoAgent
from capture_server.demo.engine import DemoEngine
from capture_server.demo.server import running_engine
from capture_server.in_thread import served_in_thread
from capture_server.trajectories.traces import RolloutTraces
from middleware.paths import capture_base_url
from middleware.protocols import TokenCaptureSnapshot

ROLLOUT_ID = "demo-rollout"


@dataclass
class DemoReport:
    """What the demo found; ``failures`` empty means that every check held."""

    result: dict[str, Any] = field(default_factory=dict)
    checks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def check(self, what: str, holds: bool) -> None:
        """Note one check."""
        (self.checks if holds else self.failures).append(what)


def run_demo(*, as_json: bool = False) -> bool:
    """Run the demo, print it (for a human, or one JSON object); True if every check held."""
    report = asyncio.run(_demo(Console(quiet=as_json)))
    if as_json:
        result = report.result | {"checks": report.checks, "failures": report.failures}
        Console(soft_wrap=True, highlight=False, markup=False).print(orjson.dumps(result).decode())
    return not report.failures


async def _demo(console: Console) -> DemoReport:
    report = DemoReport()
    with _workplace() as root:
        async with running_engine(DemoEngine(token_delay_s=0.002)) as engine_url:
            settings = load_settings(upstream=engine_url, store=f"file://{root}", port=0)
            options: dict[str, Any] = {"server_header": False, "date_header": False}
            async with served_in_thread(create_app(settings), **options) as sidecar_url:
                console.rule("Token Capture demo")
                console.print(f"engine   {engine_url}   (a small real language model)")
                console.print(f"sidecar  {sidecar_url}   (store: {root})\n")
                await _play_agent(console, sidecar_url)
                await _train(console, report, engine_url, sidecar_url)
    for what in report.checks:
        console.print(f"[green]ok[/]      {what}")
    for what in report.failures:
        console.print(f"[red]FAILED[/]  {what}")
    return report


async def _play_agent(console: Console, sidecar_url: str) -> None:
    base_url = capture_base_url(sidecar_url, ROLLOUT_ID)
    console.print(f"[bold]The agent[/] is only given another base URL:\n  {base_url}")
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        agent = DemoAgent(http, base_url, "demo")
        agent.messages.append({"role": "system", "content": "You are a helpful assistant."})
        first = await agent.say(
            "What is the weather like?", seed=1, kind="tool call", tool_choice="required"
        )
        await agent.report_weather(first.message["tool_calls"][0], seed=2)
        await agent.say("Thank you. And tomorrow?", seed=3, tool_choice="none")
        await agent.say_over_a_bad_line("Tell me more.", lost_seed=4, seed=5)
    for turn in agent.turns:
        said = turn.message.get("content") or turn.message["tool_calls"][0]["function"]
        console.print(
            f"  {turn.model_call_id[:8]}  {turn.kind:24} {str(said)[:60]!r}", markup=False
        )


async def _train(console: Console, report: DemoReport, engine_url: str, sidecar_url: str) -> None:
    console.print("\n[bold]The trainer[/] freezes, reads, builds, and retires over HTTP:")
    async with RolloutClient(sidecar_url) as trainer:
        await trainer.freeze(ROLLOUT_ID)
        snapshot = await trainer.snapshot(ROLLOUT_ID)
        traces = await trainer.traces(ROLLOUT_ID)
        sampled = await _sampled(engine_url)
        _check(report, snapshot, traces, sampled)
        retired = await trainer.retire(
            ROLLOUT_ID, snapshot_id=snapshot.snapshot_id, version=snapshot.version
        )
        report.check("the snapshot that was consumed is retired", retired)
    report.result = {
        "rollout_id": ROLLOUT_ID,
        "calls": len(snapshot.entries),
        "snapshot_id": snapshot.snapshot_id,
        "version": snapshot.version,
        "incomplete": snapshot.incomplete,
        "rows": len(traces.rows),
        "prompt_tokens": sum(int((row.loss_mask == 0).sum()) for row in traces.rows),
        "trainable_tokens": sum(int(row.loss_mask.sum()) for row in traces.rows),
        "retired": retired,
    }
    for key, value in report.result.items():
        console.print(f"  {key:17} {value}", markup=False)
    for row in traces.rows:
        calls = " > ".join(call_id[:8] for call_id in row.model_call_ids)
        trained = f"{int(row.loss_mask.sum())} of {len(row.token_ids)} tokens are trained"
        console.print(f"  row {row.row_id:11} {calls}: {trained}", markup=False)
    console.print()


Sampled = dict[str, tuple[list[int], list[int], list[float]]]


async def _sampled(engine_url: str) -> Sampled:
    """What the engine says it sampled: response id -> prompt ids, sampled ids, log-probs."""
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        rows = (await http.get(f"{engine_url}/demo/generations")).json()["data"]
    return {
        row["response_id"]: (
            row["choices"][0]["prompt_token_ids"],
            row["choices"][0]["token_ids"],
            row["choices"][0]["logprobs"],
        )
        for row in rows
    }


def _check(
    report: DemoReport, snapshot: TokenCaptureSnapshot, traces: RolloutTraces, sampled: Sampled
) -> None:
    entries = {entry.model_call_id: entry for entry in snapshot.entries}
    lost = [entry for entry in entries.values() if entry.delivered is False]
    report.check("every call of the agent is recorded, the lost stream too", len(entries) == 5)
    report.check("exactly the dropped stream is known as undelivered", len(lost) == 1)
    report.check("the rollout is complete", not snapshot.incomplete and not traces.mask_sample)
    spans = [(row, span) for row in traces.rows for span in row.call_spans]
    trained = [span.model_call_id for _, span in spans]
    kept = {call_id for call_id in entries if entries[call_id].delivered}
    report.check("every delivered call is in a row", {*trained} == kept)
    exact = all(
        sampled[entries[span.model_call_id].response_id or ""]
        == (
            row.token_ids[: span.start].tolist(),
            row.token_ids[span.start : span.end].tolist(),
            row.log_probs[span.start : span.end].tolist(),
        )
        for row, span in spans
    )
    report.check("each row holds what the engine sampled, behind the prompt that it saw", exact)
    counted = sum(int(row.loss_mask.sum()) for row in traces.rows)
    generated = sum(len(entries[call_id].generation_token_ids) for call_id in kept)
    report.check("each sampled token is trained exactly once", counted == generated)


@contextmanager
def _workplace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="token-capture-demo-") as path:
        yield Path(path)
