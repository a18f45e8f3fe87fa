"""Arithmetic through a tool: the model writes the expression, the tool works it out, the model says the result.

    tools: {"name": "calculator", "description": "Evaluate an arithmetic expression exactly.", …}
    user: what's 12,345 + 678?
    assistant: <tool_call>{"name": "calculator", "arguments": {"expression": "12345 + 678"}}</tool_call>
    tool: 13023
    assistant: 12345 + 678 = 13023.

The tool's name, description and parameter vary, and tools that are not needed stand beside it. The sums are those of
`training.sums`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from training import phrases, sums
from training.conversation import Case, Conversation, Message, ModelReply, Phrasing, SpokenCall, Tool, Verdict
from training.tasks import identity
from training.text import arithmetic_expression

CALLED, ANSWERED = "right expression in a valid call", "final answer right"  # the measures of a case
NO_RESULT = "Division by zero has no result."
TEMPLATED = {"result": '{"result": %s}', "sentence": "Result: %s", "equals": "= %s"}


def function(name: str, description: str, parameter: str, hint: str = "") -> Tool:
    """A tool with one parameter, a string; `hint` describes it."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string", **({"description": hint} if hint else {})}},
                "required": [parameter],
            },
        },
    }


@dataclass(frozen=True, slots=True)
class Calculator:
    name: str
    description: str
    parameter: str
    hint: str = ""

    def tool(self) -> Tool:
        return function(self.name, self.description, self.parameter, self.hint)

    def call(self, text: str) -> SpokenCall:
        return SpokenCall(self.name, {self.parameter: text})

    def asked(self, call: SpokenCall) -> str | None:
        """The expression in a valid call of this tool."""
        text = call.arguments.get(self.parameter)
        valid = call.name == self.name and list(call.arguments) == [self.parameter] and isinstance(text, str)
        return text if valid else None

    def answer(self, call: SpokenCall) -> str:
        """Returns the content of the tool message for the model's expression."""
        text = self.asked(call)
        if text is None:
            return f'error: call {self.name} with "{self.parameter}"'
        return arithmetic_expression.answer(text)


CANONICAL = Calculator("calculator", "Evaluate an arithmetic expression exactly.", "expression")


def calculator(rng: Random, phrasing: Phrasing, canonical: float = 0.6) -> Calculator:
    if rng.random() < canonical:
        return CANONICAL
    name, description, parameter = phrases.read("calculator")["tool"].ask(rng, phrasing).split(" | ")
    hint = phrases.read("calculator")["hint"].ask(rng, phrasing) if rng.random() < 0.3 else ""
    return Calculator(name, description, parameter, hint)


def others(rng: Random, phrasing: Phrasing, count: int) -> list[Tool]:
    """Tools that no sum needs."""
    kind = phrases.read("calculator")["other"]
    lines = rng.sample(kind.train if phrasing == "train" else kind.held_out, count)
    return [function(*line.split(" | ")) for line in lines]


def tool_list(rng: Random, phrasing: Phrasing, progress: float, calc: Calculator) -> tuple[Tool, ...]:
    """The calculator among none to three others."""
    most = 0 if progress < 0.15 else 1 if progress < 0.4 else 3
    tools = [calc.tool(), *others(rng, phrasing, rng.randint(0, most) if rng.random() < 0.6 else 0)]
    rng.shuffle(tools)
    return tuple(tools)


def turn(rng: Random, made: sums.Sum, calc: Calculator, thinking: bool, style: str | None = None) -> list[Message]:
    """The question, the call, the tool's answer and the final sentence."""
    thought = made.thought if thinking else ""
    result = calc.answer(calc.call(made.expression))
    said = NO_RESULT if result.startswith("error") else made.said(result)
    # Not every calculator answers with the bare number.
    told = TEMPLATED[style] % result if style and not result.startswith("error") else result
    return [
        Message("user", made.question),
        Message("assistant", thinking=thought, calls=(calc.call(made.expression),)),
        Message("tool", told),
        Message("assistant", said),
    ]


def _by_zero(rng: Random) -> sums.Sum:
    number = rng.randint(1, 9999)
    ways = (f"{number} / 0", f"what is {number} divided by 0?", f"divide {number} by zero", f"{number}/0?")
    return sums.Sum("bare", rng.choice(ways), f"{number} / 0")


