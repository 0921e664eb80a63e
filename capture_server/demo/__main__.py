"""``python -m capture_server.demo``: serve the demo engine."""

from __future__ import annotations

import argparse

from capture_server.demo.engine import DemoEngine
from capture_server.demo.server import serve


def main() -> None:
    """Read the command line and serve until stopped."""
    parser = argparse.ArgumentParser(prog="python -m capture_server.demo", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="demo", help="served model name")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--token-delay-s", type=float, default=0.0, help="pause before each token")
    parser.add_argument(
        "--logprobs-mode",
        choices=["raw_logprobs", "processed_logprobs"],
        default="raw_logprobs",
    )
    parser.add_argument("--thinking", action="store_true", help="answer with reasoning first")
    parser.add_argument(
        "--strip-reasoning", action="store_true", help="drop earlier reasoning from prompts"
    )
    args = parser.parse_args()
    engine = DemoEngine(
        model_name=args.model,
        max_model_len=args.max_model_len,
        token_delay_s=args.token_delay_s,
        logprobs_mode=args.logprobs_mode,
        thinking=args.thinking,
        strip_reasoning=args.strip_reasoning,
    )
    serve(engine, host=args.host, port=args.port)


if __name__ == "__main__":
    main()
