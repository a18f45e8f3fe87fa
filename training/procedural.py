"""Procedural sequences: random tokens of which some come again, to be copied from where they stood.

    # a b c d  # e f g  ? f e = e f g #        "?" names tokens of one segment, in any order; "=" asks for all of it

They hold nothing but the act that quoting, calling tools and remembering share: find the segment that the question
points to, then copy it, whatever the tokens (procedural pre-training). Knows token ids, nothing of text.
"""

from __future__ import annotations

from random import Random

ORDINARY = 12  # ids from here on are ordinary tokens: below are the special ones and the marks
FEW = 140  # different tokens at the beginning


def row(rng: Random, vocab_size: int, progress: float) -> tuple[list[int], list[float]]:
    """Returns a sequence and its loss weights: of up to 5 segments of 17 tokens, all of few different ones, at
    `progress` 0; growing to 14 segments of 40 and the whole vocabulary.

    With a whole vocabulary from the start the noise in its embeddings hides what is to be learned.
    """
    reach = 0.3 + 0.7 * progress
    most, longest = 2 + int(12 * reach), 8 + int(32 * reach)
    known = min(vocab_size, int(FEW * (vocab_size / FEW) ** min(1.0, 1.5 * progress)))
    pool = [rng.randrange(ORDINARY, known) for _ in range(rng.choice((40, 400, known)))]
    mark, asks, answers = rng.sample(range(ORDINARY, known), 3)
    segments = [[rng.choice(pool) for _ in range(rng.randint(4, longest))] for _ in range(rng.randint(1, most))]
    ids = [token for segment in segments for token in (mark, *segment)]
    weights = [0.0] * len(ids)
    for _ in range(rng.randint(1, 4)):
        segment = rng.choice(segments)
        kind = rng.random()
        if kind < 0.4:  # to be continued from within
            at = rng.randrange(len(segment) - 2)
            key, wanted = segment[at : at + 2], segment[at + 2 :]
        elif kind < 0.6:  # from its beginning
            key, wanted = segment[:1], segment[1:]
        else:
            key, wanted = rng.sample(segment, rng.randint(2, 4)), segment
        ids += [asks, *key, answers, *wanted, mark]
        weights += [0.0] * (len(key) + 2) + [1.0] * (len(wanted) + 1)
    return ids, weights
