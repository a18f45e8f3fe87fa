"""GGUF files: the header, parsed with limits, and the bytes of tensors, mapped into memory.

Knows the format (ggml's docs/gguf.md, versions 2 and 3) and nothing of models. The idea: no number of the file is
believed. Every count is held to the bytes that are left and to a limit, so that a hostile header costs at most a few
hundred megabytes and a few seconds, and ends as a CheckpointError that says what is wrong.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from engine.errors import CheckpointError

Value = int | float | bool | str | tuple[int | float | bool | str, ...]

MAX_HEADER_BYTES = 256 << 20  # a vocabulary of 262,144 tokens with merges takes 15 MiB
MAX_ITEMS = 4 << 20  # of all arrays together, with tensors: each takes up to a hundred bytes as a Python object
MAX_STRING_BYTES = 4 << 20  # chat templates have up to 100 KiB
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4  # as in ggml

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type: `size` bytes hold `items` consecutive values of a row."""

    name: str
    items: int
    size: int


# ggml's numbers of tensor types. Those without a size here are refused by name.
TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
_UNREAD = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's place in the file. `shape` is outermost first: (out, in) of a linear layer."""

    shape: tuple[int, ...]
    type: BlockType
    start: int  # bytes from the beginning of the file

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of one row, the last dimension."""
        return self.shape[-1] // self.type.items * self.type.size

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the whole tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


class GgufFile:
    """A GGUF file's metadata and tensors.

    Raises:
        CheckpointError: it cannot be opened, is no whole GGUF file, or has what is not read here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise CheckpointError(f"{path} cannot be read as GGUF: {error}.") from error
        reader = _HeaderReader(path, self.data)
        self.metadata: Mapping[str, Value] = MappingProxyType(reader.metadata())
        self.tensors: Mapping[str, GgufTensor] = MappingProxyType(reader.tensors(self.metadata))

    def bytes_of(self, tensor: GgufTensor) -> memoryview:
        """Returns the tensor's bytes, which are read from the disk as they are used."""
        return memoryview(self.data)[tensor.start : tensor.start + tensor.nbytes]


class _HeaderReader:
    """Reads a header from its first byte to the tensors' list."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data = path, data
        self._at, self._items = 0, 0
        self._end = min(len(data), MAX_HEADER_BYTES)
        if data[:4] != b"GGUF":
            raise self._refuse(f"it begins with {data[:4]!r} instead of b'GGUF'")
        self._at = 4
        version = self._scalar("I", "version")
        if version in (2 << 24, 3 << 24):
            raise self._refuse("it is big-endian; accepted: little-endian files")
        if version not in (2, 3):
            raise self._refuse(f"its version is {version}; accepted: 2 and 3")
        self._tensors = self._count("tensors", 24, MAX_TENSORS)
        self._pairs = self._count("metadata", 13, MAX_ITEMS)

    def metadata(self) -> dict[str, Value]:
        """Returns the key-value pairs."""
        found: dict[str, Value] = {}
        for _ in range(self._pairs):
            key = self._string("a key")
            if key in found:
                raise self._refuse(f"it has {key!r} twice")
            found[key] = self._value(key)
        return found

    def tensors(self, metadata: Mapping[str, Value]) -> dict[str, GgufTensor]:
        """Returns the tensors by name."""
        listed: dict[str, tuple[tuple[int, ...], BlockType, int]] = {}
        for _ in range(self._tensors):
            name = self._string("a tensor's name")
            if name in listed:
                raise self._refuse(f"it has tensor {name!r} twice")
            listed[name] = self._tensor(name)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._refuse(f"general.alignment is {alignment!r}; accepted: a power of two up to 1048576")
        base = -(-self._at // alignment) * alignment
        found = {}
        for name, (shape, kind, offset) in listed.items():
            tensor = found[name] = GgufTensor(shape, kind, base + offset)
            if offset % alignment:
                raise self._refuse(f"tensor {name!r} begins at {offset}, which is no multiple of {alignment}")
            if tensor.start + tensor.nbytes > len(self._data):
                raise self._refuse(
                    f"tensor {name!r} of {tensor.nbytes} bytes would end at byte {tensor.start + tensor.nbytes} of "
                    f"{len(self._data)}; was the download cut short?"
                )
        return found

    def _tensor(self, name: str) -> tuple[tuple[int, ...], BlockType, int]:
        dimensions = self._scalar("I", f"dimensions of {name!r}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._refuse(f"tensor {name!r} has {dimensions} dimensions; accepted: 1 to {MAX_DIMENSIONS}")
        sizes = [self._scalar("Q", f"sizes of {name!r}") for _ in range(dimensions)]
        number = self._scalar("I", f"type of {name!r}")
        offset = self._scalar("Q", f"offset of {name!r}")
        kind = TYPES.get(number)
        if kind is None:
            called = _UNREAD.get(number, f"number {number}")
            raise self._refuse(
                f"tensor {name!r} has type {called}; accepted: {', '.join(each.name for each in TYPES.values())}"
            )
        if not all(sizes) or sizes[0] % kind.items:
            raise self._refuse(
                f"tensor {name!r} has sizes {sizes}; accepted for {kind.name}: positive, the first a multiple of "
                f"{kind.items}"
            )
        return tuple(reversed(sizes)), kind, offset

    def _value(self, key: str) -> Value:
        kind = self._scalar("I", f"type of {key!r}")
        if kind == _STRING:
            return self._string(repr(key))
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], repr(key))
        if kind != _ARRAY:
            raise self._refuse(f"{key!r} has type {kind}, which GGUF does not have")
        kind = self._scalar("I", f"type of {key!r}")
        if kind == _STRING:
            return tuple([self._string(repr(key)) for _ in range(self._count(key, 8, MAX_ITEMS))])
        if kind not in _SCALARS:
            raise self._refuse(f"{key!r} is an array of type {kind}; accepted: arrays of numbers and of strings")
        width = struct.calcsize(f"<{_SCALARS[kind]}")
        count = self._count(key, width, MAX_ITEMS)
        return struct.unpack(f"<{count}{_SCALARS[kind]}", self._take(count * width, repr(key)))

    def _count(self, what: str, size: int, limit: int) -> int:
        """Reads the number of things of at least `size` bytes each."""
        count: int = self._scalar("Q", f"the number of {what}")
        if count * size > self._end - self._at:
            raise self._refuse(f"it claims {count} entries of {what}, and has {self._end - self._at} bytes for them")
        self._items += count
        if count > limit or self._items > MAX_ITEMS:
            raise self._refuse(f"it claims {count} entries of {what}; accepted: {limit}, and {MAX_ITEMS} in all")
        return count

    def _string(self, what: str) -> str:
        length = self._scalar("Q", f"the length of {what}")
        if length > MAX_STRING_BYTES:
            raise self._refuse(f"{what} has {length} bytes; accepted: {MAX_STRING_BYTES}")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self._refuse(f"{what} is not UTF-8 ({error.reason})") from None

    def _scalar(self, form: str, what: str) -> int:
        # A float or bool for such forms; callers that ask for those hand the value on as it is.
        (value,) = struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}"), what))
        return value

    def _take(self, count: int, what: str) -> bytes:
        if count > self._end - self._at:
            raise self._refuse(f"it ends at byte {self._end}, within {what}; was the download cut short?")
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def _refuse(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is not a GGUF file that can be read: {fault}.")
