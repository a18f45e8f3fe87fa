"""The training loop of a LoRA: batches, schedule, checkpoints, and an estimate of its memory.

A run is a function of its recipe and examples: the batches of an epoch depend on (seed, epoch) alone, and a checkpoint
has the matrices, the moments of AdamW (Loshchilov & Hutter 2019) and the step, so a run that is stopped and resumed
ends with the bits of one that never stopped, on the same machine and number of threads. Knows tokens, not chats.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import CheckpointError, InvalidParameter, TrainingDiverged
from engine.model.adapters.peft_checkpoint import MAX_RANK
from engine.model.finetuning.chat_examples import ChatExample
from engine.model.finetuning.lora_model import LOSS_ROWS, LoraModel, TokenRows
from engine.model.loader import Json
from engine.model.memory import free_bytes, weight_bytes
from engine.model.model_spec import ModelSpec

STATE = "training_state.safetensors"  # of an unfinished run
CHECKPOINT_EVERY_S = 60.0
MAX_NORM = 1.0  # of the gradients
USABLE = 0.9  # of the memory that is free
BASE_BYTES = 256_000_000  # of a run whatever its size
DtypeName = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class LoraRecipe:
    """All that decides a run, but its model and examples. `targets` are ends of projections' names; none means all.

    The learning rate rises over `warmup`, a share of the steps, and falls by a cosine to zero.

    Raises:
        InvalidParameter: a value is out of range; the message says what is accepted.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    learning_rate: float = 2e-4
    epochs: int = 3
    batch_tokens: int = 2048
    warmup: float = 0.05
    seed: int = 0
    dtype: DtypeName = "float32"  # of the frozen weights

    def __post_init__(self) -> None:
        self._check("rank", 1 <= self.rank <= MAX_RANK, f"1 to {MAX_RANK}")
        self._check("alpha", 0 < self.alpha <= 1e4, "above 0, to 10000")
        self._check("learning_rate", 0 < self.learning_rate <= 1, "above 0, to 1")
        self._check("epochs", 1 <= self.epochs <= 1000, "1 to 1000")
        self._check("batch_tokens", 1 <= self.batch_tokens <= 1 << 20, f"1 to {1 << 20}")
        self._check("warmup", 0 <= self.warmup <= 1, "a share from 0 to 1")
        self._check("seed", 0 <= self.seed < 1 << 63, "0 to 2^63 - 1")
        self._check("dtype", self.dtype in ("float32", "bfloat16"), "float32, bfloat16")

    def _check(self, name: str, holds: bool, accepted: str) -> None:
        if not holds:
            raise InvalidParameter(name, f"{name} is {getattr(self, name)}; accepted: {accepted}.")

    @property
    def torch_dtype(self) -> torch.dtype:
        """Returns the number format of the frozen weights."""
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    def share_of_rate(self, step: int, steps: int) -> float:
        """Returns the share of the learning rate at a step, from 0."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


@dataclass(frozen=True, slots=True)
class LossPoint:
    """Mean loss of a learned token, nats: of the batch of `step` (from 1), or of all held-out examples after it."""

    step: int
    loss: float
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """A step that is done. Rates count all tokens that were read; `held_out` is there where it was just measured."""

    step: int
    steps: int
    epoch: int  # from 1
    loss: float
    tokens_per_s: float
    seconds_left: float
    held_out: float | None = None


def batches_of(examples: Sequence[ChatExample], recipe: LoraRecipe) -> list[list[list[int]]]:
    """Returns the steps of each epoch, as places of examples: an epoch has all of them in an order of its own, in
    batches of at most `batch_tokens`, or of a single example."""
    epochs = list[list[list[int]]]()
    for epoch in range(recipe.epochs):
        draw = torch.Generator().manual_seed(_seed_of(recipe.seed, epoch))
        filled, batches = 0, list[list[int]]()
        for at in torch.randperm(len(examples), generator=draw).tolist():
            length = len(examples[at].token_ids)
            if not batches or filled + length > recipe.batch_tokens:
                batches.append([])
                filled = 0
            batches[-1].append(at)
            filled += length
        epochs.append(batches)
    return epochs


def _seed_of(*parts: int) -> int:
    """Returns a seed of 63 bits that depends on all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def training_bytes(path: Path, spec: ModelSpec, recipe: LoraRecipe, longest: int, *, recompute: bool) -> int:
    """Returns about how many bytes a run takes: frozen weights, the adapter with its gradients and moments, and the
    activations of a batch whose longest example has `longest` tokens."""
    tokens, size = max(recipe.batch_tokens, longest), recipe.torch_dtype.itemsize
    widths = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    # norms, residuals and updates of them; projections, heads in a grid, repeated; gate, up, their product
    layer = tokens * (10 * spec.hidden_size + 10 * widths[0] + 4 * widths[1] + 8 * spec.intermediate_size) * size
    # of recomputed layers one is kept, with its gradients, and the inputs of all: about 4 times one, as measured
    kept = 4 * layer + tokens * spec.hidden_size * size * spec.layers if recompute else layer * spec.layers
    inputs = 8 * spec.hidden_size + 2 * (widths[0] + widths[1]) + 3 * spec.intermediate_size
    adapter = 16 * recipe.rank * inputs * spec.layers
    logits = 3 * 4 * spec.vocab_size * (min(LOSS_ROWS, tokens) if recompute else tokens)
    return BASE_BYTES + weight_bytes(path, recipe.torch_dtype) + adapter + kept + logits


