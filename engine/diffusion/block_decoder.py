"""Decodes with a masked-diffusion model, block after block (semi-autoregressive, LLaDA's section 2.4).

A text lies in the cache in the order in which it becomes final: what is known, then a block of masked places after the
other. A token attends to all of its own block and to all before it, and to nothing behind it, as the model was trained
(Block Diffusion, Arriola et al. 2025). So the K/V of a finished block do not change, and are kept: a pass computes one
block. The first pass of a block also computes what has become final before it, which takes no pass of its own. The
order in the cache is apart from the positions in the text: a gap may lie in the midst of what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.diffusion.checkpoint import MaskedDiffusionModel
from engine.diffusion.unmasking import Unmasking, keep, predict
from engine.errors import ContextLengthExceeded, InvalidParameter
from engine.model.batch import Batch, KVCache

KV_BLOCK = 16  # tokens

Forward = Callable[[Batch, KVCache], Tensor]  # the signature of Decoder.forward


@dataclass(frozen=True, slots=True)
class UnmaskStep:
    """Places that one pass filled, the surest first: their positions in the text, the tokens, and the probabilities
    that the model gave those. `step` counts passes, from 1 on."""

    step: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    confidences: tuple[float, ...]


class BlockRun:
    """A text in the making; iterating runs its passes, once, and gives an UnmaskStep for each.

    `known` are the tokens that are given, by position; `places` are the masked positions, in the order in which their
    blocks are made. With `stops` a text ends at its first end-of-sequence token.
    """

    def __init__(
        self,
        model: MaskedDiffusionModel,
        forward: Forward,
        known: Sequence[tuple[int, int]],
        places: Sequence[int],
        params: Unmasking,
        *,
        stops: bool,
    ) -> None:
        self._model, self._forward, self._params, self.stops = model, forward, params, stops
        self._known, self.passes = len(known), 0
        self._positions = [position for position, _ in known] + list(places)  # in the cache's order
        self._tokens = [token for _, token in known] + [model.mask_token_id] * len(places)
        decoder, total = model.decoder, len(self._positions)
        self._last = torch.tensor([self._end_of(at) - 1 for at in range(total)], device=decoder.device)
        self._rotary = torch.tensor(self._positions, device=decoder.device)
        self._table = torch.arange(1, 1 + -(-total // KV_BLOCK), device=decoder.device)[None]
        self.kv = KVCache.of(decoder.spec, 1 + self._table.shape[1], KV_BLOCK, decoder.dtype, decoder.device)

    def _end_of(self, at: int) -> int:
        """Returns the end of the block of a token of the cache, by whose last one it attends."""
        if at < self._known:
            return self._known
        size = self._params.block_size
        return min(len(self._positions), self._known + ((at - self._known) // size + 1) * size)

    @property
    def text(self) -> tuple[int, ...]:
        """Returns the tokens by position, with the mask token where a place is not filled; up to the answer's end, once
        nothing before that is masked."""
        ordered = [token for _, token in sorted(zip(self._positions, self._tokens, strict=True))]
        end = self._answer_end()
        return tuple(ordered if end is None else ordered[:end])

    @property
    def answer(self) -> tuple[int, ...]:
        """Returns the tokens of the masked places, in order, before the answer's end."""
        return tuple(self._tokens[self._known : self._answer_end()])

    @property
    def ended(self) -> bool:
        """Returns whether the answer has its end, a token that `answer` leaves out."""
        return self._answer_end() is not None

    def _answer_end(self) -> int | None:
        """Returns the place of the first end-of-sequence token, where the run stops at those and none before it is
        masked."""
        for at in range(self._known, len(self._tokens) if self.stops else self._known):
            if self._tokens[at] == self._model.mask_token_id:
                return None
            if self._tokens[at] in self._model.eos_token_ids:
                return at
        return None

    def __iter__(self) -> Iterator[UnmaskStep]:
        if self.passes:
            raise RuntimeError("a run is iterated once")
        first, start = 0, self._known  # tokens of the cache before `first` are final, and so are their K/V
        while start < len(self._positions):
            end = self._end_of(start)
            masked = list(range(start, end))
            while masked:
                self.passes += 1
                keys = [self._positions[at] for at in masked]
                logits = self._pass(first, end, masked)
                kept = keep(predict(logits, masked, keys, self.passes, self._params), self._params)
                first = start
                for each in kept:
                    self._tokens[each.place] = each.token
                    masked.remove(each.place)
                yield UnmaskStep(
                    self.passes,
                    tuple(self._positions[each.place] for each in kept),
                    tuple(each.token for each in kept),
                    tuple(each.confidence for each in kept),
                )
                if self.ended:
                    return
            start = end

    def _pass(self, first: int, end: int, masked: Sequence[int]) -> Tensor:
        """Computes tokens [first, end) of the cache's order, and writes their K/V.

        Returns:
            Logits of the masked ones, (masked, vocabulary) float32; the mask token's is -inf.
        """
        device = self._model.decoder.device
        order = torch.arange(first, end, device=device)
        logits = self._forward(
            Batch(
                token_ids=torch.tensor(self._tokens[first:end], device=device),
                positions=order,
                slots=KV_BLOCK + order,  # behind the null block
                query_starts=(0, end - first),
                context_lens=(end,),
                block_tables=self._table[:, : -(-end // KV_BLOCK)],
                logits_at=torch.tensor(masked, device=device) - first,
                last_keys=self._last[first:end],
                rotary=self._rotary[first:end],
            ),
            self.kv,
        )
        never = torch.tensor([self._model.mask_token_id], device=device)
        return logits.index_fill(1, never, float("-inf"))


class BlockDiffusion:
    """Writes answers and fills gaps with a masked-diffusion model. `forward` is the model's own unless given."""

    def __init__(self, model: MaskedDiffusionModel, forward: Forward | None = None) -> None:
        self.model = model
        self._forward = forward or model.decoder.forward

    def generate(self, prompt: Sequence[int], length: int, params: Unmasking) -> BlockRun:
        """Returns the run that writes up to `length` tokens after a prompt.

        Raises:
            InvalidParameter: the length is not positive, or the prompt has masked places.
            ContextLengthExceeded: the model has fewer positions than both need.
        """
        if length < 1:
            raise InvalidParameter("length", f"length is {length}; accepted: 1 or more.")
        if self.model.mask_token_id in prompt:
            raise InvalidParameter("prompt", "the prompt has masked places: fill those, or write after a prompt.")
        self._check_fit(len(prompt) + length)
        places = range(len(prompt), len(prompt) + length)
        return BlockRun(self.model, self._forward, list(enumerate(prompt)), places, params, stops=True)

    def infill(self, text: Sequence[int], params: Unmasking) -> BlockRun:
        """Returns the run that fills the mask tokens of a text, each by one token.

        Raises:
            InvalidParameter: the text has none.
            ContextLengthExceeded: the model has fewer positions than the text.
        """
        mask = self.model.mask_token_id
        places = [at for at, token in enumerate(text) if token == mask]
        if not places:
            raise InvalidParameter("text", f"the text has no masked place; write {self.model.mask!r} for each.")
        self._check_fit(len(text))
        known = [(at, token) for at, token in enumerate(text) if token != mask]
        return BlockRun(self.model, self._forward, known, places, params, stops=False)

    def _check_fit(self, tokens: int) -> None:
        limit = self.model.decoder.spec.max_position_embeddings
        if tokens > limit:
            raise ContextLengthExceeded(f"the text would have {tokens} tokens; this model accepts at most {limit}.")
