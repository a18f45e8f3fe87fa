"""A model over several ranks computes what one device computes, for every dense family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError
from tests.engine.model import tiny
from tests.engine.parallel.ranks import furthest, ranks_of, stepper_of, written

DENSE = ("llama_biased", "llama_tied", "qwen2", "qwen3", "smollm3", "phi3", "gemma2", "gemma3", "olmo2", "cohere")
NEAR_TO_THOSE = (
    *("llama", "llama3", "mistral", "qwen2_windows", "phi3_partial", "gemma", "granite", "olmo3", "glm", "glm4"),
    *("cohere2", "ministral3"),
)
EIGHT_HEADS: Mapping[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 383}


@pytest.mark.parametrize("name", [*DENSE, *(pytest.param(each, marks=pytest.mark.slow) for each in NEAR_TO_THOSE)])
def test_two_shards_compute_what_one_device_does(name: str, tmp_path: Path) -> None:
    assert furthest(written(name, tmp_path), shards=2) < 1e-5


@pytest.mark.parametrize("name", ["llama_biased", "olmo2", "phi3", "cohere"])
def test_shards_share_a_kv_head_and_pad_the_vocabulary(name: str, tmp_path: Path) -> None:
    assert furthest(written(name, tmp_path, **EIGHT_HEADS), shards=4) < 1e-5


@pytest.mark.parametrize(("shards", "stages"), [(1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "cohere2"])
def test_stages_compute_what_one_device_does(name: str, shards: int, stages: int, tmp_path: Path) -> None:
    assert furthest(written(name, tmp_path), shards=shards, stages=stages) < 1e-5


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("whole_experts", [False, True], ids=["parts", "whole"])
@pytest.mark.parametrize(
    "name",
    ["qwen3_moe", "glm4_moe", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mixtral", "olmoe")),
     *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen2_moe", "ernie4_5_moe"))],
)  # fmt: skip
def test_experts_compute_what_one_device_does(name: str, whole_experts: bool, stages: int, tmp_path: Path) -> None:
    assert furthest(written(name, tmp_path), shards=2, stages=stages, expert_parallel=whole_experts) < 1e-5


def test_four_ranks_have_an_expert_each(tmp_path: Path) -> None:
    path = written("mixtral", tmp_path, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    assert furthest(path, shards=4, expert_parallel=True) < 1e-5
    with ranks_of(path, shards=4, expert_parallel=True) as decoders:
        assert all(len(layer.mixture.experts) == 1 for each in decoders for layer in each._layers if layer.mixture)


@pytest.mark.parametrize("tokens", [1, 41])
def test_a_token_goes_to_a_rank_and_back_once(tokens: int, tmp_path: Path) -> None:
    path = written("mixtral", tmp_path, num_experts_per_tok=4)  # all of them, so every token goes to the other rank
    with ranks_of(path, shards=2, expert_parallel=True) as decoders:
        stepper = stepper_of(decoders, [[5] * tokens])
        stepper.step([tokens])
        carried = [each.shards.nbytes for each in decoders]
    layers, hidden = tiny.SIZES["num_hidden_layers"], tiny.SIZES["hidden_size"] * 4
    counts, routing = 8, 2 * 4 * 4  # of a layer; of a token: numbers and weights of four experts
    # attention's sum is scattered and states are gathered, then there and back
    assert sum(each["all_to_all"] for each in carried) == layers * (
        tokens * (hidden + hidden) + 2 * counts + tokens * (2 * hidden + routing)
    )
    assert carried[0]["all_reduce"] == tokens * hidden  # of the embedding


def test_ranks_read_no_more_than_their_part(tmp_path: Path) -> None:
    path = written("llama_biased", tmp_path)
    whole = sum(tensor.numel() for tensor in tiny.build(*tiny.MODELS["llama_biased"]).state_dict().values())
    with ranks_of(path, shards=2, stages=3) as decoders:
        read = [each.weights_read for each in decoders]
    again = 2 * 3 + 5  # norms: both of a layer by its second shard, the last one by every rank
    assert sum(read) == whole + again * tiny.SIZES["hidden_size"]
    assert max(read) < whole / 5


def test_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    path = written("qwen2", tmp_path)
    with ranks_of(path, shards=2) as decoders:
        stepper = stepper_of(decoders, [[5] * 40])
        before = [each.shards.nbytes.copy() for each in decoders]
        stepper.step([40])
        carried = [each.shards.nbytes - was for each, was in zip(decoders, before, strict=True)]
    sums = 1 + 2 * tiny.SIZES["num_hidden_layers"]  # of the embedding, and behind attention and MLP of each layer
    reduced = 40 * sums * tiny.SIZES["hidden_size"] * 4
    assert carried[0] == {"all_reduce": reduced}
    assert carried[1] == {"all_reduce": reduced, "gather": 40 * tiny.SIZES["vocab_size"] // 2 * 4}


def test_stages_send_each_token_once(tmp_path: Path) -> None:
    path = written("qwen2", tmp_path)
    with ranks_of(path, stages=3) as decoders:
        stepper = stepper_of(decoders, [[5] * 40])
        stepper.step([40])
        carried = [each.ranks.nbytes["send"] for each in decoders]
    states = 40 * tiny.SIZES["hidden_size"] * 4
    assert carried == [states, states, 40 * tiny.SIZES["vocab_size"] * 4]


def test_adapters_are_refused(tmp_path: Path) -> None:
    with ranks_of(written("qwen2", tmp_path), shards=2) as decoders, pytest.raises(CheckpointError, match="adapters"):
        decoders[0].read_adapter("anything")
