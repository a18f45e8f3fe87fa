"""Long and certain answers: counting, and the lists every child knows.

Sample: "count from 3 to 6" is answered "3, 4, 5, 6". The ways of asking are in
`phrases/counting.toml`.
"""

from __future__ import annotations

import re
from random import Random

from training import phrases
from training.exchange import Exchange, Phrasing
from training.text.noise import casual

LISTS = {
    "the days of the week": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    "the months": "January, February, March, April, May, June, July, August, September, October, November, December",
    "the alphabet": ", ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "the seasons": "spring, summer, autumn, winter",
    "the vowels": "A, E, I, O, U",
    "the planets": "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune",
    "the colors of the rainbow": "red, orange, yellow, green, blue, indigo, violet",
    "the even numbers to twenty": "2, 4, 6, 8, 10, 12, 14, 16, 18, 20",
    "the odd numbers to twenty": "1, 3, 5, 7, 9, 11, 13, 15, 17, 19",
}
ALSO = {
    "the days of the week": ("the weekdays", "the seven days", "days of the week", "all days of the week"),
    "the months": ("the months of the year", "the twelve months", "months", "all months of the year"),
    "the alphabet": ("the ABC", "the letters of the alphabet", "all letters", "alphabet", "the English alphabet"),
    "the seasons": ("the four seasons", "the seasons of the year", "all seasons"),
    "the vowels": ("all vowels", "the English vowels"),
    "the planets": ("the planets of the solar system", "all planets", "the eight planets"),
    "the colors of the rainbow": ("the rainbow colours", "the colours of the rainbow", "rainbow colors"),
    "the even numbers to twenty": ("even numbers up to 20", "the even numbers up to twenty"),
    "the odd numbers to twenty": ("odd numbers up to 20", "the odd numbers up to twenty"),
}


def _exchange(user: str, answer: str) -> Exchange:
    return Exchange("counting", user, "", answer, f"^{re.escape(answer)}$")


def sample(rng: Random, phrasing: Phrasing, highest: int = 60) -> Exchange:
    ways = phrases.read("counting")
    kind = rng.random()
    if kind < 0.4:
        name = rng.choices(tuple(LISTS), (4, 4, 4, 2, 1, 2, 2, 1, 1))[0]
        asked = name if rng.random() < 0.6 else rng.choice(ALSO[name])
        user = casual(rng, ways["list"].ask(rng, phrasing), typos=0.03).replace("{x}", asked)
        return _exchange(user, LISTS[name])
    b = rng.randint(2, max(3, int(highest ** rng.uniform(0.5, 1.0))))
    if rng.random() < 0.2:
        b = rng.choice((5, 10, 10, 15, 20, 20, 25, 30, 40, 50, 60))
    if kind < 0.72:
        user = casual(rng, ways["to"].ask(rng, phrasing)).replace("{b}", str(b))
        return _exchange(user, ", ".join(map(str, range(1, b + 1))))
    if kind < 0.92:
        a = rng.randint(0, 90)
        b = a + rng.randint(2, 25)
        user = casual(rng, ways["from"].ask(rng, phrasing)).replace("{a}", str(a)).replace("{b}", str(b))
        return _exchange(user, ", ".join(map(str, range(a, b + 1))))
    b = min(b, 25)
    user = casual(rng, ways["down"].ask(rng, phrasing)).replace("{b}", str(b))
    return _exchange(user, ", ".join(map(str, range(b, 0, -1))))
