"""Measures `ponder quantize` on the bundled model: every method's distance from the original, and its abilities.

Calibrated on conversations of the training mixture, measured on others whose phrasings, names and schemas training
never used.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.errors import InvalidParameter
from engine.model.quantization.divergence import measure
from engine.model.quantization.quantize import METHODS, Recipe, open_source, quantize
from training.evaluate import evaluate
from training.quantized.texts import conversations

CALIBRATION, HELD_OUT = 256, 96  # conversations
ABILITIES = ("unseen tools", "calculator", "made-up facts")
Row = dict[str, Any]  # Any: plain JSON


def recipes(model: Path) -> list[Recipe]:
    """Returns all methods: int8, and int4 with scales for 32 and 128 columns, where these divide the model's widths."""
    made = [Recipe("int8", method, act_order=method == "gptq") for method in METHODS]
    for group in (32, 128):
        made += [Recipe("int4", method, group) for method in METHODS if method != "smoothquant"]
        made.append(Recipe("int4", "gptq", group, act_order=True))
    return [recipe for recipe in made if _fits(model, recipe)]


def _fits(model: Path, recipe: Recipe) -> bool:
    try:
        open_source(model, recipe)
    except InvalidParameter:
        return False
    return True


def name_of(recipe: Recipe) -> str:
    """Returns a recipe in short, such as int4-gptq-32-act-order."""
    group = "" if recipe.group is None else f"-{recipe.group}"
    return f"{recipe.to}-{recipe.method}{group}{'-act-order' * recipe.act_order}"


def run(model: Path, folder: Path, questions: int) -> dict[str, Row]:
    """Writes each model below `folder`, and returns its divergence, size, seconds and shares of right answers."""
    calibration, held_out = conversations(model, "train", CALIBRATION), conversations(model, "held_out", HELD_OUT)
    rows = {"bfloat16": {"bytes": size_of(model), **asdict(measure(model, model, held_out))}}
    for recipe in recipes(model):
        name, began = name_of(recipe), time.monotonic()
        quantize(model, folder / name, recipe, calibration, resume=True)
        row = {**asdict(recipe), "seconds": round(time.monotonic() - began, 1), "bytes": size_of(folder / name)}
        rows[name] = {**row, **asdict(measure(model, folder / name, held_out))}
        print(name, {key: rows[name][key] for key in ("kl_mean", "kl_p99", "same_top1", "perplexity")}, flush=True)
    for name in ("bfloat16", "int8-rtn", "int4-rtn-32", "int4-gptq-32-act-order"):
        rows[name]["abilities"] = _abilities(model if name == "bfloat16" else folder / name, questions)
    tokens = {"calibrated_on": sum(map(len, calibration)), "measured_on": sum(map(len, held_out))}
    return {"tokens": tokens, **rows}


def _abilities(model: Path, questions: int) -> dict[str, Row]:
    results = [each for name in ABILITIES for each in asyncio.run(evaluate(model, questions, name))]
    return {f"{each.ability}: {each.measure}": asdict(each) for each in results}


def size_of(model: Path) -> int:
    """Returns the bytes of a model's weights."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
