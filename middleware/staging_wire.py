"""What goes over the wire in external staging: strict base types, and the admission of a call.

An admission rides on the engine-bound request and tells a framework's worker where the call's
tokens chain. Invariant: a value that was validated here is exactly of the declared types (`1.0`
is no integer, `1` no float, `true` neither) and holds nothing undeclared. The other wire models
live in ``capture_server.staging.records``. Source: spec 07 and 10.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, model_validator

STAGING_SCHEMA_VERSION: Final = 2

CaptureMode = Literal["token_in", "text"]
Identifier = Annotated[str, Field(strict=True, min_length=1)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
DigestHex = Annotated[str, Field(strict=True, pattern="^[0-9a-f]{64}$")]


def _only_float(value: Any) -> Any:
    # Pydantic's strict float takes integers; the hashes tell the two apart.
    if type(value) is not float:
        raise ValueError("must be a float")
    return value


def _only_floats(values: Any) -> Any:
    if type(values) is not list or set(map(type, values)) - {float}:
        raise ValueError("must be a list of floats")
    return values


def _only_int(value: Any) -> Any:
    # A literal takes whatever is equal: 2.0, and True for 1.
    if type(value) is not int:
        raise ValueError("must be an integer")
    return value


Version1 = Annotated[Literal[1], BeforeValidator(_only_int)]
Version2 = Annotated[Literal[2], BeforeValidator(_only_int)]
ExactFloat = Annotated[float, BeforeValidator(_only_float)]
FloatList = Annotated[list[float], BeforeValidator(_only_floats)]


class WireModel(BaseModel):
    """Base of all wire models: immutable, strict, nothing undeclared, no NaN or infinity."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # token ids and texts never appear in logs
    )


def check_placement(parent_call_id: str | None, mode: str, prev_len: int) -> None:
    """Refuse a call whose mode and position contradict its parent.

    Raises:
        ValueError: a root is ``text`` at 0, a child ``token_in`` behind its parent's tokens.
    """
    if parent_call_id is None and (mode != "text" or prev_len != 0):
        raise ValueError("a root is of mode text and starts at 0")
    if parent_call_id is not None and (mode != "token_in" or prev_len == 0):
        raise ValueError("a call with a parent is of mode token_in and starts behind its tokens")


class CaptureAdmission(WireModel):
    """Leave for one worker call to stage its delta.

    A child says where its prefix is: ``staging_chain``, the staging keys of its ancestors, root
    first, or the ``prev_len`` ids themselves. ``parent_chain_hash`` is what its own chain hash
    extends.
    """

    schema_version: Version2 = STAGING_SCHEMA_VERSION
    rollout_id: Identifier
    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    prev_len: NonNegativeInt = 0
    mode: CaptureMode
    required_prefix_token_ids: list[Annotated[StrictInt, Field(ge=0)]] = Field(default_factory=list)
    staging_chain: list[Identifier] = Field(default_factory=list)
    parent_chain_hash: DigestHex | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_placement(self.parent_call_id, self.mode, self.prev_len)
        inline, chain = self.required_prefix_token_ids, self.staging_chain
        if self.parent_call_id is None:
            if inline or chain or self.parent_chain_hash is not None:
                raise ValueError("a root has no prefix and no parent's chain hash")
            return self
        if self.parent_chain_hash is None:
            raise ValueError("a child needs its parent's chain hash")
        if bool(inline) == bool(chain):
            raise ValueError("a child's prefix is either inline or named by a staging chain")
        if inline and len(inline) != self.prev_len:
            raise ValueError(f"{len(inline)} prefix ids for prev_len {self.prev_len}")
        return self
