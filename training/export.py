"""A trained model as a directory in Hugging Face format, which `transformers` and our engine load unchanged.

Weights go out in bfloat16 under the names they were trained with; a model all of whose layers attend goes out as a
Qwen3, which computes the same under other names. Knows nothing of training: it takes a model and a tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from training.torch_model import Model, ModelConfig
from training.train_tokenizer import END_OF_TEXT, MARKS, TURN_END, TURN_START, chat_template, token_id

ABOUT = {
    "pebble": (
        "Pebble is a very small model (17 million parameters) that comes with Ponder, for trying it out as below. "
        "For real questions start a larger one:\nponder serve --model Qwen/Qwen3-4B"
    ),
    "pebble-draft": (
        "Pebble's draft, a model of one million parameters: it is made to guess ahead for Pebble, not for talking."
    ),
}
STARTERS = (
    "Use 4, 6 and 9 to make 33.",
    "What can you do?",
    "My dog is called Biscuit. What is my dog called?",
)


_NAMED_ALIKE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rope_theta", "max_position_embeddings",
)  # fmt: skip


_QWEN3_NAMES = (
    ("operator_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"), ("embedding_norm", "norm"),
    ("q_layernorm", "q_norm"), ("k_layernorm", "k_norm"), ("out_proj", "o_proj"),
    ("feed_forward.w1", "mlp.gate_proj"), ("feed_forward.w3", "mlp.up_proj"), ("feed_forward.w2", "mlp.down_proj"),
)  # fmt: skip


def hugging_face_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, object]:
    if "conv" not in config.layer_types:
        return {**qwen3_shape(config), **_common(tokenizer)}
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        **{name: getattr(config, name) for name in _NAMED_ALIKE},
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": len(config.layer_types),
        "layer_types": list(config.layer_types),
        "conv_L_cache": config.conv_taps,
        "conv_bias": False,
        "norm_eps": config.rms_norm_eps,
        **_common(tokenizer),
    }


def _common(tokenizer: Tokenizer) -> dict[str, object]:
    """Returns the fields that both families have alike."""
    return {
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": token_id(tokenizer, TURN_END),
        "pad_token_id": token_id(tokenizer, END_OF_TEXT),
        "torch_dtype": "bfloat16",
    }


def qwen3_shape(config: ModelConfig) -> dict[str, object]:
    """Returns the fields of a Qwen3's config.json that say its shape."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in _NAMED_ALIKE},
        "num_hidden_layers": len(config.layer_types),
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
    }


def _qwen3_name(name: str) -> str:
    """Returns Qwen3's name of a weight."""
    for ours, theirs in _QWEN3_NAMES:
        name = name.replace(f".{ours}.", f".{theirs}.")
    return name


def named_weights(model: Model, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns a model's weights in `dtype` under the names of its family."""
    renamed = str if "conv" in model.config.layer_types else _qwen3_name
    return {renamed(name): weight.detach().to("cpu", dtype).contiguous() for name, weight in model.state_dict().items()}


def load(model: Path) -> Model:
    """Reads back a model that `export` wrote, in float32. Raises ValueError for one of another family."""
    document = json.loads((model / "config.json").read_text("utf-8"))
    if qwen3 := document.get("model_type") == "qwen3":
        config = ModelConfig(
            layer_types=("full_attention",) * document["num_hidden_layers"], rms_norm_eps=document["rms_norm_eps"],
            **{name: document[name] for name in _NAMED_ALIKE},
        )  # fmt: skip
    else:
        config = model_config(model)
    made, weights = Model(config), load_file(model / "model.safetensors")
    named = {name: weights[_qwen3_name(name) if qwen3 else name].float() for name in made.state_dict()}
    made.load_state_dict(named)
    return made


def model_config(model: Path) -> ModelConfig:
    """Returns the shape of a model that `export` wrote. Raises ValueError for one of another family."""
    document = json.loads((model / "config.json").read_text("utf-8"))
    if (kind := document.get("model_type")) != "lfm2":
        raise ValueError(f"{model} is a {kind} model; a run begins with the weights of an lfm2 model.")
    return ModelConfig(
        layer_types=tuple(document["layer_types"]), conv_taps=document["conv_L_cache"],
        rms_norm_eps=document["norm_eps"], **{name: document[name] for name in _NAMED_ALIKE},
    )  # fmt: skip


def _generation_config(tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "do_sample": False,
        "eos_token_id": [token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)],
        "pad_token_id": token_id(tokenizer, END_OF_TEXT),
    }


def _tokenizer_config(config: ModelConfig) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template(),
    }


def _tokenizer_json(tokenizer: Tokenizer) -> dict[str, object]:
    """Thinking and tool-call marks are ordinary added tokens, so decoding keeps them (as Qwen3 has it)."""
    document: dict[str, object] = json.loads(tokenizer.to_str())
    added = document["added_tokens"]
    assert isinstance(added, list)
    for token in added:
        token["special"] = token["content"] not in MARKS
    return document


def _write(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(
    model: Model, tokenizer: Tokenizer, out: Path, name: str = "pebble", dtype: torch.dtype = torch.bfloat16
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_file(named_weights(model, dtype), out / "model.safetensors", metadata={"format": "pt"})
    _write(out / "config.json", hugging_face_config(model.config, tokenizer))
    _write(out / "generation_config.json", _generation_config(tokenizer))
    _write(out / "tokenizer.json", _tokenizer_json(tokenizer))
    _write(out / "tokenizer_config.json", _tokenizer_config(model.config))
    about: dict[str, object] = {"about": ABOUT[name], "starters": list(STARTERS), "document_answers": "extractive"}
    if name == "pebble":
        about["medusa"] = "pebble-medusa"  # heads that the engine finds beside it
    _write(out / "ponder.json", about)
