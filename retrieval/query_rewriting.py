"""Resolves a follow-up question, so that it can be searched for (query resolution, as QuReTeC: Voskarides 2020).

"And how heavy is it?" gets the words of the question before it, which count less than its own. By rules of English,
without a model that writes; a question that is whole stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from retrieval.evidence import Rarity, clauses
from retrieval.index.lexical import content
from retrieval.spans import names

ADDED = 0.35  # the weight of a word of the conversation beside one of the question
MAX_WORDS = 8  # that are added
SHORT = 3  # content words, up to which a pronoun stands for something said before, not for something in the question
_LEAD = re.compile(r"\W*(?:and|but|or|also|so|then|(?:what|how) about)\b", re.IGNORECASE)
_AUXILIARY = r"(?:is|are|was|were|do|does|did|can|could|may|will|would|should|has|have|had)"
_PRONOUN = re.compile(
    rf"\b(?:it|they|them|he|she|him|its|their|his|her|hers)\b"
    rf"|\b(?:this|that|these|those)\b(?=\W*$| {_AUXILIARY}\b)|(?<!\bis )(?<!\bare )\bthere\b(?! {_AUXILIARY}\b)",
    re.IGNORECASE,
)
_WHO = re.compile(r"\b(?:who|whom|whose)\b", re.IGNORECASE)
_CHAT = re.compile(  # small talk has one of these words, and besides them only those of `_FILLER`
    r"alright|bye|cheers|goodbye|great|hello|hey|hi|morning|evening|afternoon|night|ok|okay|perfect|please|sure|thank|"
    r"thanks|thx|welcome|wonderful|yes|no"
)
_FILLER = re.compile(
    r"a|again|all|amazing|awesome|cool|day|excellent|fine|for|good|got|helpful|i|is|it|later|lot|lovely|many|much|nice|"
    r"ponder|right|see|so|that|thats|the|there|very|was|well|you|your|help|answer"
)


@dataclass(frozen=True, slots=True)
class ResolvedQuestion:
    """A question as it was `asked`, with the words that it leaves out."""

    asked: str
    added: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return " ".join([self.asked, *self.added])

    def rarity(self, rarity: Rarity) -> Rarity:
        """Returns the rarity of stems, less for those of the added words."""
        if not self.added:
            return rarity
        less = frozenset(content(" ".join(self.added)))
        return lambda stem: rarity(stem) * (ADDED if stem in less else 1.0)

    def parts(self) -> list[ResolvedQuestion]:
        """Returns the questions that it consists of; "it" in a later one stands for a thing of an earlier one."""
        texts = clauses(self.asked)
        made = [ResolvedQuestion(text, self.added) for text in texts[:1]] or [self]
        return [*made, *(resolve(text, [(each, "") for each in texts[:at]]) for at, text in enumerate(texts) if at)]


def resolve(question: str, earlier: Sequence[tuple[str, str]]) -> ResolvedQuestion:
    """Returns the question with what it leaves out. `earlier` are the questions before it with their answers."""
    before = [turn for turn in earlier if not is_small_talk(turn[0])]
    own = content(question)
    leaves_out = not own or _LEAD.match(question) or (len(own) <= SHORT and _PRONOUN.search(question))
    if not before or not leaves_out:
        return ResolvedQuestion(question)
    asked, answer = before[-1]
    words = [*resolve(asked, before[:-1]).added, *re.findall(r"[\w'’-]+", asked)]
    if _WHO.search(asked):
        words += sorted(names(answer) - names(asked, everywhere=True))
    new = [word for word in dict.fromkeys(words) if (stems := content(word)) and not set(stems) & set(own)]
    return ResolvedQuestion(question, tuple(new[-MAX_WORDS:]))


def is_small_talk(text: str) -> bool:
    """Returns whether a message only greets, thanks or agrees, so that there is nothing to search for."""
    words = re.findall(r"[\w'’]+", text.lower().replace("'", "").replace("’", ""))
    chat = [_CHAT.fullmatch(word) is not None for word in words]
    return (
        len(words) <= 8 and any(chat) and all(each or _FILLER.fullmatch(w) for each, w in zip(chat, words, strict=True))
    )
