"""`ponder train-lora`, as a shell sees it: chats of OpenAI's format, refusals, and a run that is stopped."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from app.cli.main import cli
from app.cli.weights.chat_data import read_chats, split, within
from app.config import BadSetting
from engine import GREEDY, Engine, EngineConfig, Span
from engine.model.tokenizer import Tokenizer
from tests.app.cli.test_cli import ROOT, clean_environment
from tests.tiny import write_checkpoint

PEBBLE = ROOT / "models/pebble"
USER, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "2"}

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(PEBBLE)


def write(path: Path, *lines: Any) -> Path:  # Any: JSON, or the text of a line
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def chats(count: int) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": "xyzzy"}
    return [{"messages": [{"role": "user", "content": f"say {at}"}, answer]} for at in range(count)]


def test_chats_of_openais_format_are_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write(
        tmp_path / "chats.jsonl",
        {"messages": [{"role": "developer", "content": "Be brief."}, USER, {**SAID, "weight": 0}, USER, SAID]},
        "",
        {"messages": [USER, CALLING, RESULT, SAID], "tools": [TOOL], "parallel_tool_calls": False},
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "no"}]}],
         "chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    file.write_bytes(BOM_UTF8 + file.read_bytes())  # as some editors begin a file
    first, second, third = read_chats(file, tokenizer)
    assert [chat.line for chat in (first, second, third)] == [1, 3, 4]
    completions = [
        [tokenizer.decode(each.completion(at)) for each in chat.examples for at in range(len(each.turns))]
        for chat in (first, second, third)
    ]
    assert [len(each) for each in completions] == [1, 2, 1]
    assert '{"name": "add", "arguments": {}}' in completions[1][0] and completions[2] == ["no"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["Invalid JSON", "accepted"]),
        ("\xff", ["accepted"]),
        ("[]", ["accepted: a JSON object"]),
        ({"messages": []}, ["no turn of the assistant"]),
        ({"messages": [USER, SAID], "text": "x"}, ["text", "messages"]),
        ({"messages": [USER]}, ["end with no turn of the assistant"]),
        ({"messages": [USER, {**SAID, "weight": 0}]}, ["weight 0", "at least one"]),
        ({"messages": [USER, {**SAID, "weight": 0.5}]}, ["messages[1].weight", "1, or 0"]),
        ({"messages": [USER, {**SAID, "weight": True}]}, ["messages[1].weight"]),
        ({"messages": [{**USER, "name": "Ann"}, SAID]}, ["messages[0].name", "accepted of a message of user: content"]),
        ({"messages": [{"role": "judge", "content": "x"}, SAID]}, ["messages[0].role", "assistant"]),
        ({"messages": [{"content": "x"}, SAID]}, ["messages[0].role is None"]),
        ({"messages": [{"role": ["user"]}, SAID]}, ["messages[0].role"]),
        ({"messages": [{"role": "user", "content": 5}, SAID]}, ["messages[0].content", "a string"]),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, ["neither content nor tool_calls"]),
        ({"messages": [USER, CALLING]}, ["messages[1].tool_calls[0]", "no tools"]),
        ({"messages": [USER, {**CALLING, "tool_calls": [{"id": "1"}]}], "tools": [TOOL]}, ["tool_calls[0]"]),
        ({"messages": [USER, {**CALLING, "tool_calls": 3}], "tools": [TOOL]}, ["a list of calls"]),
        ({"messages": [USER, {**CALLING, "tool_calls": [CALL, CALL]}], "tools": [TOOL], "parallel_tool_calls": False},
         ["2 calls", "accepted: one"]),
        ({"messages": [USER, CALLING, USER, SAID], "tools": [TOOL]}, ["messages[2]", "no result"]),
        ({"messages": [USER, RESULT, SAID]}, ["messages[1].tool_call_id is of no call"]),
        ({"messages": [USER, SAID], "tools": [{"type": "retrieval"}]}, ["tools[0].type", "function"]),
        ({"messages": [USER, SAID], "tools": 3}, ["tools"]),
        ({"messages": [USER, SAID], "chat_template_kwargs": {"messages": []}}, ["chat_template_kwargs.messages"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,"}]},
                       SAID]}, ["image", "text"]),
        ({"messages": [USER, {"role": "system", "content": "x"}, SAID], "functions": []}, ["functions"]),
    ],
    ids=str,
)  # fmt: skip
def test_lines_that_are_no_chat_are_refused(
    line: Any, words: list[str], tokenizer: Tokenizer, tmp_path: Path
) -> None:  # Any: JSON
    file = write(tmp_path / "chats.jsonl", {"messages": [USER, SAID]}, line)
    if line == "\xff":
        file.write_bytes(
            b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "y"}]}\n\xff'
        )
    with pytest.raises(BadSetting) as refused:
        read_chats(file, tokenizer)
    assert all(word in str(refused.value) for word in ["line 2", "accepted", *words]), refused.value


def test_equal_chats_are_on_one_side_and_long_ones_left_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "hi " * 300}, SAID]}
    read = read_chats(write(tmp_path / "chats.jsonl", *chats(20), *chats(20), long), tokenizer)
    short = within(read, 100)
    assert len(short) == 40 and len(read) == 41
    learned, held_out = split(short, 0.25, seed=3)
    assert len(held_out) == 10 and len(learned) == 30
    assert not {chat.examples for chat in learned} & {chat.examples for chat in held_out}
    assert split(short, 0.25, seed=3) == (learned, held_out) != split(short, 0.25, seed=4)
    assert split(short, 0.0, seed=3) == (short, [])
    with pytest.raises(BadSetting, match="one chat"):
        split(short[:1] * 3, 0.5, seed=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rank", "300"], ["rank is 300", "1 to 256"]),
        (["--learning-rate", "nan"], ["learning_rate is nan"]),
        (["--target-modules", "q_proj,gate"], ["'gate'", "q_proj"]),
        (["--length", "5000"], ["5000", "2048"]),
        (["--length", "10"], ["--length 10", "the shortest has"]),
        (["--dtype", "float16"], ["float32", "bfloat16"]),
        (["--device", "tpu"], ["device 'tpu'", "auto, cpu, cuda"]),
        (["--resume"], ["no run to go on with"]),
        (["--batch-tokens", "0"], ["batch_tokens is 0"]),
        (["--eval-data", "absent.jsonl"], ["absent.jsonl cannot be read"]),
        (["--eval-data", "chats.txt"], ["chats.txt", ".jsonl"]),
        (["--eval-data", "OWN"], ["line 1 is a chat of --data, too"]),
        (["--eval-share", "nan"], ["--eval-share", "0.9"]),
    ],
    ids=str,
)
def test_options_that_do_not_go_are_refused(options: list[str], words: list[str], model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "chats.jsonl", *chats(4))
    command = [
        "train-lora",
        str(model),
        "--data",
        str(file),
        "--out",
        str(tmp_path / "out"),
    ]
    command += [str(file) if option == "OWN" else option for option in options]
    shown = CliRunner().invoke(cli, command, env={"COLUMNS": "200"})
    assert shown.exit_code in (1, 2) and all(word in shown.output for word in words), shown.output
    assert not (tmp_path / "out").exists()


def test_a_directory_that_has_something_else_is_kept(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "chats.jsonl", *chats(4))
    for options in ([], ["--resume"]):
        command = ["train-lora", str(model), "--data", str(file), "--out", str(tmp_path), *options]
        shown = CliRunner().invoke(cli, command)
        assert shown.exit_code == 1 and "give another" in shown.output
    assert [each.name for each in tmp_path.iterdir()] == ["chats.jsonl"]


def start(model: Path, data: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "app.cli", "train-lora", str(model), "--data", str(data), "--out", str(out)]
    command += ["--learning-rate", "0.005", "--rank", "4", "--epochs", "12", "--batch-tokens", "60", "--samples", "4"]
    env = clean_environment(OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [*command, *options], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


@slow
def test_a_run_that_is_stopped_goes_on_to_the_same_adapter_which_is_served(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "chats.jsonl", *chats(24))
    process = start(model, data, tmp_path / "stopped")
    assert process.stderr is not None and any("step 1 of" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "--resume goes on" in errors, errors
    assert sorted(each.name for each in (tmp_path / "stopped").iterdir()) == ["training_state.safetensors"]
    refused = start(model, data, tmp_path / "stopped")
    assert "--resume to go on" in refused.communicate(timeout=120)[1] and refused.returncode == 1
    resumed = start(model, data, tmp_path / "stopped", "--resume", "--json")
    whole = start(model, data, tmp_path / "whole", "--json")
    (told, errors), _ = resumed.communicate(timeout=200), whole.communicate(timeout=200)
    assert resumed.returncode == 0 and whole.returncode == 0, errors
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("stopped", "whole"))
    assert ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)

    figures = json.loads(told)
    assert figures == json.loads((tmp_path / "stopped/training.json").read_text(encoding="utf-8"))
    assert figures["held_out_loss"]["after"] < 0.5 and figures["held_out_loss"]["before"] > 3
    assert figures["exact"]["before"] == 0 and figures["exact"]["after"] >= figures["exact"]["answers"] - 1 >= 1
    card = (tmp_path / "stopped/README.md").read_text(encoding="utf-8")
    assert "- wanted: `xyzzy`" in card and "- after: `xyzzy`" in card and "loss.svg" in card
    picture = ET.fromstring((tmp_path / "stopped/loss.svg").read_text(encoding="utf-8"))
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
    assert not (tmp_path / "stopped/training_state.safetensors").exists()

    async def answers() -> list[str]:
        config = EngineConfig(model=str(model), adapters=(("magic", str(tmp_path / "stopped")),))
        async with await Engine.start(config) as engine:
            prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": "say 99"}])
            said = []
            for adapter in (None, "magic"):
                async with await engine.open(prompt, adapter=adapter) as sequence:
                    said.append((await sequence.generate_all(Span(GREEDY, max_tokens=20))).text)
            return said

    plain, magic = asyncio.run(answers())
    assert magic == "xyzzy" != plain
