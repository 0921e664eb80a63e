"""``/v1/completions`` in vLLM 0.32's shapes.

Invariant: choices are numbered prompt by prompt (``prompt * n + choice``). Under ``echo`` the
log-probs begin with those of the prompt while ``token_ids`` never hold prompt ids.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from capture_server.demo.engine import DemoEngine, PromptLogprobs
from capture_server.demo.errors import EngineRequestError
from capture_server.demo.generation import Generation, NamedLogprob, Step
from capture_server.demo.sampling import SamplingParams
from capture_server.demo.tokenizer import TokenNamer
from capture_server.demo.wire_requests import (
    CompletionRequest,
    check_model,
    check_prompt_ids,
    sampling_params,
)
from capture_server.demo.wire_shapes import (
    DONE_EVENT,
    SYSTEM_FINGERPRINT,
    Envelope,
    event,
    prompt_logprobs_json,
    token_name,
    usage,
)

_MAX_PROMPTS = 256

# name, own log-prob, alternatives: one position of ``choices[].logprobs``
_Position = tuple[str, float | None, dict[str, float] | None]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt of a batch."""

    ids: list[int]
    text: str
    """What ``echo`` puts before the answer; vLLM shows nothing for a prompt given as ids."""
    params: SamplingParams
    logprobs: PromptLogprobs | None


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A checked request, ready to be generated."""

    engine: DemoEngine
    request: CompletionRequest
    response_id: str
    prompts: list[_Prompt]

    @classmethod
    async def prepare(
        cls, engine: DemoEngine, request: CompletionRequest, response_id: str
    ) -> CompletionCall:
        """Check the request and its prompts; score the prompts if that is asked for.

        Raises:
            EngineRequestError: vLLM would answer 400 or 404.
        """
        check_model(engine, request.model)
        checked: list[tuple[list[int], str, SamplingParams]] = []
        for prompt in _prompt_list(request.prompt):
            ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            check_prompt_ids(engine, ids)
            params = sampling_params(engine, request, prompt_len=len(ids))
            checked.append((ids, prompt if isinstance(prompt, str) else "", params))
        prompts = [
            _Prompt(ids, text, params, await _score(engine, request, ids))
            for ids, text, params in checked
        ]
        return cls(engine, request, response_id, prompts)

    def generations(self) -> list[Generation]:
        """One per prompt and choice, prompt-major."""
        num = self.request.num_choices
        return [
            Generation(
                self.engine.machinery,
                np.asarray(prompt.ids, dtype=np.int64),
                prompt.params,
                index=at * num + choice,
                choice=choice,
            )
            for at, prompt in enumerate(self.prompts)
            for choice in range(num)
        ]

    def prompt_of(self, index: int) -> _Prompt:
        """The prompt that a choice answers."""
        return self.prompts[index // self.request.num_choices]

    @property
    def num_answers(self) -> int:
        """Choices of all prompts."""
        return len(self.prompts) * self.request.num_choices

    @property
    def hides_generation(self) -> bool:
        """``max_tokens: 0`` with ``echo``: only the prompt is shown, one id is sampled anyway."""
        return bool(self.request.echo) and self.request.max_tokens == 0


async def whole_answer(call: CompletionCall) -> dict[str, Any]:
    """Generate everything, then answer at once."""
    steps: list[list[Step]] = [[] for _ in range(call.num_answers)]
    async with aclosing(call.engine.run(call.response_id, call.generations())) as run:
        async for step in run:
            steps[step.index].append(step)
    envelope = Envelope(call.response_id, "text_completion", call.engine.model_name)
    counts = usage(sum(len(p.ids) for p in call.prompts), sum(map(len, steps)))
    counts["prompt_tokens_details"] = {
        "cached_tokens": 0,
        "created_cache_tokens": None,
        "multimodal_tokens": None,
    }
    counts["completion_tokens_details"] = None
    return envelope.wrap([_choice(call, index, own) for index, own in enumerate(steps)]) | {
        "service_tier": None,
        "system_fingerprint": SYSTEM_FINGERPRINT,
        "usage": counts,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


async def event_stream(call: CompletionCall) -> AsyncGenerator[bytes, None]:
    """Server-sent events, one chunk per token, the last one ``[DONE]``."""
    options = call.request.usage_options
    envelope = Envelope(call.response_id, "text_completion", call.engine.model_name)
    num_tokens = [0] * call.num_answers
    text_lens = [0] * call.num_answers
    unfinished = call.num_answers
    async with aclosing(call.engine.run(call.response_id, call.generations())) as run:
        async for step in run:
            index = step.index
            choice = _chunk_choice(call, step, num_tokens[index], text_lens)
            num_tokens[index] += 1
            unfinished -= step.finish_reason is not None
            chunk = envelope.wrap([choice])
            if options.continuous_usage_stats:
                chunk["usage"] = usage(len(call.prompt_of(index).ids), num_tokens[index])
            if not unfinished and not options.include_usage:
                chunk["system_fingerprint"] = SYSTEM_FINGERPRINT
            yield event(chunk)
    if options.include_usage:
        counts = usage(sum(len(p.ids) for p in call.prompts), sum(num_tokens))
        counts["prompt_tokens_details"] = {"cached_tokens": 0}
        closing = {"usage": counts, "system_fingerprint": SYSTEM_FINGERPRINT}
        yield event(envelope.wrap([]) | closing)
    yield DONE_EVENT


def _chunk_choice(
    call: CompletionCall, step: Step, num_before: int, text_lens: list[int]
) -> dict[str, Any]:
    request, prompt = call.request, call.prompt_of(step.index)
    first = num_before == 0
    text = "" if call.hides_generation else step.text
    positions = _positions(call, step.index, [step], with_prompt=first)
    logprobs = _logprobs_json(positions, text_lens[step.index])
    text_lens[step.index] += sum(len(name) for name, _, _ in positions or ())
    with_ids = bool(request.return_token_ids)
    return {
        "index": step.index,
        "text": prompt.text + text if first and request.echo else text,
        "logprobs": logprobs,
        "finish_reason": step.finish_reason,
        "stop_reason": step.stop_reason,
        "prompt_token_ids": prompt.ids if with_ids and first else None,
        "token_ids": [step.token_id] if with_ids else None,
    }


def _choice(call: CompletionCall, index: int, steps: list[Step]) -> dict[str, Any]:
    request, prompt = call.request, call.prompt_of(index)
    text = "" if call.hides_generation else "".join(step.text for step in steps)
    last = steps[-1]
    with_ids = bool(request.return_token_ids)
    return {
        "index": index,
        "text": prompt.text + text if request.echo else text,
        "logprobs": _logprobs_json(_positions(call, index, steps, with_prompt=True), 0),
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
        "token_ids": [step.token_id for step in steps] if with_ids else None,
        "prompt_logprobs": prompt_logprobs_json(prompt.logprobs),
        "prompt_token_ids": prompt.ids if with_ids else None,
        "routed_experts": None,
    }


def _positions(
    call: CompletionCall, index: int, steps: list[Step], *, with_prompt: bool
) -> list[_Position] | None:
    """The positions that ``logprobs`` shows; None when log-probs were not asked for."""
    if call.request.logprobs is None:
        return None
    as_ids = bool(call.request.return_tokens_as_token_ids)
    prompt = call.prompt_of(index)
    shown: list[_Position] = []
    if with_prompt and call.request.echo and prompt.logprobs is not None:
        first = prompt.ids[0]
        name = TokenNamer(call.engine.tokenizer).name(first)
        shown.append((token_name(first, name, as_id=as_ids), None, None))
        shown += [
            _position([entry for entry, _ in entries], as_ids)
            for entries in prompt.logprobs
            if entries is not None
        ]
    if not call.hides_generation:
        shown += [_position(step.top, as_ids) for step in steps]
    return shown


def _position(entries: tuple[NamedLogprob, ...] | list[NamedLogprob], as_ids: bool) -> _Position:
    # Two tokens may share one text: the later one then wins in the map, as in vLLM.
    named = {token_name(e.token_id, e.text, as_id=as_ids): e.logprob for e in entries}
    own = entries[0]
    return token_name(own.token_id, own.text, as_id=as_ids), own.logprob, named


def _logprobs_json(positions: list[_Position] | None, offset: int) -> dict[str, Any] | None:
    if positions is None:
        return None
    offsets = []
    for name, _, _ in positions:
        offsets.append(offset)
        offset += len(name)
    return {
        "text_offset": offsets,
        "token_logprobs": [logprob for _, logprob, _ in positions],
        "tokens": [name for name, _, _ in positions],
        "top_logprobs": [named for _, _, named in positions],
    }


async def _score(
    engine: DemoEngine, request: CompletionRequest, ids: list[int]
) -> PromptLogprobs | None:
    num = request.prompt_logprobs
    if num is None and request.echo:
        num = request.logprobs
    if num is None:
        return None
    return await engine.prompt_logprobs(np.asarray(ids, dtype=np.int64), num)


def _prompt_list(prompt: Any) -> list[str | list[int]]:
    """The batch: a text or a list of ids is a batch of one."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt and len(prompt) <= _MAX_PROMPTS:
        if all(isinstance(item, str) for item in prompt):
            return list(prompt)
        if all(isinstance(item, list) for item in prompt):
            return list(prompt)
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        return [prompt]
    raise EngineRequestError(
        "Either prompt or prompt_embeds must be provided and non-empty: a text, a list of ids, "
        f"or a list of up to {_MAX_PROMPTS} of either.",
        param="prompt",
    )
