"""Conversations of the mixture as a chat template has them: to calibrate, train and measure quantised models on.

A list of texts depends on the phrasing and the count alone. Knows nothing of weights.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from engine.model.tokenizer import Tokenizer
from training.conversation import Phrasing
from training.mixture import conversation

LENGTH = 512  # tokens of a conversation at most


def conversations(model: Path, phrasing: Phrasing, count: int) -> list[list[int]]:
    """Returns the tokens of conversations of any difficulty; those of a lower count come first."""
    tokenizer, rng = Tokenizer.load(model), Random(f"quantize-{phrasing}")
    sampled = (conversation(rng, rng.random(), phrasing) for _ in range(count))
    return [
        tokenizer.apply_chat_template(
            each.as_json(), tools=list(each.tools) or None, add_generation_prompt=False,
            enable_thinking=each.enable_thinking,
        )[:LENGTH]
        for each in sampled
    ]  # fmt: skip
