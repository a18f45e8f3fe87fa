"""Adapters by the names that requests ask for: in every API, listed, loaded and unloaded while others run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from app.config import BadSetting, Settings
from tests.app.chatting import ask, new_chat
from tests.app.conftest import Server, serving
from tests.app.gate import GatedEmbedder
from tests.app.keyed import asking_for_keys, beside, client_of, key_of
from tests.lora import ALL, write_adapter

pytestmark = pytest.mark.slow

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("adapters")
    return {
        name: str(write_adapter(path / name, model, seed=seed, targets=ALL, spread=0.9))
        for seed, name in enumerate(("sql", "poem", "late"))
    }


@pytest.fixture(scope="module")
def server(
    model: Path, tmp_path_factory: pytest.TempPathFactory, adapters: dict[str, str], embedder: GatedEmbedder
) -> Iterator[Server]:
    lora = {name: adapters[name] for name in ("sql", "poem")}
    data = tmp_path_factory.mktemp("lora")
    settings: dict[str, Any] = {"lora": lora, "allow_runtime_lora": True, "ollama_api": True, "deterministic": True}
    with serving(model, data, embedder, **settings) as server:  # words are compared: of a random model every bit counts
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def said(client: openai.OpenAI, model: str, **options: Any) -> str:
    """Any: further parameters of the chat."""
    answer = client.chat.completions.create(model=model, messages=HELLO, **GREEDY, **options)
    assert answer.model == model or model == "default"
    return str(answer.choices[0].message.content)


def _message(client: anthropic.Anthropic, model: str) -> str:
    made = client.messages.create(model=model, messages=HELLO, max_tokens=12, extra_body={"temperature": 0})
    return "".join(each.text for each in made.content if each.type == "text")


def load(client: openai.OpenAI, name: str, path: str) -> httpx.Response:
    return httpx.post(f"{client.base_url}load_lora_adapter", json={"lora_name": name, "lora_path": path}, timeout=30)


def unload(client: openai.OpenAI, name: str) -> httpx.Response:
    return httpx.post(f"{client.base_url}unload_lora_adapter", json={"lora_name": name}, timeout=30)


def test_each_api_answers_with_the_adapter_that_it_names(server: Server, client: openai.OpenAI) -> None:
    names = ("default", "sql", "poem")
    chats = [said(client, name) for name in names]
    assert len(set(chats)) == 3
    completions = [client.completions.create(model=name, prompt="Hello", **GREEDY).choices[0].text for name in names]
    assert len(set(completions)) == 3
    responses = [
        client.responses.create(model=name, input="Hello", temperature=0, max_output_tokens=12).output_text
        for name in names
    ]
    assert responses == chats
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30) as theirs:
        messages = [_message(theirs, name) for name in names]
    assert messages == [said(client, name, reasoning_effort="none") for name in names]  # the same prompt
    other = ollama.Client(host=server.url, timeout=30)
    options = {"temperature": 0, "num_predict": 12}
    assert len({other.chat(name, HELLO, options=options).message.content for name in names}) == 3
    assert {"sql:latest", "poem:latest"} <= {each.model for each in other.list().models}


def test_a_chat_of_the_page_has_its_runs_made_with_one(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        answers = [
            ask(http, new_chat(http), "Hello", max_tokens=12, temperature=0, model=name)["content"]
            for name in ("default", "sql")
        ]
    assert answers[0] != answers[1]


def test_leased_sequences_have_it(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        texts = []
        for name in ("default", "sql"):
            opened = http.post("/api/sequences", json={"model": name, "prompt": "Hello"}).json()
            asked = {"max_tokens": 12, "temperature": 0}
            texts.append(http.post(f"/api/sequences/{opened['id']}/generate", json=asked).text)
            assert opened["model"] == name or name == "default"
    assert texts[0] != texts[1]


def test_they_are_listed_with_their_parent_and_root(client: openai.OpenAI, adapters: dict[str, str]) -> None:
    listed = {each.id: each.model_dump() for each in client.models.list()}
    base = next(name for name in listed if name not in ("default", "sql", "poem"))
    assert (listed["sql"]["parent"], listed["sql"]["root"]) == (base, adapters["sql"])
    assert listed["sql"]["max_model_len"] == listed[base]["max_model_len"]
    assert "parent" not in listed[base]
    assert client.models.retrieve("poem").model_dump()["root"] == adapters["poem"]


def test_their_sequences_are_measured(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        opened = http.post("/api/sequences", json={"model": "poem", "prompt": "Hello"}).json()
        shown = http.get("/metrics").text
        assert 'ponder_adapter_sequences{adapter="poem"} 1.0' in shown
        assert 'ponder_adapter_sequences{adapter="sql"} ' in shown
        http.delete(f"/api/sequences/{opened['id']}")


def test_one_is_loaded_and_unloaded_while_answers_stream(client: openai.OpenAI, adapters: dict[str, str]) -> None:
    with pytest.raises(openai.NotFoundError, match="'late' is not served here"):
        said(client, "late")
    running: list[Any] = [{"role": "user", "content": "Hello"}]
    loaded = load(client, "late", adapters["late"])
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'late' added successfully.")
    answer = said(client, "late")
    stream = client.chat.completions.create(
        model="late", messages=running, stream=True, temperature=0, max_tokens=40, extra_body={"ignore_eos": True}
    )
    first = next(stream)
    gone = unload(client, "late")
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'late' removed successfully.")
    with pytest.raises(openai.NotFoundError, match="'late' is not served here"):
        said(client, "late")
    chunks = [first, *stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices).startswith(answer)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert unload(client, "late").status_code == 404
    assert load(client, "late", adapters["sql"]).status_code == 200  # other files under the same name
    assert said(client, "late") == said(client, "sql")
    unload(client, "late")


def test_what_cannot_be_loaded_is_told(client: openai.OpenAI, adapters: dict[str, str], tmp_path: Path) -> None:
    for name, path, field, why in (
        ("sql", adapters["sql"], "lora_name", "another model's name"),
        ("default", adapters["sql"], "lora_name", "another model's name"),
        ("new", str(tmp_path / "no"), "lora_path", "there is no directory"),
        ("new", str(tmp_path), "lora_path", "has no adapter_config.json"),
    ):
        refused = load(client, name, path)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field
        assert why in refused.json()["error"]["message"]
    assert httpx.post(f"{client.base_url}load_lora_adapter", json={"lora_name": "x"}).status_code == 400
    assert "new" not in {each.id for each in client.models.list()}


def test_nobody_loads_where_that_is_off_and_operators_alone_where_it_is_on(
    model: Path, tmp_path: Path, adapters: dict[str, str]
) -> None:
    body = {"lora_name": "late", "lora_path": adapters["late"]}
    with serving(model, tmp_path / "off") as off:
        refused = httpx.post(f"{off.url}/v1/load_lora_adapter", json=body, timeout=30)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "runtime_lora_off")
    with asking_for_keys(model, tmp_path / "keys", allow_runtime_lora=True) as keyed:
        with client_of(keyed, key_of(keyed, "ana")) as ana:
            assert ana.post("/v1/load_lora_adapter", json=body).status_code == 403
        with client_of(keyed, key_of(keyed, "root", "operator")) as root:
            assert root.post("/v1/load_lora_adapter", json=body).status_code == 200
            assert root.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 200


def test_a_key_asks_for_its_own_models_alone(model: Path, tmp_path: Path, adapters: dict[str, str]) -> None:
    """Others are as those that are not there, in every API."""
    lora = {name: adapters[name] for name in ("sql", "poem")}
    hello = [{"role": "user", "content": "Hello"}]
    with asking_for_keys(model, tmp_path, lora=lora, ollama_api=True) as keyed:
        key = key_of(keyed, "ana")
        beside(keyed, lambda accounts: accounts.limit_key(accounts.keys_of("ana")[0].id, ["sql"]).id)
        with client_of(keyed, key) as ana:
            assert [each["id"] for each in ana.get("/v1/models").json()["data"]] == ["sql"]
            assert [each["name"] for each in ana.get("/api/tags").json()["models"]] == ["sql:latest"]
            chat = ana.post("/api/chats", json={}).json()["id"]
            asks: dict[str, dict[str, Any]] = {  # Any: JSON
                "/v1/chat/completions": {"messages": hello, "max_tokens": 2},
                "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
                "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
                "/v1/messages": {"messages": hello, "max_tokens": 2},
                "/api/chat": {"messages": hello, "stream": False, "options": {"num_predict": 2}},
                "/api/sequences": {"prompt": "Hello"},
                f"/api/chats/{chat}/runs": {"content": "Hello", "max_tokens": 2},
                "/v1/tokenize": {"prompt": "Hello"},
            }
            for path, body in asks.items():
                for name in ("poem", "default", "nothing", keyed.app.state.ponder.settings.embedder):
                    refused = ana.post(path, json={**body, "model": name})
                    assert refused.status_code == 404, (path, name, refused.text)
                    assert "poem" not in refused.text.replace("'poem'", "", 1), "a name leaks"
                assert ana.post(path, json={**body, "model": "sql"}).status_code < 300, path
            assert ana.post("/v1/embeddings", json={"model": "default", "input": "a"}).status_code == 404
            assert ana.get("/v1/models/poem").status_code == ana.get("/v1/models/default").status_code == 404
            beside(keyed, lambda accounts: accounts.limit_key(accounts.keys_of("ana")[0].id, None).id)
            assert ana.post("/v1/completions", json={**asks["/v1/completions"], "model": "poem"}).status_code == 200


def test_a_user_asks_for_models_that_both_the_user_and_the_key_are_for(
    model: Path, tmp_path: Path, adapters: dict[str, str]
) -> None:
    lora = {name: adapters[name] for name in ("sql", "poem")}
    with asking_for_keys(model, tmp_path, lora=lora) as keyed:
        key = key_of(keyed, "ana")
        with client_of(keyed, key_of(keyed, "root", "operator")) as root, client_of(keyed, key) as ana:

            def listed() -> set[str]:
                return {each["id"] for each in ana.get("/v1/models").json()["data"]}

            def limit(models: object) -> httpx.Response:
                return root.patch("/api/operator/users/ana", json={"models": models})

            everything = listed()
            of_key = [*everything - {"poem"}]
            assert limit(["sql", "poem"]).json()["models"] == ["sql", "poem"]
            assert listed() == {"sql", "poem"} < everything
            path = f"/api/operator/keys/{beside(keyed, lambda accounts: accounts.keys_of('ana')[0].id)}"
            assert root.patch(path, json={"models": of_key}).json()["models"] == of_key
            assert listed() == {"sql"}
            asked = {"model": "poem", "prompt": "Hello", "max_tokens": 2}
            assert ana.post("/v1/completions", json=asked).status_code == 404
            assert ana.post("/v1/completions", json={**asked, "model": "sql"}).status_code == 200
            renamed = root.patch("/api/operator/users/ana", json={"name": "Ana"})
            assert renamed.json()["models"] == ["sql", "poem"], renamed.text
            refused = limit([])
            assert refused.status_code == 400 and "names of models" in refused.json()["error"]["message"]
            freed = limit(None)
            assert freed.status_code == 200, freed.text
            assert freed.json()["models"] is None and listed() == set(of_key)
            freed = root.patch(path, json={"models": None, "scopes": None})
            assert freed.json()["models"] is None and freed.json()["scopes"] is None and listed() == everything


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"lora": {"default": "x"}}, "the first model"),
        ({"lora": {"auto": "x"}}, "the router"),
        ({"lora": {"a": ""}}, "accepted: a name and a directory"),
        ({"lora": {"a": "x", "b": "y"}, "max_loras": 1, "pinned_loras": ("a",)}, "max_loras is 1"),
        ({"lora": {"a": "x"}, "pinned_loras": ("b",)}, "pinned_loras is b"),
        ({"allow_runtime_lora": True, "api_workers": 2, "engine": "process"}, "one process's"),
    ],
)
def test_settings_that_do_not_go_together_are_told(changed: dict[str, Any], why: str) -> None:
    settings = Settings(**changed)
    with pytest.raises(BadSetting, match=why):
        settings.check_models()
        settings.check_remotes()
