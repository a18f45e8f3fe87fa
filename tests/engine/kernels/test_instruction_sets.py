"""The kernels in C++ for other processors than this one: every result has the bits that it has on AVX2, which the other
tests hold to torch. QEMU runs those for ARM; those for AVX-512 and AMX call functions in plain C++ in place of the
instructions. So nothing is said of their speed."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.kernels.cpu.compiling import COMPILE_S, MACHINES, OPTIONS, SOURCES

PROBE = Path(__file__).with_name("kernel_probe.cpp")
EMULATED = Path(__file__).with_name("emulated")
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
OF_ARM = [program for program in (CROSS_COMPILER, EMULATOR) if shutil.which(program) is None]
PAIRS_ROUND = "AVX512-BF16"  # two products in one instruction, each sum of which is rounded in its order
MACROS = {"AVX512-VNNI": ["AVX512F"], PAIRS_ROUND: ["AVX512F", "AVX512BF16"]}
MACROS["AMX"] = [*MACROS[PAIRS_ROUND], "AMX_TILE"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with AVX2"),
]


def lines(folder: Path, options: list[str], compiler: str = "g++", emulator: tuple[str, ...] = ()) -> list[str]:
    """Returns what the probe prints with the kernels compiled with `options`."""
    program = folder / "probe"
    kept = [each for each in options if each not in ("-shared", "-fPIC", "-O3")]
    sources = [str(each) for each in sorted(SOURCES.glob("*.cpp")) if each.name != "decoder.cpp"]
    subprocess.run(
        [compiler, *kept, "-static", "-Wno-psabi", f"-I{SOURCES}", "-o", str(program), str(PROBE), *sources],
        check=True, timeout=COMPILE_S,
    )  # fmt: skip
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
    macros = [f"-D__{each}__" for each in MACROS[instructions]]
    found = lines(tmp_path, [*OPTIONS["AVX2"], "-O0", f"-I{EMULATED}", *macros])
    if instructions != PAIRS_ROUND:
        assert found == on_avx2
        return
    assert 0 < sum(one != other for one, other in zip(found, on_avx2, strict=True)) < len(found) / 5
    for one, other in zip(found, on_avx2, strict=True):
        name, _, *numbers = one.split()
        other_name, _, *other_numbers = other.split()
        assert name == other_name
        assert [float(each) for each in numbers] == pytest.approx([float(each) for each in other_numbers], 0.02)
