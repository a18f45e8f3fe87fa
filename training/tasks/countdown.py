"""Number puzzles: Countdown with two to four numbers, the game of 24, next steps and judgements of a state.

    user: Use 3, 5, 7 and 9 to make 24.
    thinking: the search of `training.tasks.countdown_trace`
    answer: (3 + 9) * (7 - 5) = 24

    user: Numbers: 4 6 9. Target: 24. Propose next steps.    user: Numbers: 9 10. Target: 24. Judge: sure, likely or …
    answer: 4*9=36 6 …                                      answer: impossible

Without thinking the answer comes at once. Puzzles that `puzzle.excluded` names are left to the evaluation. The ways of
asking are in `phrases/countdown.toml`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

from training import phrases, puzzle
from training.conversation import Case, Conversation, Message, ModelReply, Phrasing, Verdict
from training.puzzle import Numbers, PuzzleStep, Value, excluded, routes
from training.tasks.countdown_trace import answer, path, promise, trace
from training.text.noise import casual

Game = Literal["countdown3", "countdown4", "game24"]
VALUES: tuple[Value, ...] = ("sure", "likely", "impossible")
PROPOSALS = 6  # lines at most

# Words before the numbers, between them, before the last and after it.
_LISTS: dict[Phrasing, tuple[tuple[str, str, str, str], ...]] = {
    "train": (
        *(("", ", ", " and ", ""), ("", ", ", ", ", ""), ("", " ", " ", ""), ("[", ", ", ", ", "]")) * 3,
        *(("", ",", ",", ""), ("(", ", ", ", ", ")"), ("", "; ", "; ", ""), ("", " ", " and ", "")),
        *(("{", ", ", ", ", "}"), ("", ", ", " & ", ""), ("", "  ", "  ", ""), ("[", " ", " ", "]")),
    ),
    "held_out": (
        *(("", ", ", ", and ", ""), ("", " | ", " | ", ""), ("(", " ", " ", ")"), ("[", ",", ",", "]")),
        ("", " and ", " and ", ""),
    ),
}


def listed(rng: Random, phrasing: Phrasing, numbers: Numbers) -> str:
    opening, between, last, closing = rng.choice(_LISTS[phrasing])
    texts = [str(number) for number in numbers]
    last = " and " if len(texts) == 2 and last == ", and " else last
    return opening + between.join(texts[:-1]) + last + texts[-1] + closing


def _ask(rng: Random, phrasing: Phrasing, kind: str, numbers: Numbers, target: int) -> str:
    text = casual(rng, phrases.read("countdown")[kind].ask(rng, phrasing))
    return text.replace("{numbers}", listed(rng, phrasing, numbers)).replace("{target}", str(target))


def ask(rng: Random, phrasing: Phrasing, numbers: Numbers, target: int) -> str:
    game = target == 24 and len(numbers) == 4 and rng.random() < 0.7
    return _ask(rng, phrasing, "game24" if game else "countdown", numbers, target)


def ask_steps(rng: Random, phrasing: Phrasing, numbers: Numbers, target: int) -> str:
    if phrasing == "train" and rng.random() < 0.7:
        return puzzle.propose_prompt(numbers, target)
    return _ask(rng, phrasing, "propose", numbers, target)


def ask_value(rng: Random, phrasing: Phrasing, numbers: Numbers, target: int) -> str:
    if phrasing == "train" and rng.random() < 0.7:
        return puzzle.value_prompt(numbers, target)
    return _ask(rng, phrasing, "value", numbers, target)


def draw(rng: Random, count: int, progress: float = 1.0, *, evaluated: bool = False) -> tuple[Numbers, int]:
    """Numbers and a target from 10 to 100 (less for two numbers), solvable or not."""
    while True:
        if count == 4 and rng.random() < 0.4:
            top, target = 13, 24
        else:
            top = rng.choice((13, 25, 25, 99)) if progress > 0.35 else 13 if progress > 0.1 else 10
            target = rng.randint(3 if count == 2 else 10, 100 if progress > 0.2 else 60)
        numbers = tuple(rng.randint(1, top) for _ in range(count))
        if excluded(numbers, target) == evaluated:
            return numbers, target


def solvable(rng: Random, count: int, progress: float = 1.0) -> tuple[Numbers, int]:
    """A puzzle to train on, with a solution in whole numbers."""
    while True:
        numbers, target = draw(rng, count, progress)
        if count == 2:
            target = rng.choice([step.value for step in puzzle.steps(numbers)])
        if target and routes(numbers, target):
            return numbers, target


def state(rng: Random, count: int, progress: float = 1.0) -> tuple[Numbers, int]:
    """A state that a search on a puzzle to train on may come to, and not a puzzle to evaluate on itself."""
    while True:
        longer = 4 if progress > 0.3 else 3
        numbers, target = (solvable if rng.random() < 0.7 else draw)(rng, max(count, longer), progress)
        while len(numbers) > count:
            possible = puzzle.steps(numbers)
            good = [step for step in possible if routes(step.state, target)]
            pick = good if good and rng.random() < 0.5 else possible
            numbers = rng.choices(pick, [promise(step, target) for step in pick])[0].state
        if rng.random() < 0.3:
            numbers = tuple(rng.sample(numbers, count))
        if not excluded(numbers, target):
            return numbers, target


def _labelled(rng: Random, label: Value, progress: float) -> tuple[Numbers, int]:
    """A state of this value; its count of numbers is sampled first, so that no count gives the value away."""
    counts = {"sure": (2, 2, 2, 3, 3), "likely": (3, 3, 4, 4), "impossible": (2, 2, 2, 3, 3, 4)}[label]
    count = rng.choice(counts) if progress > 0.2 else rng.choice((2, 3))
    if label == "likely":
        count = max(count, 3)
    while True:
        # Four numbers come from no longer puzzle, and those with a solution would be sampled in vain.
        of_four = label == "impossible" and count == 4
        numbers, target = draw(rng, 4, progress) if of_four else state(rng, count, progress)
        if label == "impossible" and count == 2 and rng.random() < 0.5:
            target = max(1, rng.choice(puzzle.steps(numbers)).value + rng.choice((-10, -2, -1, 1, 2, 10)))
        if target <= 100 and puzzle.value(numbers, target) == label:
            return numbers, target


def proposals(rng: Random, numbers: Numbers, target: int) -> list[PuzzleStep]:
    """Those that lead to a solution first, then by promise."""
    order = sorted(
        puzzle.steps(numbers),
        key=lambda step: (routes(step.state, target) == 0, -promise(step, target) + 0.1 * rng.random()),
    )
    chosen: dict[tuple[int, ...], PuzzleStep] = {}
    for step in order:
        chosen.setdefault(tuple(sorted(step.state)), step)
    return list(chosen.values())[:PROPOSALS]


def _count(rng: Random, progress: float) -> int:
    """Returns how many numbers a puzzle has."""
    four = 0.0 if progress < 0.2 else min(0.8, 4 * (progress - 0.18))
    if rng.random() < four:
        return 4
    return 2 if rng.random() < (0.5 if progress < 0.08 else 0.15) else 3


def _turns(rng: Random, most: int) -> int:
    return 1 if rng.random() < 0.5 else rng.randint(min(3, most), most)


def _solved(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    count = _count(rng, progress)
    numbers, target = solvable(rng, count, progress)
    if progress > 0.5 and count == 4 and rng.random() < 0.04:
        while routes(numbers, target) or puzzle.solve(numbers, target) is not None:
            numbers, target = draw(rng, count)
    made = trace(rng, numbers, target, progress)
    question = Message("user", ask(rng, phrasing, numbers, target))
    return Conversation((question, Message("assistant", made.answer, made.thinking)))


def _at_once(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    messages: list[Message] = []
    for _ in range(_turns(rng, 4)):
        numbers, target = solvable(rng, _count(rng, progress), progress)
        messages.append(Message("user", ask(rng, phrasing, numbers, target)))
        messages.append(Message("assistant", answer(path(rng, numbers, target), target)))
    return Conversation(tuple(messages), enable_thinking=False)


def _proposed(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    messages: list[Message] = []
    for _ in range(_turns(rng, 4)):
        numbers, target = state(rng, _count(rng, progress), progress)
        lines = [str(step) for step in proposals(rng, numbers, target)]
        messages.append(Message("user", ask_steps(rng, phrasing, numbers, target)))
        messages.append(Message("assistant", "\n".join(lines)))
    return Conversation(tuple(messages), enable_thinking=rng.random() < 0.5)


def _judged(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    messages: list[Message] = []
    for _ in range(_turns(rng, 6)):
        label = rng.choice(VALUES)
        messages.append(Message("user", ask_value(rng, phrasing, *_labelled(rng, label, progress))))
        messages.append(Message("assistant", label))
    return Conversation(tuple(messages), enable_thinking=rng.random() < 0.5)


def conversation(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    kind = rng.choices((_solved, _at_once, _proposed, _judged), (56, 10, 12, 22))[0]
    return kind(rng, phrasing, progress)


def count_legal(reply: ModelReply, numbers: Numbers) -> tuple[int, int]:
    """(legal, all) steps of the reply's thinking."""
    return puzzle.count_legal(reply.thinking, numbers)


