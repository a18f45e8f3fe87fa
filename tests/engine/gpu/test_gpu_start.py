"""Tests the checks of an engine at its start on a GPU: whether kernels can be launched, and how much memory is
left."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from engine.errors import InvalidParameter
from engine.kv_cache.pool_size import left_for_kv
from engine.model import gpu_layers
from engine.model.decoder import Decoder, load_decoder
from tests.engine.model import tiny
from tests.pretended import Machine

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, model, overrides = tiny.MODELS["qwen3"]
    return tiny.save(tiny.build(config, model, overrides), tmp_path_factory.mktemp("start"))


def load(path: Path, **options: object) -> Decoder:
    return load_decoder(path, dtype=torch.float16, device=CUDA, **options)  # type: ignore[arg-type]  # options


def test_where_triton_cannot_launch_torch_runs_the_model_and_it_is_said(
    checkpoint: Path, machine: Machine | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if machine is None:
        pytest.skip("Triton can launch here")
    monkeypatch.setattr(gpu_layers, "_interpreted", lambda: False)  # so it looks for a driver, and there is none
    with pytest.raises(InvalidParameter, match="C compiler"):
        load(checkpoint, kernels="triton")
    with caplog.at_level(logging.WARNING):
        assert not load(checkpoint).on_gpu
    assert "C compiler" in caplog.text


def test_a_deterministic_engine_keeps_room_for_its_longest_context(checkpoint: Path, machine: Machine | None) -> None:
    """Every 1,024 keys leave a part for each token: 4 bytes for each component of each head, and for each head."""
    if machine is None:
        pytest.skip("others take and give memory here meanwhile")
    decoder = load(checkpoint, deterministic=True)
    spec = decoder.spec
    short, long = (left_for_kv(decoder, CUDA, batch_tokens=8, rows=2, max_len=keys) for keys in (1024, 11 * 1024))
    assert short - long == 10 * 8 * 4 * spec.heads * (spec.head_dim + 1)
