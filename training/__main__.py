"""`python -m training`: remake the bundled model with one command.

Tokenizer, data, training, export and evaluation, in that order. Stop it at any time; `--resume` goes on from the last
checkpoint, which lies with the log in the work folder (`--work`, not committed).
"""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from training import card, evaluate, export, mixture, prose, tokenizer
from training.exchange import Conversation
from training.trainer import Plan, Trainer

CURVE = Path("docs/img/pebble-loss.png")


def make_tokenizer(path: Path, plan: Plan, samples: int = 20_000) -> Tokenizer:
    """Train the tokenizer on conversations of every stage and on prose, or read the one that is there."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    rng = Random(plan.seed)
    made = ("".join(mixture.texts(mixture.conversation(rng, rng.random()))) for _ in range(samples))
    trained = tokenizer.train(chain(made, prose.sentences()), plan.model.vocab_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    trained.save(str(path))
    return trained


def _last_conversations(plan: Plan, samples: int = 2000) -> list[Conversation]:
    """What the end of the curriculum looks like."""
    rng = Random(plan.seed)
    return [mixture.conversation(rng, 1.0) for _ in range(samples)]


def main() -> None:
    defaults = Plan()
    parser = argparse.ArgumentParser(prog="python -m training", description="Remake the bundled model.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=defaults.device)
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: what torch chooses)")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--questions", type=int, default=200, help="asked of each ability in the evaluation")
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="checkpoint, tokenizer and log")
    parser.add_argument("--out", type=Path, default=Path("models/pebble"))
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    plan = Plan(steps=arguments.steps, seed=arguments.seed, device=arguments.device)
    trainer = Trainer(plan, make_tokenizer(arguments.work / "tokenizer.json", plan), arguments.work)
    if arguments.resume:
        trainer.resume()
    trainer.run()

    export.export(trainer.model, trainer.tokenizer, arguments.out)
    results = evaluate.run(arguments.out, arguments.questions)
    longest = max(len(trainer.tokenizer.encode("".join(mixture.texts(made))).ids) for made in _last_conversations(plan))
    card.write(trainer, results, arguments.out, card.hardware(plan.device, torch.get_num_threads()), longest)
    card.plot(arguments.work / "losses.jsonl", CURVE)


if __name__ == "__main__":
    main()
