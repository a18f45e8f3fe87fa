"""RAG as a mixture over documents (Lewis et al. 2020): one prompt a document, weighted by how well each was retrieved.

RAG-Token marginalises over the documents at each token, RAG-Sequence over whole answers. Both are functions of engine
handles first; the strategies take prompts and scores from the run's documents.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import Field

from ponder import (
    DeadlineExceeded,
    InvalidParameter,
    Options,
    Piece,
    Span,
    SpanStream,
    Spent,
    Yields,
    pieces_of,
    refuse_fields,
    strategy,
)
from ponder import StrategyContext as Context

if TYPE_CHECKING:
    from ponder import Sequence as EngineSequence


@dataclass(frozen=True, slots=True)
class RagAnswer:
    """A candidate answer. `logprob`: log(sum_i w_i p_i(tokens)), natural logarithm; `document` is the index of the one
    that it was written from. `ended`: by a stop token, which is part of `tokens`."""

    tokens: tuple[int, ...]
    logprob: float
    document: int
    ended: bool


def document_weights(scores: Sequence[float], temperature: float) -> list[float]:
    """Computes a softmax of retrieval scores: the documents' prior p(z|x)."""
    highest = max(scores)
    shares = [math.exp((score - highest) / temperature) for score in scores]
    return [share / math.fsum(shares) for share in shares]


async def answer_by_sequence(
    forks: Sequence[EngineSequence], weights: Sequence[float], span: Span, stop_ids: Sequence[int], *, thorough: bool
) -> list[RagAnswer]:
    """Writes one candidate answer from each document and marginalises them (RAG-Sequence), best first. `forks` have the
    documents' prompts and stay as they are; `weights` sum to 1.

    Thorough decoding scores each candidate under every document. Fast decoding takes p_i as 0 for documents that did
    not write the same candidate, so nothing is computed again (Lewis et al. 2020, section 2.5). So are candidates
    compared that the deadline has cut, for there is no time to score them.

    Raises:
        InvalidParameter: there is not one positive weight for each fork, or the span's text is not decided by the
            sampled tokens alone: it has stop strings or a constraint.
        DeadlineExceeded: it passed before the first token.
        EngineError: of `Sequence.generate` and `Sequence.score`.
    """
    if not forks or len(weights) != len(forks) or not all(weight > 0 for weight in weights):
        raise InvalidParameter("weights", f"weights are {list(weights)}; accepted: a positive one for each fork.")
    if span.stop or span.constraint is not None:
        raise InvalidParameter("stop", "the span has stop strings or a constraint; accepted: stop tokens alone.")
    # The stop token counts: without it a short answer would be likelier for having no end.
    asked = replace(span, logprobs=span.logprobs or 0, ignore_eos=True, stop_token_ids=tuple(stop_ids),
                    keep_stop_token=True)  # fmt: skip
    written = await asyncio.gather(*(_written(fork, asked) for fork in forks))
    first = {tokens: at for at, (tokens, _) in reversed(list(enumerate(written))) if tokens}
    candidates = list(first)
    if not candidates:
        raise DeadlineExceeded("No answer was begun before the deadline.")
    if thorough and not forks[0].past_deadline:
        scored = await asyncio.gather(*(fork.score(candidates) for fork in forks))
        likely = [[sum(scores[c]) for scores in scored] for c in range(len(candidates))]
    else:
        likely = [
            [logprob if tokens == candidate else -math.inf for tokens, logprob in written] for candidate in candidates
        ]
    answers = [
        RagAnswer(tokens, _marginal(logprobs, weights), first[tokens], tokens[-1] in stop_ids)
        for tokens, logprobs in zip(candidates, likely, strict=True)
    ]
    return sorted(answers, key=lambda answer: -answer.logprob)


async def _written(fork: EngineSequence, span: Span) -> tuple[tuple[int, ...], float]:
    length = len(fork)
    result = await fork.generate_all(span)
    fork.truncate(length)
    return result.token_ids, sum(each.logprob for each in result.logprobs)


def _marginal(logprobs: Sequence[float], weights: Sequence[float]) -> float:
    weighted = [logprob + math.log(weight) for logprob, weight in zip(logprobs, weights, strict=True)]
    highest = max(weighted)
    return highest + math.log(math.fsum(math.exp(each - highest) for each in weighted))


