"""A random checkpoint of Qwen3-0.6B's or 4B's published shape, and the same as GGUF files."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 151_936


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Qwen3 model."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    kv_heads: int = 8
    width: int = 128  # of a head

    @property
    def config(self) -> dict[str, Any]:  # Any: plain JSON
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY,
            "hidden_size": self.hidden, "intermediate_size": self.intermediate, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.width,
            "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "tie_word_embeddings": True, "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": None,
            "eos_token_id": 2,
        }  # fmt: skip


SHAPES = {"0.6b": Shape(28, 1024, 16, 3072), "4b": Shape(36, 2560, 32, 9728)}
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write(path: Path, tokenizer: Path, shape: Shape) -> Path:
    """The checkpoint in `path`, made unless it is there; its tokenizer is borrowed."""
    if (path / "config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    queries, side = shape.heads * shape.width, shape.kv_heads * shape.width
    hidden, intermediate = shape.hidden, shape.intermediate
    shards: list[dict[str, tuple[int, ...]]] = [{"embed_tokens": (VOCABULARY, hidden), "norm": (hidden,)}]
    for layer in range(shape.layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (side, hidden),
            "self_attn.v_proj": (side, hidden), "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (shape.width,), "self_attn.k_norm": (shape.width,), "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,), "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden), "mlp.down_proj": (hidden, intermediate),
        }  # fmt: skip
        shards.append({f"layers.{layer}.{name}": size for name, size in of_layer.items()})
    names: dict[str, str] = {}
    for number, sizes in enumerate(shards):
        file = f"model-{number:05}.safetensors"
        weights = {
            f"model.{name}.weight": (torch.randn(size) * 0.02 if len(size) > 1 else torch.ones(size)).bfloat16()
            for name, size in sizes.items()
        }
        save_file(weights, path / file, metadata={"format": "pt"})
        names |= dict.fromkeys(weights, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    (path / "config.json").write_text(json.dumps(shape.config))
    return path


def write_gguf(checkpoint: Path, target: Path, shape: Shape) -> Path:
    """The same weights for llama.cpp, in bfloat16, made unless they are there. Needs the `gguf` package."""
    if target.exists():
        return target
    import gguf

    writer = gguf.GGUFWriter(str(target), "qwen3")
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.width)
    writer.add_value_length(shape.width)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["t 0"])
    tensors = (load_file(file).items() for file in sorted(checkpoint.glob("*.safetensors")))
    for name, tensor in chain.from_iterable(tensors):
        short = name.removeprefix("model.").removesuffix(".weight")
        if short == "embed_tokens":
            short = "token_embd"
        elif short == "norm":
            short = "output_norm"
        else:
            _, layer, rest = short.split(".", 2)
            short = f"blk.{layer}.{_NAMES[rest]}"
        if tensor.dim() == 1:
            writer.add_tensor(f"{short}.weight", tensor.float().numpy())
        else:
            raw = tensor.view(torch.uint8).numpy()
            writer.add_tensor(f"{short}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


FILE_TYPES = {"q8_0": 7, "q4_0": 2}  # llama.h, llama_ftype
_QUANTIZE = """
import ctypes, sys, llama_cpp as c
options = c.llama_model_quantize_default_params()
options.ftype = int(sys.argv[3])
sys.exit(c.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(options)))
"""


def quantize_gguf(python: Path, source: Path, kind: str) -> Path:
    """The file as llama.cpp's own call rounds it, made unless it is there. `python` has `llama_cpp`."""
    target = source.with_name(f"{source.stem}-{kind}.gguf")
    if not target.exists():
        command = [str(python), "-c", _QUANTIZE, str(source), str(target), str(FILE_TYPES[kind])]
        subprocess.run(command, check=True, capture_output=True)
    return target
