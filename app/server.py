"""The web application: routes, middleware and the lifespan of their shared state. `create_app` is all there is to it.

The engine is given and stays the caller's to stop; the database and the documents are opened and closed with the app's
lifespan.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from app import errors, ollama, openai, openapi, share
from app.admission import Admission, AdmissionGate
from app.admission.shared_rates import SharedRates
from app.answering.model_registry import ModelRegistry
from app.answering.reasoning_config import Collections, ReasoningResolver
from app.answering.served_model import ServedModel
from app.answering.tool_selection import ToolRanker, ToolSelector
from app.answering.tool_service import ToolService
from app.anthropic.routes import router as anthropic_router
from app.api import (
    accounts,
    artifacts,
    chats,
    collections,
    documents,
    files,
    jobs,
    memory,
    operator,
    permissions,
    presets,
    search,
    sequences,
    tools,
)
from app.api import runs as run_routes
from app.api.mcp_endpoint import McpEndpoint
from app.auth import Auth, RequireUser, session_token
from app.cluster import Cluster, open_store
from app.cluster.redis_client import blocking_client
from app.config import BadSetting, Settings
from app.connections import Drain, DrainMiddleware
from app.db.account_store import Accounts
from app.db.quotas import RemoteUse
from app.db.store import Store
from app.diffusion import routes as diffusion_routes
from app.diffusion.service import DiffusionService
from app.document_library import open_library, sweep_files
from app.middleware import add_middleware
from app.observability.metrics import Goals, ServerMetrics
from app.openai import audio, responses
from app.page import mount_page
from app.runs.chat_titles import TitleWriter
from app.runs.document_answers import DocumentAnswers
from app.runs.live_runs import Runs
from app.runs.memory import MemoryNotes, keeps_memory
from app.runs.research import DocumentResearch, document_research
from app.sequences import persistence
from app.sequences.registry import Sequences
from app.state import State
from engine.errors import EngineRestarting, EngineStopped
from reasoning.agent import Limits
from retrieval.records import among_of

if TYPE_CHECKING:
    from engine import Engine
    from retrieval import Library

# Exports come before chats: their addresses would be those of a chat's id.
ROUTERS = (
    chats.exchange_router, chats.router, memory.router, share.router, share.page_router, artifacts.router,
    run_routes.router, chats.folders_router, documents.router, files.router,
    documents.pages_router, jobs.router, collections.router, search.router, tools.router, permissions.router,
    sequences.router, tools.strategies_router, accounts.session_router, operator.router, accounts.router,
    presets.router, diffusion_routes.router,
)  # fmt: skip


def create_app(
    engine: Engine | ModelRegistry, settings: Settings, *, store: Store | None = None, library: Library | None = None,
    diffusion: DiffusionService | None = None,
) -> FastAPI:  # fmt: skip
    """A server of one model's engine, or of several models. A `store`, a `library` and a `diffusion` that are given,
    open, become the app's, which closes them.

    Raises:
        CheckpointError: a file beside the model's weights cannot be read.
    """
    if isinstance(engine, ModelRegistry):
        models = engine
    else:
        served = ServedModel(
            engine, settings.model, settings.served_model_name, settings.tool_call_parser,
            warm_next_turn=settings.warm_next_turn,
        )  # fmt: skip
        models = ModelRegistry([served], web=settings.web, adapters=settings.lora)
    meter = ServerMetrics(models, Goals.of_settings(settings))

    def used(key_id: str, tokens: int) -> None:
        state.auth.later(lambda accounts: accounts.add_use(key_id, 1, tokens))

    admission = Admission(settings, meter.queue_estimates, meter.refusal, used)
    state = State(
        settings,
        models,
        meter,
        ReasoningResolver.of_settings(settings),
        Drain(),
        ToolSelector.of_settings(settings),
        meter,
        admission,
    )
    local = [name for name in models.names if name not in models.remotes]
    if settings.summary_model is not None and settings.summary_model not in local:
        accepted = ", ".join(local)
        raise BadSetting(f"summary_model is {settings.summary_model!r}; accepted: a served model: {accepted}.")
    mcp = McpEndpoint(state, chats.version())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as closing:
            opened = store or await open_store(settings)
            closing.push_async_callback(opened.close)
            cluster = None
            if settings.redis_address is not None:
                cluster = await Cluster.join(settings.redis_address, opened.database)
                closing.push_async_callback(cluster.leave)
                shared = SharedRates(blocking_client(settings.redis_address), cluster.namespace, cluster.name)
                admission.share(shared)
                cluster.begin(shared.keep(), "requests under way")
                closing.callback(shared.close)
            accounts_of = partial(Accounts.open, settings.resolved_data_dir, settings.database_address)
            state.auth = Auth(await asyncio.to_thread(accounts_of))
            closing.callback(state.auth.close)
            await _keep_use_of_remotes(state)
            if settings.audio is not None:
                from app.remote.audio_client import AudioClient

                state.audio = AudioClient(settings.audio, settings.audio.key())
                closing.push_async_callback(state.audio.close)
            state.diffusion = diffusion
            if diffusion is None and settings.diffusion_model is not None:
                state.diffusion = await DiffusionService.load(settings.diffusion_model, settings.device)
            if state.diffusion is not None:
                closing.callback(state.diffusion.close)
            shelf = await asyncio.to_thread(open_library, settings) if library is None else library
            closing.push_async_callback(asyncio.to_thread, shelf.close)
            state.tool_selector.ranker = ToolRanker(shelf.embedder)  # loaded once for both
            document_answers = DocumentAnswers(settings.document_answers, settings.resolved_data_dir, shelf.ranker)
            closing.push_async_callback(document_answers.close)
            opened.memory.available = keeps_memory(settings)
            await opened.memory.adopt(settings.resolved_data_dir / "notes.db")
            notes = MemoryNotes(opened.memory)
            tool_service = await closing.enter_async_context(ToolService(settings, shelf, notes))
            state.reasoning_resolver.checkers.tool_service = tool_service
            state.tool_selector.guided_parameters = tool_service.guided_parameters
            closing.push_async_callback(state.reasoning_resolver.checkers.close)

            async def research(served: ServedModel, user: str, question: str, named: Collections) -> DocumentResearch:
                writes = document_answers.way(served).kind == "generative"
                return await document_research(shelf, served, user, question, among_of(named), writes=writes)

            state.reasoning_resolver.searches.make = research
            await asyncio.to_thread(tool_service.tell_skills, models)
            runs = Runs(
                models.default,
                state.thoughts,
                state.meter,
                opened,
                shelf,
                tool_service,
                Limits(settings.tool_steps, seconds=settings.tool_seconds),
                way=document_answers.way,
                tool_selector=state.tool_selector,
                titles=TitleWriter(opened) if settings.titles == "model" else None,
                cluster=cluster,
            )
            closing.push_async_callback(runs.stop)
            await runs.recover()
            sweep = partial(sweep_files, opened, shelf)
            closing.callback(asyncio.create_task(opened.deleted.purge_when_due(swept=sweep)).cancel)
            state.sequences = closing.enter_context(Sequences.of_settings(settings))
            await persistence.take_up(state.sequences, models, persistence.file_of(settings.resolved_data_dir))
            state.opened(opened, runs, shelf, tool_service)
            closing.push_async_callback(mcp.close)
            yield

    app = FastAPI(title="Ponder", version=chats.version(), lifespan=lifespan, docs_url=None, redoc_url=None)
    state.attach(app)
    errors.install(app, lambda error: state.meter.windows.error(error.code or str(error.status)), openapi.methods_at)
    app.include_router(openai.router)
    app.include_router(responses.router)
    app.include_router(audio.router)
    app.include_router(anthropic_router)
    beside = (ollama.router,) if settings.ollama_api else ()
    for router in beside:
        app.include_router(router)
    for router in ROUTERS:
        app.include_router(router)
    app.router.routes.append(mcp.route())
    app.add_api_route("/health", _health, methods=["GET"], tags=["Operations"])
    app.add_api_route("/metrics", _metrics, methods=["GET"], tags=["Operations"])
    app.add_middleware(AdmissionGate, admission=lambda: state.admission)
    app.add_middleware(DrainMiddleware, drain=state.drain)
    openapi.install(app, (openai.router, responses.router, audio.router, anthropic_router, *beside, *ROUTERS))
    if settings.auth == "keys":
        app.add_middleware(RequireUser, auth=lambda: state.auth)
    add_middleware(app, settings)
    # Last: it answers for every path that nobody else took.
    mount_page(
        app, lambda request: settings.auth == "off" or session_token(request.headers) is not None,
        about=lambda: state.served.about.text,
    )  # fmt: skip
    return app


async def _keep_use_of_remotes(state: State) -> None:
    """Takes up what remote models have used in this month, and has further use kept."""

    def keep(name: str, use: RemoteUse) -> None:
        state.auth.later(lambda accounts: accounts.add_remote_use(name, use))

    for name, remote in state.models.remotes.items():
        remote.spending.load(await state.auth.do(partial(Accounts.remote_use, remote=name)))
        remote.spending.listeners.append(partial(keep, name))


async def _health(request: Request) -> Response:
    state = State.of(request)
    states, reasons = dict[str, str](), dict[str, str]()
    for served in state.models:
        try:
            await served.engine.stats()
            states[served.name] = "ok"
        except EngineStopped as error:
            states[served.name] = "restarting" if isinstance(error, EngineRestarting) else "stopped"
            reasons[states[served.name]] = str(error)
    health: dict[str, object] = {"status": "ok"}
    for worst in ("stopped", "restarting"):
        if worst in reasons:
            health = {"status": worst, "reason": reasons[worst]}
            break
    if state.drain.begun:
        health = {"status": "draining", "reason": "The server is stopping."}
    if len(states) > 1:
        health["models"] = states
    return JSONResponse(health, 200 if health["status"] == "ok" else 503)


async def _metrics(request: Request) -> Response:
    return Response(await State.of(request).meter.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")
