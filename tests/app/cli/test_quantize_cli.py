"""`ponder quantize`, as a shell sees it: texts of every form, a run that is killed, and refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli.main import cli
from app.cli.weights.quantize_command import read_texts
from app.config import BadSetting
from engine.model.tokenizer import Tokenizer
from tests.app.cli.test_cli import ROOT, clean_environment
from tests.tiny import flat_draft, write_checkpoint

PEBBLE = ROOT / "models/pebble"
PROSE = ROOT / "docs/design.md"

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_checkpoint(tmp_path_factory.mktemp("tiny")))


def test_chats_go_through_the_models_own_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    lines = [
        {"messages": chat},
        {"messages": chat[:1], "chat_template_kwargs": {"open_thinking": True}},
        {"text": "abc\u2028"},
    ]
    file.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    texts = [tokenizer.decode(each, skip_special=False) for each in read_texts(file, tokenizer, 64)]
    assert texts[0] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    assert texts[1] == "<|im_start|>user\nhi<|im_end|>\n" and texts[2] == "abc\u2028"
    assert [len(each) for each in read_texts(file, tokenizer, 3)] == [3, 3, 3, 3]


def test_a_plain_text_is_read_whole_in_parts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("abcdefg", encoding="utf-8")
    parts = read_texts(tmp_path / "a.md", tokenizer, 3)
    assert [tokenizer.decode(part) for part in parts] == ["abc", "def"]  # nothing can be foretold from one token


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.pdf", "x", [".txt, .md, or .jsonl"]),
        ("a.txt", None, ["cannot be read"]),
        ("a.jsonl", '{"text": "x"}\n{', ["line 2", "accepted"]),
        ("a.jsonl", '{"prompt": "x"}', ["line 1", "prompt", "messages"]),
        ("a.jsonl", '{"text": "x", "messages": [{"role": "user"}]}', ["line 1", "one of the two"]),
        ("a.jsonl", '{"text": "x", "tools": []}', ["line 1", "for messages"]),
        ("a.jsonl", "{}", ["line 1", "messages or text"]),
        ("a.jsonl", '{"messages": [{"role": "judge", "content": "x"}]}', ["line 1", "messages.0.role", "assistant"]),
        ("a.jsonl", '{"messages": [{"role": "user", "content": 5}]}', ["line 1", "messages.0.content"]),
        ("a.jsonl", '{"messages": [{"role": "user"}], "chat_template_kwargs": {"tools": 1}}', ["line 1", "template"]),
    ],
)
def test_files_that_are_no_text_are_refused(
    name: str, text: str | None, words: list[str], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(BadSetting) as refused:
        read_texts(tmp_path / name, tokenizer, 64)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--to", "int8, int4"]),
        (["--to", "int3"], ["int8", "int4"]),
        (["--to", "int4", "--method", "smoothquant"], ["rtn, gptq, awq"]),
        (["--to", "int4", "--group", "48"], ["48", "32, 64, 128"]),
        (["--to", "int8", "--group", "32"], ["scale a row"]),
        (["--to", "int8", "--act-order"], ["act_order", "gptq"]),
        (["--to", "int8", "--resume", "--overwrite"], ["exclude each other"]),
        (["--compare", "--method", "rtn"], ["all methods"]),
        (["--compare", "--to", "int8", "--group", "32"], ["int4"]),
        (["--to", "int8", "--length", "5000"], ["4096"]),
        (["--to", "int8", "--samples", "1", "--length", "32"], ["tokens to measure on", "512"]),
        (["--to", "int4", "--samples", "1"], ["tokens to calibrate on", "2,048"]),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(options: list[str], words: list[str], tmp_path: Path) -> None:
    out = [] if "--compare" in options else ["--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(cli, ["quantize", str(PEBBLE), "--text", str(PROSE), *options, *out])
    assert shown.exit_code in (1, 2) and all(word in shown.output for word in words), shown.output


def start(*options: str, model: Path = PEBBLE) -> subprocess.Popen[str]:
    """Begins `ponder quantize` on a bundled model and few texts. One thread: a busy machine's others would wait."""
    command = [sys.executable, "-m", "app.cli", "quantize", str(model), "--text", str(PROSE), *options]
    env = clean_environment(OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [*command, "--samples", "20", "--length", "128", "--json"], env=env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@slow
def test_a_run_that_is_killed_goes_on_to_the_same_bytes_and_is_measured(tmp_path: Path) -> None:
    killed, whole = (
        ("--to", "int4", "--out", str(tmp_path / "killed")),
        ("--to", "int4", "--out", str(tmp_path / "whole")),
    )
    process = start(*killed)
    assert process.stderr is not None
    assert any("layer 2 of 10" in line for line in process.stderr)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "killed/config.json").exists()
    assert "not empty" in start(*killed).communicate()[1]
    resumed, progress = start(*killed, "--resume").communicate()
    assert "layer 2 of 10, was done" in progress
    shown = [json.loads(text)["results"][0] for text in (resumed, start(*whole).communicate()[0])]
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("killed", "whole")]
    assert files[0] == files[1]
    assert shown[0]["kl_mean"] == shown[1]["kl_mean"] and 0 < shown[0]["kl_mean"] < 0.1
    assert shown[0]["bytes"] < shown[0]["bytes_before"] / 2 and len(shown[0]["layers"]) == 10


@slow
def test_all_methods_are_compared(tmp_path: Path) -> None:
    shown, _ = start(
        "--compare", "--to", "int8", "--out", str(tmp_path / "out"), model=flat_draft(tmp_path)
    ).communicate()
    methods = ["rtn", "gptq", "awq", "smoothquant"]
    rows = json.loads(shown)["results"]
    assert [row["method"] for row in rows] == methods and all(0 < row["kl_mean"] < 0.003 for row in rows)
    assert {each.name for each in (tmp_path / "out").iterdir()} == {f"int8-{method}" for method in methods}


@slow
def test_what_it_cost_is_shown_as_tables(tmp_path: Path) -> None:
    options = [
        "--text",
        str(PROSE),
        "--samples",
        "20",
        "--length",
        "128",
        "--to",
        "int8",
        "--out",
        str(tmp_path / "out"),
    ]
    shown = CliRunner().invoke(cli, ["quantize", str(PEBBLE), *options], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert all(word in shown.output for word in ("after layer", "KL", "same top-1", "perplexity", "int8, rtn"))
