"""Small random Mistral 3 models that see by Pixtral's encoder, with a byte tokenizer and an image processor, on disk.

A token stands for 8 x 8 pixels, four patches, and a mark follows each row of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from tests.engine.model import tiny
from tests.engine.multimodal.seeing import save
from tests.tiny import byte_tokenizer

IMAGE, BREAK, END, TURN = "[IMG]", "[IMG_BREAK]", "[IMG_END]", "</s>"
SPECIAL = (IMAGE, BREAK, END, TURN, "[INST]", "[/INST]")
SQUARE, LONGEST_EDGE = 8, 72  # pixels
PROCESSOR: Mapping[str, Any] = {
    "image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": LONGEST_EDGE},
    "patch_size": {"height": 4, "width": 4}, "resample": 3, "do_resize": True, "do_rescale": True, "do_normalize": True,
    "do_convert_rgb": True, "rescale_factor": 1 / 255, "image_mean": [0.5, 0.45, 0.4], "image_std": [0.5, 0.3, 0.25],
}  # fmt: skip
# Mistral's way, without its system turn.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST]' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ '[IMG]' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}{{ '[/INST]' }}"
    "{% else %}{{ message['content'] + '</s>' }}{% endif %}{% endfor %}"
)
VISION: Mapping[str, Any] = {
    "model_type": "pixtral", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 2, "patch_size": 4, "image_size": LONGEST_EDGE, "hidden_act": "silu", "head_dim": 12,
}  # fmt: skip


def build(
    seed: int = 7,
    kind: str = "ministral3",
    text: Mapping[str, Any] = {},
    vision: Mapping[str, Any] = {},
    **changed: Any,
) -> Any:
    """A random model of transformers, whose text is of `kind`. Any: its classes are untyped."""
    sizes = {**tiny.SIZES, **tiny.MODELS[kind][2], "max_position_embeddings": 1024, "model_type": kind, **text}
    whole = {
        "text_config": sizes, "vision_config": {**VISION, **vision}, "spatial_merge_size": 2,
        "image_token_index": byte_tokenizer(SPECIAL).token_to_id(IMAGE), "tie_word_embeddings": False, **changed,
    }  # fmt: skip
    return tiny.build("Mistral3Config", "Mistral3ForConditionalGeneration", whole, seed)


def write(path: Path, model: Any, *, processor: Mapping[str, Any] = PROCESSOR) -> Path:
    """Writes the model with its tokenizer, chat template and image processor."""
    return save(path, model, SPECIAL, TURN, TEMPLATE, processor)


def reference_processor() -> Any:
    """transformers' own, of images alone, which needs no torchvision. Any: untyped."""
    settings = {name: value for name, value in PROCESSOR.items() if name != "image_processor_type"}
    return transformers.PixtralImageProcessorPil(**{**settings, "patch_size": SQUARE})  # as `PixtralProcessor` has it
