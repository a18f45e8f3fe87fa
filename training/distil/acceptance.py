"""Measures drafters without an engine: `python -m training.distil.acceptance`.

Speculative decoding keeps the drafted tokens that the target samples itself, so a verified prefix is the target's own
answer, and one pass over that answer says of every place whether a drafter's guess there is right. What a run of the
engine would draft and keep is then counted. Prompts are the evaluation's, which training never used. Knows nothing of
training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import Engine, EngineConfig, Sampling
from training import export
from training.abilities import ABILITIES
from training.distil import heads
from training.distil.answers import folder, states
from training.evaluate import SEED, turns
from training.plans import computes_bfloat16
from training.torch_model import Model
from training.train_tokenizer import TURN_END

TEMPERATURES = (0.0, 0.7)
MAX_DRAFTED = 4

EXPLAINED = """\
Counted over Pebble's own answers to {asked} cases of each ability of its evaluation, whose seeds, phrasings, names,
tool schemas and puzzles were never trained on; calls are not held to their schemas. "Kept" is the share of the drafted
tokens that were accepted, "tokens a step" the tokens that one pass of Pebble gives, "kept by place" the share of steps
that keep the first, second, … drafted token. The interval is the bootstrap's over cases, at 95%. Remake it with
`python -m training.distil.acceptance -n {asked}`.\
"""

Guesses = Callable[[Sequence["HeldOutAnswer"]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class HeldOutAnswer:
    """The target's answer to a prompt of the evaluation, with the turn's end where it has one."""

    ability: str
    case: int
    temperature: float
    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Sums over steps: each drafts tokens, keeps those before the first wrong one, and samples one more."""

    steps: int = 0
    tokens: int = 0  # of answers, but for the first, which the prompt's pass gives
    drafted: int = 0
    kept: tuple[int, ...] = (0,) * MAX_DRAFTED  # steps that keep the first, second, … drafted token

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.steps + other.steps,
            self.tokens + other.tokens,
            self.drafted + other.drafted,
            tuple(a + b for a, b in zip(self.kept, other.kept, strict=True)),
        )

    @property
    def share(self) -> float:
        """Of the drafted tokens, those that were kept."""
        return sum(self.kept) / max(1, self.drafted)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(1, self.steps)


def simulate(right: Tensor, k: int) -> Acceptance:
    """Counts the steps of one answer, with `k` tokens drafted in each.

    `right[t, j]`, (answer − 1, at least `k`): whether the guess for token t + 1 + j is the target's, when the tokens up
    to t are known. Nothing is drafted behind a right guess of the turn's end.
    """
    steps = drafted = at = 0
    kept = [0] * MAX_DRAFTED
    rows: list[list[bool]] = right.tolist()
    while at < len(rows):
        left = min(k, len(rows) - at)
        run = next((place for place in range(left) if not rows[at][place]), left)
        steps += 1
        drafted += run if run == left else k
        for place in range(run):
            kept[place] += 1
        at += run + 1
    return Acceptance(steps, len(rows), drafted, tuple(kept))


def draft_guesses(draft: Model, answers: Sequence[HeldOutAnswer], *, bfloat16: bool = False) -> list[Tensor]:
    """Returns for each answer whether the draft's greedy guesses are right, as `simulate` reads it."""
    found = []
    embedding = draft.model.embed_tokens.weight.detach()
    for each, hidden in zip(answers, _states(draft, answers, bfloat16), strict=True):
        guessed = (hidden.float() @ embedding.T).argmax(-1)  # of each token, from all before it
        right = guessed == torch.tensor(each.tokens)
        size = len(right) - 1
        found.append(torch.stack([_padded(right[1 + j :], size) for j in range(MAX_DRAFTED)], dim=1))
    return found


@torch.inference_mode()
def head_guesses(
    base: Model, drafter: heads.HeadStack, answers: Sequence[HeldOutAnswer], *, bfloat16: bool = False
) -> list[Tensor]:
    """Returns for each answer whether the heads' greedy guesses are right, as `simulate` reads it."""
    found = []
    embedding = base.model.embed_tokens.weight
    for each, hidden in zip(answers, _states(base, answers, bfloat16), strict=True):
        # Token t is sampled from state t, and head j guesses t + 1 + j from it.
        guessed = (drafter(hidden.float()) @ embedding.T).argmax(-1)  # (answer, heads)
        tokens, size = torch.tensor(each.tokens), len(each.tokens) - 1
        right = [guessed[: max(0, size - j), j] == tokens[1 + j :] for j in range(drafter.count)]
        found.append(torch.stack([_padded(column, size) for column in right], dim=1))
    return found


def _padded(column: Tensor, size: int) -> Tensor:
    """Fills up to `size`: there is nothing to guess behind the end."""
    return F.pad(column, (0, size - len(column)))


def _states(model: Model, answers: Sequence[HeldOutAnswer], bfloat16: bool) -> list[Tensor]:
    return states(model, [(each.prompt, each.tokens) for each in answers], bfloat16=bfloat16)


async def held_out(model: Path, n: int, temperatures: Sequence[float] = TEMPERATURES) -> list[HeldOutAnswer]:
    """Asks `n` cases of each ability of the evaluation, to the end of their tool calls."""
    found = []
    async with await Engine.start(EngineConfig(model=str(model), threads=1)) as engine:
        end = engine.tokenizer.token_id(TURN_END)
        assert end is not None, "the bundled tokenizer has it"
        for ability in ABILITIES:
            cases = ability.cases(Random(f"{SEED}-{ability.name}"), n)
            asked = [(at, temperature) for temperature in temperatures for at in range(n)]
            taken = await asyncio.gather(
                *(turns(engine, cases[at], Sampling(temperature, seed=at), free=True) for at, temperature in asked)
            )
            for (at, temperature), said in zip(asked, taken, strict=True):
                for turn in said:
                    ended = [end] if turn.result.finish_reason == "stop" else []
                    tokens = [*turn.result.token_ids, *ended]
                    found.append(HeldOutAnswer(ability.name, at, temperature, turn.prompt, tokens))
            print(f"{ability.name}: {len(taken)} cases", flush=True)
    return found


