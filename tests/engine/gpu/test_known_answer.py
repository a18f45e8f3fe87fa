"""Models that were trained, on a GPU: their known answers must come out there too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model.decoder import load_decoder
from engine.model.tokenizer import Tokenizer
from tests.engine.model.stepping import Stepper
from tests.known_answers import shared

PEBBLE = Path(__file__).parents[3] / "models/pebble"
TEXT = "The kettle was on the stove, and nobody in the house had noticed that it boiled. " * 6

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def test_stories260k_says_on_a_gpu_what_is_known() -> None:
    """In fp32, so by torch: its heads have 8 components, too few for the kernels."""
    root = shared("models/stories260K")
    decoder, tokenizer = load_decoder(root / "hf", dtype=torch.float32, device="cuda"), Tokenizer.load(root / "hf")
    assert tokenizer.bos_token_id is not None and not decoder.on_gpu
    stepper = Stepper(decoder, [[tokenizer.bos_token_id] + [0] * 200])
    for i in range(200):
        (logits,) = stepper.step([1])
        stepper.prompts[0][i + 1] = int(logits[-1].argmax())
    assert tokenizer.decode(stepper.prompts[0]) == (root / "expected_greedy_200tok.txt").read_text()


def test_a_trained_model_reads_text_as_in_float32_on_the_cpu() -> None:
    """By the kernels in bfloat16, whole, in chunks and token by token."""
    ids = Tokenizer.load(PEBBLE).encode(TEXT)
    exact = Stepper(load_decoder(PEBBLE, dtype=torch.float32), [ids]).run(64)[0].log_softmax(-1)
    decoder = load_decoder(PEBBLE, dtype=torch.bfloat16, device="cuda")
    assert decoder.on_gpu
    for chunk in (len(ids), 17, 1):
        found = Stepper(decoder, [ids], seed=1).run(chunk)[0].cpu().log_softmax(-1)
        assert (exact.exp() * (exact - found)).sum(-1).mean() < 0.002, "nats of divergence, on average"
        near = found.gather(1, exact.argmax(-1, keepdim=True)).squeeze(1) > found.amax(-1) - 0.2
        assert near.float().mean() > 0.98, "the likeliest is the likeliest, or nearly"
