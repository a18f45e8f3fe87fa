"""Incremental detokenisation: however tokens are split, the pieces join to the whole and hold whole characters."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from engine.model.detokenizer import Detokenizer
from engine.model.tokenizer import Tokenizer
from tests.engine import vocabularies

TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(list("🙂🚀👩\u200d👩日本語中한é\u0301\u0308 \n\t.aetho")),
    ),
    max_size=40,
)
CUTS = st.lists(st.integers(0, 200), max_size=12)
SOURCES = {"byte_level": vocabularies.byte_level(), "sentencepiece": vocabularies.sentencepiece()}
MADE = {name: Tokenizer(source, {}) for name, source in SOURCES.items()}
THEIRS = {name: tokenizers.Tokenizer.from_str(source) for name, source in SOURCES.items()}

each_tokenizer = pytest.mark.parametrize("name", MADE)


def pieces(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(edges)]


@each_tokenizer
@given(text=TEXTS, cuts=CUTS)
def test_pieces_of_a_text_join_to_what_the_library_decodes(name: str, text: str, cuts: list[int]) -> None:
    tokenizer = MADE[name]
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    found = pieces(detokenizer, ids, cuts)
    assert detokenizer.flush() == ""
    assert "".join(found) == tokenizer.decode(ids) == THEIRS[name].decode(ids)


@each_tokenizer
@given(text=TEXTS)
def test_no_piece_ends_within_a_character(name: str, text: str) -> None:
    tokenizer = MADE[name]
    detokenizer = Detokenizer(tokenizer)
    shown = "".join(detokenizer.push([id]) for id in tokenizer.encode(text))
    assert shown.count("\ufffd") == tokenizer.decode(tokenizer.encode(text)).count("\ufffd") == text.count("\ufffd")


@each_tokenizer
@given(data=st.data(), cuts=CUTS)
def test_pieces_of_any_ids_join_to_the_whole(name: str, data: st.DataObject, cuts: list[int]) -> None:
    tokenizer = MADE[name]
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size + 2), max_size=40))
    detokenizer = Detokenizer(tokenizer)
    assert "".join(pieces(detokenizer, ids, cuts)) + detokenizer.flush() == tokenizer.decode(ids)


@given(data=st.data())
def test_any_byte_level_ids_decode_as_the_library_does(data: st.DataObject) -> None:
    tokenizer, theirs = MADE["byte_level"], THEIRS["byte_level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert tokenizer.decode(ids) == theirs.decode(ids)
    assert tokenizer.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)


@each_tokenizer
@given(text=TEXTS, at=st.integers(0, 200), other=TEXTS)
def test_a_fork_goes_on_alone(name: str, text: str, at: int, other: str) -> None:
    tokenizer = MADE[name]
    ids, more = tokenizer.encode(text), tokenizer.encode(other)
    at %= len(ids) + 1
    trunk = Detokenizer(tokenizer)
    begun = trunk.push(ids[:at])
    branch = trunk.fork()
    aside = branch.push(more) + branch.flush()
    assert begun + trunk.push(ids[at:]) + trunk.flush() == tokenizer.decode(ids)
    assert begun + aside == tokenizer.decode(ids[:at] + more)


def test_an_emoji_appears_with_its_last_byte() -> None:
    tokenizer = MADE["sentencepiece"]
    ids = [id for byte in "🙂".encode() if (id := tokenizer.token_id(f"<0x{byte:02X}>")) is not None]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([id]) for id in ids] == ["", "", "", "🙂"]


def test_what_never_completes_is_replaced_at_the_end() -> None:
    tokenizer = MADE["byte_level"]
    first = tokenizer.encode("🙂")[0]
    detokenizer = Detokenizer(tokenizer)
    assert (detokenizer.push([first]), detokenizer.flush()) == ("", "\ufffd")


def test_special_tokens_are_skipped_unless_wanted() -> None:
    tokenizer = MADE["byte_level"]
    ids = tokenizer.encode("a<|im_end|>b", special=True)
    assert tokenizer.decode(ids) == "ab"
    assert Detokenizer(tokenizer, skip_special=False).push(ids) == "a<|im_end|>b"
