"""A tiny checkpoint whose next token depends on the last one alone, so a test can say what the model will write.

It is a real Qwen3 model on disk, with attention and feed-forward silenced: embeddings are one-hot, so the output layer
is a table of transitions. Thinking is written in capitals and answers in small letters, which makes a mix-up visible.
Prompts steer it by what they end with; see `TEMPLATE`.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|ponder|>", "<|forever|>")
CAPITALS = [chr(c) for c in range(ord("A"), ord("Z") + 1)]
SMALL = [chr(c) for c in range(ord("a"), ord("z") + 1)]
CONTEXT = 2048

# Variables: `enable_thinking` makes the model open its thinking itself, `open_thinking` opens it for the model, and
# `forever` makes answers that only a limit ends.
TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if open_thinking %}<think>{% elif forever %}<|forever|>{% elif enable_thinking %}<|ponder|>{% endif %}{% endif %}"""


# Harmony, gpt-oss's dialect. Each message of this model's is "abc", and it calls no tool by itself.
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
HARMONY_TEMPLATE = """\
{%- for m in messages %}<|start|>
{%- if m['role'] == 'tool' %}functions.{{ m['name'] }} to=assistant<|channel|>commentary<|message|>{{ m['content'] }}
{%- elif m.get('tool_calls') %}{% set call = m['tool_calls'][0]['function'] -%}
assistant to=functions.{{ call['name'] }}<|channel|>commentary json<|message|>{{ call['arguments'] | tojson }}
{%- else %}{{ m['role'] }}{% if m['role'] == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m['content'] }}
{%- endif %}{{ '<|call|>' if m.get('tool_calls') else '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def write_harmony_checkpoint(path: Path) -> Path:
    """Write a model that speaks Harmony into `path`, which is made if need be."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(HARMONY)
    vocab = tokenizer.get_vocab()
    table = torch.full((len(vocab), len(vocab)), -20.0)
    chain = ["<|message|>", "a", "b", "c", "<|end|>"]
    for last, following in (*itertools.pairwise(chain), ("<|channel|>", "f")):
        table[vocab[following], vocab[last]] = 20.0
    return _write_model(path, tokenizer, table, HARMONY_TEMPLATE, end="<|return|>")


# Gemma 4's dialect. Where nothing closes its thinking this model thinks "abc", and each of its answers is "xy".
GEMMA4 = ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_response>", "<tool_response|>")
GEMMA4_TEMPLATE = """\
{%- for m in messages %}{% if m['role'] == 'tool' %}<|tool_response>response:
{{- m['name'] }}{{ m['content'] }}<tool_response|>
{%- elif m.get('tool_calls') %}<|turn>model
{% if loop.last %}<|tool_response>{% endif %}
{%- else %}<|turn>{{ m['role'] }}
{{ m['content'] }}<turn|>
{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1]['role'] != 'tool' %}<|turn>model
{% if not enable_thinking %}<|channel>thought
<channel|>{% endif %}{% endif %}"""


def write_gemma4_checkpoint(path: Path) -> Path:
    """Write a model that thinks as Gemma 4 does into `path`, which is made if need be."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(GEMMA4)
    vocab = tokenizer.get_vocab()
    table = torch.full((len(vocab), len(vocab)), -20.0)
    newline = "Ċ"
    for chain in ([newline, "<|channel>", "a", "b", "c", "<channel|>", "x", "y", "<turn|>"], ["<tool_response|>", "x"]):
        for last, following in itertools.pairwise(chain):
            table[vocab[following], vocab[last]] = 20.0
    return _write_model(path, tokenizer, table, GEMMA4_TEMPLATE, end="<turn|>")


def write_checkpoint(path: Path, *, seed: int = 0) -> Path:
    """Write the model into `path`, which is made if need be."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    return _write_model(path, tokenizer, _transitions(tokenizer.get_vocab(), seed), TEMPLATE, end="<|im_end|>")


