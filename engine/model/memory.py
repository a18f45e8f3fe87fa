"""Estimates the memory of weights and K/V pools, and divides a device's among the engines that share it.

Everything is computed from files and configurations, before any tensor is made. Knows nothing of the memory's use.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config import EngineConfig, KvDType, QuantizationName
from engine.errors import InvalidParameter
from engine.families import family_of
from engine.kernels import cpu
from engine.kernels.quantized import GROUP
from engine.kv_cache.kv_groups import KVGroups
from engine.kv_cache.quantized_cache import head_bytes
from engine.model import gpu_layers, native_layers
from engine.model.adapters.peft_checkpoint import adapter_elements
from engine.model.linear import default_dtype
from engine.model.loader import is_gguf, read_json, resolve
from engine.model.mlp.expert_offload import GIB, ExpertOffload, expert_bytes, gib_of
from engine.model.model_spec import ModelSpec
from engine.model.native_layers import INT4_GROUP
from engine.model.quantization.checkpoint import open_weights, quantization_of, read_config
from engine.model.recurrent.states import state_bytes

MTP_PROJECTION = "mtp.fc.weight"  # (hidden, 2 * hidden), of a checkpoint with multi-token prediction
MEMINFO = Path("/proc/meminfo")
MAX_LEN_BY_DEFAULT = 32_768  # tokens of context


def weight_bytes(path: Path, dtype: torch.dtype) -> int:
    """Returns about how many bytes the weights take in memory."""
    if is_gguf(path) or quantization_of(path) is not None:
        return open_weights(path).parameters() * dtype.itemsize  # quantised ones are dequantised at load
    json = read_json(path / "config.json")
    kinds = [each.get(name) for each in (json, json.get("text_config") or {}) for name in ("dtype", "torch_dtype")]
    stored = 4 if "float32" in kinds else 2  # bytes of a number
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) * dtype.itemsize // stored


def loaded_bytes(
    path: Path, spec: ModelSpec, dtype: torch.dtype, quantization: QuantizationName, group: int = GROUP
) -> int:
    """Returns the same for a model that may be quantised: int8 halves every matrix but the embedding, which is looked
    up.

    int4 takes 4 bits and a `group`-th of a scale for each weight of the layers, and is int8 for the logits.
    """
    whole = weight_bytes(path, dtype)
    if quantization == "none":
        return whole
    embedding = spec.vocab_size * spec.hidden_size * dtype.itemsize
    extra = spec.per_layer_input
    looked_up = 0 if extra is None else extra.vocab_size * spec.layers * extra.size * dtype.itemsize
    encoder = 0 if spec.vision is None else spec.vision.parameters * dtype.itemsize  # of images, never quantised
    layers = max(0, whole - looked_up - encoder - embedding * (1 if spec.tied_embeddings else 2))
    inner = layers // 2 if quantization == "int8" else layers * (4 * group + 16) // (16 * group)
    return inner + embedding // 2 + embedding + looked_up + encoder


def block_bytes(
    spec: ModelSpec,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: KvDType = "auto",
    groups: KVGroups | None = None,
) -> int:
    """Returns the bytes of one K/V block, of `block_size` tokens in all layers that attend or convolve, or in one of
    the `groups`, with the scales of quantized ones."""
    parts = 2 if spec.latent is None else 1  # a latent is a token's key and its value
    token = len(spec.conv_layers) * spec.hidden_size * dtype.itemsize
    for layer in set(spec.attending_layers) - spec.shared_kv.keys():
        heads, width = spec.kv_shape(layer)
        token += parts * heads * (width * dtype.itemsize if kv_dtype == "auto" else head_bytes(width, kv_dtype))
    if groups is not None:  # whose layers are all alike
        token = token // spec.layers * groups.layers
    token += spec.mtp_layers * 2 * spec.kv_heads * spec.head_dim * dtype.itemsize
    return token * block_size


STATES_SHARE = 0.25  # of K/V's memory, for recurrent states
MIN_SLOTS = 8
SLOTS_A_SEQUENCE = 8  # more checkpoints of a running sequence are seldom of use


def state_slots(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, kv_bytes: int) -> int:
    """Returns the slots of recurrent states beside `kv_bytes` of K/V; 0 for a model without.

    Raises:
        InvalidParameter: `state_bytes` holds no two states, of which a sequence may copy one to the other.
    """
    each = state_bytes(spec, dtype)
    if not each:
        return 0
    if config.state_bytes is not None:
        if config.state_bytes < 2 * each:
            message = f"state_bytes is {config.state_bytes}; accepted: at least {2 * each}, two states of this model."
            raise InvalidParameter("state_bytes", message)
        return config.state_bytes // each
    return max(MIN_SLOTS, min(SLOTS_A_SEQUENCE * config.max_running, int(STATES_SHARE * kv_bytes) // each))


def useful_blocks(config: EngineConfig, max_model_len: int) -> int:
    """Returns the blocks of all sequences of a step at their longest, in all layers: a pool has no use for more."""
    return config.max_running * -(-max_model_len // config.block_size)


def free_bytes(device: torch.device) -> int:
    """Returns the free bytes of the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in MEMINFO.read_text().splitlines() if MEMINFO.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 << 30  # systems without /proc: assume that 4 GiB are free


