"""Masked-diffusion decoding: `load_masked_diffusion` reads a model, `BlockDiffusion` writes and fills gaps with it."""

from engine.diffusion.block_decoder import BlockDiffusion, BlockRun, UnmaskStep
from engine.diffusion.checkpoint import MaskedDiffusionModel, load_masked_diffusion
from engine.diffusion.unmasking import Unmasking

__all__ = [
    "BlockDiffusion",
    "BlockRun",
    "MaskedDiffusionModel",
    "UnmaskStep",
    "Unmasking",
    "load_masked_diffusion",
]
