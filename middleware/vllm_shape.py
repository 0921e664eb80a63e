"""Is this the vLLM that ``middleware.vllm`` knows? Asked once, before anything is hooked.

Invariant: whatever ``middleware.vllm`` reads or calls is named here; a vLLM that differs is
refused with a message that says what was expected. Nothing is changed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from middleware.env_settings import PrefixSupplyMode
from middleware.errors import ConfigurationError

TESTED_VERSIONS: Final = "0.28.0 and 0.32.0"

_GENERATE: Final = ("prompt", "sampling_params", "request_id")
_RENDER: Final = ("conversations", "chat_params", "tok_params")
_OUTPUT_KINDS: Final = ("DELTA", "FINAL_ONLY", "CUMULATIVE")
_MEMBERS: Final = {
    ("vllm.sampling_params", "SamplingParams"): ("logprobs", "output_kind"),
    ("vllm.outputs", "RequestOutput"): ("prompt_token_ids", "outputs"),
    ("vllm.outputs", "CompletionOutput"): ("index", "token_ids", "logprobs", "finish_reason"),
    ("vllm.logprobs", "Logprob"): ("logprob",),
}


def check_engine(engine_client: Any) -> None:
    """Refuse an engine client whose generations could not be read.

    Raises:
        ConfigurationError: names what was expected.
    """
    if engine_client is None:
        raise _differs(
            "an engine client in app.state.engine_client (a render-only server has none)"
        )
    generate = getattr(engine_client, "generate", None)
    if not inspect.isasyncgenfunction(generate):
        raise _differs("engine_client.generate to be an async generator")
    if missing := _missing(_GENERATE, inspect.signature(generate).parameters):
        raise _differs(f"engine_client.generate({', '.join(_GENERATE)}, ...); no {missing}")
    if not isinstance(
        getattr(getattr(engine_client, "model_config", None), "max_model_len", None), int
    ):
        raise _differs("engine_client.model_config.max_model_len")
    for (module, name), members in _MEMBERS.items():
        if missing := _missing(members, _members_of(module, name)):
            raise _differs(f"{module}.{name} with {', '.join(members)}; no {missing}")
    kinds = _members_of("vllm.sampling_params", "RequestOutputKind")
    if missing := _missing(_OUTPUT_KINDS, kinds):
        raise _differs(f"RequestOutputKind with {', '.join(_OUTPUT_KINDS)}; no {missing}")


def available_supply(engine_client: Any, wanted: PrefixSupplyMode) -> PrefixSupplyMode:
    """``wanted``, if prompts can be replaced in this vLLM; ``off`` for ``auto`` where they cannot.

    Releases without a renderer on the engine client have no place for it; one with a renderer
    of another shape is refused, since it may do anything.

    Raises:
        ConfigurationError: see above, and always for ``require``.
    """
    if wanted == "off":
        return "off"
    renderer = getattr(engine_client, "renderer", None)
    if renderer is None:
        if wanted == "auto":
            return "off"
        raise _differs("engine_client.renderer (needed by TOKEN_CAPTURE_PREFIX_SUPPLY=require)")
    render = getattr(renderer, "render_chat_async", None)
    if not inspect.iscoroutinefunction(render) or _missing(
        _RENDER, inspect.signature(render).parameters
    ):
        raise _differs(
            f"async renderer.render_chat_async({', '.join(_RENDER)}) (only needed for prefix "
            "supply: TOKEN_CAPTURE_PREFIX_SUPPLY=off does without)"
        )
    return wanted


def end_tokens(engine_client: Any) -> frozenset[int]:
    """The ids that end a turn when the model samples them, as the model's files say.

    Raises:
        ConfigurationError: they cannot be asked for.
    """
    config = getattr(engine_client.model_config, "try_get_generation_config", None)
    eos = getattr(engine_client.renderer, "get_eos_token_id", None)
    if not callable(config) or not callable(eos):
        raise _differs(
            "model_config.try_get_generation_config() and renderer.get_eos_token_id() (only "
            "needed for prefix supply: TOKEN_CAPTURE_PREFIX_SUPPLY=off does without)"
        )
    listed = (config() or {}).get("eos_token_id")
    ids = [*(listed if isinstance(listed, list) else [listed]), eos()]
    return frozenset(value for value in ids if isinstance(value, int))


def _members_of(module: str, name: str) -> set[str]:
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _differs(f"{module}.{name}") from error
    # Annotations of a dataclass or a struct, an enum's members, or what a constructor takes.
    members = set(getattr(found, "__annotations__", ())) | set(getattr(found, "__members__", ()))
    return members | set(inspect.signature(found.__init__).parameters)


def _missing(expected: Iterable[str], found: Iterable[str]) -> str:
    return ", ".join(sorted(set(expected) - set(found)))


def _differs(expected: str) -> ConfigurationError:
    try:
        found = version("vllm")
    except PackageNotFoundError:
        found = "of unknown version"
    return ConfigurationError(
        f"this vLLM ({found}) is not shaped as expected: expected {expected}. Tested with "
        f"{TESTED_VERSIONS}; use that, or put a `token-capture serve` in front of the engine"
    )
