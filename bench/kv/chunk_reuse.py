"""Retrieved chunks in another order: time to the first token, agreement of answers, and the test of questions.

*Time*: prompts of six chunks of 400 tokens, all of which were read before in other orders; an engine with the prefix
cache alone and one that reuses chunks, in turns, so that a ratio is of one run. *Agreement*: the bundled model's
grounded questions and XQuAD's, each asked of both engines; the reusing one has read the same sources in another order,
each under its own label. *Questions*: planted ones that need several passages, and plain ones.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from app.runs.cross_chunk import needs_several
from bench import report
from bench.cpu import checkpoint
from bench.kv.cross_chunk_questions import sample
from engine import GREEDY, Engine, EngineConfig, InvalidParameter, Span
from engine.config import ChunkReuseConfig
from engine.kv_cache.chunk_reuse.find_chunks import find_chunks
from training import reply
from training.conversation import Case, ModelReply
from training.evaluate import wilson
from training.tasks import grounded

CHUNKS, CHUNK_TOKENS, HEAD, PAIRS = 6, 400, 16, 9
ANSWER = 60  # tokens
MEASURED = ChunkReuseConfig(HEAD, max_kl=1e9, min_agreement=0.0)  # whatever the gate says


async def _first_token_s(engine: Engine, tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> float:
    async with await engine.open(tokens, chunks=spans) as seq:
        began = time.perf_counter()
        await seq.generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True))
        return time.perf_counter() - began


async def first_tokens(model: Path, *, pairs: int = PAIRS, head: int = HEAD) -> dict[str, Any]:  # Any: plain JSON
    """Measures both engines in turns; seconds, and the ratio of each pair."""
    rng = Random(1)
    plain = EngineConfig(str(model), kv_blocks=600, probe_dir=tempfile.mkdtemp())
    chunked = replace(plain, chunk_reuse=replace(MEASURED, recompute_tokens=head))
    async with await Engine.start(plain) as before, await Engine.start(chunked) as after:
        some = range(100, min(before.vocab_size, 6000))
        chunks = [rng.choices(some, k=CHUNK_TOKENS) for _ in range(CHUNKS)]
        system = rng.choices(some, k=24)

        def prompt() -> tuple[list[int], list[tuple[int, int]]]:
            tokens, spans = list(system), []
            for chunk in rng.sample(chunks, CHUNKS):
                tokens += rng.choices(some, k=1)
                spans.append((len(tokens), len(tokens) + CHUNK_TOKENS))
                tokens += chunk
            return tokens + rng.choices(some, k=24), spans

        times: list[tuple[float, float]] = []
        for at in range(pairs + 2):  # the first two are read by both, and warm both up
            tokens, spans = prompt()
            pair = {}
            for engine in (before, after) if at % 2 else (after, before):
                pair[engine is after] = await _first_token_s(engine, tokens, spans if engine is after else ())
            if at >= 2:
                times.append((pair[False], pair[True]))
        copied = (await after.stats()).chunk_hit_tokens
    ratios = sorted(a / b for a, b in times)
    return {
        "model": model.name, "chunks": CHUNKS, "chunk_tokens": CHUNK_TOKENS, "recompute_tokens": head, "pairs": pairs,
        "prefix_cache_s": statistics.median(a for a, _ in times),
        "chunk_reuse_s": statistics.median(b for _, b in times),
        "ratio": statistics.median(ratios), "ratio_least": ratios[0], "ratio_most": ratios[-1], "copied_tokens": copied,
    }  # fmt: skip


_LINE = re.compile(r"^(?:\[S\d+\]|S\d+:) .*$", re.MULTILINE)


def in_another_order(case: Case) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:  # Any: JSON messages
    """Returns a case's messages, the same with its sources in reverse, each under its own label, and their lines."""
    messages = case.prompt.as_json()
    whole = "\0".join(message["content"] for message in messages)
    found = _LINE.findall(whole)
    backwards = iter(reversed(found))
    turned = _LINE.sub(lambda _: next(backwards), whole).split("\0")
    other = [{**message, "content": text} for message, text in zip(messages, turned, strict=True)]
    return messages, other, found


async def agreement(model: Path, cases: Sequence[Case], head: int) -> dict[str, Any]:  # Any: plain JSON
    """Asks both engines; returns the answers that are the same, and those that are right, with Wilson's intervals."""
    plain = EngineConfig(str(model), probe_dir=tempfile.mkdtemp())
    chunked = replace(plain, chunk_reuse=replace(MEASURED, recompute_tokens=head))
    same = tokens = agreed = 0
    right = Counter[bool]()
    async with await Engine.start(plain) as before, await Engine.start(chunked) as after:
        encode = before.tokenizer.encode
        for number, case in enumerate(cases):
            messages, other, lines = in_another_order(case)
            prompt, source = (
                before.tokenizer.apply_chat_template(each, enable_thinking=False) for each in (messages, other)
            )
            tenant = str(number)
            async with await after.open(source, tenant=tenant, chunks=find_chunks(source, lines, encode)) as seq:
                await seq.generate_all(Span(GREEDY, max_tokens=32, ignore_eos=True))
            said = []
            for engine, spans in ((before, ()), (after, find_chunks(prompt, lines, encode))):
                async with await engine.open(prompt, tenant=tenant, chunks=spans) as seq:
                    result = await seq.generate_all(Span(GREEDY, max_tokens=ANSWER))
                made: ModelReply = reply.read(engine.tokenizer.decode(result.token_ids, skip_special=False), ended=True)
                right[engine is after] += all(value is True for value in case.judge([made]).values())
                said.append(result.token_ids)
            same += said[0] == said[1]
            first = next((at for at, (a, b) in enumerate(zip(*said, strict=False)) if a != b), min(map(len, said)))
            agreed, tokens = agreed + first, tokens + max(map(len, said))
        copied = (await after.stats()).chunk_hit_tokens
    n = len(cases)
    return {
        "recompute_tokens": head, "n": n, "same_answers": same, "same_answers_interval": wilson(same, n),
        "right": right[False], "right_reused": right[True], "right_interval": wilson(right[False], n),
        "right_reused_interval": wilson(right[True], n), "tokens_until_they_differ": agreed / tokens,
        "copied_tokens": copied,
    }  # fmt: skip


