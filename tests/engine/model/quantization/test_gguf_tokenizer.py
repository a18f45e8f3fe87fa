"""Tokenizers from GGUF metadata give the ids of the `tokenizers` files that the metadata was made from."""

from __future__ import annotations

import gzip
import json
import random
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from engine import GREEDY, CheckpointError, Engine, EngineConfig, Span
from engine.model.quantization.gguf_tokenizer import PATTERNS
from engine.model.tokenizer import Tokenizer
from tests.known_answers import shared
from tests.tiny import TEMPLATE, byte_tokenizer, write_checkpoint

pytest.importorskip("gguf", reason="the gguf package writes the files")
from tests.engine.model.quantization.gguf_files import converted, written

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
ROOT = Path(__file__).parents[4]
MIXED = "I'll take 12345 apples, IT'S 3.14!\n\n\tif (x == 10) {  return; }   Ünïcödé ½ 日本語 тест 🙂\r\n   end  "


def texts() -> list[str]:
    """Prose, code and nonsense: everything that separates one pattern from another."""
    drawn = random.Random(11)
    letters = "aZé日1٣ \n\t'.,!_-\u0301🙂\r₂ß"
    nonsense = ["".join(drawn.choices(letters, k=40)) for _ in range(100)]
    return [MIXED, (ROOT / "README.md").read_text(), Path(__file__).read_text(), *nonsense]


def add_vocabulary(
    writer: Any, tokenizer: tokenizers.Tokenizer, pre: str, special: Mapping[str, str] | None = None
) -> None:
    """Add a byte-level vocabulary, as converters do."""
    data = json.loads(tokenizer.to_str())
    added = {token["id"]: token["special"] for token in data["added_tokens"]}
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    kinds = [NORMAL if id not in added else CONTROL if added[id] else USER_DEFINED for id in range(size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokenizer.id_to_token(id) for id in range(size)] + ["[PAD0]", "[PAD1]"])
    writer.add_token_types([*kinds, UNUSED, UNUSED])
    if merges:
        writer.add_token_merges(merges)
    for key, token in (special or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", tokenizer.token_to_id(token))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    """Qwen2's published tokenizer, and the one read back from GGUF."""
    source = gzip.decompress(shared("vocab/qwen2-tokenizer.json.gz").read_bytes()).decode()
    published = tokenizers.Tokenizer.from_str(source)
    path = tmp_path_factory.mktemp("qwen2") / "vocab.gguf"
    special = {"eos": "<|im_end|>", "padding": "<|endoftext|>"}
    return published, Tokenizer.load(written(path, lambda w: add_vocabulary(w, published, "qwen2", special)))


@pytest.mark.slow
def test_qwen2_vectors(qwen2: tuple[tokenizers.Tokenizer, Tokenizer]) -> None:
    inputs = shared("vocab/qwen2.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")[:-1]
    lines = shared("vocab/qwen2.out").read_text().split("\n")[: len(inputs)]
    assert [qwen2[1].encode(text) for text in inputs] == [[int(id) for id in line.split()] for line in lines]


@pytest.mark.slow
def test_qwen2_is_the_published_tokenizer(qwen2: tuple[tokenizers.Tokenizer, Tokenizer]) -> None:
    published, read = qwen2
    assert [read.encode(text, special=True) for text in texts()] == [published.encode(text).ids for text in texts()]


def test_ends_of_answers_are_the_named_and_the_known_ones(qwen2: tuple[tokenizers.Tokenizer, Tokenizer]) -> None:
    published, read = qwen2
    assert read.eos_token_ids == tuple(published.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))


def test_padding_of_the_vocabulary_is_no_token(qwen2: tuple[tokenizers.Tokenizer, Tokenizer]) -> None:
    published, read = qwen2
    size = published.get_vocab_size(with_added_tokens=True)
    assert (read.vocab_size, read.token_bytes(size)) == (size, b"")


