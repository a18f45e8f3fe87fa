"""A worker's line to its home: questions and their answers, what is told, and where the engines are.

Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

from app.workers.talk import (
    Admitted,
    Ask,
    Denied,
    Draining,
    End,
    Ended,
    FromHome,
    FromWorker,
    Moved,
    framed,
    from_home,
    heard,
)
from engine.errors import EngineStopped


class HomeLink:
    """`ended` is done when the home says so, or is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._asked: dict[int, asyncio.Future[Admitted | Denied]] = {}
        self._places: defaultdict[str, asyncio.Queue[Moved | Ended]] = defaultdict(asyncio.Queue)
        self.on_draining: Callable[[], None] = lambda: None
        self.ended = asyncio.create_task(self._listen(), name="home")

    @classmethod
    async def open(cls, path: str) -> HomeLink:
        return cls(*await asyncio.open_unix_connection(path))

    def say(self, message: FromWorker) -> None:
        self._writer.write(framed(message))

    async def ask(self, question: Ask) -> Admitted | Denied:
        self._asked[question.number] = future = asyncio.get_running_loop().create_future()
        self.say(question)
        try:
            return await future
        finally:
            del self._asked[question.number]

    async def places(self, model: str) -> AsyncIterator[str | None]:
        """Yields where the model's engine is, now and later.

        Raises:
            EngineStopped: it is gone for good.
        """
        while True:
            told = await self._places[model].get()
            if isinstance(told, Ended):
                raise EngineStopped(told.message)
            yield told.directory

    async def _listen(self) -> None:
        while (message := await heard(self._reader, from_home)) is not None and not isinstance(message, End):
            self._hear(message)

    def _hear(self, message: FromHome) -> None:
        match message:
            case Admitted(number=number) | Denied(number=number):
                if (future := self._asked.get(number)) is not None and not future.done():
                    future.set_result(message)
            case Moved(model=model) | Ended(model=model):
                self._places[model].put_nowait(message)
            case Draining():
                self.on_draining()
