"""Request bodies: which fields the demo engine reads, and vLLM's refusals of bad ones.

Unknown fields are ignored. Validation errors carry vLLM's sentences and parameter names where a
raw sample of 0.32 shows them; other sentences are this engine's own, in the same shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from capture_server.demo.engine import DemoEngine
from capture_server.demo.errors import EngineRequestError
from capture_server.demo.sampling import SamplingParams

_MAX_LOGPROBS = 20
_MAX_CHOICES = 64
_DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(BaseModel):
    """``stream_options``."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _GenerateRequest(BaseModel):
    """What chat and completions share."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int | None = 1
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = False

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return 1 if self.n is None else self.n

    @property
    def usage_options(self) -> StreamOptions:
        """``stream_options``, or its defaults."""
        return self.stream_options or StreamOptions()


class ChatRequest(_GenerateRequest):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    response_format: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_prompt_text: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None


class CompletionRequest(_GenerateRequest):
    """``POST /v1/completions``; ``prompt`` is a text, ids, or a list of either."""

    prompt: Any = None
    logprobs: int | None = None


class TokenizeRequest(BaseModel):
    """``POST /tokenize``, of a prompt or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


_Request = TypeVar("_Request", bound=BaseModel)


def parse_body(kind: type[_Request], body: bytes, content_type: str) -> _Request:
    """The body as a request.

    Raises:
        EngineRequestError: wrong media type, no JSON, or fields of the wrong kind.
        UnicodeDecodeError: the body is not text at all (compressed, for instance).
    """
    if content_type.split(";", 1)[0].strip().lower() != "application/json":
        sentence = "Unsupported Media Type: Only 'application/json' is allowed"
        raise EngineRequestError(f"1 validation error:\n  {sentence}", kind="Bad Request")
    try:
        return kind.model_validate(_load(body))
    except ValidationError as exc:
        found = exc.errors(include_url=False)
        raise _validation_error([_described(error) for error in found]) from exc


