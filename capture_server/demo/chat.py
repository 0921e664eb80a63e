"""``/v1/chat/completions`` in vLLM 0.32's shapes.

Invariant: the ids and log-probs of a choice's chunks, joined, are those of the whole answer; the
keys of a stream's chunks are the ones that vLLM sets there (absent and null are different).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from capture_server.demo import template
from capture_server.demo.answers import AnswerForm, AnswerStream, ToolMode
from capture_server.demo.engine import DemoEngine, PromptLogprobs
from capture_server.demo.errors import EngineRequestError
from capture_server.demo.generation import Generation, Step
from capture_server.demo.grammar import Grammar
from capture_server.demo.sampling import SamplingParams
from capture_server.demo.schema import json_grammar, tool_calls_grammar
from capture_server.demo.tokenizer import THINK_END, TURN_END
from capture_server.demo.wire_requests import (
    ChatRequest,
    check_model,
    check_prompt_ids,
    sampling_params,
)
from capture_server.demo.wire_shapes import (
    DONE_EVENT,
    SYSTEM_FINGERPRINT,
    Envelope,
    chat_logprobs,
    event,
    prompt_logprobs_json,
    usage,
)

_REUSED_IDS_PARAM = "kv_transfer_params.prompt_token_ids"


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked request, ready to be generated."""

    engine: DemoEngine
    request: ChatRequest
    response_id: str
    prompt_ids: list[int]
    prompt_text: str | None
    params: SamplingParams
    form: AnswerForm
    grammar: Grammar | None

    @classmethod
    def prepare(cls, engine: DemoEngine, request: ChatRequest, response_id: str) -> ChatCall:
        """Check the request and render its prompt.

        Raises:
            EngineRequestError: vLLM would answer 400 or 404.
        """
        check_model(engine, request.model)
        form, grammar = _answer_form(engine, request)
        text = chat_prompt(engine, request)
        ids = _reused_ids(engine, request)
        if ids is None:
            ids = check_prompt_ids(engine, engine.tokenizer.encode(text))
        params = sampling_params(
            engine,
            request,
            prompt_len=len(ids),
            skip_special_tokens=False if form.reads_markers else None,
        )
        shown = text if request.return_prompt_text else None
        return cls(engine, request, response_id, ids, shown, params, form, grammar)

    def generations(self) -> list[Generation]:
        """One per choice."""
        prompt = np.asarray(self.prompt_ids, dtype=np.int64)
        return [
            Generation(
                self.engine.machinery,
                prompt,
                self.params,
                index=index,
                choice=index,
                grammar=self.grammar,
            )
            for index in range(self.request.num_choices)
        ]

    @property
    def shown_prompt_ids(self) -> list[int] | None:
        """The prompt's ids, if the client asked for ids."""
        return self.prompt_ids if self.request.return_token_ids else None

    def shown_ids(self, steps: list[Step]) -> list[int] | None:
        """The sampled ids, if the client asked for ids."""
        return [step.token_id for step in steps] if self.request.return_token_ids else None

    def shown_logprobs(self, steps: list[Step]) -> dict[str, Any] | None:
        """The log-probs of ``steps``, if the client asked for log-probs."""
        as_ids = bool(self.request.return_tokens_as_token_ids)
        return chat_logprobs(steps, num_top=self.params.num_logprobs, as_ids=as_ids)


