"""The distribution: its metadata, its entry points, and what is in the wheel."""

from __future__ import annotations

import ast
import email
import email.message
import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from middleware._version import __version__

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("middleware", "capture_server")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_there_is_one_version() -> None:
    """The packages' version is the build's, and the changelog's newest release."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d[^\]]*)\]", changelog, flags=re.MULTILINE)

    assert "version" in PROJECT["dynamic"], "the build reads it from middleware/_version.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+|\.dev\d+)?", __version__)
    assert "## [Unreleased]" in changelog
    assert not released or released[0] == __version__


def entry_points() -> dict[str, str]:
    """Every declared entry point: group and name to object reference."""
    declared = {"scripts": PROJECT["scripts"], **PROJECT["entry-points"]}
    return {f"{group}:{name}": ref for group, row in declared.items() for name, ref in row.items()}


@pytest.mark.parametrize(("name", "reference"), entry_points().items(), ids=entry_points())
def test_every_entry_point_can_be_loaded(name: str, reference: str) -> None:
    """What the metadata promises is importable and callable."""
    module, _, attribute = reference.partition(":")
    assert callable(getattr(importlib.import_module(module), attribute)), name


@pytest.mark.parametrize("package", PACKAGES)
def test_both_packages_are_typed(package: str) -> None:
    """A type checker in the user's project reads our annotations."""
    assert (ROOT / package / "py.typed").is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built offline by the build back end itself."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = directory.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata_of(wheel: zipfile.ZipFile) -> email.message.Message:
    """The wheel's METADATA."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_the_wheel_holds_both_packages_whole(wheel: zipfile.ZipFile) -> None:
    """Every file of the packages, data and type markers too, byte for byte."""
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {
        name: wheel.read(name)
        for name in wheel.namelist()
        if not name.partition("/")[0].endswith(".dist-info")
    }
    assert sorted(packed) == sorted(sources)
    assert packed == sources


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    """Name, version, licence and the lowest Python are in its metadata."""
    metadata = metadata_of(wheel)

    assert metadata["Name"] == "token-capture"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    licences = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    assert len(licences) == 1
    assert b"Apache License" in wheel.read(licences[0])


def distribution_name(requirement: str) -> str:
    """The normalised name that a requirement begins with."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("-", "_")


def test_every_import_is_a_declared_dependency() -> None:
    """The packages import nothing that they got by luck, through somebody else's dependencies."""
    extras = PROJECT["optional-dependencies"]
    optional = {line for name, lines in extras.items() if name != "dev" for line in lines}
    declared = {distribution_name(line) for line in {*PROJECT["dependencies"], *optional}}
    # The engine is there where middleware/vllm.py runs; the rest is part of the interface of a
    # declared dependency (pydantic, aiohttp), which cannot be installed without it, or the name
    # space that several declared ones share.
    given = {"vllm", "pydantic_core", "multidict", "yarl", "opentelemetry"}
    known = declared | set(sys.stdlib_module_names) | set(PACKAGES) | given

    undeclared = {
        f"{path.relative_to(ROOT)}: {root}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for root in imported_roots(path) - known
    }
    assert undeclared == set()


def imported_roots(path: Path) -> set[str]:
    """The top-level names of a file's absolute imports."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.partition(".")[0])
    return roots
