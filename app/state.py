"""State that the routes of one app share. Made when the app is, reached through a request; there are no globals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from fastapi import FastAPI, Request

from app.admission import Admission
from app.answering.model_registry import ModelRegistry
from app.answering.reasoning_config import ReasoningResolver
from app.answering.served_model import ServedModel
from app.answering.thinking_signature import ThinkingSigner
from app.answering.thinking_summary import Summariser, ThinkingSummary
from app.answering.tool_selection import ToolSelector
from app.config import Settings
from app.connections import Drain
from app.observability.metrics import Counting, ServerMetrics

if TYPE_CHECKING:
    from app.answering.tool_service import ToolService
    from app.auth import Auth
    from app.db.store import Store
    from app.diffusion.service import DiffusionService
    from app.remote.audio_client import AudioClient
    from app.runs.live_runs import Runs
    from app.sequences.registry import Sequences
    from retrieval import Library


class UserLocks:
    """One thing of each user's at a time."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}  # and how many have it or wait for it

    @asynccontextmanager
    async def of(self, user: str) -> AsyncIterator[None]:
        lock, waiting = self._locks.get(user, (asyncio.Lock(), 0))
        self._locks[user] = lock, waiting + 1
        try:
            async with lock:
                yield
        finally:
            lock, waiting = self._locks.pop(user)
            if waiting > 1:
                self._locks[user] = lock, waiting - 1


@dataclass(slots=True)
class Serving:
    """Everything that answering on the engines takes, in whichever of a server's processes."""

    settings: Settings
    models: ModelRegistry
    counting: Counting
    reasoning_resolver: ReasoningResolver
    drain: Drain
    tool_selector: ToolSelector
    signer: ThinkingSigner = field(init=False)

    def __post_init__(self) -> None:
        self.signer = ThinkingSigner(self.settings.resolved_data_dir)

    @classmethod
    def of(cls, request: Request) -> Self:
        app: Any = request.app  # Starlette keeps state untyped
        state: Self = app.state.ponder
        return state

    def attach(self, app: FastAPI) -> None:
        app.state.ponder = self

    @property
    def served(self) -> ServedModel:
        """The default model."""
        return self.models.default

    def thoughts(self, user: str) -> ThinkingSummary:
        """Returns the filter of the thinking of one answer to `user`.

        Raises:
            ApiError: there is no model of the name that is to write summaries.
        """
        policy, name = self.settings.thinking_text, self.settings.summary_model
        served = (None if name is None else self.models.own(name)) or self.models.default
        return ThinkingSummary(policy, Summariser(served, user) if policy == "summarised" else None)


@dataclass(slots=True)
class State(Serving):
    """Adds the state of the primary process, which keeps everybody's data."""

    meter: ServerMetrics
    admission: Admission
    ending: asyncio.Event = field(default_factory=asyncio.Event)  # waiters for other events are to stop waiting
    sequences: Sequences = field(init=False)  # while the app's lifespan lasts
    auth: Auth = field(init=False)  # the same
    views: UserLocks = field(default_factory=UserLocks)  # of PDFs, in the processes that read them
    audio: AudioClient | None = None  # of the server of speech, where one is set
    diffusion: DiffusionService | None = None  # where a masked-diffusion model is set
    _store: Store | None = None  # open while the app's lifespan lasts
    _runs: Runs | None = None
    _library: Library | None = None
    _tool_service: ToolService | None = None

    def opened(self, store: Store, runs: Runs, library: Library, tool_service: ToolService) -> None:
        self._store, self._runs, self._library, self._tool_service = store, runs, library, tool_service

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
    def tool_service(self) -> ToolService:
        assert self._tool_service is not None, "the app's lifespan has not begun"
        return self._tool_service
