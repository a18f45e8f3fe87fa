"""Tool calls on the questions of BFCL: `python -m bench.tool_calls`. Are they valid, and are they right?

Validity is the mask's doing: `jsonschema` must find every finished call valid, with the bundled model and with random
weights, where nothing but the mask makes a call. Rightness is the model's, and is reported as it is: the share of
questions with calls among the answers that BFCL accepts, and of those without a fitting tool that are not called.

With `--selection` the tool is chosen by embedding (`app/answering/tool_selection.py`), and by the model beside it, also
among up to eight tools of other questions. What each part adds is fitted on the even questions and counted on the odd.
With `--served URL` a server of the bundled model is asked what `training.evaluate` asks the model alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from jsonschema import Draft202012Validator

from app.answering.copied_arguments import held_to_question
from app.answering.tool_selection import FITS, ToolRanker
from bench import hardware
from engine import GREEDY, Engine, EngineConfig, Sampling, Span
from engine.errors import ContextLengthExceeded
from engine.structured_output.layout import Constrained
from engine.tool_parsers import Bodies, ParsedCall, ToolChoice, ToolSpec, choose_parser, fold
from reasoning.evaluate.measure import wilson
from retrieval.embedding import SentenceEmbedder
from tests.engine.structured_output import bfcl
from training import evaluate
from training.abilities import ABILITIES
from training.conversation import Case, ModelReply, SpokenCall

PEBBLE = Path(__file__).parent.parent / "models" / "pebble"
FILES = ("simple_python", "live_simple", "multiple", "parallel", "irrelevance")
MAX_TOKENS = 400
MAX_MIXED = 8  # tools
MIXED = ("simple_python", "live_simple")  # files whose questions get tools of others


@dataclass(frozen=True, slots=True)
class ToolQuestion:
    """`accepted` are the calls that answer it: for each one a name, and for each parameter its right values."""

    text: str
    tools: tuple[ToolSpec, ...]
    accepted: tuple[tuple[str, dict[str, list[Any]]], ...]  # Any: JSON


@dataclass(slots=True)
class CallScore:
    """Counts over the questions of one file."""

    asked: int = 0
    calls: int = 0
    valid: int = 0
    cut: int = 0  # calls that were not finished: the answer ran out of tokens
    right: int = 0
    too_long: int = 0  # questions with prompts that do not fit the context


def questions(name: str) -> Iterator[ToolQuestion]:
    """The questions of one file of the set."""
    folder = bfcl.SHARED / "data/bfcl"
    answers: dict[str, Any] = {}
    if (folder / f"possible_answer/{name}.jsonl").exists():
        answers = {one["id"]: one["ground_truth"] for one in _read(folder / f"possible_answer/{name}.jsonl")}
    for one in _read(folder / f"{name}.jsonl"):
        tools = tuple(
            ToolSpec(_name(tool["name"]), tool.get("description"), bfcl.json_schema(tool["parameters"]))
            for tool in one["function"]
        )
        accepted = tuple((_name(f), given) for call in answers.get(one["id"], ()) for f, given in call.items())
        yield ToolQuestion(one["question"][0][-1]["content"], tools, accepted)


def right(calls: Sequence[ParsedCall], accepted: Sequence[tuple[str, dict[str, list[Any]]]]) -> bool:
    """Returns whether the calls are those accepted, in any order."""
    left = list(accepted)
    for call in calls:
        arguments = json.loads(call.arguments)
        found = next((one for one in left if one[0] == call.name and _fits(arguments, one[1])), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _fits(given: dict[str, Any], accepted: dict[str, list[Any]]) -> bool:
    """Returns whether every argument is one of its right values, and all required ones are there."""
    if given.keys() - accepted.keys():
        return False
    return all(
        any(_same(given[key], value) for value in values) if key in given else "" in values
        for key, values in accepted.items()
    )


def _same(given: Any, value: Any) -> bool:
    """Equality of BFCL's kind: text without case, spaces and punctuation; objects contain lists of right values."""
    if isinstance(given, str) and isinstance(value, str):
        return _plain(given) == _plain(value)
    if isinstance(given, dict) and isinstance(value, dict):
        return _fits(given, {key: v if isinstance(v, list) else [v] for key, v in value.items()})
    if isinstance(given, list) and isinstance(value, list):
        return len(given) == len(value) and all(map(_same, given, value))
    if isinstance(given, bool) or isinstance(value, bool):
        return given is value
    return bool(given == value)


def _plain(text: str) -> str:
    return "".join(character for character in text.lower() if character not in " ,./-_*^'\"")


def _name(name: str) -> str:
    return name.replace(" ", "_")


