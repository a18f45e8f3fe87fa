"""Trains a shape from a seed on passages and tools alone, and measures it on held-out cases.

The data of a step depend on the seed and the step, not on the shape, so all shapes of a seed read the same
conversations in the same order. A run's result is a file of its own, written once it is there; until then its
checkpoint is. Knows nothing of tables.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from engine import Engine, EngineConfig
from training import export
from training.abilities import ABILITIES, Ability
from training.alignment import ROLES
from training.conversation import Case, Conversation, Message
from training.evaluate import SEED, judged, replies
from training.plans import computes_bfloat16
from training.tasks import grounded
from training.torch_model import Model, ModelConfig
from training.train_tokenizer import segments
from training.trainer import Plan, Trainer

Row = dict[str, Any]  # Any: plain JSON

BASELINE = "qwen3"
_LFM2 = ModelConfig(  # Pebble's, at a third of its width
    hidden_size=128,
    intermediate_size=288,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
_BLOCK = ("conv", "full_attention", "full_attention", "conv", "full_attention")
SHAPES: dict[str, ModelConfig] = {
    BASELINE: replace(_LFM2, layer_types=("full_attention",) * 10, intermediate_size=304),
    "lfm2": _LFM2,
    "lfm2, deep": replace(
        _LFM2,
        hidden_size=96,
        intermediate_size=216,
        layer_types=_BLOCK * 4,
        num_attention_heads=3,
        num_key_value_heads=1,
    ),
    "lfm2, FFN-poor": replace(_LFM2, intermediate_size=144, layer_types=_BLOCK * 3),
}
TASKS = ("grounded", "tool choice")
PLAN = Plan(
    model=SHAPES[BASELINE],
    steps=280,
    ramp_steps=160,
    batch_tokens=4096,
    fall=0.4,
    bfloat16=computes_bfloat16("cpu"),
    tasks=TASKS,
)
ONE_PASSAGE = Ability(
    "1 passage, made-up facts, training's words",
    lambda rng, n: [grounded.case(rng, 1, phrasing="train") for _ in range(n)],
)
ASKED = (
    ONE_PASSAGE,
    *(
        ability
        for ability in ABILITIES
        if ability.name
        in ("1 to 6 passages, made-up facts", "1 to 6 passages, real prose", "one of 1 to 8 unseen tools")
    ),
)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Of a case's wanted answer, teacher-forced: the mean loss of a token in nats, its tokens, and those that are the
    likeliest."""

    loss: float
    tokens: int
    right: int


def answered(case: Case) -> Conversation:
    """Returns a case's conversation with the first reply that its judge calls right."""
    wanted = case.wanted[0]
    message = Message("assistant", wanted.content, wanted.thinking, wanted.calls)
    return replace(case.prompt, messages=(*case.prompt.messages, message))


@torch.inference_mode()
def token_loss(model: Model, tokenizer: Tokenizer, case: Case) -> TokenLoss:
    """Reads a case with its wanted answer, and returns what the model made of the answer."""
    ids, written = list[int](), list[int]()
    for text, learned in segments(answered(case)):
        part = tokenizer.encode(text, add_special_tokens=False).ids
        written += range(len(ids), len(ids) + len(part)) if learned else ()
        ids += part
    tokens, at = torch.tensor(ids), torch.tensor(written)
    logits = F.linear(model.hidden(tokens[None])[0, at - 1], model.model.embed_tokens.weight)
    right = int((logits.argmax(-1) == tokens[at]).sum())
    return TokenLoss(float(F.cross_entropy(logits, tokens[at])), len(written), right)


async def verdicts(model: Path, cases: Sequence[Case]) -> list[dict[str, bool]]:
    """Returns what the judges say of greedy answers, made by the engine, of each case."""
    async with await Engine.start(EngineConfig(model=str(model), device="cpu", threads=1)) as engine:
        said = await asyncio.gather(*(replies(engine, case) for case in cases))
    return [
        {measure: x for measure, x in judged(case, of_case).items() if isinstance(x, bool)}
        for case, of_case in zip(cases, said, strict=True)
    ]


