"""`ponder chat`: a conversation in the terminal, with a server or with an engine of its own.

Ctrl-C stops an answer, not the program. Thinking is shown dimmed. Knows nothing of how the answer is made: a
`ChatBackend` is anything that streams one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import mimetypes
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx
from rich.console import Console

from app.config import BadSetting, Settings

if TYPE_CHECKING:
    from app.answering.served_model import ServedModel
    from reasoning.thinking import Part

DEFAULT_URL = "http://127.0.0.1:8000"
Messages = list[dict[str, Any]]  # as chat completions take them


class Refused(BadSetting):
    """A server's error, with its code."""

    def __init__(self, body: bytes) -> None:
        super().__init__(_message(body))
        self.code = _error(body).get("code")


class ChatBackend(Protocol):
    """The side that answers."""

    name: str

    def answer(self, messages: Messages) -> AsyncGenerator[tuple[Part, str], None]:
        """The next turn, piece by piece."""

    async def close(self) -> None: ...


class RemoteChat:
    """A Ponder server, or any other that speaks OpenAI's chat completions."""

    def __init__(self, url: str, key: str | None = None) -> None:
        base_url = url.rstrip("/").removesuffix("/v1")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._client = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=httpx.Timeout(10, read=None))
        self.url = url
        self.name = url

    async def greet(self) -> None:
        """Find out the model's name.

        Raises:
            BadSetting: nobody answers there.
        """
        try:
            reply = await self._client.get("/v1/models")
            if reply.status_code == 401:
                raise BadSetting(f"{_message(reply.content)} Give --key, or PONDER_API_KEY.")
            reply.raise_for_status()
            self.name = reply.json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
            raise BadSetting(
                f"No server answers at {self.url} ({error or type(error).__name__}); start one with `ponder serve`, "
                "or chat without one: `ponder chat --model models/pebble`."
            ) from None

    async def answer(self, messages: Messages) -> AsyncGenerator[tuple[Part, str], None]:
        body = {"model": self.name, "messages": messages, "stream": True}
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                raise Refused(await reply.aread())
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise Refused(line[6:].encode())
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("reasoning_content"):
                        yield "thinking", text
                    if text := choice["delta"].get("content"):
                        yield "answer", text

    async def close(self) -> None:
        await self._client.aclose()


class LocalChat:
    """An engine in this process."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.name = served.name

    @classmethod
    async def start(cls, settings: Settings) -> LocalChat:
        """
        Raises:
            EngineError: the model cannot be loaded.
        """
        from app.answering.served_model import ServedModel
        from engine import Engine

        engine = await Engine.start(settings.engine_config(), fallback=settings.engine_fallback())
        return cls(ServedModel(engine, settings.model))

    async def answer(self, messages: Messages) -> AsyncGenerator[tuple[Part, str], None]:
        from app.openai.chat_messages import turns
        from engine import Span
        from reasoning.thinking import think_and_answer

        served = self._served
        shown = await served.images.in_parts(turns(messages), served.engine, served.name)
        prompt = await served.chat_tokens(shown, {})
        async with await served.engine.open(prompt) as seq:
            span = Span(sampling=served.sampling, max_tokens=served.engine.max_model_len - len(prompt))
            opened = served.opens_thinking(prompt)
            async with aclosing(think_and_answer(seq, span, served.markers, opened=opened)) as pieces:
                async for piece in pieces:
                    if piece.text:
                        yield piece.part, piece.text

    async def close(self) -> None:
        await self._served.engine.stop()


def image_parts(files: Sequence[Path]) -> Messages:
    """Returns image files as parts of a message.

    Raises:
        BadSetting: one cannot be read.
    """
    parts = Messages()
    for file in files:
        try:
            data = base64.b64encode(file.read_bytes()).decode()
        except OSError as error:
            raise BadSetting(f"--image {file} cannot be read: {error.strerror}.") from None
        kind = mimetypes.guess_type(file.name)[0] or "image/png"
        parts.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})
    return parts


def converse(url: str | None, settings: Settings | None, key: str | None = None, images: Sequence[Path] = ()) -> None:
    """Chat until /exit or the end of the input: with the server at `url`, or with `settings.model` here.

    `key` is for a server that asks for one; `images` are shown with the first question.

    Raises:
        BadSetting, EngineError: there is nobody to chat with, or an image cannot be read.
    """
    console = Console(highlight=False)
    parts = image_parts(images)
    with asyncio.Runner() as runner:
        waiting = console.status("Looking for someone to talk to …") if console.is_terminal else nullcontext()
        with waiting:
            partner = runner.run(_partner(url, settings, key))
        try:
            console.print(f"Chatting with [bold]{partner.name}[/bold]. /new starts over, /exit leaves.", style="dim")
            _loop(console, runner, partner, parts)
        finally:
            runner.run(partner.close())


async def _partner(url: str | None, settings: Settings | None, key: str | None) -> ChatBackend:
    if settings is not None:
        return await LocalChat.start(settings)
    partner = RemoteChat(url or DEFAULT_URL, key)
    await partner.greet()
    return partner


def _loop(console: Console, runner: asyncio.Runner, partner: ChatBackend, images: Messages) -> None:
    messages: Messages = []
    while True:
        try:
            line = console.input("[bold]› [/bold]").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n/exit leaves.", style="dim")
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/new":
            messages = []
            console.print("A new conversation.", style="dim")
        elif line.startswith("/") and " " not in line:
            console.print(f"{line} is no command; accepted: /new, /exit.", style="dim", markup=False)
        elif line:
            shown = [] if messages else images
            content = [*shown, {"type": "text", "text": line}] if shown else line
            _turn(console, runner, partner, messages, {"role": "user", "content": content})


def _turn(
    console: Console, runner: asyncio.Runner, partner: ChatBackend, messages: Messages, question: dict[str, Any]
) -> None:
    answer: list[str] = []
    asked: Messages = [*messages, question]
    try:
        runner.run(_print_answer(console, partner, asked, answer))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(" [stopped]", style="dim", markup=False)
    except Exception as error:
        full = messages and getattr(error, "code", None) == "context_length_exceeded"
        console.print(f"\n{error}{' /new starts over.' if full else ''}", style="red", markup=False)
    if text := "".join(answer):
        messages[:] = [*asked, {"role": "assistant", "content": text}]


async def _print_answer(console: Console, partner: ChatBackend, messages: Messages, answer: list[str]) -> None:
    """Stream one answer; SIGINT cancels this task alone."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    last: Part | None = None
    try:
        async with aclosing(partner.answer(messages)) as pieces:
            async for part, text in pieces:
                if last == "thinking" and part == "answer":
                    console.print("\n")
                last = part
                if part == "answer":
                    answer.append(text)
                console.print(text, end="", style="dim" if part == "thinking" else None, markup=False, soft_wrap=True)
        console.print()
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _error(body: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        return {}


def _message(body: bytes) -> str:
    return str(_error(body).get("message") or body.decode(errors="replace")[:300])
