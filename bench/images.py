"""`python -m bench.images`: measures what images cost those that ask about them, and those that do not.

A random checkpoint of SmolVLM's shape (tiles of 512 pixels, 64 tokens each), small by default. A second question about
an image: the share of its prompt that is cached. And the gaps between the tokens of other streams while 2,176 image
tokens are encoded, against the same streams just before and after, in pairs; and while they are read after that.
"""

from __future__ import annotations

import asyncio
import datetime
import io
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from PIL import Image

from bench import hardware, report
from engine import GREEDY, Engine, EngineConfig, Span

Json = dict[str, Any]  # Any: plain JSON
Shape = Literal["small", "256m"]

STREAMS = 4  # that decode meanwhile
SIDE = 2048  # pixels: 17 tiles an image
IMAGES = 2
SETTLE_S = 2.0  # of decoding before anything is measured
ALONE_S = 12.0  # of the baseline, once before the images and once after them
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
SHAPES: dict[str, tuple[Json, Json]] = {
    "small": (
        {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
         "num_key_value_heads": 2},
        {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 3},
    ),
    "256m": (
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3},
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    ),
}  # fmt: skip


def checkpoint(path: Path, shape: Shape, tokenizer: Path) -> Path:
    """Writes a random SmolVLM of `shape`, with the words of another model's tokenizer and the marks of images."""
    import transformers  # a development dependency
    from tokenizers import AddedToken, Tokenizer

    words = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    marks = [*MARKS, *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))]
    words.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    text, vision = SHAPES[shape]
    torch.manual_seed(0)
    config = transformers.SmolVLMConfig(
        text_config={
            "model_type": "llama", **text, "vocab_size": words.get_vocab_size(), "max_position_embeddings": 8192,
            "rope_theta": 100_000.0, "tie_word_embeddings": False,
        },
        vision_config={**vision, "image_size": 512, "patch_size": 16}, scale_factor=4,
        image_token_id=words.get_vocab()["<image>"], tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = transformers.SmolVLMForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(path)
    words.save(str(path / "tokenizer.json"))
    processor = {
        "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": SIDE},
        "max_image_size": {"longest_edge": 512}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).resize((900, 880)).save(data, "PNG")
    return data.getvalue()


@dataclass(slots=True)
class Gaps:
    """The moments at which streams got tokens."""

    moments: list[list[float]] = field(default_factory=lambda: [[] for _ in range(STREAMS)])

    def between(self, begin: float, end: float) -> list[float]:
        """Seconds between the tokens of one stream, of gaps that end within the time."""
        return [
            b - a for each in self.moments for a, b in itertools.pairwise(each) if begin <= b <= end
        ]  # fmt: skip


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else float("nan")


async def prompt_of(engine: Engine, seeds: Sequence[int], question: str) -> tuple[list[int], list[Any]]:
    """The tokens of a question after images, and those, which the engine knows while they are kept."""
    images = [await engine.image(picture(seed)) for seed in seeds]
    tokens = [token for image in images for token in image.token_ids]
    return [*tokens, *engine.tokenizer.encode(question)], images


async def stream(engine: Engine, at: int, gaps: Gaps, stop: asyncio.Event) -> None:
    while not stop.is_set():
        async with await engine.open(engine.tokenizer.encode(f"Tell a story, number {at}.")) as seq:
            async for _ in seq.generate(Span(GREEDY, max_tokens=4000, ignore_eos=True)):
                gaps.moments[at].append(time.perf_counter())
                if stop.is_set():
                    break


async def pair(engine: Engine, number: int) -> Json:
    """One pair: the streams alone, then beside images that are encoded, then beside the prompt that is read."""
    gaps, stop = Gaps(), asyncio.Event()
    tokens, _kept = await prompt_of(engine, range(number * IMAGES, number * IMAGES + IMAGES), "What are these?")
    streams = [asyncio.create_task(stream(engine, at, gaps, stop)) for at in range(STREAMS)]
    await asyncio.sleep(SETTLE_S)
    began = time.perf_counter()
    await asyncio.sleep(ALONE_S)
    asked, encoded = time.perf_counter(), float("inf")
    before = (await engine.stats()).encoder_seconds
    async with await engine.open(tokens) as seq:

        def reading(_: object) -> None:
            nonlocal encoded
            encoded = min(encoded, time.perf_counter())

        seq.on_prefill = reading
        out = await seq.generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True))
    answered = time.perf_counter()
    seconds = (await engine.stats()).encoder_seconds - before
    await asyncio.sleep(ALONE_S)
    ended = time.perf_counter()
    stop.set()
    await asyncio.gather(*streams)
    alone = gaps.between(began, asked) + gaps.between(answered + 0.5, ended)
    during = gaps.between(asked, encoded)
    reads = gaps.between(encoded, answered)
    assert out.cached_tokens < len(tokens) // 10, "the images were encoded before"
    return {
        "image_tokens": len(tokens), "encoding_s": encoded - asked, "encoder_s": seconds,
        "reading_s": answered - encoded, "gaps": {"alone": len(alone), "encoding": len(during), "reading": len(reads)},
        **{
            f"{name}_{label}_s": percentile(values, share)
            for name, values in (("alone", alone), ("encoding", during), ("reading", reads))
            for label, share in (("p50", 0.5), ("p99", 0.99))
        },
    }  # fmt: skip


