"""The chat template: messages and tools as one ChatML-like text.

Invariant: rendering is a pure function of its arguments, and the rendering of a conversation
without its last messages is a prefix of the rendering of the whole, unless ``strip_reasoning``
removes earlier thinking (as several real templates do). Tool arguments are parsed and written
again, as vLLM does before templating, so their spacing is not the model's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from capture_server.demo.errors import EngineRequestError

_TOOLS_HEAD = (
    "You can call tools. To call one, write its name and its arguments as JSON between "
    "<tool_call> and </tool_call>.\n"
)
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})

Message = Mapping[str, Any]


def render(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    thinking: bool = False,
    strip_reasoning: bool = False,
) -> str:
    """The prompt text.

    ``thinking`` opens a think block for the answer; ``strip_reasoning`` leaves out the reasoning
    of assistant turns before the last user message.

    Raises:
        EngineRequestError: a message that cannot be rendered.
    """
    if add_generation_prompt and continue_final_message:
        raise EngineRequestError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        )
    blocks: list[str] = []
    rest = list(messages)
    if tools:
        system = ""
        if rest and _role(rest[0]) in ("system", "developer"):
            system = message_text(rest.pop(0)) + "\n\n"
        blocks.append(f"<|im_start|>system\n{system}{_tools_text(tools)}<|im_end|>\n")
    last_user = max((i for i, m in enumerate(rest) if _role(m) == "user"), default=-1)
    for index, message in enumerate(rest):
        keep_reasoning = not strip_reasoning or index > last_user
        blocks.append(_block(message, keep_reasoning=keep_reasoning))
    if continue_final_message and blocks:
        blocks[-1] = blocks[-1].removesuffix("<|im_end|>\n")
    if add_generation_prompt:
        blocks.append("<|im_start|>assistant\n" + ("<think>\n" if thinking else ""))
    return "".join(blocks)


def message_text(message: Message) -> str:
    """The text of one message's content: a string, a list of text parts, or nothing."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise EngineRequestError(f"Message content must be a string or a list, got {content!r}")
    return "\n".join(_part_text(part) for part in content)


def is_plain_text(messages: Sequence[Message]) -> bool:
    """Whether no message holds a part that is not text (an image, audio...)."""
    parts = [p for m in messages if isinstance(m.get("content"), list) for p in m["content"]]
    return all(isinstance(p, str) or p.get("type") in _TEXT_PARTS for p in parts)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
        return str(part.get("text") or part.get("refusal") or "")
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise EngineRequestError(f"This model does not support {kind!r} content: it reads text only")


def _role(message: Message) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise EngineRequestError("Every message needs a role", param="messages")
    return role


def _block(message: Message, *, keep_reasoning: bool) -> str:
    role = _role(message)
    text = message_text(message)
    if role == "assistant":
        text = _assistant_text(message, text, keep_reasoning=keep_reasoning)
    if role == "developer":
        role = "system"
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _assistant_text(message: Message, text: str, *, keep_reasoning: bool) -> str:
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning and keep_reasoning:
        text = f"<think>\n{reasoning}</think>{text}"
    calls = [_call_text(call) for call in message.get("tool_calls") or ()]
    if calls and text and not text.endswith("\n"):
        text += "\n"
    return text + "\n".join(calls)


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as exc:
            raise EngineRequestError(f"Tool call arguments are not valid JSON: {exc}") from exc
    body = {"name": function.get("name"), "arguments": arguments}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


def _tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    return _TOOLS_HEAD + "\n".join(lines)
