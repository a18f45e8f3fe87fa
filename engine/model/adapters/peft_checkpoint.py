"""LoRA adapters (Hu et al. 2021) in PEFT's format, read and written: adapter_config.json, adapter_model.safetensors.

Knows a decoder's architecture and names, and nothing of devices, steps or requests. Files are foreign: all that an
adapter asks for and this engine does not do exactly is refused by name, and the tensors must be those that the
configuration describes. The names of modules are the checkpoint's, of projections that `layers` joins.
"""

from __future__ import annotations

import hashlib
import json as json_format
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.layers import qkv_rows
from engine.model.loader import FLOATS, Json, name_of, read_json, resolve_adapter
from engine.model.model_spec import ModelSpec, WeightNames

log = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 256
MAX_CONFIG_BYTES = 1 << 20

LinearName = Literal["qkv", "o", "gate_up", "down"]  # fields of `layers.Layer`

# Fields that change the result, and the values of those that this engine runs as if they were absent.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "use_dora": (False,),
    "modules_to_save": ([],),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],),
    "layer_replication": ([],),
    "megatron_config": ({},),
    "layers_pattern": ([], ""),
    "use_bdlora": (False,),
    "arrow_config": ({},),
    "kasa_config": ({},),
    "velora_config": ({},),
    "monteclora_config": ({},),
}
# A repetition within a group that is repeated takes exponential time, and each further one multiplies the time.
_MAX_REPETITIONS = 5
_REPETITION = re.compile(r"(?<!\\)[*+{]")
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")


@dataclass(frozen=True, slots=True)
class TargetRows:
    """A projection of the checkpoint within the linear of a layer that it was joined to.

    Row i of its output is row `rows[i]` of the linear's; `rows` is (out,) int64.
    """

    layer: int
    linear: LinearName
    rows: Tensor
    columns: int
    out: int  # rows of the linear

    @property
    def first(self) -> int:
        """Returns the first row of the linear that it has."""
        return int(self.rows.min())

    @property
    def stop(self) -> int:
        """Returns the row behind its last one."""
        return int(self.rows.max()) + 1


