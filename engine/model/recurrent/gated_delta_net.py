"""Gated DeltaNet (Yang et al. 2025, "Gated Delta Networks"), as Qwen3-Next and Qwen3.5 have it.

Of a head, with keys k, values v, decays a and rates b of tokens t, the state S (key_dim, value_dim) is
S_t = a_t S_{t-1} + k_t u_t, with u_t = b_t (v_t - k_t a_t S_{t-1}), and the output is q_t S_t. Tokens of a chunk are
run at once: their u solve (I + A) u = b (v - g k S_0), where g is the decay since the chunk began and A is strictly
lower triangular, A_ti = b_t (g_t / g_i) (k_t k_i).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.linear import Linear, ProjectionReader
from engine.model.model_spec import GatedDelta
from engine.model.recurrent.states import MIN_CHUNKED, LayerStates, RecurrentPlan, in_chunks, out_of_chunks

EPS = 1e-6  # of the norms of queries and keys


class GatedDeltaNet:
    """One layer. `qkv`, `gate` and `rates` project hidden states to the convolution's channels, to a gate of the
    outputs, and to each value head's rate and decay."""

    def __init__(
        self,
        of: GatedDelta,
        qkv: Linear,
        gate: Linear,
        rates: Linear,
        out: Linear,
        *,
        taps: Tensor,
        decay: Tensor,
        step_bias: Tensor,
        norm: Linear,
    ) -> None:
        """`taps` (taps, width), `decay` and `step_bias` (value_heads,) are float32; `norm` is over value_dim."""
        self._of = of
        self._qkv, self._gate, self._rates, self._out = qkv, gate, rates, out
        self._taps, self._decay, self._step_bias, self._norm = taps, decay, step_bias, norm

    @classmethod
    def read(cls, read: ProjectionReader, of: GatedDelta, prefix: str, hidden: int) -> GatedDeltaNet:
        """Reads a layer whose weights' names begin with `prefix`. Raises CheckpointError."""
        heads, values = of.value_heads, of.value_heads * of.value_dim
        if of.interleaved:
            apart = _apart(of, (of.key_dim, of.key_dim, values // of.key_heads, values // of.key_heads))
            joined = read.tensor(f"{prefix}in_proj_qkvz.weight", of.width + values, hidden)[apart]
            qkv, gate = (read.packed(part) for part in joined.split([of.width, values]))
            rates = read.tensor(f"{prefix}in_proj_ba.weight", 2 * heads, hidden)
            rates = rates[_apart(of, (heads // of.key_heads,) * 2)]
        else:
            qkv = read.linear(f"{prefix}in_proj_qkv", of.width, hidden)
            gate = read.linear(f"{prefix}in_proj_z", values, hidden)
            rates = torch.cat([read.tensor(f"{prefix}in_proj_{part}.weight", heads, hidden) for part in "ba"])
        return cls(
            of,
            qkv,
            gate,
            read.packed(rates),
            read.linear(f"{prefix}out_proj", hidden, values),
            taps=read.exact(f"{prefix}conv1d.weight", of.width, 1, of.taps)[:, 0].T.contiguous(),
            decay=-read.exact(f"{prefix}A_log", heads).exp(),
            step_bias=read.exact(f"{prefix}dt_bias", heads),
            norm=read.plain_norm(f"{prefix}norm.weight", of.value_dim),
        )

    def __call__(self, x: Tensor, states: LayerStates, plan: RecurrentPlan) -> Tensor:
        """Returns the layer's output of normed hidden states, both (tokens, hidden), and advances the states."""
        of = self._of
        mixed = plan.convolve(self._qkv(x), states, self._taps, None)
        keys = of.key_heads * of.key_dim
        q, k, v = (
            part.unflatten(1, (-1, width))
            for part, width in zip(
                mixed.split([keys, keys, of.value_heads * of.value_dim], 1),
                (of.key_dim, of.key_dim, of.value_dim),
                strict=True,
            )
        )
        shared = of.value_heads // of.key_heads
        q, k = (_unit(each).repeat_interleave(shared, 1) for each in (q, k))
        q = q * of.key_dim**-0.5
        rates, steps = self._rates(x).float().chunk(2, 1)
        rates, decays = rates.sigmoid(), self._decay * F.softplus(steps + self._step_bias)
        out = torch.zeros_like(v)
        if len(plan.single_tokens):
            at, slots = plan.single_tokens, plan.single_slots
            out[at], states.matrices[slots] = one_token(
                states.matrices[slots], q[at], k[at], v[at], rates[at], decays[at]
            )
        for span in plan.spans:
            tokens = slice(span.first, span.end)
            inputs = (q[tokens], k[tokens], v[tokens], rates[tokens], decays[tokens])
            run = token_by_token if plan.stepwise or span.end - span.first < MIN_CHUNKED else by_chunks
            out[tokens], state = run(states.matrices[span.slot], *inputs, span.position)
            if span.slot:
                states.matrices[span.slot] = state
        gated = self._norm(out).mul_(F.silu(self._gate(x).float()).view_as(out))
        return self._out(gated.flatten(1).to(x.dtype))


def _apart(of: GatedDelta, parts: tuple[int, ...]) -> Tensor:
    """Returns the order of rows that joins each part of all key heads: a checkpoint has a head's parts together."""
    rows = torch.arange(of.key_heads * sum(parts)).view(of.key_heads, -1).split(parts, 1)
    return torch.cat([part.flatten() for part in rows])


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def one_token(state: Tensor, q: Tensor, k: Tensor, v: Tensor, rates: Tensor, decays: Tensor) -> tuple[Tensor, Tensor]:
    """Runs one token of each of n sequences.

    Args:
        state: (n, heads, key_dim, value_dim).
        q, k: (n, heads, key_dim); v: (n, heads, value_dim).
        rates: (n, heads), 0 to 1; decays: (n, heads), logarithms, at most 0.

    Returns:
        The outputs (n, heads, value_dim), and the states after the token.
    """
    state = state * decays.exp()[..., None, None]
    new = (v - (state * k[..., None]).sum(-2)) * rates[..., None]
    state.addcmul_(k[..., None], new[..., None, :])
    return (state * q[..., None]).sum(-2), state


def token_by_token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, rates: Tensor, decays: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """Runs n tokens of one sequence, slow and obvious. `state` is (heads, key_dim, value_dim), else as `one_token`."""
    state, out = state[None], list[Tensor]()
    for at in range(len(q)):
        token = slice(at, at + 1)
        said, state = one_token(state, q[token], k[token], v[token], rates[token], decays[token])
        out.append(said)
    return torch.cat(out), state[0]


def by_chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, rates: Tensor, decays: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """Runs n tokens of one sequence from `position` on, in chunks that begin at multiples of CHUNK; the same arguments
    and result as `token_by_token`."""
    count = len(q)
    q, k, v, rates, decays = (in_chunks(each, position) for each in (q, k, v, rates, decays))
    since = decays.cumsum(-1)  # logarithm of the decay since the chunk began
    between = (since[..., :, None] - since[..., None, :]).tril().exp().tril()
    weighted = k * rates[..., None]
    system = (weighted @ k.transpose(-1, -2)) * between
    grown = since.exp()[..., None]
    wanted = torch.cat([v * rates[..., None], weighted * grown], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    new, recalled = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = (q @ k.transpose(-1, -2)) * between
    asked = q * grown
    left = k * (since[..., -1:] - since).exp()[..., None]
    kept = since[..., -1].exp()[..., None, None]
    out = list[Tensor]()
    for at in range(len(q)):
        values = new[at] - recalled[at] @ state
        out.append(asked[at] @ state + within[at] @ values)
        state = state * kept[at] + left[at].transpose(-1, -2) @ values
    return out_of_chunks(out, position, count), state
