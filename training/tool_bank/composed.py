"""Tools put together from parts: a verb or a question, a thing, and what else a call may take.

Sample: "grind barrel" with `name`, `hours`, `firm?`, asked for by "have the barrel Zorva milled through Norvex over 3
hours", "Clara mills the barrel Zorva over 3 hours" (with `who`) or "grind barrel Zorva: Norvex, 3". About 190 groups of
verbs and 40 questions, with up to four roles in any order, are more kinds of tools than a list can hold; a fifth of the
verbs are words that nobody knows. Evaluation has none of them. Knows nothing of chats.
"""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from training.conversation import Phrasing
from training.tool_bank import Ask, Concept, Param, plural, values

_PARTS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("composed.toml").read_text(encoding="utf-8"))
_WORD = re.compile(r"\b[VPSGAOR]\b")
_DOUBLED = re.compile(r"[^aeiou][aeiou][bdgmnpt]$")
VERBS = tuple(group.split("/")[0].split("=")[0] for group in _PARTS["verbs"]["all"])
QUESTIONS = tuple(_PARTS["questions"])
_INVENTED = 0.2  # share of the verbs that are made up
_WORDINGS = 6  # of one tool
_AGENT, _BARE, _ASKED_MORE = 0.35, 0.2, 0.4  # shares of tools that a person uses, of wordings, and of questions
_NUMBERS = frozenset({"int", "num", "amount"})
_NAMES = frozenset({"person", "city", "company", "team", "product", "made", "country", "fullname", "place"})


def action(rng: Random, phrasing: Phrasing, noun: str, verb: str = "") -> Concept:
    """A tool that does to `noun` what a verb says: `verb` or one of its synonyms; "": any, or a made-up one."""
    verb = verb or (values.made_up(rng, phrasing) if rng.random() < _INVENTED else rng.choice(VERBS))
    forms = _forms().get(verb) or ((verb, _participle(verb)),)
    attribute = _attribute(rng, phrasing)
    key, (base, _) = f"{phrasing}.action_{forms[0][0]}", rng.choice(forms)
    target, spoken = _object(rng, noun)
    roles = [
        _role(line, noun, attribute)
        for line in rng.sample(sorted(_PARTS["roles"].values()), rng.choice((0, 1, 1, 2, 2, 3)))
    ]
    params = [target, *(_optional(param, rng.random() < 0.5) for param, _, _ in roles)]
    roled = list(zip(params[1:], roles, strict=True))
    flags = rng.sample(sorted(_PARTS["flags"]), rng.random() < 0.25)
    params += [Param((name,), "bool", False, False, "") for name in flags]
    agent = _agent(rng) if rng.random() < _AGENT else None
    asks = []
    for _ in range(_WORDINGS):
        named = [(param, words) for param, (_, words, _) in roled if param.required or rng.random() < 0.5]
        raised = [name for name in flags if rng.random() < 0.5]
        kind = "agent" if agent and (agent.required or rng.random() < 0.5) else "all"
        said = [rng.choice(words) for _, words in named]
        if kind == "all" and not raised and _unlike([param for param, _ in named]) and rng.random() < _BARE:
            kind, said = "bare", [f"{{{param.names[0]}}}" for param, _ in named]
        said += [rng.choice(_PARTS["flags"][name].split("|")) for name in raised]
        rng.shuffle(said)
        by, done = rng.choice(forms)
        parts = {
            "V": by, "P": done, "S": third_person(by), "G": gerund(by, done), "O": rng.choice(spoken),
            "R": (", " if kind == "bare" else " ").join(said), "A": f"{{{agent.names[0]}}}" if agent else "",
        }  # fmt: skip
        asks.append(Ask(_wording(rng.choice(_PARTS["wordings"][kind]), parts), tuple((name, True) for name in raised)))
    params += [agent] if agent else []
    spoken_noun = noun.replace("_", " ")
    names = (f"{base} {noun}", f"{noun} {base}", base, f"{base} one {noun}", f"do {base} {noun}")
    described = [line[2] for line in roles] + [rng.choice(_PARTS["agent"]["does"])] * (agent is not None)
    about = "".join(f" {each}" for each in described if rng.random() < 0.6)
    does = tuple(
        f"{rng.choice(forms)[0].capitalize()} {what}{about}." for what in (_a(spoken_noun), plural(spoken_noun))
    )
    rng.shuffle(params)
    return Concept(key, names, does, tuple(params), tuple(asks), (), noun)


def question(rng: Random, phrasing: Phrasing, noun: str, asked: str = "") -> Concept:
    """A tool that answers one question about `noun`: `asked`, or any where that is ""."""
    asked = asked or rng.choice(QUESTIONS)
    kind, wordings = _PARTS["questions"][asked]
    target, spoken = _object(rng, noun)
    names = (
        f"get {asked}",
        f"{noun} {asked}",
        f"{asked} of {noun}",
        f"look up {asked}",
        f"{asked}",
        f"{noun} info {asked}",
    )
    params, roles = [target], []
    if rng.random() < _ASKED_MORE:
        lines = [_PARTS["roles"][name] for name in rng.sample(_PARTS["asked_with"]["roles"], rng.choice((1, 1, 2)))]
        roles = [_role(line, noun, _attribute(rng, phrasing)) for line in lines]
        params += [_optional(param, rng.random() < 0.5) for param, _, _ in roles]
    asks = []
    for _ in range(4):
        named = zip(params[1:], roles, strict=True)
        said = " ".join(rng.choice(words) for param, (_, words, _) in named if param.required or rng.random() < 0.5)
        wording, parts = rng.choice(wordings.split("|")), {"O": rng.choice(spoken).rstrip(","), "R": said}
        asks.append(Ask(_wording(f"R: {wording}" if rng.random() < 0.2 else wording.replace("?", " R?"), parts), ()))
    rng.shuffle(params)
    words, spoken_noun = asked.replace("_", " "), noun.replace("_", " ")
    does = (f"Tells the {words} of {_a(spoken_noun)}.", f"{words.capitalize()} of a given {spoken_noun}.")
    gives = (Param((asked,), kind, True, None, ""),)
    return Concept(f"{phrasing}.question_{asked}", names, does, tuple(params), tuple(asks), gives, noun)


