"""A random checkpoint of Qwen3-0.6B's published shape, and the same as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, WIDTH, INTERMEDIATE, VOCABULARY = 28, 1024, 16, 8, 128, 3072, 151_936
CONFIG: dict[str, Any] = {  # Any: plain JSON
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": WIDTH, "hidden_act": "silu", "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "attention_bias": False,
    "torch_dtype": "bfloat16", "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write(path: Path, tokenizer: Path) -> Path:
    """The checkpoint in `path`, made unless it is there; its tokenizer is borrowed."""
    if not (path / "model.safetensors").exists():
        path.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        queries, side = HEADS * WIDTH, KV_HEADS * WIDTH
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
        for layer in range(LAYERS):
            of_layer: dict[str, tuple[int, ...]] = {
                "self_attn.q_proj": (queries, HIDDEN), "self_attn.k_proj": (side, HIDDEN),
                "self_attn.v_proj": (side, HIDDEN), "self_attn.o_proj": (HIDDEN, queries),
                "self_attn.q_norm": (WIDTH,), "self_attn.k_norm": (WIDTH,), "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,), "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
                "mlp.up_proj": (INTERMEDIATE, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE),
            }  # fmt: skip
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
        weights = {
            f"model.{name}.weight": (torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape)).bfloat16()
            for name, shape in shapes.items()
        }
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(CONFIG))
        (path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    return path


def write_gguf(checkpoint: Path, target: Path) -> Path:
    """The same weights for llama.cpp, in bfloat16, made unless they are there. Needs the `gguf` package."""
    if target.exists():
        return target
    import gguf

    writer = gguf.GGUFWriter(str(target), "qwen3")
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(WIDTH)
    writer.add_value_length(WIDTH)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["t 0"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
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
