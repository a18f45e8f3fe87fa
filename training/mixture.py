"""The training mixture: conversations mixed from all tasks, cut into batches of one length.

Everything is a function of (seed, step): a resumed run reads on exactly where it stopped. `SHARES` are shares of the
tokens, so a task with long prompts is sampled less often; they move from finding and copying to the rest. Every task
grows from short and easy to its full range; each conversation samples its own difficulty, up to the `progress` (0 to 1)
of the run, at first more often low than high, as short conversations hold more decisions for their tokens, and in the
end evenly. The assistant's text is learned in full; of the text that it reads a few tokens are learned too, so that the
model also learns to read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain, groupby
from multiprocessing import get_context
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training import procedural
from training.alignment import NOWHERE, ROLES, Alignment, Label, ReadTokens, Span, align, labels
from training.conversation import Conversation, Phrasing
from training.tasks import (
    arithmetic,
    calculator,
    chat,
    countdown,
    database,
    grounded,
    joint,
    lookup,
    relevance,
    tool_choice,
)
from training.team import ALONE, Team
from training.torch_model import TrainingBatch
from training.train_tokenizer import END_OF_TEXT, TURN_START, segments, token_id

PROMPT_SHARE, PROMPT_WEIGHT = 0.25, 0.06  # a quarter of the read tokens, at a small weight: 0.015 on average
DECISION_WEIGHT = 4.0  # loss weight of a token that decides; those that follow from it are eight times as many
PROCEDURAL = (0.2, 0.05)  # share of the tokens at the beginning and at the end of the curriculum
MAX_LENGTH = 2048  # tokens; a longer conversation is not trained on

_WORD = re.compile(r"<[|/]?\w+\|?>|[^\W_]+")

TASKS: dict[str, Callable[[Random, Phrasing, float], Conversation]] = {
    "lookup": lookup.conversation,
    "grounded": grounded.conversation,
    "relevance": relevance.conversation,
    "tool choice": tool_choice.conversation,
    "countdown": countdown.conversation,
    "chat": chat.conversation,
    "calculator": calculator.conversation,
    "joint": joint.conversation,
    "database": database.conversation,
    "arithmetic": arithmetic.conversation,
}
SHARES = {  # at the beginning and at the end of the curriculum
    "lookup": (50, 4),
    "grounded": (20, 24),
    "relevance": (6, 7),
    "tool choice": (10, 22),
    "countdown": (5, 15),
    "chat": (4, 8),
    "calculator": (2, 8),
    "joint": (2, 6),
    "database": (0, 5),
    "arithmetic": (1, 1),
}


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """The tokens of a conversation, the loss weight of each, and where each is to look."""

    tokens: list[int]
    weights: list[float]
    alignment: Alignment


_Lengths = dict[tuple[str, int], float]
_lengths: _Lengths = {}


def _length(task: str, tenth: int) -> float:
    """Returns the mean characters of a conversation of `task` at `tenth` tenths of the curriculum."""
    if (task, tenth) not in _lengths:
        rng = Random(f"length-{task}-{tenth}")
        sampled = (TASKS[task](rng, "train", tenth / 10) for _ in range(30))
        _lengths[task, tenth] = sum(len(text) for made in sampled for text, _ in segments(made)) / 30
    return _lengths[task, tenth]


def conversation(
    rng: Random,
    difficulty: float,
    phrasing: Phrasing = "train",
    *,
    progress: float | None = None,
    tasks: Sequence[str] = (),
) -> Conversation:
    """Samples a conversation of a task chosen so that tokens come in the `shares` at `progress`, `difficulty` by
    default. Both are 0 to 1."""
    of_tasks = shares(difficulty if progress is None else progress, tasks)
    weights = [share / _length(task, round(difficulty * 10)) for task, share in of_tasks.items()]
    return TASKS[rng.choices(tuple(of_tasks), weights)[0]](rng, phrasing, difficulty)


def shares(progress: float, tasks: Sequence[str] = ()) -> dict[str, float]:
    """Returns the share of each task at `progress` (0 to 1), of all of them or of `tasks` alone.

    Raises ValueError for a task that the mixture does not have.
    """
    if unknown := set(tasks) - SHARES.keys():
        raise ValueError(f"The mixture has no task {', '.join(sorted(unknown))}; it has {', '.join(SHARES)}.")
    return {
        task: first + (last - first) * progress for task, (first, last) in SHARES.items() if not tasks or task in tasks
    }


def procedural_share(progress: float) -> float:
    """Returns the share of procedural sequences at `progress` (0 to 1)."""
    first, last = PROCEDURAL
    return first + (last - first) * progress


@lru_cache(maxsize=4)
def _spelling(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns for each token the one without the space before it, and its number of letters and digits."""
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.get_vocab_size())]
    first = {text: token for token, text in reversed(list(enumerate(texts)))}
    return [first.get(text.removeprefix(" "), at) for at, text in enumerate(texts)], [
        sum(map(str.isalnum, text)) for text in texts
    ]


