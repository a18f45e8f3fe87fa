"""`ponder quantize`: reads the calibration text, quantises by one method or all, and shows what it cost.

Text becomes sequences of tokens here; the engine knows nothing of files of text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from app.config import BadSetting
from engine.errors import ChatTemplateError, InvalidParameter
from engine.model.loader import name_of, resolve
from engine.model.quantization.divergence import check_texts, measure
from engine.model.quantization.quantize import METHODS, Form, LayerDone, Method, Recipe, open_source, quantize
from engine.model.tokenizer import Tokenizer

GROUP = 32
HELD_OUT = 5  # every so many-th text is measured on, where no other file is given
TEXT_FILES = (".txt", ".md")
ACCEPTED = (
    "a JSON object with messages (a chat's, as in a request) and where need be tools and chat_template_kwargs, or with "
    "text alone"
)
Texts = list[list[int]]


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """The command's options; None stands for a default that depends on others."""

    model: str
    text: Path
    to: Form | None
    method: Method | None
    group: int | None
    act_order: bool | None
    out: Path | None
    held_out: Path | None
    samples: int
    length: int
    resume: bool
    overwrite: bool
    compare: bool

    def recipes(self) -> list[Recipe]:
        """Returns the recipes to run.

        Raises:
            BadSetting: options exclude each other.
            InvalidParameter: there is no such combination.
        """
        if self.resume and self.overwrite:
            raise BadSetting("--resume and --overwrite exclude each other: go on, or begin again.")
        if self.compare:
            if self.method is not None or self.act_order is not None:
                raise BadSetting("--compare tries all methods; leave out --method and --act-order.")
            forms: tuple[Form, ...] = ("int8", "int4") if self.to is None else (self.to,)
            pairs = [(to, method) for to in forms for method in METHODS if (to, method) != ("int4", "smoothquant")]
            if self.group is not None and "int4" not in forms:
                raise BadSetting("--group is for int4; leave it out.")
            return [self._recipe(to, method, self.group if to == "int4" else None) for to, method in pairs]
        if self.to is None:
            raise BadSetting("--to is missing; accepted: int8, int4, or --compare for both.")
        return [self._recipe(self.to, self.method or ("gptq" if self.to == "int4" else "rtn"), self.group)]

    def _recipe(self, to: Form, method: Method, group: int | None) -> Recipe:
        act_order = method == "gptq" if self.act_order is None else self.act_order
        return Recipe(to, method, GROUP if to == "int4" and group is None else group, act_order)

    def target(self, recipe: Recipe) -> Path:
        """Returns the directory to write a recipe's model to."""
        name, kind = Path(name_of(self.model)).name, f"{recipe.to}-{recipe.method}"
        if self.compare:
            return (self.out or Path(f"{name}-quantized")) / kind
        return self.out or Path(f"{name}-{kind}")


def quantize_and_measure(request: QuantizeRequest, as_json: bool) -> None:
    """Quantises, measures on text that was not calibrated on, and prints a table or JSON.

    Raises:
        BadSetting: an option or the text is not right; the message names the accepted values.
        EngineError: the model cannot be quantised, or the directory not written to.
    """
    source = resolve(request.model)
    recipes = _that_fit(source, request)
    calibration, held_out = _split(request, Tokenizer.load(source))
    check_texts(held_out)
    rows = []
    for recipe in recipes:
        target, began = request.target(recipe), time.monotonic()
        typer.echo(f"{recipe.to}, {recipe.method}: writing {target}", err=True)
        quantize(
            source, target, recipe, calibration, resume=request.resume, overwrite=request.overwrite, done=_tell
        )  # fmt: skip
        seconds = time.monotonic() - began
        typer.echo(f"measuring on {sum(map(len, held_out)):,} tokens …", err=True)
        rows.append(
            {
                **asdict(recipe),
                "directory": str(target),
                "seconds": seconds,
                "calibrated_on": sum(map(len, calibration)),
                "bytes_before": _bytes(source),
                "bytes": _bytes(target),
                **asdict(measure(source, target, held_out)),
            }
        )
    if as_json:
        print(json.dumps({"model": request.model, "results": rows}))
        return
    console = Console(highlight=False)
    if not request.compare:
        console.print(_layers(rows[0]))
    console.print(_results(rows))


def _that_fit(source: Path, request: QuantizeRequest) -> list[Recipe]:
    """Returns the recipes, without a method that --compare asks for and the model has no norms for.

    Raises:
        BadSetting: texts would be longer than the model reads.
        EngineError: the model cannot be quantised so.
    """
    found = list[Recipe]()
    for recipe in request.recipes():
        try:
            positions = open_source(source, recipe).spec.max_position_embeddings  # refused before any text is read
        except InvalidParameter as error:
            if not request.compare or error.name != "method":
                raise
            typer.echo(f"{recipe.to}, {recipe.method} is left out: {error}", err=True)
        else:
            found.append(recipe)
            if request.length > positions:
                raise BadSetting(f"--length is {request.length}; the model has positions for 32 to {positions}.")
    return found


