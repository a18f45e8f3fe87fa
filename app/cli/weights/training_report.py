"""The report beside a trained adapter: README.md with the losses, a picture of them, and answers before and after.

The picture is SVG written by hand, as matplotlib comes with the development tools alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from math import exp
from pathlib import Path
from typing import Any

from app.config import BadSetting
from engine.model.finetuning.lora_trainer import LoraRecipe, LossPoint

PICTURE, RECORD, CARD = "loss.svg", "training.json", "README.md"
SHOWN = 5  # answers in the card
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 320, 56, 40  # pixels
LEARNED, HELD_OUT = "#2f5d50", "#b4552d"


@dataclass(frozen=True, slots=True)
class ComparedAnswer:
    """A held-out turn: the question before it, the answer wanted, and those without and with the adapter, greedily."""

    question: str
    wanted: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """All that the report tells. `counts` has chats learned, held out, and left out as too long."""

    model: str
    data: str
    recipe: LoraRecipe
    counts: Mapping[str, int]
    tokens: int
    seconds: float
    losses: Sequence[LossPoint]
    answers: Sequence[ComparedAnswer]

    @property
    def held_out(self) -> list[float]:
        """Returns the held-out losses, from before the first step on."""
        return [point.loss for point in self.losses if point.held_out]

    def exact(self) -> tuple[int, int]:
        """Returns the answers that are exactly the wanted ones, before and after."""
        before = sum(each.before == each.wanted for each in self.answers)
        return before, sum(each.after == each.wanted for each in self.answers)

    def as_json(self) -> dict[str, Any]:
        """Returns the figures, for programs."""
        before, after = self.exact()
        return {
            "model": self.model,
            "data": self.data,
            "recipe": asdict(self.recipe),
            "chats": dict(self.counts),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "held_out_loss": {"before": self.held_out[0], "after": self.held_out[-1]} if self.held_out else None,
            "exact": {"answers": len(self.answers), "before": before, "after": after},
            "losses": [asdict(point) for point in self.losses],
        }

    def write(self, out: Path) -> None:
        """Writes the card, the picture and the figures. Raises BadSetting."""
        figures = json.dumps(self.as_json(), indent=1) + "\n"
        try:
            for name, text in ((PICTURE, loss_picture(self.losses)), (RECORD, figures), (CARD, self.card(out.name))):
                (out / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise BadSetting(f"{out} cannot be written to: {error}; the adapter itself is there.") from None

    def card(self, name: str) -> str:
        """Returns the model card, Markdown."""
        recipe, counts = self.recipe, self.counts
        epochs = "1 epoch" if recipe.epochs == 1 else f"{recipe.epochs} epochs"
        targets = ", ".join(recipe.targets) or "all projections that adapters may change"
        left_out = f", {counts['too long']} left out as too long" if counts["too long"] else ""
        return "\n".join([
            "---", "library_name: peft", f"base_model: {json.dumps(self.model)}", "---", "", f"# {name}", "",
            f"A LoRA adapter of {self.model}, trained by `ponder train-lora`. Serve it with "
            f"`ponder serve --model {self.model} --lora {name}=DIR`.", "",
            *self._results(),
            "## How it was made", "",
            f"- **Data**: {self.data}, {counts['learned']} chats learned and {counts['held out']} held out{left_out}; "
            "loss on the assistant's tokens alone.",
            f"- **Adapter**: rank {recipe.rank}, alpha {recipe.alpha:g}, of {targets}; weights in {recipe.dtype}.",
            f"- **Recipe**: {epochs} in batches of up to {recipe.batch_tokens:,} tokens, AdamW at "
            f"{recipe.learning_rate:g} with a warm-up of {recipe.warmup:.0%} and a cosine to zero, seed {recipe.seed}.",
            f"- **Time**: {self.tokens:,} tokens in {self.seconds:.0f} seconds.", "",
            f"![the loss over the steps]({PICTURE})", "",
            *self._samples(),
        ])  # fmt: skip

    def _results(self) -> list[str]:
        if not self.held_out:
            return []
        (before, after), (right, wins) = (self.held_out[0], self.held_out[-1]), self.exact()
        rows = [
            "## On held-out chats", "", "| | before | after |", "|---|---|---|",
            f"| loss of a token, nats | {before:.4f} | {after:.4f} |",
            f"| perplexity | {_perplexity(before)} | {_perplexity(after)} |",
        ]  # fmt: skip
        if self.answers:
            rows.append(f"| exactly the wanted answer, of {len(self.answers)} | {right} | {wins} |")
        return [*rows, ""]

    def _samples(self) -> list[str]:
        if not self.answers:
            return []
        lines = ["## Held-out answers", ""]
        for each in self.answers[:SHOWN]:
            lines += [
                f"> {_one_line(each.question)}", "", f"- wanted: {_code(each.wanted)}",
                f"- before: {_code(each.before)}", f"- after: {_code(each.after)}", "",
            ]  # fmt: skip
        return lines


def _perplexity(loss: float) -> str:
    return f"{exp(loss):.3f}" if loss < 20 else f"e^{loss:.1f}"


def _one_line(text: str, most: int = 200) -> str:
    line = " ".join(text.split())
    return escape(line if len(line) <= most else f"{line[:most]}…", quote=False)


def _code(text: str) -> str:
    line = " ".join(text.split()).replace("`", "'")
    return f"`{line if len(line) <= 200 else line[:200] + '…'}`" if line else "nothing"


def loss_picture(losses: Sequence[LossPoint]) -> str:
    """Returns the losses over the steps as SVG: a line of the batches, and one with marks of the held-out chats."""
    steps, top = max(point.step for point in losses), max(point.loss for point in losses) * 1.05 or 1.0

    def place(point: LossPoint) -> tuple[float, float]:
        x = LEFT + point.step / max(1, steps) * (WIDTH - LEFT - 16)
        return round(x, 1), round(HEIGHT - BOTTOM - point.loss / top * (HEIGHT - BOTTOM - 28), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="11">',
        "<title>Loss of a learned token, nats</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for at in range(5):
        value = top * at / 4
        _, y = place(LossPoint(0, value))
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.3g}</text>')
    for step in dict.fromkeys(round(steps * at / 4) for at in range(5)):
        x, _ = place(LossPoint(step, 0.0))
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>')
    for held_out, colour, name in ((False, LEARNED, "batches"), (True, HELD_OUT, "held out")):
        points = [place(point) for point in losses if point.held_out == held_out]
        if points:
            joined = " ".join(f"{x},{y}" for x, y in points)
            parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points if held_out]
            x = WIDTH - 150 + 70 * held_out
            parts.append(f'<text x="{x}" y="16" fill="{colour}">{name}</text>')
    parts.append(f'<text x="{LEFT}" y="16">loss, nats</text>')
    parts.append(f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">steps</text>')
    return "\n".join([*parts, "</svg>", ""])
