"""Logits of adapters against PEFT (float32), of mixed ranks and scales, alone and beside rows of other adapters."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.adapters.peft_checkpoint import Adapter
from engine.model.decoder import Decoder, load_decoder
from tests.engine.model import tiny
from tests.engine.model.stepping import Stepper, apart

peft = pytest.importorskip("peft", reason="PEFT is the oracle of adapters, and is not installed here")

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
VISIBLE = 1e-2
SEPARATE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# family -> configurations of its adapters
CONFIGS: Mapping[str, list[dict[str, Any]]] = {
    "llama": [
        {"r": 4, "lora_alpha": 8, "target_modules": SEPARATE},
        {"r": 9, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
        {
            "r": 2,
            "lora_alpha": 5,
            "target_modules": r".*\.layers\.\d+\.(self_attn\.(q|o)_proj|mlp\.up_proj)",
            "rank_pattern": {"q_proj": 6, r"layers\.1\.mlp\.up_proj": 3},
            "alpha_pattern": {"o_proj": 11, "model.layers.2.self_attn.q_proj": 7},
        },
    ],
    "qwen3": [
        {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
        {"r": 1, "lora_alpha": 4, "target_modules": ["k_proj", "down_proj"], "layers_to_transform": [0, 2]},
    ],
    "gemma2": [
        {"r": 8, "lora_alpha": 8, "target_modules": SEPARATE},
        {"r": 3, "target_modules": ["gate_proj", "k_proj"], "exclude_modules": ["layers.1.mlp.gate_proj"]},
    ],
    "phi3": [
        {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
        {"r": 2, "lora_alpha": 9, "target_modules": ["qkv_proj"]},
    ],
    "glm": [{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj"]}],
    "lfm2": [
        {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2"]},
        {"r": 6, "lora_alpha": 2, "target_modules": ["in_proj"]},
    ],
    "qwen3_moe": [
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        {"r": 5, "lora_alpha": 8, "target_modules": ["o_proj"]},
    ],
    "qwen3_next": [{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}],
}  # fmt: skip


@torch.no_grad()
def redrawn(model: Any, seed: int) -> Any:
    """Draws the matrices of adapters anew: PEFT's B is zero at first. Any: PEFT's classes are untyped."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.copy_(torch.empty_like(parameter).normal_(std=0.3, generator=draw))
    return model


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


class Case:
    """A decoder with adapters of one family, prompts, and PEFT's logits by adapter, -1 for none."""

    def __init__(self, family: str, path: Path) -> None:
        made = tiny.MODELS[family]
        tiny.save(tiny.build(*made), path / "model")
        self.decoder: Decoder = load_decoder(path / "model", dtype=torch.float32)
        draw = random.Random(3)
        self.prompts = [[draw.randrange(3, 384) for _ in range(length)] for length in (1, 30, 64, 65, 7, 80)]
        self.adapters: list[Adapter] = []
        self.expected: dict[int, list[Tensor]] = {-1: self._run(tiny.build(*made))}
        for index, config in enumerate(CONFIGS[family]):
            model = redrawn(peft.get_peft_model(tiny.build(*made), peft.LoraConfig(**config)), seed=index)
            model.save_pretrained(path / str(index))
            self.expected[index] = self._run(model)
            self.adapters.append(self.decoder.read_adapter(str(path / str(index))))
        self.decoder.use_adapters(self.decoder.with_adapters(dict(enumerate(self.adapters))))

    def _run(self, model: Any) -> list[Tensor]:  # Any: transformers and PEFT are untyped
        with torch.no_grad():
            return [model(input_ids=torch.tensor([prompt])).logits[0] for prompt in self.prompts]


def test_rows_of_all_adapters_and_of_none_in_one_batch(case: Case) -> None:
    which = [(at % (len(case.adapters) + 1)) - 1 for at in range(len(case.prompts))]
    for chunk in (300, 16):
        found = Stepper(case.decoder, case.prompts, seed=chunk, adapters=which).run(chunk)
        for at, (adapter, logits) in enumerate(zip(which, found, strict=True)):
            assert apart(logits, case.expected[adapter][at]) < TOLERANCE, (adapter, chunk)
            for other in case.expected.keys() - {adapter}:  # or the adapter would not show
                assert apart(logits, case.expected[other][at]) > VISIBLE


def test_token_by_token(case: Case) -> None:
    which = [0, -1, len(case.adapters) - 1]
    prompts = case.prompts[:2] + case.prompts[4:5]
    found = Stepper(case.decoder, prompts, seed=5, adapters=which).run(1)
    for adapter, at, logits in zip(which, (0, 1, 4), found, strict=True):
        assert apart(logits, case.expected[adapter][at]) < TOLERANCE


def test_a_dropped_scale_shows(case: Case) -> None:
    """So that the parity above can fail: the matrices alone, without alpha and rank, give other logits."""
    if case.adapters[0].rank == 8:
        pytest.skip("the scale of this adapter is one")
    plain = {name: type(update)(update.a, update.b / 2) for name, update in case.adapters[0].updates.items()}
    halved = Adapter("", "", case.adapters[0].rank, plain)
    case.decoder.use_adapters(case.decoder.with_adapters({0: halved}))
    found = Stepper(case.decoder, case.prompts[1:2], adapters=[0]).run(100)
    case.decoder.use_adapters(case.decoder.with_adapters(dict(enumerate(case.adapters))))
    assert apart(found[0], case.expected[0][1]) > VISIBLE