def _write_model(path: Path, tokenizer: Tokenizer, table: torch.Tensor, template: str, *, end: str) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    vocab = tokenizer.get_vocab()
    size = len(vocab)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": size, "hidden_size": size,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "float32",
        "bos_token_id": None, "eos_token_id": vocab[end],
    }  # fmt: skip
    _write(path / "config.json", config)
    _write(path / "generation_config.json", {"eos_token_id": vocab[end], "temperature": 0.9, "top_k": 40})
    _write(path / "tokenizer_config.json", {"eos_token": end, "chat_template": template})
    _write(path / "ponder.json", {"about": "A table of transitions.", "starters": ["Say something."]})
    save_file(_weights(size, table), str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


def _transitions(vocab: dict[str, int], seed: int) -> torch.Tensor:
    """Logits (next token, last token). Unlikely is -20; letters among their kind are random but alive."""
    size = len(vocab)
    table = torch.full((size, size), -20.0)
    random = torch.Generator().manual_seed(seed)

    def among(last: str, letters: list[str], ends: dict[str, float]) -> None:
        for letter in letters:
            table[vocab[letter], vocab[last]] = torch.randn((), generator=random)
        for end, logit in ends.items():
            table[vocab[end], vocab[last]] = logit

    newline = "Ċ"  # how byte-level vocabularies write \n
    for letter in SMALL:
        among(letter, SMALL, {"<|im_end|>": 0.0, "</think>": -2.0})  # a stray </think> must never show
    for letter in CAPITALS:
        among(letter, CAPITALS, {"</think>": 1.5})
    among("<think>", CAPITALS, {})
    among("</think>", [newline], {})
    among("<|ponder|>", ["<think>"], {})
    among("<|forever|>", ["0"], {})
    for digit in range(10):
        among(str(digit), [str((digit + 1) % 10)], {})
    among(newline, SMALL, {})
    for other in sorted(set(vocab) - {*SMALL, *CAPITALS, *SPECIAL, *map(str, range(10)), newline}):
        among(other, SMALL, {"<|im_end|>": 0.0})
    for other in ("<|im_start|>", "<|im_end|>"):
        among(other, SMALL, {})
    return table


def _weights(size: int, table: torch.Tensor) -> dict[str, torch.Tensor]:
    layer = "model.layers.0"
    random = torch.Generator().manual_seed(0)
    weights = {
        "model.embed_tokens.weight": torch.eye(size),
        "model.norm.weight": torch.ones(size),
        # A one-hot row of `size` numbers leaves RMSNorm as sqrt(size) at its one.
        "lm_head.weight": table / size**0.5,
        f"{layer}.input_layernorm.weight": torch.ones(size),
        f"{layer}.post_attention_layernorm.weight": torch.ones(size),
        f"{layer}.self_attn.q_norm.weight": torch.ones(16),
        f"{layer}.self_attn.k_norm.weight": torch.ones(16),
        f"{layer}.self_attn.q_proj.weight": torch.randn(32, size, generator=random) * 0.1,
        f"{layer}.self_attn.k_proj.weight": torch.randn(16, size, generator=random) * 0.1,
        f"{layer}.self_attn.v_proj.weight": torch.randn(16, size, generator=random) * 0.1,
        f"{layer}.self_attn.o_proj.weight": torch.zeros(size, 32),
        f"{layer}.mlp.gate_proj.weight": torch.randn(16, size, generator=random) * 0.1,
        f"{layer}.mlp.up_proj.weight": torch.randn(16, size, generator=random) * 0.1,
        f"{layer}.mlp.down_proj.weight": torch.zeros(size, 16),
    }
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def byte_tokenizer(special: Sequence[str] = SPECIAL) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def flat_draft(folder: Path) -> Path:
    """Writes the bundled draft, a Qwen3, with flatter attention: the heads that it copies by are so sharp that fewer
    bits cost it more than most models."""
    model = folder / "flat"
    shutil.copytree(Path(__file__).resolve().parents[1] / "models/pebble-draft", model)
    weights = load_file(model / "model.safetensors")
    flat = {name: weight / 4 if name.endswith("q_norm.weight") else weight for name, weight in weights.items()}
    save_file(flat, model / "model.safetensors", metadata={"format": "pt"})
    return model
