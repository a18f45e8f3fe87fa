"""Checks an answer's sentences against their sources: each gets the span that supports it, or is marked as having none.

A sentence is supported by a span that contains it word for word, or that contains nearly all its content words in their
order, all its numbers and names, and denies where it denies. Where the order is another, or a word stands in no source,
it is supported in part. That is a check of words, not of meaning: a paraphrase in other words fails it, a false
sentence built from a span's own words in their order can pass. A `judge` that is passed in may look again.

Labels are read before a sentence ("[S2] The dam …") or behind it ("The dam … [S2]."), as the answer's first one stands.
Knows nothing of models; text is fed as it comes, and a sentence is given back once, when it is whole, or too
long to wait for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from retrieval.index.lexical import content
from retrieval.prompt_context import PromptSource
from retrieval.query_rewriting import is_small_talk
from retrieval.spans import Folded, names, numbers, sentences, shortened

SUPPORTED = 0.7  # of a sentence's content words; a judge is asked from half of that on
MAX_HELD = 2000  # characters of a sentence that does not end: then it is cut at a word
WIDEST = 3  # sentences of a source that may support one of the answer together
Support = Literal["supported", "partial", "elsewhere", "unsupported", "plain"]
IN_ORDER = 0.6  # of a sentence's content words, and of its pairs of neighbours, that stand in the span in their order
BETTER = 0.1  # by how much another source must support a sentence better than those that it names, to be cited instead
NEAR = 4  # content words of the span, within which neighbours of the sentence are neighbours
Judge = Callable[[str, str], float]  # (claim, text) → how surely the text says it, 0 to 1

_BRACKETED = re.compile(r"[\[(]\s*S\d+(?:\s*[,;&]?\s*(?:and\s+)?S?\d+)*\s*[\])]")
_LABELS = re.compile(_BRACKETED.pattern + r"|(?<![\w-])S\d+(?=:)")  # a bare one, "S2:", stands before its sentence
_NUMBER = re.compile(r"\d+")
_END = re.compile(r"[.!?…][\"'”’)\]]*(?=\s)|\n+")
_MARKS = re.compile(r"^\s*(?:[-*+>#]+\s+|\d+[.)]\s+)*|[*_`]{1,3}(?=\S)|(?<=\S)[*_`]{1,3}")  # of Markdown
_REFUSAL = re.compile(
    r"\b(don['’]?t know|do not know|not (?:say|mention|state|contain)|no (?:answer|information)|cannot (?:find|answer)|"
    r"can['’]?t (?:find|answer))\b",
    re.IGNORECASE,
)
_UNKNOWING = re.compile(  # how a sentence begins that only says that something is not known
    r"\W*(?:(?:sorry|unfortunately|no)\b\W*)?(?:(?:I|we)\b|(?:the|these|your|my|any of the) (?:\w+ )?"
    r"(?:sources?|documents?|texts?|passages?|files?)\b|there is\b|(?:it|that) is\b|(?:an? |the )?answers?\b|"
    r"information\b)",
    re.IGNORECASE,
)
_FILLER = re.compile(r"(?:certain|sure|inde|correct|right|understood|understand|sorri|answer|note|summari|follow)\w*")
_DENIAL = re.compile(r"\b(?:not|no|never|none|nor|neither|without|cannot)\b|n['’]t\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Citation:
    """Characters `start` to `end` of a document, which support a sentence; `score` says how well, 0 to 1."""

    label: str
    document: int
    title: str
    page: int | None
    start: int
    end: int
    snippet: str
    score: float


@dataclass(frozen=True, slots=True)
class CheckedText:
    """A sentence of an answer without its labels; `space` is the white space that follows it.

    `supported`: by a source it names, or by any if it names none. `elsewhere`: by another than it names, or far better
    by it. `partial`: a source has its words, but not all of them or in another order. `unsupported`: none has. `plain`:
    it claims nothing, as greetings and refusals do.
    """

    text: str
    support: Support
    citations: tuple[Citation, ...] = ()
    space: str = ""


class CitationChecker:
    """Checks one answer as it comes."""

    def __init__(self, sources: Sequence[PromptSource], judge: Judge | None = None) -> None:
        self._sources = {source.label: _Held(source) for source in sources}
        self._judge = judge
        self._stems = frozenset(stem for one in sources for stem in content(f"{one.title} {one.context} {one.text}"))
        self._text = ""
        self._leading: bool | None = None  # whether labels stand before their sentences

    @property
    def held(self) -> bool:
        """Returns whether some text waits for the end of its sentence."""
        return bool(self._text.strip())

    def feed(self, text: str) -> list[CheckedText]:
        """More of the answer; the sentences that are whole by now."""
        self._text += text
        return list(self._cut(last=False))

    def finish(self) -> list[CheckedText]:
        """The rest of the answer."""
        return list(self._cut(last=True))

    def _cut(self, last: bool) -> Iterator[CheckedText]:
        while (end := self._part_end(last)) is not None:
            part, self._text = self._text[:end], self._text[end:]
            if part.strip():
                yield self._check(part)

    def _part_end(self, last: bool) -> int | None:
        """Returns where the next part to be checked ends: a sentence, or as much of it as fits into `MAX_HELD`."""
        end = self._next_end(last)
        if len(self._text) <= MAX_HELD or (end is not None and end <= MAX_HELD):
            return end
        words = [found.end() for found in re.finditer(r"\S\s+", self._text[:MAX_HELD])]
        return words[-1] if words else MAX_HELD

    def _next_end(self, last: bool) -> int | None:
        """Returns where the first sentence ends, white space included; None while more may belong to it."""
        if self._leading is None and (self._text.strip() or last):
            start = self._text.lstrip()
            if not last and len(start) < 12 and start.startswith(("[", "(", "S")) and not _LABELS.match(start):
                return None  # a label may be on its way
            self._leading = _LABELS.match(start) is not None
        body = len(self._text) - len(self._text.lstrip())
        for found in _END.finditer(self._text, body):
            end = found.end()
            if found[0] == "." and shortened(self._text, body, end):
                continue
            rest = self._text[end:]
            if not self._leading:
                if not last and (not rest.strip() or _may_begin_label(rest.lstrip())):
                    return None
                while label := _BRACKETED.match(self._text, end + len(rest) - len(rest.lstrip())):
                    end = label.end()
                    if self._text[end : end + 1] in (".", ","):
                        end += 1
                    rest = self._text[end:]
                if not last and (not rest.strip() or _may_begin_label(rest.lstrip())):
                    return None  # the space behind the label, or another one
            elif _LABELS.fullmatch(self._text[body:end].strip()):
                continue  # a label alone on its line: its sentence follows
            elif not last and not rest.strip():
                return None  # more of the space behind it may come
            return end + len(rest) - len(rest.lstrip())
        return len(self._text) if last and self._text else None

    def _check(self, part: str) -> CheckedText:
        named = [f"S{number}" for label in _LABELS.findall(part) for number in _NUMBER.findall(label)]
        text = re.sub(r"[ \t]+([.,;!?])", r"\1", _LABELS.sub("", part))
        text = re.sub(r"(?<=\S)[ \t]{2,}", " ", re.sub(r"^\s*:\s*", "", text))
        space = part[len(part.rstrip()) :]
        shown, claim = text.strip(), _MARKS.sub("", text).strip()
        if _claims_nothing(claim):
            return CheckedText(shown, "plain", (), space)
        by_label = {label: self._supports(label, claim) for label in self._sources}
        found = [each for label in dict.fromkeys(named) if (each := by_label.get(label))]
        others = [each for label, each in by_label.items() if each and label not in named]
        best = max(others, key=_rank, default=None)
        held = max(found, key=_rank, default=None)
        if best and held and _rank(best) > (held[1], held[0].score + BETTER):
            held, found = None, []  # the better source is cited instead
        if whole := tuple(citation for citation, fully in found if fully):
            return CheckedText(shown, "supported", whole, space)
        if best and best[1] and not held:
            return CheckedText(shown, "elsewhere" if named else "supported", (best[0],), space)
        if partly := tuple(citation for citation, _ in found or ([best] if best else [])):
            return CheckedText(shown, "partial", partly, space)
        return CheckedText(shown, "unsupported", (), space)

    def _supports(self, label: str, claim: str) -> tuple[Citation, bool] | None:
        """Returns the span of a source that supports a claim, and whether it does so fully."""
        held = self._sources[label]
        score, start, end = held.best(claim)
        fully = score == 1.0 and held.has(claim)
        if score < SUPPORTED and self._judge and score >= SUPPORTED / 2:
            score = self._judge(claim, held.source.text[start:end])
            fully = True
        if score < SUPPORTED:
            return None
        source = held.source
        at, snippet = source.start + start, source.text[start:end]
        fully = fully or (self._stems.issuperset(content(claim)) and _in_order(claim, snippet))
        citation = Citation(
            label, source.document, source.title, source.page(at), at, at + len(snippet), snippet, round(score, 3)
        )
        return citation, fully


def _rank(supporting: tuple[Citation, bool]) -> tuple[bool, float]:
    citation, fully = supporting
    return fully, citation.score


class _Held:
    """A source, cut into its sentences once."""

    def __init__(self, source: PromptSource) -> None:
        self.source = source
        self._folded = Folded(source.text)
        self._sentences = list(sentences(source.text))
        self._words = [frozenset(content(source.text[start:end])) for start, end in self._sentences]

    def has(self, claim: str) -> bool:
        """Returns whether the source has the claim word for word."""
        return self._folded.find(claim.strip(" \"'“”‘’")) is not None

    def best(self, claim: str) -> tuple[float, int, int]:
        """Returns how much of the claim the best span has, and where that is."""
        if exact := self._folded.find(claim.strip(" \"'“”‘’")):
            return 1.0, *exact
        wanted, exact_ones = frozenset(content(claim)), numbers(claim) | names(claim)
        best = (0.0, 0, 0)
        for first in range(len(self._sentences)):
            had = frozenset[str]()
            for last in range(first, min(first + WIDEST, len(self._sentences))):
                had |= self._words[last]
                share = len(wanted & had) / len(wanted) - 0.02 * (last - first)  # the narrower of two as good
                if share > best[0] and self._agrees(claim, wanted, exact_ones, first, last):
                    best = (share, self._sentences[first][0], self._sentences[last][1])
        return best

    def _agrees(self, claim: str, wanted: frozenset[str], exact_ones: frozenset[str], first: int, last: int) -> bool:
        start, end = self._sentences[first][0], self._sentences[last][1]
        text = self.source.text[start:end]
        around = f"{self.source.title} {text}"  # a name may stand in the title alone
        if not exact_ones <= numbers(text) | names(around, everywhere=True):
            return False
        nearest = max(range(first, last + 1), key=lambda at: len(wanted & self._words[at]))
        denied = _DENIAL.search(self.source.text[slice(*self._sentences[nearest])])
        return bool(_DENIAL.search(claim)) == bool(denied)


def _claims_nothing(claim: str) -> bool:
    """Returns whether a sentence asks, greets, or only says that something is not known."""
    words = content(claim)
    refuses = _REFUSAL.search(claim) and _UNKNOWING.match(claim) and not re.search(r"\b(?:but|however)\b", claim, re.I)
    if refuses or claim.endswith("?") or not words or is_small_talk(claim):
        return True
    return not numbers(claim) and all(_FILLER.fullmatch(word) for word in words)


def _in_order(claim: str, span: str) -> bool:
    """Returns whether a span has most of a claim's words in their order: else who did what to whom may be another.

    Where one is in the passive, the part behind "by" may stand first.
    """
    if _stand_in_order(content(claim), content(span)):
        return True
    if (" by " in claim) == (" by " in span):
        return False
    return _stand_in_order(content(_active(claim)), content(_active(span)))


def _active(text: str) -> str:
    return " ".join(text.split(" by ", 1)[::-1])


def _stand_in_order(wanted: Sequence[str], had: Sequence[str]) -> bool:
    shared = [word for word in wanted if word in had]
    if len(shared) < 3:
        return True
    places = [[at for at, each in enumerate(had) if each == word] for word in shared]
    near = [any(0 < later - at <= NEAR for at in one for later in other) for one, other in pairwise(places)]
    return _common(shared, had) / len(shared) >= IN_ORDER and sum(near) / len(near) >= IN_ORDER


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for each in a:
        before = 0
        for at, other in enumerate(b, 1):
            before, row[at] = row[at], before + 1 if each == other else max(row[at], row[at - 1])
    return row[-1]


def is_refusal(text: str) -> bool:
    """Returns whether an answer begins with saying that it does not know, and goes on with no "but"."""
    first = next((text[start:end] for start, end in sentences(text)), "")
    return _REFUSAL.search(first) is not None and re.search(r"\bbut\b|\bhowever\b", first, re.IGNORECASE) is None


def _may_begin_label(text: str) -> bool:
    """Returns whether the text so far could still become a label."""
    return bool(re.fullmatch(r"[\[(]\s*(?:S[\d\s,;&Sand]*)?", text)) if len(text) < 24 else False


def as_text(checked: CheckedText, policy: Literal["mark", "drop"] = "mark") -> str:
    """A sentence as a reader gets it: with the labels of its support, marked or left out where it has none."""
    if checked.support == "unsupported":
        return "" if policy == "drop" else f"{checked.text} [unsupported]{checked.space}"
    return checked.text + "".join(f" [{citation.label}]" for citation in checked.citations) + checked.space
