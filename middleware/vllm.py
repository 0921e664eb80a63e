"""Capture inside vLLM: ``vllm serve MODEL --middleware middleware.vllm.TokenCapture``.

The one file that knows vLLM's insides. It hooks two methods of the running engine client, and
nothing else: ``generate`` (every endpoint's way to the engine: here the tokens pass) and
``renderer.render_chat_async`` (here a conversation becomes a prompt, which may be extended from
the parent's exact tokens). Both act only for calls of tagged rollouts.

Invariant: at start the shape of everything that is used is checked, and vLLM does not start with
a message that names what was expected where it differs; after that nothing here fails a model
call. Source: spec 06 A; signatures of vLLM 0.32.
"""

from __future__ import annotations

import base64
import copy
import io
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import numpy as np
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from middleware.asgi import CaptureMiddleware, CaptureOptions
from middleware.asgi_messages import json_messages
from middleware.context import SAMPLING_KEYS, CaptureContext, current_capture_context
from middleware.dialects import IN_ENGINE_ROUTES
from middleware.dialects.base import Dialect
from middleware.dialects.choices import openai_error
from middleware.engine_call import EngineCall, Generation, Piece
from middleware.engines.base import TokenAsk
from middleware.env_settings import EngineSettings, PrefixSupplyMode, engine_settings
from middleware.errors import ConfigurationError, PrefixUnavailableError, TokenCaptureError
from middleware.records import TokenIds
from middleware.splice import (
    MARKERS,
    NoExactPrefixError,
    exact_prompt,
    with_last_answer,
)
from middleware.store_entry_points import open_shared_store
from middleware.token_origin import PreparedCall
from middleware.vllm_shape import available_supply, check_engine, end_tokens

logger = logging.getLogger(__name__)

_DRAIN_S: Final = 10.0
_NO_VERSION: Final = "default"  # what vLLM reports until somebody sets a weight version


