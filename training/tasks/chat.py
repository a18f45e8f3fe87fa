"""Ordinary chats: small talk, facts told and asked, questions about the model and beyond it, strung together.

    user: hi, my dog is called Rex      user: what's the capital of Peru?      user: what is my dog called?
    answer: Good to know: your dog      answer: I do not know that. A larger   answer: Your dog is called Rex.
            is called Rex.                      model may: `ponder serve …`.

Every answer is learned, so one chat carries many lessons. A few chats have tools or sources that nothing in them needs.
Knows the tasks that answer without a tool; a long sum among them is only read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

from training.conversation import Case, Conversation, Message, ModelReply, Phrasing, Tool, Verdict
from training.exchange import Exchange
from training.tasks import arithmetic, beyond, calculator, counting, identity, memory, smalltalk
from training.text import words

CaseKind = Literal["memory", "memory unknown", "beyond", "identity", "smalltalk", "named by the system prompt"]

KINDS = ("tell", "ask", "unknown", "at once", "two", "correct", "beyond", "identity", "smalltalk", "counting", "sum")
WEIGHTS = (22, 28, 8, 4, 4, 6, 26, 14, 14, 3, 3)
ALONE = ("tell", "at once", "unknown", "beyond", "identity", "smalltalk", "counting")
ALONE_WEIGHTS = (10, 16, 6, 34, 18, 16, 3)
HOMES = {"home", "hometown"}
NOTES = ("The library opens at nine.", "The old mill was sold.", "Bread is baked on Fridays.", "The ferry was late.")


class _Chat:
    """Chat so far: its exchanges, and the latest value of every fact."""

    def __init__(self, rng: Random, phrasing: Phrasing, progress: float, name: str = "Pebble") -> None:
        self.rng, self.phrasing, self.progress, self.name = rng, phrasing, progress, name
        self.exchanges: list[Exchange] = []
        self.facts: dict[str, memory.Fact] = {}

    def _told(self, exchange: Exchange, *facts: memory.Fact) -> None:
        self.exchanges.append(exchange)
        for known in facts:
            self.facts[known.key.lower()] = known
            if also := known.also():
                self.facts[also.key.lower()] = also

    def _new_fact(self) -> memory.Fact:
        for _ in range(20):
            known = memory.fact(self.rng, phrasing=self.phrasing)
            others = self.facts.values()
            # "I come from Oslo" may be a home or a home town: one of them is enough in a chat.
            homes = known.kind in HOMES and any(other.kind in HOMES for other in others)
            named = known.also()
            taken = {known.key.lower(), named.key.lower() if named else ""} & set(self.facts)
            if not homes and not taken:
                break
        return known

    def tell(self) -> memory.Fact:
        passing = 0.3 if self.progress > 0.2 else 0.0
        told, known = memory.tell(self.rng, self.phrasing, self._new_fact(), passing)
        self._told(told, known)
        return known

    def add(self, kind: str, plain: bool = False) -> None:
        """One exchange; with `plain` none that tools or sources might answer."""
        rng, phrasing = self.rng, self.phrasing
        if kind == "tell" or (kind == "ask" and not self.facts):
            self.tell()
        elif kind == "correct":
            if self.facts and rng.random() < 0.5:
                self._told(*memory.tell_again(rng, phrasing, rng.choice(list(self.facts.values()))))
            else:
                self._told(*memory.correct(rng, phrasing, self.tell()))
        elif kind == "two":
            self._told_two()
        elif kind == "ask":
            self.exchanges.append(memory.ask(rng, phrasing, rng.choice(list(self.facts.values()))))
        elif kind == "unknown":
            self._unknown()
        elif kind == "at once":
            self.exchanges.append(memory.at_once(rng, phrasing))
        elif kind == "beyond" and not plain:
            self.exchanges.append(beyond.sample(rng, phrasing))
        elif kind == "identity":
            self.exchanges.append(identity.sample(rng, phrasing, name=self.name))
        elif kind == "counting":
            self.exchanges.append(counting.sample(rng, phrasing, highest=15 if self.progress < 0.15 else 60))
        elif kind == "sum" and not plain:
            self.exchanges.append(arithmetic.sample(rng, phrasing, digits=3))
        else:
            self.exchanges.append(smalltalk.sample(rng, phrasing))

    def _told_two(self) -> None:
        one, two = self._new_fact(), self._new_fact()
        if one.thing != two.thing and not {one.kind, two.kind} <= HOMES:
            told, facts = memory.tell_two(self.rng, self.phrasing, one, two)
            self._told(told, *facts)

    def _unknown(self) -> None:
        missing = self._new_fact()
        # A user whose home is known may be thought to have told a home town, too: ask for a clearly different fact.
        if all(missing.thing != known.thing and missing.kind != known.kind for known in self.facts.values()):
            self.exchanges.append(memory.ask(self.rng, self.phrasing, missing, told=False))

    def messages(self) -> list[Message]:
        """Sums are read but not learned here: without their working they would teach guessing."""
        out: list[Message] = []
        for made in self.exchanges:
            out += [Message("user", made.user), Message("assistant", made.answer, learned=made.task[:5] != "arith")]
        return out


def _surroundings(rng: Random, phrasing: Phrasing) -> tuple[str, tuple[Tool, ...]]:
    """Sources or tools that the chat does not need."""
    if rng.random() < 0.5:
        notes = rng.sample(NOTES, rng.randint(1, 3))
        return "\n".join(f"[S{at}] {note}" for at, note in enumerate(notes, 1)), ()
    return "", tuple(calculator.others(rng, phrasing, rng.randint(1, 3)))


def conversation(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    """One question half of the time, otherwise up to five."""
    name, system, tools, plain = "Pebble", "", tuple[Tool, ...](), False
    drawn = rng.random()
    if drawn < 0.1:
        name = words.proper_name(rng, (*words.NAMES, *words.PET_NAMES))
        system = identity.naming_system(rng, phrasing, name)
    elif drawn < 0.2:
        system = identity.plain_system(rng)
    elif drawn < 0.3 and progress > 0.15:
        plain = True
        system, tools = _surroundings(rng, phrasing)
    chat = _Chat(rng, phrasing, progress, name)
    turns = 1 if rng.random() < 0.4 else rng.randint(2, 3 if progress < 0.3 else 5)
    if turns == 1:
        chat.add("identity" if name != "Pebble" else rng.choices(ALONE, ALONE_WEIGHTS)[0], plain)
    while len(chat.exchanges) < turns:
        chat.add(rng.choices(KINDS, WEIGHTS)[0], plain)
    if turns > 1 and chat.facts and rng.random() < 0.5:
        chat.add("ask")
    while chat.exchanges[-1].task.startswith("arith"):
        chat.exchanges.pop()
        if not chat.exchanges:
            chat.add("smalltalk")
    opening = (Message("system", system),) if system else ()
    return Conversation((*opening, *chat.messages()), tools, rng.random() < 0.75)


def judge(right: str, measure: str) -> Callable[[Sequence[ModelReply]], Verdict]:
    """Returns a judge: the one message has the right answer, calls nothing, and ends by itself."""

    def judged(replies: Sequence[ModelReply]) -> Verdict:
        if not replies:
            return {measure: False}
        last = replies[-1]
        said = re.search(right, last.content, re.IGNORECASE | re.DOTALL) is not None
        return {measure: said and not last.calls and not last.broken}

    return judged


def case(rng: Random, kind: CaseKind) -> Case:
    """A question of that kind; a fact is asked after one to four other turns, and those often tell other facts."""
    name, system = "Pebble", ""
    if kind == "named by the system prompt":
        name = words.proper_name(rng, words.HELD_OUT_NAMES)
        system = identity.naming_system(rng, "held_out", name)
    chat = _Chat(rng, "held_out", 1.0, name)
    known = chat.tell() if kind == "memory" else None
    if kind.startswith("memory"):
        for _ in range(rng.randint(1, 4)):
            chat.add(rng.choices(("tell", "beyond", "identity", "smalltalk", "sum"), (3, 3, 2, 3, 1))[0])
    if known:
        chat.exchanges.append(memory.ask(rng, "held_out", known))
    elif kind == "memory unknown":
        while chat.exchanges[-1].task != "memory unknown":
            chat.add("unknown")
    elif kind == "beyond":
        chat.add("beyond")
    elif kind == "smalltalk":
        chat.add("smalltalk")
    else:
        chat.exchanges.append(identity.sample(rng, "held_out", "who" if system else None, name))
    *before, last = chat.messages()
    opening = (Message("system", system),) if system else ()
    return Case(
        prompt=Conversation((*opening, *before)),
        judge=judge(chat.exchanges[-1].right, kind),
        wanted=(ModelReply("", last.content, ()),),
    )


def kinds() -> tuple[CaseKind, ...]:
    return ("memory", "memory unknown", "beyond", "identity", "smalltalk", "named by the system prompt")
