"""K/V moved to other positions, held to what the model computes there.

In a model of one layer K/V depends on its token and position alone, so a moved chunk is what would have been computed,
but for rounding: torch's layers and those in C++ are held to that, with each kind of rope.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import GREEDY, Engine, EngineConfig, Span
from engine.config import ChunkReuseConfig
from engine.errors import InvalidParameter
from engine.kv_cache.chunk_reuse import chunk_gate, gate_texts
from engine.kv_cache.chunk_reuse.chunk_gate import check_chunk_reuse
from engine.kv_cache.chunk_reuse.find_chunks import find_chunks
from engine.kv_cache.chunk_reuse.kv_moves import why_not
from engine.kv_cache.quality_gate import kept_record
from engine.model.decoder import load_decoder
from engine.model.loader import read_json
from engine.model.memory import spec_of
from engine.model.model_spec import Rope
from engine.model.numerics import Numerics
from engine.model.rope import Rotation, rotated
from engine.model.tokenizer import Tokenizer
from tests.engine.model import tiny
from tests.tiny import byte_tokenizer

CHUNKS = tuple("".join(chr(97 + (7 * at * at + 3 * at + each) % 26) for at in range(60)) for each in range(3))


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the gate's texts: a token here is a byte, and the models are read often."""
    monkeypatch.setattr(chunk_gate, "PASSAGES", tuple(each[:90] for each in gate_texts.PASSAGES))
    monkeypatch.setattr(chunk_gate, "QUESTIONS", gate_texts.QUESTIONS[:3])
    monkeypatch.setattr(chunk_gate, "SHOWN", 3)
    monkeypatch.setattr(chunk_gate, "ANSWER", 8)


ANY = ChunkReuseConfig(recompute_tokens=4, max_kl=100.0, min_agreement=0.0)


def one_layer(path: Path, sizes: dict[str, Any]) -> Path:  # Any: fields of a model's configuration
    tiny.build("Qwen3Config", "Qwen3ForCausalLM", {"num_hidden_layers": 1, **sizes}).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


async def logprobs(config: EngineConfig, orders: list[tuple[int, ...]]) -> tuple[list[list[float]], int]:
    """Returns the log-probabilities of a text after each order of the chunks, and the tokens that were copied."""
    found = []
    async with await Engine.start(config) as engine:
        for order in orders:
            prompt = engine.tokenizer.encode("sources: " + "; ".join(CHUNKS[each] for each in order) + "; asked: what?")
            spans = find_chunks(prompt, CHUNKS, engine.tokenizer.encode)
            assert len(spans) == len(order)
            async with await engine.open(prompt, chunks=spans if config.chunk_reuse else ()) as seq:
                result = await seq.generate_all(Span(GREEDY, max_tokens=8, logprobs=5))
                found.append([top[1] for each in result.logprobs for top in each.top])
        return found, (await engine.stats()).chunk_hit_tokens


@pytest.mark.parametrize("kernels", ["torch", "ours"])
async def test_moved_keys_are_those_of_the_new_positions(tmp_path: Path, kernels: str) -> None:
    sizes = {"hidden_size": 96, "head_dim": 32, "intermediate_size": 160} if kernels == "ours" else {"head_dim": 16}
    dtype = "bfloat16" if kernels == "ours" else "float32"
    config = EngineConfig(str(one_layer(tmp_path, sizes)), dtype=dtype, kv_blocks=200, block_size=8)  # type: ignore[arg-type]
    orders = [(0, 1, 2), (2, 0, 1), (1, 2), (1, 0)]
    exact, none = await logprobs(config, orders)
    reused, hits = await logprobs(replace(config, chunk_reuse=ANY), orders)
    assert none == 0 and hits > 7 * 40
    near = 0.05 if kernels == "ours" else 1e-3
    for before, after in zip(exact, reused, strict=True):
        assert after == pytest.approx(before, abs=near)


async def test_what_lies_before_a_chunk_is_not_seen_anew(tmp_path: Path) -> None:
    """With two layers it is not exact: this test shows that the one above has something to find."""
    path = one_layer(tmp_path, {"head_dim": 16, "num_hidden_layers": 3})
    config = EngineConfig(str(path), dtype="float32", kv_blocks=200, block_size=8)
    exact, _ = await logprobs(config, [(0, 1, 2), (2, 0, 1)])
    reused, _ = await logprobs(replace(config, chunk_reuse=ANY), [(0, 1, 2), (2, 0, 1)])
    assert reused[0] == pytest.approx(exact[0], abs=1e-3)
    assert reused[1] != pytest.approx(exact[1], abs=1e-2)


