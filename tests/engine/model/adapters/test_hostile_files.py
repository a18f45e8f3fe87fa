"""Adapters that are damaged, incomplete, of another model, or ask for what is not done: an error that says so."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.model.adapters.peft_checkpoint import CONFIG, MAX_RANK, WEIGHTS
from engine.model.decoder import Decoder, load_decoder
from tests.engine.model import tiny
from tests.lora import write_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build(*tiny.MODELS["qwen3"]), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def decoder(model: Path) -> Decoder:
    return load_decoder(model, dtype=torch.float32)


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", model)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("peft_type", "IA3", "peft_type is 'IA3'; accepted: 'LORA'"),
        ("peft_type", None, "peft_type"),
        ("fan_in_fan_out", True, "fan_in_fan_out is True; accepted: False"),
        ("bias", "all", "bias is 'all'; accepted: 'none'"),
        ("use_dora", True, "use_dora"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("target_parameters", ["mlp.experts.gate_up_proj"], "target_parameters"),
        ("trainable_token_indices", [1], "trainable_token_indices"),
        ("use_qalora", True, "use_qalora"),
        ("r", 0, f"1 to {MAX_RANK}"),
        ("r", 5, "accepted: a float of shape (5, 48)"),
        ("r", "4", "accepted: a rank"),
        ("r", True, "accepted: a rank"),
        ("r", 10**30, "accepted: a rank"),
        ("lora_alpha", float("inf"), "a finite number"),
        ("lora_alpha", [1], "a finite number"),
        ("rank_pattern", {"q_proj": -1}, "rank_pattern"),
        ("rank_pattern", ["q_proj"], "accepted: an object"),
        ("alpha_pattern", {"q_proj": "x"}, "alpha_pattern"),
        ("alpha_pattern", {"(": 1}, "no expression"),
        ("target_modules", ["k_proj", "v_proj", "o_proj"], "is of no module that target_modules names"),
        ("target_modules", ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"], "no tensors of layers.0.mlp.up_proj"),
        ("target_modules", None, "target_modules is missing"),
        ("target_modules", 7, "accepted: a list of names"),
        ("target_modules", "(a+)+$", "may take very long"),
        ("target_modules", ".*.*.*.*.*.*x", "may take very long"),
        ("exclude_modules", 3, "exclude_modules"),
        ("layers_to_transform", ["a"], "layers_to_transform"),
        ("use_rslora", 2, "use_rslora"),
    ],
)  # fmt: skip
def test_an_option_that_is_not_done_is_named(
    adapter: Path, decoder: Decoder, field: str, value: object, said: str
) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, field: value}))
    with pytest.raises(CheckpointError) as refused:
        decoder.read_adapter(str(adapter))
    assert said in str(refused.value)


def _rewrite(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(adapter: Path) -> None:
        tensors = load_file(adapter / WEIGHTS)
        change(tensors)
        save_file(tensors, adapter / WEIGHTS)

    return rewrite


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / CONFIG).unlink(), f"has no {CONFIG}"),
        (lambda path: (path / CONFIG).write_text("[]"), "an object is needed"),
        (lambda path: (path / CONFIG).write_text("{" * 100_000), "cannot be read as JSON"),
        (lambda path: (path / CONFIG).write_text(" " * (1 << 21)), "accepted: up to"),
        (lambda path: (path / CONFIG).write_bytes(b"\xff\xfe"), "cannot be read as JSON"),
        (lambda path: (path / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
        (lambda path: (path / WEIGHTS).rename(path / "adapter_model.bin"), "safe_serialization=True"),
        (lambda path: (path / WEIGHTS).write_bytes(b""), "is not a whole safetensors file"),
        (lambda path: (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-1]), "is not a whole"),
        (_rewrite(lambda tensors: tensors.pop(Q)), "has no tensor"),
        (_rewrite(lambda tensors: tensors.clear()), "has no tensors of"),
        (_rewrite(lambda tensors: tensors.update({Q: torch.zeros(4, 47)})), "accepted: a float of shape (4, 48)"),
        (_rewrite(lambda tensors: tensors.update({Q: torch.zeros(4, 48, dtype=torch.int8)})), "is I8"),
        (_rewrite(lambda tensors: tensors.update({Q: torch.full((4, 48), float("nan"))})), "not finite"),
        (_rewrite(lambda tensors: tensors.update({"x": torch.zeros(1)})), "changes a part"),
        (
            _rewrite(lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(1)})),
            "changes a part of the model that adapters may not",
        ),
        (
            _rewrite(lambda tensors: tensors.update({Q.replace("layers.0", "layers.9"): torch.zeros(4, 48)})),
            "changes a part",
        ),
    ],
)
def test_damaged_files_are_told(adapter: Path, decoder: Decoder, damage: Callable[[Path], None], said: str) -> None:
    damage(adapter)
    with pytest.raises(CheckpointError) as refused:
        decoder.read_adapter(str(adapter))
    assert said in str(refused.value)


def test_a_path_that_is_none(decoder: Decoder, tmp_path: Path) -> None:
    for wrong in (str(tmp_path / "nothing"), "", "a/b/c", "../x"):
        with pytest.raises(CheckpointError, match="there is no directory"):
            decoder.read_adapter(wrong)


def test_random_bytes_are_an_adapter_or_an_error(adapter: Path, decoder: Decoder) -> None:
    whole = {name: (adapter / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    draw = random.Random(0)
    for _ in range(150):
        name = draw.choice((CONFIG, WEIGHTS))
        data = bytearray(whole[name])
        for _ in range(draw.choice((1, 3, 30))):
            at = draw.randrange(len(data) if name == CONFIG else 2000)
            data[at] = draw.randrange(256)
        for each, content in whole.items():
            (adapter / each).write_bytes(content)
        (adapter / name).write_bytes(data[: draw.choice((len(data), draw.randrange(len(data))))])
        try:
            read = decoder.read_adapter(str(adapter))
        except CheckpointError:
            continue
        assert read.updates  # the change was harmless, in a number of a matrix


def test_another_base_is_a_warning(adapter: Path, decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": "else/where"}))
    with caplog.at_level(logging.WARNING):
        decoder.read_adapter(str(adapter), "some/model")
    assert "was trained on else/where" in caplog.text


def test_the_digest_is_of_all_bytes(adapter: Path, decoder: Decoder, model: Path) -> None:
    first = decoder.read_adapter(str(adapter)).digest
    assert decoder.read_adapter(str(adapter)).digest == first
    write_adapter(adapter, model, seed=1)
    assert decoder.read_adapter(str(adapter)).digest != first
