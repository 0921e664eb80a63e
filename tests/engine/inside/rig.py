"""Two processes as an operator runs them: vLLM with capture inside, and the control routes beside.

The store is the only thing that they share.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.engine import prepare
from tests.engine.inside import templates
from tests.engine.rig import (
    ENGINE_ENV,
    MODEL,
    ROOT,
    Engine,
    Process,
    Rollout,
    _clean_environment,
    free_port,
)

CAPTURE = "middleware.vllm.TokenCapture"
FLAGS = [
    *("--served-model-name", MODEL),
    *("--max-model-len", "2048"),
    *("--max-num-seqs", "32"),
    # vLLM 0.32 on CPU breaks off when a request with a seed is prefilled in several steps.
    *("--max-num-batched-tokens", "8192"),
    *("--dtype", "float32"),
    "--enforce-eager",
    "--disable-uvicorn-access-log",
    "--enable-prompt-tokens-details",
    *("--chat-template-content-format", "string"),
    "--enable-auto-tool-choice",
    *("--tool-call-parser", "hermes"),
    *("--middleware", CAPTURE),
]


def model_dir() -> Path:
    """The tiny model with the markers of all template kinds; made first if need be."""
    directory = ROOT / ".cache/tiny-model-inside"
    scripts = [Path(__file__).with_name("make_model.py"), prepare.MODEL_SCRIPT]
    content = b"".join(script.read_bytes() for script in scripts)
    made_by = hashlib.sha256(content).hexdigest()
    if not prepare.is_stamped(directory, made_by):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        python = prepare.engine_venv() / "bin/python"
        prepare.run(python, scripts[0], directory, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        (directory / prepare.STAMP).write_text(made_by)
    return directory


def install_capture() -> None:
    """Install this project into vLLM's environment, as ``pip install token-capture`` would."""
    venv = prepare.engine_venv()
    stamp = venv / ".token-capture-installed"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if not (stamp.is_file() and stamp.read_text() == wanted):
        prepare.run(venv / "bin/python", "-m", "pip", "install", "-qq", "--no-input", "-e", ROOT)
        stamp.write_text(wanted)


class InsideEngine(Engine):
    """A real ``vllm serve`` with capture inside."""

    def __init__(self, directory: Path, settings: dict[str, str], *flags: str) -> None:
        model = model_dir()
        template = directory / "all-kinds.jinja"
        own = (model / "chat_template.jinja").read_text(encoding="utf-8")
        template.write_text(templates.chat_template(own), encoding="utf-8")
        super().__init__(prepare.engine_venv() / "bin/vllm", model, directory / "vllm.log")
        self._known: dict[str, list[int]] = {}
        port = self.url.rpartition(":")[2]
        self.command = [
            *(str(prepare.engine_venv() / "bin/vllm"), "serve", str(model)),
            *("--host", "127.0.0.1", "--port", port, *FLAGS),
            *("--chat-template", str(template), *flags),
        ]
        names = {f"TOKEN_CAPTURE_{name}": value for name, value in settings.items()}
        self.env = ENGINE_ENV | {"VLLM_ENABLE_RESPONSES_API_STORE": "1"} | names

    def environment(self) -> dict[str, str]:
        """What the process is started with."""
        return _clean_environment() | self.env

    def token_ids(self, text: str) -> list[int]:
        """The tokens of a text, markers included, nothing added."""
        if text and text not in self._known:
            self._known[text] = self.tokenize(prompt=text, add_special_tokens=False)
        return self._known.get(text, [])


class Control(Process):
    """A real ``token-capture serve`` over the same store, without an engine behind it."""

    def __init__(self, store: str, log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "capture_server.cli", "serve", "--store", store]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        super().__init__("control", command, f"{self.url}/readyz", log)


@dataclass(frozen=True)
class InsideRollout(Rollout):
    """Model traffic goes to the engine, control to the server beside it."""

    engine: InsideEngine

    @property
    def base_url(self) -> str:
        """What the agent is given."""
        return f"{self.engine.url}{self.path}/v1"

    @property
    def path(self) -> str:
        """The tag."""
        return f"/ng-rollout/{self.rollout_id}/training-token-capture"

    def post_model(self, route: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        """One model call, whatever its status."""
        return httpx.post(f"{self.base_url}{route}", json=body, timeout=120, **more)


@dataclass
class Inside:
    """An engine with capture inside, its control server, and rollouts on them."""

    engine: InsideEngine
    control: Control
    made: int = 0

    def rollout(self) -> InsideRollout:
        """A rollout with a fresh id."""
        self.made += 1
        return InsideRollout(f"inside-{self.made}", self.control, self.engine)  # type: ignore[arg-type]


def recompute(rows: list[dict[str, Any]], model: Path) -> list[list[float]]:
    """The log-prob of every trained token of each row, by transformers in float32 on the CPU."""
    script = Path(__file__).with_name("recompute.py")
    done = subprocess.run(
        [str(prepare.engine_venv() / "bin/python"), str(script), str(model)],
        input=json.dumps([{k: row[k] for k in ("token_ids", "loss_mask")} for row in rows]),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
    )
    found: list[list[float]] = json.loads(done.stdout)
    return found