@dataclass(frozen=True, slots=True)
class LowRank:
    """An update of a projection: `a` (rank, in), and `b` (rows from `first` to `stop` of the projection's linear, rank)
    in the linear's order, times the adapter's scale. Float32."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter, read. `digest` identifies its files, and `updates` has its projections by their names, from
    "layers." on."""

    path: str
    digest: str
    rank: int
    updates: Mapping[str, LowRank]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of its matrices in float32."""
        return sum(each.a.nbytes + each.b.nbytes for each in self.updates.values())

    def bare(self) -> Adapter:
        """Returns it without its matrices."""
        return replace(self, updates={})


@lru_cache(maxsize=8)
def projections(spec: ModelSpec, names: WeightNames) -> Mapping[str, TargetRows]:
    """Returns the projections that adapters may change, by their names from "layers." on: those of attention, short
    convolutions and MLPs. Of latent attention that is the output alone; experts and recurrences have none."""
    found: dict[str, TargetRows] = {}
    hidden = spec.hidden_size

    def join(index: int, linear: LinearName, parts: tuple[str, ...], widths: tuple[int, ...], columns: int) -> None:
        order = torch.arange(sum(widths))
        if linear == "qkv" and index not in spec.conv_layers:
            order = qkv_rows(spec, names, index)[2]
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        rows = place.split(widths) if len(parts) == len(widths) else (place,)
        for name, each in zip(parts, rows, strict=True):
            found[f"layers.{index}.{name}"] = TargetRows(index, linear, each, columns, len(order))

    for index in range(spec.layers):
        mixed = spec.experts is not None and index in spec.experts.layers
        has_mlp = spec.mlp_layers is None or index in spec.mlp_layers
        if index in spec.conv_layers:
            join(index, "qkv", ("conv.in_proj",), (3 * hidden,), hidden)
            join(index, "o", ("conv.out_proj",), (hidden,), hidden)
        elif index in spec.attending_layers:
            if spec.latent is None:
                join(index, "qkv", *qkv_rows(spec, names, index)[:2], hidden)
            join(index, "o", (names.o,), (hidden,), spec.attended_width(index))
        if has_mlp and (not mixed or (spec.experts is not None and spec.experts.beside_mlp)):
            wide = spec.mlp_widths[index] if spec.mlp_widths else spec.intermediate_size
            join(index, "gate_up", names.gate_up, (wide,) * (1 + spec.gated_mlp), hidden)
            join(index, "down", (names.down,), (hidden,), wide)
    return found


def read_adapter(adapter: str, spec: ModelSpec, names: WeightNames, base: str = "") -> Adapter:
    """Reads an adapter of a model: a directory, or a hub name. `base` is the model's name, for a warning.

    Raises:
        CheckpointError: there is none, its files are damaged, incomplete or of another model, or it asks for something
            that this engine does not do; the message says what would be accepted.
    """
    path = resolve_adapter(adapter)
    config, weights = path / CONFIG, path / WEIGHTS
    if not config.is_file():
        raise CheckpointError(f"{path} has no {CONFIG}; is it an adapter that PEFT saved?")
    if not weights.is_file():
        raise CheckpointError(f"{path} has no {WEIGHTS}.{_hint(path)}")
    if config.stat().st_size > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{config} has {config.stat().st_size} bytes; accepted: up to {MAX_CONFIG_BYTES}.")
    json = read_json(config)
    _check_config(config, json)
    of_base = json.get("base_model_name_or_path")
    if base and isinstance(of_base, str) and of_base and _last(of_base) != _last(base):
        log.warning("the adapter in %s was trained on %s, and is used on %s", path, of_base, base)
    try:
        with safe_open(weights, framework="pt") as file:
            updates = _updates(path, json, file, projections(spec, names), names)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{weights} is not a whole safetensors file ({error}); copy the adapter again."
        ) from error
    digest = hashlib.blake2b(config.read_bytes(), digest_size=16)
    with weights.open("rb") as raw:
        while part := raw.read(1 << 20):
            digest.update(part)
    return Adapter(str(path), digest.hexdigest(), max(len(each.a) for each in updates.values()), updates)


def adapter_elements(adapter: str) -> int:
    """Returns the number of an adapter's weights, from its files' headers; 0 where `read_adapter` will refuse them."""
    try:
        with safe_open(resolve_adapter(adapter) / WEIGHTS, framework="pt") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  # no dict
    except (CheckpointError, SafetensorError, OSError):
        return 0


def save_adapter(
    path: Path,
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    names: WeightNames,
    *,
    alpha: float,
    targets: Sequence[str],
    base: str,
) -> None:
    """Writes an adapter as PEFT saves it, whole or not at all. `pairs` has each projection's A (rank, in) and B (out,
    rank) by its name from "layers." on, `targets` is `target_modules`, and `base` the model's name or directory.

    Raises:
        CheckpointError: the directory cannot be written to.
    """
    tensors = {
        f"base_model.model.{names.root}{name}.lora_{letter}.weight": matrix.detach().cpu().contiguous()
        for name, pair in pairs.items()
        for letter, matrix in zip("AB", pair, strict=True)
    }
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": len(next(iter(pairs.values()))[0]),
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    part = path / f"{WEIGHTS}.part"
    try:
        path.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part, metadata={"format": "pt"})
        (path / CONFIG).write_text(json_format.dumps(config, indent=2) + "\n", encoding="utf-8")
        part.replace(path / WEIGHTS)
    except (OSError, SafetensorError) as error:  # a full disk is either
        raise CheckpointError(f"{path} cannot be written to: {error}.") from None


def _hint(path: Path) -> str:
    others = sorted(each.name for pattern in ("*.bin", "*.pt", "*.pth") for each in path.glob(pattern))
    if not others:
        return " Copy the adapter again."
    return (
        f" It has {others[0]}, which may run code when it is read: save it with "
        "PeftModel.save_pretrained(directory, safe_serialization=True)."
    )


def _last(name: str) -> str:
    return name_of(name).rstrip("/").rpartition("/")[2].lower()


def _check_config(file: Path, json: Json) -> None:
    kind = json.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{file}: peft_type is {kind!r:.80}; accepted: 'LORA'.")
    for field, plain in _PLAIN.items():
        value = json.get(field)
        if value is not None and value not in plain:
            raise CheckpointError(f"{file}: {field} is {value!r:.80}; accepted: {plain[0]!r}, or none.")
    if not isinstance(json.get("use_rslora") or False, bool):
        raise CheckpointError(f"{file}: use_rslora is {json['use_rslora']!r:.80}; accepted: true or false.")
    _rank_of(file, "r", json.get("r", 8))
    _alpha_of(file, "lora_alpha", json.get("lora_alpha", 8))
    for field, check in (("rank_pattern", _rank_of), ("alpha_pattern", _alpha_of)):
        pattern = json.get(field) or {}
        if not isinstance(pattern, dict):
            raise CheckpointError(f"{file}: {field} is {pattern!r:.80}; accepted: an object of modules and numbers.")
        for key, value in pattern.items():
            check(file, f"{field}[{key!r:.80}]", value)


def _rank_of(file: Path, field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
        raise CheckpointError(f"{file}: {field} is {value!r:.80}; accepted: a rank of 1 to {MAX_RANK}.")
    return value


def _alpha_of(file: Path, field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{file}: {field} is {value!r:.80}; accepted: a finite number.")
    return float(value)


def _matches(file: Path, field: str, pattern: str) -> Callable[[str], bool]:
    """Returns a match of whole module names. Raises CheckpointError: it is no expression, or one that may take very
    long."""
    repetitions = len(_REPETITION.findall(pattern))
    if len(pattern) > 2000 or repetitions > _MAX_REPETITIONS or _REPEATED_GROUP.search(pattern):
        raise CheckpointError(
            f"{file}: {field} is the expression {pattern!r:.80}, which may take very long; accepted: a list of module "
            f"names, or an expression of up to {_MAX_REPETITIONS} repetitions, none of them of a group."
        )
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{file}: {field} is {pattern!r:.80}, and no expression: {error}.") from None
    return lambda name: compiled.fullmatch(name) is not None


def _modules(file: Path, field: str, value: object) -> Callable[[str], bool]:
    """Returns the test of a module's name that a field is: names or their ends, or an expression."""
    if isinstance(value, str):
        return _matches(file, field, value)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise CheckpointError(f"{file}: {field} is {value!r:.80}; accepted: a list of names, or an expression.")
    names = tuple(value)
    return lambda name: any(name == each or name.endswith(f".{each}") for each in names)


