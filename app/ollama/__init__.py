"""Ollama's API, for clients that know no other: on with the setting `ollama_api`.

`request_models` turn a body into a chat request, `routes` answer in Ollama's shapes.
"""

from app.ollama.routes import router

__all__ = ["router"]
