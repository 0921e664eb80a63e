"""Opens a store by its URL without importing any: by entry points, at run time.

A process that serves an engine must not load the capture server's packages just because ours are
installed. Group ``token_capture.stores``: one name per URL scheme, ``open(url) -> CaptureStore``;
group ``token_capture.resolvers``: ``default``, ``open(url, store) -> QueryResolver``.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, Final

from middleware.errors import ConfigurationError
from middleware.protocols import CaptureStore, QueryResolver

STORES: Final = "token_capture.stores"
RESOLVERS: Final = "token_capture.resolvers"


def open_shared_store(url: str) -> tuple[CaptureStore, QueryResolver]:
    """The store that ``url`` means and the resolver that sees what it holds.

    Raises:
        ConfigurationError: no package offers such a store, its URL is wrong, or other processes
            cannot see what it holds.
        StoreError: the store cannot be reached.
    """
    scheme, separator, _ = url.partition("://")
    store: CaptureStore = _load(STORES, scheme.lower() if separator else "file")(url)
    resolver: QueryResolver = _load(RESOLVERS, "default")(url, store)
    for what, part in (("store", store), ("lineage resolver", resolver)):
        is_shared = getattr(part, "is_process_shared", None)
        if is_shared is None or not is_shared():
            raise ConfigurationError(
                f"the {what} of {url!r} is private to one process, and the control routes run in "
                "another: use file:///absolute/directory, postgresql://... or http://sidecar:8900"
            )
    return store, resolver


def _load(group: str, name: str) -> Any:
    found = entry_points(group=group, name=name)
    if not found:
        known = ", ".join(sorted(entry_points(group=group).names)) or "nothing"
        raise ConfigurationError(
            f"no installed package offers {name!r} in {group} (there is: {known}); install "
            "token-capture into the engine's environment: pip install token-capture"
        )
    return next(iter(found)).load()
