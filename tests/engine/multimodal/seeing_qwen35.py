"""Small random Qwen3.5 models that see, with a byte tokenizer and an image processor, on disk.

A token stands for 8 x 8 pixels, four patches. Recurrent layers come before and after one that attends.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from tests.engine.model import tiny
from tests.engine.multimodal.seeing import save
from tests.tiny import byte_tokenizer

BEGIN, END, PAD, TURN = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|im_end|>"
SPECIAL = (BEGIN, END, PAD, "<|video_pad|>", TURN, "<|im_start|>")
SQUARE = 8  # pixels
PROCESSOR: Mapping[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "size": {"shortest_edge": 256, "longest_edge": 2560},
    "resample": 3, "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
    "rescale_factor": 1 / 255, "image_mean": [0.5, 0.45, 0.4], "image_std": [0.5, 0.3, 0.25],
}  # fmt: skip
# Qwen's way.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VISION: Mapping[str, Any] = {
    "depth": 2, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4,
    "num_position_embeddings": 36,
}  # fmt: skip


def build(seed: int = 7, mixture: bool = False, text: Mapping[str, Any] = {}, **vision: Any) -> Any:
    """A random model of transformers. Any: its classes are untyped."""
    token = byte_tokenizer(SPECIAL).token_to_id
    family, prefix = ("qwen3_5_moe", "Qwen3_5Moe") if mixture else ("qwen3_5", "Qwen3_5")
    rope = {
        "rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75, "mrope_interleaved": True,
        "mrope_section": [2, 2, 2],
    }  # fmt: skip
    sizes = {**tiny.SIZES, **tiny.MODELS[family][2], "max_position_embeddings": 1024, "rope_parameters": rope, **text}
    changed = {
        "text_config": sizes, "vision_config": {**VISION, "out_hidden_size": sizes["hidden_size"], **vision},
        "image_token_id": token(PAD), "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token(BEGIN), "vision_end_token_id": token(END),
    }  # fmt: skip
    return tiny.build(f"{prefix}Config", f"{prefix}ForConditionalGeneration", changed, seed)


def write(path: Path, model: Any, *, processor: Mapping[str, Any] = PROCESSOR) -> Path:
    """Writes the model with its tokenizer, chat template and image processor."""
    return save(path, model, SPECIAL, TURN, TEMPLATE, processor)


def reference_processor() -> Any:
    """transformers' own, of images alone, which needs no torchvision. Any: untyped."""
    settings = {name: value for name, value in PROCESSOR.items() if name != "image_processor_type"}
    return transformers.Qwen2VLImageProcessorPil(**settings)
