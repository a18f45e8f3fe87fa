"""Two whole numbers and an operator, asked in many ways.

    user: what's 47 plus 85?
    thinking: the working of `training.tasks.working`
    answer: 47 + 85 = 132.

Without thinking, larger sums show the working in the answer instead. Sums out of reach are the business of
`training.tasks.beyond`. All wording is in `phrases/arithmetic.toml` and `phrases/follow_up.toml`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from training import phrases
from training.conversation import Case, Conversation, Message, ModelReply, Verdict
from training.exchange import Exchange, Phrasing
from training.tasks.working import result, work
from training.text.noise import casual

MAX_DIGITS = 4  # of each term of a sum, and of a dividend
MAX_DIVISOR = 12

WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)


def number(rng: Random, digits: int) -> int:
    """Of 1 to `digits` digits, each length equally often."""
    length = rng.randint(1, digits)
    return rng.randrange(0 if length == 1 else 10 ** (length - 1), 10**length)


def operands(rng: Random, operator: str, digits: int) -> tuple[int, int]:
    """A pair within the model's reach, of at most `digits` digits."""
    if operator in "+-":
        a, b = number(rng, digits), number(rng, digits)
        return (max(a, b), min(a, b)) if operator == "-" and rng.random() < 0.8 else (a, b)
    if operator == "×":
        pair = [number(rng, min(digits, 2)), number(rng, min(digits, 2))]
        if rng.random() < 0.3:
            pair = [number(rng, max(1, digits - 1)), number(rng, 1)]
        rng.shuffle(pair)
        return pair[0], pair[1]
    b = rng.randint(2, MAX_DIVISOR) if rng.random() < 0.95 else 1
    if rng.random() < 0.6:
        return b * rng.randint(1, max(1, (10 ** rng.randint(1, digits) - 1) // b)), b
    return number(rng, digits), b


def exchange(user: str, a: int, operator: str, b: int) -> Exchange:
    answer = result(a, operator, b)
    return Exchange(
        task=f"arithmetic {operator}",
        user=user,
        thinking="\n".join(work(a, operator, b)),
        answer=f"{a} {operator} {b} = {answer}.",
        right=rf"= {answer}\.$",
    )


def without_thinking(made: Exchange) -> Exchange:
    """Easy facts at once; otherwise the working becomes part of the answer."""
    if len(made.thinking.splitlines()) <= 2 and len(made.thinking) < 40:
        return made
    steps = f"Step by step:\n\n{made.thinking}\n\n{made.answer}"
    return Exchange(made.task, made.user, "", steps, made.right)


def sample(rng: Random, phrasing: Phrasing, digits: int = MAX_DIGITS, operator: str | None = None) -> Exchange:
    operator = operator or rng.choices("+-×/", (4, 4, 4, 3))[0]
    a, b = operands(rng, operator, digits)
    user = casual(rng, phrases.read("arithmetic")[operator].ask(rng, phrasing))
    spelled = a < len(WORDS) and b < len(WORDS) and user[-1] != "}" and " {b}" in user and rng.random() < 0.15
    left, right = (WORDS[a], WORDS[b]) if spelled else (str(a), str(b))
    return exchange(user.format(a=left, b=right), a, operator, b)


def follow_up(rng: Random, phrasing: Phrasing, previous: int) -> Exchange | None:
    """A step on from the last result, if that is within reach."""
    operator = rng.choice(tuple(phrases.read("follow_up")))
    b = number(rng, 2) if operator != "×" else rng.randint(2, 9)
    if not 0 <= previous < 1000 or (operator == "-" and b > previous):
        return None
    user = casual(rng, phrases.read("follow_up")[operator].ask(rng, phrasing)).format(b=b)
    return exchange(user, previous, operator, b)


def conversation(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    """One sum without a tool, worked out in thought, or in the answer where thinking is off."""
    made = sample(rng, phrasing, digits=1 + min(3, int(progress * 6)))
    thinks = rng.random() < 0.75
    made = made if thinks else without_thinking(made)
    written = Message("assistant", made.answer, thinking=made.thinking if thinks else "")
    return Conversation((Message("user", made.user), written), enable_thinking=thinks)


def case(rng: Random, operator: str, digits: int = MAX_DIGITS, *, enable_thinking: bool = True) -> Case:
    made = sample(rng, "held_out", digits, operator)
    made = made if enable_thinking else without_thinking(made)

    def judge(replies: Sequence[ModelReply]) -> Verdict:
        return {"right result": re.search(made.right, replies[-1].content) is not None}

    prompt = Conversation((Message("user", made.user),), enable_thinking=enable_thinking)
    return Case(prompt, judge, (ModelReply(made.thinking, made.answer, ()),))
