"""The model card: what the model is, how it was made and what it can do, from the run's own numbers.

Writes `README.md` beside the weights and the picture of the loss under `docs/img`. Every number in it comes from the
checkpoint, the log or the evaluation; none is typed by hand.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

from training.evaluate import Result, table
from training.trainer import Trainer

CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# Pebble

A chat model of {millions:.1f} million parameters that comes with Ponder, so that a fresh machine without a network has
something to talk to. It is trained to say when something is beyond it, and mostly does. For real questions start a
larger model, `ponder serve --model Qwen/Qwen3-4B`.

## What it can do

Measured through Ponder's own engine at the sampling defaults of `generation_config.json`, with seeds and phrasings that
training never used. The interval is Wilson's, at 95%. Remake the table with `python -m training.evaluate`.

{table}

## How it was made

- **Data**: conversations written by the generators in `training/tasks`: sums with their working, facts told and asked,
  counting, small talk, questions about itself, and many kinds of question it should decline. Word lists, made-up words
  and sentences from the Python standard library's docstrings fill the templates; slips of the finger are added. Nothing
  was taken from the web or distilled from another model's answers.
- **Shape**: Qwen3 ({layers} layers, width {hidden}, feed-forward {intermediate}, {heads} query and {kv_heads} key-value
  heads of {head_dim}, tied embedding), vocabulary {vocab} (byte-level BPE, digits single), rope base {theta:,.0f}.
- **Recipe**: {steps:,} steps of about {batch:,} tokens, {tokens:.1f} million tokens in all (with padding); Muon at
  {matrix_lr} for the matrices and AdamW at {adam_lr} for the embedding and norms; warm-up, a constant stretch, a linear
  fall over the last 40%. Loss on the answers, and a little on the prompts. Numbers, turns and lists grow with progress.
- **Time**: {hours:.1f} hours on {hardware}.

Remake it all with `python -m training` (`make train`).

## Limits

- It knows no facts, no other language, and no arithmetic but the kinds above, where it also errs. Longer numbers and
  sums of three numbers are declined in training, yet sometimes worked out wrongly instead of declined.
- It declines by recognising unfamiliar questions. A question that resembles a familiar one can get a familiar answer.
- It was trained on chats of up to about {longest} tokens. The format allows {positions:,} positions, yet answers get
  worse beyond what was trained.
- Its templates are English. It does not call tools.
"""


def hardware(device: str, threads: int) -> str:
    """What trained it, in the machine's own words."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")] if cpuinfo.exists() else []
    name = names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
    return f"{threads} thread{'s' if threads > 1 else ''} of an {name}"


def plot(losses: Path, out: Path) -> None:
    """The loss over the tokens seen, logarithmic, from the trainer's log."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    read = (json.loads(line) for line in losses.read_text(encoding="utf-8").splitlines())
    rows = list({row["step"]: row for row in read}.values())  # a resumed run does a few steps again
    figure, axes = pyplot.subplots(figsize=(6, 3), dpi=100)
    axes.plot([row["tokens"] / 1e6 for row in rows], [row["loss"] for row in rows], linewidth=1)
    axes.set(xlabel="million tokens", ylabel="loss", yscale="log", title="Pebble: training loss")
    axes.grid(alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, bbox_inches="tight")
    pyplot.close(figure)


def write(trainer: Trainer, results: list[Result], out: Path, hardware_name: str, longest: int) -> None:
    plan = trainer.plan
    text = CARD.format(
        millions=sum(weight.numel() for weight in trainer.model.parameters()) / 1e6,
        table=table(results),
        layers=plan.model.num_hidden_layers,
        hidden=plan.model.hidden_size,
        intermediate=plan.model.intermediate_size,
        heads=plan.model.num_attention_heads,
        kv_heads=plan.model.num_key_value_heads,
        head_dim=plan.model.head_dim,
        vocab=plan.model.vocab_size,
        theta=plan.model.rope_theta,
        steps=plan.steps,
        batch=plan.batch_tokens,
        tokens=trainer.tokens / 1e6,
        matrix_lr=plan.matrix_lr,
        adam_lr=plan.adam_lr,
        hours=trainer.seconds / 3600,
        hardware=hardware_name,
        longest=longest,
        positions=plan.model.max_position_embeddings,
    )
    (out / "README.md").write_text(text, encoding="utf-8")
