"""Late interaction: every word of the query finds its nearest word in the passage (MaxSim, Khattab & Zaharia, 2020).

The token vectors are those of the embedder itself, which was not trained for it; it still tells passages apart that
say the query's words of the same thing from those that say them of many.
"""

from __future__ import annotations

from collections.abc import Sequence

from retrieval.embedding import Embedder


def max_sim(embedder: Embedder, query: str, texts: Sequence[str]) -> list[float]:
    """For each text the mean over the query's tokens of the highest cosine with one of the text's."""
    (asked,) = embedder.tokens([query])
    return [float((asked @ tokens.T).max(axis=1).mean()) for tokens in embedder.tokens(texts)]
