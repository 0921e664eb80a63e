"""Small chat templates of the kinds that real models have, and what they do, said once more.

``chat_template`` renders all kinds, chosen by the template variable ``kind``; without it, it is
the tiny model's own. ``Kind.new_part`` is the oracle: plain Python that writes what the kind's
template writes for the messages after an answer (tools, which one kind moves, are the caller's).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Reasoning is kept only where nothing from the user follows, as Qwen3 and DeepSeek do it.
_STRIPPING = r"""
{%- set ns = namespace(last_user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {{- '<|im_start|>system\n# Tools\n' ~ (tools | tojson) ~ '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set content = message.content or '' -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\n<tool_response>\n' ~ content ~ '\n</tool_response><|im_end|>\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- if loop.index0 < ns.last_user -%}
      {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' ~ content -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '\n<tool_call>\n' ~ (call.function | tojson) ~ '\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- else -%}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ content ~ '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\n' if add_generation_prompt -}}
"""

# Trims every content; puts the tools into the first user message.
_LLAMA = r"""
{{- '<|begin_of_text|>' -}}
{%- set ns = namespace(tools=tools) -%}
{%- for message in messages -%}
  {%- set role = 'ipython' if message.role == 'tool' else message.role -%}
  {{- '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' -}}
  {%- if message.role == 'user' and ns.tools -%}
    {{- 'Tools: ' ~ (ns.tools | tojson) ~ '\n\n' -}}{%- set ns.tools = none -%}
  {%- endif -%}
  {%- if message.tool_calls -%}
    {%- set call = message.tool_calls[0].function -%}
    {{- '{"name": "' ~ call.name ~ '", "parameters": ' ~ (call.arguments | tojson) ~ '}' -}}
  {%- else -%}
    {{- (message.content or '') | trim -}}
  {%- endif -%}
  {{- '<|eot_id|>' -}}
{%- endfor -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' if add_generation_prompt -}}
"""

# Moves the system prompt and the tools to the last user message; no generation prompt.
_MISTRAL = r"""
{%- set ns = namespace(last_user=-1, system='') -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
  {%- if message.role == 'system' -%}{%- set ns.system = message.content ~ '\n\n' -%}{%- endif -%}
{%- endfor -%}
{{- '<s>' -}}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- if loop.index0 == ns.last_user -%}
      {{- ('Tools: ' ~ (tools | tojson)) if tools -}}
      {{- '[INST]' ~ ns.system ~ message.content ~ '[/INST]' -}}
    {%- else -%}
      {{- '[INST]' ~ message.content ~ '[/INST]' -}}
    {%- endif -%}
  {%- elif message.role == 'tool' -%}
    {{- '[TOOL_RESULTS]{"content": ' ~ (message.content | tojson) ~ '}[TOOL_RESULTS]' -}}
  {%- elif message.role == 'assistant' -%}
    {%- if message.tool_calls -%}
      {{- '[TOOL_CALLS]' ~ (message.tool_calls[0].function | tojson) ~ '</s>' -}}
    {%- else -%}
      {{- ' ' ~ (message.content or '') ~ '</s>' -}}
    {%- endif -%}
  {%- elif message.role != 'system' -%}
    {{- raise_exception('unknown role ' ~ message.role) -}}
  {%- endif -%}
{%- endfor -%}
"""

# Trims, and writes its headers in plain text.
_TRIMMING = r"""
{%- for message in messages -%}
  {%- set content = (message.content or '') | trim -%}
  {{- '### ' ~ message.role ~ ':\n' ~ content -}}
  {%- for call in message.tool_calls or [] -%}
    {{- '\n$ ' ~ (call.function | tojson) -}}
  {%- endfor -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{{- '### assistant:\n' if add_generation_prompt -}}
"""

# No end of turn anywhere: nothing can be supplied to it.
_BARE = r"""
{%- for message in messages -%}
  {{- message.role ~ ': ' ~ (message.content or '') ~ '\n' -}}
{%- endfor -%}
{{- 'assistant: ' if add_generation_prompt -}}
"""

Message = dict[str, Any]
NewPart = Callable[[Sequence[Message], str], str]


def _own(new: Sequence[Message], system: str) -> str:
    turns = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in new)
    return "\n" + "".join(turns) + "<|im_start|>assistant\n"


def _stripping(new: Sequence[Message], system: str) -> str:
    text = "\n"
    for message in new:
        content = message["content"]
        if message["role"] == "tool":
            text += f"<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n"
        else:
            text += f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


def _llama(new: Sequence[Message], system: str) -> str:
    text = ""
    for message in new:
        role = "ipython" if message["role"] == "tool" else message["role"]
        text += f"<|start_header_id|>{role}<|end_header_id|>\n\n{message['content'].strip()}"
        text += "<|eot_id|>"
    return text + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def _mistral(new: Sequence[Message], system: str) -> str:
    text = ""
    for position, message in enumerate(new):
        if message["role"] == "tool":
            content = json.dumps(message["content"], ensure_ascii=False)
            text += f'[TOOL_RESULTS]{{"content": {content}}}[TOOL_RESULTS]'
        else:
            is_last = all(other["role"] != "user" for other in new[position + 1 :])
            head = f"{system}\n\n" if system and is_last else ""
            text += f"[INST]{head}{message['content']}[/INST]"
    return text


def _trimming(new: Sequence[Message], system: str) -> str:
    turns = (f"### {m['role']}:\n{m['content'].strip()}<|im_end|>" for m in new)
    return "".join(turns) + "### assistant:\n"


@dataclass(frozen=True)
class Kind:
    """One kind of template. ``end`` closes a turn; ``new_part`` is what follows it."""

    name: str
    end: str
    new_part: NewPart


KINDS = {
    kind.name: kind
    for kind in (
        Kind("own", "<|im_end|>", _own),
        Kind("stripping", "<|im_end|>", _stripping),
        Kind("llama", "<|eot_id|>", _llama),
        Kind("mistral", "</s>", _mistral),
        Kind("trimming", "<|im_end|>", _trimming),
    )
}
_TEMPLATES = {
    "stripping": _STRIPPING,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "trimming": _TRIMMING,
    "bare": _BARE,
}


def chat_template(own: str) -> str:
    """One template for all kinds; ``own`` is the model's."""
    text = ""
    for number, (name, template) in enumerate(_TEMPLATES.items()):
        word = "elif" if number else "if"
        text += f"{{%- {word} kind is defined and kind == '{name}' -%}}{template.strip()}"
    return f"{text}{{%- else -%}}{own.strip()}{{%- endif -%}}"
