"""The decoder of `training.torch_model`, attending layers alone, with a mask that says which token sees which."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from training.diffusion.rows import PairRows
from training.torch_model import Attention, Model, TrainingLayer, rotate


class MaskedModel(Model):
    """A model without causality of its own: `states` attends as its mask says."""

    def states(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Returns the last normed states, (rows, length, hidden_size), of tokens (rows, length) at `positions` (rows,
        length), where token i sees token j if `visible` (rows, length, length)."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            assert isinstance(layer, TrainingLayer)
            x = x + mixed(layer.self_attn, layer.operator_norm(x), cos, sin, visible)
            x = x + layer.feed_forward(layer.ffn_norm(x))
        return self.model.embedding_norm(x)

    def row_loss(self, rows: PairRows) -> Tensor:
        """Returns the weighted sum of the cross-entropies of a batch's learned tokens, ()."""
        states = self.states(rows.tokens, rows.positions, rows.visible).flatten(0, 1)
        logits = F.linear(states[rows.learned], self.model.embed_tokens.weight)
        return F.cross_entropy(logits.float(), rows.targets, reduction="none") @ rows.weights


def mixed(attention: Attention, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor) -> Tensor:
    """Returns what a layer's attention adds to `x` (rows, length, hidden_size)."""
    heads = [
        projection(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    q, k, v = attention.q_layernorm(heads[0]), attention.k_layernorm(heads[1]), heads[2]
    q, k = (rotate(each, cos, sin).to(v.dtype) for each in (q, k))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], enable_gqa=True)
    return attention.out_proj(attended.transpose(1, 2).flatten(2))
