"""One compiled variant of a kernel, as plain data: input of the ahead-of-time check and its listing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with the types of its arguments and the values of its constants.

    `types` has every parameter of the kernel that is not in `constants`, in Triton's words: "*bf16", "i32", "fp32". As
    at a launch, pointers are taken to be aligned to 16 bytes; so are the integers named in `divisible` multiples of 16.
    A parameter that is None at a launch is a constant None. `since` is the least compute capability that it is for.
    """

    name: str
    kernel: Any  # triton.JITFunction, which has no types
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    divisible: frozenset[str] = field(default_factory=frozenset)
    since: int = 80
    max_registers: int | None = None  # `maxnreg` at the launch; None: the assembler's choice
