"""`python -m training`: remake the bundled models with one command.

Tokenizer, data, training, export and evaluation, first of `pebble`, then of its draft, which shares the tokenizer and
then learns from Pebble's answers, and of its Medusa heads and its value head, which learn from those alone. On request
(`--only reinforcement`) the Pebble that is there learns from rewards for its own answers, and an experiment's pair is
trained: a masked-diffusion model, and its autoregressive twin, which stays in the work folder. Stop it at any time;
`--resume` goes on from the last checkpoint, which lies with the log in the work folder (`--work`, not committed).
`--extend` goes on from the last state before the learning rate fell, for a longer run. `--from` begins with the weights
of a model that was published, where its checkpoint is gone.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from training import card, evaluate, export, mixture, plans, team, train_tokenizer
from training.diffusion import pair, students
from training.distil import acceptance, answers, draft, heads, value
from training.distil.distillation import DistilPlan
from training.quantized import qat
from training.reinforcement import grpo
from training.reinforcement.rollouts import usual_workers
from training.text import prose
from training.trainer import Plan, Trainer, train

CURVES = Path("docs/img")
ASKED = 16  # cases of each ability, when a drafter is measured
MAX_PROCESSES = 8  # a step on a CPU has some twenty conversations to share out


def make_tokenizer(path: Path, plan: Plan, samples: int = 12_000) -> Tokenizer:
    """Trains the tokenizer on conversations of every stage and on prose, or reads the one that is there."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    rng = Random(plan.seed)
    made = (mixture.conversation(rng, rng.random()) for _ in range(samples))
    texts = (text for conversation in made for text, _ in train_tokenizer.segments(conversation))
    real = (sentence for _, module in prose.paragraphs() for paragraph in module for sentence in paragraph)
    trained = train_tokenizer.train(chain(texts, real), plan.model.vocab_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    trained.save(str(path))
    return trained


def longest_conversation(trained: Tokenizer, seed: int, samples: int = 500) -> int:
    """Returns the tokens of the longest of some conversations from the end of the curriculum."""
    rng = Random(seed)
    made = (
        "".join(text for text, _ in train_tokenizer.segments(mixture.conversation(rng, 1.0))) for _ in range(samples)
    )
    return min(mixture.MAX_LENGTH, max(len(trained.encode(text).ids) for text in made))


def compiles(device: str) -> bool:
    """Returns whether compiling is possible: on a GPU, and on a CPU with a C++ compiler."""
    return device == "cuda" or shutil.which("g++") is not None


def trained(name: plans.Name, arguments: argparse.Namespace) -> Trainer:
    """Trains a model on the mixture, and exports it."""
    plan = plans.plan(
        name,
        arguments.device,
        steps=arguments.steps,
        seed=arguments.seed,
        compiled=compiles(arguments.device),
        start=arguments.start,
        processes=arguments.processes or min(MAX_PROCESSES, torch.get_num_threads()),
    )
    work = arguments.work / name
    if arguments.start is not None:
        arguments.work.mkdir(parents=True, exist_ok=True)
        shutil.copy(arguments.start / "tokenizer.json", arguments.work / "tokenizer.json")
    trained = make_tokenizer(arguments.work / "tokenizer.json", plan)
    team.start(plan.members, train, plan, arguments.work / "tokenizer.json", work, arguments.begin)
    trainer = Trainer(plan, trained, work)
    trainer.resume()
    export.export(trainer.model, trainer.tokenizer, arguments.out / name, name)
    return trainer


def describe(name: plans.Name, trainer: Trainer, arguments: argparse.Namespace) -> None:
    """Evaluates an exported model, and writes its card."""
    out, plan = arguments.out / name, trainer.plan
    results = evaluate.run(out, arguments.questions)
    longest = longest_conversation(trainer.tokenizer, plan.seed)
    threads = plan.members if plan.members > 1 else torch.get_num_threads()  # members of a team have one each
    card.write(trainer, results, out, name, card.hardware(plan.device, threads), longest)
    card.plot(trainer.work / "losses.jsonl", CURVES / f"{name}-loss.png", name)


def make_base(arguments: argparse.Namespace) -> None:
    """Makes Pebble."""
    describe("pebble", trained("pebble", arguments), arguments)


def make_draft(arguments: argparse.Namespace) -> None:
    """Makes the draft: trains it as Pebble is, or begins with one that is there (`--from`), then distils it.

    The card is written where the draft was trained here: it tells of the whole run.
    """
    base, out = arguments.out / "pebble", arguments.out / "pebble-draft"
    trainer = None if arguments.start is not None else trained("pebble-draft", arguments)
    learned = answers.generate(base, arguments.work, arguments.seed)
    resume = arguments.begin == "resume"
    run = draft.train(
        base, arguments.start or out, learned, arguments.work / "distilled", on_cpu(draft.PLAN), resume=resume
    )
    export.export(run.student.module, Tokenizer.from_file(str(base / "tokenizer.json")), out, "pebble-draft")
    held_out = acceptance.read_or_ask(base, ASKED, learned / f"held-out-{ASKED}.json")
    measured = acceptance.report(
        held_out, partial(acceptance.draft_guesses, run.student.module), acceptance.MAX_DRAFTED
    )
    print(measured)
    if trainer is not None:
        (trainer.work / card.REMARKS).write_text(draft.remarks(run, measured), encoding="utf-8")
        describe("pebble-draft", trainer, arguments)


def make_heads(arguments: argparse.Namespace) -> None:
    """Makes the Medusa heads of the Pebble that is there."""
    base, out = arguments.out / "pebble", arguments.out / "pebble-medusa"
    learned = answers.generate(base, arguments.work, arguments.seed)
    resume = arguments.begin == "resume"
    run = heads.train(base, learned, arguments.work / "pebble-medusa", on_cpu(heads.PLAN), resume=resume)
    heads.save(run.student.module, base, out)
    held_out = acceptance.read_or_ask(base, ASKED, learned / f"held-out-{ASKED}.json")
    guesses = partial(acceptance.head_guesses, export.load(base), run.student.module)
    measured = acceptance.report(held_out, guesses, heads.COUNT)
    heads.describe(run, measured, card.hardware("cpu", torch.get_num_threads()), out)


def on_cpu(plan: DistilPlan) -> DistilPlan:
    """Returns the plan with the products' precision that is the fastest here."""
    return replace(plan, bfloat16=plans.computes_bfloat16("cpu"))


def make_value_head(arguments: argparse.Namespace) -> None:
    """Makes the value head of the Pebble that is there, in its directory."""
    print(value.make(arguments.out / "pebble", arguments.work))


def make_reinforced(arguments: argparse.Namespace) -> None:
    """Reinforces the Pebble that is there, or the one of `--from`, and puts it in its place.

    What learned from its answers before (value head, draft, Medusa heads) is to be made anew.
    """
    out, work = arguments.out / "pebble", arguments.work / "reinforcement"
    plan = grpo.plan(arguments.device, steps=arguments.steps, seed=arguments.seed)
    bfloat16 = plans.computes_bfloat16(arguments.device)
    learner = grpo.Learner(plan, arguments.start or out, work, device=arguments.device, bfloat16=bfloat16)
    if arguments.begin == "resume" and learner.checkpoint.exists():
        learner.resume()
    grpo.train(learner, arguments.processes or usual_workers(), readers=2 if arguments.device == "cuda" else 0)
    export.export(learner.model, learner.tokenizer, out)
    results = evaluate.run(out, arguments.questions)
    threads = arguments.processes or torch.get_num_threads()
    card.add_reinforcement(out, learner, results, card.hardware(arguments.device, threads))
    card.plot_rewards(work / grpo.LOG, CURVES / "pebble-reward.png")


def make_quantized(arguments: argparse.Namespace) -> None:
    """Trains the Pebble that is there, or the one of `--from`, for weights of 4 bits, and writes them beside it."""
    if arguments.device != "cpu" or arguments.begin == "extend":
        raise SystemExit(
            "--only quantized trains on a CPU, from the start or with --resume: leave out --device, --extend."
        )
    plan = replace(on_cpu(qat.PLAN), steps=arguments.steps or qat.PLAN.steps, seed=arguments.seed)
    base, out = arguments.start or arguments.out / "pebble", arguments.out / "pebble-int4"
    qat.make(base, out, arguments.work / "quantized", plan, resume=arguments.begin == "resume")


MAKERS = {"pebble": make_base, "value-head": make_value_head, "pebble-draft": make_draft, "pebble-medusa": make_heads}


def make_one_of_pair(name: str, arguments: argparse.Namespace) -> None:
    """Makes a model of the pair: the diffusion model of the first seed beside the others, all else in the work
    folder."""
    plan = replace(on_cpu(students.PLAN), seed=arguments.seed, steps=arguments.steps or students.PLAN.steps)
    work = arguments.work / "diffusion" / f"{name}-{arguments.seed}"
    published = name == pair.DIFFUSION and arguments.seed == 1
    out = arguments.out / name if published else work / "model"
    run = pair.train_one(name, plan, work, out, resume=arguments.begin == "resume")
    if published:
        pair.write_card(run, card.hardware("cpu", torch.get_num_threads()), out)


ON_REQUEST: dict[str, Callable[[argparse.Namespace], None]] = {
    "reinforcement": make_reinforced,
    "quantized": make_quantized,
    **{name: partial(make_one_of_pair, name) for name in pair.STUDENTS},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training", description="Remake the bundled models.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--only",
        choices=(*MAKERS, *ON_REQUEST),
        help="one of the models, its reinforcement, its weights of 4 bits, or one of the pair",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=None,
        help=f"that train together on a CPU (default: its cores, at most {MAX_PROCESSES})",
    )
    parser.add_argument("--steps", type=int, default=None, help="instead of the plan's")
    parser.add_argument("--seed", type=int, default=1)
    going_on = parser.add_mutually_exclusive_group()
    going_on.add_argument(
        "--resume",
        action="store_const",
        dest="begin",
        const="resume",
        default="start",
        help="go on from the last checkpoint, where there is one",
    )
    going_on.add_argument(
        "--extend",
        action="store_const",
        dest="begin",
        const="extend",
        help="go on from before the learning rate fell",
    )
    parser.add_argument(
        "--from", type=Path, dest="start", metavar="MODEL", help="begin with a published model's weights and tokenizer"
    )
    parser.add_argument("--questions", type=int, default=100, help="asked of each ability in the evaluation")
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="checkpoints, tokenizer and logs")
    parser.add_argument("--out", type=Path, default=Path("models"))
    arguments = parser.parse_args()
    for name in (arguments.only,) if arguments.only else MAKERS:
        {**MAKERS, **ON_REQUEST}[name](arguments)


if __name__ == "__main__":
    main()
