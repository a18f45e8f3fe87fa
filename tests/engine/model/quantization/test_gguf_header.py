"""Headers that lie, end early or are damaged: every one ends as a CheckpointError, or loads, within bounded memory."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from engine.errors import CheckpointError, UnsupportedArchitecture
from engine.model.decoder import load_decoder
from engine.model.quantization.gguf_file import MAX_STRING_BYTES, GgufFile
from engine.model.tokenizer import Tokenizer
from tests.known_answers import shared


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(pairs: bytes = b"", tensors: bytes = b"", counts: tuple[int, int] = (0, 0), version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + pairs + tensors


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str, sizes: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


ALIGNED = bytes(4096)
REFUSED: Mapping[str, tuple[bytes, str]] = {
    "nothing": (b"", "cannot be read as GGUF"),
    "another format": (b"PK\3\4" + ALIGNED, "begins with"),
    "only a magic": (b"GGUF", "ends at byte 4, within version"),
    "version 1": (header(version=1), "version is 1; accepted: 2 and 3"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "more pairs than bytes": (header(counts=(0, 1 << 60)), "claims 1152921504606846976 entries of metadata"),
    "more tensors than bytes": (header(counts=(1 << 40, 0)), "claims 1099511627776 entries of tensors"),
    "a long string": (
        header(pair("a", 8, struct.pack("<Q", 1 << 62)), counts=(0, 1)),
        f"'a' has 4611686018427387904 bytes; accepted: {MAX_STRING_BYTES}",
    ),
    "a string past the end": (header(pair("a", 8, struct.pack("<Q", 50)), counts=(0, 1)), "within 'a'; was the"),
    "no UTF-8": (header(pair("a", 8, struct.pack("<Q", 1) + b"\xff"), counts=(0, 1)), "'a' is not UTF-8"),
    "a long array": (
        header(pair("a", 9, struct.pack("<IQ", 0, 1 << 50)), counts=(0, 1)),
        "claims 1125899906842624 entries of a",
    ),
    "an array of arrays": (header(pair("a", 9, struct.pack("<IQ", 9, 1)), counts=(0, 1)), "array of type 9"),
    "an unknown type": (header(pair("a", 77, ALIGNED), counts=(0, 1)), "'a' has type 77"),
    "a key twice": (header(pair("a", 4, bytes(4)) * 2, counts=(0, 2)), "'a' twice"),
    "an odd alignment": (
        header(pair("general.alignment", 4, struct.pack("<I", 48)), counts=(0, 1)),
        "general.alignment is 48",
    ),
    "no alignment": (header(pair("general.alignment", 4, bytes(4)), counts=(0, 1)), "general.alignment is 0"),
    "a tensor past the end": (
        header(tensors=tensor("t", (64, 64)) + ALIGNED, counts=(1, 0)),
        "'t' of 16384 bytes would end at.*download cut short",
    ),
    "an offset past the end": (
        header(tensors=tensor("t", (64,), offset=1 << 63) + ALIGNED, counts=(1, 0)),
        "'t' of 256 bytes would end",
    ),
    "an offset between": (header(tensors=tensor("t", (64,), offset=7) + ALIGNED, counts=(1, 0)), "begins at 7"),
    "a product past 64 bits": (
        header(tensors=tensor("t", (1 << 63, 1 << 63, 1 << 63)) + ALIGNED, counts=(1, 0)),
        "'t' of .* bytes would end",
    ),
    "no elements": (header(tensors=tensor("t", (64, 0)) + ALIGNED, counts=(1, 0)), r"sizes \[64, 0\]"),
    "half a block": (header(tensors=tensor("t", (33, 2), 8) + ALIGNED, counts=(1, 0)), "multiple of 32"),
    "five dimensions": (header(tensors=tensor("t", (1,) * 5) + ALIGNED, counts=(1, 0)), "5 dimensions"),
    "a tensor twice": (header(tensors=tensor("t", (8,)) * 2 + ALIGNED, counts=(2, 0)), "tensor 't' twice"),
    "a type that is not read": (
        header(tensors=tensor("t", (256, 1), 16) + ALIGNED, counts=(1, 0)),
        "type IQ2_XXS; accepted: F32, F16, Q4_0",
    ),
    "a type that is not there": (header(tensors=tensor("t", (256, 1), 999) + ALIGNED, counts=(1, 0)), "number 999"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_header_that_cannot_be_true_is_refused(tmp_path: Path, name: str) -> None:
    data, message = REFUSED[name]
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(tmp_path / "model.gguf")


@pytest.mark.slow
def test_a_thousand_damaged_files_are_refused_or_load(tmp_path: Path) -> None:
    whole = shared("models/stories260K/stories260K-q8_0.gguf").read_bytes()
    end = 20_000  # the header and the first tensors
    drawn = random.Random(3)
    file = tmp_path / "model.gguf"
    outcomes = {"loaded": 0, "refused": 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(drawn.choice((1, 1, 2, 8))):
            at = drawn.randrange(end)
            match drawn.randrange(4):
                case 0:
                    data[at] ^= 1 << drawn.randrange(8)
                case 1:
                    data[at : at + 8] = drawn.randbytes(8)
                case 2:
                    data[at : at + 8] = struct.pack("<q", drawn.choice((-1, 1 << 62, 1 << 40, 1 << 31, 0)))
                case _:
                    del data[at : at + drawn.randrange(1, 64)]
        if drawn.randrange(10) == 0:
            del data[drawn.randrange(len(data)) :]
        file.write_bytes(data)
        outcomes[outcome(file)] += 1
    assert min(outcomes.values()) > 50, outcomes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


EXTREMES = (0, 1, 2, 3, 255, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


def test_extreme_numbers_are_refused_or_harmless(tmp_path: Path) -> None:
    source = shared("models/stories260K/stories260K-q8_0.gguf")
    whole = source.read_bytes()
    keys = [key for key, value in GgufFile(source).metadata.items() if type(value) in (int, float)]
    file = tmp_path / "model.gguf"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for key in keys:
        for extreme in EXTREMES:
            data = bytearray(whole)
            struct.pack_into("<I", data, whole.find(key.encode()) + len(key) + 4, extreme)
            file.write_bytes(data)
            assert outcome(file) in ("loaded", "refused")
    assert len(keys) >= 12
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


def outcome(file: Path) -> str:
    """Load all of a file: a fault is a CheckpointError, or there is none."""
    try:
        load_decoder(file, dtype=torch.float32)
        Tokenizer.load(file).encode("Once upon a time", bos=True)
    except (CheckpointError, UnsupportedArchitecture):
        return "refused"
    return "loaded"
