"""The tiny model with the turn markers of several template families: ``make_model.py DIR``.

As ``make_tiny_model.py``, which does the work, with more special tokens; each family's end of
turn is among the model's own end tokens. Runs in the engine's environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

THINKING = ["<think>", "</think>"]
LLAMA_LIKE = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MISTRAL_LIKE = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"]
END_TOKENS = ["<|im_end|>", "<|eot_id|>", "</s>"]


def main(out: Path) -> None:
    """Write the model into ``out``."""
    # Here, not above: it needs torch, and it lies one folder up, outside any package there.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import make_tiny_model

    make_tiny_model.MARKERS += [*THINKING, *LLAMA_LIKE, *MISTRAL_LIKE]
    make_tiny_model.main(out)
    settings = out / "generation_config.json"
    vocabulary = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    changed = json.loads(settings.read_text())
    changed["eos_token_id"] = [vocabulary[token] for token in END_TOKENS]
    settings.write_text(json.dumps(changed))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_model.py DIR")
    main(Path(sys.argv[1]))
