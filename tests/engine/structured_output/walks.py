"""Random walks through a mask: any allowed token may come, and texts are brought to an end after a while."""

from __future__ import annotations

from functools import lru_cache
from random import Random

from engine.structured_output.matcher import Matcher
from engine.structured_output.vocabulary import Vocabulary
from tests.engine.structured_output.sources import allowed

# What ends a JSON text soonest, best first; within a string nothing but a quote does.
_CLOSING = (b"}", b"]", b'"', b"null", b",", b"0")
_MANY = 60  # where so many tokens may come is a string


def walk(matcher: Matcher, vocabulary: Vocabulary, random: Random, *, soon: int = 40, most: int = 400) -> bytes | None:
    """The text of a finished walk, or None for one that `most` tokens did not finish.

    On the way it checks what holds at every place: there is a token that may come, ends are allowed exactly where the
    text may end, and nothing else that is no text is ever allowed.
    """
    text = b""
    eos, silent = set(vocabulary.eos), _silent(vocabulary)
    for n in range(most):
        ids = allowed(matcher, vocabulary.size)
        these = set(ids)
        assert ids, f"nothing may come after {text!r}"
        assert these & silent == (eos if matcher.can_end() else set()), text
        assert matcher.must_end() == (these == eos)
        if matcher.can_end() and (these == eos or n > soon or random.random() < 0.3):
            assert matcher.accept(vocabulary.eos[0])
            assert allowed(matcher, vocabulary.size) == [] and not matcher.can_end()
            return text
        token = _closing(these, vocabulary) if n > soon or random.random() < 0.15 else None
        if token is None and random.random() < 0.05:  # escapes are rare among thousands of tokens, and matter
            token = next((id for id in vocabulary.ids[b"\\"] if id in these), None)
        while token is None or token in eos:
            token = random.choice(ids)
        assert matcher.accept(token), (text, vocabulary.tokens[token])
        text += vocabulary.tokens[token]
    return None


def _closing(ids: set[int], vocabulary: Vocabulary) -> int | None:
    closing = (b'"',) if len(ids) > _MANY else _CLOSING
    return next((id for text in closing for id in vocabulary.ids.get(text, ()) if id in ids), None)


@lru_cache(maxsize=4)
def _silent(vocabulary: Vocabulary) -> set[int]:
    """Ids that are no text: control tokens, ends and padding."""
    return {id for id, token in enumerate(vocabulary.tokens) if not token}
