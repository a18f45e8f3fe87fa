"""Compiles the kernels of this folder with the machine's C++ compiler, once for each version of their sources.

The result is kept under the user's cache folder and found again by a digest of sources, options and compiler. Knows
nothing of tensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
OPTIONS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-mtune=sapphirerapids"),
    *("-mavx2", "-mfma", "-mbmi2", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    *("-mavx512bf16", "-mavx512vnni"),
)
WITH_TILES = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")  # without them a tile is memory, and AVX512-BF16 multiplies
COMPILE_S = 120.0


@cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled kernels, ready to be called, or None: see `unavailable`."""
    found = _load()
    return found if isinstance(found, ctypes.CDLL) else None


@cache
def has_tiles() -> bool:
    """Returns whether the kernels run on the registers of AMX, which multiply 8 bits, too."""
    return bool(torch.cpu._is_amx_tile_supported())


def name() -> str:
    """Returns the instruction set that the kernels multiply with."""
    return "AMX" if has_tiles() else "AVX512-BF16"


def processor() -> str:
    """Returns the system's name of the processor."""
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def unavailable() -> str:
    """Returns why there is no library; empty where there is one."""
    found = _load()
    return found if isinstance(found, str) else ""


@cache
def _load() -> ctypes.CDLL | str:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "the kernels are for Linux on x86-64"
    if not torch.cpu._is_avx512_bf16_supported():
        return "the processor has no AVX512-BF16"
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        return "there is no C++ compiler (c++, g++ or clang++)"
    try:
        found = ctypes.CDLL(str(_compiled(compiler, (*OPTIONS, *(WITH_TILES if has_tiles() else ())))))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        _log.warning("The kernels in C++ cannot be used, torch runs the model: %s", str(reason).strip()[-2000:])
        return f"they could not be compiled or loaded with {compiler}: {error}"
    if has_tiles() and found.ponder_start() != 0:
        return "the system does not grant AMX tiles"
    found.ponder_packed_bytes.restype = ctypes.c_int64
    return found


def _compiled(compiler: str, options: tuple[str, ...]) -> Path:
    """Returns the shared library, compiled unless it is there. Raises OSError and SubprocessError."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=COMPILE_S).stdout
    digest = hashlib.sha256(version + repr(options).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + source.read_bytes())
    folder = _folder()
    target = folder / f"cpu-{digest.hexdigest()[:24]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "kernels.so"
            command = [compiler, *options, "-o", str(made), *map(str, sorted(SOURCES.glob("*.cpp")))]
            subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_S, text=True)
            os.replace(made, target)  # whole or not at all: several processes may start at once
    return target


def _folder() -> Path:
    """Returns a folder that only this user writes to: its files are loaded as code."""
    folder = Path.home() / ".cache" / "ponder" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        mine = os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o022
    except OSError:
        mine = False
    return folder if mine else Path(tempfile.mkdtemp(prefix="ponder-kernels-"))
