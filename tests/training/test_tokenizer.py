"""The tokenizer: copies of a word are the same pieces, wherever it stands."""

from random import Random

import pytest
from tokenizers import Tokenizer

from training.text import words
from training.train_tokenizer import SPACE

WORDS = ("water", "Gravitational", "yoga", "_postinit", "Breeknurceek", "naïve")


@pytest.mark.parametrize("word", WORDS)
def test_a_space_before_a_word_changes_its_first_piece_alone(tiny_tokenizer: Tokenizer, word: str) -> None:
    bare, spaced = tiny_tokenizer.encode(word).tokens, tiny_tokenizer.encode(f" {word}").tokens
    if spaced[0] == SPACE:  # the first piece has no second version
        assert spaced[1:] == bare
    else:
        assert spaced == [SPACE + bare[0], *bare[1:]]


def test_every_token_with_a_space_has_a_twin_without(tiny_tokenizer: Tokenizer) -> None:
    vocab = tiny_tokenizer.get_vocab()
    spaced = [token for token in vocab if token.startswith(SPACE) and token.strip(SPACE)]
    assert len(spaced) > 50
    assert all(token[1:] in vocab for token in spaced)


def test_texts_survive(tiny_tokenizer: Tokenizer) -> None:
    rng = Random(3)
    made_up = (words.made_up(rng) for _ in range(50))
    for text in ("  two  spaces\n\n and\ta tab ", "don't 3,141.59!", "Œuvre 🦉 東京", *made_up):
        assert tiny_tokenizer.decode(tiny_tokenizer.encode(text).ids) == text