def measured(trainer: Trainer, asked: Sequence[Ability], n: int) -> dict[str, Row]:
    """Returns for each ability the loss and the verdict of each of `n` held-out cases."""
    exported = trainer.work / "model"
    export.export(trainer.model, trainer.tokenizer, exported)
    found = dict[str, Row]()
    for ability in asked:
        cases = ability.cases(Random(f"{SEED}-{ability.name}"), n)
        losses = [asdict(token_loss(trainer.model, trainer.tokenizer, case)) for case in cases]
        found[ability.name] = {"cases": losses, "verdicts": asyncio.run(verdicts(exported, cases))}
    return found


def missed(log: Path, last: int = 5) -> dict[str, float]:
    """Returns −ln of the attention that falls where it should, of each guided role: the mean of a log's last lines."""
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()[-last:]] if log.exists() else []
    return {role: fmean(line[role] for line in lines) for role in ROLES} if lines else {}


@dataclass(frozen=True, slots=True)
class Ablation:
    """Shapes, the plan that all are trained by, and the cases that all are asked; runs lie below `work`."""

    work: Path
    tokenizer: Path
    shapes: Mapping[str, ModelConfig]
    plan: Plan
    asked: Sequence[Ability]
    n: int

    def folder(self, shape: str, seed: int) -> Path:
        return self.work / f"{shape.replace(', ', '-')}-seed-{seed}"

    def plan_of(self, shape: str, seed: int) -> Plan:
        return replace(self.plan, model=self.shapes[shape], seed=seed)

    def kept(self, shape: str, seed: int) -> Row | None:
        """Returns the result of a run, with what the guided heads missed in the end; none where it is not there yet.

        Raises ValueError where the run was begun by another plan.
        """
        self._check(shape, seed)
        place = self.folder(shape, seed)
        if not (place / "result.json").exists():
            return None
        return {**json.loads((place / "result.json").read_text("utf-8")), "missed": missed(place / "losses.jsonl")}

    def run(self, shape: str, seed: int, until: int | None = None) -> Row | None:
        """Trains a shape from where it was left, and measures it. Returns the result, or none after step `until`.

        Raises ValueError where the run was begun by another plan.
        """
        if (kept := self.kept(shape, seed)) is not None:
            return kept
        place = self.folder(shape, seed)
        _write(place / "plan.json", self._described(shape, seed))
        trainer = Trainer(self.plan_of(shape, seed), Tokenizer.from_file(str(self.tokenizer)), place)
        if trainer.checkpoint.exists():
            trainer.resume()
        trainer.reader.at(trainer.done)  # reads the prose, which takes as long as many steps
        before, began = trainer.tokens, time.process_time()
        trainer.run(until)
        busy = time.process_time() - began
        if trainer.done < trainer.plan.steps:
            return None
        row: Row = {
            "shape": shape,
            "seed": seed,
            "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
            "embedding": trainer.model.model.embed_tokens.weight.numel(),
            "tokens": trainer.tokens,
            "seconds": round(trainer.seconds),
            "tokens_per_cpu_second": round((trainer.tokens - before) / busy) if trainer.tokens > before else None,
            "abilities": measured(trainer, self.asked, self.n),
        }
        _write(place / "result.json", row)
        return self.kept(shape, seed)

    def _described(self, shape: str, seed: int) -> Row:
        described: Row = {"plan": asdict(self.plan_of(shape, seed)), "n": self.n, "asked": [a.name for a in self.asked]}
        return dict(json.loads(json.dumps(described)))  # tuples as lists

    def _check(self, shape: str, seed: int) -> None:
        path = self.folder(shape, seed) / "plan.json"
        if path.exists() and json.loads(path.read_text("utf-8")) != self._described(shape, seed):
            raise ValueError(
                f"{path.parent} was begun by another plan, or asked other cases: take the same --steps and -n, or "
                "another --work."
            )


def run_all(
    ablation: Ablation, shapes: Sequence[str], seeds: Sequence[int], progress: Callable[[str], None]
) -> list[Row]:
    """Makes the runs of all shapes, seed by seed, so that what is there after a stop can be compared."""
    rows = list[Row]()
    for seed in seeds:
        for shape in shapes:
            row = ablation.run(shape, seed)
            assert row is not None, "a run without an end goes on to the end of its plan"
            progress(f"{shape}, seed {seed}: {row['tokens']} tokens, {row['seconds']} s")
            rows.append(row)
    return rows


def _write(path: Path, row: Row) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(row), encoding="utf-8")
    partial.replace(path)
