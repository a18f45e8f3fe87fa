"""Number puzzles: make a target from some numbers with + - * /, each number used exactly once.

A state is the numbers that are left. A step takes two of them and puts their result in front of the others:
`3*5=15 7 9` leaves 15, 7 and 9. Steps stay within whole numbers; `solve` and `check` are exact rationals. Puzzles that
`excluded` names are evaluated on and never trained on. Knows nothing of wording, apart from the two canonical prompts
by which a search asks for steps and for a judgement.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from typing import Literal

Numbers = tuple[int, ...]
Value = Literal["sure", "likely", "impossible"]

MAX_VALUE = 999  # no step makes more: no sensible step does for targets up to 100
_STEP = re.compile(r"(?:Wait, )?(\d+)([-+*/])(\d+)=(\d+)((?: \d+)*)")
_SIGNS = str.maketrans({"×": "*", "x": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})


@dataclass(frozen=True, slots=True)
class PuzzleStep:
    left: int
    operator: str
    right: int
    state: Numbers  # the remaining numbers: the result, then the others in order

    @property
    def value(self) -> int:
        return self.state[0]

    @property
    def term(self) -> str:
        return f"{self.left}{self.operator}{self.right}"

    def __str__(self) -> str:
        return f"{self.term}={' '.join(map(str, self.state))}"


def apply(left: int, operator: str, right: int) -> int | None:
    """None where the result is negative, not whole, or out of range."""
    if operator == "/":
        return left // right if right and left % right == 0 else None
    value = left + right if operator == "+" else left - right if operator == "-" else left * right
    return value if 0 <= value <= MAX_VALUE else None


@lru_cache(maxsize=20_000)
def steps(state: Numbers) -> tuple[PuzzleStep, ...]:
    """All different steps: + and * in the order of the state, - and / with the larger number first."""
    found: dict[tuple[int, str, int], PuzzleStep] = {}
    for i, j in combinations(range(len(state)), 2):
        rest = (*state[:i], *state[i + 1 : j], *state[j + 1 :])
        for operator in "+-*/":
            pair = (state[i], state[j])
            left, right = pair if operator in "+*" else (max(pair), min(pair))
            value = apply(left, operator, right)
            if value is not None:
                found.setdefault((left, operator, right), PuzzleStep(left, operator, right, (value, *rest)))
    return tuple(found.values())


def _results(small: int, large: int) -> list[int]:
    """Returns what `apply` makes of two numbers, an operator each."""
    found = [value for value in (large + small, large * small) if value <= MAX_VALUE]
    found.append(large - small)
    if small and large % small == 0:
        found.append(large // small)
    return found


@lru_cache(maxsize=50_000)
def _routes(state: Numbers) -> dict[int, int]:
    """Each value that uses all numbers → by how many ways, for a sorted state."""
    if len(state) == 1:
        return {state[0]: 1}
    found: dict[int, int] = defaultdict(int)
    if len(state) == 2:
        for value in _results(*state):
            found[value] += 1
        return found
    pairs: dict[tuple[int, int], Numbers] = {}
    for i, j in combinations(range(len(state)), 2):
        pairs.setdefault((state[i], state[j]), (*state[:i], *state[i + 1 : j], *state[j + 1 :]))
    for pair, rest in pairs.items():
        for value in _results(*pair):
            for target, ways in _routes(tuple(sorted((value, *rest)))).items():
                found[target] += ways
    return found


def routes(state: Sequence[int], target: int) -> int:
    """Returns how many sequences of steps lead to the target."""
    return _routes(tuple(sorted(state))).get(target, 0)


def value(state: Sequence[int], target: int) -> Value:
    """Returns how promising a state is: `sure` is one step from the target, or three numbers with at least three
    routes."""
    ways = routes(state, target)
    if not ways:
        return "impossible" if solve(state, target) is None else "likely"  # by way of fractions
    return "sure" if len(state) <= 2 or (len(state) == 3 and ways >= 3) else "likely"


@dataclass(frozen=True, slots=True)
class _Term:
    """A fraction, not reduced (that would be most of the time of a search), and how it was made."""

    over: int
    under: int
    made: int | tuple[_Term, str, _Term]

    def __str__(self) -> str:
        if isinstance(self.made, int):
            return str(self.made)
        left, operator, right = self.made
        return f"({left}) {operator} ({right})"


def _combined(a: _Term, b: _Term) -> list[_Term]:
    """Every result of two terms."""
    first, second, under = a.over * b.under, b.over * a.under, a.under * b.under
    found = [_Term(first + second, under, (a, "+", b)), _Term(a.over * b.over, under, (a, "*", b))]
    found += [_Term(first - second, under, (a, "-", b)), _Term(second - first, under, (b, "-", a))]
    if second:
        found.append(_Term(first, second, (a, "/", b)))
    if first:
        found.append(_Term(second, first, (b, "/", a)))
    return found


def _solution(terms: tuple[_Term, ...], target: int) -> _Term | None:
    if len(terms) == 1:
        return terms[0] if terms[0].over == target * terms[0].under else None
    for i, j in combinations(range(len(terms)), 2):
        rest = (*terms[:i], *terms[i + 1 : j], *terms[j + 1 :])
        for term in _combined(terms[i], terms[j]):
            found = _solution((term, *rest), target)
            if found is not None:
                return found
    return None


def solve(numbers: Sequence[int], target: int) -> str | None:
    """An expression that makes the target, by exact rationals; None when there is none."""
    found = _solution(tuple(_Term(number, 1, number) for number in numbers), target)
    return None if found is None else re.sub(r"\((\d+)\)", r"\1", str(found))


def excluded(numbers: Sequence[int], target: int) -> bool:
    """Returns whether a puzzle of three or more numbers is kept for evaluation. A target of 24 falls under two
    rules."""
    if len(numbers) < 3:
        return False
    name = ",".join(map(str, sorted(numbers)))
    names = [f"{name}={target}", name] if target == 24 else [f"{name}={target}"]
    return any(hashlib.sha256(text.encode()).hexdigest()[-1] in "012" for text in names)


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and the numbers in it; None when it is anything but + - * / of whole numbers."""
    numbers: list[int] = []

    def walk(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp):
            left, right = walk(node.left), walk(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.Div):
                return left / right
        raise ValueError("no plain arithmetic")

    if len(expression) > 200:
        return None
    try:
        return walk(ast.parse(expression.translate(_SIGNS).strip(), mode="eval").body), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def check(answer: str, numbers: Sequence[int], target: int) -> bool:
    """Returns whether an answer such as `(9 - 7) * (5 + 7) = 24` makes the target of exactly these numbers, each used
    once."""
    expression, equals, said = answer.strip().removesuffix(".").partition("=")
    if equals and said.strip() != str(target):
        return False
    found = evaluate(expression)
    return found is not None and found[0] == target and sorted(found[1]) == sorted(numbers)


