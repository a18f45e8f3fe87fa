"""Every block type is decoded to the very floats of ggml's reference, `gguf.quants`, for blocks of random bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.model.quantization.gguf_blocks import decode_blocks, decode_floats
from engine.model.quantization.gguf_file import TYPES

gguf = pytest.importorskip("gguf", reason="the gguf package is the reference")
QUANTIZED = [number for number, kind in TYPES.items() if kind.items > 1]
TENSORS = 20


def random_rows(number: int) -> torch.Tensor:
    """Rows of random blocks. Random halves have all magnitudes, some infinite or not a number."""
    kind = TYPES[number]
    bytes_ = np.random.default_rng(number).integers(0, 256, (TENSORS, 6, 512 // kind.items * kind.size), dtype=np.uint8)
    return torch.from_numpy(bytes_)


def same_bits(found: torch.Tensor, expected: np.ndarray) -> bool:
    """Compare floats bit by bit; one not-a-number is as good as another."""
    bits, wanted = found.numpy().view(np.uint32), expected.astype(np.float32).view(np.uint32)
    return bool(((bits == wanted) | (np.isnan(found.numpy()) & np.isnan(expected))).all())


@pytest.mark.parametrize("number", TYPES, ids=lambda number: TYPES[number].name)
def test_sizes_are_the_packages(number: int) -> None:
    theirs = gguf.GGMLQuantizationType(number)
    assert (TYPES[number].name, (TYPES[number].items, TYPES[number].size)) == (
        theirs.name,
        gguf.GGML_QUANT_SIZES[theirs],
    )


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: TYPES[number].name)
def test_blocks_are_the_references_floats(number: int) -> None:
    for rows in random_rows(number):
        expected = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType(number))
        assert same_bits(decode_blocks(rows, TYPES[number]).dequantize(), expected)


@pytest.mark.parametrize("number", set(TYPES) - set(QUANTIZED), ids=lambda number: TYPES[number].name)
def test_floats_are_the_references(number: int) -> None:
    for rows in random_rows(number):
        found = decode_floats(rows, TYPES[number])
        assert found is not None
        assert same_bits(found.float(), gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType(number)))


@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: TYPES[number].name)
def test_codes_fit_their_bits(number: int) -> None:
    made = [decode_blocks(rows, TYPES[number]) for rows in random_rows(number)]
    assert all(int(each.codes.max()) < 2**each.bits and each.codes.dtype == torch.uint8 for each in made)
