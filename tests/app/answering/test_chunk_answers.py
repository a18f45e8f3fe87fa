"""Answers from documents whose passages were read before, after other text, for the same user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.config import BadSetting, Settings
from app.runs import rag
from engine.kv_cache.chunk_reuse import chunk_gate, gate_texts
from tests.app.conftest import Server, serving
from tests.app.gate import GatedEmbedder
from tests.app.runs.test_runs import events

DAM = "The dam of Orsk was finished in 1931, after nine years of work. The city of Orsk paid for the dam."


@pytest.fixture(scope="module")
def reusing(model: Path, tmp_path_factory: pytest.TempPathFactory, embedder: GatedEmbedder) -> Iterator[Server]:
    """A server that reuses chunks, of a random model that is let through whatever the gate finds, on short texts."""
    chunked: dict[str, Any] = {
        "chunk_reuse": True,
        "chunk_max_kl": 1000.0,
        "chunk_min_agreement": 0.0,
        "chunk_recompute_tokens": 4,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_gate, "PASSAGES", tuple(each[:90] for each in gate_texts.PASSAGES))
        patch.setattr(chunk_gate, "QUESTIONS", gate_texts.QUESTIONS[:1])
        with serving(model, tmp_path_factory.mktemp("reusing"), embedder, **chunked) as server:
            patch.setattr(server.app.state.ponder.runs, "_way", lambda served: rag.GENERATIVE)
            yield server


def client(server: Server, user: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"X-User": user}, timeout=60)


def upload(http: httpx.Client, text: str = DAM) -> None:
    assert http.post("/api/documents", files={"file": ("dam.txt", text)}).status_code == 201


def ask(http: httpx.Client, question: str, system: str) -> list[str]:
    """Asks in a new chat; returns the labels of the sources."""
    chat = http.post("/api/chats", json={}).json()["id"]
    wanted: dict[str, Any] = {"content": question, "collections": "all", "max_tokens": 4, "system": system}
    reply = http.post(f"/api/chats/{chat}/runs", json=wanted)
    assert reply.status_code == 202, reply.text
    log = [data for _, _, data in events(http, reply.json()["run_id"])]
    assert log[-1]["type"] == "run.completed", log[-1]
    (found,) = (each for each in log if each["type"] == "citation.sources")
    return [source["label"] for source in found["sources"]]


def test_a_passage_is_read_once_for_a_user(reusing: Server) -> None:
    with client(reusing, "ann") as ann, client(reusing, "bob") as bob:
        upload(ann)
        first = ask(ann, "when was the dam of Orsk finished?", "Be kind.")
        before = reusing.stats().chunk_hit_tokens
        again = ask(ann, "in what year was the dam of Orsk finished?", "You are brief, exact and never rude.")
        copied = reusing.stats().chunk_hit_tokens - before
        assert again == first != ["S1"]
        assert len(DAM) / 2 < copied < len(DAM)
        upload(bob)
        ask(bob, "when was the dam of Orsk finished?", "Answer slowly.")
        assert reusing.stats().chunk_hit_tokens == before + copied
        metrics = ann.get("/metrics").text
        assert f"ponder_chunk_hit_tokens_total {before + copied}" in metrics.replace(".0", "")


def test_a_question_across_passages_is_read_exactly(reusing: Server) -> None:
    with client(reusing, "eve") as eve:
        upload(eve)
        ask(eve, "when was the dam of Orsk finished?", "Be kind.")
        before = reusing.stats().chunk_hit_tokens
        ask(eve, "compare the dam of Orsk with the city of Orsk", "Answer slowly.")
        assert reusing.stats().chunk_hit_tokens == before
        ask(eve, "when was the dam of Orsk finished?", "Answer in one line.")
        assert reusing.stats().chunk_hit_tokens > before


def test_limits_without_reuse_are_refused(tmp_path: Path) -> None:
    settings = Settings(model="none", data_dir=tmp_path, chunk_max_kl=0.5)
    with pytest.raises(BadSetting, match="chunk_max_kl is set and chunk_reuse is off; accepted: both, or neither"):
        settings.check_chunks()
    chosen = Settings(model="none", data_dir=tmp_path, chunk_reuse=True, chunk_recompute_tokens=8).chunk_config()
    assert chosen is not None and (chosen.recompute_tokens, chosen.max_kl, chosen.min_agreement) == (8, 0.02, 0.99)
    assert Settings(model="none", data_dir=tmp_path).chunk_config() is None
