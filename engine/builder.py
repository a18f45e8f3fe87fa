"""Builds a core from a configuration: checkpoint, device, dtype, KV pool, tokenizer. Slow, and done once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engine.config import DETERMINISTIC_STEP_TOKENS, GPU_STEP_TOKENS, EngineConfig, KvDType
from engine.core.adapter_cache import AdapterCache
from engine.core.adapters import CoreAdapters
from engine.core.engine_core import EngineCore
from engine.core.gpu_sampler import warm_up
from engine.core.messages import Loaded
from engine.errors import CheckpointError, InvalidParameter
from engine.families import family_of
from engine.kernels import cpu
from engine.kv_cache.allocation import blocks_for
from engine.kv_cache.block_pool import NULL_BLOCK, BlockPool
from engine.kv_cache.chunk_reuse.chunk_gate import check_chunk_reuse
from engine.kv_cache.chunk_reuse.kv_moves import KVMover, why_not
from engine.kv_cache.kv_groups import KVGroups
from engine.kv_cache.offload import build_offload
from engine.kv_cache.pool_size import pool_blocks
from engine.kv_cache.quality_gate import check_int4
from engine.kv_cache.quantized_cache import INT4_GROUP, INT4_MAX_WIDTH, QuantizedCache
from engine.kv_cache.snapshot import fingerprint
from engine.kv_cache.state_checkpoints import StateCheckpoints
from engine.kv_cache.transport.build import build_connector, digest_key
from engine.model import native_layers
from engine.model.batch import Batch, KVCache
from engine.model.decoder import Decoder, load_decoder
from engine.model.detokenizer import Detokenizer
from engine.model.gpu_runner import GpuRunner
from engine.model.loader import read_json, resolve
from engine.model.memory import (
    MAX_LEN_BY_DEFAULT,
    STATES_SHARE,
    block_bytes,
    check_fit,
    find_device,
    find_dtype,
    kv_groups,
    offload_of,
    spec_of,
    speculation_of,
    state_slots,
    weight_bytes,
    with_mtp,
)
from engine.model.numerics import Numerics
from engine.model.quantization.checkpoint import open_weights
from engine.model.runner import CacheStore, ModelRunner, Runner, TreeRunner
from engine.model.tokenizer import Tokenizer
from engine.model.value_head import ValueHead
from engine.multimodal.encoder_cache import EncoderCache
from engine.multimodal.encoders import load_encoder
from engine.multimodal.processor_config import has_processor
from engine.multimodal.processors import load_processor
from engine.speculation.draft_model import DraftModel
from engine.speculation.medusa import Medusa, MedusaHeads, is_medusa
from engine.speculation.mtp import MTP, MTPLayer, blocks_per_draft
from engine.speculation.proposer import Proposer, plugins
from engine.speculation.speculator import build_speculator
from engine.structured_output.bitmask import Constraints, Masks
from engine.structured_output.compiler import Compiler, default_compiler

log = logging.getLogger(__name__)

# Below this, weights live in the processor's cache, and a second thread saved a tenth of a step of one row; but served
# over HTTP on two cores, one thread gave 1.4 times the tokens of two (docs/performance.md).
_ONE_THREAD_BELOW_BYTES = 32 << 20
_TORCH_THREADS = torch.get_num_threads()  # torch's choice, before any engine of this process changed it


@dataclass(frozen=True, slots=True)
class EngineParts:
    core: EngineCore
    compiler: Compiler
    loaded: Loaded
    end: Callable[[], None] = lambda: None  # ends the model's other processes, once the core has stopped


def build(config: EngineConfig, proposers: Sequence[Proposer] = ()) -> EngineParts:
    """Loads everything that `config` names. `proposers` are more ones than those that come with the engine.

    Raises:
        CheckpointError, UnsupportedArchitecture: see there.
        InvalidParameter: the device is not there, or the pool cannot hold a sequence.
        RankDied: another rank of the model did not start.
    """
    with ExitStack() as failed:
        parts = _built(config, proposers, failed)
        failed.pop_all()
    return parts


def _built(config: EngineConfig, proposers: Sequence[Proposer], failed: ExitStack) -> EngineParts:
    """Does so; `failed` closes what a failure must not leave behind."""
    device, path = find_device(config.device), resolve(config.model)
    spec = spec_of(path)
    dtype = find_dtype(config, device, spec)
    check_fit(config, path, spec, device, dtype)
    small = device.type == "cpu" and weight_bytes(path, dtype) < _ONE_THREAD_BELOW_BYTES
    threads = config.threads or (1 if small else max(1, _TORCH_THREADS // (config.ranks * config.data_parallel_size)))
    use_threads(threads, device)
    eight_bits = config.kv_dtype in ("int8", "fp8") and device.type == "cpu"  # our own attention reads 16 and 4
    kernels = "torch" if config.kernels == "auto" and eight_bits else config.kernels
    packing = None
    if (offload := offload_of(config, path, spec, device, dtype)) is not None:
        own = native_layers.packing_for(config.quantization, spec, dtype, device, False, True, config.deterministic)
        packing = offload.packing(own)
    ranks = None
    if config.ranks > 1:
        from engine.parallel.rank_processes import RankProcesses  # with msgspec, which one rank does without

        ranks = RankProcesses(config, path, spec, dtype, threads)
        failed.callback(ranks.close)
    decoder = (
        ranks.decoder
        if ranks is not None
        else load_decoder(
            path,
            dtype=dtype,
            device=device,
            max_model_len=config.max_model_len,
            kernels=kernels,
            quantization=config.quantization,
            deterministic=config.deterministic,
            packing=packing,
        )
    )
    cache = AdapterCache(decoder, config.max_adapters, config.max_host_adapters, config.model, config.ageing_s)
    adapters = CoreAdapters(cache, config.pinned_adapters)
    adapters.load_all(dict(config.adapters))
    mtp_layer = _mtp_layer(config, decoder, path, device)
    if decoder.on_gpu and config.max_batch_tokens is None:
        tokens = DETERMINISTIC_STEP_TOKENS if config.deterministic else GPU_STEP_TOKENS
        config = replace(config, max_batch_tokens=tokens)
    if config.deterministic and device.type != "cpu" and not decoder.on_gpu:
        message = "deterministic on CUDA, but not on the Triton kernels; accepted: with those, or on the CPU."
        raise InvalidParameter("deterministic", message)
    spec, declared = decoder.spec, decoder.spec.max_position_embeddings
    _check_kv_dtype(config.kv_dtype, decoder, path.name)
    if config.max_model_len is not None and config.max_model_len > declared:
        raise InvalidParameter(
            "max_model_len",
            f"max_model_len is {config.max_model_len}; accepted: 1 to {declared}, the model's positions.",
        )
    max_model_len = config.max_model_len or min(declared, MAX_LEN_BY_DEFAULT)
    numerics = _numerics(config, decoder, threads)
    tokenizer, model = Tokenizer.load(path), fingerprint(path)
    if config.kv_dtype == "int4":
        check_int4(decoder, tokenizer, config, model, numerics)
    if config.chunk_reuse is not None:
        check_chunk_reuse(decoder, tokenizer, config, model, numerics)
    if config.context_shift and (why := why_not(spec)) is not None:
        raise InvalidParameter("context_shift", f"context_shift is set, but {why}; accepted: False.")
    groups = kv_groups(config, spec, dtype, device, max_model_len)
    width = 1 if groups is None else groups.width
    blocks = pool_blocks(config, decoder, device, max_model_len, groups, cache.largest_bytes)
    kv: KVCache | QuantizedCache
    if ranks is not None:
        kv = ranks.decoder.allocate(blocks + 1, config.block_size, groups)
    elif config.kv_dtype == "auto":
        slots = state_slots(config, spec, dtype, blocks * block_bytes(spec, config.block_size, dtype, groups=groups))
        # one more of each: the null block, and the state of no tokens
        draft_blocks = config.max_running * blocks_per_draft(config)
        sizes = (blocks + 1, config.block_size, dtype, device)
        kv = KVCache.of(spec, *sizes, slots=slots + 1, draft_blocks=draft_blocks, groups=groups)
    else:
        shape = (spec.layers, blocks + 1, config.block_size, spec.kv_heads, spec.head_dim)
        kv = QuantizedCache(*shape, dtype, device, config.kv_dtype, groups=groups)
    if device.type == "cuda" or not decoder.on_gpu:  # Triton's interpreter compiles nothing
        _warm_up(decoder, kv, device)
    log.info(
        "%s on %s in %s: %s kernels, %d blocks of K/V, %s, %.1f sequences of %d tokens at once",
        path.name, device, dtype, numerics.kernels, blocks, _token_bytes(kv.block_nbytes // config.block_size, groups),
        blocks / blocks_for(max_model_len, config.block_size, groups), max_model_len,
    )  # fmt: skip
    images = _encoder_cache(config, decoder, path, tokenizer)
    compiler = default_compiler(tokenizer, spec.vocab_size)
    compiler.warm()
    pool = BlockPool(blocks, config.kv_tenant_share)
    if config.kv_events is not None:
        from engine.kv_cache.kv_event_publisher import event_log  # ZeroMQ, which a bare engine does without

        pool.events = event_log(config.kv_events, config.block_size, adapters.name)
    cache.seq_blocks = width  # at least one block of tokens has to fit beside an adapter
    left = adapters.share(pool, kv.block_nbytes)
    max_len = min(max_model_len, left * config.block_size if groups is None else groups.max_tokens(left))
    cache.seq_blocks = blocks_for(max_len, config.block_size, groups)
    build_tiers = partial(build_offload, config, model, numerics)
    kv_share, states = 1.0, None
    if kv.states is not None:
        kv_share, slot_pool = 1 - STATES_SHARE, BlockPool(slots, config.kv_tenant_share)
        store = CacheStore(kv.states, device)
        states = StateCheckpoints(
            slot_pool,
            config.block_size,
            publishes=config.prefix_cache,
            nbytes=kv.states.block_nbytes,
            tiers=build_tiers(slot_pool, kv.states, store, device, share=STATES_SHARE),
        )
    speculation, more = speculation_of(config, device), [*proposers, *plugins()]
    most = 1 if speculation == "off" else 1 + config.speculation_tokens
    runner = _runner(config, decoder, kv, device, max_model_len, images, most, speculation == "auto" or bool(more))
    models = _models(config, decoder, path, runner, blocks // width)
    value_head = ValueHead.usable(path, spec.hidden_size) if (keeping := _keeping_states(config, runner)) else None
    if keeping is not None and value_head is not None:
        keeping.keep_states(value_head.keep)
    if mtp_layer is not None:
        assert isinstance(kv, KVCache) and isinstance(runner, ModelRunner), "see `_mtp_layer`"
        mtp = MTP.of(mtp_layer, kv, config, blocks + 1)
        runner.follow(mtp.ran)
        models.insert(0, mtp)
    # in these models all of a token's past is found by its place in the cache, and of all layers alike
    trees = isinstance(runner, TreeRunner) and groups is None and not spec.recurrent_layers
    trees = trees and config.prefill_context_parallel_size == 1  # of one device: accepted K/V moves from slot to slot
    speculator = build_speculator(speculation, config, spec.vocab_size, more, models, trees=trees)
    core = EngineCore(
        config,
        runner,
        pool,
        partial(Detokenizer, tokenizer),
        tokenizer.eos_token_ids,
        digest_key(config),
        begin_device=lambda: use_threads(threads, device),
        constraints=Constraints(compiler, Masks(spec.vocab_size, device)),
        model=model,
        images=images,
        tiers=build_tiers(pool, kv, CacheStore(kv, device), device, share=kv_share),
        states=states,
        speculator=speculator,
        groups=groups,
        adapters=adapters,
        value=None if value_head is None else value_head.value,
        connector=build_connector(config, model, numerics, pool, kv, CacheStore(kv, device), device),
    )
    loaded = Loaded(
        path=str(path), vocab_size=spec.vocab_size, max_model_len=max_len, device=str(device),
        dtype=str(dtype).removeprefix("torch."), threads=threads, numerics=numerics, fingerprint=model,
        vision=images is not None, proposers=speculator.names, speculation=speculation,
        adapters=adapters.digests, value_head=value_head is not None,
    )  # fmt: skip
    return EngineParts(core, compiler, loaded, (lambda: None) if ranks is None else ranks.close)


def _mtp_layer(config: EngineConfig, decoder: Decoder, path: Path, device: torch.device) -> MTPLayer | None:
    """Loads the checkpoint's layer of multi-token prediction, where drafts by it are wanted, and tells the decoder's
    architecture of it.

    Raises:
        CheckpointError: `speculation` names it, and its tensors are not those of such a layer.
    """
    spec = with_mtp(spec_of(path), config, path, device)
    if not spec.mtp_layers or decoder.on_gpu or config.kv_dtype != "auto":
        return None
    try:
        layer = MTPLayer.load(path, decoder)
    except CheckpointError as error:
        if config.speculation == "mtp":
            raise
        log.warning("nothing is drafted by multi-token prediction: %s", error)
        return None
    decoder.spec = replace(decoder.spec, mtp_layers=spec.mtp_layers)
    return layer


def _models(config: EngineConfig, decoder: Decoder, path: Path, runner: Runner, blocks: int) -> list[Proposer]:
    """Loads the draft model or the Medusa heads that are configured, or the heads that the model's own files name.

    Raises:
        CheckpointError, UnsupportedArchitecture: of the draft model.
        InvalidParameter: the draft model does not fit.
    """
    keeping = _keeping_states(config, runner)
    if config.draft_model is None:
        heads = _own_heads(path) if keeping is not None and config.speculation != "off" else None
        if heads is None:
            return []
        try:
            return _models(replace(config, draft_model=str(heads)), decoder, path, runner, blocks)
        except CheckpointError as error:  # the model was trained anew, say
            log.warning("nothing is drafted by %s: %s", heads.name, error)
            return []
    drafting = resolve(config.draft_model)
    if not (drafting.is_dir() and is_medusa(drafting)):
        return [DraftModel.load(drafting, decoder, config, blocks)]
    if keeping is None:
        message = "draft_model has Medusa heads, which read states of the CPU's own kernels; accepted: a draft model."
        raise InvalidParameter("draft_model", message)
    medusa = Medusa(MedusaHeads.load(drafting, path, decoder))
    keeping.keep_states(medusa.keep)
    return [medusa]


def _keeping_states(config: EngineConfig, runner: Runner) -> ModelRunner | None:
    """Returns the runner if it hands out the states behind a step's logits."""
    return runner if config.ranks == 1 and isinstance(runner, ModelRunner) and runner.keeps_states else None


