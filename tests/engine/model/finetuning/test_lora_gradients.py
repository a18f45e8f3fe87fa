"""The trained model against its oracles: logits of the decoder, gradients and losses of PEFT and transformers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.errors import CheckpointError, InvalidParameter
from engine.model.adapters.peft_checkpoint import save_adapter
from engine.model.decoder import load_decoder
from engine.model.finetuning.lora_model import LoraModel, TokenRows
from tests.engine.model import tiny
from tests.engine.model.stepping import Stepper, apart
from tests.engine.multimodal import seeing, seeing_gemma3, seeing_pixtral

peft = pytest.importorskip("peft", reason="PEFT is the oracle of adapters, and is not installed here")

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
VISIBLE = 1e-2
FAMILIES = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "glm", "glm4", "granite", "olmo2", "olmo3", "cohere",
    "cohere2", "lfm2", "lfm2_four_taps", "ministral3",
)  # fmt: skip
PROMPTS = [[(7 * at + 3 * row) % 380 + 3 for at in range(length)] for row, length in enumerate((2, 30, 45, 61))]
TEXTS = TokenRows.of(PROMPTS, torch.device("cpu"))
RANK, ALPHA = 3, 7.0


def places() -> Tensor:
    """Returns the second half of every prompt: what is learned."""
    found, first = list[int](), 0
    for prompt in PROMPTS:
        found += range(first + max(1, len(prompt) // 2), first + len(prompt))
        first += len(prompt)
    return torch.tensor(found)


@torch.no_grad()
def redrawn(model: LoraModel) -> LoraModel:
    """Draws B: it is zero at first, and A would have no gradient."""
    draw = torch.Generator().manual_seed(3)
    for matrix in model.parameters():
        matrix.copy_(torch.empty_like(matrix).normal_(std=0.2, generator=draw))
    return model


class Trained:
    """One family's model with an adapter of every projection, and the same in PEFT."""

    def __init__(self, family: str, path: Path) -> None:
        self.made, self.path = tiny.MODELS[family], path
        tiny.save(tiny.build(*self.made), path / "model")
        self.model = redrawn(self.build())
        self.save()

    def build(self, **options: Any) -> LoraModel:  # Any: options of LoraModel
        return LoraModel(self.path / "model", rank=RANK, alpha=ALPHA, **options)

    def save(self) -> None:
        pairs = {name: (pair.a, pair.b) for name, pair in self.model.pairs.items()}
        targets = sorted({name.rpartition(".")[2] for name in pairs})
        save_adapter(
            self.path / "adapter", pairs, self.model.names, alpha=ALPHA, targets=targets, base=str(self.path / "model")
        )

    def theirs(self) -> Any:  # Any: PEFT is untyped
        return peft.PeftModel.from_pretrained(tiny.build(*self.made), str(self.path / "adapter"), is_trainable=True)


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(request.param, tmp_path_factory.mktemp(request.param))


def test_gradients_and_loss_are_those_of_peft(trained: Trained) -> None:
    learned, theirs, expected = places(), trained.theirs(), torch.zeros(())
    first = 0
    for prompt in PROMPTS:
        logits = theirs(input_ids=torch.tensor([prompt])).logits[0]
        at = learned[(learned >= first) & (learned < first + len(prompt))] - first
        expected = expected + F.cross_entropy(logits[at - 1], torch.tensor(prompt)[at], reduction="sum")
        first += len(prompt)
    (expected / len(learned)).backward()
    wanted = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }
    for model in (trained.model, redrawn(trained.build(recompute=True))):
        loss = torch.stack(list(model.losses(TEXTS, learned))).sum()
        assert abs(float((loss - expected).detach())) / len(learned) < TOLERANCE
        found = torch.autograd.grad(loss / len(learned), model.parameters())
        names = [
            f"base_model.model.{model.names.root}{name}.lora_{letter}.weight" for name in model.pairs for letter in "AB"
        ]
        assert set(names) == set(wanted)
        assert max(float(gradient.abs().max()) for gradient in found) > VISIBLE  # or equal gradients would say little
        for name, gradient in zip(names, found, strict=True):
            assert apart(gradient, wanted[name]) < TOLERANCE, name