def synonyms() -> list[tuple[str, ...]]:
    """The verbs, those of one meaning together."""
    return [tuple(verb for verb, _ in forms) for forms in _forms().values()]


@lru_cache
def _forms() -> dict[str, tuple[tuple[str, str], ...]]:
    """The verbs of a group with their past participles, by the group's first verb."""
    groups = ([verb.partition("=")[::2] for verb in group.split("/")] for group in _PARTS["verbs"]["all"])
    return {group[0][0]: tuple((verb, done or _participle(verb)) for verb, done in group) for group in groups}


def _participle(verb: str) -> str:
    word, space, particle = verb.partition(" ")
    if word.endswith("e"):
        done = word + "d"
    elif word.endswith("y") and word[-2] not in "aeiou":
        done = word[:-1] + "ied"
    elif len(word) < 5 and _DOUBLED.search(word):
        done = word + word[-1] + "ed"
    else:
        done = word + "ed"
    return done + space + particle


def third_person(verb: str) -> str:
    """Sample: "turn down" → "turns down"."""
    word, space, particle = verb.partition(" ")
    if word.endswith(("s", "x", "z", "ch", "sh", "o")):
        word += "e"
    if word.endswith("y") and word[-2] not in "aeiou":
        word = word[:-1] + "ie"
    return f"{word}s{space}{particle}"


def gerund(verb: str, participle: str) -> str:
    """Sample: "pin", "pinned" → "pinning"."""
    word, space, particle = verb.partition(" ")
    done = participle.partition(" ")[0]
    if done.endswith("ed") and not word.endswith("y"):
        word = done[:-2]
    elif word.endswith("e"):
        word = word[:-1]
    elif len(word) < 6 and _DOUBLED.search(word):
        word += word[-1]
    return f"{word}ing{space}{particle}"


def _attribute(rng: Random, phrasing: Phrasing) -> str:
    """An attribute that no object and no other role is called by."""
    taken = {
        name for names, *_ in (*_PARTS["objects"].values(), *_PARTS["roles"].values()) for name in names.split("|")
    }
    return rng.choice([name for name in values.bank("attribute", phrasing) if name not in taken])


def _agent(rng: Random) -> Param:
    """The parameter for who is to do it."""
    line = _PARTS["agent"]
    described = rng.choice(("", "Who does it", "The person in charge"))
    return Param(tuple(line["names"].split("|")), line["kind"], rng.random() < 0.6, None, described)


def _unlike(params: list[Param]) -> bool:
    """Returns whether there are parameters, and no two whose values could be taken for each other's."""
    kinds = ["number" if (kind := param.kind.split()[0]) in _NUMBERS else kind for param in params]
    kinds = ["name" if kind in _NAMES else kind for kind in kinds]
    return bool(kinds) and len(set(kinds)) == len(kinds) and values.TEXTS.isdisjoint(kinds)


def _object(rng: Random, noun: str) -> tuple[Param, list[str]]:
    """The parameter for the thing, and how a request speaks of it."""
    names, kind, spoken = _PARTS["objects"][rng.choice(("named", "named", "coded", "numbered", "several"))]
    names, spoken = (text.replace("<ns>", plural(noun)).replace("<n>", noun) for text in (names, _spoken(spoken, noun)))
    return Param(
        tuple(names.split("|")), kind, True, None, rng.choice(("", f"The {noun.replace('_', ' ')}"))
    ), spoken.split("|")


def _spoken(text: str, noun: str) -> str:
    """Things outside of slots without their underscores."""
    words = noun.replace("_", " ")
    parts = re.split(r"(\{[^}]*\})", text)
    return "".join(
        part if part[:1] == "{" else part.replace("<ns>", plural(words)).replace("<n>", words) for part in parts
    )


def _role(line: list[str], noun: str, attribute: str) -> tuple[Param, list[str], str]:
    """The parameter of a role, the words of a request for it, and those of a description."""
    names, kind, words, described = (
        part.replace("<n>", noun)
        .replace("an <a>", _a(attribute))
        .replace("<a>", attribute)
        .replace("<k>", values.ATTRIBUTES[attribute])
        for part in line
    )
    return Param(tuple(names.split("|")), kind, True, None, described.capitalize()), words.split("|"), described


def _optional(param: Param, required: bool) -> Param:
    return Param(param.names, param.kind, required, param.default, param.description)


def _wording(template: str, parts: dict[str, str]) -> str:
    text = _WORD.sub(lambda match: parts.get(match[0], match[0]), template)
    text = re.sub(r"\s+([,.?!:])", r"\1", re.sub(r"\s+", " ", text)).strip(" ,:").replace(",,", ",").replace(",?", "?")
    return text[0].upper() + text[1:] if len(text) % 2 and text[0] != "{" else text


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"
