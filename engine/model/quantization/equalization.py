"""Scales of input channels that make a linear easier to round: AWQ's and SmoothQuant's searches, and their folding.

A channel's activations are divided by its scale and the weight's column multiplied by it, which leaves the float model
as it is. The division is folded into what precedes the linear: a norm's weight, or rows of another linear. Knows a
layer's tensors by their names; nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.model_spec import ModelSpec, WeightNames
from engine.model.quantization.layerwise import LinearName, Projection

GRID = 20  # exponents that are tried, besides 0
Round = Callable[[Tensor], Tensor]  # a weight (out, in) -> its values once rounded
Tensors = dict[str, Tensor]  # a layer's, by their names in the checkpoint


@dataclass(frozen=True, slots=True)
class Preceding:
    """The tensors that a linear's input is proportional to: a norm's weight, or rows of a linear's.

    `shared` runs of `run` input channels each have one scale: query heads that attend to one head of values.
    """

    name: str
    rows: slice | None = None  # None: of a norm
    shared: int = 1
    run: int = 1


def preceding(
    spec: ModelSpec, names: WeightNames, index: int, parts: dict[LinearName, tuple[Projection, ...]]
) -> dict[LinearName, Preceding]:
    """Returns what each linear of layer `index` has its scales folded into; those that have nothing are left out.

    The order is that of folding: rows of a linear are scaled before its own input is looked at.
    """
    prefix, wide, hidden = f"{names.root}layers.{index}.", spec.intermediate_size, spec.hidden_size
    found: dict[LinearName, Preceding] = {"down": _rows_of(parts["gate_up"], wide, 2 * wide)}
    if index in spec.conv_layers:
        found["o"] = _rows_of(parts["qkv"], hidden, 2 * hidden)  # the gate out
    else:
        q, kv, shared = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.heads // spec.kv_heads
        values = _rows_of(parts["qkv"], q + kv, q + 2 * kv)
        found["o"] = Preceding(values.name, values.rows, shared, spec.head_dim)
    if spec.pre_norm and not spec.parallel:  # one norm before both has not two scales
        found["qkv"] = Preceding(prefix + names.attention_pre_norm)
        found["gate_up"] = Preceding(prefix + names.mlp_pre_norm)
    return found


def _rows_of(parts: Sequence[Projection], start: int, stop: int) -> Preceding:
    """Finds rows of several projections, one below the other, in the one that has them."""
    for part in parts:
        if stop <= part.rows:
            return Preceding(part.name, slice(start, stop))
        start, stop = start - part.rows, stop - part.rows
    raise AssertionError("the rows are of no projection")


def awq_scales(weights: Sequence[Tensor], sample: Tensor, rounded: Round, before: Preceding) -> tuple[Tensor, float]:
    """Returns AWQ's scales (Lin et al. 2023, section 3.2) of inputs (rows, in), and their exponent.

    They are the mean magnitudes of the activations to the power, from 0 to 1, that makes the outputs' error least.
    """
    magnitudes = _tied(sample.abs().mean(0), before).clamp(min=1e-8)

    def error(scales: Tensor) -> float:
        return sum(float((sample @ (rounded(each * scales) / scales - each).t()).square().sum()) for each in weights)

    return _least(lambda power: magnitudes**power, error)


def smoothquant_scales(weights: Sequence[Tensor], sample: Tensor, rounded: Round) -> tuple[Tensor, float]:
    """Returns SmoothQuant's scales (Xiao et al. 2022, section 4) of inputs (rows, in), and the best α.

    They are max|x|^α / max|w|^(1-α), with the α that makes the error of 8-bit weights and activations least.
    """
    activations = sample.abs().amax(0).clamp(min=1e-5)
    columns = torch.stack([each.abs().amax(0) for each in weights]).amax(0).clamp(min=1e-5)

    def error(scales: Tensor) -> float:
        inputs = _eight_bits(sample / scales)
        return sum(float((inputs @ rounded(each * scales).t() - sample @ each.t()).square().sum()) for each in weights)

    return _least(lambda alpha: activations**alpha / columns ** (1 - alpha), error)


def _least(candidate: Callable[[float], Tensor], error: Callable[[Tensor], float]) -> tuple[Tensor, float]:
    """Returns the candidate of the least error with its exponent; scales of 1, and -1, where none is better."""
    best, chosen, least = torch.ones_like(candidate(0.0)), -1.0, float("inf")
    for step in range(-1, GRID + 1):
        scales = best if step < 0 else candidate(step / GRID)
        scales = scales / (scales.amax() * scales.amin()).sqrt()
        if (found := error(scales)) < least:
            best, chosen, least = scales, step / GRID if step >= 0 else -1.0, found
    return best, chosen


def _eight_bits(x: Tensor) -> Tensor:
    """Rounds each token's activations to 8 bits: (tokens, in)."""
    steps = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (x / steps).round() * steps


def _tied(values: Tensor, before: Preceding) -> Tensor:
    """Averages values over the channels that share a scale, (in,)."""
    runs = values.unflatten(0, (-1, before.shared, before.run))
    return runs.mean(1, keepdim=True).expand_as(runs).flatten()


def fold(tensors: Tensors, before: Preceding, after: Sequence[Projection], scales: Tensor, norm_offset: float) -> None:
    """Multiplies columns of `after` by `scales` (in,) and divides `before` by them, in place of the old tensors.

    A norm's weight keeps its dtype: the scales are changed a little, so that the quotient is one that it has.
    """
    weight = tensors[f"{before.name}.weight"]
    if before.rows is None:
        whole = weight.float() + norm_offset
        stored = (whole / scales - norm_offset).to(weight.dtype)
        quotient = stored.float() + norm_offset
        exact = (quotient != 0) & (whole != 0)
        scales = torch.where(exact, whole / quotient, 1.0)
        tensors[f"{before.name}.weight"] = torch.where(exact, stored, weight)
    else:
        own = scales.unflatten(0, (-1, before.shared, before.run))[:, 0].flatten()
        for name in (f"{before.name}.weight", f"{before.name}.bias"):
            if name in tensors:
                divided = tensors[name].float()
                divided[before.rows] /= own if divided.dim() == 1 else own[:, None]
                tensors[name] = divided
    for part in after:
        tensors[f"{part.name}.weight"] = tensors[f"{part.name}.weight"].float() * scales
