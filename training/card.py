"""The model card: the model, its making and its abilities, from the run's own numbers.

Writes `README.md` beside the weights and the picture of the loss under `docs/img`. Every number in it comes from the
checkpoint, the log or the evaluation; none is typed by hand.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from training import mixture, pass_at_k
from training.evaluate import EvaluationResult, table
from training.reinforcement import grpo
from training.trainer import Trainer

CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# {title}

{purpose}

## What it can do

Measured through Ponder's own engine, greedily, with seeds, phrasings, names, tool schemas and puzzles that training
never used. The interval is Wilson's, at 95%; the goal is what we want of this model, reached or not. Remake the table
with `python -m training.evaluate --model models/{name} -n {asked}`.

{table}
{searched}
## How it was made

- **Data**: conversations written by the generators in `training/tasks`, in these shares of the tokens: {shares}. Word
  lists, made-up words, made-up tools and encyclopaedic paragraphs about made-up things fill the templates; real prose
  comes from the docstrings of the Python standard library and of packages that Ponder depends on. {taken}
  Puzzles whose hash ends in 0, 1 or 2 (`training/puzzle.py`)
  were never trained on.
- **Shape**: {family}, width {hidden}, feed-forward {intermediate}, {heads} query and {kv_heads}
  key-value heads of {head_dim}, tied embedding, vocabulary {vocab} (byte-level BPE,
  digits single), rope base {theta:,.0f}.{compared}
- **Recipe**: {steps:,} steps of about {batch:,} tokens, {tokens:.1f} million tokens in all (with padding). Each
  conversation draws its own difficulty, up to {hardest}. Muon at {matrix_lr} for the matrices
  and AdamW at {adam_lr} for the embedding and norms; warm-up, a constant stretch, a linear fall over the last
  {fall:.0%}. Loss on what the assistant writes, more on the tokens that decide what is copied, and a little on what it
  reads. Guided alignment (`training/alignment.py`): a head each for labels, matching words, the words that a decision
  asks about, the source and the place of a copy has its targets in the loss. Procedural sequences
  (`training/procedural.py`) are {procedural[0]:.0%} of the tokens at first and {procedural[1]:.0%} in the end.
- **Time**: {time} on {hardware}.{remarks}

Remake it all with `python -m training` (`make train`).

![the loss over the tokens seen](../../docs/img/{name}-loss.png)

## Limits

- It knows no facts and no other language. What it says about a text is meant as a quotation from it, and may be the
  wrong one or changed: read the sentence it quotes.
- It declines by recognising unfamiliar questions. A question that resembles a familiar one can get a familiar answer.
- It was trained on chats of up to about {longest} tokens. The format allows {positions:,} positions, yet answers get
  worse beyond what was trained.
- Its templates are English, and so is its prose.
"""

REINFORCED = """\
## Its reinforcement

Then {steps:,} steps of reinforcement learning on judged answers (GRPO, `training/reinforcement`): in each, {answers}
answers to {groups} questions about tools, passages, tables and sums, in training's words. The mean reward of its first
steps was {first:.2f}, of its last {last:.2f}. {time} on {hardware}.

![the mean reward of a step's answers](../../docs/img/pebble-reward.png)

"""

REMARKS = "remarks.md"  # in a run's work folder: facts beside the numbers, as further items of the list

TITLES = {"pebble": "Pebble", "pebble-draft": "Pebble's draft"}
PURPOSES = {
    "pebble": (
        "A chat model of {millions:.1f} million parameters that comes with Ponder, so that a fresh machine without\n"
        "a network has something to talk to: it quotes the sentence of a given text that answers a question, or\n"
        "says that none does; calls tools; works on number puzzles in thought; remembers what it is told in a chat.\n"
        "For real questions start a larger model, `ponder serve --model Qwen/Qwen3-4B`."
    ),
    "pebble-draft": (
        "A model of {millions:.1f} million parameters with Pebble's tokenizer and training data. It is there\n"
        "to guess ahead for Pebble (speculative decoding) and to be the small end of a cascade, not to be talked to."
    ),
}


TAKEN = {
    "pebble": "Nothing was taken\n  from the web or distilled from another model's answers.",
    "pebble-draft": "Nothing was taken\n  from the web; Pebble's own answers were distilled.",
}


COMPARED = {
    "pebble": (
        "\n  It was compared with other shapes only after it was chosen, at a third of its width:\n"
        "  [shapes](../../docs/performance.md#shapes-of-the-bundled-model)."
    ),
    "pebble-draft": "",
}


def _family(layer_types: Sequence[str]) -> str:
    layers, convolutions = len(layer_types), layer_types.count("conv")
    return (
        f"LFM2, {layers} layers, of which {convolutions} are gated short convolutions"
        if convolutions
        else (f"Qwen3, {layers} layers")
    )


def hardware(device: str, threads: int) -> str:
    """Returns the machine that trained it, in its own words."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")] if cpuinfo.exists() else []
    name = names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
    return f"{threads} thread{'s' if threads > 1 else ''} of an {name}"


def duration(seconds: float) -> str:
    """Returns hours, or minutes of less than one, as a person says them."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} hours"
    minutes = max(1, round(seconds / 60))
    return "1 minute" if minutes == 1 else f"{minutes} minutes"


