"""Trains Pebble's value head on its own right and wrong answers, and measures best-of-n by it.

Puzzles are answered several times at a temperature and judged by `training.puzzle`; the head is a logistic regression
on the state after an answer's last token (an outcome verifier, Cobbe et al. 2021). The puzzles that it is measured on
are those of the evaluation, which training never has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import Engine, EngineConfig, Sampling, Span
from engine.model.value_head import ValueHead
from training import export, reply
from training.conversation import Case
from training.distil import answers
from training.evaluate import MAX_TOKENS, SEED, auroc, judged, wilson
from training.pass_at_k import interval
from training.plans import computes_bfloat16
from training.tasks import countdown
from training.tasks.countdown import Game

GAME: Game = "countdown4"
PUZZLES, MEASURED = 400, 300
SAMPLES, TEMPERATURE = 8, 0.7
DECAY = 1e-3  # of the squared weights, in the loss, of states scaled to a variance of one
AT_ONCE = 8  # puzzles
RESULTS = "value_head.json"
BEFORE = "## How it was made"  # of the card
SECTION = """\
## Its value head

`value_head.safetensors` reads the last state after an answer: the probability that it is right. A logistic regression
on {learned:,} of its own answers to {trained} puzzles of four numbers that the evaluation does not have, at temperature
{temperature} (`training/distil/value.py`). Of {puzzles} puzzles of the evaluation, {samples} answers each at that
temperature, made by our engine:

| | solved |
|---|---|
| one answer | {one:.0%} |
| the best of {samples} by the value head | {by_value:.0%} ({low:.0%} – {high:.0%}) |
| … by the tokens' probabilities | {by_confidence:.0%} (the head gains {gain_low:+.0%} … {gain_high:+.0%}) |
| at least one of {samples} | {at_least_one:.0%} |

A right answer's value is above a wrong one's in {auroc:.1%} of pairs. Answers to other tasks were neither learned nor
measured.

"""


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """An answer to puzzle `at`: `value` is the head's, `confidence` the geometric mean of its tokens' probabilities.
    One that ran out of tokens did not end."""

    at: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    right: bool
    ended: bool
    confidence: float
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class ValueResult:
    """Shares of puzzles that are solved with `samples` answers each; the best one is chosen of those that ended."""

    puzzles: int
    samples: int
    one: float
    by_value: float
    by_value_interval: tuple[float, float]
    by_confidence: float
    at_least_one: float
    auroc: float
    gain: tuple[float, float]  # of value over confidence: a 95% interval by puzzles


async def answer(engine: Engine, cases: Sequence[Case], first: int = 0) -> list[JudgedAnswer]:
    """Answers each puzzle `SAMPLES` times; `first` numbers them, and seeds their samples."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(at: int, case: Case) -> list[JudgedAnswer]:
        asked = case.prompt
        prompt = engine.tokenizer.apply_chat_template(asked.as_json(), enable_thinking=asked.enable_thinking)
        span = Span(Sampling(temperature=TEMPERATURE, seed=at), max_tokens=MAX_TOKENS, logprobs=0)
        async with places, await engine.open(prompt) as root:
            forks = root.fork(SAMPLES)
            found = await asyncio.gather(*(fork.generate_all(span) for fork in forks))
            values = [await fork.value() if engine.value_head else 0.0 for fork in forks]
        made = []
        for result, value in zip(found, values, strict=True):
            ended = result.finish_reason == "stop"
            right = judged(case, [reply.read(result.text, ended=ended)])["right answer"] is True
            logprobs = [each.logprob for each in result.logprobs or ()]
            sure = float(torch.tensor(logprobs).mean().exp()) if logprobs else 0.0
            made.append(JudgedAnswer(at, tuple(prompt), tuple(result.token_ids), right, ended, sure, value))
        return made

    found = await asyncio.gather(*(one(first + at, case) for at, case in enumerate(cases)))
    return [each for some in found for each in some]


def fit(states: Tensor, right: Tensor) -> ValueHead:
    """Returns the read-out of states (answers, hidden) that tells right answers (answers,) bool from wrong ones."""
    mean, scale = states.mean(0), states.std(0).clamp_min(1e-6)
    scaled, wanted = (states - mean) / scale, right.float()
    weight, bias = torch.zeros(states.shape[1], requires_grad=True), torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(scaled @ weight + bias, wanted) + DECAY * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    own = weight.detach() / scale
    return ValueHead(own, bias.detach() - own @ mean)