def _own_heads(path: Path) -> Path | None:
    """Returns the directory beside a model's that its `ponder.json` names as `medusa`, if both are there."""
    known = path / "ponder.json"
    name = read_json(known).get("medusa") if known.is_file() else None
    if not isinstance(name, str) or Path(name).name != name or not (path.parent / name / "config.json").is_file():
        return None
    return path.parent / name


def _check_kv_dtype(kv_dtype: KvDType, decoder: Decoder, model: str) -> None:
    """Raises InvalidParameter where the model or its device cannot have a cache of this number format."""
    spec = decoder.spec
    if kv_dtype == "auto":
        return
    if spec.conv_layers:
        why, accepted = f"{model} has short convolutions", "auto"
    elif spec.latent is not None:
        why, accepted = f"the K/V of {model} are latents, which are kept in the model's number format", "auto"
    elif spec.recurrent_layers:
        why, accepted = f"{model} has recurrent layers", "auto"
    elif spec.uneven_kv:
        why, accepted = f"the layers of {model} differ in their keys and values", "auto"
    elif kv_dtype != "int4":
        return
    elif decoder.device.type != "cpu" or decoder.on_gpu:
        why, accepted = "the Triton kernels and torch on CUDA read K/V of 16 or 8 bits", "auto, int8 or fp8"
    elif spec.head_dim % INT4_GROUP or spec.head_dim > INT4_MAX_WIDTH:
        limit = f"multiples of {INT4_GROUP} up to {INT4_MAX_WIDTH} are quantized to 4 bits"
        why, accepted = f"the heads of {model} have {spec.head_dim} components, and {limit}", "auto, int8 or fp8"
    else:
        return
    raise InvalidParameter("kv_dtype", f"kv_dtype is {kv_dtype}, but {why}; accepted: {accepted}.")


