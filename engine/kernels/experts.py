"""Mixtures of experts: the choice of each token's experts, and their outputs, without waiting for the device.

As in MegaBlocks (Gale et al. 2023) and vLLM's fused_moe: pairs of a token and an expert are sorted by expert, and one
launch multiplies them all; SwiGLU is a part of the first product. How many tokens an expert has is known to the device
alone, so that a CUDA graph holds for any. Kernels find an expert's weights by their addresses: each lies where it was
put, in 16 bits or in 8 or 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.gated import gated_torch
from engine.kernels.quantized import QuantizedWeight, dequantize
from engine.model.mlp.experts import clamped_swiglu, routed
from engine.model.model_spec import Activation, ClampedSwiGLU, Experts


@dataclass(frozen=True, slots=True)
class ExpertRouter:
    """The router of a layer. `weight` is (experts, hidden), of x's type where that holds it exactly, else float32;
    with a `gated` shared expert one row more, of its gate. Biases are (experts,) float32: `bias` is added to the
    scores, `selection_bias` to those that experts are chosen by; `factors` multiply the weights."""

    weight: Tensor
    bias: Tensor | None = None
    selection_bias: Tensor | None = None
    factors: Tensor | None = None  # (experts,) float32
    shared: bool = False  # an expert that every token takes, after its chosen ones, with a weight of 1
    gated: bool = False  # or of the sigmoid of the last row's score


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A projection of all experts of a layer, (out, in) each, of one form; made by `expert_weights`.

    `tables` has the addresses of their parts, (experts,) int64 each: of weights in 16 bits the weight alone, else
    `QuantizedWeight`'s packed words, scales and minimums. `bias` is (experts, out).
    """

    weights: tuple[Tensor, ...] | tuple[QuantizedWeight, ...]
    tables: tuple[Tensor, ...]
    shape: tuple[int, int]
    bias: Tensor | None = None

    def parts(self) -> tuple[Tensor, ...]:
        """Returns the first expert's parts, in the tables' order: all experts' are of one size."""
        return parts_of(self.weights[0])


def parts_of(weight: Tensor | QuantizedWeight) -> tuple[Tensor, ...]:
    """Returns the tensors of a weight without a bias, in the order of `ExpertWeights.tables`."""
    if isinstance(weight, Tensor):
        return (weight,)
    return tuple(part for part in (weight.packed, weight.scales, weight.minimums) if part is not None)


def expert_weights(
    weights: Sequence[Tensor | QuantizedWeight],
    dtype: torch.dtype,
    device: torch.device | None = None,
    biases: Sequence[Tensor] = (),
) -> ExpertWeights:
    """Returns the projections of a layer's experts for the kernels on `device` (the weights' own), where they lie, if
    they are contiguous. `biases`, (out,) each, are copied: they are of all experts or of none.

    Quantised ones of several forms, as a checkpoint may have them, become weights of `dtype`; scales of several types
    become float32.
    """
    packed = [each for each in weights if isinstance(each, QuantizedWeight)]
    forms = {(each.bits, each.group) for each in packed}
    made: tuple[Tensor, ...] | tuple[QuantizedWeight, ...]
    if len(packed) == len(weights) and len(forms) == 1:
        made = tuple(_alike(packed))
        shape = made[0].shape
    else:
        dense = (dequantize(each, dtype=dtype) if isinstance(each, QuantizedWeight) else each for each in weights)
        made = tuple(each.to(dtype).contiguous() for each in dense)
        shape = made[0].shape[0], made[0].shape[1]
    tables = (_addresses(parts, device) for parts in zip(*map(parts_of, made), strict=True))
    return ExpertWeights(made, tuple(tables), shape, torch.stack(list(biases)) if biases else None)


def alike(weights: Sequence[Tensor | QuantizedWeight]) -> bool:
    """Returns whether `expert_weights` leaves the weights as they are."""
    forms = {
        tuple((part.dtype, part.shape) for part in parts_of(each))
        + ((each.bits, each.group) if isinstance(each, QuantizedWeight) else ())
        for each in weights
    }
    return len(forms) == 1


def _alike(weights: list[QuantizedWeight]) -> list[QuantizedWeight]:
    """Returns the weights with scales of one type, all with minimums or none."""
    if len({each.scales.dtype for each in weights}) > 1:
        weights = [replace(each, scales=each.scales.float()) for each in weights]
    if any(each.minimums is not None for each in weights):
        zeros = torch.zeros_like(weights[0].scales, dtype=torch.float32)
        weights = [each if each.minimums is not None else replace(each, minimums=zeros) for each in weights]
    return weights


def _addresses(parts: Sequence[Tensor], device: torch.device | None) -> Tensor:
    return torch.tensor([each.data_ptr() for each in parts], dtype=torch.int64, device=device or parts[0].device)