def _read(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


async def ask(
    engine: Engine,
    question: ToolQuestion,
    choice: ToolChoice,
    sampling: Sampling,
    callable_tools: Sequence[ToolSpec] | None = None,
) -> tuple[list[ParsedCall], bool]:
    """The calls that the model writes, and whether it came to an end. Only `callable_tools` may be called, if given."""
    tokenizer = engine.tokenizer
    tool_parser = choose_parser(tokenizer, tokenizer.tool_template)
    assert tool_parser is not None, "the model cannot call tools"
    plan = tool_parser.plan(callable_tools or question.tools, choice)
    opening, closing = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    assert opening is not None and closing is not None
    layout = replace(plan.layout, think=(opening, closing)) if choice == "auto" else plan.layout
    shown = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in question.tools
    ]
    messages = [{"role": "user", "content": question.text}]
    prompt = tokenizer.apply_chat_template(messages, tools=shown, enable_thinking=False)
    async with await engine.open(prompt) as sequence:
        span = Span(sampling, max_tokens=MAX_TOKENS, constraint=Constrained(plan.body, layout))
        bodies, events = Bodies(plan.parser), []
        with sequence.generate(span) as stream:
            async for output in stream:
                if output.kind == "body":
                    events += bodies.push(output.section, output.text)
        events += bodies.end()
        calls, malformed = fold(events)
        assert not malformed.strip() or output.finish_reason == "length", f"malformed: {malformed!r}"
        return calls, output.finish_reason == "stop"


async def score(engine: Engine, name: str, limit: int, choice: ToolChoice, sampling: Sampling) -> CallScore:
    """Ask the questions of one file, many at once."""
    total, gate = CallScore(), asyncio.Semaphore(16)

    async def one(question: ToolQuestion) -> None:
        async with gate:
            try:
                calls, ended = await ask(engine, question, choice, sampling)
            except ContextLengthExceeded:
                total.too_long += 1
                return
        total.asked += 1
        schemas = {tool.name: tool.parameters or {} for tool in question.tools}
        if not ended and calls:
            total.cut += 1
            calls = calls[:-1]
        total.calls += len(calls)
        total.valid += sum(_valid(call, schemas) for call in calls)
        total.right += ended and right(calls, question.accepted)

    await asyncio.gather(*(one(question) for question in list(questions(name))[:limit]))
    return total


def _valid(call: ParsedCall, schemas: dict[str, Any]) -> bool:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return False
    return call.name in schemas and Draft202012Validator(schemas[call.name]).is_valid(arguments)


@dataclass(slots=True)
class SelectionScore:
    """Counts over the questions of one file. `right_tool`: the tool that is called first is one of those accepted, or
    none is called where none is."""

    asked: int = 0
    right_tool: int = 0
    right: int = 0


def mixed(name: str, seed: int = 0) -> Iterator[ToolQuestion]:
    """The questions of a file, each with up to `MAX_MIXED` tools: its own and those of other questions."""
    rng = random.Random(seed)
    others = [tool for file in (*MIXED, "multiple") for question in questions(file) for tool in question.tools]
    for question in questions(name):
        tools = {tool.name: tool for tool in question.tools}
        for _ in range(rng.randint(0, MAX_MIXED - 1)):
            tool = rng.choice(others)
            tools.setdefault(tool.name, tool)
        shuffled = list(tools.values())
        rng.shuffle(shuffled)
        yield replace(question, tools=tuple(shuffled))


def selection_sets() -> dict[str, list[ToolQuestion]]:
    return {
        **{f"{name}, 1 to {MAX_MIXED} tools": list(mixed(name)) for name in MIXED},
        **{name: list(questions(name)) for name in ("multiple", "irrelevance")},
    }


async def score_selection(
    engine: Engine, asked: Sequence[ToolQuestion], ranker: ToolRanker | None, copied: bool
) -> SelectionScore:
    """Scores answers whose tool is chosen by `ranker`, or by the model without one. `copied`: arguments are held to the
    question."""
    total, gate = SelectionScore(), asyncio.Semaphore(16)

    async def one(question: ToolQuestion) -> None:
        async with gate:
            calls, ended = list[ParsedCall](), True
            best = None if ranker is None else ranker.rank(question.text, question.tools)[0]
            if best is None or best.probability >= FITS:
                choice: ToolChoice = "auto" if best is None else "required"
                try:
                    tools = None if best is None else [best.tool]
                    if copied and tools:
                        tools = [held_to_question(tools[0], question.text)]
                    calls, ended = await ask(engine, question, choice, GREEDY, tools)
                except ContextLengthExceeded:
                    return
            total.asked += 1
            names = {name for name, _ in question.accepted}
            total.right_tool += (calls[0].name in names) if calls else not names
            total.right += ended and right(calls, question.accepted)

    await asyncio.gather(*(one(question) for question in asked))
    return total


