"""Package attributes that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_attributes(package: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """A module ``__getattr__`` that finds ``home``'s names in the modules that it gives."""

    def __getattr__(name: str) -> Any:  # noqa: N807 - it becomes the module's own
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    return __getattr__
