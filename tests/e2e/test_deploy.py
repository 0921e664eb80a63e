"""What stands in ``deploy/`` is accepted by the tools that read it, and names only what we have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from capture_server.cli import app
from capture_server.config import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
TOOLS = Path(sys.executable).parent


def accepted(*command: str | Path, cwd: Path = DEPLOY) -> str:
    """The output of a validator that must find nothing."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def needs(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed (bash .ci/system_packages)")
    return path


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def containers() -> list[dict[str, Any]]:
    """Every container of ours: the sidecar, and the migration before it."""
    pods = [d["spec"]["template"]["spec"] for d in documents(DEPLOY / "kubernetes/deployment.yaml")]
    both = [c for pod in pods for c in pod.get("initContainers", []) + pod["containers"]]
    return [c for c in both if c["image"].startswith("token-capture")]


def test_dockerfile() -> None:
    """hadolint finds nothing, the image is not root's, and what it copies exists."""
    accepted(TOOLS / "hadolint", "Dockerfile")
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^USER (?!0|root)", text, re.MULTILINE)
    kept = {
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().split()
        if line[0] == "!"
    }
    for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists(), source
            assert source in kept, f"{source} is left out by Dockerfile.dockerignore"


def test_compose() -> None:
    """The file fits the Compose schema, uses every secret, and keeps the control port at home."""
    accepted(TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml")
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    used = {name for service in compose["services"].values() for name in service.get("secrets", [])}
    assert used == set(compose["secrets"])
    assert all(
        port.startswith("127.0.0.1:")
        for service in compose["services"].values()
        for port in service.get("ports", [])
        if port.endswith(":8901")
    ), "the control port must not be published to the network"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_kubernetes_manifest(manifest: Path) -> None:
    """Each resource fits its API's schema."""
    if manifest.stem != "kustomization":
        accepted(TOOLS / "kubernetes-validate", "--strict", manifest)


def test_kustomization_names_every_manifest() -> None:
    """None is forgotten, none is missing."""
    (kustomization,) = documents(DEPLOY / "kubernetes/kustomization.yaml")
    assert sorted([*kustomization["resources"], "kustomization.yaml"]) == [
        m.name for m in MANIFESTS
    ]


def test_agents_reach_the_model_port_only() -> None:
    """In the policy, in the services, and in the engine's own binding."""
    (policy,) = documents(DEPLOY / "kubernetes/networkpolicy.yaml")
    for rule in policy["spec"]["ingress"]:
        roles = {peer["namespaceSelector"]["matchLabels"]["role"] for peer in rule["from"]}
        ports = {port["port"] for port in rule["ports"]}
        assert ports == ({8900} if "agents" in roles else {8901})
    (deployment,) = documents(DEPLOY / "kubernetes/deployment.yaml")
    pod = deployment["spec"]["template"]["spec"]
    engine = next(c for c in pod["containers"] if c["name"] == "vllm")
    assert engine["args"][engine["args"].index("--host") + 1] == "127.0.0.1"
    for container in containers():
        assert container["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]


def our_commands() -> list[tuple[str, list[str]]]:
    """(file, arguments after ``token-capture``) of every place that starts us."""
    found = [(f"deployment.yaml {c['name']}", c["args"]) for c in containers()]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    found += [
        (f"compose.yaml {name}", service["command"])
        for name, service in compose["services"].items()
        if service["image"].startswith("token-capture")
    ]
    unit = (DEPLOY / "systemd/token-capture.service").read_text()
    start = re.search(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)
    assert start is not None
    return [*found, ("token-capture.service", start[1].split())]


@pytest.mark.parametrize(("place", "arguments"), our_commands(), ids=lambda value: str(value)[:40])
def test_commands_exist_with_their_flags(place: str, arguments: list[str]) -> None:
    """What starts us is a command that we have, with flags that it knows."""
    command = get_command(app).commands[arguments[0]]  # type: ignore[attr-defined]
    known = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in arguments if word.startswith("--")} <= known, place


def test_every_environment_variable_is_a_setting() -> None:
    """A misspelt one would stop the sidecar at its start."""
    known = {f"TOKEN_CAPTURE_{name.upper()}" for name in Settings.model_fields}
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            assert set(re.findall(r"\bTOKEN_CAPTURE_[A-Z_]+\b", path.read_text())) <= known, path


def test_systemd_unit(tmp_path: Path) -> None:
    """systemd accepts the unit (its program stands in for ours) and finds it well locked."""
    analyze = needs("systemd-analyze")
    unit = tmp_path / "token-capture.service"
    text = (DEPLOY / "systemd/token-capture.service").read_text()
    unit.write_text(text.replace("/usr/local/bin/token-capture", "/bin/true"))
    assert accepted(analyze, "verify", "--man=no", unit) == ""
    exposure = accepted(analyze, "security", "--offline=true", unit)
    level = re.search(r"Overall exposure level\D*([\d.]+)", exposure)
    assert level is not None and float(level[1]) < 3, exposure


def test_alerts() -> None:
    """promtool accepts rules and configuration, and the rules fire when they should."""
    promtool = needs("promtool")
    accepted(promtool, "check", "rules", "prometheus/alerts.yaml")
    accepted(promtool, "test", "rules", "prometheus/alerts.test.yaml")
    accepted(promtool, "check", "config", "prometheus/scrape.yaml")


def dashboard_expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana/token-capture.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


def test_dashboard_queries_are_promql(tmp_path: Path) -> None:
    """Prometheus can parse every panel."""
    promtool = needs("promtool")
    expressions = [
        e.replace("$__rate_interval", "5m").replace("$job", ".*") for e in dashboard_expressions()
    ]
    rules = [{"record": f"panel:{i}", "expr": e} for i, e in enumerate(expressions)]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in accepted(promtool, "check", "rules", path)


def test_alerts_point_into_the_runbook() -> None:
    """Each alert names a section that exists."""
    runbook = (ROOT / "docs/runbook.md").read_text()
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in runbook.splitlines()
        if line.startswith("#")
    }
    for rule in documents(DEPLOY / "prometheus/alerts.yaml")[0]["groups"][0]["rules"]:
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/runbook.md"
        assert anchor in anchors, rule["alert"]
