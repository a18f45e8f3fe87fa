"""Small random models that see, with a byte tokenizer and an image processor, on disk; and pictures for them.

A tile has 32 pixels a side and 16 patches, of which 4 rows are made. Sizes are such that positions, splits and the
shuffle's order all show in the logits.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from engine import Engine
from engine.multimodal.image_input import ImageInput
from tests.engine.model import tiny
from tests.tiny import byte_tokenizer

TILE, LONGEST_EDGE, FEATURES = 32, 64, 4
MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>")
KEPT: list[ImageInput] = []
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
    model.save_pretrained(path)
    tokenizer = byte_tokenizer(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<end_of_utterance>", "chat_template": TEMPLATE}
    for name, value in {"tokenizer_config": settings, "preprocessor_config": processor}.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(MARKS[3])}))
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
