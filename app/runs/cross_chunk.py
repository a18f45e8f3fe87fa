"""Test of a question, before its passages' K/V is reused: does it need several of them read together?

A reused passage was read without those before it, so what one says of another is lost. A question is let through only
where one passage has all of its content words that any passage has, nothing in it asks for a comparison, a count or
several things, and no other passage says more of the names around the words that none explains. It reads words alone,
in well under a millisecond, and errs on the side of exact K/V: a refusal costs time, never quality.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from retrieval.evidence import clauses
from retrieval.index.lexical import content, terms

# Words by which a question asks for more than one thing: comparisons, sets, counts, and references to the sources.
SEVERAL = frozenset(
    (
        *("both", "each", "every", "all", "any", "most", "least", "fewest", "neither", "either", "none", "together"),
        *("compare", "compared", "comparison", "contrast", "difference", "differences", "differ", "similar", "same"),
        *("versus", "vs", "than", "between", "among", "common", "agree", "disagree", "contradict", "consistent"),
        *("more", "less", "fewer", "total", "sum", "altogether", "combined", "average", "overall", "list", "name"),
        *("summarise", "summarize", "summary", "overview", "main", "sources", "passages", "texts", "documents"),
        *("other", "others", "another", "also", "instead", "too", "rank", "order", "two", "three", "several", "who"),
    )
)
SINGLE_WHO = re.compile(r"^\s*who\b", re.IGNORECASE)  # "who" alone asks for one; behind other words it joins two
WHICH_OF = re.compile(r"\bwhich (?:of|\w+s)\b|\bhow many of\b|\b(?:and|or|but|while|whereas|if|since)\b", re.IGNORECASE)
COMPARED = re.compile(
    r"\b\w{3,}(?:er|est)\b(?=.*\b(?:or|of)\b)|\b(?:first|last|earlier|later|before|after)\b", re.IGNORECASE
)
RELATIVE = re.compile(r"\b(?:that|which|whose|where|whom)\b", re.IGNORECASE)
NAME = re.compile(r"(?<![.!?:\]]\s)(?<!^)\b[A-Z][\w'’-]{2,}|\b\d{2,}\b")


def needs_several(question: str, passages: Sequence[str]) -> str | None:
    """Returns why the question seems to need several passages together; None where one seems to be enough."""
    words = terms(question)
    if len(clauses(question)) > 1 or question.count("?") > 1:
        return "it asks several things"
    asked = SEVERAL & set(words[1:] if SINGLE_WHO.match(question) else words)
    if asked:
        return f"it says {sorted(asked)[0]!r}"
    if (found := WHICH_OF.search(question) or COMPARED.search(question)) is not None:
        return f"it says {found[0]!r}"
    if RELATIVE.search(" ".join(question.split()[2:])):
        return "one thing in it is told by another"
    stems = set(content(question))
    held = [stems & set(content(passage)) for passage in passages]
    known = set[str]().union(*held)
    if not known:
        return "no passage has a word of it"
    best = [at for at, each in enumerate(held) if each == known]
    if not best:
        return "its words are in several passages"
    if len(best) > 1:
        return "several passages have its words"
    at = best[0]
    if stems - known:
        names = set(NAME.findall(passages[at]))
        if any(names & set(NAME.findall(other)) for number, other in enumerate(passages) if number != at):
            return "another passage says more of what it asks about"
    return None