def route(x: Tensor, router: ExpertRouter, of: Experts) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token of `x` (tokens, hidden), with the same bits in any batch.

    Returns:
        The weights of its experts, best first, and then of the shared one, if there is one: (tokens, per_token [+ 1])
        float32; and the experts' numbers, (tokens, per_token) int32.
    """
    return (route_triton if x.is_cuda else route_torch)(x, router, of)


def mix(
    x: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    weights: Tensor,
    chosen: Tensor,
    activation: Activation | ClampedSwiGLU,
    *,
    shared: Tensor | None = None,
    scaled_inputs: bool = False,
    invariant: bool = False,
    admit: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Sums the outputs of each token's experts, times their weights.

    Args:
        x: (tokens, hidden), of 16 or 32 bits, the last dimension contiguous.
        gate_up: (2 * intermediate, hidden) of each expert, gates above ups; `down` is (hidden, intermediate). With
            `scaled_inputs` the weights multiply what an expert reads, not what it returns, and neither has biases.
        weights: of the experts and of the shared one, as `route` returns them, with their numbers in `chosen`.
        shared: the shared expert's output, (tokens, hidden) of x's type.
        invariant: a token's result has the same bits in any batch.
        admit: called before the products with the first of each expert's sorted tokens, (experts + 1,) int32, by the
            kernels alone; it may change the addresses of the weights (`ExpertSlots.admit`).

    Returns:
        (tokens, hidden) of x's type. An expert's output is rounded to that before it is summed in float32.
    """
    run = mix_triton if x.is_cuda else mix_torch
    return run(
        x, gate_up, down, weights, chosen, activation, shared=shared, scaled_inputs=scaled_inputs, invariant=invariant,
        admit=admit,
    )  # fmt: skip


def route_torch(x: Tensor, router: ExpertRouter, of: Experts) -> tuple[Tensor, Tensor]:
    """The torch reference. See `route`."""
    weight = router.weight.float()
    weights, chosen = routed(of, F.linear(x.float(), weight[: of.count], router.bias), router.selection_bias)
    if router.factors is not None:
        weights = weights * router.factors[chosen]
    if router.gated:
        weights = torch.cat([weights, F.linear(x.float(), weight[of.count :]).sigmoid()], 1)
    elif router.shared:
        weights = F.pad(weights, (0, 1), value=1.0)
    return weights, chosen.int()


