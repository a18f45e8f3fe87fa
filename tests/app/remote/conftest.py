"""A server of the bundled model with planted remote models: `big` has OpenAI's API, `claude` Anthropic's, `poor` a
small budget, and `open` may have documents and a tool's results. `eagle` (OpenAI's API) and
`owl` (Anthropic's) see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.answering.model_cascade import ModelCascade
from reasoning.route import Whole
from tests.app.conftest import PEBBLE, Server, serving
from tests.app.gate import GatedEmbedder
from tests.app.remote.planted import KEY, Planted, planted_server, speaks

QUICK = {"connect_s": 2.0, "first_token_s": 5.0, "next_token_s": 5.0, "max_tokens": 500}
BIG = {"key_env": "PLANTED_KEY", "auto": True, "price_in": 1.0, "price_out": 10.0}


@pytest.fixture(scope="session")
def planted_once() -> Iterator[Planted]:
    with planted_server() as planted:
        yield planted


@pytest.fixture(scope="session")
def remotes(
    planted_once: Planted, embedder: GatedEmbedder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    url = planted_once.url
    settings: list[dict[str, Any]] = [
        {"name": "big", "url": f"{url}/v1", "model": "big-1", **BIG, **QUICK},
        {"name": "claude", "url": url, "api": "anthropic", "model": "c-1", "key_env": "PLANTED_KEY", **QUICK},
        {"name": "poor", "url": f"{url}/v1", "model": "p", "tokens_per_day": 300, **QUICK},
        {
            "name": "open",
            "url": f"{url}/v1",
            "model": "o",
            "collections": "all",
            "tools": ["calculator", "forget"],
            **QUICK,
        },
        {"name": "eagle", "url": f"{url}/v1", "model": "e", "sees": True, **QUICK},
        {"name": "owl", "url": url, "api": "anthropic", "model": "w", "sees": True, **QUICK},
        {"name": "hasty", "url": f"{url}/v1", "model": "h", **QUICK, "first_token_s": 0.3, "next_token_s": 0.3},
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANTED_KEY", KEY)
        with serving(PEBBLE, tmp_path_factory.mktemp("remotes"), embedder, remote=settings, ollama_api=True) as server:
            yield server


@pytest.fixture
def planted(planted_once: Planted) -> Planted:
    planted_once.does(speaks())
    return planted_once


@pytest.fixture
def http(remotes: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=remotes.url, timeout=60) as client:
        yield client


@pytest.fixture
def never_sure(remotes: Server) -> Iterator[None]:
    """The model of here is never sure enough, so `auto` asks the remote whenever it may."""
    models = remotes.app.state.ponder.models
    before = models.auto
    models.auto = ModelCascade(before.steps, Whole(), before.remote)
    yield
    models.auto = before
