"""`ponder train-lora`: reads chats, trains an adapter, and measures it on chats that were held out.

Ctrl-C ends a run after its step; `--resume` goes on. The command's options are the recipe's and the data's; the loop is
the engine's (`engine.model.finetuning`).
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from app.cli.weights.chat_data import LearnedChat, read_chats, split, within
from app.cli.weights.training_report import CARD, PICTURE, RECORD, ComparedAnswer, TrainingReport
from app.config import BadSetting
from engine import GREEDY, Engine, EngineConfig, Span
from engine.families import family_of
from engine.kv_cache.snapshot import fingerprint
from engine.model.adapters.peft_checkpoint import CONFIG, WEIGHTS, save_adapter
from engine.model.finetuning.chat_examples import ChatExample
from engine.model.finetuning.lora_model import LoraModel, trainable_projections
from engine.model.finetuning.lora_trainer import (
    STATE,
    LoraRecipe,
    LoraTrainer,
    TrainingProgress,
    identity_of,
    plan_memory,
)
from engine.model.loader import name_of, resolve
from engine.model.memory import find_device
from engine.model.quantization.checkpoint import read_config
from engine.model.tokenizer import Tokenizer

DEFAULT_LENGTH = 2048  # tokens of a chat, where the model takes as many
MAX_ANSWER = 512  # tokens of an answer that is compared
MAX_QUESTION = 100  # tokens of its prompt that are shown
SHOW_EVERY = 10  # steps
ADAPTER = "trained"
PROBE = ".writable"
_OURS = {STATE, CONFIG, WEIGHTS, CARD, PICTURE, RECORD}


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """The command's options. `length` None stands for a default that depends on the model."""

    model: str
    data: Path
    out: Path
    recipe: LoraRecipe
    eval_data: Path | None
    eval_share: float
    length: int | None
    samples: int
    device: str
    resume: bool


@dataclass(frozen=True, slots=True)
class _Data:
    learned: list[ChatExample]
    held_out: list[ChatExample]
    counts: dict[str, int]


def train_lora(request: TrainingRequest, as_json: bool) -> None:
    """Trains, writes the adapter and its report into `request.out`, and prints where; `as_json`: the figures instead.

    Raises:
        BadSetting: an option or the data are not right; the message names the accepted values.
        EngineError: the model cannot be trained, does not fit, or the run diverged.
        typer.Exit: 130, after Ctrl-C; the state is saved.
    """
    source, recipe = resolve(request.model), request.recipe
    config = read_config(source)
    family = family_of(config)
    spec, names = family.spec(config), family.names(config)
    targets = trainable_projections(spec, names, recipe.targets)
    device = find_device(request.device)
    _check_directory(request)
    data = _read(request, Tokenizer.load(source), spec.max_position_embeddings)
    longest = max(len(each.token_ids) for each in (*data.learned, *data.held_out))
    recompute = plan_memory(source, spec, recipe, longest, device)
    if recompute:
        typer.echo("activations are computed twice, as all of them do not fit the memory that is free", err=True)
    model = LoraModel(
        source, rank=recipe.rank, alpha=recipe.alpha, targets=recipe.targets, seed=recipe.seed,
        dtype=recipe.torch_dtype, device=device, recompute=recompute,
    )  # fmt: skip
    identity = identity_of(fingerprint(source), data.learned, data.held_out)
    trainer = LoraTrainer(model, recipe, data.learned, data.held_out, request.out, identity)
    if request.resume:
        trainer.resume()
    _make_directory(request.out)
    counts = data.counts
    numbers = sum(matrix.numel() for matrix in model.parameters())
    typer.echo(
        f"{counts['learned']} chats to learn, {counts['held out']} held out, {counts['too long']} left out as too "
        f"long; {numbers:,} numbers in {len(targets)} projections; {len(trainer.batches)} steps from {trainer.done}",
        err=True,
    )
    with _stopping() as stopped:
        trainer.run(_tell, lambda: bool(stopped))
    if not trainer.finished:
        typer.echo(
            f"stopped after step {trainer.done} of {len(trainer.batches)}; --resume goes on from there", err=True
        )
        raise typer.Exit(130)
    pairs = {name: (pair.a, pair.b) for name, pair in model.pairs.items()}
    ends = recipe.targets or sorted({name.rpartition(".")[2] for name in targets})
    save_adapter(request.out, pairs, names, alpha=recipe.alpha, targets=ends, base=request.model)
    tokens, seconds, losses = trainer.tokens, trainer.seconds, trainer.losses
    del trainer, model, pairs  # the engine loads the model again
    answers = asyncio.run(_compare(request, source, data.held_out)) if request.samples and data.held_out else []
    report = TrainingReport(
        request.model, request.data.name, recipe, counts, tokens, seconds, losses, answers
    )  # fmt: skip
    report.write(request.out)
    (request.out / STATE).unlink(missing_ok=True)
    _show(report, request, as_json)


def _check_directory(request: TrainingRequest) -> None:
    """Refuses a directory that another run, or anything else, has written to. Raises BadSetting."""
    out = request.out
    if out.exists() and not out.is_dir():
        raise BadSetting(f"{out} is a file; give a directory to write the adapter to.")
    there = {each.name for each in out.iterdir()} if out.is_dir() else set()
    if request.resume and there - _OURS:
        raise BadSetting(f"{out} has {min(there - _OURS)}, which `ponder train-lora` did not write; give another one.")
    if not request.resume and there:
        hint = ", or --resume to go on with the run that was stopped" if STATE in there else ""
        raise BadSetting(f"{out} is not empty; give another directory{hint}.")


