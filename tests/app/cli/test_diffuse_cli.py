"""`ponder diffuse`, on a model that is made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from app.cli.main import cli
from training.diffusion.byte_tokenizer import byte_tokenizer
from training.diffusion.masked_model import MaskedModel
from training.diffusion.pair import export_pair
from training.diffusion.students import SHAPE

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was hardly trained: its texts are no answers, and its passes are as any model's."""
    torch.manual_seed(1)
    out = tmp_path_factory.mktemp("diffuse")
    export_pair(MaskedModel(SHAPE), byte_tokenizer(), out, diffuses=True)
    return out


def diffuse(model: Path, *arguments: str) -> tuple[int, str, str]:
    shown = CliRunner().invoke(cli, ["diffuse", *arguments, "--model", str(model), "--device", "cpu"])
    return shown.exit_code, shown.stdout, shown.stderr


def test_a_gap_is_filled_and_the_rest_stays(model: Path) -> None:
    code, shown, complaint = diffuse(model, "monday tues______dnesday")
    assert (code, complaint) == (0, "") and "_" not in shown
    assert shown.startswith("monday tues") and shown.endswith("dnesday\n")


def test_each_pass_is_shown_and_fills_as_many_as_asked(model: Path) -> None:
    _, shown, _ = diffuse(model, "monday tues______dnesday", "--passes", "--tokens-per-step", "2")
    assert [line.count("_") for line in shown.rstrip("\n").split("\n")] == [4, 2, 0]


def test_json_has_a_line_for_each_pass(model: Path) -> None:
    _, shown, _ = diffuse(model, "27+5 =", "--json", "--length", "6", "--tokens-per-step", "4")
    *passes, last = map(json.loads, shown.splitlines())
    assert last["passes"] == len(passes) >= 1 and [each["pass"] for each in passes] == [*range(1, len(passes) + 1)]
    assert len(passes[0]["positions"]) == len(passes[0]["tokens"]) == len(passes[0]["confidences"]) == 4
    assert all(each["text"].startswith("27+5 =") for each in passes)


@pytest.mark.slow
def test_control_characters_do_not_reach_a_terminal(model: Path) -> None:
    mine, theirs = os.openpty()
    text = "red\x1b[31m \x9b2J\x07_"  # what is given is shown again, as what is written
    command = [sys.executable, "-m", "app.cli", "diffuse", text, "--model", str(model), "--device", "cpu"]
    for more in ([], ["--passes"]):
        subprocess.run([*command, *more], cwd=ROOT, stdout=theirs, check=True, timeout=60)
        shown = os.read(mine, 65536).decode()
        assert "red\ufffd[31m \ufffd2J\ufffd" in shown
        assert shown.replace("\x1b[K", "").replace("\r", "").replace("\n", "").isprintable()
    assert "2J\x07" in diffuse(model, text)[1]  # in a pipe they stay


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1_2", "--length", "4"), "length is for a text without '_'"),
        (("1+1 =", "--length", "0"), "length is 0; accepted: 1 or more"),
        (("1+1 =", "--block-size", "0"), "block_size is 0; accepted: 1 to"),
        (("1+1 =", "--threshold", "2"), "threshold is 2.0; accepted: 0 to 1"),
        (("1+1 =", "--threshold", "0.5", "--tokens-per-step", "2"), "exclude each other"),
        (("9" * 600,), "616 tokens; this model accepts at most 512"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(model: Path, arguments: tuple[str, ...], words: str) -> None:
    code, _, complaint = diffuse(model, *arguments)
    assert code == 1 and words in complaint and "Traceback" not in complaint


def test_a_model_that_decodes_in_order_is_refused() -> None:
    shown = CliRunner().invoke(cli, ["diffuse", "1+1 =", "--model", str(ROOT / "models/pebble")])
    assert shown.exit_code == 1 and "pebble is no masked-diffusion model" in shown.stderr
