"""The command line, as an operator's shell sees it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from app.cli.main import cli
from app.config import BadSetting, Settings, load_settings, unknown_variables
from retrieval import Library
from tests.retrieval.words import WordEmbedder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
FOREVER = {
    "model": "default", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 2000,
    "chat_template_kwargs": {"forever": True},
}  # fmt: skip


def clean_environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PONDER_")}
    return {**kept, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "200", **extra}


def ponder(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=clean_environment(**env), capture_output=True, text=True, timeout=60)


@contextmanager
def serving(*arguments: str, cwd: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `ponder serve` that said it is ready, and its address."""
    slow = ("--device", "cpu", "--speculation", "off")  # drafts would end soon what is to last a test
    command = [sys.executable, "-m", "app.cli", "serve", "--port", "0", *slow, *arguments]
    process = subprocess.Popen(
        command, cwd=cwd, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = re.fullmatch(r"Ponder is ready at (http://127\.0\.0\.1:\d+)\n", line)
        assert ready, (line, process.stderr.read() if process.stderr else "")
        yield process, ready.group(1)
    finally:
        process.kill()
        process.communicate()


def test_help_names_every_command_and_setting(tmp_path: Path) -> None:
    shown = ponder("--help", cwd=tmp_path)
    assert shown.returncode == 0
    assert all(word in shown.stdout for word in ("serve", "chat", "index", "search", "eval", "bench", "--version"))
    options = ponder("serve", "--help", cwd=tmp_path).stdout
    flags = {"cors_origins": "--cors-origin", "allowed_hosts": "--allowed-host", "models": "--also"}
    for name in Settings.model_fields.keys() - {
        "databases",
        "mcp",
        "efforts",
        "remote",
    }:  # tables, for the configuration file
        assert flags.get(name, f"--{name.replace('_', '-')}") in options
    shown_defaults = (
        "host",
        "port",
        "model",
        "embedder",
        "device",
        "dtype",
        "block_size",
        "max_running",
        "max_waiting",
    )
    for name in (*shown_defaults, "log_level"):
        assert f"[{Settings.model_fields[name].default}]" in options, name


@pytest.mark.parametrize(("typed", "completed"), [("ponder sea", "search"), ("ponder serve --ollama", "--ollama-api")])
def test_the_shell_completes_commands_and_options(typed: str, completed: str) -> None:
    words = {"_PONDER_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    shown = CliRunner().invoke(cli, [], prog_name="ponder", env=words)
    assert shown.stdout.split() == [completed], shown.output


def test_help_loads_neither_torch_nor_a_web_framework(tmp_path: Path) -> None:
    heavy = ("torch", "fastapi", "pydantic", "engine", "retrieval")
    code = f"import sys, app.cli; print([m for m in {heavy} if m in sys.modules])"
    env = clean_environment()
    shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert shown.stdout == "[]\n", shown.stderr


def test_version_says_one_line(tmp_path: Path) -> None:
    shown = ponder("--version", cwd=tmp_path)
    assert shown.returncode == 0 and re.match(r"ponder \S+", shown.stdout)


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (["--port", "70000"], {}, ["--port", "70000", "65535"]),
        (["--dtype", "int3"], {}, ["--dtype", "int3", "bfloat16"]),
        (["--kv-bytes", "lots"], {}, ["--kv-bytes", "lots", "2GiB"]),
        (["--max-upload", "much"], {}, ["--max-upload", "much", "200MiB"]),
        (["--cors-origin", "example.org"], {}, ["--cors-origin", "example.org", "https://"]),
        ([], {"PONDER_PORT": "x"}, ["PONDER_PORT", "65535"]),
        (["--config", "absent.toml"], {}, ["absent.toml"]),
        ([], {"PONDER_CONFIG": "broken.toml"}, ["broken.toml", "TOML"]),
        ([], {"PONDER_CONFIG": "misspelt.toml"}, ["prot", "port"]),
        (["--nonsense"], {}, ["--nonsense"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_option_is_told_with_what_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], env: dict[str, str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text("port = = 1")
    Path("misspelt.toml").write_text("prot = 1")
    without: dict[str, str | None] = {name: None for name in os.environ if name.startswith("PONDER_")}
    shown = CliRunner().invoke(cli, ["serve", *arguments], env={**without, **env, "NO_COLOR": "1"})
    assert shown.exit_code == 2, shown.output
    assert all(word in shown.stderr for word in words), shown.stderr


def test_flags_beat_variables_beat_the_file_beats_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("PONDER_")]:
        monkeypatch.delenv(name)
    assert load_settings().port == 8000
    Path("ponder.toml").write_text('port = 1\nhost = "localhost"\nkv-bytes = "1MiB"\nmax_running = 3\n')
    assert (load_settings().port, load_settings().host, load_settings().kv_bytes) == (1, "localhost", 1 << 20)
    monkeypatch.setenv("PONDER_PORT", "2")
    monkeypatch.setenv("PONDER_CORS_ORIGINS", "http://a.example, http://b.example")
    settings = load_settings()
    assert (settings.port, settings.max_running) == (2, 3)
    assert settings.cors_origins == ("http://a.example", "http://b.example")
    assert load_settings(port="3").port == 3
    Path("other.toml").write_text("port = 4")
    monkeypatch.setenv("PONDER_CONFIG", "other.toml")
    assert (load_settings().port, load_settings().host) == (2, "127.0.0.1")
    Path("other.toml").write_text('port = "many"')
    monkeypatch.delenv("PONDER_PORT")
    with pytest.raises(BadSetting, match=r"port in other\.toml is 'many'"):
        load_settings()
    monkeypatch.setenv("PONDER_PROT", "1")
    assert unknown_variables() == ["PONDER_PROT"]


@pytest.mark.parametrize("source", ["flag", "variable", "file"])
def test_an_old_name_of_a_setting_works_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("PONDER_")]:
        monkeypatch.delenv(name)
    if source == "file":
        Path("ponder.toml").write_text('tool_dialect = "hermes"\n')
    elif source == "variable":
        monkeypatch.setenv("PONDER_TOOL_DIALECT", "hermes")
    settings = load_settings(tool_dialect="hermes" if source == "flag" else None)
    assert settings.tool_call_parser == "hermes" and unknown_variables() == []
    assert "is called tool_call_parser now" in caplog.text


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server's address and data directory. SIGINT must end it as cleanly as SIGTERM does."""
    cwd = tmp_path_factory.mktemp("served")
    with serving("--model", str(model), "--data-dir", "data", cwd=cwd) as (process, url):
        yield url, cwd / "data"
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 0
        assert not (cwd / "data" / "server.url").exists()


def test_a_servers_address_is_in_its_data_directory(served: tuple[str, Path]) -> None:
    url, data = served
    assert (data / "server.url").read_text() == url


def test_documents_in_use_keep_a_server_from_starting(model: Path, tmp_path: Path) -> None:
    with Library.open(tmp_path / "d" / "documents", WordEmbedder()):
        shown = ponder("serve", "--port", "0", "--model", str(model), "--data-dir", "d", cwd=tmp_path)
    assert shown.returncode == 1 and f"({os.getpid()})" in shown.stderr and "Traceback" not in shown.stderr
    assert "--data-dir" in shown.stderr


def test_an_embedder_that_is_not_there_is_told(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shown = ponder(
        "serve", "--port", "0", "--model", str(model), "--data-dir", "d", "--embedder", "./empty", cwd=tmp_path
    )
    assert shown.returncode == 1 and "./empty" in shown.stderr and "Traceback" not in shown.stderr, shown.stderr


def test_sigterm_ends_streams_and_the_server_cleanly(tmp_path: Path, model: Path) -> None:
    with serving("--model", str(model), "--data-dir", "data", "--drain-s", "0", cwd=tmp_path) as (process, url):
        first = threading.Event()
        received: list[bytes] = []

        def read() -> None:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=FOREVER, timeout=30) as reply:
                for part in reply.iter_bytes():
                    received.append(part)
                    first.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert first.wait(20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        reader.join(10)
        assert not reader.is_alive()
        text = b"".join(received)
        assert b'"error"' in text and text.endswith(b"data: [DONE]\n\n")
        assert process.stderr is not None and process.stderr.read() == ""


def test_a_port_in_use_is_told_at_once(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        shown = ponder("serve", "--port", port, "--model", str(model), cwd=tmp_path)
    assert shown.returncode == 1 and f"Port {port} on 127.0.0.1 is in use" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_model_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shown = ponder("serve", "--port", "0", "--model", "./empty", "--data-dir", "d", cwd=tmp_path)
    assert shown.returncode == 1 and "config.json" in shown.stderr and "Traceback" not in shown.stderr, shown.stderr


def test_a_data_directory_in_use_is_told(served: tuple[str, Path], model: Path, tmp_path: Path) -> None:
    shown = ponder("serve", "--port", "0", "--model", str(model), "--data-dir", str(served[1]), cwd=tmp_path)
    assert shown.returncode == 1 and "another Ponder" in shown.stderr and "Traceback" not in shown.stderr


@pytest.mark.parametrize("partner", ["a server", "a model"])
def test_chat_talks_to_a_server_or_to_a_model(
    served: tuple[str, Path], model: Path, tmp_path: Path, partner: str
) -> None:
    arguments = ["--url", served[0]] if partner == "a server" else ["--model", str(model)]
    shown = subprocess.run(
        [sys.executable, "-m", "app.cli", "chat", *arguments], input="hello\n/new\n/nonsense\nagain\n/exit\n",
        cwd=tmp_path, env=clean_environment(PONDER_DEVICE="cpu"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "Chatting with tiny" in shown.stdout and "A new conversation" in shown.stdout
    assert "accepted: /new, /exit" in shown.stdout and "Traceback" not in shown.stderr


def test_chat_with_nobody_says_how_to_start_a_server(tmp_path: Path) -> None:
    shown = ponder("chat", "--url", "http://127.0.0.1:9", cwd=tmp_path)
    assert shown.returncode == 1 and "ponder serve" in shown.stderr and "Traceback" not in shown.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_where_others_can_reach_it_the_server_asks_for_keys_or_does_not_start(
    tmp_path: Path, model: Path, host: str
) -> None:
    shown = ponder("serve", "--port", "0", "--host", host, "--model", str(model), "--data-dir", "d", cwd=tmp_path)
    assert shown.returncode == 1 and "Traceback" not in shown.stderr
    assert "--auth keys" in shown.stderr and "ponder keys create" in shown.stderr and "loopback" in shown.stderr
