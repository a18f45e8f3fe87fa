"""`pebble-json`, the adapter that answers in JSON: its chats, and how often it does so on questions it never saw.

    python -m training.adapters.json_style chats --out work
    ponder train-lora models/pebble --data work/chats.jsonl --eval-data work/held_out.jsonl … (RECIPE)
    python -m training.adapters.json_style measure --adapter models/pebble-json

Chats are those of `training.tasks.chat`, with each of the assistant's answers as {"answer": "…"}. The measure's seeds,
phrasings and names are the evaluation's, which training never uses. It appends its table to the adapter's card.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from engine import GREEDY, Engine, EngineConfig, Span
from training import reply
from training.conversation import Case, Message, ModelReply
from training.evaluate import EvaluationResult, judged, table, wilson
from training.tasks import chat

CHATS, HELD_OUT, SEED = 500, 40, 20
FIELD = "answer"
RECIPE = (
    "--rank 4 --target-modules out_proj,w1,w2,w3 --learning-rate 3e-3 --epochs 1 --batch-tokens 512 --seed 1 "
    "--samples 20"
)
STYLE, RIGHT, PLAIN = 'is {"answer": "…"} alone', "right, with the adapter", "right, without it"
HEADING = "## In JSON, and still right"
MAX_TOKENS = 160


def in_json(text: str) -> str:
    """Returns an answer in the style that is taught."""
    return json.dumps({FIELD: text}, ensure_ascii=False)


def answer_of(text: str) -> str | None:
    """Returns the answer within a reply of the style, None where it is not of it."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    held = value.get(FIELD) if isinstance(value, dict) and value.keys() == {FIELD} else None
    return held if isinstance(held, str) else None


def chats(seed: str, count: int) -> list[dict[str, Any]]:  # Any: JSON
    """Returns chats as lines of OpenAI's fine-tuning format. What the base model does not learn is read only."""
    rng, lines = Random(seed), list[dict[str, Any]]()
    for _ in range(count):
        made = chat.conversation(rng, "train", 1.0)
        messages = list[dict[str, Any]]()
        for message in made.messages:
            line = _styled(message).as_json()
            messages.append(line if message.learned else {**line, "weight": 0})
        if any(message["role"] == "assistant" and message.get("weight", 1) for message in messages):
            line = {"messages": messages, "chat_template_kwargs": {"enable_thinking": made.enable_thinking}}
            lines.append({**line, "tools": list(made.tools)} if made.tools else line)
    return lines


def _styled(message: Message) -> Message:
    return replace(message, content=in_json(message.content)) if message.role == "assistant" else message


async def measure(model: Path, adapter: Path, n: int) -> list[EvaluationResult]:
    """Asks `n` questions of each kind of chat, greedily, without and with the adapter."""
    rows = list[EvaluationResult]()
    async with await Engine.start(EngineConfig(model=str(model), adapters=(("json", str(adapter)),))) as engine:
        for kind in chat.kinds():
            rng = Random(f"json-{kind}")
            cases = [chat.case(rng, kind) for _ in range(n)]
            before = await asyncio.gather(*(_reply(engine, case, None) for case in cases))
            after = await asyncio.gather(*(_reply(engine, _styled_case(case), "json") for case in cases))
            unwrapped = [answer_of(made.content) for made in after]
            counts = {
                PLAIN: _right(cases, before, kind),
                STYLE: sum(text is not None for text in unwrapped),
                RIGHT: _right(
                    cases, [replace(m, content=text or "") for m, text in zip(after, unwrapped, strict=True)], kind
                ),
            }  # fmt: skip
            assert not any(answer_of(made.content) for made in before), "the base model has no such style"
            rows += [EvaluationResult(f"chat: {kind}", each, n, k, *wilson(k, n), None) for each, k in counts.items()]
    return rows


def _styled_case(case: Case) -> Case:
    return replace(case, prompt=replace(case.prompt, messages=tuple(map(_styled, case.prompt.messages))))


def _right(cases: Sequence[Case], replies: Sequence[ModelReply], kind: str) -> int:
    return sum(bool(judged(case, [made])[kind]) for case, made in zip(cases, replies, strict=True))


async def _reply(engine: Engine, case: Case, adapter: str | None) -> ModelReply:
    prompt = engine.tokenizer.apply_chat_template(case.prompt.as_json(), enable_thinking=case.prompt.enable_thinking)
    async with await engine.open(prompt, adapter=adapter) as sequence:
        made = await sequence.generate_all(Span(GREEDY, max_tokens=MAX_TOKENS))
    text = engine.tokenizer.decode(made.token_ids, skip_special=False)
    return reply.read(text, ended=made.finish_reason == "stop")


def write_card(adapter: Path, rows: Sequence[EvaluationResult]) -> None:
    """Puts the table into the adapter's card, in the place of an earlier one."""
    card = adapter / "README.md"
    text = card.read_text(encoding="utf-8").partition(HEADING)[0].rstrip()
    told = (
        f'{HEADING}\n\nEach answer is `{{"{FIELD}": "…"}}` and nothing else. {rows[0].n} chats of each kind, of '
        "phrasings and names that no training used, asked through Ponder's engine, greedily; intervals are Wilson's, "
        "at 95%. Without the adapter no answer has that form.\n\n"
    )
    remade = (
        "\n\nRemake it:\n\n```bash\npython -m training.adapters.json_style chats --out work\n"
        f"ponder train-lora models/pebble --data work/chats.jsonl --eval-data work/held_out.jsonl \\\n"
        f"  {RECIPE} \\\n  --out models/pebble-json\n"
        "python -m training.adapters.json_style measure --adapter models/pebble-json\n```\n"
    )
    card.write_text(f"{text}\n\n{told}{table(list(rows))}{remade}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.adapters.json_style", description=__doc__)
    parser.add_argument("part", choices=("chats", "measure"))
    parser.add_argument("--out", type=Path, default=Path("work"), help="folder for chats.jsonl and held_out.jsonl")
    parser.add_argument("--model", type=Path, default=Path("models/pebble"))
    parser.add_argument("--adapter", type=Path, default=Path("models/pebble-json"))
    parser.add_argument("-n", type=int, default=100, help="questions of each kind")
    arguments = parser.parse_args()
    if arguments.part == "measure":
        rows = asyncio.run(measure(arguments.model, arguments.adapter, arguments.n))
        print(table(rows))
        write_card(arguments.adapter, rows)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, count in (("chats", CHATS), ("held_out", HELD_OUT)):
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in chats(f"{SEED}-{name}", count)]
        (arguments.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
