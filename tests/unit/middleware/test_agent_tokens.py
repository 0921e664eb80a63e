"""Signed rollout ids: what is accepted, by which comparison, and what is kept secret."""

from __future__ import annotations

import hmac
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware.agent_tokens import AgentTokens, split_keys
from middleware.errors import ConfigurationError, InvalidIdError, UnauthorizedError
from middleware.paths import capture_base_url, parse_tagged_path

KEY, OLD, OTHER = "k" * 40, "o" * 40, "x" * 40


def path_of(segment: str) -> bytes:
    return f"/ng-rollout/{segment}/training-token-capture/v1/models".encode()


def test_a_signed_path_yields_the_plain_id() -> None:
    """Behind the parser nobody meets a signature."""
    tokens = AgentTokens([KEY])
    url = capture_base_url("http://h", "r1", tokens)

    tagged = parse_tagged_path(url.removeprefix("http://h").encode(), agent_tokens=tokens)

    assert tagged is not None
    assert (tagged.rollout_id, tagged.signed, tagged.rest) == ("r1", True, b"/v1")


def test_the_first_key_signs_and_each_is_accepted() -> None:
    """A rotation: new URLs are signed by the new key while old ones still work."""
    both = AgentTokens([KEY, OLD])

    assert both.sign("r1") == AgentTokens([KEY]).sign("r1")
    for minted in (AgentTokens([KEY]).sign("r1"), AgentTokens([OLD]).sign("r1")):
        assert parse_tagged_path(path_of(minted), agent_tokens=both) is not None
    with pytest.raises(UnauthorizedError):
        parse_tagged_path(path_of(AgentTokens([OTHER]).sign("r1")), agent_tokens=both)


def test_a_signature_fits_one_rollout_only() -> None:
    """Nobody moves to a neighbour's path with his own signature."""
    tokens = AgentTokens([KEY])
    signature = tokens.sign("r1").partition("~")[2]

    for other in ("r2", "r11", "R1", "r"):
        with pytest.raises(UnauthorizedError):
            parse_tagged_path(path_of(f"{other}~{signature}"), agent_tokens=tokens)


@given(st.text(max_size=60))
def test_no_guess_passes(guess: str) -> None:
    """Whatever stands in the signature's place, it is refused and nothing breaks."""
    tokens = AgentTokens([KEY])
    if f"r1~{guess}" == tokens.sign("r1"):
        return
    with pytest.raises(UnauthorizedError):
        tokens.verify("r1", guess)


def test_every_bit_of_the_signature_counts() -> None:
    """Cut, extended, padded, in another case: refused."""
    tokens = AgentTokens([KEY])
    signature = tokens.sign("r1").partition("~")[2]
    assert len(signature) == 43

    for wrong in (signature[:-1], signature + "=", signature + "A", signature.swapcase(), ""):
        with pytest.raises(UnauthorizedError):
            tokens.verify("r1", wrong)


def test_the_comparison_takes_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is compared by ``hmac.compare_digest``, also after one has fitted."""
    compared: list[tuple[Any, Any]] = []
    real = hmac.compare_digest

    def spy(a: Any, b: Any) -> bool:
        compared.append((a, b))
        return real(a, b)

    tokens = AgentTokens([KEY, OLD])
    monkeypatch.setattr("middleware.agent_tokens.hmac.compare_digest", spy)
    tokens.verify("r1", tokens.sign("r1").partition("~")[2])

    assert len(compared) == 2


def test_without_signing_a_tilde_is_an_invalid_id() -> None:
    """The id rule knows no tilde; a signed URL at the wrong server says so."""
    with pytest.raises(InvalidIdError):
        parse_tagged_path(path_of(AgentTokens([KEY]).sign("r1")))


@pytest.mark.parametrize("bad", ["..", "%2e%2e", "a%2Fb", "r%00", "%72%31%0a", "-r"])
def test_a_signature_does_not_excuse_a_bad_id(bad: str) -> None:
    """The id rule holds first."""
    with pytest.raises(InvalidIdError):
        parse_tagged_path(path_of(f"{bad}~{'A' * 43}"), agent_tokens=AgentTokens([KEY]))


def test_keys_are_strong_and_not_shown() -> None:
    """Weak keys are refused without being quoted; the signer's repr shows none."""
    assert split_keys(f" {KEY},{OLD}\n{KEY} ") == (KEY, OLD)
    with pytest.raises(ValueError, match="32 or more") as caught:
        split_keys("tooshort")
    assert "tooshort" not in str(caught.value)
    assert KEY not in repr(AgentTokens([KEY]))
    with pytest.raises(ConfigurationError):
        AgentTokens([])
