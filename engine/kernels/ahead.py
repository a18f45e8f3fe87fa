"""Compiles every kernel for GPUs that are not here, and lists the resources that each takes of a multiprocessor.

`python -m engine.kernels.ahead [--only decode] [--json FILE]` prints a table; it ends with status 1 if a kernel does
not compile or fits no multiprocessor. Knows the kernels' variants, nothing of their results.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.kernels import gpu
from engine.kernels.gpu.variants import Variant

CAPABILITIES = (80, 90, 100)
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes a program may have
REGISTERS = 65_536  # of a multiprocessor; 255 is the most of one thread
_TARGET = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}


@dataclass(frozen=True, slots=True)
class KernelResources:
    """The resources of a compiled kernel: registers of a thread, bytes of shared memory, bytes spilled to memory."""

    name: str
    capability: int
    warps: int
    registers: int
    spilled: int
    shared: int
    error: str = ""

    @property
    def fits(self) -> bool:
        """Returns whether a multiprocessor can run it at all."""
        within = self.shared <= SHARED_LIMIT[self.capability] and self.registers * 32 * self.warps <= REGISTERS
        return not self.error and within


def all_variants() -> dict[str, Variant]:
    """Returns all variants by name."""
    found: dict[str, Variant] = {}
    for module in pkgutil.iter_modules(gpu.__path__):
        if module.name != "variants":
            for variant in importlib.import_module(f"{gpu.__name__}.{module.name}").variants():
                assert variant.name not in found, f"two variants are called {variant.name}"
                found[variant.name] = variant
    return found


def compiled(variant: Variant, capability: int) -> KernelResources:
    """Compiles one variant for `capability` (80: Ampere, 90: Hopper, 100: Blackwell), and reads its resources from the
    assembler's output."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    parameters = variant.kernel.arg_names
    types = {name: variant.types.get(name, "constexpr") for name in parameters}
    unknown = set(variant.types) - set(parameters) | set(parameters) - set(variant.types) - set(variant.constants)
    assert not unknown, f"{variant.name}: {sorted(unknown)} are neither typed nor constant, or no parameters"
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(parameters)
        if types[name].startswith("*") or name in variant.divisible
    }
    constants = {name: variant.constants[name] for name in parameters if name in variant.constants}
    source = ASTSource(variant.kernel, types, constants, aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    if variant.max_registers is not None:
        options["maxnreg"] = variant.max_registers
    try:
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        registers, spilled = _assembled(made.asm["ptx"], capability)
    except Exception as error:  # errors of any kind are listed
        return KernelResources(
            variant.name, capability, variant.warps, 0, 0, 0, f"{type(error).__name__}: {error}"[:2000]
        )
    return KernelResources(variant.name, capability, variant.warps, registers, spilled, made.metadata.shared)


def _assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Assembles with Triton's ptxas. Returns registers of a thread, and bytes that are spilled."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={_TARGET[capability]}", str(file), "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.findall(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    return max(map(int, registers)), sum(map(int, spills))


def _by_name(job: tuple[str, int]) -> KernelResources:
    name, capability = job
    return compiled(all_variants()[name], capability)


def compile_all(
    names: Sequence[str], capabilities: Sequence[int] = CAPABILITIES, processes: int = 2
) -> Iterator[KernelResources]:
    """Yields each result as soon as it is compiled, in order."""
    every = all_variants()
    jobs = [(name, each) for name in names for each in capabilities if each >= every[name].since]
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(_by_name, jobs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.ahead", description=__doc__)
    parser.add_argument("--only", default="", help="variants whose name has this in it")
    parser.add_argument("--sample", action="store_true", help="the first of each file")
    parser.add_argument("--capability", type=int, action="append", choices=CAPABILITIES, help="default: all three")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the listing there, too")
    asked = parser.parse_args(arguments)
    every = all_variants()
    firsts = {variant.kernel.__module__: name for name, variant in reversed(every.items())}.values()
    names = [name for name in every if asked.only in name and (name in firsts or not asked.sample)]
    print(f"{'kernel':58} {'sm':>4} {'warps':>5} {'registers':>9} {'spilled':>8} {'shared':>8}")
    listed, bad = list[KernelResources](), 0
    for used in compile_all(names, asked.capability or CAPABILITIES, asked.processes):
        listed.append(used)
        bad += not used.fits
        line = f"{used.name:58} {used.capability:4} {used.warps:5} {used.registers:9} {used.spilled:8} {used.shared:8}"
        print(line + ("" if used.fits else f"  does not fit. {used.error}"), flush=True)
    print(f"{len(listed) - bad} compiled and fit, {bad} did not; {sum(used.spilled > 0 for used in listed)} spill.")
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(used) for used in listed], indent=1) + "\n")
    return 1 if bad or not listed else 0


if __name__ == "__main__":
    sys.exit(main())
