"""Loads the kernels of this folder for the processor: as the wheel brought them, or compiled once for each version of
their sources.

A compiled library is kept under the user's cache folder and found again by a digest of sources, options and compiler.
Knows nothing of tensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from engine.kernels.cpu.compiling import BUILT, COMPILE_S, MACHINES, compiled, compiler, file_name

_log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled kernels, ready to be called, or None: see `unavailable`."""
    found = _load()
    return found if isinstance(found, ctypes.CDLL) else None


def instruction_sets() -> list[str]:
    """Returns those of `compiling.OPTIONS` that the processor has, the fastest first."""
    if platform.machine() == "aarch64":
        return ["NEON-DOTPROD", "NEON"] if "asimddp" in _features() else ["NEON"]
    has = {
        "AMX": torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_amx_tile_supported(),
        "AVX512-BF16": torch.cpu._is_avx512_bf16_supported(),
        "AVX512-VNNI": torch.cpu._is_avx512_supported() and torch.cpu._is_vnni_supported(),
        "AVX2": torch.cpu._is_avx2_supported(),
    }
    return [each for each, there in has.items() if there]


def _features() -> list[str]:
    """Returns the processor's features, as Linux names them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].split() for line in lines if line.startswith("Features")), [])


def name() -> str:
    """Returns the instruction set that the kernels multiply with; empty where the processor has none of them."""
    return _chosen()


def has_tiles() -> bool:
    """Returns whether the kernels run on the registers of AMX."""
    return name() == "AMX"


def _chosen() -> str:
    return next(iter(instruction_sets()), "")


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
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        return "the kernels are for Linux on x86-64 and aarch64"
    instructions = _chosen()
    if not instructions:
        return "the processor has no AVX2"
    brought = BUILT / file_name(instructions)
    found_compiler = compiler()
    if not brought.exists() and found_compiler is None:
        return "there is no C++ compiler (c++, g++ or clang++)"
    try:
        path = brought if found_compiler is None or brought.exists() else _compiled(instructions, found_compiler)
        found = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        _log.warning("The kernels in C++ cannot be used, torch runs the model: %s", str(reason).strip()[-2000:])
        return f"they could not be compiled or loaded ({type(error).__name__}; the log has the reason)"
    if has_tiles() and found.ponder_start() != 0:
        return "the system does not grant AMX tiles"
    found.ponder_packed_bytes.restype = ctypes.c_int64
    return found


def _compiled(instructions: str, with_compiler: str) -> Path:
    """Returns the shared library of this compiler. Raises OSError and SubprocessError."""
    version = subprocess.run([with_compiler, "--version"], capture_output=True, check=True, timeout=COMPILE_S).stdout
    folder = _folder() / hashlib.sha256(version).hexdigest()[:16]
    folder.mkdir(exist_ok=True, mode=0o700)
    return compiled(instructions, with_compiler, folder)


def _folder() -> Path:
    """Returns a folder that only this user writes to: its files are loaded as code."""
    folder = Path.home() / ".cache" / "ponder" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        mine = os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o022
    except OSError:
        mine = False
    return folder if mine else Path(tempfile.mkdtemp(prefix="ponder-kernels-"))