async def whole_answer(call: ChatCall) -> dict[str, Any]:
    """Generate everything, then answer at once."""
    prompt_logprobs = await _prompt_logprobs(call)
    steps: list[list[Step]] = [[] for _ in range(call.request.num_choices)]
    async with aclosing(call.engine.run(call.response_id, call.generations())) as run:
        async for step in run:
            steps[step.index].append(step)
    envelope = Envelope(call.response_id, "chat.completion", call.engine.model_name)
    answer = envelope.wrap([_choice(call, index, own) for index, own in enumerate(steps)])
    return answer | {
        "service_tier": None,
        "system_fingerprint": SYSTEM_FINGERPRINT,
        "usage": _whole_usage(call, steps),
        "prompt_logprobs": prompt_logprobs_json(prompt_logprobs),
        "prompt_token_ids": call.shown_prompt_ids,
        "prompt_text": call.prompt_text,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


async def event_stream(call: ChatCall) -> AsyncGenerator[bytes, None]:
    """Server-sent events, one chunk per token, the last one ``[DONE]``."""
    writer = _ChunkWriter(call)
    async with aclosing(call.engine.run(call.response_id, call.generations())) as run:
        began = False
        async for step in run:
            if not began:
                began = True
                for index in range(call.request.num_choices):
                    yield event(writer.role_chunk(index))
            chunk = writer.token_chunk(step)
            if chunk is not None:
                yield event(chunk)
    if call.request.usage_options.include_usage:
        yield event(writer.usage_chunk())
    yield DONE_EVENT


class _ChunkWriter:
    """The chunks of one stream; keeps each choice's counts and text state."""

    def __init__(self, call: ChatCall) -> None:
        num = call.request.num_choices
        self._call = call
        self._envelope = Envelope(call.response_id, "chat.completion.chunk", call.engine.model_name)
        self._answers = [AnswerStream(call.form) for _ in range(num)]
        self._num_tokens = [0] * num
        self._unfinished = num

    def role_chunk(self, index: int) -> dict[str, Any]:
        """The opening chunk of a choice; it carries the prompt's ids."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self._envelope.wrap([choice]) | self._running_usage(index)
        return chunk | {
            "prompt_token_ids": self._call.shown_prompt_ids,
            "prompt_text": self._call.prompt_text,
        }

    def token_chunk(self, step: Step) -> dict[str, Any] | None:
        """The chunk of one token; None when it has nothing to say."""
        call, request = self._call, self._call.request
        answer = self._answers[step.index]
        self._num_tokens[step.index] += 1
        final = step.finish_reason is not None
        delta = answer.delta(step.text, final=final)
        has_tokens = request.return_token_ids or call.params.num_logprobs is not None
        if not delta and not final and not has_tokens:
            return None
        finish = call.form.finish_reason(step.finish_reason, any_call=answer.any_call)
        choice: dict[str, Any] = {
            "index": step.index,
            "delta": delta,
            "logprobs": call.shown_logprobs([step]),
            "finish_reason": finish,
        }
        if final:
            choice["stop_reason"] = step.stop_reason
            self._unfinished -= 1
        choice["token_ids"] = call.shown_ids([step])
        chunk = self._envelope.wrap([choice]) | self._running_usage(step.index)
        if not self._unfinished and not request.usage_options.include_usage:
            chunk["system_fingerprint"] = SYSTEM_FINGERPRINT
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """The closing chunk with the counts of all choices."""
        counts = usage(len(self._call.prompt_ids), sum(self._num_tokens))
        counts["prompt_tokens_details"] = {"cached_tokens": 0, "created_cache_tokens": 0}
        reasoning = sum(answer.num_reasoning_chunks for answer in self._answers)
        counts |= self._reasoning_details(reasoning)
        closing = {"usage": counts, "system_fingerprint": SYSTEM_FINGERPRINT}
        return self._envelope.wrap([]) | closing

    def _running_usage(self, index: int) -> dict[str, Any]:
        if not self._call.request.usage_options.continuous_usage_stats:
            return {}
        counts = usage(len(self._call.prompt_ids), self._num_tokens[index])
        return {
            "usage": counts | self._reasoning_details(self._answers[index].num_reasoning_chunks)
        }

    def _reasoning_details(self, tokens: int) -> dict[str, Any]:
        if not self._call.form.thinking:
            return {}
        return {"completion_tokens_details": {"reasoning_tokens": tokens}}


def chat_prompt(engine: DemoEngine, request: ChatRequest) -> str:
    """The request's conversation as prompt text."""
    if not request.messages:
        raise EngineRequestError("messages must not be empty", param="messages")
    return template.render(
        request.messages,
        request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        thinking=engine.thinking,
        strip_reasoning=engine.strip_reasoning,
    )


def _choice(call: ChatCall, index: int, steps: list[Step]) -> dict[str, Any]:
    message = call.form.message("".join(step.text for step in steps))
    last = steps[-1]
    any_call = "tool_calls" in message
    if call.request.echo:
        message["content"] = _echoed(call.request) + (message["content"] or "")
    return {
        "index": index,
        "message": message,
        "logprobs": call.shown_logprobs(steps),
        "finish_reason": call.form.finish_reason(last.finish_reason, any_call=any_call),
        "stop_reason": last.stop_reason,
        "token_ids": call.shown_ids(steps),
        "routed_experts": None,
    }


def _whole_usage(call: ChatCall, steps: list[list[Step]]) -> dict[str, Any]:
    counts = usage(len(call.prompt_ids), sum(map(len, steps)))
    counts["prompt_tokens_details"] = {
        "cached_tokens": 0,
        "created_cache_tokens": 0,
        "multimodal_tokens": None,
    }
    reasoning = {"reasoning_tokens": sum(map(_num_reasoning_tokens, steps))}
    counts["completion_tokens_details"] = reasoning if call.form.thinking else None
    return counts


def _num_reasoning_tokens(steps: list[Step]) -> int:
    ids = [step.token_id for step in steps if step.token_id != TURN_END]
    return ids.index(THINK_END) if THINK_END in ids else len(ids)


def _echoed(request: ChatRequest) -> str:
    last = request.messages[-1]
    return template.message_text(last) if last.get("role") == "assistant" else ""


async def _prompt_logprobs(call: ChatCall) -> PromptLogprobs | None:
    num = call.request.prompt_logprobs
    if num is None and call.request.echo:
        num = call.params.num_logprobs
    if num is None:
        return None
    prompt = np.asarray(call.prompt_ids, dtype=np.int64)
    return await call.engine.prompt_logprobs(prompt, num)


def _reused_ids(engine: DemoEngine, request: ChatRequest) -> list[int] | None:
    """Prompt ids that the client supplies instead of the rendered ones, if it does."""
    ids = (request.kv_transfer_params or {}).get("prompt_token_ids")
    if ids is None or request.echo or not template.is_plain_text(request.messages):
        return None
    if not isinstance(ids, list):
        raise EngineRequestError("prompt_token_ids must be a list", param=_REUSED_IDS_PARAM)
    return check_prompt_ids(engine, ids, param=_REUSED_IDS_PARAM)


def _answer_form(engine: DemoEngine, request: ChatRequest) -> tuple[AnswerForm, Grammar | None]:
    mode, functions = _tool_mode(request)
    form = AnswerForm(thinking=engine.thinking, tools=mode)
    if mode in ("required", "named"):
        many = mode == "required" and request.parallel_tool_calls is not False
        # Under a forced call the answer begins with the call: there is no think block to leave.
        form = AnswerForm(thinking=False, tools=mode)
        return form, tool_calls_grammar(functions, many=many)
    schema = _response_schema(request)
    return form, None if schema is None else json_grammar(schema)


def _tool_mode(request: ChatRequest) -> tuple[ToolMode, list[Mapping[str, Any]]]:
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise EngineRequestError("When using `tool_choice`, `tools` must be set.")
        return "off", []
    functions = [_function(tool) for tool in request.tools]
    if choice is None or choice == "auto":
        return "auto", functions
    if choice == "none":
        return "off", functions
    if choice == "required":
        return "required", functions
    wanted = choice.get("function") if isinstance(choice, dict) else None
    name = wanted.get("name") if isinstance(wanted, dict) else None
    named = [function for function in functions if function["name"] == name]
    if not named:
        raise EngineRequestError(
            f"The tool specified in `tool_choice` does not match any of the specified `tools`: "
            f"{choice!r}",
            param="tool_choice",
        )
    return "named", named


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise EngineRequestError("Every tool needs a function with a name", param="tools")
    return function


def _response_schema(request: ChatRequest) -> Mapping[str, Any] | None:
    wanted = request.response_format or {}
    if wanted.get("type") == "json_object":
        return {"type": "object"}
    if wanted.get("type") != "json_schema":
        return None
    schema = (wanted.get("json_schema") or {}).get("schema")
    if not isinstance(schema, dict):
        raise EngineRequestError("json_schema needs a schema", param="response_format")
    return schema