def _numerics(config: EngineConfig, decoder: Decoder, threads: int) -> Numerics:
    invariant = config.deterministic or (decoder.native and native_layers.invariant(config.quantization))
    ours = "Triton" if decoder.on_gpu else cpu.name() if decoder.native else "torch"
    if decoder.device.type == "cuda":
        processor = torch.cuda.get_device_name(decoder.device)
    else:
        processor = torch.backends.cpu.get_cpu_capability()
        if ours == "torch":  # oneDNN chooses by the processor's features and name
            bf16 = (
                " AMX"
                if torch.cpu._is_amx_tile_supported()
                else " AVX512-BF16"
                if torch.cpu._is_avx512_bf16_supported()
                else ""
            )
            processor = f"{cpu.processor()}, {processor}{bf16}"
    return Numerics(
        dtype=str(decoder.dtype).removeprefix("torch."),
        kernels=ours if config.ranks == 1 else f"{ours} on {config.ranks} ranks",
        quantization=config.quantization,
        kv_dtype=config.kv_dtype,
        device=decoder.device.type,
        processor=processor,
        threads=threads if ours == "torch" and decoder.device.type == "cpu" else 0,
        torch=str(torch.__version__),
        batch_invariant=invariant,
    )


def use_threads(count: int, device: torch.device | str = "cpu") -> None:
    """Sets the calling thread's number of CPU threads, apart from other engines of the process, and its GPU, if
    `device` is one."""
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is not None:
        torch.cuda.set_device(chosen)
    torch.get_num_threads()  # a thread's first call takes the process's number over: later it would undo ours
    torch.set_num_threads(count)


