"""Mamba-2 (Dao & Gu 2024, "Transformers are SSMs"), as Granite 4, Falcon-H1 and Nemotron-H have it.

Of a head, with inputs x, projections B and C of the state, time steps d and a decay A of tokens t, the state S
(head_dim, state_dim) is S_t = exp(d_t A) S_{t-1} + d_t x_t B_t, and the output is S_t C_t + D x_t. Tokens of a chunk
are run at once, as attention with decaying scores (the paper's section 6).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.linear import Linear, ProjectionReader
from engine.model.model_spec import StateSpace
from engine.model.recurrent.states import MIN_CHUNKED, LayerStates, RecurrentPlan, in_chunks, out_of_chunks


class Mamba2:
    """One layer. `project` gives a gate of the outputs, the convolution's channels, and each head's time step."""

    def __init__(
        self,
        of: StateSpace,
        project: Linear,
        out: Linear,
        *,
        taps: Tensor,
        conv_bias: Tensor | None,
        decay: Tensor,
        step_bias: Tensor,
        skip: Tensor,
        norm: Tensor | None,
        eps: float,
    ) -> None:
        """Tensors are float32: `taps` (taps, width), `conv_bias` (width,), `decay`, `step_bias` and `skip` (heads,),
        and `norm`, the weight of an RMSNorm over the heads of each group, where it has one."""
        self._of = of
        self._project, self._out = project, out
        self._taps, self._conv_bias, self._norm, self._eps = taps, conv_bias, norm, eps
        self._decay, self._step_bias, self._skip = decay, step_bias, skip

    @classmethod
    def read(cls, read: ProjectionReader, of: StateSpace, prefix: str, hidden: int, eps: float) -> Mamba2:
        """Reads a layer whose weights' names begin with `prefix`. Raises CheckpointError."""
        inner, state = of.heads * of.head_dim, of.groups * of.state_dim
        taps = read.exact(f"{prefix}conv1d.weight", of.width, 1, of.taps)[:, 0].T.contiguous()
        parts = zip(of.multipliers[1:4], (inner, state, state), strict=True)
        scales = [multiplier for multiplier, width in parts for _ in range(width)]
        return cls(
            of,
            read.linear(f"{prefix}in_proj", inner + of.width + of.heads, hidden, of.bias),
            read.linear(f"{prefix}out_proj", hidden, inner, of.out_bias),
            taps=taps * taps.new_tensor(scales),
            conv_bias=read.exact(f"{prefix}conv1d.bias", of.width) if of.conv_bias else None,
            decay=-read.exact(f"{prefix}A_log", of.heads).exp(),
            step_bias=read.exact(f"{prefix}dt_bias", of.heads),
            skip=read.exact(f"{prefix}D", of.heads),
            norm=None if of.norm == "none" else read.exact(f"{prefix}norm.weight", inner),
            eps=eps,
        )

    def __call__(self, hidden: Tensor, states: LayerStates, plan: RecurrentPlan) -> Tensor:
        """Returns the layer's output of normed hidden states, both (tokens, hidden), and advances the states."""
        of = self._of
        inner, shared = of.heads * of.head_dim, of.heads // of.groups
        gate, mixed, steps = self._project(hidden).split([inner, of.width, of.heads], 1)
        mixed = plan.convolve(mixed, states, self._taps, self._conv_bias)
        x, b, c = mixed.split([inner, of.groups * of.state_dim, of.groups * of.state_dim], 1)
        x = x.unflatten(1, (of.heads, of.head_dim))
        b, c = (each.unflatten(1, (of.groups, of.state_dim)).repeat_interleave(shared, 1) for each in (b, c))
        gate, steps = (_times(each.float(), of.multipliers[at]) for each, at in ((gate, 0), (steps, 4)))
        steps = F.softplus(steps + self._step_bias).clamp(of.min_step, of.max_step)
        decays, stepped = steps * self._decay, x * steps[..., None]
        out = torch.zeros_like(x)
        if len(plan.single_tokens):
            at, slots = plan.single_tokens, plan.single_slots
            out[at], states.matrices[slots] = one_token(states.matrices[slots], stepped[at], b[at], c[at], decays[at])
        for span in plan.spans:
            tokens = slice(span.first, span.end)
            inputs = (stepped[tokens], b[tokens], c[tokens], decays[tokens])
            run = token_by_token if plan.stepwise or span.end - span.first < MIN_CHUNKED else by_chunks
            out[tokens], state = run(states.matrices[span.slot], *inputs, span.position)
            if span.slot:
                states.matrices[span.slot] = state
        out.addcmul_(x, self._skip[:, None])
        made, gate = out.flatten(1), F.silu(gate)
        if of.norm != "before_gate":
            made.mul_(gate)
        if self._norm is not None:
            grouped = made.unflatten(1, (of.groups, -1))
            grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self._eps)
            made = grouped.flatten(1) * self._norm
        if of.norm == "before_gate":
            made.mul_(gate)
        return self._out(made.to(hidden.dtype))


def _times(x: Tensor, by: float) -> Tensor:
    return x if by == 1.0 else x * by


def one_token(state: Tensor, x: Tensor, b: Tensor, c: Tensor, decays: Tensor) -> tuple[Tensor, Tensor]:
    """Runs one token of each of n sequences.

    Args:
        state: (n, heads, head_dim, state_dim).
        x: (n, heads, head_dim), times the time step; b, c: (n, heads, state_dim).
        decays: (n, heads), logarithms, at most 0.

    Returns:
        The outputs (n, heads, head_dim), and the states after the token.
    """
    state = (state * decays.exp()[..., None, None]).addcmul_(x[..., None], b[..., None, :])
    return (state * c[..., None, :]).sum(-1), state


def token_by_token(
    state: Tensor, x: Tensor, b: Tensor, c: Tensor, decays: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """Runs n tokens of one sequence, slow and obvious. `state` is (heads, head_dim, state_dim), else as `one_token`."""
    state, out = state[None], list[Tensor]()
    for at in range(len(x)):
        token = slice(at, at + 1)
        said, state = one_token(state, x[token], b[token], c[token], decays[token])
        out.append(said)
    return torch.cat(out), state[0]


def by_chunks(state: Tensor, x: Tensor, b: Tensor, c: Tensor, decays: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """Runs n tokens of one sequence from `position` on, in chunks that begin at multiples of CHUNK; the same arguments
    and result as `token_by_token`."""
    count = len(x)
    x, b, c, decays = (in_chunks(each, position) for each in (x, b, c, decays))
    since = decays.cumsum(-1)  # logarithm of the decay since the chunk began
    between = (since[..., :, None] - since[..., None, :]).tril().exp().tril()
    within = (c @ b.transpose(-1, -2)) * between @ x
    asked = c * since.exp()[..., None]
    left = (x * (since[..., -1:] - since).exp()[..., None]).transpose(-1, -2) @ b
    kept = since[..., -1].exp()[..., None, None]
    out = list[Tensor]()
    for at in range(len(x)):
        out.append(asked[at] @ state.transpose(-1, -2) + within[at])
        state = state * kept[at] + left[at]
    return out_of_chunks(out, position, count), state
