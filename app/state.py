"""What the routes of one app share. Made when the app is, reached through a request; there are no globals."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request

from app.config import Settings
from app.metrics import Meter
from app.models import Models
from app.served import Served

if TYPE_CHECKING:
    from app.runs.live import Runs
    from app.sequences.sequences import Sequences
    from app.store import Store
    from app.toolshed import Toolshed
    from retrieval import Library


@dataclass(slots=True)
class State:
    settings: Settings
    models: Models
    meter: Meter
    ending: asyncio.Event = field(default_factory=asyncio.Event)  # who waits for something else is to stop waiting
    sequences: Sequences = field(init=False)  # while the app's lifespan lasts
    _store: Store | None = None  # open while the app's lifespan lasts
    _runs: Runs | None = None
    _library: Library | None = None
    _toolshed: Toolshed | None = None

    @classmethod
    def of(cls, request: Request) -> State:
        app: Any = request.app  # Starlette keeps state untyped
        state: State = app.state.ponder
        return state

    def attach(self, app: FastAPI) -> None:
        app.state.ponder = self

    def opened(self, store: Store, runs: Runs, library: Library, toolshed: Toolshed) -> None:
        self._store, self._runs, self._library, self._toolshed = store, runs, library, toolshed

    @property
    def served(self) -> Served:
        """The default model."""
        return self.models.default

    @property
    def store(self) -> Store:
        assert self._store is not None, "the app's lifespan has not begun"
        return self._store

    @property
    def runs(self) -> Runs:
        assert self._runs is not None, "the app's lifespan has not begun"
        return self._runs

    @property
    def library(self) -> Library:
        assert self._library is not None, "the app's lifespan has not begun"
        return self._library

    @property
    def toolshed(self) -> Toolshed:
        assert self._toolshed is not None, "the app's lifespan has not begun"
        return self._toolshed
