"""The OpenAI-compatible API under `/v1`: chat completions, completions, embeddings, reranking, tokens and models.

`routes` reads a body, `request_models` check it, `chat_completions` and `completions` plan it and shape the reply,
`event_stream` sends it; `responses` and its neighbours are the Responses API. Every accepted field works; every other
one is refused by name.
"""

from app.openai.routes import router

__all__ = ["router"]
