"""The bundled embedder: vectors of length 1, the same however they were made, and layers packed for the CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from retrieval.embedding import SentenceEmbedder
from retrieval.packing import PackedLinear, pack

PEBBLE = Path(__file__).parents[2] / "models/pebble"


@pytest.fixture(scope="module")
def embedder() -> SentenceEmbedder:
    return SentenceEmbedder()


def test_a_text_alone_has_the_vector_it_has_among_others(embedder: SentenceEmbedder) -> None:
    texts = ["Who built the dam?", "The dam at Hollow Creek was finished in 1931.", "", "ﬁ — 你好 🐝"]
    together = embedder.embed(texts)
    assert together.shape == (4, embedder.size) and together.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_allclose(embedder.embed([text])[0], vector, atol=1e-5)


def test_a_long_text_is_the_mean_of_its_windows_and_not_its_beginning(embedder: SentenceEmbedder) -> None:
    bees, dams = "Bees dance in the hive. " * 60, "The dam is built of granite. " * 60
    long, first, asked = embedder.embed([bees + dams, bees, "a dam of granite"])
    assert asked @ long > asked @ first + 0.2


def test_what_means_the_same_is_nearer_than_what_starts_the_same(embedder: SentenceEmbedder) -> None:
    asked, same, other = embedder.embed(
        ["How do I get my money back?", "Refunds are paid within two weeks.", "How do I get to the station on foot?"]
    )
    assert asked @ same > asked @ other


def test_there_is_nothing_to_embed(embedder: SentenceEmbedder) -> None:
    assert embedder.embed([]).shape == (0, embedder.size) and embedder.tokens([]) == [] and embedder.pieces([]) == []


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("Hello, world", "hello , world"), ("Don't do not stop!", "don ' t do not stop !"),
        ("naïve 北京", "naive 北 京"), ("unaffable 12.5", "unaffable 12 . 5"), ("a 🐝 here", "a [UNK] here"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("special", [True, False])
def test_token_ids_become_a_text_of_the_same_vector(
    embedder: SentenceEmbedder, text: str, becomes: str, special: bool
) -> None:
    ids = embedder._model.tokenizer(text, add_special_tokens=special)["input_ids"]
    assert max(ids) < embedder.vocabulary and embedder.text_of(ids) == becomes
    np.testing.assert_allclose(embedder.embed([text]), embedder.embed([becomes]), atol=1e-5)


def test_token_ids_that_no_text_becomes_have_none(embedder: SentenceEmbedder) -> None:
    """Ids of the bundled chat model, all of them in range; a token that is never made; the middle of a word alone."""
    foreign = Tokenizer.from_file(str(PEBBLE / "tokenizer.json"))
    said = "The dam at Hollow Creek was finished in 1931, two years later than the council had planned it."
    ing = embedder._model.tokenizer.convert_tokens_to_ids("##ing")
    for ids in (foreign.encode(said).ids, [5], [ing], [101, 102], [101, 101, 2054, 102]):
        assert max(ids) < embedder.vocabulary and embedder.text_of(ids) is None, ids


@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "dtype"),
    [(True, True, torch.bfloat16), (False, True, torch.bfloat16), (False, False, torch.float32)],
)
def test_layers_are_in_bfloat16_where_the_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, amx: bool, avx512_bf16: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr("retrieval.packing.pack", lambda model: None)  # packed weights are no parameters
    model = SentenceEmbedder(device="cpu")._model
    assert {weights.dtype for weights in model.parameters()} == {dtype}


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this CPU")
def test_vectors_in_bfloat16_are_searched_among_those_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["Who built the dam?", "The dam at Hollow Creek was finished in 1931.", "Bees dance in the hive. " * 60]
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    made = []
    for supported in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda found=supported: found)
        made.append(SentenceEmbedder(device="cpu").embed(texts))
    exact, rounded = made
    assert (exact != rounded).any() and (exact * rounded).sum(axis=1).min() > 0.999


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_packed_layers_compute_the_same(activation: str) -> None:
    from transformers import BertConfig, BertModel  # here, since it takes seconds
    from transformers.activations import ACT2FN

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_act=activation,
    )
    model = BertModel(config).eval()
    ids = torch.randint(0, 50, (3, 7))
    with torch.inference_mode():
        before = model(ids).last_hidden_state
        pack(model)
        after = model(ids).last_hidden_state
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    assert not [module for module in model.modules() if type(module) is nn.Linear]
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 13
    fused = [layer.intermediate.intermediate_act_fn for layer in model.encoder.layer]
    assert all(isinstance(each, nn.Identity if activation == "gelu" else type(ACT2FN[activation])) for each in fused)


def test_a_layer_without_a_bias_packs_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4, bias=False))
    x = torch.randn(5, 8)
    before = model(x)
    pack(model)
    torch.testing.assert_close(model(x), before)


def small_model(folder: Path, prompts: dict[str, str] | None = None) -> str:
    """A BERT with random weights over a few words, in the files that sentence-transformers reads."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizer

    folder.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ":", "query", "passage", "find", "the", "dam", "bees"]
    (folder / "vocab.txt").write_text("\n".join(words), "utf-8")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), max_position_embeddings=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    read = Transformer(str(folder), max_seq_length=32)
    model = SentenceTransformer(modules=[read, Pooling(32)], device="cpu", prompts=prompts)
    model.save(str(folder / "whole"))
    return str(folder / "whole")


