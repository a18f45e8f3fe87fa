"""Group relative policy optimization (Shao et al., 2024) on judged answers.

Each step samples groups of answers by the weights as they are, scores them, and takes one gradient step, so the ratio
of policies is 1 and nothing is clipped. An answer's advantage is its reward less its group's mean, over their standard
deviation; groups whose answers all got the same teach nothing and are left out (Yu et al., 2025, DAPO, as is the mean
over all tokens of the step). In place of a penalty on the distance from the first weights the step also trains on the
mixture that made them (Ouyang et al., 2022), which keeps what is not rewarded. Knows nothing of tasks.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import torch
from tokenizers import Tokenizer

from training import export
from training.alignment import NOWHERE, ROLES
from training.mixture import Reader, stacked
from training.reinforcement.rollouts import RolloutGroup, RolloutWorkers
from training.torch_model import Model, TrainingBatch
from training.train_tokenizer import END_OF_TEXT, token_id
from training.trainer import Plan as MixturePlan
from training.trainer import forget_later, save_whole

LOG = "rewards.jsonl"
FOLDERS = 2  # of weights: workers read the newest, and may still have files of the one before open


@dataclass(frozen=True, slots=True)
class ReinforcementPlan:
    """`groups` questions a step, with `answers` answers each."""

    steps: int = 150
    groups: int = 64
    answers: int = 16
    lr: float = 5e-5
    warmup: int = 5  # steps
    fall: float = 0.3  # share of the steps over which the rate falls to 0
    clip: float = 1.0  # of the gradient's norm
    mixture: float = 0.5  # weight of the mixture's mean loss beside the policy's
    mixture_tokens: int = 16_384  # of a step
    largest_batch: int = 49_152  # tokens that go through the model at once
    spread: float = 1.5  # of the lengths of a batch's rows
    seed: int = 1
    checkpoint_every_s: float = 120.0


def plan(device: str, *, steps: int | None = None, seed: int = 1) -> ReinforcementPlan:
    """Returns the recipe for a device. A step on a CPU has a quarter of a GPU's answers."""
    made = ReinforcementPlan(seed=seed)
    if device != "cuda":
        made = replace(made, groups=32, answers=8, mixture_tokens=4096, largest_batch=6144)
    return replace(made, steps=steps or made.steps)


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """A prompt and one message of the model that follows it, with its answer's advantage."""

    prompt: list[int]
    answer: list[int]
    advantage: float


def advantages(rewards: Sequence[float]) -> list[float]:
    """Returns each reward less their mean, over their standard deviation; zeros where all are alike."""
    mean, deviation = fmean(rewards), pstdev(rewards)
    return [(reward - mean) / deviation if deviation > 1e-6 else 0.0 for reward in rewards]


def policy_rows(group: RolloutGroup) -> list[PolicyRow]:
    """Returns the group's messages that have an advantage, the longest with its prompt first."""
    made = [
        PolicyRow(prompt, answer, advantage)
        for rollout, advantage in zip(group.rollouts, advantages([each.reward for each in group.rollouts]), strict=True)
        for prompt, answer in rollout.turns
        if advantage and answer
    ]
    return sorted(made, key=lambda row: -len(row.prompt) - len(row.answer))


def batches(rows: Sequence[PolicyRow], largest: int, padding: int, spread: float) -> Iterator[TrainingBatch]:
    """Stacks rows of one group, longest first, into batches of at most `largest` tokens or one row. What their prompts
    have in common is computed once for a batch. A token's loss weight is its advantage, so that the loss is the policy
    gradient's where the ratio is 1."""
    prefixes = (row.prompt[:-1] for row in rows)  # a row begins with the token before the first that it learns
    shared, first = len([*takewhile(lambda tokens: len({*tokens}) == 1, zip(*prefixes, strict=False))]), 0
    while first < len(rows):
        longest, end = len(rows[first].prompt) + len(rows[first].answer) - shared, first
        while end < len(rows) and shared + longest * (end - first + 1) <= largest:
            if longest > spread * (len(rows[end].prompt) + len(rows[end].answer) - shared):
                break
            end += 1
        end = max(end, first + 1)
        tokens = np.full((end - first, longest), padding, np.int32)
        weights = np.zeros((end - first, longest), np.float32)
        for at, row in enumerate(rows[first:end]):
            own = row.prompt[shared:] + row.answer
            tokens[at, : len(own)] = own
            weights[at, len(own) - len(row.answer) : len(own)] = row.advantage
        spans = np.full((len(ROLES), end - first, longest, 2), NOWHERE[0], np.int32)
        prefix = torch.tensor(rows[0].prompt[:shared], dtype=torch.int32)
        yield replace(stacked(tokens, weights, spans), prefix=prefix)
        first = end


def gathered(made: Iterable[TrainingBatch], largest: int) -> Iterator[list[TrainingBatch]]:
    """Yields batches in their order, as many together as have at most `largest` tokens, or one."""
    together, tokens = list[TrainingBatch](), 0
    for batch in made:
        size = len(batch.prefix) + batch.tokens.numel()
        if together and tokens + size > largest:
            yield together
            together, tokens = [], 0
        together.append(batch)
        tokens += size
    if together:
        yield together


