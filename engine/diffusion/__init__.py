"""Masked-diffusion decoding: `load_masked_diffusion` reads a model, `BlockDiffusion` writes and fills gaps with it,
`DiffuseRequest` as a person asks for it."""

from engine.diffusion.block_decoder import BlockDiffusion, BlockRun, UnmaskStep
from engine.diffusion.checkpoint import MaskedDiffusionModel, load_masked_diffusion
from engine.diffusion.text_fill import DiffuseRequest, shown_places, shown_text, step_json
from engine.diffusion.unmasking import Unmasking

__all__ = [
    "BlockDiffusion",
    "BlockRun",
    "DiffuseRequest",
    "MaskedDiffusionModel",
    "UnmaskStep",
    "Unmasking",
    "load_masked_diffusion",
    "shown_places",
    "shown_text",
    "step_json",
]
