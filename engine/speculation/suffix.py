"""Proposes what followed the longest earlier occurrence of a text's end: in the same sequence, or in the tenant's
earlier answers.

Prompts are in the sequence, so an answer that quotes a passage, repeats a tool's result or returns edited code is found
there (prompt lookup, Saxena 2023; SuffixDecoding, Oliaro et al. 2024). The index maps each `gram` of tokens to its
newest occurrence, and each occurrence to the one before; the newest few are compared backwards, and the longest match
wins. It takes a fraction of a suffix automaton's memory and finds the same match but where a longer one is older than
those few.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from operator import itemgetter

from engine.core.request import SequenceState, SpanJob
from engine.speculation.proposer import NOTHING, DraftTokens, Proposer

MAX_MATCH = 64  # tokens that are compared
MAX_OCCURRENCES = 12  # newest ones that are compared
FEED = 4096  # tokens that are indexed at once: a long prompt takes several steps, each some milliseconds longer
MAX_POOL = 32_768  # tokens of answers that are kept for a tenant
MAX_TENANTS = 32
MAX_INDEXES = 128  # sequences whose index is kept: of one that comes back it is made anew
_BITS = 20  # of a token in a key; larger ids, of images, share keys and are told apart by the comparison


class GramIndex:
    """Occurrences of each run of `gram` tokens, by the position of its last one."""

    def __init__(self, gram: int) -> None:
        self.gram = gram
        self.length = 0
        self._mask = (1 << (_BITS * gram)) - 1
        self._key = 0
        self._newest: dict[int, int] = {}
        self._before = array("i")

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds the tokens that follow."""
        key, mask, newest, at = self._key, self._mask, self._newest, self.length
        for token in tokens:
            key = (key << _BITS | token & 0xFFFFF) & mask
            self._before.append(newest.get(key, -1))
            newest[key] = at
            at += 1
        self._key, self.length = key, at

    def occurrences(self, text: Sequence[int]) -> list[int]:
        """Returns the newest positions at which the last `gram` tokens of `text` end, newest first."""
        key = 0
        for token in text[-self.gram :]:
            key = key << _BITS | token & 0xFFFFF
        at, found = self._newest.get(key, -1), list[int]()
        while at >= 0 and len(found) <= MAX_OCCURRENCES:
            found.append(at)
            at = self._before[at]
        return found


def longest_match(index: GramIndex, known: Sequence[int], text: Sequence[int]) -> tuple[int, int]:
    """Returns the position in `known` after the longest match of the end of `text`, and the match's length; (0, 0)
    where there is none of `gram` tokens. Of equal ones the newest; the end of `known` itself does not count."""
    best, position = 0, 0
    for end in index.occurrences(text) if len(text) >= index.gram else ():
        if end + 1 >= len(known) or known[end] != text[-1]:
            continue
        most = min(MAX_MATCH, end + 1, len(text))
        length = 1
        while length < most and known[end - length] == text[-1 - length]:
            length += 1
        if length > best:
            best, position = length, end + 1
            if best == MAX_MATCH:
                break
    return (position, best) if best >= index.gram else (0, 0)


class SuffixProposer(Proposer):
    """Looks up matches of `gram` tokens or more; with `pooled` also in what the tenant's spans have answered before."""

    def __init__(self, name: str = "suffix", gram: int = 4, *, pooled: bool = True) -> None:
        self.name = name
        self._gram = gram
        self._pooled = pooled
        self._indexes: OrderedDict[int, GramIndex] = OrderedDict()  # used last at the end
        self._pools: OrderedDict[bytes, tuple[GramIndex, list[int]]] = OrderedDict()
        self._predictions: dict[int, tuple[SpanJob, GramIndex]] = {}

    def propose(self, seq: SequenceState, budget: int) -> DraftTokens:
        text = seq.tokens
        known: Sequence[int] = text
        position, length = longest_match(self._index(seq), text, text)
        position, length, known = max((position, length, known), self._predicted(seq), key=itemgetter(1))
        if self._pooled and length < MAX_MATCH and seq.root in self._pools:
            index, answers = self._pools[seq.root]
            elsewhere, longer = longest_match(index, answers, text)
            if longer > length:
                position, length, known = elsewhere, longer, answers
        if not length:
            return NOTHING
        tokens = list(known[position : position + budget])
        while len(tokens) < budget and known is text:  # the match reaches the end: the text repeats itself
            tokens += tokens[: budget - len(tokens)]
        # a longer match is surer, and each token beyond it is less so; the engine learns how much
        return DraftTokens(tuple(tokens), (length / (length + 2),) * len(tokens))

    def ended(self, seq: SequenceState, start: int) -> None:
        if not self._pooled or len(seq) - start < self._gram:
            return
        index, answers = self._pools.setdefault(seq.root, (GramIndex(self._gram), []))
        self._pools.move_to_end(seq.root)
        answer = seq.tokens[max(0, start - self._gram) :]
        if len(answers) + len(answer) > MAX_POOL:
            answers = (answers + answer)[-MAX_POOL // 2 :]
            index = GramIndex(self._gram)
            index.extend(answers)
            self._pools[seq.root] = index, answers
        else:
            index.extend(answer)
            answers += answer
        if len(self._pools) > MAX_TENANTS:
            self._pools.popitem(last=False)

    def forget(self, seq: SequenceState) -> None:
        self._indexes.pop(seq.id, None)
        self._predictions.pop(seq.id, None)

    def _predicted(self, seq: SequenceState) -> tuple[int, int, Sequence[int]]:
        """Returns the longest match in the span's prediction: position, length, and the prediction. A span that has
        written the prediction's beginning so far goes on with it."""
        job = seq.job
        if not isinstance(job, SpanJob) or job.span.speculation is None or not job.span.speculation.prediction:
            return 0, 0, ()
        predicted = job.span.speculation.prediction
        if job.produced < self._gram and tuple(seq.tokens[-job.produced :]) == predicted[: job.produced]:
            return job.produced, self._gram, predicted
        of_job, index = self._predictions.get(seq.id, (None, None))
        if of_job is not job or index is None:
            index = GramIndex(self._gram)
            index.extend(predicted)
            self._predictions[seq.id] = job, index
        return (*longest_match(index, predicted, seq.tokens), predicted)

    def _index(self, seq: SequenceState) -> GramIndex:
        index = self._indexes.get(seq.id)
        if index is None or index.length > len(seq.tokens):  # it was cut
            index = self._indexes[seq.id] = GramIndex(self._gram)
            if len(self._indexes) > MAX_INDEXES:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(seq.id)
        if index.length < len(seq.tokens):
            index.extend(seq.tokens[index.length : index.length + FEED])
        return index