def kept(rng: Random, game: Game, *, evaluated: bool = True) -> tuple[Numbers, int, str]:
    """A puzzle of the evaluation, or one that is not of it, and a solution, which may need fractions."""
    while True:
        numbers, target = draw(rng, 3 if game == "countdown3" else 4, evaluated=evaluated)
        if (game == "game24") == (target == 24 and max(numbers) <= 13) or game == "countdown3":
            solution = puzzle.solve(numbers, target)
            if solution is not None:
                return numbers, target, solution


def case(rng: Random, game: Game, *, thinking: bool = True, evaluated: bool = True) -> Case:
    """Measures the answer, and with thinking whether every step of the search was legal."""
    numbers, target, solution = kept(rng, game, evaluated=evaluated)

    def judge(replies: Sequence[ModelReply]) -> Verdict:
        last = replies[-1] if replies else ModelReply("", "", (), broken=True)
        verdict: Verdict = {"right answer": not last.broken and puzzle.check(last.content, numbers, target)}
        if thinking:
            legal, total = count_legal(last, numbers)
            verdict["all steps legal"] = not last.broken and 0 < legal == total
            verdict["steps legal"] = (legal, total)
        return verdict

    made = trace(rng, numbers, target, 1.0) if routes(numbers, target) else None
    wanted = ModelReply(made.thinking, made.answer, ()) if made and thinking else None
    if wanted is None:
        thought = "\n".join(str(step) for step in puzzle.steps(numbers)[:1]) if thinking else ""
        wanted = ModelReply(thought, f"{solution} = {target}", ())
    prompt = Conversation((Message("user", ask(rng, "held_out", numbers, target)),), enable_thinking=thinking)
    return Case(prompt, judge, (wanted,))


