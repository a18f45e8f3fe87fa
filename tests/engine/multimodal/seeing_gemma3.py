"""Small random Gemma 3 models that see, with a byte tokenizer and an image processor, on disk.

An image has 64 pixels a side and 64 patches, of which 16 rows are made. Sliding windows are shorter than three images.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from tests.engine.model import tiny
from tests.engine.multimodal.seeing import save
from tests.tiny import byte_tokenizer

SIDE, FEATURES = 64, 16
BEGIN, END, SOFT, TURN = "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<end_of_turn>"
SPECIAL = (BEGIN, END, SOFT, TURN, "<start_of_turn>", "\n\n", "\n\n\n")  # Gemma's has tokens for runs of new lines
PROCESSOR: Mapping[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor", "size": {"height": SIDE, "width": SIDE}, "resample": 2,
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": None, "do_pan_and_scan": None,
    "rescale_factor": 1 / 255, "image_mean": [0.5, 0.45, 0.4], "image_std": [0.5, 0.3, 0.25],
}  # fmt: skip
# Gemma 3's way, without its system turn.
TEMPLATE = (
    "{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEXT: Mapping[str, Any] = {**tiny.GEMMA, "num_hidden_layers": 6, "max_position_embeddings": 1024}
VISION: Mapping[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "image_size": SIDE, "patch_size": 8, "vision_use_head": False, "layer_norm_eps": 1e-3,
}  # fmt: skip


def build(seed: int = 7, text: Mapping[str, Any] = {}, **vision: Any) -> Any:
    """A random model of transformers. Any: its classes are untyped."""
    token = byte_tokenizer(SPECIAL).token_to_id
    changed = {
        "text_config": {**tiny.SIZES, **TEXT, **text}, "vision_config": {**VISION, **vision},
        "mm_tokens_per_image": FEATURES,
        "image_token_index": token(SOFT), "boi_token_index": token(BEGIN), "eoi_token_index": token(END),
    }  # fmt: skip
    return tiny.build("Gemma3Config", "Gemma3ForConditionalGeneration", changed, seed)


def write(path: Path, model: Any, *, processor: Mapping[str, Any] = PROCESSOR) -> Path:
    """Writes the model with its tokenizer, chat template and image processor."""
    return save(path, model, SPECIAL, TURN, TEMPLATE, processor)


def reference_processor() -> Any:
    """transformers' own, which needs no torchvision. Any: untyped."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(SPECIAL),
        extra_special_tokens={"image_token": SOFT, "boi_token": BEGIN, "eoi_token": END},
    )
    settings = {name: value for name, value in PROCESSOR.items() if value is not None}
    del settings["image_processor_type"]
    images = transformers.Gemma3ImageProcessorPil(**settings)
    return transformers.Gemma3Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=FEATURES)
