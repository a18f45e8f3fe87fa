"""Broken model directories: each is refused with the fault and the remedy, never with a traceback from below."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError, UnsupportedArchitecture
from engine.families import SUPPORTED, family_of
from engine.model.decoder import load_decoder
from engine.model.loader import SafetensorsWeights, read_json, resolve
from engine.model.model_spec import ModelSpec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def tensors() -> dict[str, torch.Tensor]:
    shapes = {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,), "lm_head.weight": (40, 16)}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (16, 16),
            f"{layer}self_attn.k_proj.weight": (8, 16),
            f"{layer}self_attn.v_proj.weight": (8, 16),
            f"{layer}self_attn.o_proj.weight": (16, 16),
            f"{layer}mlp.gate_proj.weight": (24, 16),
            f"{layer}mlp.up_proj.weight": (24, 16),
            f"{layer}mlp.down_proj.weight": (16, 24),
            f"{layer}input_layernorm.weight": (16,),
            f"{layer}post_attention_layernorm.weight": (16,),
        }
    return {name: torch.full(shape, 0.1) for name, shape in shapes.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole directory."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), path / "model.safetensors")
    return path


def configure(path: Path, **changes: Any) -> None:
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def reweigh(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors")


def shard(path: Path) -> dict[str, str]:
    """Split the weights into two files; returns the index's map."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    where = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(where.values()):
        save_file({name: weights[name] for name in where if where[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


def lose_shard(path: Path) -> None:
    shard(path)
    (path / "part-1.safetensors").unlink()


def load(path: Path) -> Any:
    return load_decoder(resolve(str(path)), dtype=torch.float32)


def test_a_whole_directory_loads(model: Path) -> None:
    assert load(model).spec.vocab_size == 40


def test_a_sharded_directory_loads(model: Path) -> None:
    shard(model)
    assert load(model).spec.layers == 2


def test_rotary_buffers_and_tied_lm_head_may_be_left_over(model: Path) -> None:
    configure(model, tie_word_embeddings=True)
    reweigh(model, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}))
    assert load(model).spec.tied_embeddings


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), "no config.json"),
    "config is not JSON": (lambda p: (p / "config.json").write_text("{"), r"config\.json cannot be read as JSON"),
    "config is not UTF-8": (lambda p: (p / "config.json").write_bytes(b"\xff\xfe{"), "cannot be read as JSON"),
    "config is a list": (lambda p: (p / "config.json").write_text("[]"), "an object is needed"),
    "config is empty": (lambda p: (p / "config.json").write_text("{}"), "neither 'architectures' nor 'model_type'"),
    "a size is missing": (lambda p: configure(p, hidden_size=None), "hidden_size is None"),
    "a size is text": (lambda p: configure(p, num_hidden_layers="2"), "num_hidden_layers is '2'.*positive integer"),
    "heads do not divide": (lambda p: configure(p, num_key_value_heads=3), "num_key_value_heads is 3"),
    "quantised": (lambda p: configure(p, quantization_config={"quant_method": "hqq"}), "quant_method is 'hqq'"),
    "unknown activation": (lambda p: configure(p, hidden_act="relu2"), "hidden_act is 'relu2'; supported: silu"),
    "unknown rope": (lambda p: configure(p, rope_scaling={"rope_type": "spiral"}), "rope_type is 'spiral'"),
    "rope lacks a factor": (lambda p: configure(p, rope_scaling={"rope_type": "linear"}), "factor is None"),
    "partial rotation": (lambda p: configure(p, partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "has no weights"),
    "only a pickle": (
        lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"),
        "pytorch_model.bin: convert it",
    ),
    "truncated weights": (
        lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-100]),
        "cut short",
    ),
    "empty weights": (lambda p: (p / "model.safetensors").write_bytes(b""), "cut short"),
    "missing tensor": (
        lambda p: reweigh(p, lambda w: w.pop("model.layers.1.mlp.up_proj.weight")),
        "'model.layers.1.mlp.up_proj.weight' is missing",
    ),
    "missing lm_head": (lambda p: reweigh(p, lambda w: w.pop("lm_head.weight")), "'lm_head.weight' is missing"),
    "wrong shape": (
        lambda p: configure(p, intermediate_size=32),
        r"has shape \(24, 16\); config.json asks for \(32, 16\)",
    ),
    "wrong dtype": (
        lambda p: reweigh(p, lambda w: w.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)})),
        "stored as I8.*unquantised",
    ),
    "leftover tensor": (
        lambda p: reweigh(p, lambda w: w.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(4)})),
        "1 tensors are not part of this architecture.*q_norm",
    ),
    "leftover layers": (lambda p: configure(p, num_hidden_layers=1), "9 tensors are not part of this architecture"),
    "missing shard": (lose_shard, "part-1.safetensors is missing"),
    "shard lacks a tensor": (
        lambda p: (shard(p), save_file({}, p / "part-0.safetensors")),
        "part-0.safetensors lacks tensor",
    ),
    "index without a map": (
        lambda p: (shard(p), (p / "model.safetensors.index.json").write_text("{}")),
        "no 'weight_map'",
    ),
    "index is not JSON": (
        lambda p: (shard(p), (p / "model.safetensors.index.json").write_text("")),
        "cannot be read as JSON",
    ),
    "index leads outside": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}'),
        "outside the directory",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=[name.replace(" ", "_") for name in BROKEN])
