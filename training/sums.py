"""Sums as a person types them, each with the expression a calculator should be given.

    what's 12,345 plus 678?      12345 + 678
    15% of 240                   15 / 100 * 240
    3.5 times 12 minus 7         3.5 * 12 - 7

Random expressions of one to four operations are spelled in many ways; fixed turns of phrase come from
`phrases/calculator.toml`, word problems from `phrases/word_problems.toml` and `training.text.stories`. Knows nothing
of tools.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from training import phrases
from training.conversation import Phrasing
from training.text import arithmetic_expression, stories, words
from training.text.noise import casual

MAX_VALUE = 10**13  # no result is longer
COMPOSED = 0.6  # share of the word problems in training that are put together

_SPELLED = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_SIGNS: tuple[dict[str, str], ...] = (
    {"+": " + ", "-": " - ", "*": " * ", "/": " / "},
    {"+": " + ", "-": " - ", "*": " * ", "/": " / "},
    {"+": "+", "-": "-", "*": "*", "/": "/"},
    {"+": " + ", "-": " - ", "*": " × ", "/": " ÷ "},
    {"+": " + ", "-": " - ", "*": " x ", "/": " / "},
    {"+": "+", "-": "-", "*": "x", "/": ":"},
    {"+": " plus ", "-": " minus ", "*": " times ", "/": " divided by "},
    {"+": " plus ", "-": " minus ", "*": " times ", "/": " divided by "},
    {"+": " and ", "-": " minus ", "*": " multiplied by ", "/": " over "},
    {"+": " plus ", "-": " less ", "*": " * ", "/": " / "},
)
_HELD_OUT_SIGNS: tuple[dict[str, str], ...] = (
    *_SIGNS[:4],
    {"+": " plus ", "-": " minus ", "*": " x ", "/": " divided by "},
    {"+": " + ", "-": " minus ", "*": " times ", "/": " / "},
    {"+": " added to ", "-": " minus ", "*": " times ", "/": " divided by "},
)


@dataclass(frozen=True, slots=True)
class Sum:
    """`answer` is the final sentence, {r} in it the result; `thought` is empty but for word problems."""

    kind: str  # bare, percent, named, problem
    question: str
    expression: str
    thought: str = ""
    answer: str = ""

    def result(self) -> Fraction:
        return arithmetic_expression.value(self.expression)

    def said(self, result: str) -> str:
        """The final sentence, with the result as the tool gave it."""
        return self.answer.replace("{r}", result) if self.answer else f"{self.expression} = {result}."


def _integer(rng: Random, digits: int) -> str:
    length = rng.randint(1, max(1, digits))
    return str(rng.randrange(1 if length == 1 else 10 ** (length - 1), 10**length))


def _decimal(rng: Random, digits: int) -> str:
    places = rng.choice((1, 1, 1, 2, 2, 3))
    last = str(rng.randrange(1, 10**places)).zfill(places)
    return f"{rng.choice(('0', _integer(rng, min(digits, 3)), _integer(rng, min(digits, 4))))}.{last}"


def _digits(rng: Random, progress: float) -> int:
    return 2 if progress < 0.1 else rng.choice((2, 2, 3)) if progress < 0.35 else rng.choice((2, 2, 3, 4, 5, 6))


def as_typed(rng: Random, number: str, spell: bool = True) -> str:
    """A number with thousands separators, or as a word, now and then."""
    whole, point, places = number.partition(".")
    if len(whole) > 3 and rng.random() < 0.35:
        return f"{int(whole):,}{point}{places}"
    if spell and number.isdigit() and int(number) < len(_SPELLED) and rng.random() < 0.12:
        return _SPELLED[int(number)]
    return number


def _fine(text: str, decimals: int = 6) -> bool:
    try:
        found = arithmetic_expression.value(text)
    except arithmetic_expression.ExpressionError:
        return False
    return abs(found) < MAX_VALUE and arithmetic_expression.ends(found, decimals)


def random_tokens(rng: Random, progress: float) -> list[str]:
    """Operands, operators and brackets; brackets only where they change the value."""
    most = 1 if progress < 0.15 else 2 if progress < 0.4 else 4
    count = rng.choices(range(1, most + 1), (6, 5, 3, 2)[:most])[0]
    digits, decimals = _digits(rng, progress), progress > 0.15 and rng.random() < 0.3
    numbers = [
        _decimal(rng, digits) if decimals and rng.random() < 0.7 else _integer(rng, digits) for _ in range(count + 1)
    ]
    operators = [rng.choice("++--***/") for _ in range(count)]
    tokens = [f"-{numbers[0]}" if progress > 0.3 and rng.random() < 0.03 else numbers[0]]
    for sign, number in zip(operators, numbers[1:], strict=True):
        if sign == "/" and rng.random() < 0.8:
            number = str(rng.randint(2, 12))
        tokens += [sign, number]
    if count > 1 and rng.random() < 0.5:
        at = rng.randrange(count)
        before, inner = operators[at - 1] if at else "", operators[at]
        after = operators[at + 1] if at + 1 < count else ""
        if (inner in "+-" and (before in ("*", "/", "-") or after in ("*", "/"))) or (inner in "*/" and before == "/"):
            tokens[2 * at] = "(" + tokens[2 * at]
            tokens[2 * at + 2] += ")"
    return tokens


def bare(rng: Random, phrasing: Phrasing, progress: float) -> Sum:
    for _ in range(60):
        tokens = random_tokens(rng, progress)
        text = " ".join(tokens)
        # A result that does not end is rare, since all its digits have to be copied.
        if _fine(text) or (rng.random() < 0.05 and _fine(text, 10**4)):
            break
    else:
        tokens = ["8", "+", "5"]
    signs = rng.choice(_SIGNS if phrasing == "train" else _HELD_OUT_SIGNS)
    if signs["+"] in (" and ", " added to ") and len(tokens) > 3:
        signs = {**signs, "+": " plus "}
    words_too = rng.random() < 0.3 and signs["+"] == " plus "
    shown = "".join(
        signs[token]
        if token in signs
        else re.sub(r"[\d.]+", lambda match: as_typed(rng, match.group(), words_too), token)
        for token in tokens
    )
    ask = casual(rng, phrases.read("calculator")["ask"].ask(rng, phrasing))
    return Sum("bare", ask.replace("{e}", shown), " ".join(tokens))


def _blanks(rng: Random, phrasing: Phrasing, progress: float, template: str) -> dict[str, str]:
    """A filling for all places that the template may have."""
    most = 12 if progress < 0.1 else 40 if progress < 0.3 else rng.choice((20, 100, 100, 1000, 20000))
    if "{p}" in template or "{q}" in template:
        most = min(most, 1000)
    small = rng.randint(2, 12)
    price = f"{rng.randint(1, 60 if most < 100 else 400)}.{rng.choice(('5', '25', '50', '75', '99', '95', '20', '4'))}"
    other = f"{rng.randint(1, 40)}.{rng.choice(('5', '50', '10', '25', '49', '90', '3'))}"
    percent = rng.choice((5, 10, 15, 20, 25, 30, 40, 50, 60, 75, rng.randint(1, 99)))
    names = words.NAMES if phrasing == "train" else words.HELD_OUT_NAMES
    things = words.THINGS if phrasing == "train" else words.HELD_OUT_THINGS
    first = words.proper_name(rng, names, 0.2)
    return {
        "a": str(rng.randint(2, most)),
        "b": str(rng.randint(2, max(9, most // 2))),
        "c": str(rng.randint(2, max(9, most // 3))),
        "d": str(rng.randint(2, most)),
        "e": str(small),
        "m": str(small * rng.randint(2, max(9, most // 3))),
        "f": str(rng.randint(2, 15)),
        "g": str(rng.randint(2, 6)),
        "i": str(rng.randint(3, 90)),
        "k": str(percent) if rng.random() < 0.93 or progress < 0.5 else f"{percent}.5",
        "p": price if progress > 0.15 else str(rng.randint(2, 20)),
        "q": other if progress > 0.15 else str(rng.randint(2, 20)),
        "x": rng.choice(things),
        "y": rng.choice(words.GOODS),
        "N": first,
        "M": rng.choice([name for name in names if name != first]),
    }


def _filled(rng: Random, template: str, blanks: dict[str, str], typed: bool) -> str:
    money = rng.choice(("", "", "$", "€"))

    def fill(match: re.Match[str]) -> str:
        text = blanks.get(match[1], f"{{{match[1]}}}")
        if not typed or not text.replace(".", "").isdigit():
            return text + match[2]
        # Prices may carry a sign, lengths and weights do not.
        sign = money if match[1] in "pq" and not match[2] else ""
        return sign + as_typed(rng, text, spell=not sign) + match[2]

    return re.sub(r"\{(\w)\}((?: km| kg)?)", fill, template)


def phrased(rng: Random, phrasing: Phrasing, progress: float, kind: str) -> Sum:
    """A sum in a fixed turn of phrase: percent, named or problem."""
    file = "word_problems" if kind == "problem" else "calculator"
    if kind == "problem" and phrasing == "train" and rng.random() < COMPOSED:
        template = stories.template(rng)
    else:
        template = phrases.read(file)[kind].ask(rng, phrasing)
    question, formula, *rest = template.split(" | ")
    for _ in range(300):
        blanks = _blanks(rng, phrasing, progress, template)
        text = _filled(rng, formula, blanks, typed=False)
        result = arithmetic_expression.value(text)
        # How many are left is a whole number above one, unless it is about money or distances.
        broken = any(place in formula for place in ("{p}", "{q}", "- {k}"))
        whole = kind != "problem" or (result > 1 and (broken or arithmetic_expression.ends(result, 0)))
        if whole and _fine(text, 4) and (kind == "problem" or "- {k}" in formula or result >= 0):
            break
    asked = _filled(rng, casual(rng, question, 0.03), blanks, typed=True)
    if kind != "problem":
        return Sum(kind, asked, text)
    thought, answer = (_filled(rng, part, blanks, typed=False) for part in rest)
    return Sum(kind, asked, text, thought, answer)


def sample(rng: Random, phrasing: Phrasing, progress: float, kind: str | None = None) -> Sum:
    """One sum; `kind` is bare, percent, named or problem."""
    kind = kind or rng.choices(("bare", "percent", "named", "problem"), (40, 12, 18, 30))[0]
    return bare(rng, phrasing, progress) if kind == "bare" else phrased(rng, phrasing, progress, kind)
