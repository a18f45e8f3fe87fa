"""Several models in one server: each answers to its own name, they share the memory, and one that fails ends all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.answering.model_registry import ModelRegistry
from app.config import BadSetting, Settings, load_settings
from app.errors import ApiError
from app.server import create_app
from engine import Engine, EngineConfig
from engine.config import Fallback
from reasoning.route import Confident, Decided, Whole
from tests.app.cli.test_cli import ponder, serving
from tests.app.conftest import PEBBLE, Server
from tests.app.observability.test_operations import metrics
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.slow

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tiny model, which says other things."""
    return write_checkpoint(tmp_path_factory.mktemp("second") / "tiny2", seed=1)


@pytest.fixture
def both_http(both: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=both.url, timeout=60) as client:
        yield client


def settings(model: Path, data: Path, **others: Any) -> Settings:
    return Settings(model=str(model), data_dir=data, device="cpu", kv_blocks=600, threads=1, **others)


@pytest.mark.parametrize(
    ("asked", "name"),
    [("pebble", "pebble"), ("default", "pebble"), ("small", "small"), (str(PEBBLE), "pebble"),
     (str(PEBBLE.parent / "pebble-draft"), "small")],
    ids=["first", "default", "second", "path of the first", "path of the second"],
)  # fmt: skip
def test_each_model_answers_to_its_own_names(both_http: httpx.Client, asked: str, name: str) -> None:
    generated = "ponder_generation_tokens_total"
    before = metrics(both_http)
    reply = both_http.post("/v1/chat/completions", json={"model": asked, **ASK})
    assert reply.status_code == 200 and reply.json()["model"] == name
    after = metrics(both_http)
    grown = {model: after[generated, f"model={model}"] - before[generated, f"model={model}"] for model in MODELS}
    assert grown == {model: 5 if model == name else 0 for model in MODELS}


MODELS = ("pebble", "small")


