"""Reads a masked-diffusion model: the weights of a Qwen3 that was trained without causality, and its mask token.

`architectures` of config.json is `Qwen3MaskedDiffusionLM`, which no family of the engine has: nothing that decodes from
left to right loads it by mistake. Knows nothing of passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.errors import CheckpointError
from engine.families import MASKED_DIFFUSION, qwen3
from engine.model.decoder import Decoder
from engine.model.linear import default_dtype
from engine.model.loader import Json, read_json, resolve
from engine.model.memory import find_device
from engine.model.quantization.checkpoint import open_weights
from engine.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class MaskedDiffusionModel:
    """A decoder that fills masks, with its tokenizer. `mask_token_id` stands for a masked place, which a text writes as
    the character `mask`. The model was trained on answers of `answer_tokens`, in blocks of `block_sizes`."""

    decoder: Decoder
    tokenizer: Tokenizer
    mask_token_id: int
    mask: str
    eos_token_ids: tuple[int, ...]
    answer_tokens: int
    block_sizes: tuple[int, ...]


def load_masked_diffusion(
    model: str, *, device: str = "auto", dtype: torch.dtype | None = None
) -> MaskedDiffusionModel:
    """Loads a masked-diffusion model (see `loader.resolve`) on torch's layers, in `dtype`, or the device's default.

    Raises:
        CheckpointError: it is no such model, or incomplete.
        InvalidParameter: the device is not there.
    """
    path, place = resolve(model), find_device(device)
    if not path.is_dir():
        raise CheckpointError(f"{path.name} is a file; a directory with a {MASKED_DIFFUSION} is needed.")
    config = read_json(path / "config.json")
    if (found := config.get("architectures")) != [MASKED_DIFFUSION]:
        raise CheckpointError(
            f"{path.name} is no masked-diffusion model: its architectures are {found!r}; accepted: "
            f"[{MASKED_DIFFUSION!r}], as `python -m training --only pebble-diffusion` makes."
        )
    spec, weights = qwen3.spec(config), open_weights(path)
    names = qwen3.FAMILY.names(config)
    decoder = Decoder(
        spec, names, weights, dtype=dtype or default_dtype(place), device=place, kernels="torch"
    )  # the layers whose attention reads `Batch.last_keys` everywhere
    weights.check_all_used((*names.ignored, names.lm_head) if spec.tied_embeddings else names.ignored)
    tokenizer = Tokenizer.load(path)
    mask, about = config.get("mask_token_id"), config.get("diffusion") or {}
    if not isinstance(mask, int) or not 0 <= mask < spec.vocab_size:
        raise CheckpointError(f"config.json: mask_token_id is {mask!r}; accepted: 0 to {spec.vocab_size - 1}.")
    if not tokenizer.eos_token_ids:
        raise CheckpointError("config.json has no eos_token_id; a masked-diffusion model ends its answers with one.")
    return MaskedDiffusionModel(
        decoder, tokenizer, mask, _text(about, "mask"), tokenizer.eos_token_ids, _count(about, "answer_tokens"),
        tuple(_counts(about, "block_sizes")),
    )  # fmt: skip


def _text(about: Json, name: str) -> str:
    value = about.get(name)
    if not isinstance(value, str) or len(value) != 1:
        raise CheckpointError(f"config.json: diffusion.{name} is {value!r}; one character is needed.")
    return value


def _count(about: Json, name: str) -> int:
    value = about.get(name)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: diffusion.{name} is {value!r}; an integer of 1 or more is needed.")
    return value


def _counts(about: Json, name: str) -> list[int]:
    value = about.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(each, int) and each > 0 for each in value):
        raise CheckpointError(f"config.json: diffusion.{name} is {value!r}; a list of positive integers is needed.")
    return value
