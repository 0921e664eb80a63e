"""Log-probs from the weights alone: rows as JSON on stdin, log-probs as JSON on stdout.

``recompute.py MODEL``; runs in the engine's environment with transformers, in float32, and knows
nothing of vLLM or of this project.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main(model_dir: str) -> None:
    """One list per row: the log-prob of each token whose mask is 1."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    answers = []
    with torch.inference_mode():
        for row in json.load(sys.stdin):
            ids = torch.tensor([row["token_ids"]])
            logits = model(ids).logits[0]
            all_log_probs = torch.log_softmax(logits.float(), dim=-1)
            positions = [i for i, mask in enumerate(row["loss_mask"]) if mask]
            answers.append([float(all_log_probs[i - 1, ids[0, i]]) for i in positions])
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
