"""Rules that hold for the source tree as a whole, whoever writes the next file."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("middleware", "capture_server")

# It must be able to ride inside an engine's process, with the engine's own dependencies.
FORBIDDEN_IN_MIDDLEWARE = frozenset(
    {"capture_server", "fastapi", "httpx", "aiohttp", "uvicorn", "typer", "rich"}
    | {"psycopg", "psycopg_pool", "asyncpg", "sqlite3", "sqlalchemy"}
)
# Written in pieces, so that this file does not find itself.
MACHINE_PATH = re.compile(
    r"(?<![\w.~$})-])/(?:" + "|".join(["work", "root", "farm"]) + f")/|{re.escape(str(ROOT))}/"
)
INDEX_HOST = re.compile(
    "|".join([r"py" + r"pi\.org", "python" + r"hosted\.org", r"\bdev" + "pi", "--index" + "-url"])
)


def project_files() -> list[Path]:
    """Every text file that is, or would be, in the repository; copied test data excepted."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    names = [name for name in listed.stdout.decode().split("\0") if name]
    paths = [ROOT / name for name in names if not name.startswith("tests/data/")]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    """``file:line: text`` of every match in the project's files."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in project_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]


def python_files(*roots: str) -> list[Path]:
    """The Python files below these folders."""
    return sorted(path for root in roots for path in (ROOT / root).rglob("*.py"))


def name_of(path: Path) -> str:
    """A short test id."""
    return str(path.relative_to(ROOT))


needs_git = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="a source archive has no list of its files"
)


@needs_git
def test_no_file_names_a_place_on_somebodys_machine() -> None:
    """Absolute paths of a developer's or a CI machine work nowhere else."""
    assert lines_matching(MACHINE_PATH) == []


@needs_git
def test_no_file_names_a_package_index() -> None:
    """Which index is used is a matter of the machine's own pip configuration."""
    assert lines_matching(INDEX_HOST) == []


@needs_git
def test_the_patterns_find_what_they_are_for() -> None:
    """A scan that cannot find anything proves nothing."""
    assert MACHINE_PATH.search("see " + "/wo" + "rk/main/x.py")
    assert not MACHINE_PATH.search("GET /v1/work/items")
    assert INDEX_HOST.search("https://py" + "pi.org/simple")
    assert ROOT / "pyproject.toml" in project_files()


def imported_roots(path: Path) -> set[str]:
    """The top-level names that a file imports anywhere, in functions and type checks too."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            roots.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            # import_module("x"), __import__("x"): by a literal name it is as static as the others.
            literals = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            roots |= {str(value).partition(".")[0] for value in literals}
    return roots


@pytest.mark.parametrize("path", python_files("middleware"), ids=name_of)
def test_middleware_knows_nothing_of_the_server(path: Path) -> None:
    """Arrows go one way: no import of the server, a web framework, a client or a driver."""
    assert imported_roots(path) & FORBIDDEN_IN_MIDDLEWARE == set()


def test_importing_all_of_middleware_loads_nothing_forbidden() -> None:
    """Nor does it come in through something that middleware imports."""
    code = (
        "import importlib, pkgutil, sys, middleware\n"
        "for found in pkgutil.walk_packages(middleware.__path__, 'middleware.'):\n"
        "    importlib.import_module(found.name)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) & FORBIDDEN_IN_MIDDLEWARE == set()


def test_the_server_does_not_import_the_tests() -> None:
    """Neither package needs what the wheel does not hold."""
    found = {name_of(path) for path in python_files(*PACKAGES) if "tests" in imported_roots(path)}
    assert found == set()


def packages() -> list[str]:
    """Both packages and their sub-packages, by dotted name."""
    names = list(PACKAGES)
    for package in PACKAGES:
        found = pkgutil.walk_packages([str(ROOT / package)], f"{package}.")
        names += [module.name for module in found if module.ispkg]
    return names


@pytest.mark.parametrize("package", packages())
def test_public_names_exist(package: str) -> None:
    """Whatever a package's ``__all__`` promises is there, once."""
    module = importlib.import_module(package)
    promised = list(getattr(module, "__all__", []))

    assert [name for name in promised if not hasattr(module, name)] == []
    assert len(promised) == len(set(promised))


@pytest.mark.parametrize("package", PACKAGES)
def test_both_packages_say_what_is_public(package: str) -> None:
    """A user imports from the package itself; ``__all__`` says what."""
    assert importlib.import_module(package).__all__


def test_every_module_says_what_it_is_for() -> None:
    """Each file that holds code begins with a docstring."""
    silent = [
        name_of(path)
        for path in python_files(*PACKAGES, "tests")
        if (tree := ast.parse(path.read_text(encoding="utf-8"))).body
        and ast.get_docstring(tree) is None
    ]
    assert silent == []


def test_every_test_says_what_it_proves() -> None:
    """One sentence of behaviour per test: that is what a failure report is read for."""
    silent = [
        f"{name_of(path)}: {node.name}"
        for path in python_files("tests")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and path.name.startswith("test_")
        and ast.get_docstring(node) is None
    ]
    assert silent == []


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    """A file is named by its one idea."""
    drawers = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
    found = [name_of(path) for path in python_files(*PACKAGES) if path.stem in drawers]
    assert found == []
