"""Store URLs: which store a setting means, and whether a custom one can keep its promises.

``file:///abs/dir`` or a bare path, ``postgresql://...``, ``http(s)://sidecar:8900``, ``memory:``,
``package.module:Class?key=value``. Invariant: a
store that is returned has the methods that capture needs; what is missing is named at start-up,
not found out when the first call is lost.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from capture_server.store_urls import refuse_password_argument, shown_url
from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.lineage import FileLineageStore, MemoryLineageStore
from capture_server.stores.memory import MemoryCaptureStore
from capture_server.stores.spill import SpillLog, spill_directory
from middleware.errors import ConfigurationError
from middleware.protocols import CaptureStore, QueryResolver

logger = logging.getLogger(__name__)

DEFAULT_STORE_URL: Final = "~/.local/share/token-capture"

_POSTGRES: Final = ("postgresql", "postgres")
_SINK_METHODS: Final = ("put", "mark_incomplete", "close")
_SOURCE_METHODS: Final = ("freeze", "drop", "close")
_RESOLVER_METHODS: Final = ("resolve", "is_process_shared", "close")


def open_store(url: str = DEFAULT_STORE_URL, *, spill_dir: Path | None = None) -> CaptureStore:
    """The store that ``url`` means. Nothing is written yet (PostgreSQL: the schema is checked).

    A custom class must at least be a sink (``put``, ``mark_incomplete``, ``close``).
    ``spill_dir`` is where file and remote stores keep what they cannot deliver (default: see
    ``spill.spill_directory``).

    Raises:
        ConfigurationError: the URL is not understood, its class lacks methods, its package is not
            installed, or its database is not migrated; the message says what to do.
        StoreUnavailableError: no connection to the database.
    """
    scheme = _scheme(url)
    if scheme == "memory":
        return MemoryCaptureStore()
    if scheme == "file":
        return _open_file_store(_directory(url), spill_dir)
    if scheme in _POSTGRES:
        return _open_postgres_store(url, spill_dir)
    if scheme in ("http", "https"):
        # Here, not above: an engine process with a file store needs no HTTP client.
        from capture_server.stores.remote import RemoteCaptureStore

        return RemoteCaptureStore(url, spill_dir=spill_dir)
    if _is_class_url(url):
        return cast("CaptureStore", load_sink(url))
    if scheme:
        raise ConfigurationError(
            f"store URL {shown_url(url)!r} is not understood; use file:///absolute/directory, "
            "a path, postgresql://user@host/database, http://sidecar:8900, memory: or "
            "package.module:Class"
        )
    return _open_file_store(Path(url), spill_dir)


def _open_file_store(root: Path, spill_dir: Path | None) -> TokenCaptureStore:
    absolute = root.expanduser().absolute()
    spill = SpillLog(spill_directory(str(absolute), spill_dir))
    return TokenCaptureStore(absolute, spill=spill)


def _open_postgres_store(url: str, spill_dir: Path | None) -> CaptureStore:
    with _driver_needed():
        from capture_server.stores.postgres import open_postgres_store
    return open_postgres_store(url, spill_dir=spill_dir)


def migrate_store(*, given: str | None, configured: str) -> Sequence[Any]:
    """Bring a PostgreSQL store's schema up to date; return the applied ``Migration``s.

    ``given`` comes from the command line, ``configured`` from the settings.

    Raises:
        ConfigurationError: no PostgreSQL URL, a password on the command line, a newer schema.
        StoreError: the database is not reachable or refuses.
    """
    url = given or configured
    if _scheme(url) not in _POSTGRES:
        raise ConfigurationError("only postgresql:// stores have tables to migrate; name one")
    if given:
        refuse_password_argument(given)
    with _driver_needed():
        from capture_server.stores.migrate import migrate
    return migrate(url)


@contextlib.contextmanager
def _driver_needed() -> Iterator[None]:
    """Around the imports that need the extra ``postgres``."""
    try:
        yield
    except ImportError as exc:
        raise ConfigurationError(
            "a postgresql:// store needs its driver: pip install 'token-capture[postgres]'"
        ) from exc


def open_resolver(url: str, store: CaptureStore) -> QueryResolver:
    """The request-time resolver that sees what ``store`` holds.

    A custom store may be a resolver itself, or offer one with ``open_resolver()``.

    Raises:
        ConfigurationError: a custom store without either.
    """
    if isinstance(store, TokenCaptureStore):
        return FileLineageStore(store.root)
    if isinstance(store, MemoryCaptureStore):
        return MemoryLineageStore(store)
    custom: Any = store
    if hasattr(custom, "open_resolver"):
        custom = custom.open_resolver()
    if missing := _missing(custom, _RESOLVER_METHODS):
        raise ConfigurationError(
            f"store {url!r} offers no lineage resolver (missing: {', '.join(missing)}): every "
            "continuation would stay unresolved; add them, or a method open_resolver()"
        )
    return cast("QueryResolver", custom)


def require_process_shared(store: object, resolver: object, *, workers: int) -> None:
    """Refuse a store or resolver that several workers cannot share.

    Raises:
        ConfigurationError: says what to configure instead.
    """
    for what, part in (("store", store), ("lineage resolver", resolver)):
        is_shared = getattr(part, "is_process_shared", None)
        if is_shared is None or not is_shared():
            raise ConfigurationError(
                f"{workers} workers cannot share this {what} ({type(part).__name__}): each would "
                "see its own calls only. Use a file:///, postgresql:// or http:// store (a "
                "custom class says with is_process_shared() that it is shared), or --workers 1"
            )


def load_sink(url: str, **extra: Any) -> Any:
    """Import ``package.module:Class``, make one with the query's keywords, and check it.

    Raises:
        ConfigurationError: see ``open_store``.
    """
    target, _, query = url.partition("?")
    keywords: dict[str, Any] = {**dict(parse_qsl(query, keep_blank_values=True)), **extra}
    factory = _imported(target)
    try:
        sink = factory(**keywords)
    except TypeError as exc:
        raise ConfigurationError(f"store {target!r} cannot be made with {keywords}: {exc}") from exc
    check_sink(sink, target)
    return sink


def check_sink(sink: Any, name: str) -> None:
    """Refuse a sink that lacks what capture needs; warn where lost calls cannot be seen.

    Raises:
        ConfigurationError: names the missing methods.
    """
    if missing := _missing(sink, _SINK_METHODS):
        raise ConfigurationError(
            f"store {name!r} lacks {', '.join(missing)}: a sink needs async "
            f"{', '.join(_SINK_METHODS)} (a lost call must never look like a whole rollout)"
        )
    plain = [
        m for m in _SINK_METHODS if not _returns_awaitable(getattr(sink, m))
    ]  # calling these would block the event loop, and awaiting their None would fail
    if plain:
        raise ConfigurationError(f"store {name!r}: {', '.join(plain)} must be async")
    if _missing(sink, ("begin_call",)) and _missing(sink, ("open_intent",)):
        logger.warning(
            "store %s has no begin_call: a call that is lost in a crash cannot be seen, and its "
            "rollout will look complete",
            name,
            extra={"action": "store_without_intents"},
        )


def missing_source_methods(source: Any) -> list[str]:
    """Which methods of ``TokenSource`` an object lacks."""
    return _missing(source, _SOURCE_METHODS)


def _missing(candidate: Any, methods: Iterable[str]) -> list[str]:
    return [name for name in methods if not callable(getattr(candidate, name, None))]


def _returns_awaitable(method: Any) -> bool:
    """False only where it is certain: a plain Python function that is annotated to return None."""
    if inspect.iscoroutinefunction(method) or not inspect.isroutine(method):
        return True
    try:
        annotation = inspect.signature(method).return_annotation
    except (TypeError, ValueError):
        return True
    return annotation not in (None, "None")


def _imported(target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as exc:
        raise ConfigurationError(f"store {target!r} cannot be imported: {exc}") from exc
    if not callable(found):
        raise ConfigurationError(f"store {target!r} is no class")
    return found


def _scheme(url: str) -> str:
    """The URL scheme in lower case; "" for a path or a class."""
    head, colon, rest = url.partition(":")
    if not colon:
        return ""
    if rest.startswith("//") or head.lower() in {"memory", "file"}:
        return head.lower()
    return ""


def _is_class_url(url: str) -> bool:
    module_name, colon, attribute = url.partition("?")[0].partition(":")
    names = [*module_name.split("."), *attribute.split(".")]
    return bool(colon) and all(name.isidentifier() for name in names)


def _directory(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        raise ConfigurationError(
            f"store URL {url!r} needs an absolute path after file://, as in file:///var/lib/tc"
        )
    if parts.query or parts.fragment:
        raise ConfigurationError(f"store URL {url!r}: a file store takes no options")
    return Path(unquote(parts.path))