def _procedural_row(rng: Random, progress: float, tokenizer: Tokenizer) -> TrainingRow:
    ids, weights = procedural.row(rng, tokenizer.get_vocab_size(), progress)
    answers, begin = list[Span](), 0
    for learned, part in groupby(range(len(ids)), lambda at: weights[at] > 0):
        end = begin + len(list(part))
        answers += [(begin, end)] if learned else []
        begin = end
    letters = _spelling(tokenizer)[1]
    nothing = [0] * len(ids)
    text = ReadTokens(
        ids, [letters[token] for token in ids], nothing, [None] * len(ids), answers, [(0, 0)] * len(answers)
    )
    return TrainingRow(ids, weights, align(text))


def row(rng: Random, made: Conversation, tokenizer: Tokenizer) -> TrainingRow:
    """Returns a conversation as it is trained on."""
    return row_of(rng, segments(made), tokenizer)


def row_of(rng: Random, parts: Iterable[tuple[str, bool]], tokenizer: Tokenizer) -> TrainingRow:
    """Returns the parts of a conversation, as `segments` has them, as they are trained on."""
    ids, weights, words, near = list[int](), list[float](), list[int](), list[Label | None]()
    answers, questions, question = list[Span](), list[Span](), (0, 0)
    for text, written in parts:
        part, begin = tokenizer.encode(text, add_special_tokens=False), len(ids)
        near += labels(text, part.offsets, begin, near[-1] if near else None)
        words += _words(text, part.offsets)
        ids += part.ids
        weights += [1.0 if written else PROMPT_WEIGHT * (rng.random() < PROMPT_SHARE) for _ in part.ids]
        if written:
            answers.append((begin, len(ids)))
            questions.append(question)
        else:  # read before an answer, or an answer that is not learned, which has no turn's start in it
            turn = text.rfind(TURN_START)
            left = text.rfind(TURN_START, 0, max(0, turn))
            inside = [at for at, (first, _) in enumerate(part.offsets, begin) if left < first < turn]
            question = (inside[0], inside[-1] + 1) if inside else (begin, begin)
    bare, letters = _spelling(tokenizer)
    aligned = align(ReadTokens([bare[id] for id in ids], [letters[id] for id in ids], words, near, answers, questions))
    for decided in aligned.decides:
        weights[decided] = DECISION_WEIGHT
    return TrainingRow(ids, weights, aligned)


def _words(text: str, offsets: Sequence[Span]) -> list[int]:
    """Returns the letters and digits of the word in which each token ends; none in special tokens."""
    sizes = [0] * (len(text) + 1)
    for match in _WORD.finditer(text):
        if not match[0].startswith("<"):
            begin, end = match.span()
            sizes[begin:end] = [end - begin] * (end - begin)
    return [sizes[end - 1] if end else 0 for _, end in offsets]


def rows(
    seed: int, step: int, progress: float, tokenizer: Tokenizer, tokens: int, tasks: Sequence[str] = ()
) -> list[TrainingRow]:
    """About `tokens` tokens of conversations and procedural sequences, the longest first; with `tasks`, of
    conversations of these alone."""
    rng = Random(f"{seed}-{step}")
    made: list[TrainingRow] = []
    total = 0
    while total < tokens:
        if not tasks and total < tokens * procedural_share(progress):
            sampled = _procedural_row(rng, progress, tokenizer)
        else:
            difficulty = progress * rng.random() ** (2 - progress)
            sampled = row(rng, conversation(rng, difficulty, progress=progress, tasks=tasks), tokenizer)
        if len(sampled.tokens) <= MAX_LENGTH:
            made.append(sampled)
            total += len(sampled.tokens)
    return sorted(made, key=lambda row: -len(row.tokens))


def share(rows: list[TrainingRow], team: Team) -> list[TrainingRow]:
    """The rows of one member of the team: each row, longest first, goes to the member with the fewest tokens so far."""
    loads = [0] * team.size
    mine: list[TrainingRow] = []
    for row in rows:
        lightest = loads.index(min(loads))
        loads[lightest] += len(row.tokens)
        if lightest == team.rank:
            mine.append(row)
    return mine


def batches(rows: list[TrainingRow], largest: int, padding: int, spread: float) -> list[TrainingBatch]:
    """Rows, longest first, stacked into batches of at most `largest` tokens or one row; the longest of a batch has at
    most `spread` times the tokens of its shortest."""
    stacked, pending = list[TrainingBatch](), list[TrainingRow]()
    for row in rows:
        if pending:
            longest = len(pending[0].tokens)
            if longest * (len(pending) + 1) > largest or longest > spread * len(row.tokens):
                stacked.append(_stack(pending, padding))
                pending = []
        pending.append(row)
    return [*stacked, _stack(pending, padding)] if pending else stacked


