"""The kernels in C++ for ARM's processors, run by QEMU: every result has the bits that it has on AVX2, which the other
tests hold to torch. No such processor is here, so nothing is said of their speed."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.kernels.cpu.compiling import COMPILE_S, MACHINES, OPTIONS, SOURCES

PROBE = Path(__file__).with_name("kernel_probe.cpp")
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
missing = [program for program in (CROSS_COMPILER, EMULATOR, "g++") if shutil.which(program) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"there is no {', '.join(missing)}"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with AVX2"),
]


def lines(folder: Path, instructions: str, compiler: str, *emulator: str) -> list[str]:
    """Returns what the probe prints with the kernels of an instruction set."""
    program = folder / instructions
    options = [each for each in OPTIONS[instructions] if each not in ("-shared", "-fPIC", "-O3")]
    sources = [str(each) for each in sorted(SOURCES.glob("*.cpp")) if each.name != "decoder.cpp"]
    subprocess.run(
        [compiler, *options, "-O2", "-static", f"-I{SOURCES}", "-o", str(program), str(PROBE), *sources],
        check=True, timeout=COMPILE_S,
    )  # fmt: skip
    ran = subprocess.run([*emulator, str(program)], check=True, timeout=120, capture_output=True, text=True)
    return ran.stdout.splitlines()


@pytest.fixture(scope="module")
def on_avx2(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return lines(tmp_path_factory.mktemp("probe"), "AVX2", "g++")


@pytest.mark.parametrize("instructions", MACHINES["aarch64"])
def test_neon_has_the_bits_of_avx2(instructions: str, on_avx2: list[str], tmp_path: Path) -> None:
    found = lines(tmp_path, instructions, CROSS_COMPILER, EMULATOR, "-cpu", "max")
    assert len(found) > 100 and not any("nan" in line or "inf" in line for line in found)
    assert len({line.split()[1] for line in found}) == len(found)  # every call wrote something else
    assert found == on_avx2
