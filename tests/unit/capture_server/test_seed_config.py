"""The seed's configuration block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capture_server.config import (
    TokenIdCaptureConfig,
    token_id_capture_config,
    token_id_capture_enabled_for_agent,
)
from middleware.errors import ConfigurationError


class GoodSink:
    """A sink with all methods."""

    def __init__(self, label: str = "") -> None:
        self.label = label

    async def put(self, entry: Any) -> None: ...
    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None: ...
    async def close(self) -> None: ...


class NoMarkSink:
    """A sink that cannot say that a call was lost."""

    async def put(self, entry: Any) -> None: ...
    async def close(self) -> None: ...


def config_with(**block: Any) -> TokenIdCaptureConfig:
    return token_id_capture_config({"token_id_capture": {"enabled": True, **block}})


def test_nothing_configured_is_disabled() -> None:
    """No block, an empty one, and None mean: off."""
    for given in (None, {}, {"token_id_capture": None}, {"other": 1}):
        assert not token_id_capture_config(given).enabled


def test_the_directory_falls_back_to_the_model_call_directory() -> None:
    """``dir`` wins; without it records sit beside the model calls; a custom sink has none."""
    block = {"token_id_capture": {"enabled": True}, "model_call_capture_dir": "/calls"}

    assert token_id_capture_config(block).resolved_dir() == Path("/calls")
    assert config_with(dir="/tokens").resolved_dir() == Path("/tokens")
    assert config_with(sink="a.B", lineage_store="a.C").resolved_dir() is None
    assert TokenIdCaptureConfig(model_call_capture_dir=Path("/calls")).resolved_dir() is None


def test_a_custom_sink_needs_a_resolver() -> None:
    """Without one every continuation would be unresolved and masked."""
    with pytest.raises(ValueError, match="lineage_store"):
        config_with(sink="a.B")


def test_unknown_keys_of_the_block_are_refused() -> None:
    """A typing error does not switch capture off."""
    with pytest.raises(ValueError, match="enabledd"):
        token_id_capture_config({"token_id_capture": {"enabledd": True}})


def test_sinks_are_built_from_their_dotted_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keyword arguments reach the class; a new instance per process."""
    import sys
    import types

    module = types.ModuleType("tc_test_sinks")
    module.GoodSink = GoodSink  # type: ignore[attr-defined]
    module.NoMarkSink = NoMarkSink  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tc_test_sinks", module)

    sink = config_with(
        sink="tc_test_sinks:GoodSink", sink_kwargs={"label": "x"}, lineage_store="a.B"
    ).build_sink()

    assert isinstance(sink, GoodSink)
    assert sink.label == "x"
    with pytest.raises(ConfigurationError, match="mark_incomplete"):
        config_with(sink="tc_test_sinks.NoMarkSink", lineage_store="a.B").build_sink()
    with pytest.raises(ConfigurationError, match="cannot build"):
        config_with(sink="tc_test_sinks.Absent", lineage_store="a.B").build_sink()
    assert config_with(dir="/x").build_sink() is None
    assert config_with(dir="/x").build_lineage_store() is None


def test_agents_are_captured_all_or_by_their_own_flag() -> None:
    """``all_agents`` covers everyone; else the agent's block decides; off is off."""
    flagged = {"simple": {"responses_api_agents": {"simple_agent": {"token_id_capture": True}}}}
    on = {"token_id_capture": {"enabled": True}}
    everyone = {"token_id_capture": {"enabled": True, "all_agents": True}}

    assert token_id_capture_enabled_for_agent({**on, **flagged}, "simple")
    assert not token_id_capture_enabled_for_agent({**on, **flagged}, "other")
    assert not token_id_capture_enabled_for_agent({**on, **flagged}, None)
    assert not token_id_capture_enabled_for_agent(flagged, "simple")
    assert token_id_capture_enabled_for_agent(everyone, None)


def test_the_control_token_comes_from_the_named_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset variable is an error, not an empty token."""
    settings = config_with(control_auth_token_env="MY_TOKEN").token_id_capture

    with pytest.raises(ConfigurationError, match="MY_TOKEN"):
        settings.resolve_control_auth_token()
    monkeypatch.setenv("MY_TOKEN", " secret ")
    assert settings.resolve_control_auth_token() == "secret"