class RagOptions(Options):
    """The `k` best documents count, each with a prompt of its own; `temperature` is that of the softmax of their
    scores: near 0 the best one alone decides."""

    k: int = Field(4, ge=1, le=32)
    temperature: float = Field(0.1, gt=0, le=100)


class RagSequenceOptions(RagOptions):
    """`thorough`: candidates are scored under every document, else only where they were written. `tokens`: of a
    candidate at most; None: the request's limit."""

    thorough: bool = True
    tokens: int | None = Field(None, ge=1)


def _forks(seq: EngineSequence, context: Context, options: RagOptions) -> tuple[list[EngineSequence], list[float]]:
    """Forks `seq` for each of the best documents; their prompts take the place of its tokens."""
    if (context.opened and not context.closed) or context.calls:
        raise InvalidParameter(
            "strategy", "the model thinks or calls tools, and RAG over documents writes an answer alone; accepted: no "
            "thinking, and no tools.",
        )  # fmt: skip
    if not context.documents:
        raise InvalidParameter(
            "documents", "the strategy needs documents, each with a prompt of its own, and there are none; accepted: "
            "a run of a chat with collections.",
        )  # fmt: skip
    if options.k > context.quota.branches:
        raise InvalidParameter("k", f"k is {options.k}; accepted: at most {context.quota.branches} documents.")
    refuse_fields(context, "RAG over documents", "prompt_logprobs")
    best = sorted(context.documents, key=lambda each: -each.score)[: options.k]
    forks = seq.fork(len(best))
    tokens = seq.tokens
    for fork, document in zip(forks, best, strict=True):
        pairs = zip(tokens, document.prompt, strict=False)
        shared = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(document.prompt)))
        fork.truncate(shared)
        fork.append(document.prompt[shared:])
    return forks, document_weights([each.score for each in best], options.temperature)


def _without_thinking(context: Context) -> Span:
    """Returns the answer's span, in which no thought may begin."""
    span, markers = context.span, context.markers
    if markers is None:
        return span
    bias = {**span.sampling.logit_bias, markers.opening: -100.0}
    return replace(span, sampling=replace(span.sampling, logit_bias=bias))


@strategy("rag_token", RagOptions, takes_documents=True)
async def rag_token(seq: EngineSequence, context: Context, options: RagOptions) -> Yields:
    """Writes each token from the weighted sum of what the model says after each document alone (RAG-Token).

    Raises:
        InvalidParameter: there are no documents, or the model thinks or calls tools.
    """
    (leader, *others), weights = _forks(seq, context, options)
    span = _without_thinking(context)
    yield Spent(0, sum(len(each) for each in (leader, *others)))
    stream: SpanStream = leader.generate_mixed(others, weights, span)
    begun = len(leader)
    async with aclosing(stream):
        async for piece in stream:
            yield Piece(
                "answer", piece.text, len(piece.token_ids), piece.token_ids, logprobs=piece.logprobs,
                finish_reason=piece.finish_reason,
            )  # fmt: skip
    seq.append(leader.tokens[begun:])


@strategy("rag_sequence", RagSequenceOptions, takes_documents=True)
async def rag_sequence(seq: EngineSequence, context: Context, options: RagSequenceOptions) -> Yields:
    """Writes one answer from each document alone and gives the likeliest over all documents (RAG-Sequence).

    Raises:
        InvalidParameter: there are no documents, the model thinks or calls tools, or the span has a constraint, stop
            strings or log-probabilities.
    """
    refuse_fields(context, "RAG-Sequence", "constraint", "stop", "logprobs")
    forks, weights = _forks(seq, context, options)
    span = _without_thinking(context)
    assert span.max_tokens is not None
    limit = min(span.max_tokens, options.tokens or span.max_tokens)
    eos = () if span.ignore_eos else context.tokenizer.eos_token_ids
    stop_ids = tuple(dict.fromkeys((*eos, *span.stop_token_ids)))
    answers = await answer_by_sequence(
        forks, weights, replace(span, max_tokens=limit), stop_ids, thorough=options.thorough
    )
    best = answers[0]
    tokens = best.tokens[:-1] if best.ended else best.tokens
    written = sum(len(each.tokens) for each in answers)
    again = written * len(forks) if options.thorough else 0
    yield Spent(written - len(tokens), sum(map(len, forks)) + again)
    seq.append(tokens)
    for piece in pieces_of(tokens, context, "stop" if best.ended else "length"):
        yield piece
