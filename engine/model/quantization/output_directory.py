"""The directory that a quantised checkpoint is written to, shard by shard, so that a run can be resumed.

Knows files and tensors, nothing of rounding. The idea: a shard is whole once the index names its tensors, which is the
record of finished layers; `config.json` comes last, and without it nobody loads the directory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.loader import INDEX, Json, read_json

RECORD = "quantization.json"  # of a run: all that decides its result
COPIED = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json", "ponder.json",
    "preprocessor_config.json", "processor_config.json", "LICENSE", "LICENSE.txt",
)  # fmt: skip
_UNFINISHED = ".part"  # the end of a file's name until it is whole


class OutputDirectory:
    """A directory for `shards` files of weights, made where it is not there.

    `record` is a JSON object of all that decides the result. A directory that is not empty is refused, unless it is to
    be resumed and has the same record, or to be overwritten and has nothing that was not written here.

    Raises:
        CheckpointError: it is refused, or cannot be written to.
    """

    def __init__(self, path: Path, shards: int, record: Json, *, resume: bool, overwrite: bool) -> None:
        self.path, self._shards = path, shards
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path} is a file; give a directory to write the quantised model to.")
        if path.is_dir() and any(path.iterdir()):
            if overwrite:
                self._clear()
            elif resume:
                self._check(record)
            else:
                raise CheckpointError(
                    f"{path} is not empty; give another directory, --resume to go on with an unfinished run, or "
                    "--overwrite to begin again."
                )
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._write_json(RECORD, record)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written to: {error}.") from None

    def _check(self, record: Json) -> None:
        if not (self.path / RECORD).is_file():
            raise CheckpointError(
                f"{self.path} has no {RECORD}, so there is no run of `ponder quantize` to go on with; give another "
                "directory."
            )
        kept = read_json(self.path / RECORD)
        differs = [f"{name} {kept.get(name)} (now {record[name]})" for name in record if kept.get(name) != record[name]]
        if differs:
            raise CheckpointError(
                f"{self.path} was begun with {', '.join(differs)}; accepted: the same again, another directory, or "
                "--overwrite."
            )

    def _clear(self) -> None:
        ours = {RECORD, INDEX, "config.json", *COPIED}
        files = sorted(self.path.iterdir())
        for file in files:
            shard = file.name.removesuffix(_UNFINISHED)
            known = shard in ours or (shard.startswith("model-") and shard.endswith(".safetensors"))
            if not file.is_file() or file.is_symlink() or not known or not (self.path / RECORD).is_file():
                raise CheckpointError(
                    f"{self.path} has {file.name}, and --overwrite removes only what `ponder quantize` wrote; give "
                    "another directory."
                )
        for file in sorted(files, key=lambda file: file.name == RECORD):  # the proof that it is ours goes last
            file.unlink()

    def shard(self, number: int) -> str:
        """Returns the name of the file `number`, from 0."""
        return f"model-{number + 1:05}-of-{self._shards:05}.safetensors"

    def has(self, number: int) -> bool:
        """Returns whether a shard is there and whole."""
        return self.shard(number) in self._files().values()

    def add(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes a shard, and then its tensors into the index."""
        name = self.shard(number)
        part = self.path / (name + _UNFINISHED)
        try:
            save_file({each: tensor.contiguous() for each, tensor in tensors.items()}, part, metadata={"format": "pt"})
            os.replace(part, self.path / name)
        except (OSError, SafetensorError) as error:  # a full disk is either
            raise CheckpointError(f"{part} cannot be written: {error}.") from None
        files = {**self._files(), **dict.fromkeys(tensors, name)}
        self._write_json(INDEX, {"metadata": {"total_size": self._bytes(files)}, "weight_map": files})

    def finish(self, source: Path, config: Json) -> None:
        """Copies the source's tokenizer and settings of its use, and writes `config.json`."""
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, self.path / name)
        self._write_json("config.json", config)

    def _files(self) -> dict[str, str]:
        return dict(read_json(self.path / INDEX, required=False).get("weight_map") or {})

    def _bytes(self, files: Mapping[str, str]) -> int:
        return sum((self.path / name).stat().st_size for name in set(files.values()))

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:  # Any: JSON
        part = self.path / (name + _UNFINISHED)
        part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.path / name)