def _targets(file: Path, json: Json) -> Callable[[str], bool]:
    """Returns the test of a module's name that the configuration's targets are, as PEFT's."""
    wanted = json.get("target_modules")
    if wanted is None:
        raise CheckpointError(f"{file}: target_modules is missing; accepted: a list of names, or an expression.")
    target = (lambda name: True) if wanted == "all-linear" else _modules(file, "target_modules", wanted)
    excluded = _modules(file, "exclude_modules", json.get("exclude_modules") or [])
    layers = json.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers or None
    if layers is not None and not (isinstance(layers, list) and all(isinstance(each, int) for each in layers)):
        raise CheckpointError(f"{file}: layers_to_transform is {layers!r:.80}; accepted: numbers of layers.")

    def matches(name: str) -> bool:
        layer = re.search(r"\.layers\.(\d+)\.", f".{name}")
        chosen = layers is None or (layer is not None and int(layer[1]) in layers)
        return chosen and target(name) and not excluded(name)

    return matches


def _pattern(file: Path, field: str, json: Json) -> Callable[[str], Any]:  # Any: a number, checked by `_check_config`
    """Returns a lookup of a module's own number, None where it has none; the first key counts, as in PEFT."""
    tests = [(_matches(file, field, rf"(.*\.)?({key})"), value) for key, value in (json.get(field) or {}).items()]
    return lambda name: next((value for test, value in tests if test(name)), None)


def _updates(
    path: Path, json: Json, file: Any, known: Mapping[str, TargetRows], names: WeightNames
) -> dict[str, LowRank]:  # Any: safe_open has no exported type
    """Reads all updates. Raises CheckpointError."""
    config, weights = path / CONFIG, path / WEIGHTS
    target = _targets(config, json)
    ranks, alphas = (_pattern(config, field, json) for field in ("rank_pattern", "alpha_pattern"))
    roots = {names.root, "model.", "model.language_model.", "language_model.model."}
    modules: dict[str, tuple[str, str]] = {}  # by the name from "layers." on: the module's name, and its tensors'
    held = set(file.keys())
    for tensor in sorted(held):
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", tensor)
        name = "" if found is None else found[1]
        root, _, rest = name.partition("layers.")
        short = f"layers.{rest}"
        if root not in roots or short not in known:
            accepted = ", ".join(sorted({each.split(".", 2)[2] for each in known}))
            raise CheckpointError(
                f"{weights}: tensor {tensor!r:.120} changes a part of the model that adapters may not; accepted: "
                f"lora_A and lora_B of {accepted} in the model's layers."
            )
        if not target(name):
            raise CheckpointError(f"{weights}: tensor {tensor!r:.120} is of no module that target_modules names.")
        modules[short] = name, tensor.rpartition(".lora_")[0]
    missing = [each for each in known if each not in modules and target(f"{names.root}{each}")]
    if missing and isinstance(json.get("target_modules"), list):
        raise CheckpointError(f"{weights} has no tensors of {missing[0]}, which target_modules names; is it whole?")
    if not modules:
        raise CheckpointError(f"{weights} has no tensors of an adapter.")
    made = {}
    for short, (name, tensors) in modules.items():
        place = known[short]
        rank = ranks(name) or json.get("r", 8)
        alpha = json.get("lora_alpha", 8) if (own := alphas(name)) is None else own
        scale = alpha / (math.sqrt(rank) if json.get("use_rslora") else rank)
        a = _taken(weights, file, held, f"{tensors}.lora_A.weight", (rank, place.columns))
        b = _taken(weights, file, held, f"{tensors}.lora_B.weight", (len(place.rows), rank))
        placed = torch.zeros(place.stop - place.first, rank)
        placed[place.rows - place.first] = b * scale
        made[short] = LowRank(a, placed)
    return made


def _taken(weights: Path, file: Any, held: set[str], name: str, shape: tuple[int, int]) -> Tensor:  # Any: see above
    if name not in held:
        raise CheckpointError(f"{weights} has no tensor {name!r:.120}; is it whole?")
    part = file.get_slice(name)
    found, kind = tuple(part.get_shape()), str(part.get_dtype())
    if found != shape or kind not in FLOATS:
        raise CheckpointError(
            f"{weights}: tensor {name!r:.120} is {kind} of shape {found}; accepted: a float of shape {shape}, which "
            f"the model and {CONFIG} give."
        )
    tensor: Tensor = file.get_tensor(name).float()
    if not tensor.isfinite().all():
        raise CheckpointError(f"{weights}: tensor {name!r:.120} has values that are not finite.")
    return tensor