def test_a_broken_directory_is_refused(model: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(model)
    with pytest.raises(CheckpointError, match=message):
        load(model)


def test_unsupported_architecture_lists_those_supported(model: Path) -> None:
    configure(model, architectures=["MambaForCausalLM"], model_type="mamba")
    with pytest.raises(UnsupportedArchitecture, match="MambaForCausalLM") as caught:
        load(model)
    assert all(name in str(caught.value) for name in SUPPORTED)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Cohere3ForCausalLM", "CohereForCausalLM"),
        ("Qwen9ForCausalLM", "Qwen3ForCausalLM"),
        ("Granite9ForCausalLM", "GraniteForCausalLM"),
    ],
)
def test_an_unsupported_architecture_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=f"{name}' is not supported; the nearest is {nearest}; supported"):
        family_of({"architectures": [name]})


def test_model_type_stands_in_for_missing_architectures() -> None:
    assert family_of({"model_type": "qwen2"}).architectures == ("Qwen2ForCausalLM",)


def test_missing_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no directory"):
        resolve(str(tmp_path / "nowhere"))


def test_a_file_is_not_a_directory(model: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file; give the directory"):
        resolve(str(model / "model.safetensors"))


def test_the_parent_of_a_model_is_recognised(model: Path) -> None:
    with pytest.raises(CheckpointError, match="did you mean its subdirectory 'model'"):
        resolve(str(model.parent))


def test_no_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    def unreachable(*args: object, **kwargs: object) -> str:
        raise errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match=r"huggingface.co cannot be reached.*or give a directory"):
        resolve("someone/some-model")


def test_unknown_repository_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx2
    from huggingface_hub import errors

    def unknown(*args: object, **kwargs: object) -> str:
        raise errors.RepositoryNotFoundError(
            "404", response=httpx2.Response(404, request=httpx2.Request("GET", "http://x"))
        )

    monkeypatch.setattr("huggingface_hub.snapshot_download", unknown)
    with pytest.raises(CheckpointError, match="neither a directory nor a hub repository 'someone/some-model'"):
        resolve("someone/some-model")


@pytest.mark.parametrize("client", ["httpx", "httpx2"])
def test_a_broken_download_says_so(monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    http = importlib.import_module(client)

    def broken(*args: object, **kwargs: object) -> str:
        raise http.ReadTimeout("timed out")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    with pytest.raises(CheckpointError, match="'someone/some-model' could not be downloaded: timed out"):
        resolve("someone/some-model")


def test_a_downloaded_repository_is_a_directory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: str(model))
    assert resolve("someone/some-model") == model


def test_optional_json_may_be_missing_but_not_broken(tmp_path: Path) -> None:
    assert read_json(tmp_path / "a.json", required=False) == {}
    (tmp_path / "a.json").write_text("nonsense")
    with pytest.raises(CheckpointError):
        read_json(tmp_path / "a.json", required=False)


def test_weights_remember_what_nobody_took(model: Path) -> None:
    weights = SafetensorsWeights(model)
    weights.take("model.norm.weight", (16,))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        weights.check_all_used(())


def spec_of(**config: Any) -> ModelSpec:
    merged = {**CONFIG, "rope_theta": None, **config}
    return family_of(merged).spec(merged)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {"short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 4, "sliding_window": 8, "hidden_act": None}
# the same model as transformers 5 and as transformers 4 write it
GENERATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5}),
    "scaling": ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "old name of the kind": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "phi3's su": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
                **LONG,
            },
        },
        {
            "architectures": ["Phi3ForCausalLM"],
            "original_max_position_embeddings": 32,
            "rope_theta": 1e4,
            "rope_scaling": {"type": "su", **LONG},
        },
    ),
    "gemma3's two ropes": (
        {
            **GEMMA3,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {
            **GEMMA3,
            "num_hidden_layers": 4,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "smollm3's intervals": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 2e6},
        },
        {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4, "no_rope_layer_interval": 2},
    ),
    "qwen2's windows": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": True,
            "sliding_window": 8,
            "rope_theta": 1e4,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": True,
            "sliding_window": 8,
            "rope_theta": 1e4,
            "max_window_layers": 1,
        },
    ),
}


@pytest.mark.parametrize(("new", "old"), GENERATIONS.values(), ids=[name.replace(" ", "_") for name in GENERATIONS])
def test_both_generations_of_configurations_mean_the_same(new: dict[str, Any], old: dict[str, Any]) -> None:
    assert spec_of(**new) == spec_of(**old)


def test_an_unused_window_is_no_window() -> None:
    spec = spec_of(architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=8)
    assert spec.windows == (None, None)


def test_layer_types_that_are_unknown_are_refused() -> None:
    with pytest.raises(CheckpointError, match="layer_types is 'chunked_attention'"):
        spec_of(architectures=["Gemma2ForCausalLM"], layer_types=["chunked_attention", "full_attention"])
