"""`ponder chat`: a conversation that no longer fits says how to start over, with a server and with an engine here."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.terminal import converse
from app.config import Settings
from tests.app.conftest import Server

LONG = "the of and " * 4000


@pytest.mark.parametrize("here", [False, True])
def test_a_full_conversation_says_how_to_start_over(
    here: bool, server: Server, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(model=str(model), dtype="float32", kv_blocks=256) if here else None
    inputs = iter([LONG, "Hello", LONG, "/new", "Hello", "/exit"])
    monkeypatch.setattr("rich.console.Console.input", lambda self, prompt: next(inputs))
    converse(None if here else server.url, settings)
    alone, after, rest = capsys.readouterr().out.partition("\n")[2].split("maximum context length")
    assert "starts over" not in alone + after, "a new conversation would not take it either"
    assert "/new starts over." in rest