def _encoder_cache(config: EngineConfig, decoder: Decoder, path: Path, tokenizer: Tokenizer) -> EncoderCache | None:
    """Loads the encoder of a model that reads images; None where its text can be read alone, and it comes without an
    image processor or is divided among ranks.

    Raises:
        CheckpointError: its weights or the files of its image processor are missing or inconsistent.
    """
    spec = decoder.spec
    if spec.vision is None or (spec.vision.optional and (config.ranks > 1 or not has_processor(path))):
        return None
    json = read_json(path / "config.json")
    processor = load_processor(path, json)
    for token, id in processor.tokens.items():
        if (found := tokenizer.token_id(token)) != id:
            raise CheckpointError(f"{path}: the id of {token} is {id} in config.json, and {found} in the tokenizer.")
    names, weights = family_of(json).names(json), open_weights(path)
    encoder = load_encoder(spec, names, weights, processor, decoder.dtype, decoder.device)
    sizes = spec.vision.parameters * decoder.dtype.itemsize / 1e6, config.encoder_cache_bytes / 1e6
    log.info("%s reads images: the encoder takes %.0f MB, and its results up to %.0f MB", path.name, *sizes)
    return EncoderCache(encoder, config.encoder_cache_bytes)


def _runner(
    config: EngineConfig,
    decoder: Decoder,
    kv: KVCache | QuantizedCache,
    device: torch.device,
    max_model_len: int,
    images: EncoderCache | None,
    draft_width: int,
    trees: bool,
) -> Runner:
    """`draft_width`: tokens of a row with its draft; `trees`: drafts may be trees, as joined ones are."""
    moves = config.chunk_reuse is not None or config.context_shift
    mover = KVMover(decoder.spec, kv, decoder.rotations) if moves and isinstance(kv, KVCache) else None
    if not decoder.on_gpu:
        return ModelRunner(decoder, kv, device, deterministic=config.deterministic, images=images, mover=mover)
    max_blocks = -(-max_model_len // config.block_size)
    if device.type == "cuda":
        warm_up(decoder.spec.vocab_size, device)
    return GpuRunner(
        decoder, kv, device, max_rows=config.max_running, max_blocks=max_blocks, graphs=config.graphs,
        draft_width=draft_width, trees=trees, images=images, mover=mover,
    )  # fmt: skip


def _warm_up(decoder: Decoder, kv: KVCache | QuantizedCache, device: torch.device) -> None:
    """Runs prompts and a decode on the null block, so that the first request does not pay for first calls. On a GPU
    this compiles the kernels for few, more and many tokens, and the one that copies blocks."""
    lengths: tuple[int, ...] = (kv.block_size, 1)
    if device.type == "cuda":
        lengths = (*(n for n in (200, 100) if n < decoder.spec.max_position_embeddings), *lengths)
        kv.copy_blocks([(NULL_BLOCK, 1)])
    for tokens in lengths:
        table = torch.full((1, -(-tokens // kv.block_size)), NULL_BLOCK, device=device)
        order = torch.arange(tokens, device=device)
        last = torch.tensor([tokens - 1], device=device)
        slots = order % kv.block_size
        windowed = ((table, slots),) * (0 if kv.groups is None else kv.groups.count)
        decoder.forward(Batch(order * 0, order, slots, (0, tokens), (tokens,), table, last, windowed=windowed), kv)


def _token_bytes(each: int, groups: KVGroups | None) -> str:
    """Says what a token takes, where each K/V group has `each` bytes of it."""
    if groups is None:
        return f"{each} bytes a token"
    return f"{each} bytes a token and {groups.count * each} more for each of the last {groups.window}"
