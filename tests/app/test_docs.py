"""docs/api.md and docs/operations.md say what is so today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from pydantic import ByteSize, TypeAdapter

from app import openai
from app.anthropic.request_models import MESSAGES_NO_EFFECT, MESSAGES_REFUSED, MessagesRequest
from app.anthropic.routes import router as anthropic_router
from app.api.documents import FIELDS
from app.api.search import SearchRequest
from app.cli.serve_command import settings_table
from app.config import Settings
from app.diffusion.routes import DiffusionRequest
from app.openai.audio import SpeechRequest
from app.openai.embeddings import EMBEDDING_NO_EFFECT, EmbeddingRequest, RerankRequest
from app.openai.request_models import ChatRequest, CompletionRequest, SamplingRequest
from app.openai.routes import TokenizeRequest
from app.request_body import CHAT_REFUSED, COMPLETION_REFUSED, NO_EFFECT
from app.server import ROUTERS

DOCS = Path(__file__).resolve().parents[2] / "docs"


def table(heading: str) -> dict[str, str]:
    """Field -> works, no effect or refused, of the section's table."""
    section = (DOCS / "api.md").read_text().split(f"\n{heading}")[1].split("\n## ")[0].split("\n**")[0]
    rows = re.findall(r"^\| (`[^|]*`) \| (works|no effect|refused) \|", section, re.MULTILINE)
    return {name: state for names, state in rows for name in re.findall(r"`(\w+)`", names)}


def test_the_shared_fields_are_listed() -> None:
    listed = table("## Sampling, stops and limits: both endpoints\n")
    assert {n for n, state in listed.items() if state == "works"} == set(SamplingRequest.model_fields)
    assert {n for n, state in listed.items() if state == "no effect"} == NO_EFFECT


@pytest.mark.parametrize(
    ("heading", "schema", "refused"),
    [("Chat completions", ChatRequest, CHAT_REFUSED), ("Completions", CompletionRequest, COMPLETION_REFUSED)],
    ids=["chat", "completions"],
)
def test_each_endpoints_own_fields_are_listed(heading: str, schema: type, refused: dict[str, object]) -> None:
    listed = table(f"## {heading}\n")
    own = set(schema.model_fields) - set(SamplingRequest.model_fields)  # type: ignore[attr-defined]  # a pydantic model
    # `best_of` is a field so that n may be its value, and refused otherwise.
    works, refusals = own - {"best_of"}, set(refused) | (own & {"best_of"})
    assert {n for n, state in listed.items() if state == "works"} == works
    assert {n for n, state in listed.items() if state == "refused"} == refusals


@pytest.mark.parametrize(
    ("heading", "fields", "no_effect"),
    [
        ("## Embeddings\n", set(EmbeddingRequest.model_fields), EMBEDDING_NO_EFFECT),
        ("## Reranking\n", set(RerankRequest.model_fields), set()),
        ("## Tokens\n", set(TokenizeRequest.model_fields), set()),
        ("## Speech\n", set(SpeechRequest.model_fields), set()),
        ("## Masked diffusion\n", set(DiffusionRequest.model_fields), set()),
        ("**Search.**", set(SearchRequest.model_fields), set()),
        ("**Upload.**", set(FIELDS), set()),
    ],
    ids=["embeddings", "rerank", "tokens", "speech", "diffusion", "search", "upload"],
)
def test_the_fields_around_documents_are_listed(heading: str, fields: set[str], no_effect: set[str]) -> None:
    listed = table(heading)
    assert {n for n, state in listed.items() if state == "works"} == fields
    assert {n for n, state in listed.items() if state == "no effect"} == no_effect


def test_the_fields_of_messages_are_listed() -> None:
    listed = table("## Messages\n")
    assert {n for n, state in listed.items() if state == "works"} == set(MessagesRequest.model_fields)
    assert {n for n, state in listed.items() if state == "no effect"} == MESSAGES_NO_EFFECT
    assert {n for n, state in listed.items() if state == "refused"} == set(MESSAGES_REFUSED)


def test_every_route_of_the_api_is_listed() -> None:
    text = (DOCS / "api.md").read_text()
    for router in (*ROUTERS, openai.router, anthropic_router):
        for route in router.routes:
            assert isinstance(route, APIRoute)
            address = re.sub(r"\{\w+(:path)?\}", "{}", route.path)
            written = re.sub(r"\{\w+\}", "{}", text)
            assert address in written, route.path


def test_the_table_of_settings_is_what_ponder_settings_prints() -> None:
    assert settings_table() in (DOCS / "operations.md").read_text()


def test_every_setting_is_listed_with_its_default() -> None:
    section = (DOCS / "operations.md").read_text().split("\n## Settings\n")[1].split("\n## ")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE))
    assert set(listed) == set(Settings.model_fields)
    for name, shown in listed.items():
        default = Settings.model_fields[name].default
        if shown.startswith("`"):
            said = shown.strip("`")
            if isinstance(default, ByteSize):
                assert TypeAdapter(ByteSize).validate_python(said) == default, name
            else:
                assert said in (str(default), str(default).lower()), name
        else:
            assert default in (None, (), {}, ""), name
