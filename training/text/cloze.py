"""Questions made from a sentence by cutting something out of it, in words that are not quite the text's.

    "Return the total size of all files in the folder." → "how do I return total size of file in the folder?"
    "If the queue is full, the call blocks." → "what happens if the queue is full?"

No parser: a few patterns on the words of a sentence, then function words are lost, endings change, words are replaced
by others of the same meaning (the list is in `phrases/synonyms.toml`). Knows nothing of passages.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from random import Random

from training import phrases
from training.conversation import Phrasing
from training.text.passages import stems

_SYNONYMS: dict[str, dict[str, list[str]]] = tomllib.loads(
    (Path(__file__).parents[1] / "phrases" / "synonyms.toml").read_text(encoding="utf-8")
)
_AUXILIARIES = frozenset(
    (
        *("is", "are", "was", "were", "can", "could", "will", "would", "should", "must", "may", "might"),
        *("has", "have", "had", "does", "do"),
    )
)
_DROPPABLE = frozenset(
    (
        *("the", "a", "an", "of", "to", "in", "for", "on", "that", "this", "by", "with"),
        *("as", "be", "its", "any", "all", "such", "from", "at"),
    )
)
_CLAUSES = frozenset(
    (
        *("if", "when", "unless", "until", "because", "since", "after", "before", "while", "so", "in", "for"),
        *("to", "by", "as", "with", "although"),
    )
)
_IMPERATIVE = re.compile(
    r"(Return|Create|Get|Set|Check|Convert|Add|Remove|Compute|Find|Make|Open|Read|Write|Parse|Call|Test|Load|Build|Send"
    r"|Run|Apply|Generate|Calculate|Update|Start|Stop|Print|Raise|Register|Save|Extract|Determine|Initialize|Construct|Handle"
    r"|Delete|Copy|Move|Close|Decode|Encode|Format|Replace|Split|Merge|Wait|Use|Show|Display|Draw"
    r"|Configure|Validate)s? "
)
_VERB_S = re.compile(
    r"(?:return|contain|use|provide|allow|take|require|support|represent|create|specif(?:ie)|raise|call|give|produce|mean"
    r"|accept|define|compute|hold|include|read|write|make|expect|depend|run|handle|store|control|implement|perform|start"
    r"|add|remove|determine|indicate|need|enable|apply(?:ie)?|convert|affect|inherit|wrap|belong|cause|set|work|lie|live)(?:e?s)$"
)
_NUMBER = re.compile(r"\b(\d[\d,.]*\d|\d|two|three|four|five|six|seven|eight|nine|ten) ([a-z]{3,}s)\b")
_YEAR = re.compile(r"\b(1[0-9]{3}|20[0-2][0-9])\b")


_BARE = frozenset(("This", "It", "They", "These", "There", "He", "She", "We", "You", "That", "Both", "Such"))


def _low(text: str) -> str:
    """Lowers the capital of a sentence's first word, unless the word has others."""
    first = text.split(" ", 1)[0]
    return text if len(first) < 2 or first[1:] != first[1:].lower() else text[0].lower() + text[1:]


def _base(verb: str) -> str:
    if verb.endswith("ies"):
        return verb[:-3] + "y"
    return verb[:-2] if verb.endswith(("shes", "ches", "sses")) else verb[:-1]


def _cut(rng: Random, words: list[str], most: int = 9) -> str:
    """The head of a clause, to a comma or a few words."""
    size = rng.randint(min(3, most), most)
    out = []
    for word in words[:size]:
        out.append(word.rstrip(",;"))
        if word.endswith((",", ";")) and len(out) > 2:
            break
    while len(out) > 2 and (
        out[-1].lower() in _DROPPABLE or out[-1] in _CLAUSES or out[-1] in {"and", "or", "is", "are"}
    ):
        out.pop()
    return " ".join(out)


def _verb_at(words: list[str]) -> int:
    """Returns where the first finite verb is, or 0."""
    if words[0].lower() in _CLAUSES or words[0] in _BARE or _IMPERATIVE.match(" ".join(words)):
        return 0
    for at, word in enumerate(words[1:9], 1):
        if word.lower() in _AUXILIARIES or _VERB_S.match(word):
            return at
        if word.endswith((",", ";")):
            return 0
    return 0


def _of_subject(rng: Random, words: list[str]) -> str:
    at = _verb_at(words)
    if not at:
        return ""
    who = (
        "who"
        if len(words) > 1 and words[0].istitle() and words[1].istitle()
        else rng.choice(("what", "what", "which one"))
    )
    return f"{who} {words[at]} {_cut(rng, words[at + 1 :])}?"


