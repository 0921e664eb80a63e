"""Engine profiles by name (``--engine``)."""

from __future__ import annotations

from typing import Final

from middleware.engines.base import AnswerDefect, EngineProfile, TokenAsk, TokenBundle
from middleware.engines.nemo_rl import NemoRLProfile, read_message_bundle
from middleware.engines.vllm import VLLMProfile
from middleware.errors import ConfigurationError

_PROFILES: Final[dict[str, EngineProfile]] = {
    "vllm": VLLMProfile(),
    # Not known to be vLLM: asked the same way (unknown fields are ignored by most servers), but
    # what was not asked for is removed, since such servers tend to omit what is unset.
    "openai": VLLMProfile("openai", unset="drop"),
    "nemo_rl": NemoRLProfile(),
}

ENGINE_NAMES: Final = ("auto", *_PROFILES)


def engine_profile(name: str) -> EngineProfile:
    """The profile of a named engine.

    Raises:
        ConfigurationError: unknown name.
    """
    try:
        return _PROFILES[name]
    except KeyError:
        known = ", ".join(sorted(_PROFILES))
        raise ConfigurationError(f"unknown engine {name!r}: use auto, {known}") from None


__all__ = [
    "ENGINE_NAMES",
    "AnswerDefect",
    "EngineProfile",
    "TokenAsk",
    "TokenBundle",
    "engine_profile",
    "read_message_bundle",
]
