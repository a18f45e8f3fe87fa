"""Encyclopaedic paragraphs on unheard-of things, and questions about them.

    Dorville lies on the banks of the Kelmere. The town, which was founded in 1431, is known for its salt mines.
    "how old is Dorville, when did it start?" → the second sentence

Other passages tell the same of other entities and other things of the same one, so only the sentence that has both the
entity and the relation will do. The relations and their wordings are in `facts.toml`. Knows nothing of chats.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from random import Random

from training.conversation import Phrasing
from training.text import entities
from training.text.passages import MAX_WORDS_LENGTH, Asked, Page, QuotedPassage

_FACTS: dict[str, dict[str, dict[str, str | dict[str, list[str]]]]] = tomllib.loads(
    Path(__file__).with_name("facts.toml").read_text(encoding="utf-8")
)
# Relations that a sentence of the other might answer: the one is never called absent where the other is stated.
_NEAR = (
    {"river", "region", "twin"},
    {"river", "known"},
    {"source", "mouth"},
    {"born_place", "buried"},
    {"habitat", "colour"},
    {"spread", "cure"},
    {"closed", "bought"},
    {"job", "studied", "prize", "invented"},
)
_OPENINGS = (
    *("According to the records, ", "As is well known, ", "In spite of many doubts, ", "By all accounts, ", "Today, "),
    *("After years of uncertainty, ", "As the archives show, ", "Contrary to popular belief, ", "At the time, "),
    *("In the words of a local newspaper, ", "Following a long dispute, ", "In a report from the capital, "),
    *("Despite its small size, ", "Unlike its neighbours, ", "Since the reform of the old order, ", "Notably, "),
)
_TAILS = (
    *(", although some sources disagree", ", as an old chronicle notes", ", which surprised many at the time"),
    *(", according to a report of {y}", " (see the list of {y})", ", a fact that is still debated", ", as of {y}"),
    *(", much to the regret of the locals", ", and little has changed since", " despite several attempts to stop it"),
    *(", which is more than in any year before {y}", ", mainly for economic reasons", " with the help of volunteers"),
    *(", a record that stood until {y}", ", as every child in the area learns", ", though the exact details are lost"),
)
_FILLERS = (
    *("Little is known about the early years.", "The weather in the area is mild for most of the year."),
    *("Several books have been written on the subject.", "Opinions on this differ widely among scholars."),
    *("A detailed report was published in {y}.", "The original documents were lost in {y}."),
    *("Critics have called this an exaggeration.", "Since {y} the situation has slowly improved."),
    *("Many of the older stories cannot be confirmed.", "In {y} a postage stamp was issued to mark the occasion."),
    *("The question is still open.", "There have been complaints from people nearby.", "Further studies are planned."),
    *("A second volume, which appeared in {y}, deals with the details.", "None of this was known before {y}."),
    *("During the war years all activity came to a halt.", "For a long time the matter received no attention."),
    *("The costs were shared between the state and private donors.", "Later attempts were less successful."),
    *("It is often confused with a similar name from the east.", "Pictures from that time are rare."),
)


@dataclass(frozen=True, slots=True)
class Relation:
    kind: str
    name: str
    value: str
    says: tuple[str, ...]
    asks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Told:
    relation: Relation
    entity: str
    value: str
    passage: int
    sentence: str


def relations(phrasing: Phrasing) -> dict[str, tuple[Relation, ...]]:
    """By kind of entity. Held-out: the held-out wordings of all relations, and all wordings of the held-out ones."""
    out: dict[str, tuple[Relation, ...]] = {}
    for kind, table in _FACTS.items():
        found = []
        for name, entry in table.items():
            says, asks, value = entry["says"], entry["asks"], entry["value"]
            if isinstance(says, str) or isinstance(asks, str) or not isinstance(value, str):
                raise TypeError(f"{kind}.{name} in facts.toml is not a relation")
            whole = "held_out" not in says
            if phrasing == "train" and not whole:
                found.append(Relation(kind, name, value, tuple(says["train"]), tuple(asks["train"])))
            if phrasing == "held_out":
                part = "train" if whole else "held_out"
                found.append(Relation(kind, name, value, tuple(says[part]), tuple(asks[part])))
        out[kind] = tuple(found)
    return {kind: found for kind, found in out.items() if found}


_RELATIONS: dict[Phrasing, dict[str, tuple[Relation, ...]]] = {
    "train": relations("train"),
    "held_out": relations("held_out"),
}


def _near(one: str, other: str) -> bool:
    return any(one in group and other in group for group in _NEAR)


def _subject(rng: Random, kind: str, pronoun: str) -> str:
    nouns = entities.KINDS[kind][1]
    return rng.choice(nouns) if nouns and rng.random() < 0.6 else pronoun


def _with_subject(form: str, entity: str, other: str) -> str:
    """The form with `other` ("it", "the town") for the entity where the form opens with it."""
    if other and form.startswith("{e} "):
        return other + form[3:]
    if other and form.startswith("{e}'s "):
        own = {"it": "its", "he": "his", "she": "her"}.get(other, f"{other}'s")
        return own + form[5:]
    return form.replace("{e}", entity)


def _sentence(rng: Random, told: list[tuple[Relation, str]], entity: str, other: str, ornate: float) -> str:
    """One or two facts as one sentence; `other` is a pronoun to be used for the entity, or empty."""
    (relation, value), *more = told
    form = rng.choice(relation.says)
    text = _with_subject(form, entity, other).replace("{v}", value)
    if more:
        second = rng.choice(more[0][0].says)
        if second.startswith("{e} "):
            tail = second[4:].replace("{v}", more[0][1])
            if form.startswith("{e} ") and rng.random() < 0.5:
                head = other or entity
                relative = "who" if relation.kind == "person" else "which"
                text = f"{head}, {relative} {text.removeprefix(head + ' ')}, {tail}"
                text = text if not other or other.startswith("the ") else f"{head} {tail}, and {head} {form[4:]}"
                text = text.replace("{v}", value)
            elif form.startswith("{e} "):
                text = f"{text} and {tail}"
            else:
                text = f"{text}, while {_with_subject(second, entity, other or entity).replace('{v}', more[0][1])}"
        else:
            text = f"{text}; {second.replace('{e}', entity).replace('{v}', more[0][1])}"
    if rng.random() < ornate:
        text += rng.choice(_TAILS).replace("{y}", str(rng.randint(1700, 2020)))
    if rng.random() < ornate * 0.6:
        text = rng.choice(_OPENINGS) + text
    return text[0].upper() + text[1:] + "."


def _new_entity(rng: Random, phrasing: Phrasing, kind: str, taken: set[str]) -> tuple[str, str]:
    """Its name and its pronoun."""
    while (entity := entities.name(rng, kind, phrasing)) in taken:
        pass
    taken.add(entity)
    return entity, rng.choice(("he", "she")) if kind == "person" else "it"


def _passage(
    rng: Random,
    phrasing: Phrasing,
    kind: str,
    at: int,
    count: int,
    rich: float,
    wanted: list[Relation],
    taken: set[str],
) -> tuple[QuotedPassage, list[_Told]]:
    entity, pronoun = _new_entity(rng, phrasing, kind, taken)
    title = re.sub(r"^(the|The) ", "", entity)
    of_kind = _RELATIONS[phrasing][kind]
    known = [*wanted, *(one for one in rng.sample(of_kind, len(of_kind)) if one not in wanted)]
    sentences: list[str] = []
    told: list[_Told] = []
    fresh = True  # the sentence before is not about the entity: name it
    queue = rng.sample(known[: max(1, count)], len(known[: max(1, count)])) + known[max(1, count) :]
    while len(sentences) < count:
        if not queue and rng.random() < 0.7:
            kind = rng.choice(tuple(_RELATIONS[phrasing]))
            entity, pronoun = _new_entity(rng, phrasing, kind, taken)
            fresh = True
            queue = rng.sample(_RELATIONS[phrasing][kind], len(_RELATIONS[phrasing][kind]))
        if not queue or (sentences and rng.random() < 0.15 * rich):
            filler = rng.choice(_FILLERS).replace("{y}", str(rng.randint(1700, 2020)))
            if filler in sentences:
                break
            sentences.append(filler)
            fresh = True
            continue
        facts = [queue.pop(0)]
        if queue and rng.random() < 0.35 * rich:
            facts.append(queue.pop(0))
        values = [(fact, entities.value(rng, fact.value, phrasing)) for fact in facts]
        other = _subject(rng, kind, pronoun) if not fresh and rng.random() < 0.5 * rich else ""
        fresh = False
        text = _sentence(rng, values, entity, other, 0.3 * rich)
        told += [_Told(fact, entity, value, at, text) for fact, value in values]
        sentences.append(text)
    return QuotedPassage(title[0].upper() + title[1:], tuple(sentences)), told


def _question(rng: Random, relation: Relation, entity: str, alone: bool) -> str:
    text = rng.choice(relation.asks)
    nouns = entities.KINDS[relation.kind][1]
    if alone and nouns and "{e}?" in text and rng.random() < 0.2:
        return text.replace("{e}", rng.choice(nouns))
    return text.replace("{e}", entity)


def _reversed(rng: Random, told: _Told, page: list[_Told]) -> str:
    """The question for the entity of a value, or nothing where the value does not decide it."""
    form = rng.choice(told.relation.says)
    if not form.startswith("{e} ") or any(one.value == told.value and one.entity != told.entity for one in page):
        return ""
    nouns = entities.KINDS[told.relation.kind][1]
    which = f"which {rng.choice(nouns)[4:]}" if nouns else "who"
    return f"{which} {form[4:].replace('{v}', told.value)}?"


def _absent(rng: Random, phrasing: Phrasing, page: list[_Told], hard: float) -> str:
    """A question that no sentence answers: of an entity that is not there, or of a fact missing for one that is."""
    one = rng.choice(page)
    names = {told.entity for told in page}
    if rng.random() < 0.5 * hard + 0.2:
        known = [told.relation.name for told in page if told.entity == one.entity]
        open_ones = [
            relation
            for relation in _RELATIONS[phrasing][one.relation.kind]
            if not any(relation.name == name or _near(relation.name, name) for name in known)
        ]
        if open_ones:
            return _question(rng, rng.choice(open_ones), one.entity, False)
    kind = one.relation.kind
    relation = one.relation
    if rng.random() > hard:
        kind = rng.choice(tuple(_RELATIONS[phrasing]))
        relation = rng.choice(_RELATIONS[phrasing][kind])
    entity = entities.name(rng, kind, phrasing)
    while any(entity in name or name in entity for name in names):
        entity = entities.name(rng, kind, phrasing)
    return _question(rng, relation, entity, False)


def page(
    rng: Random, phrasing: Phrasing, counts: list[int], rich: float, questions: int, absent: float, kind: str = ""
) -> Page:
    """Passages of `counts` sentences; `rich` (0 to 1) is how ornate they are, `absent` the share of open questions."""
    kinds = tuple(_RELATIONS[phrasing])
    main = kind or rng.choice(kinds)
    wanted = rng.sample(_RELATIONS[phrasing][main], min(2, len(_RELATIONS[phrasing][main])))
    passages: list[QuotedPassage] = []
    page_told: list[_Told] = []
    taken: set[str] = set()
    for at, count in enumerate(counts):
        its_kind = main if at == 0 or rng.random() < 0.6 else rng.choice(kinds)
        shared = wanted if its_kind == main and (at == 0 or rng.random() < 0.7) else []
        passage, told = _passage(rng, phrasing, its_kind, at, count, rich, shared, taken)
        if sum(len(one.text.split()) for one in (*passages, passage)) > MAX_WORDS_LENGTH:
            break
        passages.append(passage)
        page_told += told
    return Page(tuple(passages), tuple(_asked(rng, phrasing, page_told, rich, questions, absent)))


def _asked(
    rng: Random, phrasing: Phrasing, page: list[_Told], rich: float, questions: int, absent: float
) -> list[Asked]:
    """Fewer than `questions` where the page has not enough to ask."""
    alone = len({told.entity for told in page}) == 1
    order = rng.sample(page, len(page))
    asked: list[Asked] = []
    for _ in range(min(questions, len(page) + 1)):
        if rng.random() < absent:
            asked.append(Asked(_absent(rng, phrasing, page, rich)))
        elif order:
            told = order.pop()
            text = _question(rng, told.relation, told.entity, alone)
            if rng.random() < 0.12:
                text = _reversed(rng, told, page) or text
            asked.append(Asked(text, told.sentence, told.passage, told.value))
    return asked