def fitted_parts(ranker: ToolRanker) -> Iterator[tuple[str, float, float, float]]:
    """For each set of features, fitted on the even questions: the area under the ROC curve, and the shares of questions
    with a fitting tool that are called and of those without that are not, on the odd ones."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    rows, fits, held = list[Any](), list[bool](), list[bool]()  # Any: a row of features
    for name in (*MIXED, "multiple", "irrelevance"):
        for at, question in enumerate(questions(name)):
            features = ranker.features(question.text, question.tools)
            rows.append(features[int(features[:, 0].argmax())])
            fits.append(name != "irrelevance")
            held.append(at % 2 == 1)
    x, y, odd = np.array(rows), np.array(fits), np.array(held)
    for label, columns in (
        ("cosine", [0]), ("MaxSim of the name", [1]), ("both", [0, 1]), ("and numbers that lack", [0, 1, 2]),
    ):  # fmt: skip
        model = LogisticRegression(class_weight="balanced", C=100).fit(x[~odd][:, columns], y[~odd])
        likely = model.predict_proba(x[odd][:, columns])[:, 1]
        if len(columns) == x.shape[1]:
            label += f" (weights {np.round(model.coef_[0], 1)}, intercept {model.intercept_[0]:.1f})"
        called = likely >= FITS
        yield label, float(roc_auc_score(y[odd], likely)), called[y[odd]].mean(), 1 - called[~y[odd]].mean()


def by_threshold(ranker: ToolRanker) -> Iterator[tuple[float, str, float, float]]:
    """Yields a least probability of tools to call, a half of the questions, and two shares: of the questions with a
    fitting tool those that call it, and of those without one those that call none."""
    found = list[tuple[bool, bool, float, bool]]()  # an odd question; a tool fits; the best tool's; it is right
    for asked in selection_sets().values():
        for at, question in enumerate(asked):
            names = {name for name, _ in question.accepted}
            best = ranker.rank(question.text, question.tools)[0]
            found.append((at % 2 == 1, bool(names), best.probability, best.tool.name in names))
    for threshold in (0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8):
        for odd, half in ((False, "even"), (True, "odd")):
            called = [right and p >= threshold for is_odd, fits, p, right in found if is_odd == odd and fits]
            kept = [p < threshold for is_odd, fits, p, _ in found if is_odd == odd and not fits]
            yield threshold, half, sum(called) / len(called), sum(kept) / len(kept)


async def measure_selection(model: Path, limit: int) -> None:
    """Prints three tables: the choice of a tool, what each part of it adds, and the thresholds."""
    ranker = ToolRanker(SentenceEmbedder())
    print(
        "| chosen by | questions | asked | right tool, or no call where none fits | right call |\n|---|---|---|---|---|"
    )
    async with await Engine.start(EngineConfig(model=str(model), max_running=16)) as engine:
        for label, chooser, copied in (
            ("the model", None, False), ("embedding", ranker, False), ("embedding, arguments copied", ranker, True),
        ):  # fmt: skip
            for name, asked in selection_sets().items():
                if copied and name == "irrelevance":
                    continue
                s = await score_selection(engine, asked[:limit], chooser, copied)
                interval = "{:.0%} – {:.0%}".format(*wilson(s.right_tool, s.asked))
                share, whole = s.right_tool / s.asked, f"{s.right / s.asked:.0%}" if name != "irrelevance" else "–"
                print(f"| {label} | {name} | {s.asked} | {share:.0%} ({interval}) | {whole} |", flush=True)
    print("\n| features | AUROC | called, a tool fits | not called, none fits |\n|---|---|---|---|")
    for label, area, called, kept in fitted_parts(ranker):
        print(f"| {label} | {area:.3f} | {called:.0%} | {kept:.0%} |")
    print("\n| called from | questions | right tool, one fits | not called, none fits |\n|---|---|---|---|")
    for threshold, half, called, kept in by_threshold(ranker):
        print(f"| {threshold:.0%} | {half} | {called:.1%} | {kept:.1%} |")


SERVED = (
    "arithmetic through the calculator", "one of 1 to 8 unseen tools", "no tool fits", "several calls in one turn",
    "a tool's error is repaired", "thinks, calls a tool, answers", "questions about tables, in SQL",
)  # fmt: skip


async def turns(http: httpx.AsyncClient, case: Case) -> list[ModelReply]:
    """Returns what a server says to a case of `training.abilities`, whose tools answer its calls."""
    messages, said = case.prompt.as_json(), list[ModelReply]()
    while len(said) < evaluate.MAX_TURNS:
        asked = {"model": "default", "messages": messages, "tools": case.prompt.tools, "temperature": 0}
        if case.prompt.enable_thinking is False:
            asked["reasoning_effort"] = "none"
        reply = await http.post("/v1/chat/completions", json={**asked, "max_tokens": evaluate.MAX_TOKENS})
        (choice,) = reply.raise_for_status().json()["choices"]
        message, ended = choice["message"], choice["finish_reason"] != "length"
        called = [each["function"] for each in message.get("tool_calls") or []]
        calls = [SpokenCall(each["name"], json.loads(each["arguments"])) for each in called] if ended else []
        said.append(ModelReply("", message.get("content") or "", tuple(calls), not ended))
        if case.answer_call is None or not calls:
            break
        messages.append({"role": "assistant", "content": message["content"], "tool_calls": message["tool_calls"]})
        for call, made in zip(calls, message["tool_calls"], strict=True):
            messages.append({"role": "tool", "tool_call_id": made["id"], "content": case.answer_call(call)})
    return said


async def measure_served(url: str, limit: int) -> None:
    """Prints the abilities with tools, as a server of the bundled model has them with its own settings."""
    print("| ability | measured | asked | share | 95% interval |\n|---|---|---|---|---|")
    gate = asyncio.Semaphore(8)

    async def asked(case: Case) -> list[ModelReply]:
        async with gate:
            return await turns(http, case)

    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        for ability in (each for each in ABILITIES if each.name in SERVED):
            cases = ability.cases(random.Random(f"{evaluate.SEED}-{ability.name}"), limit)
            verdicts = [
                evaluate.judged(*each) for each in zip(cases, await asyncio.gather(*map(asked, cases)), strict=True)
            ]
            for name in dict.fromkeys(name for verdict in verdicts for name in verdict):
                outcomes = [verdict[name] for verdict in verdicts if isinstance(verdict.get(name), bool)]
                n, right_ones = len(outcomes), sum(map(bool, outcomes))
                low, high = wilson(right_ones, n)
                share = f"{right_ones / n:.1%} | {low:.1%} – {high:.1%}"
                print(f"| {ability.name} | {name} | {n} | {share} |", flush=True)


def random_weights(folder: Path) -> Path:
    """A model of Pebble's shape and tokenizer with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(PEBBLE, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(PEBBLE)).save_pretrained(folder)
    return folder


