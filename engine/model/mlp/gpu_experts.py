"""A layer's experts on the Triton kernels (`engine.kernels.experts`), with the same result as `run_experts`.

Nothing waits for the device: a CUDA graph holds for whatever experts the tokens of a step choose.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.errors import InvalidParameter
from engine.kernels.expert_slots import ExpertSlots
from engine.kernels.experts import (
    ExpertRouter,
    alike,
    expert_weights,
    mix,
    mix_triton,
    parts_of,
    route,
    route_triton,
)
from engine.kernels.gated import gated, gated_triton
from engine.kernels.matmul import Invariant
from engine.kernels.quantized import QuantizedWeight
from engine.model.linear import Dense, Linear
from engine.model.mlp.expert_offload import slots_for
from engine.model.mlp.experts import RoutedExperts
from engine.model.model_spec import Activation, ClampedSwiGLU, Experts, ModelSpec


def unsupported(spec: ModelSpec) -> str:
    """Returns why the kernels do not run a model's experts, if they do not."""
    of = spec.experts
    if of is None:
        return ""
    if of.latent_size or not spec.gated_mlp:
        return "its experts are no gated MLPs of the hidden states"
    return "its experts have biases and read scaled inputs" if spec.mlp_bias and of.scaled_inputs else ""


class GpuExperts:
    """The router and the experts of a layer, whose weights stay where they were read; those in host memory come to
    slots on the device when they are chosen. With `invariant` a token's bits
    are the same in any batch; `interpreted` as in `GpuLayers`."""

    def __init__(
        self,
        spec: ModelSpec,
        mixture: RoutedExperts,
        dtype: torch.dtype,
        *,
        invariant: bool = False,
        interpreted: bool = False,
    ) -> None:
        assert spec.experts is not None and not unsupported(spec), "unsupported() was not asked"
        self._of: Experts = spec.experts
        self._activation: Activation = spec.activation
        self._gate: Activation | ClampedSwiGLU = spec.experts.gate or spec.activation
        self._shared = mixture.shared
        self._router = _router(mixture, dtype)
        device = mixture.router.device
        both = [each.gate_up for each in mixture.experts], [each.down for each in mixture.experts]
        opens, closes = ([weight_of(each) for each in every] for every in both)
        biases = [[added for each in every if (added := bias_of(each)) is not None] for every in both]
        homes = [parts_of(each)[0].device for each in opens]
        first = homes.index(torch.device("cpu")) if device.type != "cpu" and homes[-1].type == "cpu" else len(homes)
        if first < len(homes) and not (alike(opens) and alike(closes)):
            message = "cpu_offload_gb is set, and experts of one layer are quantised in several forms; accepted: 0."
            raise InvalidParameter("cpu_offload_gb", message)
        self._gate_up = expert_weights(opens, dtype, device, biases[0])
        self._down = expert_weights(closes, dtype, device, biases[1])
        self._slots: ExpertSlots | None = None
        if first < len(homes):
            slots = slots_for(len(homes) - first, spec.experts.per_token)
            self._slots = ExpertSlots((self._gate_up, self._down), first, slots, device)
            self._gate_up, self._down = self._slots.served((self._gate_up, self._down))
        self._route = route_triton if interpreted else route
        admit = None if self._slots is None else self._slots.admit
        self._mix = partial(
            mix_triton if interpreted else mix,
            scaled_inputs=spec.experts.scaled_inputs,
            invariant=invariant,
            admit=admit,
        )
        self._gated = gated_triton if interpreted else gated

    def __call__(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Returns the weighted sum of each token's experts, and the shared one's output: (tokens, hidden) as `x`. The
        router reads `seen`, or `x`."""
        weights, chosen = self._route(x if seen is None else seen, self._router, self._of)
        shared = None
        if self._shared is not None:
            shared = self._shared.down(self._gated(self._shared.gate_up(x), self._activation))
        return self._mix(x, self._gate_up, self._down, weights, chosen, self._gate, shared=shared)


def weight_of(linear: Linear) -> Tensor | QuantizedWeight:
    """Returns the weight of a linear layer, in a layout of `Packing` on the Triton kernels."""
    if isinstance(linear, Dense | Invariant):
        return linear.weight
    assert isinstance(linear, partial) and isinstance(linear.keywords["weight"], QuantizedWeight), "see Packing"
    weight: QuantizedWeight = linear.keywords["weight"]
    return weight


def bias_of(linear: Linear) -> Tensor | None:
    """Returns the bias of such a layer."""
    if isinstance(linear, Dense | Invariant):
        return linear.bias
    weight = weight_of(linear)
    assert isinstance(weight, QuantizedWeight)
    return weight.bias


def _router(mixture: RoutedExperts, dtype: torch.dtype) -> ExpertRouter:
    weight, gate = mixture.router, mixture.shared_gate
    if gate is not None:
        weight = torch.cat([weight, gate])
    narrow = weight.to(dtype)
    exact = bool((narrow.float() == weight).all())  # as in nearly all checkpoints, which have it in 16 bits
    return ExpertRouter(
        narrow if exact and mixture.beside is None else weight,  # those beside an MLP read float32
        mixture.router_bias,
        mixture.selection_bias,
        mixture.weight_scales,
        shared=mixture.shared is not None,
        gated=gate is not None,
    )