def plot(losses: Path, out: Path, name: str) -> None:
    """The loss over the tokens seen, logarithmic, from the trainer's log."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    read = (json.loads(line) for line in losses.read_text(encoding="utf-8").splitlines())
    rows = list({row["step"]: row for row in read}.values())  # a resumed run does a few steps again
    figure, axes = pyplot.subplots(figsize=(6, 3), dpi=100)
    axes.plot([row["tokens"] / 1e6 for row in rows], [row["loss"] for row in rows], linewidth=1)
    axes.set(xlabel="million tokens", ylabel="loss", yscale="log", title=f"{TITLES[name]}: training loss")
    axes.grid(alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, bbox_inches="tight")
    pyplot.close(figure)


def plot_rewards(log: Path, out: Path) -> None:
    """The mean reward of each step's answers, from the learner's log, faint, and the mean of ten steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rewards = _rewards(log)
    smooth = [fmean(rewards[max(0, at - 9) : at + 1]) for at in range(len(rewards))]
    figure, axes = pyplot.subplots(figsize=(6, 3), dpi=100)
    axes.plot(range(1, len(rewards) + 1), rewards, linewidth=1, alpha=0.3)
    axes.plot(range(1, len(rewards) + 1), smooth, linewidth=1.5, color="C0")
    axes.set(xlabel="step", ylabel="mean reward", title=f"{TITLES['pebble']}: reinforcement")
    axes.grid(alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, bbox_inches="tight")
    pyplot.close(figure)


def _rewards(log: Path) -> list[float]:
    return [float(json.loads(line)["reward"]) for line in log.read_text("utf-8").splitlines()]


def add_reinforcement(out: Path, learner: grpo.Learner, results: list[EvaluationResult], hardware_name: str) -> None:
    """Puts the new evaluation into a model's card, in the place of the old one, and says how it was reinforced."""
    path, plan, rewards = out / "README.md", learner.plan, _rewards(learner.work / grpo.LOG)
    text = path.read_text("utf-8")
    evaluated = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert evaluated is not None, "every card has the table of its evaluation first"
    text = text[: evaluated.start()] + table(results) + "\n" + text[evaluated.end() :]
    text = re.sub(rf"^{REINFORCED.splitlines()[0]}\n(?:(?!## ).*\n)*", "", text, flags=re.MULTILINE)
    section = REINFORCED.format(
        steps=learner.done, answers=plan.answers, groups=plan.groups, first=fmean(rewards[:10]),
        last=fmean(rewards[-10:]), time=duration(learner.seconds), hardware=hardware_name,
    )  # fmt: skip
    path.write_text(text.replace("## Limits\n", section + "## Limits\n", 1), encoding="utf-8")


def write(
    trainer: Trainer, results: list[EvaluationResult], out: Path, name: str, hardware_name: str, longest: int
) -> None:
    plan = trainer.plan
    millions = sum(weight.numel() for weight in trainer.model.parameters()) / 1e6
    searched = out / pass_at_k.RESULTS
    remarks = trainer.work / REMARKS
    rows = [pass_at_k.PassRow(**row) for row in json.loads(searched.read_text("utf-8"))] if searched.exists() else []
    shares = mixture.shares(1.0)
    text = CARD.format(
        name=name,
        title=TITLES[name],
        purpose=PURPOSES[name].format(millions=millions),
        asked=results[0].n,
        table=table(results),
        searched=f"\nSampled answers to puzzles (`python -m training.pass_at_k`), the baseline that a search must "
        f"beat:\n\n{pass_at_k.table(rows)}\n"
        if rows
        else "",
        shares=", ".join(f"{task} {share / sum(shares.values()):.0%}" for task, share in shares.items()),
        family=_family(plan.model.layer_types),
        taken=TAKEN[name],
        hidden=plan.model.hidden_size,
        intermediate=plan.model.intermediate_size,
        heads=plan.model.num_attention_heads,
        kv_heads=plan.model.num_key_value_heads,
        head_dim=plan.model.head_dim,
        vocab=plan.model.vocab_size,
        theta=plan.model.rope_theta,
        compared=COMPARED[name],
        procedural=mixture.PROCEDURAL,
        steps=plan.steps,
        hardest=f"one that grows over {plan.ramp_steps:,} steps" if plan.ramp_steps > 1 else "the hardest",
        fall=plan.fall,
        batch=plan.batch_tokens,
        tokens=trainer.tokens / 1e6,
        matrix_lr=plan.matrix_lr,
        adam_lr=plan.adam_lr,
        time=duration(trainer.seconds),
        hardware=hardware_name,
        longest=longest,
        positions=plan.model.max_position_embeddings,
        remarks="\n" + remarks.read_text("utf-8").strip() if remarks.exists() else "",
    )
    (out / "README.md").write_text(text, encoding="utf-8")
