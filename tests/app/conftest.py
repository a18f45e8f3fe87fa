"""Real servers on free ports, on the real engine: one with the tiny scripted model, which most of these tests use,
one with the bundled model, which calls tools, and one for documents, whose users say who they are."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI, Request

from app.answering.model_registry import ModelRegistry
from app.cli.serve import bind
from app.config import LOCAL_USER, Settings
from app.current_user import user_of
from app.server import create_app
from app.wire import Patience, protocol_of
from engine import Engine, EngineConfig, Stats
from engine.builder import EngineParts
from engine.config import Fallback
from engine.kernels.cpu import build
from retrieval import Library
from tests.app import postgres
from tests.app.gate import GatedEmbedder

T = TypeVar("T")
# The company that a sequence has must not change what it draws: that is so in C++, and on torch in float32.
DTYPE = "float32" if build.library() is None else "bfloat16"
PEBBLE = Path(__file__).resolve().parents[2] / "models/pebble"
# A variable `open_thinking` more, so that a test can say that the model thinks first.
OPEN_THINKING = "{%- if add_generation_prompt and open_thinking -%}{{- '<think>\\n' -}}{%- endif -%}"


@dataclass
class Server:
    """A server in a thread of its own, with its loop, so that tests may block."""

    url: str
    engine: Engine
    loop: asyncio.AbstractEventLoop
    app: FastAPI
    data: Path

    def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def stats(self) -> Stats:
        return self.on_loop(self.engine.stats())

    def until(self, condition: Callable[[Stats], bool]) -> Stats:
        """The engine's statistics once they satisfy `condition`."""
        deadline = time.monotonic() + 60
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline, stats
            threading.Event().wait(0.005)
        return stats


@contextmanager
def serving(
    model: Path,
    data: Path,
    embedder: GatedEmbedder | None = None,
    databases: dict[str, Path] | None = None,
    also: dict[str, str] | None = None,
    patience: Patience | None = None,
    assemble: Callable[[EngineConfig], EngineParts] | None = None,
    fallback: tuple[Path, float] | None = None,
    **changed: Any,
) -> Iterator[Server]:
    """With an `embedder`, documents need no weights, and users say who they are with X-User. `also`: further models.
    `assemble` makes the engine's parts, see `Engine.start`. `fallback`: the model of the engine's fallback weights, and
    the least confidence.

    `changed` are other settings. Unless a test says otherwise, the model chooses its tools, and questions on documents
    do not begin to measure it in the background: those sequences would be among the ones that tests count.
    """
    changed.setdefault("tool_selection", "model")
    changed.setdefault("document_answers", "extractive")
    settings = Settings(model=str(model), data_dir=data, databases=databases or {}, models=also or {}, **changed)
    started: list[Server] = []
    ready, stop = threading.Event(), threading.Event()

    async def main() -> None:
        listener = bind("127.0.0.1", 0)
        limits: dict[str, Any] = {"device": "cpu", "dtype": DTYPE, "max_running": 16, "threads": 1}
        given = ("dtype", "max_running", "policy", "speculation", "data_parallel_size")
        limits |= {name: changed[name] for name in given if name in changed}
        adapters = tuple(settings.lora.items())
        limits["kv_events"] = None if settings.kv_events is None else settings.kv_events.config()
        limits["kv_transfer"] = None if settings.kv_transfer is None else settings.kv_transfer.config()
        limits["chunk_reuse"] = settings.chunk_config()
        limits |= {"context_shift": settings.context_shift, "max_model_len": settings.max_model_len}
        config = EngineConfig(model=str(model), kv_blocks=changed.get("kv_blocks") or 600, adapters=adapters, **limits)
        own = {"kv_blocks": 1200, "kv_events": settings.kv_events, "kv_transfer": settings.kv_transfer}
        several = settings.model_copy(update={**limits, **own})
        registry = also or settings.remote
        other = None if fallback is None else Fallback(replace(config, model=str(fallback[0])), fallback[1])
        starting = ModelRegistry.start(several) if registry else Engine.start(config, assemble, other)
        async with await starting as running:
            engine = running.default.engine if isinstance(running, ModelRegistry) else running
            library = None if embedder is None else Library.open(data / "documents", embedder)
            app = create_app(running, settings, library=library)
            if embedder is not None:
                app.dependency_overrides[user_of] = _who_it_says
            web = uvicorn.Server(
                uvicorn.Config(
                    app, log_config=None, timeout_keep_alive=60, http=protocol_of(patience or Patience()), ws="none"
                )
            )
            serving = asyncio.create_task(web.serve(sockets=[listener]))
            while not web.started:
                await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            started.append(Server(url, engine, asyncio.get_running_loop(), app, data))
            ready.set()
            await asyncio.to_thread(stop.wait)
            web.should_exit = True
            await serving

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(60), "the server did not start"
    try:
        yield started[0]
    finally:  # a test that fails would else leave threads that Python waits for at its end
        stop.set()
        thread.join(20)


