"""Abilities together in one chat: thinking, tools, sources, memory and plain talk.

    user: how high is the summit of Mount Goom?
    assistant: <tool_call>{"name": "search", "arguments": {"query": "how high is the summit of Mount Goom"}}</tool_call>
    tool: [S1] Goom is a mountain. … [S2] The summit stands at 3,120 metres. …
    assistant: [S2] The summit stands at 3,120 metres.

Four kinds: `thought` (a word problem with a thought, then the calculator), `search` (above), `compute` (two numbers of
the sources, then the calculator) and `choose` (sources, a calculator and chat, as each question needs). Wording is in
`phrases/joint.toml`; passages come from `training.text.paragraphs`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from training import phrases, sums
from training.conversation import Case, Conversation, Message, ModelReply, Phrasing, SpokenCall, Tool, Verdict
from training.tasks import beyond, calculator, grounded, identity, memory, smalltalk
from training.tasks.calculator import ANSWERED, Calculator
from training.text import framing, paragraphs, words
from training.text.noise import casual
from training.text.passages import Asked, Page

Kind = Literal["thought", "search", "compute", "choose"]

FOUND, NOT_CALLED, CITED = "right search in a valid call", "no call", "right sources"  # the measures of a case

_LABEL = re.compile(r"\[(S\d+)\]")


def _sources(page: Page) -> str:
    return "\n".join(f"[S{at}] {passage.text}" for at, passage in enumerate(page.passages, 1))


def _said(asked: Asked) -> str:
    return grounded.quoted(asked, f"S{asked.passage + 1}")


def _page(rng: Random, phrasing: Phrasing, progress: float, questions: int, absent: float = 0.25) -> Page:
    most = 1 if progress < 0.15 else 2 if progress < 0.4 else 3
    counts = [rng.randint(1, 1 if progress < 0.15 else 3) for _ in range(rng.randint(1, most))]
    while True:
        page = paragraphs.page(rng, phrasing, counts, min(1.0, progress * 2), questions, absent)
        if page.asked:
            return page


@dataclass(frozen=True, slots=True)
class Computed:
    """Two facts for the sources, and the sum that they allow; `facts` of the two are needed, the first or both."""

    facts: tuple[str, str]
    sum: sums.Sum

    def needed(self) -> tuple[int, ...]:
        """Returns which of the facts hold a number of the expression."""
        wanted = set(re.findall(r"[\d.]+\d|\d", self.sum.expression))
        return tuple(at for at, fact in enumerate(self.facts) if wanted & set(re.findall(r"[\d.]+\d|\d", fact)))


def computed(rng: Random, phrasing: Phrasing, progress: float) -> Computed:
    template = phrases.read("joint")["compute"].ask(rng, phrasing)
    most = 40 if progress < 0.2 else rng.choice((90, 900, 20000))
    year = rng.randint(1200, 1980)
    large, small = sorted((rng.randint(13, most), rng.randint(13, most + 5)), reverse=True)
    if large == small:
        large += 3
    blanks = {
        "a": str(large),
        "b": str(small),
        "u": str(year),
        "v": str(year + rng.randint(2, 70)),
        "e": str(rng.randint(2, 12)),
        "p": rng.choice((str(rng.randint(13, 99)), f"{rng.randint(2, 90)}.{rng.choice(('50', '5', '25', '90'))}")),
        "q": str(rng.randint(100, 900)),
        "x": words.made_up(rng, rng.randint(2, 3)).capitalize(),
        "y": words.made_up(rng, rng.randint(2, 3)).capitalize(),
    }
    filled = re.sub(r"\{(\w)\}", lambda match: blanks.get(match[1], match[0]), template)
    one, two, question, formula, answer = filled.split(" | ")
    return Computed((one, two), sums.Sum("compute", casual(rng, question, 0.03), formula, answer=answer))


@dataclass(frozen=True, slots=True)
class _Mixed:
    """Sources that hold a page and the facts of several sums; `at` gives the number of a passage or a fact in them."""

    text: str
    at: dict[tuple[str, int], int]

    def quoted(self, asked: Asked) -> str:
        number = self.at.get(("page", asked.passage))
        return grounded.quoted(asked, f"S{number}")

    def labels(self, which: int, made: Computed) -> str:
        numbers = sorted(self.at[f"fact {which}", at] for at in made.needed())
        return " ".join(f"[S{number}]" for number in numbers)


def _mixed(rng: Random, page: Page, made: Sequence[Computed]) -> _Mixed:
    texts = [(passage.text, ("page", at)) for at, passage in enumerate(page.passages)]
    for which, one in enumerate(made):
        for at, fact in enumerate(one.facts):
            texts.insert(rng.randint(0, len(texts)), (fact, (f"fact {which}", at)))
    lines = (f"[S{number}] {text}" for number, (text, _) in enumerate(texts, 1))
    return _Mixed("\n".join(lines), {origin: number for number, (_, origin) in enumerate(texts, 1)})


def _instructed(rng: Random, phrasing: Phrasing, sources: str) -> Message:
    instruction = phrases.read("grounded")["instruction"].ask(rng, phrasing)
    return Message("system", f"{instruction}\n{sources}" if rng.random() < 0.7 else sources)


def _asks(rng: Random, phrasing: Phrasing, asked: Asked) -> str:
    wording = phrases.read("grounded")["question"].ask(rng, phrasing).replace("{q}", asked.text)
    return casual(rng, wording, 0.02)


def _compute_turn(rng: Random, made: Computed, labels: str, calc: Calculator) -> list[Message]:
    *before, last = calculator.turn(rng, made.sum, calc, thinking=False)
    return [*before, Message("assistant", f"{last.content} {labels}")]


@dataclass(frozen=True, slots=True)
class _OurSearch(Calculator):
    """The search that Ponder itself offers: its results stand between marks, each with its place."""

    def tool(self) -> Tool:
        return framing.SEARCH


def _search_tool(rng: Random, phrasing: Phrasing) -> Calculator:
    """A tool of one text; the calculator's shape, without its arithmetic."""
    if rng.random() < 0.5:
        return _OurSearch("search_documents", "", "query")
    return Calculator(*phrases.read("joint")["search"].ask(rng, phrasing).split(" | "))


