"""Trains and exports the pair: a masked-diffusion model for `ponder diffuse`, and its twin, a Qwen3 like any other.

Both directories are in Hugging Face's format. The first says in config.json what it needs besides: its mask, the blocks
and the length of answer that it was trained with.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from engine.families import MASKED_DIFFUSION
from training.diffusion.byte_tokenizer import END, byte_tokenizer
from training.diffusion.questions import ANSWER, MASK
from training.diffusion.students import BLOCK_SIZES, SHAPE, PairStudent, causal_student, masked_student
from training.distil.distillation import Distillation, DistilPlan
from training.export import named_weights, qwen3_shape
from training.torch_model import Model, ModelConfig

CARD = """\
---
license: apache-2.0
language: en
---

# Pebble's masked-diffusion model

A model of {parameters:,} parameters that fills masked places of a text instead of writing from left to right: an
experiment, for `ponder diffuse` and `ponder serve --diffusion-model`, not to be talked to. It knows three tasks alone:
independent sums, chains of sums, and gaps in lists of words. [Masked diffusion](../../docs/diffusion.md) says how it
decodes and what was measured beside an autoregressive twin. A token is a byte.

## How it was made

`python -m training --only pebble-diffusion` makes it again: {steps:,} steps of {batch} questions of
`training/diffusion/questions.py`, all of them made by code. Muon ({matrix_lr}) for the matrices and Adam ({adam_lr})
for the rest; the learning rates fall to nothing over the last {fall:.0%} of the steps. It took {minutes} minutes on
{hardware}, beside other work.
"""
DIFFUSION, TWIN = "pebble-diffusion", "pebble-diffusion-twin"
STUDENTS = {DIFFUSION: masked_student, TWIN: causal_student}


def train_one(
    name: str, plan: DistilPlan, work: Path, out: Path, *, resume: bool, shape: ModelConfig = SHAPE
) -> Distillation[Model]:
    """Trains one of the pair, in the folder `work`, and exports it to `out`."""
    tokenizer = byte_tokenizer()
    student: PairStudent = STUDENTS[name](plan, tokenizer, shape)
    run = Distillation[Model](plan, student, work)
    if resume:
        run.resume()
    run.run()
    export_pair(student.module, tokenizer, out, diffuses=name == DIFFUSION)
    return run


def write_card(run: Distillation[Model], hardware: str, out: Path) -> None:
    """Writes README.md of a trained masked-diffusion model."""
    plan = run.plan
    text = CARD.format(
        parameters=sum(weight.numel() for weight in run.student.module.parameters()),
        steps=run.done, batch=plan.batch, matrix_lr=plan.matrix_lr, adam_lr=plan.adam_lr, fall=plan.fall,
        minutes=max(1, round(run.seconds / 60)), hardware=hardware,
    )  # fmt: skip
    (out / "README.md").write_text(text, encoding="utf-8")


def export_pair(model: Model, tokenizer: Tokenizer, out: Path, *, diffuses: bool) -> None:
    """Writes a model of the pair, in bfloat16, with its tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(named_weights(model, torch.bfloat16), out / "model.safetensors", metadata={"format": "pt"})
    end = tokenizer.token_to_id(END)
    config: dict[str, object] = {
        **qwen3_shape(model.config), "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": end,
        "pad_token_id": end, "torch_dtype": "bfloat16",
    }  # fmt: skip
    if diffuses:
        config |= {
            "architectures": [MASKED_DIFFUSION],
            "model_type": "qwen3_masked_diffusion",
            "mask_token_id": tokenizer.token_to_id(MASK),
            "diffusion": {"mask": MASK, "answer_tokens": ANSWER, "block_sizes": list(BLOCK_SIZES)},
        }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    for name, document in (("config.json", config), ("tokenizer_config.json", settings)):
        (out / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