def _stack(rows: list[TrainingRow], padding: int) -> TrainingBatch:
    length = max(len(row.tokens) for row in rows)
    tokens = np.full((len(rows), length), padding, np.int32)
    weights = np.zeros((len(rows), length), np.float32)
    spans = np.full((len(ROLES), len(rows), length, 2), NOWHERE, np.int32)
    for at, row in enumerate(rows):
        size = len(row.tokens)
        tokens[at, :size] = row.tokens
        weights[at, :size] = row.weights
        of_roles = chain.from_iterable(chain.from_iterable(row.alignment.roles()))  # an array of tuples takes longer
        spans[:, at, :size] = np.fromiter(of_roles, np.int32).reshape(len(ROLES), size, 2)
    return stacked(tokens, weights, spans)


def stacked(tokens: NDArray[np.int32], weights: NDArray[np.float32], spans: NDArray[np.int32]) -> TrainingBatch:
    """Returns the batch of tokens (rows, length) with the loss weight of each, and of spans (roles, rows, length, 2),
    `NOWHERE` where nothing is to be looked at."""
    following = np.zeros_like(weights)
    following[:, :-1] = weights[:, 1:]
    learned, looks = (np.flatnonzero(each).astype(np.int32) for each in (following, spans[..., 0] >= 0))
    arrays = tokens, learned, following.flat[learned], looks, spans.reshape(-1, 2)[looks]
    return TrainingBatch(*map(torch.from_numpy, arrays))


@dataclass(frozen=True, slots=True)
class Reader:
    """Batches of a run in order; with `workers`, made ahead in other processes (a GPU reads faster than one writes)."""

    seed: int
    tokens: int
    largest: int
    ramp_steps: int
    tokenizer: Tokenizer
    workers: int = 0
    team: Team = ALONE
    spread: float = 1.25
    repeat_after: int = 0  # steps, once each step's data are read again (see `source`); 0 for never
    tasks: tuple[str, ...] = ()  # that alone are read, without procedural sequences; () for the whole mixture

    def at(self, step: int) -> list[TrainingBatch]:
        """Returns this member's batches of a step's data; none, where there are fewer rows than members."""
        progress = min(1.0, step / self.ramp_steps)
        made = rows(self.seed, step, progress, self.tokenizer, self.tokens, self.tasks)
        padding = token_id(self.tokenizer, END_OF_TEXT)
        return batches(share(made, self.team), self.largest, padding, self.spread)

    def source(self, step: int) -> int:
        """Returns the step whose data a step reads: its own, or, at every other step from `repeat_after` on, those of
        the next one that were read once, about `repeat_after` steps ago and later as long as twice that."""
        if not self.repeat_after or step % 2 == 0 or step <= self.repeat_after:
            return step
        place = (step - self.repeat_after) // 2
        return place if place <= self.repeat_after else 2 * place - self.repeat_after

    def read(self, start: int, end: int) -> Iterator[list[TrainingBatch]]:
        """The batches of steps `start` to `end`, each a list that makes up one step."""
        if not self.workers:
            yield from (self.at(self.source(step)) for step in range(start, end))
            return
        context = get_context("spawn")
        with ProcessPoolExecutor(self.workers, context, _start_worker, (replace(self, workers=0),)) as pool:
            lengths = dict(pool.map(_length_in_worker, [(task, tenth) for task in TASKS for tenth in range(11)]))
            made: dict[int, Future[list[_Arrays]]] = {}
            ahead = start
            for step in range(start, end):
                while ahead < min(end, step + 4 * self.workers):
                    source = self.source(ahead)
                    if source not in made:
                        made[source] = pool.submit(_read_in_worker, source, lengths)
                    ahead += 1
                source = self.source(step)
                kept = self.repeat_after > 0 and source == step
                yield _batches(made[source] if kept else made.pop(source))


_Arrays = tuple[NDArray[np.int32] | NDArray[np.float32], ...]  # a tensor would take a file descriptor of each process
_of_worker: list[Reader] = []


def _start_worker(reader: Reader) -> None:
    if hasattr(os, "nice"):  # not on Windows
        os.nice(10)  # behind the process that trains
    torch.set_num_threads(1)
    _of_worker[:] = [reader]


def _length_in_worker(of: tuple[str, int]) -> tuple[tuple[str, int], float]:
    return of, _length(*of)


def _read_in_worker(step: int, lengths: _Lengths) -> list[_Arrays]:
    _lengths.update(lengths)
    made = _of_worker[0].at(step)
    return [tuple(getattr(batch, each.name).numpy() for each in fields(batch)) for batch in made]


def _batches(read: Future[list[_Arrays]]) -> list[TrainingBatch]:
    return [TrainingBatch(*map(torch.from_numpy, arrays)) for arrays in read.result()]