def find_device(name: str) -> torch.device:
    """Returns the device of a configuration.

    Raises:
        InvalidParameter: the device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidParameter(
            "device", f"device {name!r} cannot be used here ({error}); accepted: auto, cpu, cuda."
        ) from None
    return device


def find_dtype(config: EngineConfig, device: torch.device, spec: ModelSpec) -> torch.dtype:
    """Returns the dtype of a configuration.

    `auto` is bfloat16 where the device multiplies it, or where our own CPU kernels run the model: on AVX2 they widen it
    in registers, and one request waits for half the bytes of float32. Else it is float32.
    """
    if config.dtype != "auto":
        named: torch.dtype = getattr(torch, config.dtype)
        return named
    if device.type == "cpu" and (_on_x86_kernels(config, spec) or config.quantization != "none") and cpu.library():
        return torch.bfloat16
    return default_dtype(device)


def _on_x86_kernels(config: EngineConfig, spec: ModelSpec) -> bool:
    """Returns whether our own CPU kernels run all of the model. No ARM processor has timed them."""
    whole = native_layers.suits(spec, torch.bfloat16, torch.device("cpu")) and not spec.torch_layers
    ours = config.kernels == "auto" and config.kv_dtype in ("auto", "int4") and config.ranks == 1
    return whole and ours and platform.machine() == "x86_64"


def speculation_of(config: EngineConfig, device: torch.device) -> str:
    """Returns the configured proposer, `auto` or `off`. Without a setting drafts are made where they were measured."""
    return config.speculation or ("auto" if device.type == "cpu" else "off")


def with_mtp(spec: ModelSpec, config: EngineConfig, path: Path, device: torch.device) -> ModelSpec:
    """Returns the architecture with its layer of multi-token prediction where the checkpoint's files have that and
    drafts by it are wanted; else without. Raises CheckpointError."""
    wanted = spec.mtp_layers and config.ranks == 1 and speculation_of(config, device) in ("auto", "mtp")
    return spec if wanted and MTP_PROJECTION in open_weights(path).names() else replace(spec, mtp_layers=0)


def spec_of(path: Path) -> ModelSpec:
    """Reads the architecture of a checkpoint. Raises CheckpointError, UnsupportedArchitecture."""
    json = read_config(path)
    return family_of(json).spec(json)


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory that one model takes of a device: bytes of its weights and of a K/V block in all of its `groups`, and
    useful blocks."""

    weights: int
    block: int
    blocks: int
    groups: int = 1


def _int4_group(device: torch.device) -> int:
    """Returns how many int4 weights share a scale there."""
    return INT4_GROUP if device.type == "cpu" else GROUP


def needs_of(config: EngineConfig) -> Needs:
    """Estimates it for all replicas from the model's files, which are downloaded first where needed.

    Raises:
        CheckpointError, UnsupportedArchitecture: they cannot be read, or no family here runs the model.
        InvalidParameter: the device is not there.
    """
    device, path = find_device(config.device), resolve(config.model)
    spec = with_mtp(spec_of(path), config, path, device)
    dtype = find_dtype(config, device, spec)
    length = config.max_model_len or min(spec.max_position_embeddings, MAX_LEN_BY_DEFAULT)
    groups = kv_groups(config, spec, dtype, device, length)
    width = 1 if groups is None else groups.width
    replicas, copies = config.data_parallel_size, config.prefill_context_parallel_size
    weights = copies * loaded_bytes(path, spec, dtype, config.quantization, _int4_group(device))
    if (offload := offload_of(config, path, spec, device, dtype)) is not None:
        weights -= offload.saved_bytes
    return Needs(
        replicas * (weights + adapter_bytes(config, device, dtype)),
        width * block_bytes(spec, config.block_size, dtype, config.kv_dtype, groups),
        replicas * useful_blocks(config, length),
        width,
    )


