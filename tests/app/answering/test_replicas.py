"""Replicas of a model behind the APIs: answers as one engine writes them, of requests that are shared out."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.config import BadSetting, Settings
from engine.ipc.data_parallel_link import DataParallelLink
from engine.ipc.thread_link import ThreadLink
from tests.app.conftest import PEBBLE, Server, all_is_back, serving

PUZZLE = [{"role": "user", "content": "Use 4, 6, 9 and 1 to make 24."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
REQUESTS: dict[str, dict[str, Any]] = {
    "sampled": {"messages": PUZZLE, "temperature": 1, "seed": 3, "n": 2, "max_tokens": 40},
    "schema": {
        "messages": PUZZLE, "temperature": 1, "seed": 5, "reasoning_effort": "none",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "strategy": {
        "messages": PUZZLE, "strategy": "best_of_n", "strategy_options": {"n": 2}, "seed": 1, "max_tokens": 40,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(PEBBLE, tmp_path_factory.mktemp("replicas"), data_parallel_size=2) as server:
        yield server
        all_is_back(server)


def answer(server: Server, body: dict[str, Any]) -> Any:  # Any: JSON
    reply = httpx.post(f"{server.url}/v1/chat/completions", json={"model": "default", **body}, timeout=120)
    assert reply.status_code == 200, reply.text
    return [(each["message"], each["finish_reason"]) for each in reply.json()["choices"]]


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_what_one_engine_writes(pebble: Server, replicas: Server, name: str) -> None:
    assert answer(replicas, REQUESTS[name]) == answer(pebble, REQUESTS[name])


def test_requests_are_shared_out(replicas: Server) -> None:
    link = replicas.engine._link
    assert isinstance(link, DataParallelLink)
    cores = [each.link.core for each in link._replicas if isinstance(each.link, ThreadLink)]
    before = [core.stats().generated_tokens for core in cores]
    texts = [f"Use {at}, 6, 9 and 1 to make 24." for at in range(2, 8)]
    bodies = [{"messages": [{"role": "user", "content": text}], "max_tokens": 40, "seed": 1} for text in texts]
    with ThreadPoolExecutor(len(bodies)) as pool:
        list(pool.map(lambda body: answer(replicas, body), bodies))
    made = [core.stats().generated_tokens - was for core, was in zip(cores, before, strict=True)]
    assert len(made) == 2 and all(made)
    assert httpx.get(f"{replicas.url}/health").status_code == 200
    assert replicas.stats().generated_tokens == sum(core.stats().generated_tokens for core in cores)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"api_workers": 2, "engine": "process"}, "api_workers is 2, and the 2 replicas .* accepted: 1 of either"),
        ({"fallback_model": str(PEBBLE.parent / "pebble-draft")}, "data_parallel_size is 2, .* accepted: 1 with"),
    ],
)
def test_what_does_not_go_together_is_refused_before_loading(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = Settings(model=str(PEBBLE), data_dir=tmp_path, data_parallel_size=2, **changed)
    with pytest.raises(BadSetting, match=message):
        settings.check_processes()
        settings.engine_fallback()