LIBRARY: Mapping[str, tuple[Sequence[Any], bool]] = {  # the library's own pre-tokenizers: an oracle of our patterns
    "gpt-2": ([pre_tokenizers.ByteLevel(add_prefix_space=False)], False),
    "smollm": (
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        False,
    ),
    "llama-bpe": (
        [
            pre_tokenizers.Split(
                tokenizers.Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
        True,
    ),
}


@pytest.mark.parametrize("pre", LIBRARY)
def test_patterns_cut_as_the_librarys_pre_tokenizers(tmp_path: Path, pre: str) -> None:
    steps, whole_words = LIBRARY[pre]
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(texts(), trainer)
    if whole_words:
        trained.model = models.BPE.from_file(*trained.model.save(str(tmp_path)), ignore_merges=True)
    read = Tokenizer.load(written(tmp_path / "vocab.gguf", lambda w: add_vocabulary(w, trained, pre)))
    assert [read.encode(text) for text in texts()] == [trained.encode(text).ids for text in texts()]


@pytest.mark.parametrize("pre", {steps: pre for pre, steps in PATTERNS.items()}.values())
def test_every_pattern_keeps_all_of_a_text(tmp_path: Path, pre: str) -> None:
    read = Tokenizer.load(written(tmp_path / "vocab.gguf", lambda w: add_vocabulary(w, byte_tokenizer(), pre)))
    whole = unicodedata.normalize("NFC", "".join(texts()))
    assert read.decode(read.encode(whole)) == whole


def test_sentencepiece_is_the_converted_tokenizer() -> None:
    root = shared("models/stories260K")
    read, known = Tokenizer.load(root / "stories260K-f32.gguf"), Tokenizer.load(root / "hf")
    for text in ["", " ", "  two  spaces ", *texts()]:
        assert read.encode(text, bos=True) == known.encode(text, bos=True), text[:50]
        assert read.decode(read.encode(text)) == known.decode(known.encode(text))


async def test_a_chat_over_gguf_is_the_checkpoints(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "hf")

    def add(writer: Any) -> None:
        add_vocabulary(writer, byte_tokenizer(), "gpt-2", {"eos": "<|im_end|>"})
        writer.add_chat_template(TEMPLATE)

    file = converted(checkpoint, tmp_path / "tiny.gguf", "qwen3", add)
    answers = []
    for model in (checkpoint, file):
        async with await Engine.start(EngineConfig(str(model), dtype="float32", kv_blocks=16)) as engine:
            prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": "Say something."}])
            async with await engine.open(prompt) as sequence:
                answers.append((engine.model_name, await sequence.generate_all(Span(GREEDY, max_tokens=40))))
    assert answers[1][0] == "tiny"
    assert answers[1][1].token_ids == answers[0][1].token_ids


def set_pre(pre: str | None) -> Callable[[Any], None]:
    def fill(writer: Any) -> None:
        add_vocabulary(writer, byte_tokenizer(), pre or "gpt-2")
        if pre is None:
            for keys in writer.kv_data:
                keys.pop("tokenizer.ggml.pre", None)

    return fill


def with_keys(change: Callable[[Any], object]) -> Callable[[Any], None]:
    def fill(writer: Any) -> None:
        add_vocabulary(writer, byte_tokenizer(), "gpt-2")
        change(writer)

    return fill


REFUSED: Mapping[str, tuple[Callable[[Any], object], str]] = {
    "no vocabulary": (lambda w: None, "tokenizer.ggml.model is None; supported: gpt2, llama"),
    "another kind": (lambda w: w.add_tokenizer_model("t5"), "tokenizer.ggml.model is 't5'"),
    "an unknown pattern": (set_pre("viking"), "pre is 'viking'; supported: llama-bpe, .*qwen2"),
    "no pattern": (set_pre(None), "tokenizer.ggml.pre is None"),
    "an end past the vocabulary": (with_keys(lambda w: w.add_eos_token_id(9999)), "eos_token_id is 9999"),
    "an end that is added": (with_keys(lambda w: w.add_add_eos_token(True)), "add_eos_token is True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_is_not_supported_is_refused(tmp_path: Path, name: str) -> None:
    fill, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(written(tmp_path / "vocab.gguf", fill))