def _make_directory(out: Path) -> None:
    """Makes the directory before the training, which would be lost without it. Raises BadSetting."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / PROBE).touch()
        (out / PROBE).unlink()
    except OSError as error:
        raise BadSetting(f"{out} cannot be written to: {error}; give another directory.") from None


def _read(request: TrainingRequest, tokenizer: Tokenizer, positions: int) -> _Data:
    length = min(DEFAULT_LENGTH, positions) if request.length is None else request.length
    if length > positions:
        raise BadSetting(f"--length is {length}; the model has positions for 2 to {positions}.")
    chats = read_chats(request.data, tokenizer)
    short = within(chats, length)
    if request.eval_data is not None:
        others = read_chats(request.eval_data, tokenizer)
        learned, held_out = short, within(others, length)
        known = {chat.examples for chat in learned}
        if both := next((chat.line for chat in held_out if chat.examples in known), None):
            raise BadSetting(
                f"{request.eval_data}, line {both} is a chat of --data, too; accepted: chats that are not learned."
            )
        chats = [*chats, *others]
    else:
        if not short:
            raise BadSetting(_too_long(chats, length))
        learned, held_out = split(short, request.eval_share, request.recipe.seed)
    if not learned or (request.eval_data is not None and not held_out):
        raise BadSetting(_too_long(chats, length))
    counts = {"learned": len(learned), "held out": len(held_out)}
    counts["too long"] = len(chats) - len(learned) - len(held_out)
    return _Data(_flat(learned), _flat(held_out), counts)


def _too_long(chats: Sequence[LearnedChat], length: int) -> str:
    shortest = min(chat.longest for chat in chats)
    return f"No chat has at most --length {length} tokens; the shortest has {shortest}. Accepted: a larger --length."


def _flat(chats: Sequence[LearnedChat]) -> list[ChatExample]:
    return [example for chat in chats for example in chat.examples]


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """Gives a list that gets the first signal to stop; a second one interrupts."""
    told = list[int]()

    def tell(number: int, _: object) -> None:
        if told:
            raise KeyboardInterrupt
        told.append(number)
        typer.echo("stopping after this step; once more to stop at once", err=True)

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(progress: TrainingProgress) -> None:
    if progress.step % SHOW_EVERY and progress.held_out is None and progress.step > 1:
        return
    held_out = "" if progress.held_out is None else f", held out {progress.held_out:.4f}"
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    typer.echo(
        f"  step {progress.step} of {progress.steps}, epoch {progress.epoch}: loss {progress.loss:.4f}{held_out}, "
        f"{progress.tokens_per_s:,.0f} tokens/s, {minutes}:{seconds:02} left",
        err=True,
    )


async def _compare(request: TrainingRequest, source: Path, held_out: Sequence[ChatExample]) -> list[ComparedAnswer]:
    """Answers held-out turns by the engine, greedily, without and with the adapter as it was saved."""
    turns = [(example, at) for example in held_out for at in range(len(example.turns))]
    if len(turns) > request.samples:
        turns = [turns[at * len(turns) // request.samples] for at in range(request.samples)]
    typer.echo(f"answering {len(turns)} held-out turns, before and after …", err=True)
    config = EngineConfig(model=str(source), device=request.device, adapters=((ADAPTER, str(request.out)),))
    async with await Engine.start(config) as engine:
        stops = set(engine.tokenizer.eos_token_ids)

        def text(ids: Sequence[int]) -> str:
            return engine.tokenizer.decode([each for each in ids if each not in stops], skip_special=False).strip()

        async def answer(prompt: list[int], tokens: int, adapter: str | None) -> str:
            async with await engine.open(prompt, adapter=adapter) as sequence:
                result = await sequence.generate_all(Span(GREEDY, max_tokens=tokens))
            return text(result.token_ids)

        async def compared(example: ChatExample, turn: int) -> ComparedAnswer:
            prompt, wanted = example.prompt(turn), example.completion(turn)
            room = engine.max_model_len - len(prompt)
            tokens = max(1, min(room, MAX_ANSWER, 2 * len(wanted) + 32))
            before, after = await asyncio.gather(*(answer(prompt, tokens, each) for each in (None, ADAPTER)))
            question = engine.tokenizer.decode(prompt[-MAX_QUESTION:])
            return ComparedAnswer(question, text(wanted), before, after)

        return list(await asyncio.gather(*(compared(example, turn) for example, turn in turns)))


def _show(report: TrainingReport, request: TrainingRequest, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.as_json()))
        return
    if report.held_out:
        typer.echo(f"held-out loss {report.held_out[0]:.4f} before, {report.held_out[-1]:.4f} after")
    if report.answers:
        before, after = report.exact()
        typer.echo(f"exactly the wanted answer, of {len(report.answers)}: {before} before, {after} after")
    name = Path(name_of(str(request.out))).name
    typer.echo(f"ponder serve --model {request.model} --lora {name}={request.out}")
