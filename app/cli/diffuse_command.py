"""`ponder diffuse`: fills gaps, or answers after a prompt, with a masked-diffusion model; no server.

Every pass of the model fills some places, in any order. On a terminal the line is written over after each, and control
characters that a model writes are replaced.
"""

from __future__ import annotations

import json
import sys

import torch
import typer

from app.cli.errors import printable
from engine.diffusion import DiffuseRequest, load_masked_diffusion, shown_text, step_json


def diffuse(model: str, device: str, request: DiffuseRequest, show_passes: bool, as_json: bool) -> None:
    """Runs the command.

    Raises:
        EngineError: the model cannot be read, or a value is out of range.
    """
    torch.set_num_threads(1)  # such models are small: a second thread waits longer than it helps
    loaded = load_masked_diffusion(model, device=device)
    run = request.start(loaded)
    terminal = sys.stdout.isatty()
    over = terminal and not (show_passes or as_json)

    def shown(keep: str = "") -> str:
        text = shown_text(loaded, run)
        return printable(text, keep) if terminal else text

    for step in run:
        if as_json:
            typer.echo(json.dumps(step_json(loaded, run, step)))
        elif show_passes:
            typer.echo(f"{step.step:4}  {shown()}")
        elif over:
            typer.echo(f"\r{shown()}\x1b[K", nl=False)
    if as_json:
        typer.echo(json.dumps({"answer": loaded.tokenizer.decode(run.answer), "passes": run.passes}))
    elif not show_passes:
        whole = shown("\n\t")
        typer.echo(f"\r{whole}\x1b[K" if over else whole)
