"""Facts the user tells, and questions about them later in the same chat.

    user: my dog is called Rex          user: what is my dog called?
    answer: Good to know: your dog      thinking: Asked: your dog is called. Told: Rex.
            is called Rex.              answer: Your dog is called Rex.

Values are often made-up words, so that the answer can only come from the chat. A question about something not told
gets an honest "not yet". All wording is in `phrases/memory_tell.toml` and `phrases/memory_ask.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from training import phrases, words
from training.exchange import Exchange, Phrasing
from training.noise import casual


@dataclass(frozen=True, slots=True)
class Fact:
    """`key` reads "your dog is called"; the value completes the sentence."""

    kind: str
    thing: str
    key: str
    value: str


def _kind_of_question(known: Fact) -> str:
    return "pet" if known.kind == "relative" else known.kind


def fact(rng: Random, kind: str | None = None) -> Fact:
    kind = kind or phrases.draw(rng, "memory_tell")
    if kind == "name":
        return Fact(kind, "name", "your name is", words.proper_name(rng, words.NAMES))
    if kind == "pet":
        pet = rng.choice(words.PETS)
        return Fact(kind, pet, f"your {pet} is called", words.proper_name(rng, words.PET_NAMES))
    if kind == "relative":
        relative = rng.choice(words.RELATIVES)
        return Fact(kind, relative, f"your {relative} is called", words.proper_name(rng, words.NAMES))
    if kind == "favourite":
        thing = rng.choice(tuple(words.FAVOURITES))
        value = words.made_up(rng, 2) if rng.random() < 0.15 else rng.choice(words.FAVOURITES[thing])
        return Fact(kind, thing, f"your favorite {thing} is", value)
    if kind == "home":
        return Fact(kind, "home", "you live in", words.proper_name(rng, words.CITIES))
    if kind == "job":
        return Fact(kind, "job", "you work as a", rng.choice(words.JOBS))
    return Fact(kind, "age", "your age is", str(rng.randint(5, 99)))


def _sentence(known: Fact) -> str:
    return f"{known.key[0].upper()}{known.key[1:]} {known.value}."


def _fill(rng: Random, phrase: str, known: Fact) -> tuple[str, Fact]:
    """The phrase as typed; whoever types without capitals types the name so too."""
    text = casual(rng, phrase)
    if text == text.lower() and phrase[0].isupper():
        known = Fact(known.kind, known.thing, known.key, known.value.lower())
    return text.replace("{t}", known.thing).replace("{v}", known.value), known


def tell(rng: Random, phrasing: Phrasing, known: Fact) -> tuple[Exchange, Fact]:
    user, known = _fill(rng, phrases.read("memory_tell")[known.kind].ask(rng, phrasing), known)
    answer = (
        f"Nice to meet you, {known.value}!" if known.kind == "name" else f"Good to know: {known.key} {known.value}."
    )
    thinking = f"Told: {known.key} {known.value}."
    return Exchange("memory tell", user, thinking, answer, rf"\b{known.value}\b"), known


def tell_two(rng: Random, phrasing: Phrasing, one: Fact, two: Fact) -> tuple[Exchange, list[Fact]]:
    """Two facts in one message."""
    first, one = tell(rng, phrasing, one)
    second, two = tell(rng, phrasing, two)
    joiner = rng.choice((" and ", ". ", ", and ", ", "))
    user = f"{first.user.rstrip('.!? ')}{joiner}{second.user}"
    answer = f"Good to know: {one.key} {one.value}, and {two.key} {two.value}."
    thinking = f"Told: {one.key} {one.value}, and {two.key} {two.value}."
    return Exchange("memory tell", user, thinking, answer, rf"\b{one.value}\b.*\b{two.value}\b"), [one, two]


def ask(rng: Random, phrasing: Phrasing, known: Fact, told: bool = True) -> Exchange:
    """Ask for `known`; with `told` false the answer is that it was never said."""
    user, _ = _fill(rng, phrases.read("memory_ask")[_kind_of_question(known)].ask(rng, phrasing), known)
    if told:
        thinking = f"Asked: {known.key}. Told: {known.value}."
        return Exchange("memory", user, thinking, _sentence(known), rf"\b{known.value}\b")
    thinking = f"Asked: {known.key}. Not told."
    answer = "I do not know that yet. Tell me, and I will remember it in this chat."
    return Exchange("memory unknown", user, thinking, answer, "do not know that yet")


def at_once(rng: Random, phrasing: Phrasing) -> Exchange:
    """A fact and the question about it in one message."""
    told, known = tell(rng, phrasing, fact(rng))
    asked = ask(rng, phrasing, known)
    joiner = rng.choice((". ", " ", ", ", ". So "))
    return Exchange("memory", told.user.rstrip(".!? ") + joiner + asked.user, asked.thinking, asked.answer, asked.right)
