"""The demo engine as an inference worker of external staging (``python -m`` runs one).

Admits ``ng_capture``, fetches the parents' tokens from the shared staging directory, generates,
stages the delta, and only then answers with coordinates. What the engine really sampled is kept
apart, in ``<log dir>/<response id>.json``, for the test to compare. ``x-test-die`` kills it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.types import Receive, Scope, Send

from capture_server.demo.engine import DemoEngine
from capture_server.demo.server import create_engine_app
from capture_server.staging.adapters.vllm import VLLMCaptureAdapter
from capture_server.staging.capture import CaptureHost, install_capture
from capture_server.staging.records import CaptureAdmission
from middleware.asgi_messages import json_messages, read_body
from tests.e2e.staging_backend import DirectoryStaging


class StagingWorker(CaptureHost):
    """An ASGI application around one demo engine."""

    def __init__(
        self, engine: DemoEngine, staging: Any, sampled: Path, weight_version: int = 7
    ) -> None:
        super().__init__()
        self._engine = engine
        self._app = create_engine_app(engine)
        self._staging = staging
        self._sampled = sampled
        sampled.mkdir(parents=True, exist_ok=True)
        self.capture = install_capture(
            self,
            sink=staging,
            weight_version_fn=lambda: weight_version,
            adapter=VLLMCaptureAdapter(),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/chat/completions":
            await self._app(scope, receive, send)
            return
        die_at = dict(scope["headers"]).get(b"x-test-die", b"").decode()
        body = json.loads(await read_body(receive, None))
        status, answer = await self._answer(body, die_at)
        for message in json_messages(status, answer):
            await send(message)

    async def _answer(self, body: dict[str, Any], die_at: str) -> tuple[int, dict[str, Any]]:
        wire = body.pop("ng_capture", None)
        body.pop("return_tokens_as_token_ids", None)
        call = None
        if wire is not None:
            admission = CaptureAdmission.model_validate(wire)
            prefix = [
                token
                for staged in self._staging.fetch(admission.staging_chain)
                for token in staged.token_ids_delta
            ]
            call = self.capture.begin_call(
                admission,
                prefix_token_ids=prefix if admission.staging_chain else None,
                stream=body.get("stream") is True,
            )
        status, answer = await self._generated({**body, "return_token_ids": True})
        if status != 200:
            return status, answer
        self._keep(answer)
        if die_at == "before_staging":
            os._exit(9)
        if call is None:
            return status, answer
        coords = self.capture.complete_call_from_response(call, answer)
        if die_at == "after_staging":
            os._exit(9)
        answer["ng_commit_coords"] = coords.model_dump(mode="json")
        return status, answer

    async def _generated(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as engine:
            response = await engine.post("/v1/chat/completions", json=body, timeout=60)
        return response.status_code, response.json()

    def _keep(self, answer: dict[str, Any]) -> None:
        """What was sampled, by the engine's own record."""
        records = self._engine.records(answer["id"])
        (self._sampled / f"{answer['id']}.json").write_text(json.dumps(records))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--staging", type=Path, required=True)
    parser.add_argument("--sampled", type=Path, required=True)
    parser.add_argument("--weight-version", type=int, default=7)
    given = parser.parse_args()
    worker = StagingWorker(
        DemoEngine(token_delay_s=0.001),
        DirectoryStaging(given.staging),
        given.sampled,
        given.weight_version,
    )
    uvicorn.run(worker, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