async def gate(model: Path, head: int) -> dict[str, Any]:  # Any: plain JSON
    """Starts an engine with the default limits; returns the gate's measurement, and whether it refuses."""
    kept = Path(tempfile.mkdtemp())
    config = EngineConfig(str(model), probe_dir=str(kept), chunk_reuse=ChunkReuseConfig(head))
    refused = False
    try:
        async with await Engine.start(config):
            pass
    except InvalidParameter:
        refused = True
    (record,) = kept.glob("kv-chunks-*.json")
    found = json.loads(record.read_text("utf-8"))
    return {
        "recompute_tokens": head,
        "refused": refused,
        **{name: found[name] for name in ("tokens", "kl", "same_top1", "answers", "same_answers")},
    }


def questions(n: int = 2000) -> dict[str, Any]:  # Any: plain JSON
    """Counts the planted questions that are refused, by family, and the plain ones that are let through."""
    rng = Random(1)
    asked, refused = Counter[str](), Counter[str]()
    for _ in range(n):
        one = sample(rng, planted=True)
        asked[one.family] += 1
        refused[one.family] += needs_several(one.question, one.passages) is not None
    plain = sum(
        needs_several(one.question, one.passages) is None for one in (sample(rng, planted=False) for _ in range(n))
    )
    found = {family: [refused[family], asked[family]] for family in sorted(asked)}
    total = refused.total()
    return {"families": found, "refused": total, "n": n, "interval": wilson(total, n), "plain_let_through": plain}


async def measure(model: Path, n: int = 100) -> dict[str, Any]:  # Any: plain JSON
    """Measures all three, with `n` questions of a kind, and the time of a random model of Qwen3-0.6B's shape, too."""
    made: dict[str, Any] = {"questions": questions(), "gate": [await gate(model, head) for head in (8, 16, 32, 64)]}
    rng = Random(7)
    facts = [grounded.case(rng, passages=6) for _ in range(n)]
    prose = [grounded.prose_case(rng, passages=6) for _ in range(n)]
    made["agreement"] = {
        "made-up facts, 6 passages": await agreement(model, facts, HEAD),
        "real prose, 6 passages": await agreement(model, prose, HEAD),
    }
    xquad = Path(os.environ.get("PONDER_SHARED", report.ROOT.parent / "shared")) / "data/retrieval/xquad_en_dev.json"
    if xquad.is_file():
        asked = grounded.xquad_cases(xquad, n, rng)
        made["agreement"] |= {f"XQuAD, 3 paragraphs, {head}": await agreement(model, asked, head) for head in (16, 64)}
    shaped = checkpoint.write(Path("build/cpu/model"), model, checkpoint.SHAPES["0.6b"])
    made["first_tokens"] = [await first_tokens(each, head=head) for each in (model, shaped) for head in (16, 64)]
    return made


def tables(made: dict[str, Any]) -> list[str]:  # Any: plain JSON
    """Returns the result as lines of Markdown."""
    lines = [
        "| gate: tokens computed of a chunk | KL, nats | same likeliest token | same answers | |",
        "|" + "---|" * 5,
    ]
    for row in made["gate"]:
        said = "refused" if row["refused"] else "let through"
        shares = f"{row['same_top1']:.2%} | {row['same_answers']:.0%} of {row['answers']}"
        lines.append(f"| {row['recompute_tokens']} | {row['kl']:.4f} | {shares} | {said} |")
    lines += ["", "| questions | n | computed | same answers | right: exact, reused |", "|" + "---|" * 5]
    for name, row in made["agreement"].items():
        low, high = row["same_answers_interval"]
        lines.append(
            f"| {name} | {row['n']} | {row['recompute_tokens']} | {row['same_answers'] / row['n']:.0%} "
            f"({low:.0%}–{high:.0%}) | {row['right'] / row['n']:.0%}, {row['right_reused'] / row['n']:.0%} |"
        )
    lines += ["", "| model | computed | prefix cache, s | chunks reused, s | ratio (least, most) |", "|" + "---|" * 5]
    for row in made["first_tokens"]:
        lines.append(
            f"| {row['model']} | {row['recompute_tokens']} | {row['prefix_cache_s']:.3f} | {row['chunk_reuse_s']:.3f} "
            f"| {row['ratio']:.1f} ({row['ratio_least']:.1f}, {row['ratio_most']:.1f}) |"
        )
    asked = made["questions"]
    lines += ["", f"planted questions refused: {asked['refused']} of {asked['n']}; plain ones let through: "
              f"{asked['plain_let_through']} of {asked['n']}"]  # fmt: skip
    return lines
