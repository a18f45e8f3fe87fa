"""Compiles the kernels of this folder for one instruction set.

Imports nothing but the standard library, as the build of a wheel compiles them, too (`hatch_build.py`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
BUILT = SOURCES / "built"  # of a wheel: the kernels for every instruction set
_ALL = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-static-libstdc++", "-static-libgcc")
_AVX2 = (*_ALL, "-mavx2", "-mfma", "-mf16c", "-mbmi2")
_VNNI = (
    *(*_AVX2, "-mtune=sapphirerapids"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
)
_BF16 = (*_VNNI, "-mavx512bf16")
MACHINES: dict[
    str, dict[str, tuple[str, ...]]
] = {  # by machine: instruction sets, the fastest first; each processor that has one has those below it
    "x86_64": {
        "AMX": (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        "AVX512-BF16": _BF16,
        "AVX512-VNNI": _VNNI,
        "AVX2": _AVX2,
    },
    "aarch64": {
        "NEON-DOTPROD": (*_ALL, "-march=armv8.2-a+dotprod"),
        "NEON": (*_ALL, "-march=armv8-a"),
    },
}
OPTIONS = {name: options for sets in MACHINES.values() for name, options in sets.items()}
COMPILE_S = 180.0


def compiler() -> str | None:
    """Returns the machine's C++ compiler, if it has one."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def file_name(instructions: str) -> str:
    """Returns the name of the shared library for an instruction set, which changes with sources and options."""
    digest = hashlib.sha256(repr(OPTIONS[instructions]).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + source.read_bytes())
    return f"{instructions.lower()}-{digest.hexdigest()[:24]}.so"


def compiled(instructions: str, with_compiler: str, folder: Path) -> Path:
    """Returns the shared library in `folder`, compiled unless it is there. Raises OSError and SubprocessError."""
    target = folder / file_name(instructions)
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "kernels.so"
            sources = map(str, sorted(SOURCES.glob("*.cpp")))
            command = [with_compiler, *OPTIONS[instructions], "-o", str(made), *sources]
            subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_S, text=True)
            os.replace(made, target)  # whole or not at all: several processes may start at once
    return target
