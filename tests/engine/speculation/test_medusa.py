"""Medusa heads: drafts from the state behind the newest token."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import CheckpointError, Engine, EngineConfig, Sampling, Span
from engine.model.decoder import load_decoder
from engine.speculation.medusa import Medusa, MedusaHeads, likeliest_tree
from tests.engine.model import tiny
from tests.engine.speculation.test_same_tokens import Recorder, answers, many, requests
from tests.tiny import byte_tokenizer

HIDDEN, HEADS = 96, 3


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output matrix is its embedding."""
    path = tmp_path_factory.mktemp("models") / "random-tied"
    sizes = {"hidden_size": HIDDEN, "head_dim": 32, "intermediate_size": 160, "tie_word_embeddings": True}
    tiny.build("Qwen3Config", "Qwen3ForCausalLM", sizes).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def heads(
    path: Path, base: Path, scale: float, *, own: bool = False, layers: int = 1, sha256: str | None = None
) -> Path:
    path.mkdir(exist_ok=True)
    draw = torch.Generator().manual_seed(3)
    tensors = {}
    for head in range(HEADS):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=draw) * scale
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(HIDDEN, generator=draw) * scale
        if own:
            vocab = json.loads((base / "config.json").read_text())["vocab_size"]
            tensors[f"{head}.1.weight"] = torch.randn(vocab, HIDDEN, generator=draw)
    save_file(tensors, path / "model.safetensors")
    known = hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    config = {
        "medusa_num_heads": HEADS,
        "medusa_num_layers": layers,
        "base_model": "tied",
        "base_sha256": sha256 or known,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("own", [False, True])
async def test_drafts_change_nothing(tied: Path, tmp_path: Path, own: bool) -> None:
    config = EngineConfig(str(tied), deterministic=True, kv_blocks=400, threads=1)
    asked = requests(many(20), seed=31)
    plain, _ = await answers(config, asked, Recorder())
    drafting = replace(config, speculation="medusa", draft_model=str(heads(tmp_path / "heads", tied, 0.1, own=own)))
    got, stats = await answers(drafting, asked, Recorder())
    assert got == plain
    assert stats.speculation.drafted > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_state_is_the_one_that_the_newest_token_was_sampled_from(
    tied: Path, tmp_path: Path, dtype: str
) -> None:
    """Heads that change nothing read the newest token itself from it, in the C++ kernels and on torch."""
    config = EngineConfig(
        str(tied),
        dtype=dtype,  # type: ignore[arg-type]  # a DType
        speculation="medusa",
        draft_model=str(heads(tmp_path / "heads", tied, 0.0)),
    )
    proposed: list[tuple[int, int]] = []
    async with await Engine.start(config) as engine:
        speculator = engine._core._speculator
        medusa = speculator._proposers["medusa"]
        assert isinstance(medusa, Medusa)
        whole = medusa.propose_all

        def recorded(asked, min_confidence):  # type: ignore[no-untyped-def]  # stands for propose_all
            drafts = whole(asked, min_confidence)
            proposed.extend((seq.tokens[-1], draft.tokens[0]) for (seq, _), draft in zip(asked, drafts, strict=True))
            return drafts

        medusa.propose_all = recorded  # type: ignore[method-assign]
        async with await engine.open(range(3, 40)) as seq:
            await seq.generate_all(Span(Sampling(temperature=0.0), max_tokens=12, ignore_eos=True))
    assert len(proposed) > 3
    assert all(newest == draft for newest, draft in proposed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_first_heads_give_their_likeliest_tokens(tied: Path, tmp_path: Path, temperature: float) -> None:
    """With their probabilities, at the span's temperature; its own sample is among them."""
    config = EngineConfig(
        str(tied), speculation="medusa", draft_model=str(heads(tmp_path / "heads", tied, 0.1)), dtype="float32"
    )
    async with await Engine.start(config) as engine:
        medusa = engine._core._speculator._proposers["medusa"]
        assert isinstance(medusa, Medusa)
        whole, compared = medusa._choices, list[bool]()

        def watched(logits, seqs):  # type: ignore[no-untyped-def]  # stands for _choices
            exact = logits.clone().softmax(-1)
            found = whole(logits, seqs)
            for head, (choices, most) in enumerate(zip(found[0], (3, 2, 2), strict=True)):
                assert len(choices) == most
                top = set(exact[head, 0].topk(most).indices.tolist())
                assert top >= {token for token, _ in choices[1:]}
                compared.append({token for token, _ in choices} == top)
                for token, probability in choices:
                    assert probability == pytest.approx(float(exact[head, 0, token]), rel=1e-3)
            return found

        medusa._choices = watched  # type: ignore[method-assign]
        async with await engine.open(range(3, 40)) as seq:
            await seq.generate_all(Span(Sampling(temperature=temperature, seed=1), max_tokens=12, ignore_eos=True))
    assert compared and (temperature > 0 or all(compared))


def test_the_likeliest_paths_are_the_tree() -> None:
    choices = [[(1, 0.6), (2, 0.3)], [(3, 0.5), (4, 0.4)], [(5, 0.9)]]
    tree = likeliest_tree(choices, 6)  # 1: 0.6, then 1 3: 0.3, and 2, 1 3 5: 0.27, 1 4: 0.24, 1 4 5: 0.216
    assert tree.tokens[0] == 1
    assert set(zip(tree.tokens, tree.parents, strict=True)) >= {(2, -1), (3, 0), (4, 0)}
    assert sorted(tree.confidence) == [0.3, 0.4, 0.5, 0.6, 0.9, 0.9]
    tree.check()
    assert likeliest_tree([[(1, 0.9)], [(2, 0.9)]], 5).parents == (), "a chain has none"
    assert len(likeliest_tree(choices, 2).tokens) == 2
    assert likeliest_tree([[(1, 0.05)], [(2, 0.05)]], 5).tokens == (1,), "what is hardly ever reached is left out"


@pytest.mark.parametrize("layers", [1, 2])
def test_a_head_is_residual_blocks_before_an_output_matrix(tied: Path, tmp_path: Path, layers: int) -> None:
    path = heads(tmp_path / "heads", tied, 0.3, layers=layers)
    model = load_decoder(tied, dtype=torch.float32)
    output = load_file(tied / "model.safetensors")["model.embed_tokens.weight"].float()
    made, stored = MedusaHeads.load(path, tied, model), load_file(path / "model.safetensors")
    rows = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    for head in range(HEADS):
        states = rows
        for layer in range(layers):
            inner = states @ stored[f"{head}.{layer}.linear.weight"].T + stored[f"{head}.{layer}.linear.bias"]
            states = states + inner * torch.sigmoid(inner)
        torch.testing.assert_close(made.logits(rows)[head], states @ output.T, rtol=1e-4, atol=1e-3)


async def test_heads_of_other_weights_are_refused(tied: Path, tmp_path: Path) -> None:
    path = heads(tmp_path / "heads", tied, 0.1, sha256="0" * 64)
    with pytest.raises(CheckpointError, match="heads of other weights"):
        await Engine.start(EngineConfig(str(tied), draft_model=str(path)))


async def test_heads_that_the_models_own_files_name_are_found_beside_it(
    tied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tied, model)
    for name in ("heads", "../model", "missing", 3):
        (model / "ponder.json").write_text(json.dumps({"medusa": name}))
        heads(tmp_path / "heads", model, 0.1)
        async with await Engine.start(EngineConfig(str(model), speculation="auto")) as engine:
            assert ("medusa" in engine.proposers) == (name == "heads")
    (model / "ponder.json").write_text(json.dumps({"medusa": "heads"}))
    heads(tmp_path / "heads", model, 0.1, sha256="0" * 64)
    async with await Engine.start(EngineConfig(str(model), speculation="auto")) as engine:
        assert "medusa" not in engine.proposers, "they are another model's, which stops nobody"
    assert "nothing is drafted by heads" in caplog.text