def _short_case(question: str, wanted: str, judge: Callable[[str], Verdict]) -> Case:
    def of(replies: Sequence[ModelReply]) -> Verdict:
        return judge("" if not replies or replies[-1].broken else replies[-1].content.strip())

    prompt = Conversation((Message("user", question),), enable_thinking=False)
    return Case(prompt, of, (ModelReply("", wanted, ()),))


def propose_case(rng: Random, *, canonical: bool = False) -> Case:
    numbers, target, _ = kept(rng, rng.choice(("countdown3", "countdown4", "game24")))
    while not routes(numbers, target):
        numbers, target, _ = kept(rng, "countdown4")

    def judge(content: str) -> Verdict:
        lines = content.split("\n")
        taken = [puzzle.read_step(line, numbers) for line in lines]
        legal = [step for step in taken if step is not None]
        return {
            "all proposals legal": len(legal) == len(lines) == len(set(lines)),
            "one leads to a solution": any(routes(step.state, target) > 0 for step in legal[:PROPOSALS]),
        }

    question = puzzle.propose_prompt(numbers, target) if canonical else ask_steps(rng, "held_out", numbers, target)
    return _short_case(question, "\n".join(map(str, proposals(rng, numbers, target))), judge)


def value_case(rng: Random, label: Value, *, canonical: bool = False) -> Case:
    """A state of an excluded puzzle, or one step on from it."""
    while True:
        numbers, target = draw(rng, rng.choice((3, 4)), evaluated=True)
        if rng.random() < 0.5:
            numbers = rng.choice(puzzle.steps(numbers)).state
        if puzzle.value(numbers, target) == label:
            break
    question = puzzle.value_prompt(numbers, target) if canonical else ask_value(rng, "held_out", numbers, target)
    return _short_case(question, label, lambda content: {"right label": content.lower().rstrip(".") == label})
