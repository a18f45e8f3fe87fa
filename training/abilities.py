"""The rows of the evaluation: the cases that are asked, and the share of them that should be right. Knows nothing of
engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from training.conversation import Case
from training.tasks import arithmetic, calculator, chat, countdown, database, grounded, joint, relevance, tool_choice

AUROC = "AUROC of yes"
XQUAD = Path("data/retrieval/xquad_en_dev.json")


@dataclass(frozen=True, slots=True)
class Ability:
    """`cases(rng, n)` makes n questions; `goals` gives for a measure the share that should be right. `ranked`: all are
    answered by yes or no, and the probability of yes is measured, too."""

    name: str
    cases: Callable[[Random, int], list[Case]]
    goals: Mapping[str, float] = field(default_factory=dict)
    ranked: bool = False


def _each(make: Callable[[Random], Case]) -> Callable[[Random, int], list[Case]]:
    return lambda rng, n: [make(rng) for _ in range(n)]


def _chat(kind: chat.CaseKind) -> Callable[[Random, int], list[Case]]:
    return _each(lambda rng: chat.case(rng, kind))


def _judgements(*, tool: bool) -> Callable[[Random, int], list[Case]]:
    return lambda rng, n: [relevance.case(rng, tool, right=at % 2 == 0) for at in range(n)]


def _passages(rng: Random) -> int:
    return rng.randint(1, 6)


def _tools(rng: Random) -> int:
    return rng.randint(1, 8)


_CALLED = {"right expression in a valid call": 0.95, "final answer right": 0.95}
_CHOSEN = {"right tool": 0.85, "right arguments": 0.75}
_FOUND = {"right sentence with its label": 0.85, "no false refusal": 0.95}
_UNKNOWN = {"says it does not know": 0.9}
_CHAT_GOALS = {kind: {kind: goal} for kind, goal in (("memory", 0.95), ("memory unknown", 0.9), ("beyond", 0.9))}

ABILITIES: tuple[Ability, ...] = (
    Ability("arithmetic through the calculator", _each(calculator.case), _CALLED),
    Ability("one of 1 to 8 unseen tools", _each(lambda rng: tool_choice.case(rng, _tools(rng), "call")), _CHOSEN),
    Ability("no tool fits", _each(lambda rng: tool_choice.case(rng, _tools(rng), "none")), {"no call": 0.85}),
    Ability("several calls in one turn", _each(lambda rng: tool_choice.case(rng, _tools(rng), "several"))),
    Ability("a tool's error is repaired", _each(lambda rng: tool_choice.case(rng, _tools(rng), "repair"))),
    Ability("1 to 6 passages, made-up facts", _each(lambda rng: grounded.case(rng, _passages(rng))), _FOUND),
    Ability("the same, answer absent", _each(lambda rng: grounded.case(rng, _passages(rng), False)), _UNKNOWN),
    Ability("1 to 6 passages, real prose", _each(lambda rng: grounded.prose_case(rng, _passages(rng)))),
    Ability("real prose, answer absent", _each(lambda rng: grounded.prose_case(rng, _passages(rng), False))),
    Ability("a text answers, yes or no", _judgements(tool=False), {AUROC: 0.9}, ranked=True),
    Ability("a tool fits, yes or no", _judgements(tool=True), ranked=True),
    Ability("Countdown with 3 numbers", _each(lambda rng: countdown.case(rng, "countdown3"))),
    Ability(
        "Countdown with 4 numbers",
        _each(lambda rng: countdown.case(rng, "countdown4")),
        {"right answer": 0.3, "steps legal": 0.98},
    ),
    Ability("game of 24", _each(lambda rng: countdown.case(rng, "game24")), {"right answer": 0.3, "steps legal": 0.98}),
    Ability("proposes steps", _each(countdown.propose_case)),
    Ability("judges a sure state", _each(lambda rng: countdown.value_case(rng, "sure"))),
    Ability("judges a likely state", _each(lambda rng: countdown.value_case(rng, "likely"))),
    Ability("judges an impossible state", _each(lambda rng: countdown.value_case(rng, "impossible"))),
    *(Ability(f"chat: {kind}", _chat(kind), _CHAT_GOALS.get(kind, {})) for kind in chat.kinds()),
    Ability("thinks, calls a tool, answers", _each(joint.case)),
    Ability("questions about tables, in SQL", _each(database.case)),
    Ability("sums without a tool, in thought", _each(lambda rng: arithmetic.case(rng, rng.choice("+-×/"), 3))),
)


def xquad(shared: Path) -> tuple[Ability, ...]:
    """People's questions about real paragraphs, where the data are at hand."""
    path = shared / XQUAD
    if not path.exists():
        return ()
    goals = {"quotes the answer": 0.4}
    return (Ability("XQuAD, right paragraph among 3", lambda rng, n: grounded.xquad_cases(path, n, rng), goals),)