def test_a_name_that_is_not_served_is_told_all_that_are(both: Server, both_http: httpx.Client) -> None:
    reply = both_http.post("/v1/chat/completions", json={"model": "gpt-4", **ASK})
    error = reply.json()["error"]
    assert reply.status_code == 404 and (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-4'" in error["message"] and "'pebble', 'small', 'default' or 'auto'" in error["message"]
    models: ModelRegistry = both.app.state.ponder.models
    with pytest.raises(
        ApiError, match=r"one must be named here; accepted: 'pebble', 'small' or 'default'\."
    ) as refused:
        models.get("auto")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_all_are_listed(both: Server) -> None:
    with openai.OpenAI(base_url=f"{both.url}/v1", api_key="none") as client:
        listed = [each.id for each in client.models.list()]
        assert listed == ["pebble", "small", "default", "auto", "all-MiniLM-L6-v2"]
        assert all(client.models.retrieve(name).id == name for name in ("pebble", "small", "default", "auto"))
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-4")


def test_health_and_metrics_tell_of_all(both_http: httpx.Client) -> None:
    assert both_http.get("/health").json() == {"status": "ok", "models": {"pebble": "ok", "small": "ok"}}
    told = metrics(both_http)
    for model in MODELS:
        states = [told["ponder_kv_blocks", f"model={model},state={state}"] for state in ("used", "cached", "free")]
        assert sum(states) == 600  # of 1200 for both
        assert ("ponder_requests_running", f"model={model}") in told
        assert ("ponder_auto_answers_total", f"model={model},outcome=escalated") in told


async def test_one_that_has_stopped_is_told_by_name(model: Path, second: Path, tmp_path: Path) -> None:
    wanted = settings(model, tmp_path, models={"second": str(second)})
    async with await ModelRegistry.start(wanted) as models:
        transport = httpx.ASGITransport(create_app(models, wanted))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            await models.get("second").engine.stop()
            reply = await http.get("/health")
            assert reply.status_code == 503 and reply.json()["status"] == "stopped"
            assert reply.json()["models"] == {"tiny": "ok", "second": "stopped"}
            assert (await http.get("/metrics")).status_code == 503
            assert (await http.post("/v1/chat/completions", json={"model": "second", **ASK})).status_code == 503
            assert (await http.post("/v1/chat/completions", json={"model": "tiny", **ASK})).status_code == 200


async def test_memory_is_divided_and_leaving_stops_all(model: Path, second: Path, tmp_path: Path) -> None:
    begun: list[str] = []
    wanted = settings(model, tmp_path, models={"second": str(second), "third": str(model)})
    async with await ModelRegistry.start(wanted, begun.append) as models:
        assert begun == [str(model), str(second), str(model)]
        assert [(await each.engine.stats()).blocks_total for each in models] == [200, 200, 200]
        assert models.default.name == "tiny" and len(models) == 3
    assert not any(each.engine.healthy for each in models)


async def test_one_that_cannot_be_loaded_leaves_none_running(
    model: Path, second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Engine] = []
    start = Engine.start

    async def noted(config: EngineConfig, fallback: Fallback | None = None) -> Engine:
        started.append(await start(config, fallback=fallback))
        return started[-1]

    monkeypatch.setattr(Engine, "start", noted)
    broken = write_checkpoint(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadSetting, match="The model 'third' cannot be loaded: .*model.safetensors"):
        await ModelRegistry.start(settings(model, tmp_path, models={"second": str(second), "third": str(broken)}))
    assert len(started) == 2 and not any(engine.healthy for engine in started)


async def test_two_of_one_name_are_refused(model: Path, second: Path, tmp_path: Path) -> None:
    async with await ModelRegistry.start(settings(model, tmp_path, models={"second": str(second)})) as models:
        with pytest.raises(BadSetting, match="Two models are called 'second'"):
            ModelRegistry([*models, models.get("second")])


def test_the_list_says_who_thinks_and_takes_tools(both_http: httpx.Client) -> None:
    models = both_http.get("/v1/models").json()["data"]
    listed = {each["id"]: (each["thinks"], each["tools"]) for each in models if not each["embeds"]}
    assert listed == {"pebble": (True, True), "small": (True, True), "default": (True, True), "auto": (True, False)}


@pytest.mark.parametrize(
    ("router", "gate", "order", "chosen"),
    [
        ((), {}, ["small", "pebble"], Confident),
        (("pebble", "small"), {"router_gate": "entropy", "router_bar": 0.5}, ["pebble", "small"], Decided),
        ((), {"router_gate": "whole"}, ["small", "pebble"], Whole),
    ],
    ids=["by size", "as told", "whole"],
)
def test_the_router_asks_the_smallest_first_or_as_it_is_told(
    both: Server, tmp_path: Path, router: tuple[str, ...], gate: dict[str, Any], order: list[str], chosen: type
) -> None:
    models: ModelRegistry = both.app.state.ponder.models
    wanted = settings(PEBBLE, tmp_path, models={"small": "x"}, **gate, **({"router": router} if router else {}))
    auto = ModelRegistry.of({each.name: each.engine for each in models}, wanted).auto
    assert auto is not None and [each.name for each in auto.steps] == order and isinstance(auto.gate, chosen)


async def test_one_model_alone_has_no_auto(model: Path, tmp_path: Path) -> None:
    async with await ModelRegistry.start(settings(model, tmp_path)) as models:
        assert models.auto is None and models.names == ("tiny", "default")
        with pytest.raises(ApiError, match=r"'auto' is not served here; accepted: 'tiny' or 'default'\."):
            models.get("auto")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"models": ["small"]}, ["--also", "small", "NAME=DIR"]),
        ({"models": ["small="]}, ["--also", "NAME=DIR"]),
        ({"models": ["a=x", "a=y"]}, ["--also", "a=y", "NAME=DIR"]),
        ({"models": ["auto=x"]}, ["models", "'auto'", "another name"]),
        ({"models": ["default=x"]}, ["models", "'default'", "another name"]),
        ({"models": ["main=x"], "served_model_name": "main"}, ["'main'", "another name"]),
        ({"models": ["pebble=x"], "model": str(PEBBLE)}, ["'pebble'", "another name"]),
        ({"models": ["a=x"], "served_model_name": "auto"}, ["served_model_name", "auto"]),
        ({"router": "a,b"}, ["router", "one model alone", "--also"]),
        ({"router_gate": "whole"}, ["router_gate", "one model alone"]),
        ({"models": ["a=x"], "router": "a,b", "served_model_name": "m"}, ["'b'", "accepted: m, a"]),
        ({"models": ["a=x"], "router": "a"}, ["router", "two or more"]),
        ({"models": ["a=x"], "router": "a,a"}, ["router", "two or more"]),
        ({"models": ["a=x"], "router_gate": "luck"}, ["--router-gate", "luck", "entropy"]),
        ({"models": ["a=x"], "router_bar": "1.5"}, ["router_bar", "1.5", "0 to 1"]),
        ({"models": ["a=x"], "router_bar": "-1"}, ["--router-bar", "-1", "0 to 1"]),
        ({"models": ["a=x"], "router_bar": "nan"}, ["--router-bar", "0 to 1"]),
        ({"models": ["a=x"], "router_bar": "0.5", "router_gate": "whole"}, ["router_bar", "whole"]),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(
    given: dict[str, Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadSetting) as refused:
        load_settings(**given).check_models()
    assert all(word in str(refused.value) for word in [*words, "accepted"]), refused.value


def test_a_command_that_asks_one_model_does_not_mind_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ponder.toml").write_text('router = ["m", "tiny"]\nserved-model-name = "m"\n[models]\ntiny = "x/tiny"\n')
    assert load_settings(model="x/tiny", served_model_name="tiny").model_name == "tiny"


def test_models_come_from_flags_from_variables_and_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ponder.toml").write_text('router = "a, m"\nserved-model-name = "m"\n[models]\na = "x/y"\n')
    assert load_settings().models == {"a": "x/y"} and load_settings().router == ("a", "m")
    Path("ponder.toml").write_text('router = ["m", "a"]\nserved-model-name = "m"\n[models]\na = "x/y"\n')
    assert load_settings().router == ("m", "a")
    monkeypatch.setenv("PONDER_MODELS", json.dumps({"a": "z", "b": "x=y"}))
    assert load_settings().models == {"a": "z", "b": "x=y"}
    assert load_settings(models=["a=p=q"]).models == {"a": "p=q"}
    Path("ponder.toml").write_text("[models]\na = 5\n")
    monkeypatch.setenv("PONDER_MODELS", "a=x")
    with pytest.raises(BadSetting, match="PONDER_MODELS is not JSON; accepted: a JSON object"):
        load_settings()
    monkeypatch.delenv("PONDER_MODELS")
    with pytest.raises(BadSetting, match=r"models\.a: .*; accepted: NAME=DIR"):
        load_settings()


def test_the_command_serves_several_and_stops_cleanly(model: Path, second: Path, tmp_path: Path) -> None:
    several = ("--also", f"second={second}", "--router", "tiny,second", "--router-gate", "whole")
    with serving("--model", str(model), "--data-dir", "data", *several, cwd=tmp_path) as (process, url):
        listed = httpx.get(f"{url}/v1/models").json()["data"]
        assert [each["id"] for each in listed] == ["tiny", "second", "default", "auto", "all-MiniLM-L6-v2"]
        process.terminate()
        assert process.wait(15) == 0
        assert process.stderr is not None and process.stderr.read() == ""


def test_the_command_says_which_of_several_cannot_be_loaded(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    several = ("--model", str(model), "--also", "second=./empty", "--data-dir", "d", "--device", "cpu")
    shown = ponder("serve", "--port", "0", *several, cwd=tmp_path)
    assert shown.returncode == 1 and "'second'" in shown.stderr and "config.json" in shown.stderr, shown.stderr
    assert "Traceback" not in shown.stderr


def test_completions_and_sequences_are_had_of_either_model(both_http: httpx.Client) -> None:
    for name in MODELS:
        reply = both_http.post(
            "/v1/completions", json={"model": name, "prompt": "Hi", "max_tokens": 3, "temperature": 0}
        )
        assert reply.json()["model"] == name
        made = both_http.post("/api/sequences", json={"model": name, "prompt": "Hi"}).json()
        assert made["model"] == name
        at = f"/api/sequences/{made['id']}"
        (fork,) = both_http.post(f"{at}/fork", json={"n": 1}).json()["sequences"]
        assert fork["model"] == name
        written = both_http.post(f"/api/sequences/{fork['id']}/generate", json={"max_tokens": 3, "temperature": 0}).text
        pieces = [json.loads(line[6:]) for line in written.splitlines() if line.startswith('data: {"type":"piece"')]
        assert "".join(piece["text"] for piece in pieces) == reply.json()["choices"][0]["text"]
        assert both_http.delete(at).status_code == 204
    assert both_http.post("/api/sequences", json={"model": "auto", "prompt": "Hi"}).status_code == 404
