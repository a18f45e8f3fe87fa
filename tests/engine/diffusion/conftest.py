"""A random masked-diffusion checkpoint, every weight drawn anew, so that no norm or projection is without effect."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.diffusion import MaskedDiffusionModel, load_masked_diffusion
from training.diffusion.byte_tokenizer import byte_tokenizer
from training.diffusion.masked_model import MaskedModel
from training.diffusion.pair import export_pair
from training.torch_model import ModelConfig

SHAPE = ModelConfig(
    vocab_size=257, hidden_size=32, intermediate_size=48, layer_types=("full_attention",) * 3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip


def random_model(seed: int = 3) -> MaskedModel:
    """Returns a model whose weights are numbers of bfloat16, as its checkpoint keeps them."""
    torch.manual_seed(seed)
    model = MaskedModel(SHAPE)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = 1 + 0.3 * torch.randn_like(weight) if weight.ndim == 1 else 0.5 * torch.randn_like(weight)
            weight.copy_(drawn.bfloat16())
    return model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("diffusion")
    export_pair(random_model(), byte_tokenizer(), out, diffuses=True)
    return out


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> MaskedDiffusionModel:
    return load_masked_diffusion(str(checkpoint), device="cpu", dtype=torch.float32)