def interval(each: Sequence[Acceptance], draws: int = 1000) -> tuple[float, float]:
    """95% of the shares of resampled cases lie in it (the bootstrap)."""
    rng = Random(SEED)
    counts = [(sum(one.kept), one.drafted) for one in each]
    shares = []
    for _ in range(draws):
        kept, drafted = map(sum, zip(*rng.choices(counts, k=len(counts)), strict=True))
        shares.append(kept / max(1, drafted))
    shares.sort()
    return shares[int(draws * 0.025)], shares[int(draws * 0.975)]


def by_case(answers: Sequence[HeldOutAnswer], rights: Sequence[Tensor], k: int) -> list[Acceptance]:
    """Returns the acceptance of each case, over its turns."""
    found: dict[tuple[str, int], Acceptance] = defaultdict(Acceptance)
    for each, right in zip(answers, rights, strict=True):
        found[each.ability, each.case] += simulate(right, k)
    return list(found.values())


def total(each: Sequence[Acceptance]) -> Acceptance:
    return sum(each, Acceptance())


def table(answers: Sequence[HeldOutAnswer], rights: Sequence[Tensor], k: int, *, abilities: bool = False) -> str:
    """Writes the shares that are kept of 1 to `k` drafted tokens, and the mean of the abilities' shares; with
    `abilities` each of them, too."""
    lines = [
        "| measured | drafted | cases | steps | kept | 95% interval | tokens a step | kept by place |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line("all", by_case(answers, rights, size), size) for size in range(1, k + 1)]
    of_abilities = dict[str, list[Acceptance]]()
    for ability in dict.fromkeys(each.ability for each in answers):
        chosen = [at for at, each in enumerate(answers) if each.ability == ability]
        of_abilities[ability] = by_case([answers[at] for at in chosen], [rights[at] for at in chosen], k)
    totals = [total(cases) for cases in of_abilities.values()]
    share, tokens = (sum(map(get, totals)) / len(totals) for get in (_share, _tokens_per_step))
    lines.append(f"| mean of {len(totals)} abilities | {k} | | | {share:.1%} | | {tokens:.2f} | |")
    if abilities:
        lines += [_line(ability, cases, k) for ability, cases in of_abilities.items()]
    return "\n".join(lines)


_share = attrgetter("share")
_tokens_per_step = attrgetter("tokens_per_step")


def _line(name: str, cases: Sequence[Acceptance], k: int) -> str:
    whole, (low, high) = total(cases), interval(cases)
    places = ", ".join(f"{kept / max(1, whole.steps):.0%}" for kept in whole.kept[:k])
    return (
        f"| {name} | {k} | {len(cases)} | {whole.steps} | {whole.share:.1%} | {low:.1%} – {high:.1%} | "
        f"{whole.tokens_per_step:.2f} | {places} |"
    )


def read_or_ask(base: Path, n: int, kept: Path) -> list[HeldOutAnswer]:
    """Returns the held-out answers of two tokens or more; asks for them once, and keeps them in a file."""
    if kept.exists():
        found = [HeldOutAnswer(**row) for row in json.loads(kept.read_text("utf-8"))]
    else:
        found = asyncio.run(held_out(base, n))
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps([asdict(row) for row in found]), encoding="utf-8")
    return [each for each in found if len(each.tokens) > 1]


def report(answers: Sequence[HeldOutAnswer], guesses: Guesses, k: int, *, abilities: bool = False) -> str:
    """Writes a table for each temperature of the target, and what its columns are."""
    parts = [EXPLAINED.format(asked=1 + max(each.case for each in answers))]
    for temperature in dict.fromkeys(each.temperature for each in answers):
        chosen = [each for each in answers if each.temperature == temperature]
        heading = (
            f"Pebble at temperature {temperature}, {len(chosen)} answers:"
            if temperature
            else (f"Pebble greedy, {len(chosen)} answers:")
        )
        parts.append(f"{heading}\n\n{table(chosen, guesses(chosen), k, abilities=abilities)}")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.distil.acceptance", description="Measure the drafters.")
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("-n", type=int, default=16, help="cases of each ability")
    parser.add_argument("--work", type=Path, default=Path("build/training"))
    parser.add_argument("--abilities", action="store_true", help="a row for each ability, too")
    arguments = parser.parse_args()
    base_path, bfloat16 = arguments.models / "pebble", computes_bfloat16("cpu")
    kept = folder(arguments.work, base_path) / f"held-out-{arguments.n}.json"
    answers = read_or_ask(base_path, arguments.n, kept)
    draft, base = export.load(arguments.models / "pebble-draft"), export.load(base_path)
    found = heads.load(arguments.models / "pebble-medusa")
    of_draft, of_heads = partial(draft_guesses, draft), partial(head_guesses, base, found)
    for name, guesses, k in (("draft", of_draft, MAX_DRAFTED), ("heads", of_heads, found.count)):
        written = report(answers, partial(guesses, bfloat16=bfloat16), k, abilities=arguments.abilities)
        print(f"# {name}\n\n{written}\n", flush=True)


if __name__ == "__main__":
    main()
