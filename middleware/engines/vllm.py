"""vLLM's HTTP shapes: ids on the choices, log-probs beside them.

Chat: ``prompt_token_ids`` at the top level (in streams on each choice's first chunk),
``choices[i].token_ids``, ``choices[i].logprobs.content[].logprob``. Completions: all three
inside the choice. Source: spec 06b 1.2-1.5, seen on 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from middleware.engines.base import TokenAsk, TokenBundle
from middleware.json_edit import Edit, EditTree


class VLLMProfile:
    """vLLM >= 0.10.2, and engines that answer in its shape.

    ``unset`` says how the engine prints an optional that was not asked for: vLLM prints
    ``null``, so that is what the agent gets back; a server that omits such members is served
    by ``"drop"``.
    """

    def __init__(self, name: str = "vllm", *, unset: Edit = "null") -> None:
        self.name: Final = name
        self._unset: Final = unset

    def ask(self, dialect: str, body: Mapping[str, Any]) -> TokenAsk:
        """``return_token_ids`` and log-probs of the sampled token, whatever the agent said.

        Source: spec 06b 0.4 (``top_logprobs: 0`` is sent explicitly), cases C19.
        """
        wants_ids = body.get("return_token_ids") is True
        if dialect == "completions":
            asked = body.get("logprobs")
            # For completions 0 is a request (the sampled token's log-prob), None is not.
            wants_log_probs = isinstance(asked, int) and not isinstance(asked, bool)
            members: dict[str, Any] = {"return_token_ids": True}
            if not wants_log_probs:
                members["logprobs"] = 0
            hide: EditTree = self._hide(wants_ids, wants_log_probs, prompt_in_choice=True)
            return _with_usage(
                TokenAsk(members, hide, hide, not wants_ids and not wants_log_probs), body
            )
        wants_log_probs = body.get("logprobs") is True
        top = body.get("top_logprobs")
        has_top = isinstance(top, int) and not isinstance(top, bool)
        members = {"logprobs": True, "return_token_ids": True}
        if not has_top:
            members["top_logprobs"] = 0
        hide = self._hide(wants_ids, wants_log_probs, prompt_in_choice=False)
        if body.get("include_reasoning") is False:
            # With it vLLM suppresses ids too (06b 0.7): override, and drop the text ourselves.
            members["include_reasoning"] = True
            hide = _hide_reasoning(hide)
        return _with_usage(
            TokenAsk(members, hide, hide, not wants_ids and not wants_log_probs), body
        )

    def read(
        self, dialect: str, payload: Mapping[str, Any], choice: Mapping[str, Any], *, echo: bool
    ) -> TokenBundle:
        """See the module's docstring for where each array stands."""
        log_probs = choice.get("logprobs")
        ids = choice.get("token_ids")
        if dialect == "completions":
            prompt = choice.get("prompt_token_ids")
            values = log_probs.get("token_logprobs") if isinstance(log_probs, dict) else None
            if echo and isinstance(values, list) and isinstance(ids, list):
                values = _without_prompt(values, prompt, ids)
        else:
            prompt = payload.get("prompt_token_ids")
            content = log_probs.get("content") if isinstance(log_probs, dict) else None
            values = [_log_prob(item) for item in content] if isinstance(content, list) else None
        return TokenBundle(
            prompt if isinstance(prompt, list) else None,
            ids if isinstance(ids, list) else None,
            values if isinstance(values, list) else None,
            choice.get("routed_experts"),
        )

    def _hide(
        self, wants_ids: bool, wants_log_probs: bool, *, prompt_in_choice: bool
    ) -> dict[str, Any]:
        in_choice: dict[str, Any] = {}
        top: dict[str, Any] = {}
        if not wants_ids:
            in_choice["token_ids"] = self._unset
            (in_choice if prompt_in_choice else top)["prompt_token_ids"] = self._unset
        if not wants_log_probs:
            in_choice["logprobs"] = self._unset
        if in_choice:
            top["choices"] = {"*": in_choice}
        return top


def _with_usage(ask: TokenAsk, body: Mapping[str, Any]) -> TokenAsk:
    """In streams also ask for the token counts: nothing else shows that a chunk was lost."""
    if body.get("stream") is not True:
        return ask
    options = body.get("stream_options")
    options = options if isinstance(options, dict) else {}
    if options.get("include_usage") is True:
        return ask
    members = {**ask.members, "stream_options": {**options, "include_usage": True}}
    return replace(ask, members=members, hides_usage=True)


def _hide_reasoning(hide: Mapping[str, Any]) -> EditTree:
    gone: EditTree = {"reasoning": "drop", "reasoning_content": "drop"}
    in_choice = dict(hide.get("choices", {}).get("*", {}))
    in_choice |= {"message": gone, "delta": gone}
    return {**hide, "choices": {"*": in_choice}}


def _without_prompt(values: list[Any], prompt: Any, ids: list[Any]) -> list[Any]:
    """echo puts the prompt's log-probs first (06b 0.5); any other surplus stays a defect."""
    if isinstance(prompt, list) and len(values) == len(prompt) + len(ids):
        return values[len(prompt) :]
    return values


def _log_prob(item: Any) -> Any:
    return item.get("logprob") if isinstance(item, dict) else None
