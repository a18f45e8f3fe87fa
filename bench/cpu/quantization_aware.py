"""Measures quantisation-aware fine-tuning of the bundled model beside other ways to 4 bits, 32 columns a scale.

All have the same texts to calibrate or train on, and are measured as served on others whose phrasings, names and
schemas training never used. Each row is kept in a file of its own, so a run that was stopped goes on.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

from torch import Tensor

from bench.cpu.quantized import CALIBRATION, HELD_OUT, name_of, size_of
from bench.report import interval
from engine import Engine, EngineConfig
from engine.model.quantization.divergence import measure
from engine.model.quantization.quantize import Recipe, quantize
from training.abilities import ABILITIES, Ability
from training.evaluate import SEED, judged, replies
from training.plans import computes_bfloat16
from training.quantized import checkpoint, qat
from training.quantized.texts import conversations

RECIPES = (
    Recipe("int4", "rtn", 32),
    Recipe("int4", "awq", 32),
    Recipe("int4", "gptq", 32),
    qat.RECIPE,  # GPTQ in act-order, which training begins with
)
GPTQ = name_of(qat.RECIPE)
CURVE = 4  # points of a run's curve
CURVE_TEXTS = 32  # held out, that each point is measured on
Row = dict[str, Any]  # Any: plain JSON
Verdicts = dict[str, dict[int, bool]]  # measure -> case -> right
Texts = Sequence[Sequence[int]]


def run(model: Path, folder: Path, seeds: Sequence[int], steps: int, questions: int, asked: Sequence[str]) -> Row:
    """Writes each model below `folder`, and returns its divergence, its size and how it answers.

    `asked` are parts of abilities' names; `questions` of each are asked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    calibration, held_out = conversations(model, "train", CALIBRATION), conversations(model, "held_out", HELD_OUT)
    places, rows = {"bfloat16": model}, {"bfloat16": _kept(folder, "bfloat16", lambda: _row(model, model, held_out))}
    for recipe in RECIPES:
        name = name_of(recipe)
        places[name] = folder / name

        def write(recipe: Recipe = recipe, place: Path = places[name]) -> Row:
            began = time.monotonic()
            quantize(model, place, recipe, calibration, resume=True)
            return {"seconds": round(time.monotonic() - began), **_row(model, place, held_out)}

        rows[name] = _kept(folder, name, write)
    for seed in seeds:
        name = f"int4-qat-32-{steps}-steps-seed-{seed}"
        places[name] = folder / name

        def trained(seed: int = seed, place: Path = places[name]) -> Row:
            made = _trained(model, folder / GPTQ, place, calibration, held_out[:CURVE_TEXTS], seed, steps)
            return {**made, **_row(model, place, held_out)}

        rows[name] = _kept(folder, name, trained)
    for row in rows.values():
        row["kl_interval"] = _of_tokens(row["kl_of_texts"], held_out)
        over = [one - other for one, other in zip(row["kl_of_texts"], rows[GPTQ]["kl_of_texts"], strict=True)]
        row["kl_over_gptq"] = {"mean": sum(over) / _tokens(held_out), "interval": _of_tokens(over, held_out)}
    answers = _answered({name: place for name, place in places.items() if "awq" not in name}, folder, questions, asked)
    tokens = {"calibrated_on": _tokens(calibration), "measured_on": _tokens(held_out)}
    return {"tokens": tokens, "rows": rows, "abilities": answers}


def _trained(model: Path, start: Path, place: Path, texts: Texts, held_out: Texts, seed: int, steps: int) -> Row:
    plan = replace(qat.PLAN, seed=seed, steps=steps, bfloat16=computes_bfloat16("cpu"))
    student = qat.student_of(model, start, texts, plan)
    run = qat.distillation_of(student, place.with_suffix(".work"))
    run.resume()
    curve, points = dict[int, float](), sorted({round(steps * at / CURVE) for at in range(CURVE + 1)})
    for until in points:
        if until >= run.done:
            if until > run.done:
                run.run(until)
            curve[until] = student.divergence(held_out)
            print(f"step {until}: {curve[until]:.5f} nats on {_tokens(held_out)} held-out tokens", flush=True)
    checkpoint.write(student.module, model, place, qat.RECIPE, qat.record_of(plan, texts))
    return {"seconds": round(run.seconds), "plan": asdict(plan), "curve": curve}


def _row(model: Path, place: Path, held_out: Texts) -> Row:
    of_texts = list[float]()

    def keep(divergences: Tensor) -> None:
        of_texts.append(float(divergences.sum()))

    return {"bytes": size_of(place), **asdict(measure(model, place, held_out, of_text=keep)), "kl_of_texts": of_texts}


def _kept(folder: Path, name: str, make: Callable[[], Any]) -> Any:  # Any: plain JSON
    """Returns the content of the file of this name, made first where it is not there."""
    path = folder / f"{name}.json"
    if not path.exists():
        made = make()
        path.write_text(json.dumps(made), encoding="utf-8")
        print(name, {key: value for key, value in made.items() if isinstance(value, int | float)}, flush=True)
    return json.loads(path.read_text("utf-8"))


def _tokens(texts: Texts) -> int:
    return sum(map(len, texts))


def _of_tokens(sums: Sequence[float], texts: Texts) -> list[float]:
    """Returns the 95% interval of a mean over tokens, by bootstrap over texts, of each text's sum."""
    return [end * len(texts) / _tokens(texts) for end in interval(sums)]


def _answered(places: Mapping[str, Path], folder: Path, questions: int, asked: Sequence[str]) -> dict[str, Row]:
    """Returns right answers by ability and model, and the differences from the original, paired by question."""
    found = dict[str, Row]()
    for ability in ABILITIES:
        if not any(part in ability.name for part in asked):
            continue
        verdicts: dict[str, Verdicts] = {}
        for name, place in places.items():

            def ask(place: Path = place, ability: Ability = ability) -> Verdicts:
                return asyncio.run(_verdicts(place, ability, questions))

            kept = _kept(folder, f"{name}-{ability.name.replace(' ', '-')}-{questions}", ask)
            verdicts[name] = {measure: {int(at): right for at, right in of.items()} for measure, of in kept.items()}
        for measured in verdicts["bfloat16"]:
            found[f"{ability.name}: {measured}"] = {
                name: _paired(verdicts["bfloat16"][measured], each.get(measured, {})) for name, each in verdicts.items()
            }
    return found


def _paired(before: Mapping[int, bool], after: Mapping[int, bool]) -> Row:
    both = sorted(before.keys() & after.keys())
    differences = [after[at] - before[at] for at in both]
    return {
        "n": len(both),
        "right": sum(after[at] for at in both),
        "more_than_original": sum(differences),
        "interval": [end * len(both) for end in interval(differences)] if both else None,
    }


async def _verdicts(model: Path, ability: Ability, n: int) -> Verdicts:
    cases = ability.cases(Random(f"{SEED}-{ability.name}"), n)
    async with await Engine.start(EngineConfig(model=str(model))) as engine:
        said = await asyncio.gather(*(replies(engine, case) for case in cases))
    found: Verdicts = defaultdict(dict)
    for at, (case, answers) in enumerate(zip(cases, said, strict=True)):
        for measured, outcome in judged(case, answers).items():
            if isinstance(outcome, bool):
                found[measured][at] = outcome
    return found