async def test_chunks_of_short_convolutions_are_moved(random_hybrid: Path) -> None:
    config = EngineConfig(str(random_hybrid), dtype="float32", kv_blocks=200, chunk_reuse=ANY)
    found, hits = await logprobs(config, [(0, 1), (1, 0)])
    assert hits > 0 and all(value == value for each in found for value in each)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(16, 10_000.0), Rope(8, 10_000.0), Rope(16, 500_000.0, "linear", factor=4.0),
        Rope(16, 500_000.0, "llama3", factor=8.0, original_context=64),
        Rope(16, 10_000.0, "yarn", factor=4.0, original_context=64, attention_factor=1.14),
    ],
    ids=lambda rope: f"{rope.kind}-{rope.dim}",
)  # fmt: skip
def test_rotations_add_up(rope: Rope) -> None:
    rotation = Rotation(rope, 16, torch.device("cpu"), long_context=False)
    keys = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 5, 17, 300, 1000, 2047])
    for delta in (0, 1, 400, -5):
        moved = rotated(rotated(keys, rotation.at(positions)), rotation.by(delta))
        assert torch.allclose(moved, rotated(keys, rotation.at(positions + delta)), atol=2e-3)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("random_recurrent", "recurrent layers"), ("random_latent", "latents"), ("random_windows", "windows"),
        ("random_llama4", "windows"),
    ],
)  # fmt: skip
async def test_models_whose_kv_has_no_place_are_refused(
    model: str, why: str, request: pytest.FixtureRequest
) -> None:  # fmt: skip
    path: Path = request.getfixturevalue(model)
    with pytest.raises(InvalidParameter, match=f"chunk_reuse is set, but .*{why}.*accepted: None"):
        await Engine.start(EngineConfig(str(path), dtype="float32", kv_blocks=64, chunk_reuse=ANY))


def test_positions_of_rows_and_columns_are_refused(random_model: Path) -> None:
    spec = spec_of(random_model)
    assert why_not(spec) is None
    grid = replace(spec, ropes=tuple(None if r is None else replace(r, sections=(2, 3, 3)) for r in spec.ropes))
    assert why_not(grid) is not None
    assert why_not(replace(spec, mtp_layers=1)) is not None


async def test_triton_kernels_are_refused(random_model: Path) -> None:
    config = EngineConfig(str(random_model), kernels="triton", dtype="bfloat16", kv_blocks=64, chunk_reuse=ANY)
    with pytest.raises(InvalidParameter, match=r"Triton kernels run the model; accepted: None"):
        await Engine.start(config)


class TestGate:
    def check(self, path: Path, chosen: ChunkReuseConfig, kept: Path | None = None):  # type: ignore[no-untyped-def]
        decoder = load_decoder(path, dtype=torch.float32, device=torch.device("cpu"))
        config = EngineConfig(str(path), chunk_reuse=chosen, probe_dir=None if kept is None else str(kept))
        numerics = Numerics("float32", "torch", "none", "auto", "cpu", "any", 1, "any", False)
        return check_chunk_reuse(decoder, Tokenizer.load(path), config, b"\1" * 16, numerics)

    def test_a_model_that_moves_too_far_is_refused_with_its_figure(self, random_model: Path, tmp_path: Path) -> None:
        with pytest.raises(InvalidParameter, match=r"by [\d.e-]+ nats a token .* max_kl is 1e-07 .*accepted: None"):
            self.check(random_model, ChunkReuseConfig(max_kl=1e-7))
        with pytest.raises(InvalidParameter, match=r"leaves \d+% of 6 answers the same; .* min_agreement 1; accepted"):
            self.check(random_model, ChunkReuseConfig(max_kl=100, min_agreement=1.0))

    def test_all_recomputed_moves_nothing(self, random_model: Path, tmp_path: Path) -> None:
        found = self.check(random_model, ChunkReuseConfig(recompute_tokens=100_000))
        assert (
            found.kl == pytest.approx(0, abs=1e-6)
            and found.same_answers == found.same_top1 == 1.0
            and found.tokens > 40
        )

    def test_a_model_is_measured_once(self, random_model: Path, tmp_path: Path) -> None:
        kept = tmp_path / "kept"
        found = self.check(random_model, ANY, kept)
        (record,) = kept.iterdir()
        written = read_json(record)
        kept_fields = kept_record(record, {"recompute_tokens": 4})
        assert kept_fields is not None and kept_fields["kl"] == found.kl > 1e-4
        record.write_text(record.read_text().replace(str(written["kl"]), "0.125"))
        assert self.check(random_model, ANY, kept).kl == 0.125
        record.write_text(record.read_text().replace("0.125", "null"))  # damaged: it is measured again
        assert self.check(random_model, ANY, kept) == found
        assert self.check(random_model, replace(ANY, recompute_tokens=5), kept).kl != 0.125

    def test_a_short_context_cannot_be_measured(self, random_model: Path) -> None:
        with pytest.raises(InvalidParameter, match="positions are too few to measure it; accepted: None"):
            decoder = load_decoder(random_model, dtype=torch.float32, device=torch.device("cpu"))
            decoder.spec = replace(decoder.spec, max_position_embeddings=128)
            config = EngineConfig(str(random_model), chunk_reuse=ANY)
            numerics = Numerics("float32", "torch", "none", "auto", "cpu", "any", 1, "any", False)
            check_chunk_reuse(decoder, Tokenizer.load(random_model), config, b"\1" * 16, numerics)


def test_chunks_are_found_by_their_tokens() -> None:
    def encode(text: str) -> list[int]:
        return list(text.encode())

    one, two = "[S1] " + "the harbour was dug in 1871 " * 2, "[S2] " + "the mole is 412 metres long " * 2
    prompt = encode(f"Answer.\n{two}\n{one}\nwhen?")
    spans = find_chunks(prompt, [one, two, "[S3] " + "what is not there" * 3, "short"], encode)
    assert [bytes(prompt[a:b]).decode() for a, b in spans] == [two[:-4], one[:-4]]
    assert find_chunks(prompt, [one, one], encode) == (spans[1],)
    relabelled = find_chunks(prompt, [one.replace("S1", "S2")], encode)
    assert relabelled == ()  # a passage says under which label it stands
