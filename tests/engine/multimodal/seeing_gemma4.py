"""Small random Gemma 4 models that see, with a byte tokenizer and an image processor, on disk.

A token stands for 8 x 8 pixels, four patches, and an image has up to 70. Sliding windows are shorter than an image. The
small ones have inputs for each layer, shared keys and clipped projections, as E2B and E4B do; the large ones experts,
standardised rows, and tokens of an image that attend to each other, as 26B-A4B does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.engine.model import tiny
from tests.engine.multimodal.seeing import save
from tests.tiny import byte_tokenizer

SQUARE, TOKENS, WINDOW = 8, 70, 24
BEGIN, END, IMAGE, TURN = "<|image>", "<image|>", "<|image|>", "<turn|>"
SPECIAL = (BEGIN, END, IMAGE, TURN, "<|turn>", "<|video|>", "<|audio>", "<audio|>", "<|audio|>")
PROCESSOR: Mapping[str, Any] = {
    "image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 2,
    "max_soft_tokens": TOKENS, "resample": 3, "do_resize": True, "do_rescale": True, "do_normalize": False,
    "do_convert_rgb": True, "rescale_factor": 1 / 255, "image_mean": [0.0] * 3, "image_std": [1.0] * 3,
}  # fmt: skip
# Gemma 4's way, without thinking and tools.
TEMPLATE = (
    "{% for message in messages %}{{ '<|turn>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ '<|image|>' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<turn|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
VISION: Mapping[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 12, "patch_size": 4, "pooling_kernel_size": 2, "rms_norm_eps": 1e-3,
    "position_embedding_size": 2 * TOKENS,
}  # fmt: skip


def build(seed: int = 7, large: bool = False, text: Mapping[str, Any] = {}, **vision: Any) -> Any:
    """A random model of transformers. Any: its classes are untyped."""
    token = byte_tokenizer(SPECIAL).token_to_id
    sizes = {
        **tiny.SIZES, **tiny.MODELS["gemma4_moe" if large else "gemma4"][2], "max_position_embeddings": 1024,
        "use_bidirectional_attention": "vision" if large else None, "pad_token_id": 5, **text,
    }  # fmt: skip
    kind = {"standardize": True} if large else {"use_clipped_linears": True}
    changed = {
        "text_config": sizes, "vision_config": {**VISION, **kind, **vision}, "audio_config": None,
        "image_token_id": token(IMAGE), "boi_token_id": token(BEGIN), "eoi_token_id": token(END),
        "video_token_id": token("<|video|>"), "audio_token_id": token("<|audio|>"),
    }  # fmt: skip
    model = tiny.build("Gemma4Config", "Gemma4ForConditionalGeneration", changed, seed)
    draw = torch.Generator().manual_seed(seed)
    for name, buffer in model.model.vision_tower.named_buffers():
        if name.endswith(("_min", "_max")):  # some of the numbers of each projection lie beyond them
            side = -1 if name.endswith("_min") else 1
            buffer.fill_(side * float(torch.rand((), generator=draw) + 0.6))
        elif name in ("std_bias", "std_scale"):
            buffer.normal_(0.5, 0.5, generator=draw)
    with torch.no_grad():  # its rank says neither embedding nor matrix
        model.model.vision_tower.patch_embedder.position_embedding_table.normal_(std=0.6, generator=draw)
    return model


def write(path: Path, model: Any, *, processor: Mapping[str, Any] = PROCESSOR) -> Path:
    """Writes the model with its tokenizer, chat template and image processor."""
    return save(path, model, SPECIAL, TURN, TEMPLATE, processor)


def reference_processor(**changed: Any) -> Any:
    """transformers' own, of images alone, which needs no torchvision. Any: untyped."""
    settings = {name: value for name, value in {**PROCESSOR, **changed}.items() if name != "image_processor_type"}
    return transformers.Gemma4ImageProcessorPil(**settings)