def _tell(layer: LayerDone) -> None:
    powers = ", ".join(f"{name} {power:.2f}" for name, power in layer.scales.items() if power >= 0)
    state = "was done" if layer.resumed else f"{layer.seconds_left:.0f} s left"
    typer.echo(f"  layer {layer.index + 1} of {layer.layers}, {state}{f'; α {powers}' if powers else ''}", err=True)


def _split(request: QuantizeRequest, tokenizer: Tokenizer) -> tuple[Texts, Texts]:
    """Returns the texts to calibrate on and those to measure on, evenly spread over their files."""
    texts = read_texts(request.text, tokenizer, request.length)
    if request.held_out is not None:
        held_out = read_texts(request.held_out, tokenizer, request.length)
    else:
        held_out = texts[HELD_OUT - 1 :: HELD_OUT]
        texts = [text for number, text in enumerate(texts) if number % HELD_OUT != HELD_OUT - 1]
    return _evenly(texts, request.samples), _evenly(held_out, -(-request.samples // (HELD_OUT - 1)))


def _evenly(texts: Texts, most: int) -> Texts:
    return texts if len(texts) <= most else [texts[at * len(texts) // most] for at in range(most)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")  # calls, names and reasoning, which the chat template reads
    role: str = Field(pattern="^(system|developer|user|assistant|tool)$")
    content: StrictStr | list[dict[str, Any]] | None = None  # Any: JSON


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")
    messages: list[_Message] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    text: StrictStr | None = None


def read_texts(path: Path, tokenizer: Tokenizer, length: int) -> Texts:
    """Returns a file's texts as tokens, at most `length` each: a chat's beginning, or all of a text in parts.

    Raises:
        BadSetting: the file cannot be read or is of another kind, or a line is none that the model's chat template
            takes; the message has its number.
    """
    if path.suffix not in (*TEXT_FILES, ".jsonl"):
        raise BadSetting(f"{path} is no text that is read here; accepted: .txt, .md, or .jsonl with {ACCEPTED}.")
    try:
        whole = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"{path} cannot be read: {error}.") from None
    if path.suffix != ".jsonl":
        return _parts(whole, tokenizer, length)
    texts: Texts = []
    for number, line in enumerate(whole.split("\n"), 1):
        if line.strip():
            try:
                texts += _of_line(_Line.model_validate_json(line), tokenizer, length)
            except (ValidationError, _BadLine, ChatTemplateError) as error:
                raise BadSetting(f"{path}, line {number}: {_why(error)}; accepted: {ACCEPTED}.") from None
    return texts


class _BadLine(ValueError):
    pass


def _of_line(line: _Line, tokenizer: Tokenizer, length: int) -> Texts:
    if (line.messages is None) == (line.text is None):
        raise _BadLine("there must be messages or text, one of the two")
    if line.text is not None:
        if line.tools is not None or line.chat_template_kwargs:
            raise _BadLine("tools and chat_template_kwargs are for messages")
        return _parts(line.text, tokenizer, length)
    assert line.messages is not None
    messages = [message.model_dump(exclude_unset=True) for message in line.messages]
    tokens = tokenizer.encode_chat(messages, line.tools or None, line.chat_template_kwargs, add_generation_prompt=False)
    return [tokens[:length]] if len(tokens) > 1 else []


def _parts(text: str, tokenizer: Tokenizer, length: int) -> Texts:
    """Returns a text in parts, each with the prefix of a plain text; a rest of one token is left out."""
    prefix, tokens = tokenizer.encode("", bos=True), tokenizer.encode(text)
    step = length - len(prefix)
    parts = [prefix + tokens[at : at + step] for at in range(0, len(tokens), step)]
    return [part for part in parts if len(part) > 1]


def _why(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error).removesuffix(".")
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where + ': ' if where else ''}{first['msg']}"


def _bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _layers(row: dict[str, Any]) -> Table:  # Any: JSON
    table = Table(box=SIMPLE)
    table.add_column("after layer", justify="right")
    table.add_column("relative error", justify="right")
    for number, error in enumerate(row["layers"], 1):
        table.add_row(str(number), f"{error:.4f}")
    return table


def _results(rows: Sequence[dict[str, Any]]) -> Table:  # Any: JSON
    table = Table(box=SIMPLE)
    table.add_column("weights")
    for name in ("KL, nats", "KL, p99", "same top-1", "perplexity", "MB"):
        table.add_column(name, justify="right")
    first = rows[0]
    table.add_row(
        "as they are, float32", "0", "0", "100.0%", f"{first['perplexity_before']:.3f}", _mb(first["bytes_before"])
    )  # fmt: skip
    for row in rows:
        table.add_row(
            f"{row['to']}, {row['method']}", f"{row['kl_mean']:.5f}", f"{row['kl_p99']:.4f}",
            f"{row['same_top1']:.1%}", f"{row['perplexity']:.3f}", _mb(row["bytes"]),
        )  # fmt: skip
    return table


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"
