"""Where finished records go: the file store, its in-memory twin, and the choice between them."""

from capture_server.stores.file import TokenCaptureStore, make_token_store
from capture_server.stores.lineage import FileLineageStore
from capture_server.stores.memory import MemoryCaptureStore
from capture_server.stores.registry import DEFAULT_STORE_URL, open_resolver, open_store

__all__ = [
    "DEFAULT_STORE_URL",
    "FileLineageStore",
    "MemoryCaptureStore",
    "TokenCaptureStore",
    "make_token_store",
    "open_resolver",
    "open_store",
]