def kv_groups(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_len: int
) -> KVGroups | None:
    """Returns the K/V groups of a model; None where one table serves all layers, as of pipeline stages, whose layers
    would be grouped otherwise than those of others, and on the Triton kernels where K/V is sent to other engines or
    token trees may be verified, which want one."""
    one_table = config.kv_transfer is not None or config.speculation not in (None, "off")
    if one_table and gpu_layers.chosen(spec, dtype, device, config.kernels):
        return None
    if config.pipeline_parallel_size > 1:
        return None
    whole = 0 if spec.vision is None else spec.vision.whole_tokens  # an image is in one step, however long
    return KVGroups.of(spec, config.block_size, max_len, max(config.step_tokens, whole))


def adapter_bytes(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> int:
    """Returns about how many bytes the largest of the configured adapters take of the device, as many as are resident:
    on a CPU some are kept as they were read too, in float32."""
    sizes = sorted((adapter_elements(path) for _, path in config.adapters), reverse=True)
    kept = config.max_adapters if config.max_host_adapters is None else config.max_host_adapters
    host = 4 * sum(sizes[:kept]) if device.type == "cpu" else 0
    return dtype.itemsize * sum(sizes[: config.max_adapters]) + host


def offload_of(
    config: EngineConfig, path: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> ExpertOffload | None:
    """Returns the experts that lie in host memory; None without `cpu_offload_gb`.

    Raises:
        InvalidParameter: the model has no experts, another device or other kernels run it, so much does not apply to
            it, or host memory does not hold as much.
    """
    if not config.cpu_offload_gb:
        return None
    why = ""
    if spec.experts is None:
        why = f"{path.name} has no experts"
    elif device.type != "cuda":
        why = f"the device is {device}"
    elif not gpu_layers.chosen(spec, dtype, device, config.kernels):
        why = f"the Triton kernels do not run {path.name}"
    if why:
        message = (
            f"cpu_offload_gb is {config.cpu_offload_gb}, but {why}; accepted: 0, or mixtures on the GPU's kernels."
        )
        raise InvalidParameter("cpu_offload_gb", message)
    offload = ExpertOffload.of(spec, _expert_bytes(config, path, spec, dtype), config.cpu_offload_gb)
    if MEMINFO.exists() and offload.host_bytes > (free := free_bytes(torch.device("cpu"))):
        message = (
            f"cpu_offload_gb is {config.cpu_offload_gb}, and {free / GIB:.1f} GiB of memory are free; accepted: less."
        )
        raise InvalidParameter("cpu_offload_gb", message)
    return offload


def _expert_bytes(config: EngineConfig, path: Path, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Returns the bytes of one expert: of a checkpoint that is quantised already about its share of the files."""
    if quantization_of(path) is None:
        return expert_bytes(spec, dtype, config.quantization)
    share = expert_bytes(spec, dtype, "none") / dtype.itemsize / open_weights(path).parameters()
    return max(1, int(share * sum(file.stat().st_size for file in path.glob("*.safetensors"))))


def _offloads(
    config: EngineConfig, path: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype, excess: int
) -> dict[str, int]:
    """Returns the least `cpu_offload_gb` that leaves `excess` bytes more of a GPU, with the bytes that it leaves."""
    if spec.experts is None or device.type != "cuda" or not gpu_layers.chosen(spec, dtype, device, config.kernels):
        return {}
    each, host = _expert_bytes(config, path, spec, dtype), free_bytes(torch.device("cpu"))
    sizes = (gib_of(number * len(spec.experts.layers) * each) for number in range(2, spec.experts.count + 1))
    tried = ((gib, ExpertOffload.of(spec, each, gib)) for gib in sizes)
    fits = (
        {f"cpu_offload_gb {gib:g}": offload.saved_bytes}
        for gib, offload in tried
        if offload.saved_bytes >= excess and offload.host_bytes <= host
    )
    return next(fits, {})


def check_fit(config: EngineConfig, path: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Refuses weights that the device's free memory cannot hold, before any is read; where that is not known, none.

    Raises:
        InvalidParameter: says what would fit.
    """
    if device.type != "cuda" and not MEMINFO.exists():
        return
    free, group = free_bytes(device) - adapter_bytes(config, device, dtype), _int4_group(device)
    stored = is_gguf(path) or quantization_of(path) is not None
    if stored:  # at least: some are dequantised
        files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
        needed, smaller = sum(file.stat().st_size for file in files), dict[str, int]()
    else:
        copies = config.prefill_context_parallel_size  # of the weights, one in each context
        needed = copies * loaded_bytes(path, spec, dtype, config.quantization, group)
        kinds: tuple[QuantizationName, ...] = ("int8", "int4") if config.ranks == 1 else ()
        smaller = {f"quantization {kind}": loaded_bytes(path, spec, dtype, kind, group) for kind in kinds}
        if dtype == torch.float32:
            smaller = {"dtype bfloat16": needed // 2, **smaller}
        smaller["prefill_context_parallel_size 1"] = needed // copies
    offload = offload_of(config, path, spec, device, dtype)
    whole, needed = needed, needed - (0 if offload is None else offload.saved_bytes)
    if needed <= free:
        return
    for name, saved in _offloads(config, path, spec, device, dtype, whole - free).items():
        smaller[name] = whole - saved
    fitting = [f"{name} ({size / 1e9:.1f} GB)" for name, size in smaller.items() if size <= free and size < needed]
    in_int8, in_int4 = free, free * 16 * group / (8 * group + 32)
    largest = (
        f"models of up to {in_int8 / 2e9:.1f} billion parameters in 16 bits, {in_int8 / 1e9:.1f} in int8, "
        f"{in_int4 / 1e9:.1f} in int4"
    )
    kind = str(dtype).removeprefix("torch.") if config.quantization == "none" else config.quantization
    where = "memory" if device.type == "cpu" else "the GPU"
    raise InvalidParameter(
        "model",
        f"{path.name} takes {needed / 1e9:.1f} GB{'' if stored else f' in {kind}'}, and {free / 1e9:.1f} GB of {where} "
        f"are free; accepted: {' or '.join(fitting) or largest}.",
    )


def divided(configs: Sequence[EngineConfig], needs: Sequence[Needs]) -> list[EngineConfig]:
    """The configurations of engines that share a device, with one K/V pool's memory divided among them.

    The first one's device and K/V settings hold for all of them together: `kv_blocks` or `kv_bytes`, or else a quarter
    of the memory left once all weights are loaded. Every pool gets the same number of blocks, and so the same number
    of tokens, as the models get the same prompts; memory that a pool cannot use is left to the others. The tiers below
    get the same number of bytes each. One configuration is given back as it is.

    Raises:
        InvalidParameter: the memory is not enough for one block each.
    """
    if len(configs) < 2:
        return list(configs)
    first, count = configs[0], len(configs)
    host, disk = first.kv_host_bytes // count, first.kv_disk_bytes // count
    sizes = [each.block for each in needs]
    if first.kv_blocks is not None:
        _check("kv_blocks", first.kv_blocks, count)
        blocks = [first.kv_blocks // count] * count
    elif first.kv_bytes is not None:
        _check("kv_bytes", first.kv_bytes, sum(sizes))
        blocks = [first.kv_bytes // sum(sizes)] * count
    else:
        free = free_bytes(find_device(first.device)) - sum(each.weights for each in needs)
        blocks = level(max(0, free) // 4, sizes, [each.blocks for each in needs])
    return [
        replace(each, kv_bytes=None, kv_blocks=max(1, n), kv_host_bytes=host, kv_disk_bytes=disk)
        for each, n in zip(configs, blocks, strict=True)
    ]


def _check(name: str, value: int, least: int) -> None:
    if value < least:
        message = f"{name} is {value}; accepted: at least {least}, one block for each of the models."
        raise InvalidParameter(name, message)


def level(total: int, sizes: Sequence[int], max_blocks: Sequence[int]) -> list[int]:
    """Divides `total` bytes into numbers of blocks of `sizes` bytes: the same number of each, but for those that need
    at most `max_blocks`."""
    blocks, left, rest = [0] * len(sizes), total, sum(sizes)
    order = sorted(range(len(sizes)), key=lambda each: max_blocks[each])
    for done, at in enumerate(order):
        share = left // rest
        if share < max_blocks[at]:
            for each in order[done:]:
                blocks[each] = share
            break
        blocks[at] = max_blocks[at]
        left -= max_blocks[at] * sizes[at]
        rest -= sizes[at]
    return blocks
