"""Tuned configurations: the fastest measured shapes of kernels on a device, by problem.

A file for each device, `tuned/NAME.json` beside this for those that are shipped, or in a folder of the user's for one
that they tuned themselves (`python -m engine.kernels.tune`). Where there is none, each kernel has a shape by rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from engine.kernels.gpu.variants import Variant

Table = dict[str, list[int]]  # "kernel problem" -> the numbers of its shape

SHIPPED = Path(__file__).parent / "tuned"


def own_folder() -> Path:
    """Returns the folder of a user's tuned configurations."""
    return Path.home() / ".cache" / "ponder" / "kernels"


def file_name(device: str) -> str:
    """Returns the file name for a device's driver name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def read(device: str, folders: Sequence[Path]) -> Table:
    """Returns a device's tuned configurations; a later folder overrides an earlier one."""
    known: Table = {}
    for folder in folders:
        file = folder / file_name(device)
        if file.exists():
            known |= json.loads(file.read_text(encoding="utf-8"))["shapes"]
    return known


@cache
def _here() -> Table:
    import torch

    return read(torch.cuda.get_device_name(), (SHIPPED, own_folder())) if torch.cuda.is_available() else {}


def shape(kernel: str, problem: Sequence[object], rule: Sequence[int]) -> Sequence[int]:
    """Returns a kernel's shape for a problem on this process's device: as tuned, or else by `rule`."""
    return _here().get(key(kernel, problem), rule)


def key(kernel: str, problem: Sequence[object]) -> str:
    """Returns a problem's key in the files."""
    return " ".join([kernel, *map(str, problem)])


def variants() -> list[Variant]:
    """None: no kernels are here."""
    return []
