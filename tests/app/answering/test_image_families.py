"""Images over HTTP with the families that read them: in every form, cached, and refused with a reason."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import httpx
import pytest

from tests.app.conftest import serving
from tests.engine.multimodal import seeing_gemma3, seeing_gemma4, seeing_pixtral, seeing_qwen35
from tests.engine.multimodal.seeing import png

LEAD = "A long text that comes before the picture, as a document does. " * 8
FAMILIES: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "gemma3": (seeing_gemma3, {}),
    "gemma4": (seeing_gemma4, {"large": True}),
    "mistral3": (seeing_pixtral, {}),
    "qwen35": (seeing_qwen35, {}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def web(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    family, changed = FAMILIES[request.param]
    path = family.write(tmp_path_factory.mktemp("models") / request.param, family.build(**changed))
    with (
        serving(path, tmp_path_factory.mktemp("data")) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def chat(*urls: str, text: str = "What is it?", **more: Any) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": LEAD}, *images, {"type": "text", "text": text}]
    return {"model": "default", "messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}


def ask(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_a_second_question_finds_the_image_cached(web: httpx.Client) -> None:
    assert web.get("/v1/models").json()["data"][0]["sees"] is True
    url = data_url(png(61, 40, seed=1))
    plain = ask(web, chat())["usage"]["prompt_tokens"]
    first, second = ask(web, chat(url))["usage"], ask(web, chat(url, text="And how large?"))["usage"]
    assert first["prompt_tokens"] - plain >= 16
    assert second["prompt_tokens_details"]["cached_tokens"] >= 0.9 * len(LEAD)
    other = ask(web, chat(data_url(png(61, 40, seed=2))))["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] <= len(LEAD) + 64


def test_both_forms_of_openai_give_the_image_to_the_model(web: httpx.Client) -> None:
    url = data_url(png(33, 60, seed=3))
    said = ask(web, chat(url, temperature=0))
    items = [
        {"type": "input_text", "text": LEAD},
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": "What is it?"},
    ]
    body = {"model": "default", "max_output_tokens": 4, "temperature": 0, "input": [{"role": "user", "content": items}]}
    reply = web.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["output"][-1]["content"][0]["text"] == said["choices"][0]["message"]["content"]
    assert reply.json()["usage"]["input_tokens"] == said["usage"]["prompt_tokens"]


def test_more_images_than_the_context_holds_are_refused(web: httpx.Client) -> None:
    urls = [data_url(png(64, 40, seed)) for seed in range(4)]
    reply = web.post("/v1/chat/completions", json=chat(*urls, text="y" * 470))
    assert reply.status_code == 400, reply.text
    assert "of 4 images" in reply.text and "maximum context length is 1024" in reply.text


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("video_url", {"url": "data:video/mp4;base64,AAAA"}),
        ("input_audio", {"data": "AAAA", "format": "wav"}),
    ],
)
def test_videos_and_sounds_are_refused_by_name(web: httpx.Client, kind: str, given: dict[str, str]) -> None:
    body = chat()
    body["messages"][0]["content"].append({"type": kind, kind: given})
    reply = web.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and kind in reply.text, reply.text


def test_broken_images_are_refused_with_a_reason(web: httpx.Client) -> None:
    reply = web.post("/v1/chat/completions", json=chat(data_url(png(64, 64)[:100])))
    assert reply.status_code == 400 and "image cannot be read" in reply.text, reply.text


def test_a_sequence_is_cut_behind_an_image(web: httpx.Client) -> None:
    messages = chat(data_url(png(72, 30, seed=5)))["messages"]
    opened = web.post("/api/sequences", json={"messages": messages})
    assert opened.status_code == 201, opened.text
    place = f"/api/sequences/{opened.json()['id']}"
    tokens = web.get(place).json()["tokens"]
    shown = max(set(tokens[len(LEAD) :]), key=tokens[len(LEAD) :].count)
    first = next(at for at, token in enumerate(tokens) if token == shown and tokens[at : at + 9] == [shown] * 9)
    inside = web.post(f"{place}/truncate", json={"length": first + 5})
    if web.get("/v1/models").json()["data"][0]["id"] in ("gemma3", "gemma4"):  # whose tokens attend to each other
        assert inside.status_code == 400 and "part of an image" in inside.text, inside.text
    else:
        assert inside.status_code == 200, inside.text
    assert web.post(f"{place}/truncate", json={"length": first}).status_code == 200
