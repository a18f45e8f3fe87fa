"""Writes the lock files: `python requirements/lock.py [CPU_WHEEL…]`, with `uv` on the path.

Resolves `pyproject.toml` for every platform with hashes, and puts torch and what its CUDA build needs into a file of
their own. The wheels given are torch's CPU builds, whose hashes are added to those that `torch-cpu.txt` has: no index
that is resolved here has them.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CUDA = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")
HEAD = "# Written by requirements/lock.py; not edited by hand.\n"


def main(wheels: list[Path]) -> None:
    command = [
        "uv", "pip", "compile", "pyproject.toml", "--extra", "dev", "--extra", "otel", "-c", "constraints.txt",
        "--generate-hashes", "--universal", "--python-version", "3.11", "--no-header", "--no-emit-index-url",
        "--no-annotate", "--quiet",
    ]  # fmt: skip
    resolved = subprocess.run(command, cwd=HERE.parent, check=True, capture_output=True, text=True).stdout
    pinned = re.split(r"\n(?=\S)", resolved.strip())
    cuda = [each for each in pinned if CUDA.match(each)]
    write("base.txt", [each for each in pinned if each not in cuda])
    write("torch.txt", cuda)
    torch = next(each for each in cuda if each.startswith("torch==")).split()[0]
    before = (HERE / "torch-cpu.txt").read_text().partition("triton==")[0]
    known = re.findall(r"sha256:\w+", before)
    hashes = {*known, *(f"sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}" for wheel in wheels)}
    triton = [each for each in cuda if each.startswith("triton==")]
    write("torch-cpu.txt", [" \\\n    ".join([torch, *(f"--hash={each}" for each in sorted(hashes))]), *triton])


def write(name: str, pinned: list[str]) -> None:
    (HERE / name).write_text(HEAD + "\n".join(pinned) + "\n")


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:]])
