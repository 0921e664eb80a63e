"""Chains as Responses payloads: content items that carry contiguous token arrays.

The seed's delivery shape. Every generated item repeats the whole prompt up to it, so its size is
quadratic in the number of calls; ``traces`` is the compact form that trainers should use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capture_server.trajectories.chains import Chain
from middleware.errors import InvalidInputError
from middleware.records import TOKEN_FIELDS, TokenEntry

if TYPE_CHECKING:
    from capture_server.trajectories.builder import BuildOutput


def project_chain_to_output_items(chain: Chain) -> list[dict[str, Any]]:
    """The captured content items, each call's token arrays on one of them (new dicts).

    The arrays go on the item that carried them, else on the call's last item; a token-only item
    stands in only where a call has no content items.
    """
    # One list for all prompts: its slices share the number objects.
    tokens = chain.token_ids.tolist()
    items: list[dict[str, Any]] = []
    for entry, start, end in chain.generation_spans():
        own = [_without_tokens(item) for item in entry.output_items] or [{"type": "message"}]
        at = entry.token_item_index if entry.token_item_index is not None else -1
        own[at] |= _token_fields(entry, tokens[:start], tokens[start:end])
        items += own
    return items


def _without_tokens(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in TOKEN_FIELDS}


def _token_fields(entry: TokenEntry, prompt: list[int], generated: list[int]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt_token_ids": prompt,
        "generation_token_ids": generated,
        "generation_log_probs": entry.generation_log_probs.tolist(),
    }
    if entry.routed_experts is not None:
        fields["routed_experts"] = entry.routed_experts
    return fields


def project_main_chain_response(
    rollout_id: str, out: BuildOutput, model: str = ""
) -> dict[str, Any]:
    """The main chain as one Responses object.

    ``usage``: ``input_tokens`` is the length of the main chain's root prompt, ``output_tokens``
    the generated tokens delivered.

    Raises:
        InvalidInputError: the build has no main chain (``per_request`` never has one).
    """
    main = out.main_chain
    if main is None:
        raise InvalidInputError(f"the build of rollout {rollout_id!r} has no main chain to project")
    main.validate()
    return {
        "id": rollout_id,
        "object": "response",
        "created_at": main.links[0].entry.created_at,
        "status": "completed",
        "model": model or main.links[-1].entry.model,
        "output": project_chain_to_output_items(main),
        "usage": {
            "input_tokens": len(main.root_prompt),
            "output_tokens": out.notes.generated_tokens_delivered,
        },
    }


def assert_prefix_contiguity(response: dict[str, Any]) -> None:
    """Require each generated item's prompt to extend all tokens before it.

    Raises:
        AssertionError: naming the item that does not.
    """
    before: list[int] = []
    for at, item in enumerate(response.get("output") or []):
        generated = item.get("generation_token_ids") if isinstance(item, dict) else None
        if not generated:
            continue
        prompt = list(item.get("prompt_token_ids") or [])
        if prompt[: len(before)] != before:
            raise AssertionError(
                f"output item {at}: its prompt does not start with the {len(before)} tokens "
                "of the items before it"
            )
        before = prompt + list(generated)
