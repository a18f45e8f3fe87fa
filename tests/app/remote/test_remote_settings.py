"""`[[remote]]` in ponder.toml: what is accepted, and that no message shows a key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.answering.remote_model import RemoteModel
from app.config import BadSetting, Settings, load_settings
from app.config.remote_settings import RemoteSettings

GOOD = {"name": "big", "url": "https://api.example.com/v1", "model": "big-1"}
SECRET = "sk-0123456789abcdef"


def loaded(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "ponder.toml"
    path.write_text(text)
    return load_settings(path)


def table(**fields: Any) -> str:
    lines = [
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for name, value in fields.items()
    ]
    return "\n".join(["[[remote]]", *lines, ""])


def test_tables_of_the_file_are_remotes(tmp_path: Path) -> None:
    other = {"name": "c", "url": "https://api.example.org/", "api": "anthropic", "model": "m", "collections": [3]}
    settings = loaded(tmp_path, table(**GOOD) + table(**other))
    big, claude = settings.remote
    assert (big.name, big.api, big.auto, big.collections, big.tools) == ("big", "openai", False, (), ())
    assert claude.url == "https://api.example.org" and claude.collections == (3,)


REFUSED = {
    "a key": ({"api_key": SECRET}, "a key in this file would be in its copies"),
    "a header": ({"headers": {"Authorization": SECRET}}, "a key in this file"),
    "an unknown field": ({"modle": "x"}, "accepted: a list of tables, each of name, url, api"),
    "another scheme": ({"url": "file:///etc/passwd"}, "no address"),
    "a bad port": ({"url": "http://host:99999/v1"}, "no address"),
    "a password": ({"url": f"https://me:{SECRET}@host/v1"}, "password in it"),
    "a query": ({"url": f"https://host/v1?key={SECRET}"}, "query"),
    "a key in the clear": ({"url": "http://host/v1", "key_env": "KEY"}, "in the clear"),
    "a budget of money without prices": ({"cost_per_day": 3}, "price_in and price_out"),
    "another api": ({"api": "ollama"}, "openai"),
    "a name with a blank": ({"name": "my model"}, "name"),
    "a field of OpenAI's": ({"api": "anthropic", "max_tokens_field": "max_completion_tokens"}, "Anthropic"),
}


@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_is_refused_without_showing_it(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    if "headers" in fields:
        text = table(**GOOD) + f'headers = {{ Authorization = "{SECRET}" }}\n'
    else:
        text = table(**{**GOOD, **fields})
    with pytest.raises(BadSetting, match=words) as refusal:
        loaded(tmp_path, text)
    assert SECRET not in str(refusal.value)


def test_one_table_that_is_no_list_shows_no_key(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="accepted: a list of tables") as refusal:
        loaded(tmp_path, table(**GOOD, api_key=SECRET).replace("[[remote]]", "[remote]"))
    assert SECRET not in str(refusal.value)


@pytest.mark.parametrize("key", [None, "", "short", "with a blank in it", "two\nlines12"])
def test_a_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, key: str | None) -> None:
    settings = RemoteSettings(**GOOD, key_env="A_KEY")
    monkeypatch.delenv("A_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("A_KEY", key)
    with pytest.raises(BadSetting, match="takes its key from A_KEY") as refusal:
        RemoteModel(settings)
    assert not key or key not in str(refusal.value)
    monkeypatch.setenv("A_KEY", f" {SECRET}\n")
    assert settings.key() == SECRET and SECRET not in repr(settings)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"remote": [GOOD, GOOD]}, "'big', which is another remote"),
        ({"remote": [{**GOOD, "name": "default"}]}, "the first model"),
        ({"remote": [{**GOOD, "name": "auto"}]}, "the router"),
        ({"remote": [{**GOOD, "name": "small"}], "models": {"small": "models/pebble-draft"}}, "one of models"),
        ({"remote": [{**GOOD, "auto": True}, {**GOOD, "name": "b", "auto": True}]}, "true of one at most"),
        ({"remote": [GOOD], "router_bar": 0.5}, "one model alone is served"),
    ],
)  # fmt: skip
def test_names_and_the_router_go_together(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSetting, match=words):
        Settings(served_model_name="pebble", **changed).check_models()


def test_remotes_need_one_process() -> None:
    settings = Settings(served_model_name="pebble", remote=[GOOD], api_workers=2)
    with pytest.raises(BadSetting, match="accepted: 1 with remote models"):
        settings.check_remotes()


def test_a_server_without_remotes_imports_no_client() -> None:
    code = "import app.server, sys; assert 'app.remote.http_client' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
