"""A scripted staging worker behind a sidecar, in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

from capture_server.in_thread import served_in_thread
from capture_server.staging.adapters.vllm import VLLMCaptureAdapter
from capture_server.staging.capture import RolloutTokenCapture
from capture_server.staging.records import CaptureAdmission, RolloutManifest
from middleware.asgi_messages import json_messages, read_body
from middleware.protocols import CaptureStore
from tests.e2e.staging_backend import MemoryStaging
from tests.http.capture_rig import CHAT, R, Sidecar, sidecar

Change = Callable[[dict[str, Any]], Any]


@dataclass
class ScriptedWorker:
    """Answers call n with text ``answer n``; ``change`` may edit the answer on its way out.

    ``status`` other than 200 refuses; ``break_off`` ends the connection without an answer.
    """

    backend: str = "vllm_worker"
    staging: MemoryStaging = field(default_factory=MemoryStaging)
    requests: list[bytes] = field(default_factory=list)
    change: Change | None = None
    status: int = 200
    break_off: bool = False
    hang: bool = False  # until the sidecar gives up

    def __post_init__(self) -> None:
        self.capture = RolloutTokenCapture(
            sink=self.staging, weight_version_fn=lambda: 5, adapter=VLLMCaptureAdapter()
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        raw = await read_body(receive, None)
        if scope["path"] != "/v1/chat/completions":  # the sidecar asks what kind of engine this is
            for message in json_messages(404, {"detail": "Not Found"}):
                await send(message)
            return
        self.requests.append(raw)
        while self.hang and (await receive())["type"] != "http.disconnect":
            pass
        if self.break_off:
            raise RuntimeError("the worker breaks off")
        status, answer = self.status, self.answer(json.loads(raw))
        if status != 200:
            answer = {"error": {"message": "no", "type": "t", "code": "c"}}
        for message in json_messages(status, answer):
            await send(message)

    def answer(self, body: dict[str, Any]) -> Any:
        """The whole answer: content, tokens where vLLM and NeMo-RL put them, coordinates."""
        number = len(self.requests)
        holder = body.get("offload_params", {}) if self.backend == "megatron_worker" else body
        admission = holder.get("ng_capture")
        prompt = [10 * number, 10 * number + 1]
        call = None
        if admission is not None:
            admitted = CaptureAdmission.model_validate(admission)
            staged = self.staging.fetch(admitted.staging_chain)
            prefix = [token for one in staged for token in one.token_ids_delta]
            call = self.capture.begin_call(admitted, prefix_token_ids=prefix or None)
            prompt = prefix + prompt
        message = {
            "role": "assistant",
            "content": f"answer {number}",
            "prompt_token_ids": prompt,
            "generation_token_ids": [1000 + number, 2000 + number],
            "generation_log_probs": [-0.25, -0.5],
        }
        answer: dict[str, Any] = {
            "id": f"resp-{number}",
            "object": "chat.completion",
            "model": "m",
            "created": 1.0,
            "prompt_token_ids": prompt,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "token_ids": [1, 2],
                    "logprobs": {"content": []},
                    "finish_reason": "stop",
                }
            ],
        }
        if call is not None:
            coords = self.capture.complete_call_from_response(call, answer)
            answer["ng_commit_coords"] = coords.model_dump(mode="json")
        changed = self.change(answer) if self.change is not None else None
        return answer if changed is None else changed


@dataclass
class Rig:
    """The worker, the sidecar, and an agent that remembers its conversation."""

    worker: ScriptedWorker
    sidecar: Sidecar
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def say(self, text: str, **more: Any) -> httpx.Response:
        """A user message; the answer joins the conversation."""
        self.messages.append({"role": "user", "content": text})
        return await self.ask(**more)

    async def ask(self, **more: Any) -> httpx.Response:
        """The conversation as it stands."""
        body = {"model": "m", "messages": self.messages, **more}
        response = await self.sidecar.http.post(CHAT, json=body)
        if response.status_code == 200 and "choices" in (answer := response.json()):
            self.messages.append(answer["choices"][0]["message"])
        return response

    async def manifest(self) -> RolloutManifest:
        """Over HTTP, validated."""
        response = await self.sidecar.http.get(R + "/manifest")
        assert response.status_code == 200, response.text
        return RolloutManifest.model_validate(response.json())

    async def failures(self) -> list[str]:
        """The reasons in the manifest."""
        return [failure.reason for failure in (await self.manifest()).failures]


@asynccontextmanager
async def staging_rig(
    *, backend: str = "vllm_worker", store: CaptureStore | None = None
) -> AsyncIterator[Rig]:
    """Both servers over real HTTP."""
    worker = ScriptedWorker(backend)
    async with served_in_thread(worker, lifespan="off", log_level="critical") as engine:
        async with sidecar(engine, store=store, external_staging=backend) as made:
            yield Rig(worker, made)
