"""`ponder diffuse`: fills gaps, or answers after a prompt, with a masked-diffusion model; no server.

Every pass of the model fills some places, in any order. On a terminal the line is written over after each.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import torch
import typer

from engine.diffusion import BlockDiffusion, BlockRun, MaskedDiffusionModel, Unmasking, load_masked_diffusion


@dataclass(frozen=True, slots=True)
class DiffuseRequest:
    """Options of the command, as given."""

    text: str
    model: str
    length: int | None
    block_size: int | None
    tokens_per_step: int | None
    threshold: float | None
    temperature: float
    seed: int
    device: str


def diffuse(request: DiffuseRequest, show_passes: bool, as_json: bool) -> None:
    """Runs the command.

    Raises:
        EngineError: the model cannot be read, or a value is out of range.
    """
    torch.set_num_threads(1)  # such models are small: a second thread waits longer than it helps
    model = load_masked_diffusion(request.model, device=request.device)
    size = max(model.block_sizes) if request.block_size is None else request.block_size
    params = Unmasking(size, request.tokens_per_step, request.threshold, request.temperature, request.seed)
    run = start(model, request.text, request.length, params)
    over = not (show_passes or as_json) and sys.stdout.isatty()
    for step in run:
        shown = shown_text(model, run)
        if as_json:
            tokens = [model.tokenizer.token_text(token) for token in step.tokens]
            confidences = [round(each, 4) for each in step.confidences]
            fields = {"pass": step.step, "positions": step.positions, "tokens": tokens, "confidences": confidences}
            typer.echo(json.dumps({**fields, "text": shown}))
        elif show_passes:
            typer.echo(f"{step.step:4}  {shown}")
        elif over:
            typer.echo(f"\r{shown}\x1b[K", nl=False)
    answer = model.tokenizer.decode(run.answer)
    if as_json:
        typer.echo(json.dumps({"answer": answer, "passes": run.passes}))
    elif not show_passes:
        typer.echo(f"\r{shown_text(model, run)}\x1b[K" if over else shown_text(model, run))


def start(model: MaskedDiffusionModel, text: str, length: int | None, params: Unmasking) -> BlockRun:
    """Returns the run for a text: its masks are filled, or, where it has none, it goes on after its end.

    Raises:
        InvalidParameter: there is a `length` and a gap, or a value is out of range.
        ContextLengthExceeded: the text is too long.
    """
    from engine.errors import InvalidParameter

    tokens, diffusion = model.tokenizer.encode(text), BlockDiffusion(model)
    if model.mask_token_id not in tokens:
        return diffusion.generate(tokens, model.answer_tokens if length is None else length, params)
    if length is not None:
        raise InvalidParameter("length", f"length is for a text without {model.mask!r}: a gap has the length it has.")
    return diffusion.infill(tokens, params)


def shown_text(model: MaskedDiffusionModel, run: BlockRun) -> str:
    """Returns the text so far, with a mask for each place that is not filled. Ends before it are left out."""
    return model.tokenizer.decode(token for token in run.text if token not in model.eos_token_ids)
