"""Checkpoints: finding one, reading the JSON of a Hugging Face directory, and handing out tensors one at a time.

Knows nothing of architectures, only names and shapes. The idea: any fault of a directory is found here and reported
once, as a CheckpointError that names the file and the remedy; and no more than one tensor is in memory beyond what its
caller keeps.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor  # only readers of weights need it

    from engine.model.quantization.quantized_weight import AffineWeight

WANTED_FILES = ("*.json", "*.safetensors", "*.jinja")  # of a hub repository; not its .bin or .gguf versions
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = {"F64", "F32", "F16", "BF16"}

Json = Mapping[str, Any]  # Any: the JSON of foreign tools; every field is checked where it is used


def resolve(model: str) -> Path:
    """Returns the place of `model`: a directory itself, a GGUF file or the only one of a directory, or a Hugging Face
    hub name, downloaded (or found in hub's cache).

    Raises:
        CheckpointError: there is no such directory or repository, it cannot be reached, or it holds no config.json.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        files = sorted(each for each in path.glob("*.gguf") if each.is_file())
        if len(files) > 1:
            names = ", ".join(each.name for each in files[:3])
            raise CheckpointError(f"{path} has {len(files)} GGUF files ({names}, …); give one of them.")
        if not files:
            raise CheckpointError(_no_config(path))
        return files[0]
    if path.is_file() and is_gguf(path):
        return path
    if path.exists():
        raise CheckpointError(
            f"{model!r} is a file; give the directory that holds config.json and *.safetensors, or a .gguf file."
        )
    if model.count("/") > 1 or model.startswith((".", "/", "~")) or not model:
        raise CheckpointError(
            f"there is no directory {model!r}; give a model directory or a hub name such as 'Qwen/Qwen3-0.6B'."
        )
    path = _download(model)
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{model!r} has no config.json. If it holds GGUF files, download one "
            f"(hf download {model} FILE --local-dir DIR) and give its path."
        )
    return path


def resolve_adapter(adapter: str) -> Path:
    """Returns the directory of an adapter: itself, or that of a Hugging Face hub name, downloaded or in hub's cache.

    Raises:
        CheckpointError: there is no such directory or repository, or it cannot be reached.
    """
    path = Path(adapter).expanduser()
    if adapter and path.is_dir():
        return path
    if path.exists() or adapter.count("/") != 1 or adapter.startswith((".", "/", "~")):
        raise CheckpointError(
            f"there is no directory {adapter!r:.200}; give the directory of an adapter that PEFT saved, or its name on "
            "the hub, owner/name."
        )
    return _download(adapter)


def name_of(model: str) -> str:
    """Returns the name of a model as configured: its directory's or file's, or its whole name on the hub."""
    path = Path(model).expanduser()
    return path.name if path.is_dir() else path.stem if is_gguf(path) else model


def is_gguf(place: Path) -> bool:
    """Returns whether a place that `resolve` gave is a GGUF file, and not a directory."""
    return place.suffix.lower() == ".gguf" and place.is_file()


def _no_config(path: Path) -> str:
    inside = sorted(child.name for child in path.iterdir() if (child / "config.json").is_file())
    hint = f"; did you mean its subdirectory {inside[0]!r}?" if inside else "; is it a Hugging Face model directory?"
    return f"{path} has no config.json{hint}"


_CLIENTS = {"httpx", "httpcore", "httpx2", "httpcore2", "huggingface_hub", "requests"}  # of the hub, by its version


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    hint = "Give a directory with config.json and *.safetensors, or check the name on huggingface.co."
    try:
        return Path(snapshot_download(model, allow_patterns=list(WANTED_FILES)))
    except GatedRepoError as error:
        raise CheckpointError(
            f"{model!r} asks for its licence to be accepted on huggingface.co; then log in with "
            "`hf auth login` or set HF_TOKEN."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"there is neither a directory nor a hub repository {model!r} (or it is private and "
            f"HF_TOKEN is not set). {hint}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{model!r} is not in the local cache and huggingface.co cannot be reached. Connect to "
            "the network for the first start, or give a directory."
        ) from error
    except OSError as error:  # httpx errors of the hub's client, full disks, broken connections
        raise CheckpointError(f"{model!r} could not be downloaded: {error}. {hint}") from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in _CLIENTS:
            raise
        raise CheckpointError(f"{model!r} could not be downloaded: {error}. {hint}") from error