def read_step(line: str, state: Sequence[int]) -> PuzzleStep | None:
    """The step that a line takes from `state`; None when the line is no step, or not a legal one."""
    match = _STEP.match(line)
    if not match:
        return None
    left, operator, right = int(match[1]), match[2], int(match[3])
    rest = Counter(state)
    rest.subtract((left, right))
    written = (int(match[4]), *map(int, match[5].split()))
    if min(rest.values()) < 0 or apply(left, operator, right) != written[0]:
        return None
    return PuzzleStep(left, operator, right, written) if Counter(written[1:]) == +rest else None


def count_legal(trace: str, numbers: Sequence[int]) -> tuple[int, int]:
    """(legal, all) steps of a trace. A line belongs to the last line above that left one number more."""
    states: dict[int, Sequence[int]] = {len(numbers): numbers}
    legal = total = 0
    for line in trace.strip().split("\n"):
        if re.fullmatch(r"[\d ]+ to \d+", line) or not line:
            continue
        total += 1
        match = _STEP.match(line)
        if not match:
            continue
        written = (int(match[4]), *map(int, match[5].split()))
        above = states.get(len(written) + 1)
        chain = [evaluate(part) for part in line.split("=")[1:]] if line.count("=") > 1 else []
        same = all(part is not None and part[0] == written[0] for part in chain)
        legal += above is not None and same and read_step(line, above) is not None
        states[len(written)] = written
    return legal, total


def propose_prompt(numbers: Sequence[int], target: int) -> str:
    """Answered by up to six lines, each a step as `str(Step)` writes it."""
    return f"Numbers: {' '.join(map(str, numbers))}. Target: {target}. Propose next steps."


def value_prompt(numbers: Sequence[int], target: int) -> str:
    """Answered by one word: sure, likely or impossible."""
    return f"Numbers: {' '.join(map(str, numbers))}. Target: {target}. Judge: sure, likely or impossible?"
