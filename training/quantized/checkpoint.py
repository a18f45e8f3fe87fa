"""Writes a fake-quantised model as compressed-tensors, as `ponder quantize` does, and reads codes to begin with.

Tensors that are not rounded are those of the checkpoint that the model was read from, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.kv_cache.snapshot import fingerprint
from engine.model.loader import SafetensorsWeights, read_json
from engine.model.quantization.checkpoint import open_weights
from engine.model.quantization.compressed_tensors import pack
from engine.model.quantization.output_directory import OutputDirectory
from engine.model.quantization.quantize import Recipe, open_source, quantization_config
from engine.model.quantization.quantized_weight import AffineWeight
from training.quantized.fake_quantization import fake_quantized, linears
from training.torch_model import Model

SCALE_DTYPE = torch.bfloat16  # of the bundled model's weights, and so of the scales that `ponder quantize` writes


def read_starts(directory: Path, model: Model) -> dict[str, AffineWeight]:
    """Returns the codes and scales of every linear of the layers, from a directory that `quantize` wrote.

    Raises:
        CheckpointError: the directory cannot be read, or is of another shape.
    """
    weights, found = open_weights(directory), dict[str, AffineWeight]()
    for name, linear in linears(model):
        weight = weights.take_quantized(f"{name}.weight", (linear.out_features, linear.in_features))
        assert weight is not None, f"{directory} has {name} as floats"
        found[name] = weight
    return found


def write(module: nn.Module, source: Path, target: Path, recipe: Recipe, record: Mapping[str, Any]) -> None:
    """Writes the rounded linears of `module` to `target`, and all else as `source` has it.

    An earlier directory of this command or `ponder quantize` is overwritten. `record` (JSON) says how it was made.

    Raises:
        CheckpointError: the target has anything else, or cannot be written to.
    """
    weights, opened = SafetensorsWeights(source), open_source(source, recipe)
    tensors = {name: weights.stored(name) for name in weights.names()}
    for name, linear in fake_quantized(module):
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{end}": part for end, part in pack(linear.affine(), SCALE_DTYPE).items()}
    made = {"to": recipe.to, "method": "qat", "group": recipe.group, "model": fingerprint(source).hex(), **record}
    directory = OutputDirectory(target, 1, made, resume=False, overwrite=True)
    directory.add(0, tensors)
    config = {**read_json(source / "config.json"), "quantization_config": quantization_config(recipe, opened)}
    directory.finish(source, config)
