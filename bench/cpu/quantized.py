"""Measures `ponder quantize` on the bundled model: every method's distance from the original, and its abilities.

Calibrated on conversations of the training mixture, measured on others whose phrasings, names and schemas training
never used.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from engine.model.quantization.divergence import measure
from engine.model.quantization.quantize import METHODS, Recipe, quantize
from engine.model.tokenizer import Tokenizer
from training.conversation import Phrasing
from training.evaluate import evaluate
from training.mixture import conversation

LENGTH = 512  # tokens of a conversation at most
CALIBRATION, HELD_OUT = 256, 96  # conversations
ABILITIES = ("unseen tools", "calculator", "made-up facts")
Row = dict[str, Any]  # Any: plain JSON


def texts(model: Path, phrasing: Phrasing, count: int) -> list[list[int]]:
    """Returns conversations of the mixture, of any difficulty, as the model's chat template has them."""
    tokenizer, rng = Tokenizer.load(model), Random(f"quantize-{phrasing}")
    sampled = (conversation(rng, rng.random(), phrasing) for _ in range(count))
    return [
        tokenizer.apply_chat_template(
            each.as_json(), tools=list(each.tools) or None, add_generation_prompt=False,
            enable_thinking=each.enable_thinking,
        )[:LENGTH]
        for each in sampled
    ]  # fmt: skip


def recipes() -> list[Recipe]:
    """Returns all methods: int8, and int4 with scales for 32 and 128 columns."""
    made = [Recipe("int8", method, act_order=method == "gptq") for method in METHODS]
    for group in (32, 128):
        made += [Recipe("int4", method, group) for method in METHODS if method != "smoothquant"]
        made.append(Recipe("int4", "gptq", group, act_order=True))
    return made


def name_of(recipe: Recipe) -> str:
    """Returns a recipe in short, such as int4-gptq-32-act-order."""
    group = "" if recipe.group is None else f"-{recipe.group}"
    return f"{recipe.to}-{recipe.method}{group}{'-act-order' * recipe.act_order}"


def run(model: Path, folder: Path, questions: int) -> dict[str, Row]:
    """Writes each model below `folder`, and returns its divergence, size, seconds and shares of right answers."""
    calibration, held_out = texts(model, "train", CALIBRATION), texts(model, "held_out", HELD_OUT)
    rows = {"bfloat16": {"bytes": _bytes(model), **asdict(measure(model, model, held_out))}}
    for recipe in recipes():
        name, began = name_of(recipe), time.monotonic()
        quantize(model, folder / name, recipe, calibration, resume=True)
        row = {**asdict(recipe), "seconds": round(time.monotonic() - began, 1), "bytes": _bytes(folder / name)}
        rows[name] = {**row, **asdict(measure(model, folder / name, held_out))}
        print(name, {key: rows[name][key] for key in ("kl_mean", "kl_p99", "same_top1", "perplexity")}, flush=True)
    for name in ("bfloat16", "int8-rtn", "int4-rtn-32", "int4-gptq-32-act-order"):
        rows[name]["abilities"] = _abilities(model if name == "bfloat16" else folder / name, questions)
    tokens = {"calibrated_on": sum(map(len, calibration)), "measured_on": sum(map(len, held_out))}
    return {"tokens": tokens, **rows}


def _abilities(model: Path, questions: int) -> dict[str, Row]:
    results = [each for name in ABILITIES for each in asyncio.run(evaluate(model, questions, name))]
    return {f"{each.ability}: {each.measure}": asdict(each) for each in results}


def _bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