def read_json(path: Path, *, required: bool = True) -> Json:
    """Reads the JSON object in `path`; an empty one where the file is missing and not `required`.

    Raises:
        CheckpointError: missing, unreadable, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not required:
            return {}
        raise CheckpointError(f"{path} is missing; download the model again.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; an object is needed.")
    return value


class Weights(ABC):
    """The tensors of a checkpoint by the names that Hugging Face's have, whatever its files.

    `take` remembers the tensors read, so that `check_all_used` finds unused ones.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._taken: set[str] = set()

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Returns every tensor's name."""

    @abstractmethod
    def parameters(self) -> int:
        """Returns the number of elements of all tensors together."""

    @abstractmethod
    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Reads one tensor as floats of 16 or 32 bits, on the CPU; a quantised one is dequantised.

        Raises:
            CheckpointError: missing, of another shape, or of a type that is not read.
        """

    def take_quantized(self, name: str, shape: tuple[int, ...]) -> AffineWeight | None:
        """Reads the same tensor (out, in) as codes with scales; None where the checkpoint has it otherwise.

        Raises:
            CheckpointError: as `take`.
        """
        return None

    def check_all_used(self, ignored: tuple[str, ...]) -> None:
        """Refuses a checkpoint with unread tensors: the model would differ from the trained one.

        `ignored` are prefixes of tensors that may be left over. Buffers that are computed from the configuration
        (rotary frequencies) are never counted.

        Raises:
            CheckpointError: names the first tensors left over.
        """
        rest = sorted(
            name
            for name in self.names()
            if name not in self._taken and not name.startswith(ignored) and not name.endswith("rotary_emb.inv_freq")
        )
        if rest:
            raise CheckpointError(
                f"{self.place}: {len(rest)} tensors are not part of this architecture "
                f"({', '.join(rest[:3])}{', …' if len(rest) > 3 else ''}); the configuration and the "
                "weights do not belong together."
            )


class SafetensorsWeights(Weights):
    """The tensors of a model directory: `model.safetensors`, or the shards that its index names.

    Raises:
        CheckpointError: no weights, a shard that the index names is missing, or a file is truncated.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._files: dict[str, Any] = {}  # Any: safe_open has no exported type
        self._file_of: dict[str, str] = {}
        if (directory / INDEX).is_file():
            self._open_shards()
        elif (directory / SINGLE).is_file():
            self._file_of = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        else:
            other = sorted(p.name for pattern in ("*.gguf", "*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
            hint = f" It has {other[0]}: convert it to safetensors first." if other else " Download the model again."
            if gguf := [name for name in other if name.endswith(".gguf")]:
                hint = f" It has {gguf[0]}: give that file itself."
            raise CheckpointError(f"{directory} has no weights: neither {SINGLE} nor {INDEX}.{hint}")

    def _open_shards(self) -> None:
        index = read_json(self.place / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
            raise CheckpointError(f"{self.place / INDEX} has no 'weight_map' from tensors to files.")
        for shard in sorted(set(index.values())):
            if Path(shard).name != shard:
                raise CheckpointError(f"{self.place / INDEX} names {shard!r}, which is outside the directory.")
            if not (self.place / shard).is_file():
                raise CheckpointError(f"{self.place / shard} is missing, but {INDEX} names it; download it again.")
            held = set(self._open(shard).keys())
            for name in (name for name, file in index.items() if file == shard):
                if name not in held:
                    raise CheckpointError(f"{self.place / shard} lacks tensor {name!r}, which {INDEX} says it has.")
                self._file_of[name] = shard

    def _open(self, file: str) -> Any:
        try:
            handle = self._files[file] = safe_open(self.place / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.place / file} is not a whole safetensors file ({error}); was the download cut short?"
            ) from error
        return handle

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def parameters(self) -> int:
        slices = (self._files[file].get_slice(name) for name, file in self._file_of.items())
        return sum(math.prod(each.get_shape()) for each in slices)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        kind = self._checked(name, shape)
        tensor = self.stored(name)
        return tensor.float() if kind == "F64" else tensor

    def take_range(self, name: str, shape: tuple[int, ...], dim: int, some: range) -> Tensor:
        """Reads `some` of dimension `dim` of a tensor of `shape`, and no other bytes of it.

        Raises:
            CheckpointError: as `take`.
        """
        kind = self._checked(name, shape)
        stored = self._files[self._file_of[name]].get_slice(name)
        tensor: Tensor = stored[*(slice(None),) * dim, some.start : some.stop]
        return tensor.float() if kind == "F64" else tensor

    def _checked(self, name: str, shape: tuple[int, ...]) -> str:
        """Returns safetensors' name of a tensor's type. Raises CheckpointError as `take`."""
        found, kind = self.describe(name)
        if found != shape:
            raise CheckpointError(f"{self.place}: tensor {name!r} has shape {found}; config.json asks for {shape}.")
        if kind not in FLOATS:
            raise CheckpointError(
                f"{self.place}: tensor {name!r} is stored as {kind}; only {', '.join(sorted(FLOATS))} are supported, "
                "and what a quantization_config in config.json describes. Use the unquantised checkpoint."
            )
        return kind

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Returns a tensor's shape and safetensors' name of its type.

        Raises:
            CheckpointError: it is missing.
        """
        if name not in self._file_of:
            raise CheckpointError(f"{self.place}: tensor {name!r} is missing from the weights.")
        meta = self._files[self._file_of[name]].get_slice(name)
        return tuple(meta.get_shape()), str(meta.get_dtype())

    def stored(self, name: str) -> Tensor:
        """Reads a tensor as it is stored, of any shape and type.

        Raises:
            CheckpointError: it is missing.
        """
        self.describe(name)
        self._taken.add(name)
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor
