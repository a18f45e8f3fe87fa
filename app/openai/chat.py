"""`POST /v1/chat/completions`: messages in, an assistant's turn out, streamed or whole.

Thinking goes to `reasoning_content`, never into `content`. Chunks are encoded by hand around a prefix that does not
change, because they are the one thing this server makes thousands of a second.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from app.metrics import Meter
from app.openai.fields import CHAT_REFUSED, parse
from app.openai.generation import Generation, check_model, room_for
from app.openai.logprobs import chat_logprobs
from app.openai.schemas import ChatRequest
from app.openai.stream import event, text_json
from app.served import Served
from app.thinking import Piece, Tally
from engine.outputs import TokenLogprob


@dataclass(slots=True)
class ChatJob:
    """A checked chat request, ready to run."""

    request: ChatRequest
    served: Served
    generation: Generation
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    async def of(cls, body: Mapping[str, Any], served: Served, meter: Meter) -> ChatJob:
        """
        Raises:
            ApiError: 400 or 404, naming the field.
        """
        request = parse(body, ChatRequest, CHAT_REFUSED)
        check_model(served, request.model)
        prompt = await served.chat_tokens(request.template_messages(), request.chat_template_kwargs)
        room = room_for(served, prompt, request.token_limit, "messages")
        vocab_size = served.engine.vocab_size
        span = request.span(served.sampling, room=room, vocab_size=vocab_size, default_limit=None)
        span = replace(span, logprobs=request.engine_logprobs)
        return cls(request, served, Generation(served, meter, "chat", [prompt], request.n, [span], chat=True))

    async def whole(self) -> dict[str, Any]:
        """The reply, when all of it is there."""
        choices = [_Choice() for _ in range(self.request.n)]
        async with aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                choices[index].add(piece)
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.served.name,
            "choices": [self._choice(i, choice) for i, choice in enumerate(choices)],
            "usage": usage_json(self.generation.tally),
        }

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.content), "refusal": None}
        if reasoning := "".join(choice.reasoning):
            message["reasoning_content"] = reasoning
        logprobs = self._logprobs(choice.logprobs) if self.request.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The reply as events, `[DONE]` excepted."""
        head = f'{{"id":"{self.id}","object":"chat.completion.chunk","created":{self.created},"model":'.encode()
        start = b"data: " + head + text_json(self.served.name)
        end = b',"usage":null}\n\n' if self.request.include_usage else b"}\n\n"
        begun: set[int] = set()

        def chunk(index: int, delta: bytes, logprobs: bytes = b"null", finish: str | None = None) -> bytes:
            reason = b"null" if finish is None else b'"%b"' % finish.encode()
            return b'%b,"choices":[{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b}]%b' % (
                start, index, delta, logprobs, reason, end,
            )  # fmt: skip

        async with aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                data = b""
                if index not in begun:
                    begun.add(index)
                    data = chunk(index, b'"role":"assistant","content":"","refusal":null')
                logprobs = b"null"
                if self.request.logprobs and piece.part == "answer" and piece.logprobs:
                    logprobs = event(self._logprobs(piece.logprobs))[len(b"data: ") : -2]
                if piece.text or logprobs != b"null":
                    name = b"content" if piece.part == "answer" else b"reasoning_content"
                    data += chunk(index, b'"%b":%b' % (name, text_json(piece.text)), logprobs)
                if piece.finish_reason is not None:
                    data += chunk(index, b"", finish=_finish(piece))
                if data:
                    yield data
        if self.request.include_usage:
            usage = event(usage_json(self.generation.tally))[len(b"data: ") : -2]
            yield b'%b,"choices":[],"usage":%b}\n\n' % (start, usage)

    def _logprobs(self, entries: tuple[TokenLogprob, ...] | list[TokenLogprob]) -> dict[str, Any]:
        return chat_logprobs(self.served.engine.tokenizer, entries, self.request.top_logprobs or 0)


@dataclass(slots=True)
class _Choice:
    """One answer being put together."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        if piece.part == "answer":
            self.content.append(piece.text)
            self.logprobs += piece.logprobs
        else:
            self.reasoning.append(piece.text)
        if piece.finish_reason is not None:
            self.finish_reason = _finish(piece)


def _finish(piece: Piece) -> str:
    return "stop" if piece.finish_reason == "stop" else "length"


def usage_json(tally: Tally) -> dict[str, Any]:
    """`usage` in OpenAI's shape."""
    return {
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "total_tokens": tally.prompt_tokens + tally.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": tally.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": tally.reasoning_tokens},
    }