def _of_predicate(rng: Random, words: list[str]) -> str:
    at = _verb_at(words)
    if not at:
        return ""
    verb, subject, rest = words[at], _low(" ".join(words[:at])), _cut(rng, words[at + 1 :], 6)
    if verb in {"is", "are", "was", "were"}:
        return rng.choice(
            (
                f"what {verb} {subject}?",
                f"what {verb} {subject}?",
                f"{verb} {subject} {rest}?",
                f"how {verb} {subject} {rest}?",
            )
        )
    if verb in _AUXILIARIES:
        ask = rng.choice(("when", "why", "how", "what", ""))
        return f"{ask} {verb} {subject} {rest}?".strip()
    return rng.choice(
        (
            f"what does {subject} {_base(verb)}?",
            f"does {subject} {_base(verb)} {rest}?",
            f"how does {subject} {_base(verb)} {rest}?",
        )
    )


def _of_imperative(rng: Random, words: list[str]) -> str:
    if not _IMPERATIVE.match(" ".join(words)):
        return ""
    first, rest = words[0].lower(), _cut(rng, words[1:], 10)
    base = first[:-1] if first.endswith("s") else first
    return rng.choice(
        (
            f"how do I {base} {rest}?",
            f"what {base}s {rest}?",
            f"how can I {base} {rest}?",
            f"how to {base} {rest}",
            f"which one {base}s {rest}?",
        )
    )


def _of_number(rng: Random, words: list[str]) -> str:
    text = " ".join(words)
    if match := _NUMBER.search(text):
        rest = (text[: match.start()] + text[match.end() :]).split()
        return f"how many {match.group(2)} {_low(_cut(rng, rest))}?" if rest else ""
    if match := _YEAR.search(text):
        before = re.sub(r"\b(in|on|since|from|of)$", "", text[: match.start()].strip()).split()
        rest = before if len(before) > 3 else text[match.end() :].split()
        return f"{rng.choice(('when', 'in what year'))} {_low(_cut(rng, rest))}?" if rest else ""
    return ""


def _of_clause(rng: Random, words: list[str]) -> str:
    """Sentences with if, when, because, so that."""
    low = [word.lower() for word in words]
    for at, word in enumerate(low):
        if word in {"if", "when", "unless"}:
            condition = _cut(rng, words[at + 1 :], 11)
            if rng.random() < 0.6 or at < 3:
                return f"what happens {word} {condition}?"
            return f"when {_low(_cut(rng, words[:at]))}?"
        if word in {"because", "since"} and at > 2:
            return f"why {_low(_cut(rng, words[:at], 10))}?"
    return ""


def _of_fragment(rng: Random, words: list[str]) -> str:
    """A few words in a row, as typed into a search box."""
    size = rng.randint(3, 7)
    at = rng.randrange(max(1, len(words) - size))
    return _low(_cut(rng, words[at:], size)) + rng.choice(("?", ""))


def _of_keywords(rng: Random, words: list[str], phrasing: Phrasing) -> str:
    known = [word.strip(",;'\"()") for word in words if stems(word) and len(word) > 3]
    if len(known) < 2:
        return ""
    at = sorted(rng.sample(range(len(known)), 2))
    a, b = known[at[0]], known[at[1]]
    if at[1] + 1 < len(known) and rng.random() < 0.4:
        b = f"{b} {known[at[1] + 1]}"
    wording = phrases.read("grounded")["keywords"].ask(rng, phrasing)
    return wording.replace("{a}", _low(a)).replace("{b}", _low(b))


def reworded(rng: Random, phrasing: Phrasing, question: str, much: float) -> str:
    """The question with function words lost, endings changed and words replaced; `much` from 0 to 1."""
    first, *rest = question.split()
    out = [first]
    synonyms = _SYNONYMS[phrasing]
    for word in rest:
        plain, end = re.fullmatch(r"(.*?)([?.,;!]*)", word).groups()  # type: ignore[union-attr]  # matches anything
        if plain in _DROPPABLE and not end and rng.random() < 0.25 * much:
            continue
        if plain in synonyms and rng.random() < 0.45 * much:
            plain = rng.choice(synonyms[plain])
        elif len(plain) > 4 and plain.isalpha() and plain.islower() and rng.random() < 0.1 * much:
            plain = plain[:-1] if plain.endswith("s") and not plain.endswith("ss") else f"{plain}s"
        out.append(plain + end)
    return " ".join(out)


def question(rng: Random, phrasing: Phrasing, sentence: str) -> str:
    """A question that the sentence answers, in its own words; a bare fragment of it when no pattern fits."""
    words = sentence.rstrip(".").split()
    makers: list[Callable[[Random, list[str]], str]] = [
        *(_of_subject, _of_predicate, _of_predicate, _of_imperative, _of_number, _of_number, _of_clause, _of_clause),
    ]
    if rng.random() < 0.2:
        return _of_keywords(rng, words, phrasing) or _of_fragment(rng, words)
    rng.shuffle(makers)
    for maker in makers:
        if text := maker(rng, words):
            return text
    return _of_fragment(rng, words)
