"""Fills a text: masks written as characters in it, or an answer behind it. The command line and the server share it.

Knows nothing of passes, which `block_decoder` runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.diffusion.block_decoder import BlockDiffusion, BlockRun, UnmaskStep
from engine.diffusion.checkpoint import MaskedDiffusionModel
from engine.diffusion.unmasking import Unmasking
from engine.errors import InvalidParameter
from engine.model.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class DiffuseRequest:
    """A text and the ways of unmasking, as a person gives them. None is the model's own, or as in `Unmasking`."""

    text: str
    length: int | None = None  # tokens of an answer at most
    block_size: int | None = None  # None: the largest that the model was trained with
    tokens_per_step: int | None = None
    threshold: float | None = None
    temperature: float = 0.0
    seed: int = 0

    def start(self, model: MaskedDiffusionModel) -> BlockRun:
        """Returns the run: it fills the text's masks, or, where there are none, goes on after the text's end.

        Raises:
            InvalidParameter: there is a `length` and a mask, or a value is out of range.
            ContextLengthExceeded: the text is too long.
        """
        size = max(model.block_sizes) if self.block_size is None else self.block_size
        params = Unmasking(size, self.tokens_per_step, self.threshold, self.temperature, self.seed)
        tokens, diffusion = model.tokenizer.encode(self.text), BlockDiffusion(model)
        if model.mask_token_id not in tokens:
            return diffusion.generate(tokens, model.answer_tokens if self.length is None else self.length, params)
        if self.length is not None:
            message = f"length is for a text without {model.mask!r}: a gap has the length it has."
            raise InvalidParameter("length", message)
        return diffusion.infill(tokens, params)


def shown_text(model: MaskedDiffusionModel, run: BlockRun) -> str:
    """Returns the text so far, with a mask for each place that is not filled. Ends before it are left out."""
    return model.tokenizer.decode(token for token in run.text if token not in model.eos_token_ids)


def shown_places(model: MaskedDiffusionModel, run: BlockRun) -> list[str | None]:
    """Returns each place's text, by position; None where it is masked. A character of several known tokens stands at
    the last of them."""
    places: list[str | None] = []
    detokenizer = Detokenizer(model.tokenizer, skip_special=False)
    for token in run.text:
        if token != model.mask_token_id:
            places.append(detokenizer.push([token]))
            continue
        if places and places[-1] is not None:
            places[-1] += detokenizer.flush()
        places.append(None)
    if places and places[-1] is not None:
        places[-1] += detokenizer.flush()
    return places


def step_json(model: MaskedDiffusionModel, run: BlockRun, step: UnmaskStep) -> dict[str, Any]:
    """Returns a pass of `run` as JSON (so Any), and the text after it."""
    return {
        "pass": step.step,
        "positions": list(step.positions),
        "tokens": [model.tokenizer.token_text(token) for token in step.tokens],
        "confidences": [round(each, 4) for each in step.confidences],
        "text": shown_text(model, run),
    }
