"""Pictures, prompts with them and their log-probabilities, for the tests of every model that sees; and small random
models of SmolVLM and Idefics3, with a byte tokenizer and an image processor, on disk.

A tile has 32 pixels a side and 16 patches, of which 4 rows are made. Sizes are such that positions, splits and the
shuffle's order all show in the logits.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from engine import GREEDY, Engine, EngineConfig, Span
from engine.multimodal.image_input import FIRST_IMAGE_ID, ImageInput
from tests.engine.model import tiny
from tests.tiny import byte_tokenizer

TOLERANCE = 1e-3  # of log-probabilities
SPAN = Span(GREEDY, max_tokens=8, ignore_eos=True)
KEPT: list[ImageInput] = []  # known to the engines that made them
TILE, LONGEST_EDGE, FEATURES = 32, 64, 4
MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>")
SPECIAL = (*MARKS, *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)))
PROCESSOR: Mapping[str, Any] = {
    "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": LONGEST_EDGE}, "resample": 1,
    "max_image_size": {"longest_edge": TILE}, "do_image_splitting": True, "do_resize": True, "do_rescale": True,
    "do_normalize": True, "do_pad": True, "do_convert_rgb": True, "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.45, 0.4], "image_std": [0.5, 0.3, 0.25],
}  # fmt: skip
# SmolVLM's way: content is a list of parts.
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
VISION = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "image_size": TILE, "patch_size": 8,
}  # fmt: skip


def build(family: str = "SmolVLM", seed: int = 7, text: Mapping[str, Any] = {}, **vision: Any) -> Any:
    """A random model of transformers. Any: its classes are untyped."""
    image = byte_tokenizer(SPECIAL).token_to_id("<image>")
    sizes = {**tiny.SIZES, "model_type": "llama", "max_position_embeddings": 1024, **text}
    changed = {"text_config": sizes, "vision_config": {**VISION, **vision}, "image_token_id": image}
    return tiny.build(f"{family}Config", f"{family}ForConditionalGeneration", changed, seed)


def write(path: Path, model: Any, *, processor: Mapping[str, Any] = PROCESSOR) -> Path:
    """Writes the model with its tokenizer, chat template and image processor."""
    return save(path, model, SPECIAL, MARKS[3], TEMPLATE, processor)


def save(
    path: Path, model: Any, special: Sequence[str], end: str, template: str, processor: Mapping[str, Any]
) -> Path:  # fmt: skip
    """Writes a model of any family: its tokens beside bytes are `special`, of which `end` ends an answer."""
    model.save_pretrained(path)
    tokenizer = byte_tokenizer(tuple(special))
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": end, "chat_template": template}
    for name, value in {"tokenizer_config": settings, "preprocessor_config": processor}.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(end)}))
    return path


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of smooth colours and a few sharp edges, which filters treat differently."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize((width, height))
    pixels = np.array(coarse)
    pixels[height // 3 : height // 2 + 1, width // 4 : width // 2 + 1] = random.integers(0, 256, 3)
    return Image.fromarray(pixels)


def png(width: int, height: int, seed: int = 0) -> bytes:
    data = io.BytesIO()
    picture(width, height, seed).save(data, "PNG")
    return data.getvalue()


async def asked(engine: Engine, question: str, *seeds: int, size: tuple[int, int] = (60, 41)) -> list[int]:
    """The prompt of a question about images, which stay known to the engine."""
    images = [await engine.image(png(*size, seed)) for seed in seeds]
    KEPT.extend(images)
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": question}]
    return engine.tokenizer.encode_chat([{"role": "user", "content": content}], None, {})


def config(path: Path, **changed: object) -> EngineConfig:
    settings = {"dtype": "float32", "kv_blocks": 256, "threads": 1, **changed}
    return EngineConfig(str(path), **settings)  # type: ignore[arg-type]  # fields of it


def chat(texts: Sequence[str], images: Sequence[object]) -> list[dict[str, Any]]:
    """A message of texts with images between them."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}]
    for text, image in zip(texts[1:], images, strict=True):
        parts += [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def pictures(sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[Image.Image]:
    """The pictures of `prompt`."""
    return [picture(*size, seed + at) for at, size in enumerate(sizes)]


async def prompt(engine: Engine, texts: Sequence[str], sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[int]:
    """The tokens of a message of texts with pictures between them, which stay known to the engine."""
    images = [await engine.image(png(*size, seed + at)) for at, size in enumerate(sizes)]
    KEPT.extend(images)
    return engine.tokenizer.encode_chat(chat(texts, images), None, {})


def shown(tokens: Sequence[int], mark: int) -> list[int]:
    """The tokens with `mark` in place of each that stands for an image's row."""
    return [mark if token >= FIRST_IMAGE_ID else token for token in tokens]


def first_of_image(tokens: Sequence[int]) -> int:
    return next(at for at, token in enumerate(tokens) if token >= FIRST_IMAGE_ID)


async def logprobs(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of the likeliest tokens after each token but the last; NaN of others."""
    async with await engine.open(tokens) as seq:
        out = await seq.generate_all(Span(GREEDY, max_tokens=1, prompt_logprobs=8, ignore_eos=True))
    found = torch.full((len(tokens) - 1, engine.vocab_size), torch.nan)
    assert out.prompt_logprobs is not None
    for at, each in enumerate(out.prompt_logprobs[1:]):
        for token, value in () if each is None else each.top:
            found[at, token] = value
    return found


async def apart(engine: Engine, tokens: list[int], reference: torch.Tensor) -> float:
    """The largest difference of a log-probability, of the eight likeliest tokens after each token of the text, from a
    reference's, (tokens, vocabulary)."""
    found = await logprobs(engine, tokens)
    known = ~found.isnan()
    assert known.sum() >= 8 * sum(token < FIRST_IMAGE_ID for token in tokens[1:])
    return float((found - reference[:-1])[known].abs().max())


async def answer(engine: Engine, tokens: list[int]) -> tuple[int, ...]:
    async with await engine.open(tokens) as seq:
        return (await seq.generate_all(SPAN)).token_ids


async def next_logprobs(engine: Engine, tokens: list[int]) -> tuple[list[tuple[int, float]], int]:
    """The likeliest tokens after a prompt, and how many tokens of it were cached."""
    async with await engine.open(tokens) as seq:
        out = await seq.generate_all(Span(GREEDY, max_tokens=1, logprobs=8, ignore_eos=True))
    return list(out.logprobs[0].top), out.cached_tokens


async def fresh_logprobs(engine: Engine, tokens: list[int]) -> list[tuple[int, float]]:
    """The same of an engine that has nothing cached."""
    async with await Engine.start(config(engine.model_path, prefix_cache=False)) as other:
        other._register(KEPT)
        return (await next_logprobs(other, tokens))[0]


def same_logprobs(one: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> bool:
    return max(abs(a[1] - b[1]) for a, b in zip(one, other, strict=True)) < 1e-4