def _found(rng: Random, tool: Calculator, sources: str) -> str:
    """Returns the search's result: lines that begin with their labels."""
    if isinstance(tool, _OurSearch):
        return framing.frame("\n".join(framing.placed(rng, line) for line in sources.splitlines()), tool.name)
    return framing.often_framed(rng, sources, tool.name, 0.3)


def _search_turn(rng: Random, phrasing: Phrasing, page: Page, asked: Asked, tool: Calculator) -> list[Message]:
    """The query is the question as it was typed: there is nothing to guess."""
    typed = asked.text.lower() if rng.random() < 0.3 else asked.text
    wording = casual(rng, phrases.read("joint")["look"].ask(rng, phrasing), 0.0)
    return [
        Message("user", wording.replace("{q}", typed)),
        Message("assistant", calls=(tool.call(typed.rstrip("?.! ")),)),
        Message("tool", _found(rng, tool, _sources(page))),
        Message("assistant", _said(asked)),
    ]


def _search_compute(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    """Two tools in a row: the facts are searched for, and the calculator works on them."""
    tool, calc = _search_tool(rng, phrasing), calculator.calculator(rng, phrasing)
    made = computed(rng, phrasing, progress)
    page = _page(rng, phrasing, progress * rng.random(), 1)
    sources = _mixed(rng, page, [made])
    asked, *then = _compute_turn(rng, made, sources.labels(0, made), calc)
    query = asked.content.rstrip("?.! ")
    messages = (
        asked,
        Message("assistant", calls=(tool.call(query),)),
        Message("tool", _found(rng, tool, sources.text)),
        *then,
    )
    return Conversation(messages, tuple(rng.sample([tool.tool(), calc.tool()], 2)))


def _search(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    tool = _search_tool(rng, phrasing)
    calc = calculator.calculator(rng, phrasing)
    messages: list[Message] = []
    for _ in range(1 if rng.random() < 0.6 else 2):
        page = _page(rng, phrasing, progress, 1)
        messages += _search_turn(rng, phrasing, page, page.asked[0], tool)
    if progress > 0.2 and rng.random() < 0.25:
        messages += calculator.turn(rng, sums.sample(rng, phrasing, progress), calc, thinking=True)
        return Conversation(tuple(messages), (tool.tool(), calc.tool()))
    beside = calculator.others(rng, phrasing, rng.randint(0, 2 if progress > 0.3 else 0))
    return Conversation(tuple(messages), tuple(rng.sample([tool.tool(), *beside], 1 + len(beside))))


def _thought(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    calc = calculator.calculator(rng, phrasing)
    made = sums.sample(rng, phrasing, progress, "problem")
    return Conversation(
        tuple(calculator.turn(rng, made, calc, thinking=True)), calculator.tool_list(rng, phrasing, progress, calc)
    )


def _talk(rng: Random, phrasing: Phrasing, facts: list[memory.Fact]) -> list[Message]:
    """One exchange that needs neither tool nor source."""
    kind = rng.random()
    if facts and kind < 0.5:
        made = memory.ask(rng, phrasing, facts[-1])
    elif kind < 0.5:
        made, known = memory.tell(rng, phrasing, memory.fact(rng, phrasing=phrasing))
        facts.append(known)
    elif kind < 0.6:
        made = identity.sample(rng, phrasing, kind="who")
    elif kind < 0.65:
        made = beyond.sample(rng, phrasing, kind="writing")
    else:
        made = smalltalk.sample(rng, phrasing)
    return [Message("user", made.user), Message("assistant", made.answer)]


def _choose(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    """Sources and a calculator at hand, or the calculator alone; the questions need one, the other, or neither."""
    calc = calculator.calculator(rng, phrasing)
    turns = 1 if rng.random() < 0.4 else rng.randint(2, 5)
    page = _page(rng, phrasing, progress, turns) if rng.random() < 0.6 else None
    facts: list[memory.Fact] = []
    messages = [_instructed(rng, phrasing, _sources(page))] if page else []
    questions = list(page.asked) if page else []
    for at in range(turns):
        kind = rng.random()
        if questions and kind < 0.4:
            asked = questions.pop()
            messages += [Message("user", _asks(rng, phrasing, asked)), Message("assistant", _said(asked))]
        elif kind < 0.7:
            made = sums.sample(rng, phrasing, progress)
            messages += calculator.turn(rng, made, calc, thinking=at == turns - 1)
        else:
            messages += _talk(rng, phrasing, facts)
    return Conversation(tuple(messages), calculator.tool_list(rng, phrasing, progress, calc))


def _compute(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    """One sum on the sources, or two questions more: another sum, and a sentence to quote."""
    calc = calculator.calculator(rng, phrasing)
    alone = rng.random() < 0.5 or progress < 0.1
    made = [computed(rng, phrasing, progress) for _ in range(1 if alone else 2)]
    page = _page(rng, phrasing, progress, 1)
    sources = _mixed(rng, page, made)
    turns = [_compute_turn(rng, one, sources.labels(which, one), calc) for which, one in enumerate(made)]
    if not alone:
        asked = page.asked[0]
        quote = [Message("user", _asks(rng, phrasing, asked)), Message("assistant", sources.quoted(asked))]
        turns.insert(rng.randint(0, 2), quote)
    messages = [_instructed(rng, phrasing, sources.text), *(message for turn in turns for message in turn)]
    return Conversation(tuple(messages), calculator.tool_list(rng, phrasing, progress, calc))


def conversation(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    makers = (_thought, _search, _search_compute, _compute, _choose)
    return rng.choices(makers, (12, 28, 22, 13, 25))[0](rng, phrasing, progress)


def _cites(content: str, labels: str) -> bool:
    return set(_LABEL.findall(content)) == set(_LABEL.findall(labels))


def _judge_computed(made: Computed, calc: Calculator, labels: str) -> Callable[[Sequence[ModelReply]], Verdict]:
    inner = calculator.judge(made.sum, calc)

    def judged(replies: Sequence[ModelReply]) -> Verdict:
        last = replies[-1].content if replies else ""
        if not last:
            return {**inner(replies), CITED: False}
        bare = ModelReply("", _LABEL.sub("", last), replies[-1].calls, replies[-1].broken)
        return {**inner([*replies[:-1], bare]), CITED: _cites(last, labels)}

    return judged


def _judge_found(asked: Asked, tool: Calculator | None) -> Callable[[Sequence[ModelReply]], Verdict]:
    """The whole sentence with its label, or the honest no; with `tool` after one valid call that asks for it."""

    def judged(replies: Sequence[ModelReply]) -> Verdict:
        if not replies:
            return {ANSWERED: False, **({FOUND: False} if tool else {NOT_CALLED: False})}
        first, last = replies[0], replies[-1]
        found = not last.broken and not last.calls and last.content.strip() == _said(asked)
        if tool is None:
            return {NOT_CALLED: not first.calls, ANSWERED: found}
        query = tool.asked(first.calls[0]) if len(first.calls) == 1 and not first.broken else None
        return {FOUND: query is not None and _related(query, asked), ANSWERED: found and len(replies) > 1}

    return judged


def _related(query: str, asked: Asked) -> bool:
    """Returns whether the query shares most of the longer words of the question."""
    words_asked = set(re.findall(r"\w{4,}", asked.text.lower()))
    return len(words_asked & set(re.findall(r"\w{4,}", query.lower()))) * 2 >= max(1, len(words_asked))


def case(rng: Random, kind: Kind | None = None, phrasing: Phrasing = "held_out") -> Case:
    """One question; in `choose` the sources answer and the calculator is not needed."""
    kind = kind or rng.choice(kinds())
    calc = calculator.calculator(rng, phrasing)
    tools = calculator.tool_list(rng, phrasing, 1.0, calc)
    if kind == "thought":
        made = sums.sample(rng, phrasing, 1.0, "problem")
        asked, called, _, said = calculator.turn(rng, made, calc, thinking=True)
        wanted = (ModelReply(called.thinking, "", called.calls), ModelReply("", said.content, ()))
        return Case(Conversation((asked,), tools), calculator.judge(made, calc), wanted, calc.answer)
    if kind == "compute":
        from_sources = computed(rng, phrasing, 1.0)
        sources = _mixed(rng, _page(rng, phrasing, 1.0, 1), [from_sources])
        labels = sources.labels(0, from_sources)
        asked, called, _, said = _compute_turn(rng, from_sources, labels, calc)
        prompt = Conversation((_instructed(rng, phrasing, sources.text), asked), tools)
        wanted = (ModelReply("", "", called.calls), ModelReply("", said.content, ()))
        return Case(prompt, _judge_computed(from_sources, calc, labels), wanted, calc.answer)
    page = _page(rng, phrasing, 1.0, 1)
    question = page.asked[0]
    if kind == "choose":
        user = Message("user", _asks(rng, phrasing, question))
        prompt = Conversation((_instructed(rng, phrasing, _sources(page)), user), tools)
        return Case(prompt, _judge_found(question, None), (ModelReply("", _said(question), ()),), calc.answer)
    tool = _search_tool(rng, phrasing)
    asked, called, _, said = _search_turn(rng, phrasing, page, question, tool)

    def answer_call(call: SpokenCall) -> str:
        query = tool.asked(call)
        if query is None:
            return f'error: call {tool.name} with "{tool.parameter}"'
        return _sources(page) if _related(query, question) else "no results"

    wanted = (ModelReply("", "", called.calls), ModelReply("", said.content, ()))
    return Case(Conversation((asked,), (tool.tool(),)), _judge_found(question, tool), wanted, answer_call)


def kinds() -> tuple[Kind, ...]:
    return ("thought", "search", "compute", "choose")
