"""`ponder kv-store`: what it refuses, in a sentence and before it listens."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli.main import cli


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--memory", "lots"], "--memory is 'lots'; accepted: a size"),
        (["--memory", "1KiB"], "accepted: 1MiB or more"),
        (["--disk", "-1"], "--disk is '-1'; accepted: a size"),
        (["--disk", "1GiB"], "--dir is not; accepted"),
        (["--dir", "here"], "--disk is 0; accepted"),
        (["--secret-file", "none"], "--secret-file none cannot be read"),
        (["--secret-file", "{short}"], "has 5 bytes; accepted: a file of at least 16"),
        (["--port", "{taken}"], "the store cannot listen at 127.0.0.1:{taken}"),
        (["--metrics-port", "{taken}"], "{taken}"),
        (["--disk", "1GiB", "--dir", "{short}"], "cannot be used"),
    ],
)
def test_what_is_no_store_is_refused(options: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("sixteen bytes or more")
    (tmp_path / "short").write_text("short")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {"taken": taken.getsockname()[1], "short": tmp_path / "short"}
        always = ["kv-store", "--port", "0", "--metrics-port", "0", "--secret-file", str(tmp_path / "secret")]
        shown = CliRunner().invoke(cli, [*always, *(each.format(**given) for each in options)])
    assert shown.exit_code == 1 and shown.stderr.startswith("ponder: ")
    assert (told.format(**given) in shown.stderr and "accepted" in shown.stderr) or told == "{taken}"
