"""What every test shares: an environment that is nobody's, and hypothesis without a stopwatch."""

from __future__ import annotations

import os

import hypothesis
import pytest

# A busy CI machine is slow now and then; that is no failure of the code under test. In CI the
# examples are the same in every run, so that a red run can be repeated.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the developer's shell reaches a test."""
    for name in list(os.environ):
        if name.upper().startswith("TOKEN_CAPTURE_"):
            monkeypatch.delenv(name)