def test_the_saved_adapter_has_the_same_logits_in_peft_and_in_the_decoder(trained: Trained) -> None:
    with torch.no_grad():
        ours = trained.model.logits(trained.model.states(TEXTS)).split([len(prompt) for prompt in PROMPTS])
        theirs, plain = trained.theirs(), trained.build()
        unchanged = plain.logits(plain.states(TEXTS)).split([len(prompt) for prompt in PROMPTS])
    decoder = load_decoder(trained.path / "model", dtype=torch.float32)
    adapter = decoder.read_adapter(str(trained.path / "adapter"))
    decoder.use_adapters(decoder.with_adapters({0: adapter}))
    served = Stepper(decoder, PROMPTS, adapters=[0] * len(PROMPTS)).run(100)
    base = Stepper(decoder, PROMPTS).run(100)
    for at, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            expected = theirs(input_ids=torch.tensor([prompt])).logits[0]
        assert apart(ours[at], expected) < TOLERANCE and apart(served[at], expected) < TOLERANCE
        assert apart(unchanged[at], base[at]) < TOLERANCE < VISIBLE < apart(ours[at], base[at])


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3_moe", "experts"),
        ("qwen3_next", "experts"),
        ("qwen3_5", "recurrent"),
        ("gemma4", "keys and values"),
        ("deepseek_v3", "experts"),
    ],
)
def test_layers_that_are_not_trained_are_refused(family: str, words: str, tmp_path: Path) -> None:
    model = tiny.save(tiny.build(*tiny.MODELS[family]), tmp_path)
    with pytest.raises(CheckpointError, match=words):
        LoraModel(model, rank=2, alpha=2)


def test_targets_are_ends_of_names(tmp_path: Path) -> None:
    model = tiny.save(tiny.build(*tiny.MODELS["lfm2"]), tmp_path)
    found = LoraModel(model, rank=2, alpha=2, targets=("self_attn.out_proj", "w2")).pairs
    assert {name.split(".", 2)[2] for name in found} == {"self_attn.out_proj", "feed_forward.w2"}
    with pytest.raises(InvalidParameter, match=r"'proj'.*in_proj, k_proj, out_proj"):
        LoraModel(model, rank=2, alpha=2, targets=("proj",))


def test_weights_of_16_bits_have_gradients_of_32(tmp_path: Path) -> None:
    model, learned = tiny.save(tiny.build(*tiny.MODELS["lfm2"]), tmp_path), places()
    losses, gradients = list[Tensor](), list[Tensor]()
    for dtype in (torch.float32, torch.bfloat16):
        lora = redrawn(LoraModel(model, rank=RANK, alpha=ALPHA, dtype=dtype))
        losses.append(torch.stack(list(lora.losses(TEXTS, learned))).sum() / len(learned))
        found = torch.autograd.grad(losses[-1], lora.parameters())
        assert {gradient.dtype for gradient in found} == {torch.float32}
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
    exact, rounded = gradients
    assert abs(float((losses[0] - losses[1]).detach())) < 0.1
    assert float(torch.cosine_similarity(exact, rounded, dim=0)) > 0.95


@pytest.mark.parametrize("family", [seeing_gemma3, seeing_pixtral])
def test_the_text_of_a_model_that_sees_is_trained(family: ModuleType, tmp_path: Path) -> None:
    path = family.write(tmp_path, family.build())
    model = LoraModel(path, rank=2, alpha=2)
    with torch.no_grad():
        found = model.logits(model.states(TEXTS)).split([len(prompt) for prompt in PROMPTS])
    base = Stepper(load_decoder(path, dtype=torch.float32), PROMPTS).run(100)
    assert model.pairs and all(apart(one, other) < TOLERANCE for one, other in zip(found, base, strict=True))


def test_a_model_that_is_never_without_its_encoder_is_not_trained(tmp_path: Path) -> None:
    path = seeing.write(tmp_path, seeing.build())
    with pytest.raises(CheckpointError, match="a vision encoder"):
        LoraModel(path, rank=2, alpha=2)