def test_prompts_of_a_model_stand_before_its_queries_and_passages(tmp_path: Path) -> None:
    plain = SentenceEmbedder(small_model(tmp_path / "plain"), device="cpu")
    told = SentenceEmbedder(small_model(tmp_path / "told", {"query": "query: ", "document": "passage: "}), device="cpu")
    dam, bees = "the dam", "the bees"
    query, passages = plain.embed(["query: the dam"]), plain.embed(["passage: the dam", "passage: the bees"])
    np.testing.assert_allclose(told.embed_query(dam), query, atol=1e-2)
    np.testing.assert_allclose(told.embed([dam, bees]), passages, atol=1e-2)
    np.testing.assert_allclose(told.embed([dam]), passages[:1], atol=1e-2)
    assert np.abs(plain.embed_query(dam) - query).max() > 0.05, "without a prompt the vector is another"
    np.testing.assert_allclose(told.tokens([dam])[0], plain.tokens([dam])[0], atol=1e-2)


@pytest.mark.parametrize(
    ("name", "query", "passage"),
    [
        ("e5-small-v2", "query: ", "passage: "),
        ("multilingual-e5-base", "query: ", "passage: "),
        ("bge-base-en-v1.5", "Represent this sentence for searching relevant passages: ", ""),
        ("gte-small", "", ""),
    ],
)
def test_a_family_that_declares_no_prompts_gets_those_of_its_card(
    tmp_path: Path, name: str, query: str, passage: str
) -> None:
    (tmp_path / name).symlink_to(small_model(tmp_path / "model"))
    named, plain = SentenceEmbedder(str(tmp_path / name)), SentenceEmbedder(str(tmp_path / "model" / "whole"))
    np.testing.assert_allclose(named.embed_query("the dam"), plain.embed_query(f"{query}the dam"), atol=1e-2)
    np.testing.assert_allclose(named.embed(["the dam"]), plain.embed([f"{passage}the dam"]), atol=1e-2)
    assert (named.key == named.name) == (passage == ""), "vectors with a prompt are told from those without"


@pytest.mark.slow
def test_texts_are_cut_into_pieces_while_other_threads_embed(embedder: SentenceEmbedder) -> None:
    texts = ["a", "The dam of Orsk was finished in 1931, and the city of Orsk paid for the dam.", "x " * 400]
    cut, whole = embedder.pieces(texts), [len(each) for each in embedder.tokens(texts)]

    def both(number: int) -> bool:
        if number % 2:
            return embedder.pieces(texts) == cut
        return [len(each) for each in embedder.tokens(texts)] == whole

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(both, range(60)))
