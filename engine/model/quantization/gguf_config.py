"""Configurations from GGUF metadata, as the config.json that families read, and the names of tensors.

Knows the architectures that llama.cpp writes and that a family here runs. The idea: a GGUF file becomes the checkpoint
that it was made from, so that there is one description of each family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import CheckpointError, UnsupportedArchitecture
from engine.model.loader import Json
from engine.model.quantization.gguf_file import GgufFile, Value

MAX_HEAD_DIM = 8192
FREQUENCIES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_LLAMA, **_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_PHI3 = {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

# Parts of a model that no family here has; a file with one of these differs from the model that would run.
_REFUSED: Mapping[str, tuple[Value, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "use_parallel_residual": (False,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "pooling_type": (0,),
}


class Metadata:
    """Typed access to the metadata of one file.

    Raises:
        CheckpointError: each method, where a key is missing or of another type.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = self.text("general.architecture")

    def refuse(self, key: str, value: object, accepted: str) -> CheckpointError:
        """Returns the error for a value that is not supported."""
        shown = repr(value)
        shown = shown if len(shown) < 100 else f"{shown[:100]}…"
        return CheckpointError(f"{self.file.path}: {key} is {shown}; supported: {accepted}.")

    def has(self, key: str) -> bool:
        """Returns whether the architecture's `key` is there."""
        return f"{self.architecture}.{key}" in self.file.metadata

    def text(self, key: str, default: str | None = None) -> str:
        """Returns a string."""
        value = self.file.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, value, "a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer of the architecture. An array of equal ones, for each layer, counts as one."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, tuple) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(f"{self.architecture}.{key}", value, "a positive integer, the same for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number of the architecture."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(f"{self.architecture}.{key}", value, "a number")
        return float(value)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's architectures: the class of the checkpoints that it is made from, and its differences."""

    model_class: str
    names: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    extra: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}  # fields of the family's config.json
    interleaved: bool = False  # rows of queries and keys were reordered for rotations of neighbours
    norm_offset: float = 0.0  # the converter added this to norms
    sliding: bool = False  # a window may be given


def _llama(metadata: Metadata) -> dict[str, Any]:
    tensors = metadata.file.tensors
    biased = {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}
    if not metadata.has("attention.sliding_window"):
        return biased
    if any(biased.values()):
        raise metadata.refuse("llama.attention.sliding_window", "given", "no window where projections have biases")
    return {"architectures": ["MistralForCausalLM"]}  # which converters call llama, too