NewDatabase = Callable[[], AbstractContextManager[str | None]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs the tests of a module that has `DATABASES` on each of them, as far as they keep anything."""
    if "new_database" in metafunc.fixturenames and (databases := getattr(metafunc.module, "DATABASES", None)):
        metafunc.parametrize("new_database", databases, indirect=True, scope="session")


@pytest.fixture(scope="session")
def new_database(request: pytest.FixtureRequest) -> NewDatabase:
    """Gives the address of a new database, None for SQLite's in the data directory."""
    if getattr(request, "param", None) is None:
        return nullcontext
    address: str = request.getfixturevalue("postgres_address")
    return lambda: postgres.schema(address)


@pytest.fixture
def address(new_database: NewDatabase) -> Iterator[str | None]:
    """The address of a new database for the test, None for SQLite's in its data directory."""
    with new_database() as address:
        yield address


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory, new_database: NewDatabase) -> Iterator[Server]:
    with new_database() as address, serving(model, tmp_path_factory.mktemp("data"), database=address) as server:
        yield server


@pytest.fixture(scope="session")
def pebble(tmp_path_factory: pytest.TempPathFactory, new_database: NewDatabase) -> Iterator[Server]:
    """A server of the bundled model, which knows tools. What it says with them is that of a very small model."""
    copy = tmp_path_factory.mktemp("models") / "pebble"
    copy.mkdir()
    for file in PEBBLE.iterdir():
        if file.name != "tokenizer_config.json":
            (copy / file.name).symlink_to(file)
    config = json.loads((PEBBLE / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] += OPEN_THINKING
    (copy / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with new_database() as address, serving(copy, tmp_path_factory.mktemp("data"), database=address) as server:
        yield server


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the two bundled models: `pebble`, the default, and `small`."""
    with serving(
        PEBBLE, tmp_path_factory.mktemp("both"), also={"small": str(PEBBLE.parent / "pebble-draft")}
    ) as server:
        yield server


async def _who_it_says(request: Request) -> str:
    return request.headers.get("x-user", LOCAL_USER)


@pytest.fixture(scope="session")
def embedder() -> GatedEmbedder:
    return GatedEmbedder()


@pytest.fixture(scope="session")
def shelf(
    model: Path, tmp_path_factory: pytest.TempPathFactory, embedder: GatedEmbedder, new_database: NewDatabase
) -> Iterator[Server]:
    """A server for documents."""
    data = tmp_path_factory.mktemp("shelf")
    with new_database() as address, serving(model, data, embedder, database=address) as server:
        yield server


_numbers = itertools.count()


@pytest.fixture
def ana(shelf: Server) -> Iterator[httpx.Client]:
    """A client of someone who has nothing yet."""
    with httpx.Client(base_url=shelf.url, headers={"X-User": f"ana-{next(_numbers)}"}, timeout=60) as client:
        yield client


@pytest.fixture
def bob(shelf: Server) -> Iterator[httpx.Client]:
    """Somebody else."""
    with httpx.Client(base_url=shelf.url, headers={"X-User": f"bob-{next(_numbers)}"}, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def pebble_client(pebble: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pebble.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def pebble_http(pebble: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=pebble.url, timeout=60) as client:
        yield client


@pytest.fixture
def nothing_lost(server: Server) -> Iterator[None]:
    """After the test, every sequence is closed, every block is back, and the server still answers."""
    yield
    all_is_back(server)


@pytest.fixture
def nothing_lost_by_pebble(pebble: Server) -> Iterator[None]:
    yield
    all_is_back(pebble)


def all_is_back(server: Server) -> None:
    server.until(lambda s: s.sequences == 0 and s.blocks_used == 0 and s.running == 0 and s.waiting == 0)
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