class TokenCapture:
    """The class that ``vllm serve --middleware`` is given; settings from ``TOKEN_CAPTURE_*``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._capture: CaptureMiddleware | None = None
        self._close: Callable[[], Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection; the application's start and end among them."""
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        if self._capture is None:
            raise ConfigurationError("the server did not run the application's lifespan")
        await self._capture(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        startup = await receive()
        try:
            await self._start(scope["app"].state.engine_client)
        except TokenCaptureError as error:
            # The server's own way to say that the application cannot start: one line, exit.
            await send({"type": "lifespan.startup.failed", "message": f"token capture: {error}"})
            return
        given = False

        async def receive_from_start() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return startup

        try:
            await self._app(scope, receive_from_start, send)
        finally:
            await self._stop()

    async def _start(self, engine_client: Any) -> None:
        """Hook the engine and open the store.

        Raises:
            TokenCaptureError: vLLM must not start like this; the message says why.
        """
        settings = engine_settings()
        for name in settings.ignored:
            logger.warning("%s means nothing inside an engine; ignored", name)
        boundary = VLLMBoundary(engine_client, settings.prefix_supply)
        store, resolver = open_shared_store(settings.store)

        async def close() -> None:
            await resolver.close()
            await store.close()

        self._close = close
        if (trouble := await store.healthy()) is not None:
            await close()
            raise ConfigurationError(f"store {settings.store!r} cannot be used: {trouble}")
        boundary.hook()
        self._capture = CaptureMiddleware(
            self._app,
            control_app=_control_is_elsewhere,
            agent_tokens=settings.agent_tokens,
            sink=store,
            resolver=resolver,
            tokens=boundary,
            options=_options(settings),
        )
        logger.info(
            "token capture is on: prefix_supply=%s", boundary.prefix_supply, extra={"action": "on"}
        )

    async def _stop(self) -> None:
        if self._capture is not None and not await self._capture.calls.wait_idle(_DRAIN_S):
            logger.error("%d calls still ran at shutdown", len(self._capture.calls))
        if self._close is not None:
            await self._close()


def _options(settings: EngineSettings) -> CaptureOptions:
    return CaptureOptions(
        max_body_bytes=settings.max_body_bytes,
        max_decoded_body_bytes=settings.max_decoded_body_bytes,
        drain_on_disconnect=settings.drain_on_disconnect,
        delta_records=settings.delta_records,
    )


async def _control_is_elsewhere(scope: Scope, receive: Receive, send: Send) -> None:
    message = (
        "control routes are not served by the engine: run `token-capture serve --store ...` over "
        "the same store and ask it"
    )
    for part in json_messages(404, openai_error(404, "unknown_route", message)):
        await send(part)


class VLLMBoundary:
    """Where tokens come from: the engine client of this process (see ``TokenOrigin``).

    Raises:
        ConfigurationError: this vLLM is not shaped as expected.
    """

    routes: Mapping[str, Dialect] = IN_ENGINE_ROUTES

    def __init__(self, engine_client: Any, prefix_supply: PrefixSupplyMode) -> None:
        check_engine(engine_client)
        self.prefix_supply = available_supply(engine_client, prefix_supply)
        self._client = engine_client
        config = engine_client.model_config
        self._logprobs_mode = str(getattr(config, "logprobs_mode", "") or "")
        self._max_model_len: int = config.max_model_len
        self._end_tokens = end_tokens(engine_client) if self.prefix_supply != "off" else frozenset()

    def hook(self) -> None:
        """Put both wrappers before the engine client's methods."""
        self._generate = self._client.generate
        self._client.generate = self._captured_generate
        if self.prefix_supply != "off":
            self._render = self._client.renderer.render_chat_async
            self._client.renderer.render_chat_async = self._exact_render

    async def prepare(
        self, context: CaptureContext, dialect: Dialect, body: Mapping[str, Any]
    ) -> PreparedCall:
        """See ``TokenOrigin``: nothing is asked of the answer, so nothing is hidden in it."""
        context.engine = "vllm"
        context.prefix_requested = (
            self.prefix_supply != "off" and context.parent_call_id is not None
        )
        call = EngineCall(
            context,
            dialect.content(body),
            choices_per_prompt=dialect.choices_per_prompt(body),
            batch=dialect.name == "completions",
            prefix_supply=self.prefix_supply,
        )
        context.engine_call = call
        return PreparedCall(TokenAsk(), call)

    # --- generate ------------------------------------------------------------------------------

    def _captured_generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """In place of ``engine_client.generate``.

        A plain function: the generator's body first runs when it is iterated, perhaps in another
        task, and by then the context variable may be another one.
        """
        call = _current_call()
        if call is None:
            untouched: AsyncGenerator[Any, None] = self._generate(
                prompt, sampling_params, request_id, *args, **kwargs
            )
            return untouched
        try:
            generation = call.begin()
        except PrefixUnavailableError as error:
            raise HTTPException(409, str(error)) from error
        call.context.sampling = self._sampling(sampling_params)
        call.context.guided = _is_guided(sampling_params)
        asked = _with_log_probs(sampling_params)
        outputs = self._generate(prompt, asked, request_id, *args, **kwargs)
        return _observed(outputs, generation, is_delta=asked.output_kind.name == "DELTA")

    def _sampling(self, params: Any) -> dict[str, Any]:
        values = {name: getattr(params, name, None) for name in SAMPLING_KEYS}
        values["logprobs_mode"] = self._logprobs_mode or None
        return {name: value for name, value in values.items() if value is not None}

    # --- render --------------------------------------------------------------------------------

    async def _exact_render(
        self, conversations: Any, chat_params: Any, tok_params: Any = None, **kwargs: Any
    ) -> Any:
        """In place of ``renderer.render_chat_async``."""
        rendered = await self._render(conversations, chat_params, tok_params, **kwargs)
        call = _current_call()
        if call is None or not call.wants_prefix:
            return rendered
        marked = [with_last_answer(conversations[0], marker) for marker in MARKERS]
        if None in marked:
            return rendered  # not the conversation: vLLM probes templates with one of its own
        messages, prompts = rendered

        async def render_marked() -> Any:
            return (await self._render(marked, chat_params, tok_params, **kwargs))[1]

        try:
            parent = call.parent_tokens()
            ids = await self._exact_ids(parent, prompts, tok_params, render_marked)
        except NoExactPrefixError as refusal:
            try:
                call.decline(refusal.reason)
            except PrefixUnavailableError as error:
                raise HTTPException(409, str(error)) from error
            return rendered
        call.supply(parent, ids)
        prompt = {key: value for key, value in prompts[0].items() if key != "prompt_token_offsets"}
        return messages, [{**prompt, "prompt_token_ids": ids.tolist()}]

    async def _exact_ids(
        self, parent: TokenIds, prompts: Any, tok_params: Any, render_marked: Callable[[], Any]
    ) -> TokenIds:
        if len(prompts) != 1:
            raise NoExactPrefixError("several_prompts")
        if getattr(tok_params, "truncate_prompt_tokens", None) is not None:
            raise NoExactPrefixError("truncated_prompt")
        rendered = _token_ids(prompts[0])
        try:
            first, second = await render_marked()
        except Exception as error:
            # Templates may raise on what they do not expect; the call itself goes on.
            logger.debug("the template refuses a marker", exc_info=True)
            raise NoExactPrefixError("template_refused_marker") from error
        marked = (_token_ids(first), _token_ids(second))
        prompt = exact_prompt(parent, rendered, marked, self._end_tokens)
        if len(prompt) >= self._max_model_len:
            raise NoExactPrefixError("too_long")
        return prompt


def _current_call() -> EngineCall | None:
    context = current_capture_context()
    return context.engine_call if context is not None else None


async def _observed(
    outputs: AsyncGenerator[Any, None], generation: Generation, *, is_delta: bool
) -> AsyncGenerator[Any, None]:
    """Pass the engine's outputs on and note what they hold."""
    # Closed here and now when the consumer stops: garbage collection would do it elsewhere.
    async with aclosing(outputs):
        async for output in outputs:
            try:
                generation.note_prompt(output.prompt_token_ids)
                for choice in output.outputs:
                    generation.note(_piece(choice, is_delta=is_delta))
            except Exception as error:
                # The model call goes on; its rollout becomes incomplete.
                logger.exception("an output of the engine could not be read")
                generation.note_failure(error)
            yield output


def _piece(choice: Any, *, is_delta: bool) -> Piece:
    ids: Sequence[int] = choice.token_ids
    spans = getattr(choice, "weight_versions", None)
    routed = getattr(choice, "routed_experts", None)
    return Piece(
        index=choice.index,
        ids=ids,
        log_probs=_log_probs(ids, choice.logprobs),
        replaces=not is_delta,
        finish_reason=choice.finish_reason or "",
        routed_experts=_packed_array(routed) if routed is not None else None,
        extras=_weight_versions(spans) if spans else {},
    )


def _log_probs(ids: Sequence[int], positions: Any) -> list[float] | None:
    """The sampled tokens' log-probs; one mapping per position, keyed by token id."""
    if positions is None:
        return None
    if len(positions) != len(ids):
        return [0.0] * len(positions)  # noted as a length mismatch
    return [position[token].logprob for token, position in zip(ids, positions, strict=True)]


def _weight_versions(spans: Sequence[Any]) -> dict[str, Any]:
    """The weights that sampled the tokens; spans only where they changed meanwhile."""
    if len(spans) == 1 and spans[0].version == _NO_VERSION:
        return {}
    first, last = _version(spans[0].version), _version(spans[-1].version)
    if len(spans) == 1:
        return {"weight_version": first}
    shown = [{"version": _version(s.version), "start": s.start, "end": s.end} for s in spans]
    return {"weight_version": first, "weight_version_end": last, "weight_versions": shown}


def _version(label: Any) -> int | str:
    text = str(label)
    return int(text) if text.isdecimal() else text


def _packed_array(routed: Any) -> Any:
    """Routing data as vLLM sends it over HTTP: base64 of a ``.npy`` file."""
    if isinstance(routed, str):
        return routed
    file = io.BytesIO()
    np.save(file, np.asarray(routed), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _with_log_probs(params: Any) -> Any:
    """The parameters with the sampled token's log-prob asked for; a copy if that is a change.

    The caller's own object is reported back to the agent by some endpoints.
    """
    if params.logprobs is not None or getattr(params, "logprob_token_ids", None):
        return params
    asked = copy.copy(params)
    asked.logprobs = 0
    return asked


def _is_guided(params: Any) -> bool:
    guide = getattr(params, "structured_outputs", None) or getattr(params, "guided_decoding", None)
    if guide is None:
        return False
    has_none = getattr(guide, "all_constraints_none", None)
    return not (callable(has_none) and has_none())


def _token_ids(prompt: Any) -> TokenIds:
    """A rendered prompt's token ids.

    Raises:
        NoExactPrefixError: it is made of more than tokens.
    """
    if not isinstance(prompt, Mapping) or prompt.get("type", "token") != "token":
        raise NoExactPrefixError("multimodal")
    if any(prompt.get(key) for key in ("multi_modal_data", "mm_kwargs", "prompt_embeds")):
        raise NoExactPrefixError("multimodal")
    return TokenIds.of(prompt["prompt_token_ids"])
