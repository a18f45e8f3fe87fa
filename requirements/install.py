"""Installs what the lock files pin, checked by hash, into the Python that runs this; then Ponder itself, editable.

Which build of torch there is depends on the package index: CUDA's on Linux by default, a CPU build where pip is
configured for one. A build that the lock does not have is installed by its version, and that is said.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
INSTALL = [*PIP, "install", "--quiet"]


def main() -> None:
    name, digest = torch_build()
    lock = HERE / ("torch-cpu.txt" if "+cpu" in name else "torch.txt")
    base = ["-r", str(HERE / "base.txt")]
    if digest is None or f"sha256:{digest}" in lock.read_text():
        run([*INSTALL, "--require-hashes", *base, "-r", str(lock)])
    else:
        print(f"{name} is not in {lock.name}: torch is installed by its version, all else by its hash.", flush=True)
        run([*INSTALL, "-c", str(HERE.parent / "constraints.txt"), "torch"])
        run([*INSTALL, "--require-hashes", "--no-deps", *base])
    run([*INSTALL, "--no-deps", "--no-build-isolation", "-e", str(HERE.parent)])


def torch_build() -> tuple[str, str | None]:
    """The file name of the torch that pip would take, and its SHA-256, if pip knows that before it installs."""
    command = [*INSTALL, "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", pinned("torch")]
    report = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if report.returncode:
        raise SystemExit(report.returncode)
    (found,) = json.loads(report.stdout)["install"]
    archive = found["download_info"].get("archive_info", {})
    name = str(found["download_info"]["url"]).rsplit("/", 1)[-1].replace("%2B", "+")
    return name, archive.get("hashes", {}).get("sha256")


def pinned(name: str) -> str:
    found = re.search(rf"^{name}==\S+", (HERE.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None, f"constraints.txt does not pin {name}"
    return found[0]


def run(command: list[str]) -> None:
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