async def measure(model: Path, limit: int, choice: ToolChoice, sampling: Sampling) -> dict[str, CallScore]:
    """Every file's score."""
    async with await Engine.start(EngineConfig(model=str(model), max_running=16)) as engine:
        return {name: await score(engine, name, limit, choice, sampling) for name in FILES}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tool_calls", description="Tool calls on BFCL's questions.")
    parser.add_argument("--model", type=Path, default=PEBBLE)
    parser.add_argument("--questions", type=int, default=1000, help="of each file, at most")
    parser.add_argument("--selection", action="store_true", help="measure the choice of a tool by embedding instead")
    parser.add_argument(
        "--served", metavar="URL", help="measure a server of the bundled model instead, 300 cases at most"
    )
    options = parser.parse_args()
    began = time.monotonic()
    if options.served:
        asyncio.run(measure_served(options.served, min(options.questions, 300)))
        return
    if not (bfcl.SHARED / "data/bfcl").is_dir():
        parser.exit(1, f"no questions at {bfcl.SHARED / 'data/bfcl'}; set PONDER_SHARED\n")
    if options.selection:
        asyncio.run(measure_selection(options.model, options.questions))
        hw = hardware.describe()
        print(f"\n{hw['gpu'] or hw['cpu']}, {hw['cores']} cores; {time.monotonic() - began:.0f} s.")
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            (options.model.name, "auto", options.model, GREEDY),
            (options.model.name, "required", options.model, GREEDY),
            ("random weights", "required", random_weights(Path(folder) / "random"), Sampling(seed=1)),
        ]
        print("| model | tool_choice | questions | asked | finished calls | valid | cut off | right |")
        print("|---|---|---|---|---|---|---|---|")
        for label, choice, model, sampling in runs:
            for name, s in asyncio.run(measure(model, options.questions, choice, sampling)).items():  # type: ignore[arg-type]  # "auto" and "required" are choices
                right_share = f"{s.right / s.asked:.0%}" if s.asked else "–"
                valid_share = f"{s.valid / s.calls:.1%}" if s.calls else "–"
                print(
                    f"| {label} | {choice} | {name} | {s.asked} | {s.calls} | {valid_share} | {s.cut} | {right_share} |"
                )
    hw = hardware.describe()
    print(f"\n{hw['gpu'] or hw['cpu']}, {hw['cores']} cores; {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
