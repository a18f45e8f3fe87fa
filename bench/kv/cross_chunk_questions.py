"""Made-up passages that lean on each other, and questions on them: planted ones that need several, and plain ones.

A structure's passage names its builder and its town; others tell of those. So a planted question compares, counts, or
goes from one passage to another. The words of planted questions were written before those that the test looks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

KINDS = ("bridge", "mill", "tower", "lighthouse", "aqueduct", "viaduct")
NAMES = (
    *("Harrow", "Velden", "Ostrick", "Quarrel", "Tamsin", "Brannoch", "Ilford", "Merrow", "Stanwick", "Dunholm"),
    *("Calder", "Wexley", "Norrby", "Fenwick", "Arlow", "Pelham"),
)
PEOPLE = (
    *("Ada Kessler", "Jonas Reith", "Mira Holt", "Piet Vandam", "Ilse Brandt", "Tomas Quill", "Edda Lorne"),
    *("Hugo Stannard", "Nora Veit", "Karl Emmer", "Greta Solheim", "Otto Marsh"),
)
TOWNS = ("Lindau", "Osterby", "Marrick", "Tolven", "Grimsay", "Haverby", "Kirren", "Sandholt", "Ulverdale", "Romsey")
RIVERS = ("Finn", "Kerr", "Aune", "Tavel", "Lothe", "Wend", "Isker", "Morrin")
SUBJECTS = ("geometry", "music", "botany", "law", "medicine", "astronomy")
DAYS = ("Mondays", "Tuesdays", "Sundays", "Fridays")

PLANTED = {
    "comparison": (
        "Which is longer, {x} or {y}?", "Is {x} older than {y}?", "Was {x} built before {y}?",
        "How much longer is {x} than {y}?", "By how many years does {x} predate {y}?",
        "Do {x} and {y} stand in the same town?", "Of {x} and {y}, which was finished earlier?",
        "Did the same person build {x} and {y}?", "Which has the greater length: {x} or {y}?",
    ),
    "several": (
        "How many of the structures were built after 1850?", "What do {x} and {y} have in common?",
        "What is the total length of {x} and {y}?", "List the towns that are mentioned.",
        "Which structure is the longest?", "How many structures are closed on {day}?",
        "Who built the oldest structure?", "Give an overview of what was built.",
        "When was {x} built, and where was {person} born?", "Who built {x}? Who built {y}?",
        "What is the average length of the structures?", "Apart from {x}, what else did builders leave?",
    ),
    "bridge": (
        "Where was the builder of {x} born?", "What did the person who built {x} study?",
        "On which river does the town of {x} lie?", "How many inhabitants has the town in which {x} stands?",
        "In what year was the architect behind {x} born?", "Which river flows past {x}?",
        "What subject was studied by the one who designed {x}?", "How populous is the place where {x} can be seen?",
        "What was the birthplace of the maker of {x}?", "How large is the population around {x}?",
    ),
    "conflict": (
        "Do the sources agree on the length of {x}?", "Does anything contradict that {x} was built in {year}?",
        "Is what is said of {x} consistent with what is said of {person}?",
    ),
}  # fmt: skip
PLAIN = (
    "How long is {x}?", "When was {x} built?", "Who built {x}?", "In which town does {x} stand?",
    "When is {x} closed?", "Where was {person} born?", "What did {person} study?", "How many inhabitants has {town}?",
    "On which river does {town} lie?", "What is the length of {x} in metres?",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AskedPassages:
    """A question on passages. `family`: of a planted one, else "plain"."""

    question: str
    passages: tuple[str, ...]
    family: str


def sample(rng: Random, *, planted: bool) -> AskedPassages:
    """Samples six passages (two structures, a builder, a town, two others) in any order, and a question on them."""
    kind = rng.choice(KINDS)
    x, y, other = (f"the {name} {kind}" for name in rng.sample(NAMES, 3))
    people, towns = rng.sample(PEOPLE, 3), rng.sample(TOWNS, 3)
    years = rng.sample(range(1790, 1930), 3)

    def structure(name: str, person: str, town: str, year: int) -> str:
        return (
            f"{name[0].upper()}{name[1:]} was built in {year} by {person}. It is {rng.randint(40, 900)} metres long "
            f"and stands in {town}. The stone came from a quarry nearby, and it is closed on {rng.choice(DAYS)}."
        )

    def biography(person: str, town: str) -> str:
        return (
            f"{person} was born in {rng.randint(1740, 1890)} in {town} and studied {rng.choice(SUBJECTS)}, as the "
            f"family wished. A portrait hangs in the library."
        )

    passages = [
        structure(x, people[0], towns[0], years[0]), structure(y, people[1], towns[1], years[1]),
        structure(other, people[2], towns[2], years[2]), biography(people[0], towns[2]),
        f"{towns[0]} lies on the river {rng.choice(RIVERS)} and has {rng.randint(900, 90_000)} inhabitants. Its market "
        "is held every Saturday on the square.",
        biography(people[1], towns[0]),
    ]  # fmt: skip
    rng.shuffle(passages)
    family = rng.choice(list(PLANTED)) if planted else "plain"
    question = rng.choice(PLANTED[family] if planted else PLAIN).format(
        x=x, y=y, person=people[0], town=towns[0], day=rng.choice(DAYS), year=years[0]
    )
    return AskedPassages(question, tuple(passages), family)
