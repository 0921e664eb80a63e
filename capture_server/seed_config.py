"""The configuration models of the seed's API, for frameworks that configure capture in a block.

``TokenIdCaptureConfig`` reads the ``token_id_capture`` block of a larger (YAML/Hydra) mapping and
builds the custom sink and resolver that it names. The sidecar's own settings are in
``capture_server.config``. Documented no-ops here: ``max_mask_fraction``,
``mask_fraction_min_samples``, ``rebuild_response`` and ``allow_unresolved_continuations`` are
read by the framework that owns the block.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from middleware.errors import ConfigurationError
from middleware.protocols import LineageResolver, TokenSink

TOKEN_ID_CAPTURE_BLOCK: Final = "token_id_capture"  # noqa: S105 - a key, no secret

ExternalStagingBackend = Literal["vllm_worker", "megatron_worker"]


class NonGeneratingRequest(BaseModel):
    """A request that reaches the engine but generates nothing to record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    path: str


class TokenIdCaptureSettings(BaseModel):
    """The ``token_id_capture`` block. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = False
    all_agents: bool = False
    dir: Path | None = None
    sink: str | None = None
    sink_kwargs: dict[str, Any] = Field(default_factory=dict)
    lineage_store: str | None = None
    lineage_store_kwargs: dict[str, Any] = Field(default_factory=dict)
    rebuild_response: bool = True
    allow_unresolved_continuations: bool = False
    delta_records: bool = False
    max_mask_fraction: float | None = Field(None, ge=0, le=1)
    mask_fraction_min_samples: int = Field(50, ge=1)
    external_staging: bool = False
    external_staging_backend: ExternalStagingBackend = "vllm_worker"
    control_auth_token_env: str = "NEMO_GYM_TOKEN_CAPTURE_CONTROL_TOKEN"  # noqa: S105 - a name

    def resolve_control_auth_token(self) -> str:
        """The control token from the environment variable that this block names.

        Raises:
            ConfigurationError: the variable is unset or empty.
        """
        token = os.environ.get(self.control_auth_token_env, "").strip()
        if not token:
            raise ConfigurationError(
                f"no control token: set the environment variable {self.control_auth_token_env}"
            )
        return token


class TokenIdCaptureConfig(BaseModel):
    """The capture block plus the one top-level key that it falls back to."""

    model_config = ConfigDict(extra="ignore")

    token_id_capture: TokenIdCaptureSettings = Field(default_factory=TokenIdCaptureSettings)
    model_call_capture_dir: Path | None = None

    @model_validator(mode="after")
    def _sink_needs_resolver(self) -> TokenIdCaptureConfig:
        block = self.token_id_capture
        if block.enabled and block.sink and not (block.lineage_store or block.external_staging):
            raise ValueError(
                "a custom sink needs a lineage_store that reads the same records: without one "
                "every continuation stays unresolved"
            )
        return self

    @property
    def enabled(self) -> bool:
        """Whether capture is switched on."""
        return self.token_id_capture.enabled

    def resolved_dir(self) -> Path | None:
        """The directory of the file store: None when disabled or when a custom sink is named."""
        block = self.token_id_capture
        if not block.enabled or block.sink:
            return None
        if block.dir is not None:
            return block.dir
        return self.model_call_capture_dir

    def build_sink(self) -> TokenSink | None:
        """A new instance of the custom sink; None when the file store is in use.

        Raises:
            ConfigurationError: the class cannot be loaded, built, or lacks a method.
        """
        block = self.token_id_capture
        if not block.enabled or not block.sink:
            return None
        sink: TokenSink = _build(block.sink, block.sink_kwargs, ("put", "mark_incomplete", "close"))
        return sink

    def build_lineage_store(self) -> LineageResolver | None:
        """A new instance of the custom resolver; None when none is named.

        Raises:
            ConfigurationError: the class cannot be loaded, built, or lacks a method.
        """
        block = self.token_id_capture
        if not block.enabled or not block.lineage_store:
            return None
        methods = ("resolve", "is_process_shared", "close")
        resolver: LineageResolver = _build(block.lineage_store, block.lineage_store_kwargs, methods)
        return resolver


def token_id_capture_config(global_config_dict: Any) -> TokenIdCaptureConfig:
    """Validate the capture part of a global configuration mapping (None = nothing configured)."""
    if global_config_dict is None:
        return TokenIdCaptureConfig()
    fields = TokenIdCaptureConfig.model_fields
    values = {key: _plain(global_config_dict[key]) for key in fields if key in global_config_dict}
    return TokenIdCaptureConfig.model_validate({k: v for k, v in values.items() if v is not None})


def token_id_capture_enabled_for_agent(global_config_dict: Any, agent_name: str | None) -> bool:
    """Whether calls of this agent are captured.

    True when capture is on and either applies to all agents or the agent's own block
    (``<name>`` -> kind -> implementation) sets ``token_id_capture`` to true.
    """
    config = token_id_capture_config(global_config_dict)
    if not config.enabled:
        return False
    if config.token_id_capture.all_agents:
        return True
    if agent_name is None or agent_name not in global_config_dict:
        return False
    return _has_flag(_plain(global_config_dict[agent_name]), depth=3)


def _has_flag(node: Any, depth: int) -> bool:
    if not isinstance(node, Mapping) or depth < 0:
        return False
    flag = node.get(TOKEN_ID_CAPTURE_BLOCK)
    if isinstance(flag, bool):
        return flag
    return any(_has_flag(child, depth - 1) for child in node.values())


def _plain(node: Any) -> Any:
    """Mapping types of configuration libraries (OmegaConf) as plain dictionaries and lists."""
    if isinstance(node, Mapping):
        return {str(key): _plain(value) for key, value in node.items()}
    if isinstance(node, str | bytes | Path) or not hasattr(node, "__iter__"):
        return node
    return [_plain(value) for value in node]


def _build(dotted: str, kwargs: Mapping[str, Any], methods: tuple[str, ...]) -> Any:
    module_name, _, class_name = dotted.replace(":", ".").rpartition(".")
    try:
        factory = getattr(import_module(module_name), class_name)
        instance = factory(**kwargs)
    except (ImportError, AttributeError, TypeError, ValueError) as exc:
        raise ConfigurationError(f"cannot build {dotted}: {exc}") from exc
    missing = [name for name in methods if not callable(getattr(instance, name, None))]
    if missing:
        raise ConfigurationError(f"{dotted} lacks the method(s) {', '.join(missing)}")
    return instance
