"""Store URLs and what is demanded of a custom store."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from capture_server.stores.file import TokenCaptureStore, make_token_store
from capture_server.stores.memory import MemoryCaptureStore
from capture_server.stores.registry import load_sink, missing_source_methods, open_store
from middleware.errors import ConfigurationError

HERE = "custom_store_for_tests"


@pytest.fixture(autouse=True)
def custom_module(tmp_path, monkeypatch):
    """A module with stores of all sorts."""
    (tmp_path / f"{HERE}.py").write_text(
        "class Good:\n"
        "    def __init__(self, **keywords): self.keywords = keywords\n"
        "    async def put(self, entry): ...\n"
        "    async def mark_incomplete(self, rollout_id, model_call_id=''): ...\n"
        "    async def begin_call(self, rollout_id, model_call_id): ...\n"
        "    async def close(self): ...\n"
        "class NoIntents(Good):\n"
        "    begin_call = None\n"
        "class NoMark(Good):\n"
        "    mark_incomplete = None\n"
        "    close = 3\n"
        "class Blocking(Good):\n"
        "    def put(self, entry) -> None: ...\n"
        "class Picky(Good):\n"
        "    def __init__(self, *, url): ...\n"
        "class Outer:\n"
        "    Inner = Good\n"
        "not_callable = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("file:///var/lib/tc", "/var/lib/tc"),
        ("file://localhost/var/lib/tc", "/var/lib/tc"),
        ("FILE:///a%20b", "/a b"),
        ("/var/lib/tc", "/var/lib/tc"),
        ("relative/dir", str(Path("relative/dir").absolute())),
        ("~/tc", str(Path("~/tc").expanduser())),
    ],
)
def test_file_urls_and_paths(url, root):
    """A URL or a path names the directory; nothing is created by opening."""
    store = open_store(url)

    assert isinstance(store, TokenCaptureStore)
    assert str(store.root) == root
    assert not store.root.exists()


def test_the_seeds_constructor(tmp_path):
    """A store where capture is on and files are its place, else None."""
    on = {"enabled": True, "dir": str(tmp_path)}
    custom = {"enabled": True, "sink": "m:S", "lineage_store": "m:L", "dir": str(tmp_path)}
    store = make_token_store({"token_id_capture": on})

    assert store is not None
    assert store.root == tmp_path
    assert make_token_store({"token_id_capture": {"enabled": False, "dir": "x"}}) is None
    assert make_token_store({"token_id_capture": {"enabled": True}}) is None
    assert make_token_store({"token_id_capture": custom}) is None


def test_memory_url():
    """``memory:`` is the store for tests."""
    assert isinstance(open_store("memory:"), MemoryCaptureStore)


@pytest.mark.parametrize(
    "url",
    ["file://host/dir", "file:relative", "file:///d?x=1", "redis://h", "s3://bucket/x"],
)
def test_urls_that_mean_nothing_are_refused(url):
    """A misspelt URL never becomes a directory of that name."""
    with pytest.raises(ConfigurationError):
        open_store(url)


def test_custom_store_with_keywords():
    """The query's keywords reach the class."""
    store = load_sink(f"{HERE}:Good?url=x%20y&empty=", extra=1)

    assert store.keywords == {"url": "x y", "empty": "", "extra": 1}
    assert type(open_store(f"{HERE}:Outer.Inner")).__name__ == "Good"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoMark", "lacks mark_incomplete, close"),
        ("Blocking", "put must be async"),
        ("Picky", "cannot be made"),
        ("Missing", "cannot be imported"),
        ("not_callable", "is no class"),
    ],
)
def test_unfit_custom_stores_are_refused_by_name(name, message):
    """What is missing is known at start-up, not when the first call is lost."""
    with pytest.raises(ConfigurationError, match=message):
        open_store(f"{HERE}:{name}")


def test_unknown_module_is_refused():
    """An import error names the store."""
    with pytest.raises(ConfigurationError, match="no_such_module"):
        open_store("no_such_module.deep:Class")


def test_store_without_intents_is_warned_of(caplog):
    """It works, but a call lost in a crash cannot be seen."""
    with caplog.at_level(logging.WARNING):
        open_store(f"{HERE}:NoIntents")

    assert [r.action for r in caplog.records] == ["store_without_intents"]


def test_missing_source_methods():
    """For those who need a source, too."""
    assert missing_source_methods(MemoryCaptureStore()) == []
    assert missing_source_methods(load_sink(f"{HERE}:Good")) == ["freeze", "drop"]
