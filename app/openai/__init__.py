"""The OpenAI-compatible API under `/v1`: chat completions, completions, embeddings and models.

A request's road is the file list: `fields` and `schemas` check it, `generation` runs it on the engine, `chat` and
`completions` shape the reply, `stream` sends it. Every accepted field works; every other one is refused by name.
"""

from app.openai.routes import router

__all__ = ["router"]
