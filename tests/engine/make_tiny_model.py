"""Make a tiny random chat model that a real vLLM can serve: ``make_tiny_model.py DIR``.

Deterministic: the same versions of torch and tokenizers give the same weights and vocabulary.
The model says nothing sensible, and need not: what is tested is who sampled which token. It runs
in the engine's own environment (torch, tokenizers, transformers), never in the project's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 20_260
VOCABULARY = 704
CONTEXT = 2048
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = [END_OF_TEXT, TURN_START, TURN_END, "<tool_call>", "</tool_call>"]

# Enough prose, JSON and code that common pieces become one token and everything else falls back
# to single bytes: both kinds have to survive capture.
TEXT = [
    "A lighthouse keeper counts the ships that pass at night and writes their names in a book.",
    "When the fog comes in, the bell is rung once every minute until the harbour is clear again.",
    "Please look up the weather in Lisbon, then tell me whether to take the ferry or the train.",
    'You may call a function: {"name": "look_up", "arguments": {"place": "Lisbon", "days": 3}}',
    '{"temperature": 17.5, "wind": "north-west", "rain": false, "hours": [6, 12, 18, 24]}',
    "def fare(distance, rate=0.42):\n    return round(distance * rate, 2)\n",
    "user assistant system tool: yes, no, thanks; 0 1 2 3 4 5 6 7 8 9",
]

CHAT_TEMPLATE = r"""
{%- macro text(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
  {{- '<|im_start|>system\nYou may call these functions:\n' -}}
  {%- for tool in tools -%}{{- tool | tojson -}}{{- '\n' -}}{%- endfor -%}
  {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' ~ message.role ~ '\n' ~ text(message.content) -}}
  {%- for call in message.tool_calls or [] -%}
    {%- set arguments = call.function.arguments -%}
    {{- '\n<tool_call>\n{"name": ' ~ call.function.name | tojson ~ ', "arguments": ' -}}
    {{- arguments if arguments is string else arguments | tojson -}}
    {{- '}\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the text above; any UTF-8 string can be encoded."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=MARKERS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = CHAT_TEMPLATE.strip()
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Two random layers. float32: the same request must give the same tokens twice."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.float32)


def main(out: Path) -> None:
    """Write tokenizer, weights and generation settings into ``out``."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(out)
    make_model(tokenizer).save_pretrained(out, safe_serialization=True)
    defaults = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (out / "generation_config.json").write_text(json.dumps(defaults))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_tiny_model.py DIR")
    main(Path(sys.argv[1]))