def sampling_params(
    engine: DemoEngine,
    request: ChatRequest | CompletionRequest,
    *,
    prompt_len: int,
    skip_special_tokens: bool | None = None,
) -> SamplingParams:
    """The request's settings, checked against the engine and the prompt's length."""
    _check_values(request)
    num_logprobs = _num_logprobs(request)
    stop = request.stop or ()
    skip = request.skip_special_tokens if skip_special_tokens is None else skip_special_tokens
    params = SamplingParams(
        max_tokens=_max_tokens(engine, request, prompt_len),
        min_tokens=request.min_tokens,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=request.top_k or 0,
        min_p=_or(request.min_p, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        seed=request.seed,
        logit_bias=_checked_bias(engine, request.logit_bias),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=skip,
        num_logprobs=num_logprobs,
    )
    if params.min_tokens > params.max_tokens:
        message = f"min_tokens must be less than or equal to max_tokens={params.max_tokens}"
        raise EngineRequestError.for_parameter(message, "min_tokens", params.min_tokens)
    return params


def check_model(engine: DemoEngine, name: str | None) -> None:
    """404 for another model than the served one."""
    if name is not None and name != engine.model_name:
        message = f"The model `{name}` does not exist. Valid aliases: {engine.model_name}."
        raise EngineRequestError(message, kind="NotFoundError", param="model", status=404)


def check_prompt_ids(engine: DemoEngine, ids: list[Any], *, param: str | None = None) -> list[int]:
    """The ids themselves, if all are of the vocabulary and leave room for a token."""
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < engine.tokenizer.vocab_size:
            raise EngineRequestError(f"Token id {token_id} is out of vocabulary", param=param)
    if not ids:
        raise EngineRequestError("The prompt must hold at least one token", param=param)
    if len(ids) >= engine.max_model_len:
        message = (
            f"This model's maximum context length is {engine.max_model_len} tokens. However, "
            f"your prompt contains {len(ids)} input tokens, which exceeds this limit even "
            "without any output tokens. Please reduce the length of the input prompt."
        )
        raise EngineRequestError.for_parameter(message, "input_tokens", len(ids))
    return ids


def _load(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        text = body.decode("utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError as exc:
        described = {
            "type": "json_invalid",
            "loc": f"body.{exc.pos}",
            "msg": "JSON decode error",
            "input": "<dict of 0 items>",
            "ctx": {"error": exc.msg},
        }
        raise _validation_error([described]) from exc


def _validation_error(errors: list[dict[str, Any]]) -> EngineRequestError:
    count = f"{len(errors)} validation error{'s' if len(errors) > 1 else ''}:"
    lines = "\n".join(f"  {error}" for error in errors)
    return EngineRequestError(f"{count}\n{lines}", kind="Bad Request", param=str(errors[0]["loc"]))


def _described(error: Any) -> dict[str, Any]:
    """One pydantic error as vLLM prints it: containers by size, no union branch names."""
    loc = error["loc"]
    place = ".".join(str(p) for at, p in enumerate(loc) if at == 0 or isinstance(p, int))
    described = {
        "type": error["type"],
        "loc": "body" + (f".{place}" if place else ""),
        "msg": error["msg"],
        "input": _summary(error["input"]),
    }
    if "ctx" in error:
        described["ctx"] = error["ctx"]
    return described


def _summary(value: Any) -> Any:
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return value


def _check_values(request: _GenerateRequest) -> None:
    checks = (
        ("n", request.n, 1 <= request.num_choices <= _MAX_CHOICES, f"in [1, {_MAX_CHOICES}]"),
        ("temperature", request.temperature, _or(request.temperature, 1.0) >= 0, "non-negative"),
        ("top_p", request.top_p, 0 < _or(request.top_p, 1.0) <= 1, "in (0, 1]"),
        ("top_k", request.top_k, (request.top_k or 0) >= -1, "0 (off), -1 (off) or more"),
        ("min_p", request.min_p, 0 <= _or(request.min_p, 0.0) <= 1, "in [0, 1]"),
        ("min_tokens", request.min_tokens, request.min_tokens >= 0, "non-negative"),
        (
            "repetition_penalty",
            request.repetition_penalty,
            _or(request.repetition_penalty, 1.0) > 0,
            "greater than zero",
        ),
    )
    for name, value, is_fine, rule in checks:
        if not is_fine:
            raise EngineRequestError.for_parameter(
                f"{name} must be {rule}, got {value}.", name, value
            )
    if request.temperature == 0 and request.num_choices > 1:
        message = f"n must be 1 when using greedy sampling, got {request.num_choices}."
        raise EngineRequestError.for_parameter(message, "n", request.num_choices)
    if request.stop == "" or (isinstance(request.stop, list) and "" in request.stop):
        raise EngineRequestError("stop cannot contain an empty string.", param="stop")


def _num_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, ChatRequest):
        asked = (request.top_logprobs or 0) if request.logprobs else None
    else:
        asked = request.logprobs
    for name, value in (("sample", asked), ("prompt", request.prompt_logprobs)):
        param = "logprobs" if name == "sample" else "prompt_logprobs"
        if value is not None and value > _MAX_LOGPROBS:
            message = (
                f"Requested {name} logprobs of {value}, which is greater than max allowed: "
                f"{_MAX_LOGPROBS}"
            )
            raise EngineRequestError.for_parameter(message, param, value)
        if value is not None and value < -1:
            message = f"{param} must be non-negative or -1, got {value}."
            raise EngineRequestError.for_parameter(message, param, value)
    if request.stream and request.prompt_logprobs not in (None, 0):
        message = "`prompt_logprobs` are not available when `stream=True`."
        raise EngineRequestError(message, param="prompt_logprobs")
    return asked


def _max_tokens(
    engine: DemoEngine, request: ChatRequest | CompletionRequest, prompt_len: int
) -> int:
    room = engine.max_model_len - prompt_len
    if isinstance(request, ChatRequest):
        asked = request.max_completion_tokens
        asked = request.max_tokens if asked is None else asked
        asked = room if asked is None else asked
    else:
        asked = _DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        asked = min(asked, room) if request.max_tokens is None else asked
        if asked == 0 and request.echo:
            asked = 1  # vLLM samples one token and reports only its id
    if asked < 1:
        message = f"max_tokens must be at least 1, got {asked}."
        raise EngineRequestError.for_parameter(message, "max_tokens", asked)
    if asked > engine.max_model_len:
        message = (
            f"max_tokens={asked} cannot be greater than max_model_len={engine.max_model_len}. "
            "Please request fewer output tokens."
        )
        raise EngineRequestError.for_parameter(message, "max_tokens", asked)
    if asked > room:
        message = (
            f"This model's maximum context length is {engine.max_model_len} tokens. However, "
            f"you requested {asked} output tokens and your prompt contains {prompt_len} input "
            f"tokens, for a total of {asked + prompt_len} tokens. Please reduce the length of "
            "the input prompt or the number of requested output tokens."
        )
        raise EngineRequestError.for_parameter(message, "input_tokens", prompt_len)
    return asked


def _checked_bias(engine: DemoEngine, bias: Mapping[int, float] | None) -> dict[int, float]:
    outside = [i for i in bias or () if not 0 <= i < engine.tokenizer.vocab_size]
    if outside:
        message = f"token_id(s) {outside} in logit_bias contain out-of-vocab token ids."
        raise EngineRequestError(message, param="logit_bias")
    return dict(bias or {})


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