async def second_questions(engine: Engine, count: int) -> list[Json]:
    """Pairs of questions about one image: the cached share of the second one's prompt."""
    made = []
    for at in range(count):
        seeds = [10_000 + at]
        waits, results = list[float](), []
        for question in ("What is in the picture?", "And which colours are in it?"):
            tokens, _kept = await prompt_of(engine, seeds, question)
            began = time.perf_counter()
            async with await engine.open(tokens) as seq:
                results.append(await seq.generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True)))
            waits.append(time.perf_counter() - began)
        second = results[1]
        made.append(
            {
                "prompt_tokens": second.prompt_tokens,
                "cached_tokens": second.cached_tokens,
                "cached_share": second.cached_tokens / second.prompt_tokens,
                "first_s": waits[0],
                "second_s": waits[1],
            }
        )
    return made


async def measure(model: Path, shape: Shape, pairs: int, questions: int) -> Json:
    load = os.getloadavg()[0]
    async with await Engine.start(EngineConfig(str(model), kv_blocks=2000)) as engine:
        await pair(engine, 999)  # first calls
        pairs_made = [await pair(engine, number) for number in range(pairs)]
        asked = await second_questions(engine, questions)
        dtype = engine.dtype
    ratios = [each["encoding_p99_s"] / each["alone_p99_s"] for each in pairs_made]
    return {
        "date": datetime.date.today().isoformat(), "command": f"python -m bench.images --shape {shape}",
        "slug": f"images-{shape}-{hardware.slug()}", "hardware": hardware.describe(), "load": round(load, 1),
        "dtype": dtype, "streams": STREAMS, "pairs": pairs_made, "second_questions": asked,
        "p99_ratio": {"median": statistics.median(ratios), "max": max(ratios)},
        "cached_share": {"min": min(each["cached_share"] for each in asked)},
    }  # fmt: skip


def table(made: Json) -> str:
    """Markdown."""
    pairs, asked = made["pairs"], made["second_questions"]

    def ms(name: str) -> str:
        values = [each[name] * 1e3 for each in pairs]
        return f"{statistics.median(values):.1f} ms"

    ratio = made["p99_ratio"]
    tokens, seconds = pairs[0]["image_tokens"], statistics.median(each["encoding_s"] for each in pairs)
    waits = {name: statistics.median(each[name] for each in asked) for name in ("first_s", "second_s")}
    return "\n".join(
        [
            f"| {STREAMS} streams' gaps | p50 | p99 |",
            "|---|---|---|",
            f"| alone | {ms('alone_p50_s')} | {ms('alone_p99_s')} |",
            f"| while {tokens} tokens of {IMAGES} images are encoded ({seconds:.1f} s) | {ms('encoding_p50_s')} "
            f"| {ms('encoding_p99_s')}, **{ratio['median']:.2f}** times, at most {ratio['max']:.2f} |",
            f"| while they are read after that | {ms('reading_p50_s')} | {ms('reading_p99_s')} |",
            "",
            f"A second question about an image ({len(asked)} of them): at least {made['cached_share']['min']:.1%} of "
            f"{asked[0]['prompt_tokens']} prompt tokens cached; {waits['first_s']:.2f} s for the first, "
            f"{waits['second_s'] * 1e3:.0f} ms for the second.",
        ]
    )


def main(
    shape: Annotated[str, typer.Option(help="small or 256m")] = "small",
    pairs: Annotated[int, typer.Option(min=1, help="Pairs with and without images.")] = 5,
    questions: Annotated[int, typer.Option(min=1, help="Second questions.")] = 5,
    tokenizer: Annotated[Path, typer.Option(help="A checkpoint whose words are borrowed.")] = Path("models/pebble"),
    write: Annotated[bool, typer.Option(help="Keep the JSON.")] = True,
) -> None:
    """Measure; print a table and JSON. Takes some minutes."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"{shape!r}; accepted: {', '.join(SHAPES)}.")
    with tempfile.TemporaryDirectory() as folder:
        made = asyncio.run(measure(checkpoint(Path(folder), shape, tokenizer), shape, pairs, questions))  # type: ignore[arg-type]  # checked
    report.show(made, table(made), keep=write)


if __name__ == "__main__":
    typer.run(main)