def _further(rng: Random, phrasing: Phrasing, previous: sums.Sum) -> sums.Sum | None:
    """A step on from the last result."""
    result = previous.result()
    if result < 0 or not arithmetic_expression.ends(result, 2) or result > 10**6:
        return None
    sign = rng.choice(tuple(phrases.read("follow_up")))
    number = str(rng.randint(2, 99))
    question = phrases.read("follow_up")[sign].ask(rng, phrasing).replace("{b}", number)
    sign = {"×": "*"}.get(sign, sign)
    return sums.Sum("bare", question, f"{arithmetic_expression.written(result)} {sign} {number}")


def _chained(rng: Random, phrasing: Phrasing, calc: Calculator, first: sums.Sum) -> list[Message] | None:
    """Two calls in a row: the second goes on from the first one's result."""
    then = _further(rng, phrasing, first)
    if then is None:
        return None
    asked = f"{first.question.rstrip('?.! ')}, and then {then.question[:1].lower()}{then.question[1:]}"
    (_, called, result, _), (_, *rest) = turn(rng, first, calc, False), turn(rng, then, calc, False)
    return [Message("user", asked), called, result, *rest]


def conversation(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    calc = calculator(rng, phrasing)
    messages: list[Message] = []
    if rng.random() < 0.15:
        messages.append(Message("system", identity.plain_system(rng)))
    thinking = rng.random() < 0.8
    turns = 1 if rng.random() < 0.5 else rng.randint(2, 4)
    style = rng.choice(tuple(TEMPLATED)) if calc != CANONICAL and progress > 0.4 and rng.random() < 0.3 else None
    previous: sums.Sum | None = None
    for at in range(turns):
        further = _further(rng, phrasing, previous) if previous and progress > 0.3 and rng.random() < 0.15 else None
        made = further or sums.sample(rng, phrasing, progress)
        by_zero = progress > 0.3 and rng.random() < 0.02
        if by_zero:
            made = _by_zero(rng)
        may_chain = progress > 0.3 and not by_zero and rng.random() < 0.1
        chained = _chained(rng, phrasing, calc, made) if may_chain else None
        if chained is not None:
            messages += chained
            previous = None
            continue
        messages += turn(rng, made, calc, thinking and at == turns - 1, style)
        previous = None if by_zero else made
    return Conversation(tuple(messages), tool_list(rng, phrasing, progress, calc), thinking)


def judge(made: sums.Sum, calc: Calculator) -> Callable[[Sequence[ModelReply]], Verdict]:
    """One valid call with an expression of the right value, and the result in the last message."""

    def judged(replies: Sequence[ModelReply]) -> Verdict:
        if not replies:
            return {CALLED: False, ANSWERED: False}
        truth = made.result()
        first, last = replies[0], replies[-1]
        text = calc.asked(first.calls[0]) if len(first.calls) == 1 and not first.broken else None
        called = False
        if text is not None and not text.strip("-. ").replace(".", "").isdigit():
            try:
                called = arithmetic_expression.value(text) == truth
            except arithmetic_expression.ExpressionError:
                called = False
        answered = (
            not last.broken and not last.calls and arithmetic_expression.states(last.content, truth, made.question)
        )
        return {CALLED: called, ANSWERED: answered}

    return judged


def case(rng: Random, kind: str | None = None, phrasing: Phrasing = "held_out") -> Case:
    """One sum, a third of the time after another one; `kind` as in `training.sums.sample`."""
    calc = calculator(rng, phrasing)
    messages: list[Message] = []
    if rng.random() < 0.33:
        messages += turn(rng, sums.sample(rng, phrasing, 1.0), calc, thinking=False)
    made = sums.sample(rng, phrasing, 1.0, kind)
    asked, called, _, said = turn(rng, made, calc, thinking=True)
    return Case(
        prompt=Conversation((*messages, asked), tool_list(rng, phrasing, 1.0, calc)),
        judge=judge(made, calc),
        wanted=(ModelReply(called.thinking, "", called.calls), ModelReply("", said.content, ())),
        answer_call=calc.answer,
    )