def mix_torch(
    x: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    weights: Tensor,
    chosen: Tensor,
    activation: Activation | ClampedSwiGLU,
    *,
    shared: Tensor | None = None,
    scaled_inputs: bool = False,
    invariant: bool = False,
    admit: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """The torch reference, in float32. See `mix`."""
    per_token = chosen.shape[1]
    made = x.new_empty(chosen.numel(), down.shape[0])
    for number in chosen.unique().tolist():
        pairs = (chosen.flatten() == number).nonzero().squeeze(1)
        read = x[pairs // per_token].float()
        if scaled_inputs:
            read = read * weights[:, :per_token].flatten()[pairs, None]
        both = _multiplied(read, gate_up, number)
        if isinstance(activation, ClampedSwiGLU):
            gate, up = both.chunk(2, -1)
            opened = clamped_swiglu(gate, up, activation)
        else:
            opened = gated_torch(both, activation)
        made[pairs] = _multiplied(opened.to(x.dtype).float(), down, number).to(x.dtype)
    each = made.view(*chosen.shape, -1).float()
    out = (each if scaled_inputs else each * weights[:, :per_token, None]).sum(1)
    if shared is not None:
        out += shared.float() * weights[:, per_token:]
    return out.to(x.dtype)


def _multiplied(x: Tensor, of: ExpertWeights, number: int) -> Tensor:
    weight = of.weights[number]
    wide = dequantize(weight) if isinstance(weight, QuantizedWeight) else weight.float()
    return F.linear(x, wide, None if of.bias is None else of.bias[number].float())


def route_triton(x: Tensor, router: ExpertRouter, of: Experts) -> tuple[Tensor, Tensor]:
    """The kernels; on CPU tensors only under Triton's interpreter. See `route`."""
    from triton import next_power_of_2

    from engine.kernels.gpu import experts as kernels

    (tokens, width), rows = x.shape, len(router.weight)
    ways = of.per_token + (router.shared or router.gated)
    weights = torch.empty(tokens, ways, device=x.device)
    chosen = torch.empty(tokens, of.per_token, dtype=torch.int32, device=x.device)
    if not tokens:
        return weights, chosen
    parts = torch.empty(kernels.ROUTER_SPLITS, tokens, rows, device=x.device)
    grid = (-(-tokens // kernels.ROUTER_TOKENS), -(-rows // kernels.ROUTER_ROWS), kernels.ROUTER_SPLITS)
    kernels.router_kernel[grid](
        *(x, router.weight, parts, tokens, rows, width, x.stride(0)),
        splits=kernels.ROUTER_SPLITS,
        block_tokens=kernels.ROUTER_TOKENS,
        block_rows=kernels.ROUTER_ROWS,
        block_width=kernels.ROUTER_WIDTH,
    )
    groups = of.groups
    kernels.route_kernel[(tokens,)](
        *(parts, router.bias, router.selection_bias, router.factors, weights, chosen, tokens, of.count, rows),
        of.min_weight,
        of.scaling,
        splits=kernels.ROUTER_SPLITS,
        per_token=of.per_token,
        block_chosen=next_power_of_2(of.per_token),
        block=next_power_of_2(of.count),
        sigmoid=of.scores == "sigmoid",
        normalised=of.normalised,
        groups=1 if groups is None else groups.count,
        groups_per_token=1 if groups is None else groups.per_token,
        summed=1 if groups is None else groups.summed,
        shared=2 if router.gated else int(router.shared),
        by_logits=of.scaled_inputs,
        num_warps=1 if of.count <= 256 else 4,
    )
    return weights, chosen


def mix_triton(
    x: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    weights: Tensor,
    chosen: Tensor,
    activation: Activation | ClampedSwiGLU,
    *,
    shared: Tensor | None = None,
    scaled_inputs: bool = False,
    invariant: bool = False,
    admit: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """The kernels; on CPU tensors only under Triton's interpreter. See `mix`."""
    from engine.kernels.gpu.experts import SUM_BLOCK, expert_sum_kernel, sort_block, sort_kernel

    (tokens, hidden), per_token, count = x.shape, chosen.shape[1], len(gate_up.weights)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    if not (pairs := tokens * per_token):
        return out
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=x.device)
    block, warps = sort_block(pairs)
    sort_kernel[(count,)](chosen, order, starts, pairs, block=block, num_warps=warps)
    if admit is not None:
        admit(starts)
    made = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    opened = torch.empty(pairs, down.shape[1], dtype=x.dtype, device=x.device)
    gate = activation if isinstance(activation, ClampedSwiGLU) else ClampedSwiGLU(0.0, 0.0)
    first = {
        "per_token": per_token, "ways": weights.shape[1],
        "activation": "clamped" if activation is gate else activation, "alpha": gate.alpha, "limit": gate.limit,
    }  # fmt: skip
    _product(x, gate_up, order, starts, opened, invariant, first, weights if scaled_inputs else None)
    _product(opened, down, order, starts, made, invariant)
    expert_sum_kernel[tokens, -(-hidden // SUM_BLOCK)](
        made, weights, shared, out, hidden, per_token=per_token, weighted=not scaled_inputs, block=SUM_BLOCK
    )
    return out


def _product(
    x: Tensor,
    of: ExpertWeights,
    order: Tensor,
    starts: Tensor,
    out: Tensor,
    invariant: bool,
    gate: Mapping[str, object] | None = None,
    factors: Tensor | None = None,
) -> None:
    """Launches the first product of all experts, with its `gate` and the factors of its inputs, or the second, which
    has neither."""
    from triton import language as tl
    from triton import next_power_of_2

    from engine.kernels.gpu import experts as kernels

    (pairs, rows), count, width = out.shape, len(of.weights), of.shape[1]
    first = of.weights[0]
    packed = isinstance(first, QuantizedWeight)
    tile = kernels.tile_for(pairs, count, width, invariant=invariant, quantized=packed)
    blocks = (pairs + min(count, pairs) * (tile.tokens - 1)) // tile.tokens  # the most that there can be
    grid = (blocks, -(-rows // tile.rows))
    common = {
        "block_experts": next_power_of_2(count), "block_tokens": tile.tokens, "block_rows": tile.rows,
        "num_warps": tile.warps, "num_stages": tile.stages, **(gate or {}),
    }  # fmt: skip
    before, after = ((), ()) if gate is None else ((factors,), (x.stride(0),))
    others = (of.bias, *before, order, starts, out, count, rows, width, *after)
    if isinstance(first, QuantizedWeight):
        kinds = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
        minimums = of.tables[2] if first.minimums is not None else None
        kernel = kernels.quantized_down_kernel if gate is None else kernels.quantized_gate_up_kernel
        form = {"scale_type": kinds[first.scales.dtype], "bits": first.bits, "group": first.group}
        kernel[grid](x, *of.tables[:2], minimums, *others, **form, **common)
        return
    kernel = kernels.expert_down_kernel if gate is None else kernels.expert_gate_up_kernel
    kernel[grid](x, of.tables[0], *others, block_width=tile.width, whole=width % tile.width == 0, **common)