def plan_memory(path: Path, spec: ModelSpec, recipe: LoraRecipe, longest: int, device: torch.device) -> bool:
    """Returns whether activations must be recomputed for a run to fit the free memory.

    Raises:
        InvalidParameter: it does not fit either way.
    """
    free = int(free_bytes(device) * USABLE)
    if training_bytes(path, spec, recipe, longest, recompute=False) <= free:
        return False
    needed = training_bytes(path, spec, recipe, longest, recompute=True)
    if needed > free:
        raise InvalidParameter(
            "batch_tokens",
            f"the training takes about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; accepted: fewer "
            "batch_tokens, shorter chats, bfloat16 weights, or a smaller model.",
        )
    return True


class LoraTrainer:
    """A model, the examples it learns and those it is measured on, and the state of the run in the directory `out`.

    `identity` is kept with the state: all that decides the result beside the recipe.
    """

    def __init__(
        self,
        model: LoraModel,
        recipe: LoraRecipe,
        examples: Sequence[ChatExample],
        held_out: Sequence[ChatExample],
        out: Path,
        identity: Json,
    ) -> None:
        self.model, self.recipe, self._examples, self._held_out = model, recipe, examples, held_out
        self._state, self._record = out / STATE, json.dumps({**asdict(recipe), **identity}, sort_keys=True)
        epochs = batches_of(examples, recipe)
        self.batches, self._ends = list(chain(*epochs)), list(accumulate(map(len, epochs)))
        self.losses = list[LossPoint]()
        self.done, self.tokens, self.seconds = 0, 0, 0.0
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)

    @property
    def finished(self) -> bool:
        return self.done == len(self.batches)

    def run(
        self,
        report: Callable[[TrainingProgress], None] = lambda progress: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Trains to the end, or until `stop`, which is asked after each step; saves the state in either case.

        Raises:
            TrainingDiverged: a loss or a gradient is not a finite number. The state before it is as it was saved last.
            CheckpointError: the state cannot be written.
        """
        if not self.losses:
            self._measure()
        saved = time.monotonic()
        while not self.finished:
            began = time.monotonic()
            loss = self._step(self.batches[self.done])
            self.seconds += time.monotonic() - began
            held_out = self._measure() if self.done in self._ends else None
            left = self.seconds / self.done * (len(self.batches) - self.done)
            epoch, rate = 1 + bisect_left(self._ends, self.done), self.tokens / self.seconds
            report(TrainingProgress(self.done, len(self.batches), epoch, loss, rate, left, held_out))
            stopping = stop()
            if stopping or self.finished or time.monotonic() - saved > CHECKPOINT_EVERY_S:
                self.save()
                saved = time.monotonic()
            if stopping:
                return

    def _step(self, batch: Sequence[int]) -> float:
        examples = [self._examples[at] for at in batch]
        rows, learned = _laid_out(examples, self.model.device)
        total = torch.zeros((), device=self.model.device)
        for loss in self.model.losses(rows, learned):
            total = total + loss / len(learned)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        found = float(total.detach())
        if not math.isfinite(found) or not bool(torch.isfinite(norm)):
            raise TrainingDiverged(
                f"the loss of step {self.done + 1} is {found:.4g} and its gradients' norm {float(norm):.4g}, which no "
                f"step can follow; accepted: a learning rate below {self.recipe.learning_rate:g}, or a longer warm-up."
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * self.recipe.share_of_rate(self.done, len(self.batches))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.done += 1
        self.tokens += len(rows.token_ids)
        self.losses.append(LossPoint(self.done, found))
        return found

    def _measure(self) -> float | None:
        """Adds the loss of the held-out examples, if there are any, and returns it."""
        if not self._held_out:
            return None
        found = self.held_out_loss()
        self.losses.append(LossPoint(self.done, found, held_out=True))
        return found

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Returns the mean loss of a learned token of the held-out examples, nats."""
        total, count = 0.0, 0
        order = sorted(self._held_out, key=lambda example: len(example.token_ids))
        while order:
            fit = max(1, self.recipe.batch_tokens // len(order[-1].token_ids))
            rows, learned = _laid_out(order[-fit:], self.model.device)
            order = order[:-fit]
            total += sum(float(loss) for loss in self.model.losses(rows, learned))
            count += len(learned)
        return total / count

    def save(self) -> None:
        """Writes the state, whole or not at all. Raises CheckpointError."""
        tensors = dict[str, Tensor]()
        for at, matrix in enumerate(self.model.parameters()):
            tensors[f"{at}.weight"] = matrix.detach().cpu().contiguous()
            for name, value in self._optimizer.state[matrix].items():
                tensors[f"{at}.{name}"] = torch.as_tensor(value).cpu().contiguous()
        losses = [asdict(point) for point in self.losses]
        progress = {"done": self.done, "tokens": self.tokens, "seconds": self.seconds, "losses": losses}
        part = self._state.with_suffix(".part")
        try:
            self._state.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part, metadata={"record": self._record, "progress": json.dumps(progress)})
            part.replace(self._state)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{part} cannot be written: {error}.") from None

    def resume(self) -> None:
        """Goes on from the saved state.

        Raises:
            CheckpointError: there is none, it is damaged, or of another recipe or other examples.
        """
        if not self._state.is_file():
            raise CheckpointError(f"{self._state} is not there, so there is no run to go on with; leave out --resume.")
        try:
            with safe_open(self._state, framework="pt") as file:
                metadata = file.metadata()
                self._check(metadata["record"])
                progress = json.loads(metadata["progress"])
                for at, matrix in enumerate(self.model.parameters()):
                    with torch.no_grad():
                        matrix.copy_(file.get_tensor(f"{at}.weight"))
                    if progress["done"]:
                        self._optimizer.state[matrix] = {
                            name: file.get_tensor(f"{at}.{name}").to("cpu" if name == "step" else matrix.device)
                            for name in ("step", "exp_avg", "exp_avg_sq")
                        }
            self.losses = [LossPoint(**point) for point in progress["losses"]]
            self.done, self.tokens, self.seconds = progress["done"], progress["tokens"], progress["seconds"]
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self._state} is damaged ({error}); begin again in another directory.") from None

    def _check(self, record: str) -> None:
        kept, now = json.loads(record), json.loads(self._record)
        differs = [f"{name} {kept.get(name)} (now {now[name]})" for name in now if kept.get(name) != now[name]]
        if differs:
            raise CheckpointError(
                f"{self._state} was begun with {', '.join(differs)}; accepted: the same again, or another directory."
            )


def _laid_out(examples: Sequence[ChatExample], device: torch.device) -> tuple[TokenRows, Tensor]:
    """Returns examples as rows, and the places of their learned tokens."""
    learned, first = list[int](), 0
    for example in examples:
        learned += [first + at for at in example.learned]
        first += len(example.token_ids)
    return TokenRows.of([example.token_ids for example in examples], device), torch.tensor(learned, device=device)


def identity_of(model: bytes, examples: Sequence[ChatExample], held_out: Sequence[ChatExample]) -> Json:
    """Returns what a run's state is kept with: `model` is `snapshot.fingerprint`'s, and digests stand for examples."""
    digests = (
        hashlib.sha256(repr([(each.token_ids, each.turns) for each in some]).encode()).hexdigest()[:32]
        for some in (examples, held_out)
    )
    return {"model": model.hex(), **dict(zip(("examples", "held_out"), digests, strict=True))}