def last_states(base: Path, found: Sequence[JudgedAnswer]) -> Tensor:
    """Returns the base's normed state after each answer's last token, (answers, hidden) float32."""
    rows = [(each.prompt, (*each.tokens, 0)) for each in found]  # the state that a token after it is sampled from
    kept = answers.states(export.load(base), rows, bfloat16=computes_bfloat16("cpu"))
    return torch.stack([states[-1].float() for states in kept])


def measured(found: Sequence[JudgedAnswer]) -> ValueResult:
    """Returns what the values of answers are worth."""
    puzzles = [[each for each in found if each.at == at] for at in sorted({each.at for each in found})]
    by_value = [max(some, key=lambda each: (each.ended, each.value)).right for some in puzzles]
    by_confidence = [max(some, key=lambda each: (each.ended, each.confidence)).right for some in puzzles]
    right = [sum(each.right for each in some) for some in puzzles]
    right_values, wrong_values = ([each.value for each in found if each.right is kind] for kind in (True, False))
    differences = [float(a) - float(b) for a, b in zip(by_value, by_confidence, strict=True)]
    return ValueResult(
        puzzles=len(puzzles),
        samples=SAMPLES,
        one=sum(right) / (SAMPLES * len(puzzles)),
        by_value=sum(by_value) / len(puzzles),
        by_value_interval=wilson(sum(by_value), len(puzzles)),
        by_confidence=sum(by_confidence) / len(puzzles),
        at_least_one=sum(each > 0 for each in right) / len(puzzles),
        auroc=auroc(right_values, wrong_values)[0],
        gain=interval(differences, Random(SEED)),
    )


async def _answered(base: Path, cases: Sequence[Case]) -> list[JudgedAnswer]:
    async with await Engine.start(EngineConfig(model=str(base), threads=1)) as engine:
        found = list[JudgedAnswer]()
        for at in range(0, len(cases), 5 * AT_ONCE):
            found += await answer(engine, cases[at : at + 5 * AT_ONCE], at)
            print(f"{min(at + 5 * AT_ONCE, len(cases))} of {len(cases)} puzzles", flush=True)
        return found


def learned(base: Path, work: Path) -> list[JudgedAnswer]:
    """Returns the answers to learn from, which are written to the base's folder of answers once."""
    path = answers.folder(work, base) / "judged.jsonl"
    if not path.exists():
        rng = Random("value-countdown4-True")  # the puzzles of the head that is committed
        cases = [countdown.case(rng, GAME, evaluated=False) for _ in range(PUZZLES)]
        found = asyncio.run(_answered(base, cases))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(asdict(each)) + "\n" for each in found), encoding="utf-8")
        partial.replace(path)
    return [JudgedAnswer(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def describe(result: ValueResult, learned: int, card: Path) -> None:
    """Writes the head's section into the base's card, in the place of an earlier one."""
    text = card.read_text("utf-8")
    before, found, rest = text.partition(SECTION.partition("\n")[0])
    if found:
        text = before + BEFORE + rest.partition(BEFORE)[2]
    low, high = result.by_value_interval
    section = SECTION.format(
        learned=learned, trained=PUZZLES, temperature=TEMPERATURE, low=low, high=high,
        gain_low=result.gain[0], gain_high=result.gain[1], **asdict(result),
    )  # fmt: skip
    card.write_text(text.replace(BEFORE, section + BEFORE, 1), encoding="utf-8")


def make(base: Path, work: Path) -> ValueResult:
    """Trains the head, puts it beside the base's weights, measures it through the engine, and describes it."""
    found = learned(base, work)
    fit(last_states(base, found), torch.tensor([each.right for each in found])).save(base)
    rng = Random(f"{SEED}-pass-{GAME}")
    cases = [countdown.case(rng, GAME) for _ in range(MEASURED)]
    result = measured(asyncio.run(_answered(base, cases)))
    (base / RESULTS).write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    describe(result, len(found), base / "README.md")
    return result