def _gemma_scale(metadata: Metadata, large: int) -> float:
    """Returns query_pre_attn_scalar, which GGUF does not have: only the 27B models, of `large` layers, differ."""
    if metadata.integer("block_count") == large:
        return metadata.integer("embedding_length") / metadata.integer("attention.head_count")
    return metadata.integer("attention.key_length", 256)


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gemma_scale(metadata, 46),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    made: dict[str, Any] = {
        "query_pre_attn_scalar": _gemma_scale(metadata, 62),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
    }
    pattern = metadata.file.metadata.get("gemma3.attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        made["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif pattern is not None:
        made["sliding_window_pattern"] = metadata.integer("attention.sliding_window_pattern")
    if metadata.has("final_logit_softcapping"):
        made["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    return made


def _granite(metadata: Metadata) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in metadata.file.tensors,
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale"),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    head_dim = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
    rotating = metadata.integer("rope.dimension_count", head_dim)
    # a little more, as the family multiplies by head_dim and rounds down
    return {} if rotating == head_dim else {"partial_rotary_factor": (rotating + 0.25) / head_dim}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", extra=_llama, interleaved=True, sliding=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "smollm3": Architecture("SmolLM3ForCausalLM", interleaved=True),
    "phi3": Architecture("Phi3ForCausalLM", _PHI3, _phi3, sliding=True),
    "gemma2": Architecture("Gemma2ForCausalLM", _GEMMA, _gemma2, norm_offset=1.0, sliding=True),
    "gemma3": Architecture("Gemma3ForCausalLM", _GEMMA, _gemma3, norm_offset=1.0, sliding=True),
    "granite": Architecture("GraniteForCausalLM", extra=_granite, interleaved=True),
    "olmo2": Architecture("Olmo2ForCausalLM", {**_LLAMA, **_POST_NORMS}),
}


def architecture_of(metadata: Metadata) -> Architecture:
    """Returns the architecture of a file.

    Raises:
        UnsupportedArchitecture: it is none of `ARCHITECTURES`.
        CheckpointError: it is one part of a split file, or has a part that no family here has.
    """
    found = ARCHITECTURES.get(metadata.architecture)
    if found is None:
        raise UnsupportedArchitecture(f"{metadata.architecture} (GGUF)", tuple(ARCHITECTURES))
    parts = metadata.file.metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise metadata.refuse("split.count", parts, "whole files; join the parts with llama-gguf-split --merge")
    for key, accepted in _REFUSED.items():
        value = metadata.file.metadata.get(f"{metadata.architecture}.{key}", accepted[0])
        if value not in accepted:
            raise metadata.refuse(f"{metadata.architecture}.{key}", value, f"{accepted[0]}")
    if metadata.has("attention.sliding_window") and not found.sliding:
        window = metadata.file.metadata[f"{metadata.architecture}.attention.sliding_window"]
        raise metadata.refuse(f"{metadata.architecture}.attention.sliding_window", window, "no window")
    return found


def config_of(file: GgufFile) -> Json:
    """Returns the config.json of the checkpoint that a GGUF file was made from, as far as families read it.

    Raises:
        UnsupportedArchitecture, CheckpointError: see `architecture_of`; or a key is missing or not supported.
    """
    metadata = Metadata(file)
    architecture = architecture_of(metadata)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing, or no matrix.")
    hidden, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", max(1, hidden // heads))
    if head_dim > MAX_HEAD_DIM:
        raise metadata.refuse(f"{metadata.architecture}.attention.key_length", head_dim, f"up to {MAX_HEAD_DIM}")
    if metadata.integer("block_count") > len(file.tensors):  # before a list of so many is made
        blocks = metadata.integer("block_count")
        raise metadata.refuse(f"{metadata.architecture}.block_count", blocks, f"layers of {len(file.tensors)} tensors")
    value_dim = metadata.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise metadata.refuse(f"{metadata.architecture}.attention.value_length", value_dim, f"{head_dim}, as of keys")
    config = {
        "architectures": [architecture.model_class],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 1_000_000.0 if metadata.architecture == "gemma3" else 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_rope(metadata),
    }
    rotating = metadata.integer("rope.dimension_count", head_dim)
    if rotating != head_dim and metadata.architecture != "phi3":
        raise metadata.refuse(f"{metadata.architecture}.rope.dimension_count", rotating, f"{head_dim}, a whole head")
    if metadata.has("attention.sliding_window"):
        config["sliding_window"] = metadata.integer("attention.sliding_window")
    projection = file.tensors.get("blk.0.attn_output.weight")
    if projection is None or projection.shape[-1] != heads * head_dim:
        columns = "missing" if projection is None else f"of {projection.shape[-1]} columns"
        raise CheckpointError(
            f"{file.path}: blk.0.attn_output.weight is {columns}; the metadata asks for {heads} heads of {head_dim}."
        )
    return {**config, **architecture.extra(metadata)}


def _rope(metadata: Metadata) -> dict[str, Any]:
    """Returns `rope_scaling` and the like, of the keys and of the tensors of frequencies."""
    file, positions = metadata.file, metadata.integer("context_length")
    kind = metadata.text(f"{metadata.architecture}.rope.scaling.type", "none")
    original = metadata.integer("rope.scaling.original_context_length", positions)
    attention = metadata.number("rope.scaling.attn_factor", 1.0)
    factors = [_factors(file, name) for name in FREQUENCIES]
    if factors[0] is not None:
        # The divisors themselves: those of Llama 3.1, which do not give its four parameters back.
        scaling = {"short_factor": factors[0], "long_factor": factors[0], "attention_factor": attention}
        return {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": positions, **scaling}}
    if factors[1] is not None and factors[2] is not None:
        scaling = {"short_factor": factors[1], "long_factor": factors[2], "attention_factor": attention}
        return {
            "rope_scaling": {"rope_type": "longrope", **scaling},
            "original_max_position_embeddings": original,
        }
    if kind in ("none", "longrope"):
        return {}
    if kind not in ("linear", "yarn"):
        raise metadata.refuse(f"{metadata.architecture}.rope.scaling.type", kind, "none, linear, yarn, longrope")
    scaled: dict[str, Any] = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        if attention != 1.0:
            raise metadata.refuse(f"{metadata.architecture}.rope.scaling.attn_factor", attention, "1 with yarn")
        scaled["original_max_position_embeddings"] = original
        for ours in ("beta_fast", "beta_slow"):
            if metadata.has(f"rope.scaling.yarn_{ours}"):
                scaled[ours] = metadata.number(f"rope.scaling.yarn_{ours}")
    if metadata.architecture == "gemma3":  # its sliding layers are not scaled
        return {"rope_parameters": {"full_attention": scaled, "sliding_attention": {"rope_type": "default"}}}
    return {"rope_scaling": scaled}


def _factors(file: GgufFile, name: str) -> list[float] | None:
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(f"{file.path}: {name} is {tensor.type.name} of {tensor.shape}; supported: an F32 vector.")
    return list(file.bytes_of(tensor).cast("f"))


def name_of(architecture: Architecture, name: str) -> str:
    """Returns the name that Hugging Face's checkpoint has for a tensor; the same name if it has none."""
    if name in _OUTER:
        return _OUTER[name]
    block, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    stem, _, kind = part.rpartition(".")
    if block == "blk" and stem in architecture.names:
        return f"model.layers.{layer}.{architecture.names[stem]}.{kind}"
    return name
