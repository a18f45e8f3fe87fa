"""A real checkpoint that writes given texts: the first word of a question names one, and what follows is that text.

It is a Qwen3 model with attention and feed-forward silenced, so the next token depends on the last one alone. A text is
cut into tokens that occur once in all the texts, and the output layer leads from each to the next. So the real engine
samples, streams and counts, and a test knows each word of it. The words of its neighbour `tests/tiny.py` nobody knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tests.tiny import SPECIAL

END = "<|im_end|>"
WIDTH = 128  # of the vectors: random signs of so many are all but orthogonal
SHARPNESS = 60.0  # by how much the next token's logit is above the others, at least half of it
CONTEXT = 16384

TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if messages[-1]['content'].split() %}{{ '<|' ~ messages[-1]['content'].split()[0] ~ '|>' }}{% endif %}{% endif %}"""


def write_scripted(path: Path, texts: Mapping[str, str], *, letters: int = 4, endless: str | None = None) -> Path:
    """Write the model into `path`. A token has `letters` at least; the text named `endless` begins anew at its end.

    A text may think, between `<think>` and `</think>`; only one of them, as what follows a token is always the same.

    Raises:
        ValueError: two texts think.
    """
    path.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    begins = {name: f"<|{name}|>" for name in texts}
    special = [*SPECIAL, *(begin for begin in begins.values() if begin not in SPECIAL)]
    taken = set(alphabet)
    chains = {name: list(_pieces(text, letters, taken)) for name, text in texts.items()}
    words = [piece for chain in chains.values() for piece in chain if piece not in special]
    vocab = {token: i for i, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(path / "tokenizer.json"))
    ids = tokenizer.get_vocab()

    follows: dict[int, int] = {}
    for name, chain in chains.items():
        after = chain[0] if name == endless else END
        for last, following in zip([begins[name], *chain], [*chain, after], strict=True):
            if follows.setdefault(ids[last], ids[following]) != ids[following]:
                raise ValueError(f"{last} is followed by two things; accepted: one text that has it.")
    _write(path / "config.json", _config(len(ids), ids[END]))
    _write(path / "generation_config.json", {"eos_token_id": ids[END], "temperature": 0.7})
    _write(path / "tokenizer_config.json", {"eos_token": END, "chat_template": TEMPLATE})
    _write(path / "ponder.json", {"about": "It writes what it was made to write.", "starters": [*texts][:3]})
    save_file(_weights(len(ids), follows, ids[END]), str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


def _pieces(text: str, letters: int, taken: set[str]) -> Iterator[str]:
    """The text as tokens, in byte-level spelling, none of which is in `taken` yet."""
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for part in re.split(r"(</?think>)", text):
        if part in SPECIAL:
            yield part
            continue
        spelt = "".join(piece for piece, _ in spelling.pre_tokenize_str(part))
        pieces: list[str] = []
        start = 0
        while start < len(spelt):
            end = min(len(spelt), start + letters)
            while spelt[start:end] in taken and end < len(spelt):
                end += 1
            piece = spelt[start:end]
            while piece in taken:  # the very end is nothing new: it goes with what is before it
                taken.remove(pieces[-1])
                piece = pieces.pop() + piece
            taken.add(piece)
            pieces.append(piece)
            start = end
        yield from pieces


def _config(size: int, end: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": size, "hidden_size": WIDTH,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "float32",
        "bos_token_id": None, "eos_token_id": end,
    }  # fmt: skip


def _weights(size: int, follows: Mapping[int, int], end: int) -> dict[str, torch.Tensor]:
    signs = torch.randint(0, 2, (size, WIDTH), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    ending = [token for token in range(size) if follows.get(token, end) == end]
    signs[ending] = signs[ending[0]].clone()  # all that leads to the end looks the same, so it is as clear as the rest
    head = torch.zeros(size, WIDTH)
    for last, following in follows.items():
        if following != end:
            head[following] += signs[last]
    head[end] = signs[ending[0]]
    layer = "model.layers.0"
    silent = {
        f"{layer}.input_layernorm.weight": torch.ones(WIDTH),
        f"{layer}.post_attention_layernorm.weight": torch.ones(WIDTH),
        f"{layer}.self_attn.q_norm.weight": torch.ones(16),
        f"{layer}.self_attn.k_norm.weight": torch.ones(16),
        f"{layer}.self_attn.q_proj.weight": torch.zeros(32, WIDTH),
        f"{layer}.self_attn.k_proj.weight": torch.zeros(16, WIDTH),
        f"{layer}.self_attn.v_proj.weight": torch.zeros(16, WIDTH),
        f"{layer}.self_attn.o_proj.weight": torch.zeros(WIDTH, 32),
        f"{layer}.mlp.gate_proj.weight": torch.zeros(16, WIDTH),
        f"{layer}.mlp.up_proj.weight": torch.zeros(16, WIDTH),
        f"{layer}.mlp.down_proj.weight": torch.zeros(WIDTH, 16),
    }
    return {
        "model.embed_tokens.weight": signs,
        "model.norm.weight": torch.ones(WIDTH),
        "lm_head.weight": head * (SHARPNESS / WIDTH),
        **silent,
    }


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
