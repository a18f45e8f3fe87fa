"""The kernels in C++ for other processors than this one: every result has the bits that it has on AVX2, which the other
tests hold to torch. QEMU runs those for ARM; those for AVX-512 and AMX call functions in plain C++ in place of the
instructions. So nothing is said of their speed, nor of how bfloat16's own instructions round."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from engine.kernels.cpu.compiling import COMPILE_S, MACHINES, OPTIONS, SOURCES
from tests.engine.model.instruction_sets import assert_int8_product

PROBE = Path(__file__).with_name("kernel_probe.cpp")
EMULATED = Path(__file__).with_name("emulated")
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
OF_ARM = [program for program in (CROSS_COMPILER, EMULATOR) if shutil.which(program) is None]
MACROS = {  # by which the sources know the instructions
    "AVX512-VNNI": ("AVX512F",),
    "AVX512-BF16": ("AVX512F", "AVX512BF16"),
    "AMX": ("AVX512F", "AVX512BF16", "AMX_TILE"),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with AVX2"),
]


def compiled(made: Path, options: Iterable[str], sources: Iterable[Path], compiler: str = "g++") -> Path:
    """Compiles `sources` beside the kernels' headers. Returns `made`."""
    command = [compiler, *options, f"-I{SOURCES}", "-o", str(made), *map(str, sources)]
    subprocess.run(command, check=True, timeout=COMPILE_S)
    return made


def in_plain_cpp(instructions: str) -> list[str]:
    """Returns the options that compile the kernels for these instructions to run without them."""
    macros = (f"-D__{each}__" for each in MACROS[instructions])
    return [*OPTIONS["AVX2"], "-O0", "-Wno-psabi", f"-I{EMULATED}", *macros]


def lines(folder: Path, options: Sequence[str], compiler: str = "g++", emulator: Sequence[str] = ()) -> list[str]:
    """Returns what the probe prints with the kernels compiled with `options`."""
    kept = [each for each in options if each not in ("-shared", "-fPIC", "-O3")]
    sources = [PROBE, *(each for each in SOURCES.glob("*.cpp") if each.name != "decoder.cpp")]
    program = compiled(folder / "probe", [*kept, "-static"], sources, compiler)
    ran = subprocess.run([*emulator, str(program)], check=True, timeout=120, capture_output=True, text=True)
    found = ran.stdout.splitlines()
    assert len(found) > 100 and not any("nan" in line or "inf" in line for line in found)
    assert len({line.split()[1] for line in found}) == len(found)  # every call wrote something else
    return found


@pytest.fixture(scope="module")
def on_avx2(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return lines(tmp_path_factory.mktemp("probe"), [*OPTIONS["AVX2"], "-O2"])


@pytest.mark.skipif(bool(OF_ARM), reason=f"there is no {', '.join(OF_ARM)}")
@pytest.mark.parametrize("instructions", MACHINES["aarch64"])
def test_neon_has_the_bits_of_avx2(instructions: str, on_avx2: list[str], tmp_path: Path) -> None:
    assert lines(tmp_path, [*OPTIONS[instructions], "-O2"], CROSS_COMPILER, (EMULATOR, "-cpu", "max")) == on_avx2


@pytest.mark.parametrize("instructions", MACROS)
def test_avx512_and_amx_have_the_bits_of_avx2(instructions: str, on_avx2: list[str], tmp_path: Path) -> None:
    assert lines(tmp_path, in_plain_cpp(instructions)) == on_avx2


@pytest.fixture(scope="module")
def amx(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = tmp_path_factory.mktemp("amx") / "kernels.so"
    return ctypes.CDLL(str(compiled(made, in_plain_cpp("AMX"), SOURCES.glob("*.cpp"))))


@pytest.mark.parametrize("rows", [1, 17, 64, 65, 100])
@pytest.mark.parametrize(("out", "width"), [(31, 64), (200, 128), (96, 1024)])
def test_int8_tiles_of_amx_multiply_what_they_were_rounded_to(
    amx: ctypes.CDLL, rows: int, out: int, width: int
) -> None:
    """No other instruction set has these."""
    assert_int8_product(amx, rows, out, width)
