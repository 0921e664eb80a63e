"""The byte-level BPE tokenizer and the text of token streams."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from capture_server.demo.model import load_default
from capture_server.demo.tokenizer import (
    NUM_SPECIAL,
    SPECIAL_TOKENS,
    StreamDecoder,
    Tokenizer,
    TokenNamer,
)

TOKENIZER = load_default()[0]
any_id = st.integers(0, TOKENIZER.vocab_size - 1)
plain_id = st.integers(NUM_SPECIAL, TOKENIZER.vocab_size - 1)


@given(st.text())
def test_every_text_survives_encoding(text: str) -> None:
    """Decoding what was encoded gives the same text, whatever it holds."""
    assert text == TOKENIZER.decode(TOKENIZER.encode(text))


def test_special_tokens_come_first_and_are_one_id_each() -> None:
    """A special token's spelling is its own single id, in the declared order."""
    assert list(range(NUM_SPECIAL)) == TOKENIZER.encode("".join(SPECIAL_TOKENS))


def test_training_joins_the_most_frequent_pair_first() -> None:
    """The first merge is the pair that occurs most often."""
    tokenizer = Tokenizer.train("ab ab ab cd", vocab_size=NUM_SPECIAL + 257)

    assert tokenizer.token_bytes(NUM_SPECIAL + 256) == b"ab"
    assert len(tokenizer.encode("ab")) == 1


def test_common_text_is_shorter_in_tokens_than_in_bytes() -> None:
    """The vocabulary has learned something about its own corpus."""
    text = "The harbour town wakes before the sun."

    assert len(TOKENIZER.encode(text)) < len(text) / 2


def test_the_same_text_has_other_spellings() -> None:
    """Single bytes spell a word that the encoder writes with fewer ids: drift is possible."""
    spelled = [NUM_SPECIAL + b for b in b"harbour"]

    assert TOKENIZER.decode(spelled) == "harbour"
    assert TOKENIZER.encode("harbour") != spelled


@given(st.text())
def test_streamed_text_is_the_decoded_text(text: str) -> None:
    """Pushing the ids one by one gives the text piece by piece (no character is cut).

    A text that ends in U+FFFD itself may be held back, as it looks like half a character.
    """
    decoder = StreamDecoder(TOKENIZER, skip_special=False)
    pieces = [decoder.push(i) for i in TOKENIZER.encode(text)]

    assert text.rstrip("\ufffd") == "".join(pieces).rstrip("\ufffd")


@given(st.lists(plain_id, max_size=20))
def test_streamed_pieces_are_a_prefix_of_the_whole(ids: list[int]) -> None:
    """Whatever ids come, what was shown is never taken back."""
    decoder = StreamDecoder(TOKENIZER, skip_special=True)
    shown = "".join(decoder.push(i) for i in ids)

    assert TOKENIZER.decode(ids).startswith(shown)


def test_half_a_character_is_held_back() -> None:
    """The first byte of a two-byte character gives no text, the second gives it whole."""
    first, second = (NUM_SPECIAL + b for b in "é".encode())
    decoder = StreamDecoder(TOKENIZER, skip_special=True)

    assert [decoder.push(first), decoder.push(second)] == ["", "é"]


def test_special_tokens_are_hidden_or_shown() -> None:
    """``skip_special`` decides whether a marker is text."""
    shown = StreamDecoder(TOKENIZER, skip_special=False)
    hidden = StreamDecoder(TOKENIZER, skip_special=True)

    assert (shown.push(5), hidden.push(5)) == ("<tool_call>", "")


def test_token_names_of_character_pieces() -> None:
    """A piece is named by nothing, the completing piece by the character, then all is new."""
    namer = TokenNamer(TOKENIZER)
    ids = [NUM_SPECIAL + b for b in "€a".encode()]

    assert [namer.push(i) for i in ids] == ["", "", "€", "a"]


@given(st.lists(any_id, max_size=30))
def test_token_names_never_hold_half_characters(ids: list[int]) -> None:
    """No name ends in the replacement sign, whatever is sampled."""
    namer = TokenNamer(TOKENIZER)

    assert not any(namer.push(i).endswith("\ufffd") for i in ids)
