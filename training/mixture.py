"""What the model reads: conversations mixed from all tasks, cut into batches of one length.

Everything is a function of (seed, step): a resumed run reads on exactly where it stopped. The mixture grows with
`progress` (0 to 1): short and easy first, then longer numbers, more turns and longer lists. Only the last answer of a
conversation is learned in full; of the prompt's tokens a few are learned too, so that the model also learns to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training import words
from training.exchange import Conversation, Exchange, Phrasing
from training.tasks import arithmetic, beyond, counting, identity, memory, smalltalk
from training.tokenizer import END_OF_TEXT, TURN_END, render, token_id

PROMPT_SHARE, PROMPT_WEIGHT = 0.25, 0.2  # a quarter of the prompt's tokens, at a fifth of the weight: 0.05 on average
TASKS = ("arithmetic", "beyond", "memory", "smalltalk", "identity", "counting")
WEIGHTS = (44, 15, 21, 8, 7, 5)


@dataclass(frozen=True, slots=True)
class Batch:
    """Both (rows, length); rows are padded on the right with weight 0."""

    tokens: Tensor
    weights: Tensor


def history(rng: Random, phrasing: Phrasing, turns: int) -> tuple[list[Exchange], list[memory.Fact]]:
    """Earlier turns, and the facts told in them."""
    exchanges: list[Exchange] = []
    facts: list[memory.Fact] = []
    for _ in range(turns):
        kind = rng.random()
        if kind < 0.4:
            told, known = memory.tell(rng, phrasing, memory.fact(rng))
            if all(known.key != other.key for other in facts):
                exchanges.append(told)
                facts.append(known)
        elif kind < 0.55:
            exchanges.append(arithmetic.sample(rng, phrasing, digits=3))
        elif kind < 0.75:
            exchanges.append(smalltalk.sample(rng, phrasing))
        elif kind < 0.85:
            exchanges.append(beyond.sample(rng, phrasing))
        elif kind < 0.95:
            exchanges.append(identity.sample(rng, phrasing, kind=rng.choice(("who", "maker", "human", "size"))))
        else:
            exchanges.append(counting.sample(rng, phrasing, highest=15))
    return exchanges, facts


def remember(rng: Random, phrasing: Phrasing, turns: int) -> list[Exchange]:
    """A conversation about facts: telling, asking, or asking what was never said."""
    kind = rng.random()
    if kind < 0.2:
        return [memory.at_once(rng, phrasing)]
    if kind < 0.4:
        return [memory.tell(rng, phrasing, memory.fact(rng))[0]]
    exchanges, facts = history(rng, phrasing, turns)
    if kind < 0.5:
        one, two = memory.fact(rng, "name"), memory.fact(rng, rng.choice(("pet", "home", "job", "favourite")))
        told, known = memory.tell_two(rng, phrasing, one, two)
        if rng.random() < 0.5:
            return [*exchanges[:1], told]
        return [told, memory.ask(rng, phrasing, rng.choice(known))]
    if kind < 0.62:
        missing = memory.fact(rng)
        if all(missing.key != known.key for known in facts):
            return [*exchanges, memory.ask(rng, phrasing, missing, told=False)]
    if not facts:
        told, known_fact = memory.tell(rng, phrasing, memory.fact(rng))
        exchanges, facts = [told, *exchanges], [known_fact]
    return [*exchanges, memory.ask(rng, phrasing, rng.choice(facts))]


def conversation(rng: Random, progress: float, phrasing: Phrasing = "train") -> Conversation:
    """One conversation whose last exchange is the one to learn."""
    task = rng.choices(TASKS, WEIGHTS)[0]
    longest = 1 if progress < 0.35 else 2 if progress < 0.5 else 5
    enable_thinking = rng.random() < 0.75
    system = None
    turns = rng.randint(1, longest) if rng.random() < 0.2 else 0
    if task == "memory":
        exchanges = remember(rng, phrasing, rng.randint(1, longest))
    else:
        exchanges = history(rng, phrasing, turns)[0]
        if task == "arithmetic":
            digits = 2 if progress < 0.1 else 3 if progress < 0.45 else 4
            last = arithmetic.sample(rng, phrasing, digits)
            if progress > 0.45 and rng.random() < 0.08:
                value = last.answer.removesuffix(".").rpartition("= ")[2]
                further = arithmetic.follow_up(rng, phrasing, int(value)) if value.isdigit() else None
                if further:
                    exchanges, last = [last], further
            exchanges.append(last)
        elif task == "beyond":
            exchanges.append(beyond.sample(rng, phrasing))
        elif task == "smalltalk":
            exchanges.append(smalltalk.sample(rng, phrasing))
        elif task == "counting":
            exchanges.append(counting.sample(rng, phrasing, highest=15 if progress < 0.15 else 60))
        elif rng.random() < 0.35:
            name = words.proper_name(rng, (*words.NAMES, *words.PET_NAMES))
            system = identity.naming_system(rng, phrasing, name)
            exchanges.append(identity.sample(rng, phrasing, kind="who" if rng.random() < 0.8 else None, name=name))
        else:
            exchanges.append(identity.sample(rng, phrasing))
    if system is None and rng.random() < 0.1:
        system = identity.plain_system(rng)
    if not enable_thinking:
        exchanges = [arithmetic.without_thinking(x) if x.task.startswith("arithmetic") else x for x in exchanges]
    return Conversation(tuple(exchanges), system, enable_thinking)


def texts(made: Conversation) -> tuple[str, str]:
    """The prompt, up to where the model begins, and what it is to write."""
    prompt = render(made.prompt(), add_generation_prompt=True, enable_thinking=made.enable_thinking)
    return prompt, made.completion() + TURN_END


def batch(seed: int, step: int, progress: float, tokenizer: Tokenizer, tokens: int, chunks: int = 6) -> list[Batch]:
    """About `tokens` tokens of conversations, sorted by length into `chunks` batches, so that little is padding."""
    rng = Random(f"{seed}-{step}")
    rows: list[tuple[list[int], list[float]]] = []
    total = 0
    while total < tokens:
        prompt, completion = texts(conversation(rng, progress))
        asked = tokenizer.encode(prompt, add_special_tokens=False).ids
        answered = tokenizer.encode(completion, add_special_tokens=False).ids
        read = [PROMPT_WEIGHT if rng.random() < PROMPT_SHARE else 0.0 for _ in asked]
        rows.append((asked + answered, read + [1.0] * len(answered)))
        total += len(asked) + len(answered)
    rows.sort(key=lambda row: len(row[0]))
    share, batches, pending = tokens / chunks, list[Batch](), list[tuple[list[int], list[float]]]()
    padding = token_id(tokenizer, END_OF_TEXT)
    for row in rows:
        if pending and len(row[0]) * (len(pending) + 1) > share:
            batches.append(_stack(pending, padding))
            pending = []
        pending.append(row)
    return [*batches, _stack(pending, padding)]


def _stack(rows: list[tuple[list[int], list[float]]], padding: int) -> Batch:
    length = max(len(tokens) for tokens, _ in rows)
    return Batch(
        tokens=torch.tensor([tokens + [padding] * (length - len(tokens)) for tokens, _ in rows]),
        weights=torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in rows]),
    )
