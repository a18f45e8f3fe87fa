"""Attention of decodes alone, beside the time that their keys and values take to be read, and beside torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.gpu import gpu_models, steps
from bench.gpu.rows import Figure, time_of, times_faster
from bench.gpu.setting import Setting
from engine.core.request import SequenceState
from engine.kernels.attention import Pieces, attend_triton
from engine.model.batch import Batching
from engine.model.gpu_batch import LayerKind, Packed, PackedModel, capacity_of, limits_for, works_of
from engine.model.model_spec import ModelSpec

GOAL = 0.85
MEASURABLE_S = 20e-6  # below, it is the start of two kernels that is measured, and not the bandwidth
COMPILED_AT = 64  # rows at which FlexAttention is asked, too
SHAPE = "llama-3-8b"


def attention(setting: Setting) -> Iterator[Figure]:
    """By rows and context; so many caches one after the other that none is left in the second-level cache."""
    spec = shape_of(setting)
    for rows, context in setting.sizes.attention:
        setting.tidy()
        each = kv_bytes(spec, rows * context)
        caches = max(1, -(-setting.sizes.exceed_bytes // each))
        if each * caches > setting.free_bytes():
            continue
        seqs = steps.sequences(rows, context, spec.vocab_size)
        seconds = attended(setting, spec, seqs, caches)
        floor = (each + 2 * query_bytes(spec, rows)) / setting.ceiling("copy")
        what = f"{rows} rows of {context}"
        goal = GOAL if floor > MEASURABLE_S else None
        yield time_of(what, seconds, floor_s=floor, goal=goal, caches=caches, bytes=each)
        yield from _peers(setting, spec, what, rows, context, caches, seconds)


def shape_of(setting: Setting) -> ModelSpec:
    return gpu_models.spec_of("toy" if "toy" in setting.sizes.models else SHAPE)


def kv_bytes(spec: ModelSpec, tokens: int) -> int:
    """Of one layer."""
    return gpu_models.kv_bytes(spec, tokens) // spec.layers


def query_bytes(spec: ModelSpec, rows: int) -> int:
    return 2 * rows * spec.heads * spec.head_dim


def attended(
    setting: Setting, spec: ModelSpec, seqs: Sequence[SequenceState], caches: int, *, cascade: bool = True
) -> list[float]:
    """Seconds of one layer's attention for a decode of these sequences."""
    device, dtype = setting.device, gpu_models.dtype_for(setting.device)
    blocks = max(max(seq.table) for seq in seqs) + 1
    shape = (2, blocks, steps.BLOCK, spec.kv_heads, spec.head_dim)
    layers = [torch.empty(shape, dtype=dtype, device=device).normal_() for _ in range(caches)]
    query = torch.empty(len(seqs), spec.heads, spec.head_dim, dtype=dtype, device=device).normal_()
    pieces, positions = _pieces(setting, spec, seqs, cascade)
    out = torch.empty_like(query)

    def run() -> Tensor:
        for layer in layers:
            attend_triton(query, layer, pieces, positions, scale=spec.attention_scale, out=out)
        return out

    return [each / caches for each in setting.timer.times(setting.timer.recorded(run), setting.sizes.repeats)]


def _pieces(setting: Setting, spec: ModelSpec, seqs: Sequence[SequenceState], cascade: bool) -> tuple[Pieces, Tensor]:
    limits = replace(limits_for(spec, setting.device, deterministic=False), cascade=cascade)
    model = PackedModel((LayerKind(None, spec.head_dim, limits),), (0,), spec.heads)
    laid = Batching(steps.BLOCK).lay(steps.decode(seqs))
    works = works_of(laid, steps.BLOCK, model)
    packed = Packed(capacity_of(laid, works))
    host = np.zeros(packed.size, dtype=np.int32)
    packed.fill(laid, works, host)
    step = packed.views(torch.from_numpy(host).to(setting.device), model)
    return step.pieces[0], step.positions


def _peers(
    setting: Setting, spec: ModelSpec, what: str, rows: int, context: int, caches: int, ours: list[float]
) -> Iterator[Figure]:
    """Torch's own, on keys and values that lie together: they know no block tables."""
    device, dtype = setting.device, gpu_models.dtype_for(setting.device)
    if 2 * caches * kv_bytes(spec, rows * context) > setting.free_bytes():
        return
    shape = (rows, spec.kv_heads, context, spec.head_dim)
    pairs = [[torch.empty(shape, dtype=dtype, device=device).normal_() for _ in range(2)] for _ in range(caches)]
    query = torch.empty(rows, spec.heads, 1, spec.head_dim, dtype=dtype, device=device).normal_()
    peers: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "SDPA": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    }
    if device.type == "cuda" and rows == COMPILED_AT:  # each shape is compiled anew, for some seconds
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention)
        peers["FlexAttention"] = lambda q, k, v: compiled(q, k, v, enable_gqa=True)
    for name, peer in peers.items():

        def run(peer: Callable[[Tensor, Tensor, Tensor], Tensor] = peer) -> Tensor:
            out = query
            for keys, values in pairs:
                out = peer(query, keys, values)
            return out

        try:
            graph = setting.timer.recorded(run)
            seconds = [each / caches for each in setting.timer.times(graph, setting.sizes.repeats)]
        except Exception as error:  # a peer that does not run here is reported, and measured no further
            yield Figure(f"{what}, against {name}", 0.0, "ms", 0.0, 0.0, more={"error": repr(error)[:400]})
            continue
        yield times_faster(f"{what}, against {name}", seconds, ours)
