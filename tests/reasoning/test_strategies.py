"""Strategies as plugins: found, given options, watched over; whatever one does, nothing is left behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Engine,
    EngineConfig,
    InvalidParameter,
    Sampling,
    Sequence,
    Span,
)
from reasoning.strategies import BUILT_IN, Strategies, StrategyError, StrategyTimeout, run_strategy
from reasoning.strategy import Context, Event, Options, Strategy, StrategyQuota, Yields, strategy
from reasoning.thinking import Markers, Piece, think_and_answer
from reasoning.tree import NodeAdded, NodeChosen, SearchEnded, TreeOptions, tree

OPTIONS: dict[str, dict[str, Any]] = {
    "budget": {"waits": 1, "max_tokens": 60}, "best_of_n": {"n": 3}, "self_consistency": {"n": 3, "compare": "text"},
    "deep_conf": {"n": 3, "warm_up": 2, "window": 8, "compare": "text"},
    "tree": {"beam": 2, "samples": 2, "depth": 3, "labels": {"a": 1.0, "b": 0.0}, "step_tokens": 5},
    "beam": {"width": 2},
}  # fmt: skip
# Tested in test_rag.py, tests/app/answering/test_fallback.py and test_deep_research.py.
ELSEWHERE = {"rag_token", "rag_sequence", "fallback", "deep_research"}
LAST = Piece("answer", "", 0, finish_reason="stop")


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[Engine]:
    async with await Engine.start(EngineConfig(str(model), dtype="float32", kv_blocks=1024)) as engine:
        yield engine


def context(engine: Engine, **fields: Any) -> Context:
    return Context(engine.tokenizer, Span(Sampling(seed=2), 80), Markers.of(engine.tokenizer), opened=True, **fields)


async def run(engine: Engine, chosen: Strategy[Any], options: object = None, **more: Any) -> list[Piece | Event]:
    """Everything that it yields. The sequence must then be as it was, or have the turn, and no fork be left."""
    prompt = engine.tokenizer.encode("<think>", special=True)
    ctx = more.pop("context", None) or context(engine)
    async with await engine.open(prompt) as seq:
        ended = False
        try:
            async with aclosing(run_strategy(chosen, seq, ctx, options or chosen.options(), **more)) as items:
                seen = [item async for item in items]
            ended = True
            return seen
        finally:
            assert (await engine.stats()).sequences == 1
            assert ended or seq.tokens == prompt
            await seq.generate_all(Span(max_tokens=1))  # it can go on


@pytest.mark.parametrize("name", sorted(OPTIONS))
async def test_ours_go_by_the_same_api(engine: Engine, name: str) -> None:
    strategies = Strategies()
    items = await run(engine, strategies.get(name), strategies.options(name, OPTIONS[name]))
    pieces = [item for item in items if isinstance(item, Piece)]
    assert pieces[-1].finish_reason in ("stop", "length")
    assert sum(piece.spent for piece in pieces) <= 80
    content = "".join(piece.text for piece in pieces if piece.part == "answer")
    assert content == content.lower() and "think>" not in content
    assert strategies.get(name).about
    assert {each.name for each in BUILT_IN} == set(OPTIONS) | ELSEWHERE


async def test_the_turn_is_in_the_sequence_when_it_is_over(engine: Engine) -> None:
    prompt = engine.tokenizer.encode("<think>", special=True)
    for name, given in OPTIONS.items():
        strategies = Strategies()
        async with await engine.open(prompt) as seq:
            items = run_strategy(strategies.get(name), seq, context(engine), strategies.options(name, given))
            pieces = [item async for item in items if isinstance(item, Piece)]
            written = seq.tokens[len(prompt) :]
        assert abs(sum(piece.spent for piece in pieces) - len(written)) <= 1  # a marker that ended it is not in there
    assert (await engine.stats()).blocks_used == 0


async def at_deadlines(
    engine: Engine, prompt: list[int], chosen: Strategy[Any], ctx: Context, options: object
) -> list[tuple[list[Piece], list[int]]]:
    """Runs a strategy with one deadline after the other. Returns the pieces and the turn of each run that was begun in
    time; one at least must have text, and nothing may be left."""
    ended: list[tuple[list[Piece], list[int]]] = []
    answered = False
    for deadline_ms in (1, 20, 40, 60, 80, 120, 160, 240, 320, 1_000, 5_000):
        if answered and deadline_ms >= 1_000:  # those are for a busy machine
            break
        async with await engine.open(prompt, deadline_s=deadline_ms / 1_000) as seq:
            try:
                items = [item async for item in run_strategy(chosen, seq, ctx, options)]
            except DeadlineExceeded:
                assert seq.tokens == prompt
            else:
                pieces = [item for item in items if isinstance(item, Piece)]
                ended.append((pieces, seq.tokens[len(prompt) :]))
                answered = answered or any(piece.text for piece in pieces)
        assert (await engine.stats()).sequences == 0
    assert answered
    return ended


@pytest.mark.parametrize("name", sorted(OPTIONS))
async def test_at_the_deadline_the_best_so_far_is_the_answer(engine: Engine, name: str) -> None:
    """Deadlines fall before the first token, between its parts, and after the end of quick answers."""
    strategies, prompt = Strategies(), engine.tokenizer.encode("<think>", special=True)
    chosen, options = strategies.get(name), strategies.options(name, OPTIONS[name])
    ctx = replace(context(engine), span=Span(Sampling(seed=2, temperature=1.0), 1_500, ignore_eos=True))
    for pieces, turn in await at_deadlines(engine, prompt, chosen, ctx, options):
        assert pieces[-1].finish_reason is not None
        assert abs(sum(piece.spent for piece in pieces) - len(turn)) <= 1


@pytest.mark.parametrize("wrote", [False, True])
async def test_a_plugin_that_expects_tokens_after_the_deadline_ends_there(engine: Engine, wrote: bool) -> None:
    @strategy("careless", Options)
    async def careless(seq: Sequence, context: Context, options: Options) -> Yields:
        if wrote:
            yield Piece("answer", "so far", 1)
        while True:
            result = await seq.generate_all(Span(max_tokens=1, ignore_eos=True))
            assert result.token_ids, "a token was asked for"

    async with await engine.open([5], deadline_s=0.05) as seq:
        items, running = [], run_strategy(careless, seq, context(engine), Options())
        if wrote:
            items = [item async for item in running]
            assert items == [Piece("answer", "so far", 1), Piece("answer", "", 0, finish_reason="deadline")]
        else:
            with pytest.raises(DeadlineExceeded, match="'careless' failed: AssertionError: a token was asked for"):
                await anext(running)
        assert seq.tokens == [5]


async def test_a_tree_without_a_task_writes_an_answer(engine: Engine) -> None:
    options = TreeOptions(beam=2, samples=3, depth=6, labels={"a": 1.0, "b": 0.0}, step_tokens=8, temperature=1.0)
    items = await run(engine, tree, options)
    (end,) = [item for item in items if isinstance(item, SearchEnded)]
    pieces = [item for item in items if isinstance(item, Piece)]
    assert "".join(piece.text for piece in pieces if piece.part == "answer").startswith(end.answer)
    assert not any(piece.text for piece in pieces if piece.part == "thinking")  # the tree takes its place


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_a_tree_that_finished_no_answer_writes_its_best_on(engine: Engine, depth: int) -> None:
    options = TreeOptions(beam=2, samples=2, depth=depth, labels={"a": 1.0, "b": 0.0}, step_tokens=3, temperature=1.0)
    prompt = engine.tokenizer.encode("<think>", special=True)
    async with await engine.open(prompt) as seq:
        items = [item async for item in run_strategy(tree, seq, context(engine), options)]
        written = seq.tokens[len(prompt) :]
    (end,) = [item for item in items if isinstance(item, SearchEnded)]
    assert (end.ended, end.solved) == ("depth", False)
    pieces = [item for item in items if isinstance(item, Piece)]
    spent = sum(piece.spent for piece in pieces)
    assert depth * 3 < spent <= 80 and abs(spent - len(written)) <= 1
    assert [piece.finish_reason for piece in pieces if piece.finish_reason is not None] == [pieces[-1].finish_reason]
    answer = "".join(piece.text for piece in pieces if piece.part == "answer")
    assert answer.startswith(end.answer) and len(answer) > depth * 3


@pytest.mark.parametrize("opened", [True, False])
async def test_a_trees_states_hold_no_control_token_and_its_path_is_the_answer(engine: Engine, opened: bool) -> None:
    """The model writes markers of thinking wherever it may: here it may not, so no level is spent on them."""
    tokenizer = engine.tokenizer
    prompt = tokenizer.encode("<think>" if opened else "Say:\n", special=True)
    for seed in range(6):
        options = TreeOptions(beam=2, samples=3, depth=12, labels={"a": 1.0, "b": 0.0}, step_tokens=8, seed=seed)
        ctx = replace(context(engine), opened=opened)
        async with await engine.open(prompt) as seq:
            items = [item async for item in run_strategy(tree, seq, ctx, options)]
            written = seq.tokens[len(prompt) :]
        (end,) = [item for item in items if isinstance(item, SearchEnded)]
        texts = {item.node: item.text for item in items if isinstance(item, NodeAdded)}
        chosen = [texts[item.node] for item in items if isinstance(item, NodeChosen)]
        pieces = [item for item in items if isinstance(item, Piece)]
        answer = "".join(piece.text for piece in pieces if piece.part == "answer")
        assert not any("think" in text for text in texts.values()) and "".join(chosen) == end.answer.replace("\n", "")
        assert answer.startswith(end.answer)
        markers = Markers.of(tokenizer)
        assert markers is not None and written.count(markers.closing) == 1
        behind = written[written.index(markers.closing) + 1 :]
        assert not tokenizer.control_ids.difference(tokenizer.eos_token_ids) & set(behind)
        if end.ended == "found":
            assert answer == end.answer


async def test_a_tree_is_not_solved_by_merely_ending(engine: Engine) -> None:
    """Without a checker a finished answer needs a value above the bar; without either the search goes on."""
    fields: dict[str, Any] = {"beam": 2, "samples": 3, "depth": 6, "labels": {"a": 1.0, "b": 0.0}, "step_tokens": 24}
    for value, bar in (("check", 0.9), ("read", 1.0)):
        items = await run(engine, tree, TreeOptions(**fields, value=value, solved_value=bar))
        (end,) = [item for item in items if isinstance(item, SearchEnded)]
        assert not end.solved and end.ended != "found"
    items = await run(engine, tree, TreeOptions(**fields, value="check", solved_value=0.5))  # what nobody judged is 0.5
    (end,) = [item for item in items if isinstance(item, SearchEnded)]
    assert end.solved and end.ended == "found"


@pytest.mark.parametrize("awaited", [False, True])
async def test_a_checker_decides_what_a_tree_has_solved(engine: Engine, awaited: bool) -> None:
    asked: list[str] = []

    def check(text: str) -> float:
        asked.append(text)
        return float("b" in text)

    async def later(text: str) -> float:
        await asyncio.sleep(0)
        return check(text)

    options = TreeOptions(beam=3, samples=4, depth=6, labels={"a": 1.0, "b": 0.0}, step_tokens=24, temperature=1.5)
    items = await run(engine, tree, options, context=context(engine, checker=later if awaited else check))
    (end,) = [item for item in items if isinstance(item, SearchEnded)]
    assert asked and len(set(asked)) == len(asked)
    assert end.solved == (end.ended == "found") == ("b" in end.answer and end.answer in asked)
    assert end.solved or not any("b" in text for text in asked)


async def test_a_tree_out_of_tokens_ends_with_what_it_has(engine: Engine) -> None:
    options = TreeOptions(beam=2, samples=2, depth=9, labels={"a": 1.0, "b": 0.0}, step_tokens=3, tokens=20)
    items = await run(engine, tree, options)
    (end,) = [item for item in items if isinstance(item, SearchEnded)]
    pieces = [item for item in items if isinstance(item, Piece)]
    assert end.ended == "tokens" and pieces[-1].finish_reason == "length"
    assert sum(piece.spent for piece in pieces) <= 27


def made(run: Any, options: type[Options] = Options) -> Strategy[Any]:
    return Strategy("mine", options, run, "a test")


async def raises(seq: Sequence, context: Context, options: Options) -> Yields:
    seq.fork(3)
    yield Piece("answer", "half", 1)
    await seq.generate_all(Span(max_tokens=4))
    raise ZeroDivisionError("by zero")


async def waits_forever(seq: Sequence, context: Context, options: Options) -> Yields:
    seq.fork(3)
    yield Piece("answer", "half", 1)
    await asyncio.Event().wait()


async def resists(seq: Sequence, context: Context, options: Options) -> Yields:
    yield Piece("answer", "half", 1)
    for _ in range(2):  # when it is told to end, and when the loop closes
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


async def talks_forever(seq: Sequence, context: Context, options: Options) -> Yields:
    while True:
        yield Event()


async def writes_forever(seq: Sequence, context: Context, options: Options) -> Yields:
    while True:
        yield Piece("answer", "a", 1)


async def yields_nonsense(seq: Sequence, context: Context, options: Options) -> Yields:
    yield "text"  # type: ignore[misc]  # what it must not do


async def has_no_end(seq: Sequence, context: Context, options: Options) -> Yields:
    yield Piece("answer", "a", 1)


async def goes_on(seq: Sequence, context: Context, options: Options) -> Yields:
    yield LAST
    yield Piece("answer", "a", 1)


async def forgets(seq: Sequence, context: Context, options: Options) -> Yields:
    seq.truncate(0)
    yield LAST


async def no_generator(seq: Sequence, context: Context, options: Options) -> Yields:
    raise RuntimeError("never awaited")


async def closes(seq: Sequence, context: Context, options: Options) -> Yields:
    seq.close()
    await seq.generate_all(Span(max_tokens=2))
    yield LAST


BAD = [
    (raises, "failed: ZeroDivisionError: by zero"), (talks_forever, "did not go on or end in time"),
    (writes_forever, "wrote 81 tokens; accepted: 80"), (yields_nonsense, "yielded str"),
    (has_no_end, "without a piece that has a finish reason"), (goes_on, "after the piece with a finish reason"),
    (forgets, "changed what stood"), (no_generator, "no async generator"),
    (waits_forever, "did not go on or end in time"), (resists, "did not go on or end in time"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "message"), BAD, ids=lambda each: getattr(each, "__name__", None))
async def test_a_bad_strategy_is_named_and_leaves_nothing(
    engine: Engine, bad: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reasoning.strategies.CLOSING_S", 0.05)
    with pytest.raises(StrategyError, match=message) as failed:
        await run(engine, made(bad), timeout_s=0.3)
    assert failed.value.strategy == "mine" and "a test" in str(failed.value)
    assert isinstance(failed.value, StrategyTimeout) == ("in time" in message)
    assert (await engine.stats()).blocks_used == 0


async def test_the_engines_own_errors_come_through(engine: Engine) -> None:
    async def too_long(seq: Sequence, context: Context, options: Options) -> Yields:
        await seq.generate_all(Span(max_tokens=100_000))
        yield LAST

    with pytest.raises(ContextLengthExceeded):
        await run(engine, made(too_long))


async def test_silence_is_not_waited_for_beyond_its_limit(engine: Engine) -> None:
    with pytest.raises(StrategyTimeout):
        await run(engine, made(waits_forever), silent_s=0.05)


@pytest.mark.slow
async def test_five_hundred_cancels_of_all_strategies_leak_no_block(engine: Engine) -> None:
    strategies = Strategies()
    names = sorted(OPTIONS)

    async def whole(at: int) -> None:
        name = names[at % len(names)]
        async with (
            await engine.open(engine.tokenizer.encode("<think>", special=True)) as seq,
            aclosing(
                run_strategy(strategies.get(name), seq, context(engine), strategies.options(name, OPTIONS[name]))
            ) as items,
        ):
            async for _ in items:
                pass

    cancelled = 0
    for at in range(500):
        task = asyncio.ensure_future(whole(at))
        for _ in range(at % 13):
            await engine.stats()
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        assert result is None or isinstance(result, asyncio.CancelledError), result
        cancelled += result is not None
    stats = await engine.stats()
    assert cancelled > 300 and (stats.blocks_used, stats.sequences) == (0, 0)


@dataclass(frozen=True, slots=True)
class Noted(Event):
    text: str


async def test_a_strategy_may_tell_events_of_its_own(engine: Engine) -> None:
    @strategy("noting", Options)
    async def noting(seq: Sequence, context: Context, options: Options) -> Yields:
        """Says what it does.

        At length.
        """
        yield Noted("begun")
        async for piece in think_and_answer(seq, context.span, context.markers, opened=context.opened):
            yield piece

    assert noting.about == "Says what it does."
    assert (await run(engine, noting))[0] == Noted("begun")


async def test_an_unknown_strategy_and_unknown_options_are_refused_by_name() -> None:
    strategies = Strategies()
    listed = "beam, best_of_n, budget, deep_conf, deep_research, fallback, rag_sequence, rag_token, self_c"
    with pytest.raises(InvalidParameter, match=listed) as refused:
        strategies.get("guess")
    assert refused.value.name == "strategy"
    for name, given, where in (
        ("budget", {"wait": 3}, "strategy_options.wait"), ("tree", {"beam": 0}, "strategy_options.beam"),
        ("best_of_n", {"n": "many"}, "strategy_options.n"), ("tree", {"beam": 10, "depth": 30}, "strategy_options"),
    ):  # fmt: skip
        with pytest.raises(InvalidParameter, match="strategy_options") as refused:
            strategies.options(name, given)
        assert refused.value.name == where


async def test_a_contradictory_budget_is_refused_before_anything_runs(engine: Engine) -> None:
    strategies = Strategies()
    options = strategies.options("budget", {"min_tokens": 50, "max_tokens": 40})
    with pytest.raises(InvalidParameter, match="min_tokens is 50; accepted: at most max_tokens, 40"):
        await run(engine, strategies.get("budget"), options)


async def test_a_tree_beyond_the_quota_is_refused(engine: Engine) -> None:
    for options, name in ((TreeOptions(nodes=300), "nodes"), (TreeOptions(beam=20, nodes=100), "beam")):
        with pytest.raises(InvalidParameter, match="accepted: at most") as refused:
            await run(engine, tree, options, context=context(engine, quota=StrategyQuota(branches=10, nodes=250)))
        assert refused.value.name == name
    ctx = context(engine)
    with pytest.raises(InvalidParameter, match="stop"):
        await run(engine, tree, TreeOptions(), context=replace(ctx, span=replace(ctx.span, stop=("x",))))


def test_names_are_unique_and_what_is_no_strategy_is_refused() -> None:
    strategies = Strategies()
    for offered, message in (
        (BUILT_IN[0], "taken by ponder"), (len, "no strategy"), (replace(BUILT_IN[0], name="Budget!"), "not 1 to 64"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            strategies.add(offered)
    assert {each.name for each in strategies} == set(OPTIONS) | ELSEWHERE


PLUGIN = """
from reasoning.strategy import Options, strategy
from reasoning.thinking import think_and_answer

@strategy("plain", Options)
async def plain(seq, context, options):
    async for piece in think_and_answer(seq, context.span, context.markers, opened=context.opened):
        yield piece
"""


async def test_installed_packages_offer_theirs_and_a_broken_one_is_told(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo_strategies.py").write_text(PLUGIN)
    (tmp_path / "demo_strategies_bad.py").write_text("import nothing_of_that_name")
    info = tmp_path / "demo_strategies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo-strategies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ponder.strategies]\nbad = demo_strategies_bad:x\ngood = demo_strategies:plain\nclash = reasoning.beam:beam\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    strategies = Strategies()
    strategies.load_entry_points()
    plain = strategies.get("plain")
    assert plain.origin == "entry point good (demo-strategies 1.0)"
    assert (await run(engine, plain))[-1].finish_reason is not None  # type: ignore[union-attr]  # a piece
    faults = strategies.faults
    assert "nothing_of_that_name" in faults["entry point bad (demo-strategies 1.0)"]
    assert "taken by ponder" in faults["entry point clash (demo-strategies 1.0)"]
    sys.modules.pop("demo_strategies", None)