def share_of_rate(step: int, plan: ReinforcementPlan) -> float:
    """Returns the share of the rate at a step: it rises, stays and falls."""
    left = (plan.steps - step) / max(1.0, plan.fall * plan.steps)
    return min(1.0, (step + 1) / (plan.warmup + 1), left)


class Learner:
    """Holds the policy, its optimizer, and the number of steps done."""

    def __init__(self, plan: ReinforcementPlan, start: Path, work: Path, *, device: str, bfloat16: bool) -> None:
        """`start` is the folder of the model that the policy begins as; `work` takes checkpoints, log and weights."""
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each shape, which takes longer than a step
        self.plan, self.work, self.device, self.bfloat16 = plan, work, device, bfloat16
        self.tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
        self.model: Model = export.load(start).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.done = 0
        self.seconds = 0.0

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint.pt"

    def save(self) -> None:
        """Writes the checkpoint whole or not at all."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        save_whole({**state, "done": self.done, "seconds": self.seconds}, self.checkpoint)

    def resume(self) -> None:
        """Goes back to the last checkpoint. Raises FileNotFoundError when there is none."""
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.seconds = state["done"], state["seconds"]

    def publish(self) -> Path:
        """Writes the weights for the workers, in the place of those of two steps ago, and returns their folder."""
        folder = self.work / f"policy-{self.done % FOLDERS}-{self.done}"
        for old in self.work.glob(f"policy-{self.done % FOLDERS}-*"):
            old.rename(folder)
        export.export(self.model, self.tokenizer, folder)
        return folder

    def step(self, groups: Sequence[RolloutGroup], replayed: Sequence[TrainingBatch]) -> dict[str, float]:
        """Takes one step on judged answers and on batches of the mixture. Returns the norms of both gradients."""
        of_groups, padding = [policy_rows(group) for group in groups], token_id(self.tokenizer, END_OF_TEXT)
        tokens, largest = sum(len(row.answer) for rows in of_groups for row in rows), self.plan.largest_batch
        made = chain.from_iterable(batches(rows, largest, padding, self.plan.spread) for rows in of_groups)
        for at_once in gathered(made, largest):
            with torch.autocast(self.device, torch.bfloat16, enabled=self.bfloat16):
                loss, _ = self.model.loss(at_once)
            (loss / tokens).backward()
        policy = _norm(self.model)
        self._replay(replayed)
        whole = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip))
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.lr * share_of_rate(self.done, self.plan)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return {"policy": round(policy, 4), "gradient": round(whole, 4)}

    def _replay(self, replayed: Sequence[TrainingBatch]) -> None:
        """Adds the gradient of the mixture's loss, as `Trainer` has it."""
        if not replayed or not self.plan.mixture:
            return
        guidance = torch.tensor(MixturePlan().guidance, device=self.device)
        weight = self.plan.mixture / sum(float(batch.shares.sum()) for batch in replayed)
        for batch in replayed:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.bfloat16):
                loss, missed = self.model.loss([batch])
            (weight * (loss + guidance @ missed)).backward()


def _norm(model: Model) -> float:
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm()) if gradients else 0.0


def summary(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Returns the mean reward of each task's answers."""
    rewards = defaultdict[str, list[float]](list)
    for group in groups:
        rewards[group.task] += [rollout.reward for rollout in group.rollouts]
    return {task: round(fmean(found), 3) for task, found in sorted(rewards.items())}


def train(learner: Learner, workers: int, readers: int = 0, until_s: float = float("inf")) -> None:
    """Trains to the end of the plan, or for `until_s` seconds, and writes a line of log for each step: groups whose
    rewards differ are `effective` (DAPO's word). `workers` processes answer, and `readers` write the mixture's batches
    (0: this one)."""
    plan = learner.plan
    reader = Reader(
        plan.seed, plan.mixture_tokens, plan.largest_batch, 1, learner.tokenizer, workers=readers, spread=plan.spread
    )
    learner.work.mkdir(parents=True, exist_ok=True)
    log = learner.work / LOG
    forget_later(log, learner.done)
    began = last = saved = time.monotonic()
    with RolloutWorkers(workers) as pool, log.open("a") as out:
        for replayed in reader.read(learner.done + 1, plan.steps + 1):
            groups = list(pool.sample(learner.publish(), f"{plan.seed}-{learner.done}", plan.groups, plan.answers))
            sampled = time.monotonic()
            norms = learner.step(groups, replayed)
            now = time.monotonic()
            learner.seconds, sampling, last = learner.seconds + now - last, sampled - last, now
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            line = {
                "step": learner.done,
                "reward": round(fmean(each.reward for each in rollouts), 4),
                "effective": sum(len({each.reward for each in group.rollouts}) > 1 for group in groups),
                "tokens": sum(len(answer) for each in rollouts for _, answer in each.turns),
                "seconds": round(learner.seconds, 1),
                **norms,
                "tasks": summary(groups),
            }
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(
                f"step {learner.done}/{plan.steps}  reward {line['reward']:.3f}  {line['effective']} of {plan.groups} "
                f"groups effective  gradients {norms['policy']:.3f}, {norms['gradient']:.3f}  "
                f"{sampling:.1f} s of answers, {now - sampled:.1f} s of learning",
                flush=True,
            )
            if now - saved > plan.checkpoint_every_s:
                learner.save()
                saved = now
            if now - began > until_s:
                break
    learner.save()
