"""A served model: its engine, the names it answers to, and its authors' sampling defaults.

The model's own files (`generation_config.json`, `ponder.json`) are read once, when the model is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from app.answering.next_turn import NextTurnWarmer
from app.answering.request_images import RequestImages
from app.config import DEFAULT_NAME
from app.errors import invalid
from engine.errors import ContextLengthExceeded
from engine.model.quantization.checkpoint import open_weights
from engine.multimodal.image_input import FIRST_IMAGE_ID
from engine.params import Sampling
from engine.tool_parsers import ToolPlan, choose_parser
from engine.tool_parsers.base import line_breaks
from reasoning.thinking import Markers

if TYPE_CHECKING:
    from engine import Engine
    from engine.handle import Sequence as EngineSequence
    from engine.params import ChunkSpans, RemotePrefill, StreamingWindow


_STARTERS = (
    "What can you do?",
    "Explain step by step how to add 27 and 58.",
    "Write a short poem about the sea.",
)
SMALL_BELOW = 1_000_000_000  # weights; a smaller model is not trusted to write from documents
_WAYS = ("extractive", "quoting", "generative")
_LONG_TEXT = 4_000  # characters; encoding more than this would be felt by the other streams
_MANY = 100  # messages; the same


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Text of the page's first screen."""

    text: str
    starters: tuple[str, ...]
    document_answers: Literal["extractive", "quoting", "generative"] | None = None  # its authors' way, where they say


class ServedModel:
    """An engine and the public facts of its model."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        name: str | None = None,
        tool_call_parser: str = "auto",
        *,
        warm_next_turn: bool = False,
    ) -> None:
        """
        Raises:
            CheckpointError: the model's tokenizer lacks a token of the tool parser, or a file of the model's is
            damaged.
        """
        directory = Path(engine.model_path)
        self.engine = engine
        self.name = name or engine.model_name
        self.names = frozenset({self.name, model, str(directory), DEFAULT_NAME})
        self.base = self.name  # the name of the model whose engine it is: another one for an adapter
        self.adapter: str | None = None
        self.root = model  # the directory or hub name of its files
        self.created = int(time.time())
        self.markers = Markers.of(engine.tokenizer)
        self.tool_parser = choose_parser(engine.tokenizer, engine.tokenizer.tool_template, tool_call_parser)
        self.line_breaks = line_breaks(engine.tokenizer)
        warms = warm_next_turn and engine.config.prefix_cache
        self.next_turns = NextTurnWarmer(engine) if warms else None
        self.images = RequestImages()
        self.plans: dict[bytes, ToolPlan] = {}  # by user and the request's tools; the oldest first
        self.sampling = default_sampling(_read_json(directory / "generation_config.json"))
        self.about = _about(_read_json(directory / "ponder.json"))

    def with_adapter(self, name: str, root: str) -> ServedModel:
        """Returns the same model with an adapter of its engine, which is called `name` there and for clients; `root`
        is the directory or hub name of the adapter's files."""
        served = copy.copy(self)
        served.name, served.names, served.adapter, served.root = name, frozenset({name}), name, root
        served.created, served.plans = int(time.time()), {}
        served.next_turns = None if self.next_turns is None else NextTurnWarmer(self.engine, name)
        return served

    async def open(
        self, tokens: Sequence[int], *, tenant: str, priority: int = 0, deadline_s: float | None = None,
        remote_prefill: RemotePrefill | None = None, chunks: ChunkSpans = (), streaming: StreamingWindow | None = None,
    ) -> EngineSequence:  # fmt: skip
        """Opens a sequence of this model. Raises the errors of `Engine.open`."""
        options: dict[str, Any] = {"tenant": tenant, "priority": priority, "deadline_s": deadline_s, "chunks": chunks}
        options |= {"remote_prefill": remote_prefill, "streaming": streaming}
        return await self.engine.open(tokens, adapter=self.adapter, **options)

    @cached_property
    def parameters(self) -> int:
        """Number of weights in the model."""
        return open_weights(self.engine.model_path).parameters()

    @property
    def sees(self) -> bool:
        """Returns whether the model reads images."""
        return self.engine.image_processor is not None

    async def stop(self) -> None:
        """Stops the engine. Idempotent."""
        if self.next_turns is not None:
            self.next_turns.close()
        await self.engine.stop()

    async def chat_tokens(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = (),
        *, endless: bool = False,
    ) -> list[int]:  # fmt: skip
        """The prompt of a chat, ready for the assistant's turn. An `endless` one may be longer than the context.

        Raises:
            ApiError: 400 `context_length_exceeded`, with the numbers.
        """

        def made() -> list[int]:
            shown = [dict(tool) for tool in tools] or None
            tokenizer, most = self.engine.tokenizer, None if endless else self.engine.max_model_len
            return tokenizer.encode_chat(messages, shown, variables, max_tokens=most)

        long = tools or len(messages) > _MANY or sum(map(_length, messages)) > _LONG_TEXT
        with _blaming("messages"):
            return await asyncio.to_thread(made) if long else made()

    async def text_tokens(
        self, text: str, field: str = "prompt", *, special: bool = True, bos: bool = True
    ) -> list[int]:
        """The prompt of a plain completion, which came in `field`; with `special`, special tokens spelt out in it count
        as such.

        Raises:
            ApiError: 400 `context_length_exceeded`, with the numbers.
        """

        def made() -> list[int]:
            encode, most = self.engine.tokenizer.encode, self.engine.max_model_len
            return encode(text, special=special, bos=bos, max_tokens=most)

        with _blaming(field):
            return await asyncio.to_thread(made) if len(text) > _LONG_TEXT else made()

    def shown_tokens(self, tokens: list[int]) -> list[int]:
        """Returns the tokens of a prompt with the model's own image token where an image's stand."""
        processor = self.engine.image_processor
        if processor is None:
            return tokens
        return [token if token < FIRST_IMAGE_ID else processor.image_token_id for token in tokens]

    def opens_thinking(self, prompt: list[int]) -> bool:
        return self.markers is not None and self.markers.left_open(prompt, self.engine.tokenizer)

    def closes_thinking(self, prompt: list[int]) -> bool:
        return self.markers is not None and self.markers.left_closed(prompt, self.engine.tokenizer)


def _length(message: Mapping[str, Any]) -> int:
    """Characters of a message, calls not counted in full: there are few, or many messages."""
    texts = (message.get("content"), message.get("reasoning_content"))
    if isinstance(texts[0], list):
        return _LONG_TEXT + 1
    return sum(len(text) for text in texts if text) + (_LONG_TEXT if message.get("tool_calls") else 0)


@contextlib.contextmanager
def _blaming(field: str) -> Iterator[None]:
    """Say of a text that is too long in which field it came."""
    try:
        yield
    except ContextLengthExceeded as error:
        raise invalid(field, str(error), error.code) from None


def default_sampling(config: Mapping[str, Any]) -> Sampling:
    """`generation_config.json` as sampling defaults; absent fields are the engine's defaults."""
    if config.get("do_sample") is False:
        return Sampling(temperature=0.0)
    fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return Sampling(**{name: config[name] for name in fields if config.get(name) is not None})


def _about(config: Mapping[str, Any]) -> ModelInfo:
    starters = tuple(str(s) for s in config.get("starters") or _STARTERS)
    way = config.get("document_answers")
    return ModelInfo(str(config.get("about", "")), starters, way if way in _WAYS else None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # a GGUF file has none beside it
        return {}
    except (OSError, ValueError) as error:
        from engine.errors import CheckpointError

        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    return value if isinstance(value, dict) else {}
