"""Running calls: every end is an outcome the model reads; order, time, cancellation, events, toolsets."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ponder import Context, Depends, NotAnswered, Question, Source, Tool, Toolset, tool
from tests.tools.executor_bench import Bench, add, broken, save
from tools.context import FileContent
from tools.outcome import Call, CallError, CallOutput, CallProgress, CallResult, CallStarted, Event
from tools.result import Artifact, Artifacts


@tool(permission="read", timeout=0.05)
async def slow() -> None:
    """Never ends."""
    await asyncio.Event().wait()


@tool(permission="none")
async def broken_async(how: str) -> None:
    """Fails."""
    if how == "exit":
        raise SystemExit(3)
    if how == "cancel":
        raise asyncio.CancelledError
    raise TimeoutError("of its own")


async def test_a_call_that_went_well_is_told_from_start_to_result() -> None:
    bench = Bench(add)
    outcome = await bench.one("add", a=1, b=2)
    assert (outcome.kind, outcome.text, outcome.result.value) == ("ok", "3", 3)
    assert bench.events == [CallStarted("c1", "add", {"a": 1, "b": 2}, 0), CallResult("c1", "add", outcome, 0)]


async def test_arguments_may_be_the_text_that_the_model_wrote() -> None:
    bench = Bench(add)
    good, torn, array, nan = await bench.run(
        ("add", '{"a": 1, "b": 2}'), ("add", '{"a": 1'), ("add", "[1]"), ("add", '{"a": NaN}')
    )
    assert good.text == "3"
    assert [each.kind for each in (torn, array, nan)] == ["bad_arguments"] * 3
    assert "must be a JSON object, and are [1]" in array.text


async def test_an_unknown_tool_is_answered_with_those_near_to_it() -> None:
    bench = Bench(add, save)
    near, far = await bench.run(("Sav", {}), ("zzz", {}))
    assert (near.kind, near.text) == ("unknown_tool", "There is no tool 'Sav'; did you mean save?")
    assert far.text == "There is no tool 'zzz'; there are: add, save."


async def test_bad_arguments_are_answered_field_by_field_and_nothing_runs() -> None:
    outcome = await Bench(add).one("add", a="1", c=2)
    assert outcome.kind == "bad_arguments"
    for field in ("a: input should be a valid integer", "b: it is required", "c: there is no such argument"):
        assert field in outcome.text


@pytest.mark.parametrize(
    ("name", "how", "kind", "said"),
    [
        ("broken", "retry", "retry", 'Call again, as the tool says: <untrusted from="broken">\nGive a city.'),
        ("broken", "", "error", "KeyError: 'lost'"),
        ("broken", "exit", "error", "it called for an exit: SystemExit(3)"),
        ("broken", "stop", "error", "StopIteration"),
        ("broken_async", "exit", "error", "it called for an exit: SystemExit(3)"),
        ("broken_async", "cancel", "error", "it was cancelled from within"),
        ("broken_async", "", "error", "TimeoutError: of its own"),
    ],
)
async def test_whatever_a_tool_raises_becomes_an_outcome(name: str, how: str, kind: str, said: str) -> None:
    bench = Bench(broken, broken_async)
    outcome = await bench.one(name, how=how)
    assert outcome.kind == kind and said in outcome.text and "Traceback" not in outcome.text
    assert isinstance(bench.events[-1], CallError)
    assert outcome.text.count("</untrusted>") == (1 if name == "broken" else 0)


async def test_a_tool_that_takes_too_long_is_stopped_and_its_limit_told() -> None:
    outcome = await Bench(slow).one("slow")
    assert (outcome.kind, outcome.text) == ("timeout", "slow took longer than its 0.05 s and was stopped.")


async def test_a_plain_function_that_is_stopped_sees_it_and_reports_no_more() -> None:
    seen, wait = threading.Event(), threading.Event()

    @tool(permission="write", timeout=0.5)
    def stuck(ctx: Context) -> None:
        """Waits."""
        wait.wait(30)
        ctx.progress("too late")
        if ctx.cancelled:
            seen.set()

    bench = Bench(stuck)
    outcome = await bench.one("stuck")
    wait.set()
    assert await asyncio.to_thread(seen.wait, 30)
    assert "It may or may not have had its effect." in outcome.text
    assert [type(event) for event in bench.events] == [CallStarted, CallError]


def test_a_plain_function_that_never_returns_does_not_hold_up_the_end_of_the_process() -> None:
    code = """
import threading
from ponder import ScriptedModel, calls, tool
import asyncio

@tool(timeout=0.05)
def stuck() -> None:
    "Never ends."
    threading.Event().wait()

log = asyncio.run(ScriptedModel([calls("stuck"), "Done."]).run(stuck))
print(log.called[0][1].kind)
"""
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["timeout"]


async def test_a_tool_that_will_not_stop_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.invocation.GRACE_S", 0.05)
    free = asyncio.Event()

    @tool(permission="none", timeout=0.05)
    async def stubborn() -> None:
        """Ignores that it is cancelled."""
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue

    bench = Bench(stubborn, add)
    assert (await bench.one("stubborn")).kind == "timeout"
    assert (await bench.one("add", a=1, b=1)).text == "2"
    free.set()


async def test_calls_that_only_read_run_at_the_same_time() -> None:
    barrier = asyncio.Barrier(3)

    @tool(permission="read")
    async def meet(n: int) -> int:
        """Waits for the others."""
        await barrier.wait()
        return n

    outcomes = await Bench(meet).run(*(("meet", {"n": n}) for n in range(3)))
    assert [outcome.result.value for outcome in outcomes] == [0, 1, 2]


async def test_calls_with_effects_keep_their_order_and_are_never_at_the_same_time() -> None:
    log = list[str]()

    def made(name: str, permission: Any) -> Tool:
        @tool(name=name, permission=permission)
        async def act(n: int) -> None:
            """Acts."""
            log.append(f"{name}{n} begins")
            for _ in range(5):
                await asyncio.sleep(0)
            log.append(f"{name}{n} ends")

        return act

    bench = Bench(made("look", "read"), made("put", "write"), made("get", "network"))
    wanted = ["look", "look", "put", "get", "look", "put"]
    outcomes = await bench.run(*((name, {"n": n}) for n, name in enumerate(wanted)))
    assert [outcome.call_id for outcome in outcomes] == [f"c{n}" for n in range(1, 7)]
    assert sorted(log[:4]) == ["look0 begins", "look0 ends", "look1 begins", "look1 ends"]
    after = ("put2", "get3", "look4", "put5")
    assert log[4:] == [f"{each} {what}" for each in after for what in ("begins", "ends")]


async def test_a_cancelled_run_cancels_its_tools() -> None:
    running, begun, stopped = asyncio.Event(), set[str](), list[str]()

    @tool(permission="none")
    async def wait(name: str) -> None:
        """Waits."""
        try:
            begun.add(name)
            if begun == {"a", "b"}:
                running.set()
            await asyncio.Event().wait()
        finally:
            stopped.append(name)

    bench = Bench(wait)
    task = asyncio.create_task(bench.run(("wait", {"name": "a"}), ("wait", {"name": "b"})))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(stopped) == ["a", "b"]
    assert not any(isinstance(event, CallResult | CallError) for event in bench.events)


async def test_progress_and_output_are_heard_in_order_from_threads_too() -> None:
    @tool(permission="none")
    def count(ctx: Context) -> Iterator[str]:
        """Counts."""
        for n in range(3):
            ctx.progress("counting", n, 3)
            yield f"{n} "

    @tool(permission="none")
    async def count_async(ctx: Context) -> AsyncIterator[str]:
        """Counts."""
        for n in range(3):
            ctx.progress("counting", n, 3)
            yield f"{n} "

    for name in ("count", "count_async"):
        bench = Bench(count, count_async)
        assert (await bench.one(name)).text == "0 1 2 "
        told = [each.step.done if isinstance(each, CallProgress) else each.text for each in bench.events[1:-1]]  # type: ignore[union-attr]  # no other events come between
        assert told == [0, "0 ", 1, "1 ", 2, "2 "]
        assert all(isinstance(each, CallProgress | CallOutput) for each in bench.events[1:-1])


async def test_a_streaming_tool_that_yields_no_string_is_an_error() -> None:
    @tool(permission="none")
    async def count() -> AsyncIterator[int]:
        """Counts."""
        yield 1

    assert "yields strings, and this one yielded int" in (await Bench(count).one("count")).text


@pytest.mark.parametrize("plain", [True, False])
async def test_a_streaming_tool_that_is_stopped_is_closed(plain: bool) -> None:
    go, closed = threading.Event(), threading.Event()

    @tool(name="count", timeout=0.5)
    def count() -> Iterator[str]:
        """Counts."""
        try:
            yield "0"
            go.wait(30)
            while True:
                yield "1"
        finally:
            closed.set()

    @tool(name="count", timeout=0.5)
    async def count_async() -> AsyncIterator[str]:
        """Counts."""
        try:
            yield "0"
            await asyncio.Event().wait()
        finally:
            closed.set()

    bench = Bench(count if plain else count_async)
    assert (await bench.one("count")).kind == "timeout"
    go.set()
    assert await asyncio.to_thread(closed.wait, 30)


async def test_a_listener_that_fails_does_not_fail_the_call() -> None:
    def listen(event: Event) -> None:
        raise RuntimeError("the page is gone")

    bench = Bench(add)
    (outcome,) = await bench.executor.run([Call("c1", "add", {"a": 1, "b": 2})], bench.session, listen)
    assert outcome.text == "3"


async def test_sources_are_part_of_the_result_each_once() -> None:
    @tool(permission="read")
    def read(ctx: Context) -> str:
        """Reads."""
        source = Source("Dams", url="https://example.org/dams", start=3, end=9)
        return f"[{ctx.cite(source)}] [{ctx.cite(Source('Other'))}] [{ctx.cite(source)}]"

    outcome = await Bench(read).one("read")
    assert outcome.result.value == "[1] [2] [1]"
    assert [source.title for source in outcome.result.sources] == ["Dams", "Other"]


async def test_a_question_reaches_the_person_and_its_time_does_not_count() -> None:
    asked = asyncio.Event()

    @tool(permission="none", timeout=0.5)
    async def book(ctx: Context) -> str:
        """Books."""
        return await ctx.ask("Which?", ["red", "blue"])

    async def ask(question: Question) -> str:
        assert (question.tool, question.text, question.choices) == ("book", "Which?", ("red", "blue"))
        timer = asyncio.get_running_loop().call_later(1.0, asked.set)  # twice the tool's own time
        await asked.wait()
        timer.cancel()
        return "blue"

    bench = Bench(book)
    bench.session.ask = ask
    assert (await bench.one("book")).text == "blue"


async def test_time_after_the_answer_counts_again() -> None:
    @tool(permission="none", timeout=0.05)
    async def book(ctx: Context) -> str:
        """Books."""
        await ctx.ask("Which?")
        await asyncio.Event().wait()
        return ""

    async def ask(_: Question) -> str:
        return "blue"

    bench = Bench(book)
    bench.session.ask = ask
    assert (await bench.one("book")).kind == "timeout"


@pytest.mark.parametrize("answer", [None, "green", "nobody"])
async def test_a_question_without_an_answer_is_told_to_the_model(answer: str | None) -> None:
    @tool(permission="none")
    async def book(ctx: Context) -> str:
        """Books."""
        return await ctx.ask("Which?", ["red", "blue"])

    async def ask(_: Question) -> str:
        if answer == "nobody":
            raise NotAnswered("The person left.")
        assert answer is not None
        return answer

    bench = Bench(book)
    bench.session.ask = None if answer is None else ask
    outcome = await bench.one("book")
    said = {None: "nobody can be asked", "green": "accepted: red, blue", "nobody": "The person left."}[answer]
    assert outcome.kind == "error" and said in outcome.text


async def test_what_the_host_provides_is_injected_and_made_for_each_call() -> None:
    class Store:
        def __init__(self, user: str) -> None:
            self.user = user

    @tool(permission="none")
    def whose(store: Depends[Store]) -> str:
        """Tells."""
        return store.user

    bench = Bench(whose)
    assert "Nothing was provided for" in (await bench.one("whose")).text
    bench.registry.provide(Store, factory=lambda ctx: Store(f"{ctx.user} in {ctx.call_id}"))
    assert (await bench.one("whose")).text == "ana in c2"


class Diary(Toolset):
    def __init__(self) -> None:
        self.log = list[str]()
        self.hold = asyncio.Event()
        self.inside = asyncio.Event()
        self.fails = False

    async def open(self) -> None:
        if self.fails:
            raise OSError("no disk")
        self.log.append("open")

    async def close(self) -> None:
        self.log.append("close")

    @tool(permission="write", approval="never")
    async def write(self, ctx: Context, text: str) -> int:
        """Writes."""
        self.log.append(f"{ctx.user}: {text}")
        return len(self.log)

    @tool(permission="read")
    async def wait(self) -> None:
        """Waits."""
        self.inside.set()
        await self.hold.wait()


async def test_a_toolsets_tools_share_what_was_opened_once() -> None:
    diary = Diary()
    bench = Bench(diary)
    assert [(await bench.one("write", text=text)).result.value for text in "ab"] == [2, 3]
    await bench.registry.close()
    assert diary.log == ["open", "ana: a", "ana: b", "close"]
    assert list(bench.registry.get("write").parameters["properties"]) == ["text"]  # type: ignore[union-attr]  # it is there


async def test_a_toolset_that_goes_closes_after_its_last_call() -> None:
    diary = Diary()
    bench = Bench(diary)
    task = asyncio.create_task(bench.one("wait"))
    await diary.inside.wait()
    await diary.leave()
    assert diary.log == ["open"]
    diary.hold.set()
    assert (await task).ok and diary.log == ["open", "close"]


async def test_a_toolset_that_was_never_used_is_never_closed() -> None:
    diary = Diary()
    await Bench(diary).registry.close()
    assert diary.log == []


async def test_a_toolset_that_cannot_open_is_tried_again_at_the_next_call() -> None:
    diary = Diary()
    diary.fails = True
    bench = Bench(diary)
    assert "Diary could not be opened: no disk" in (await bench.one("write", text="a")).text
    diary.fails = False
    assert (await bench.one("write", text="a")).ok


def test_a_tool_of_a_toolset_takes_self() -> None:
    from ponder import ToolDeclarationError

    def declare(kind: Callable[..., Any]) -> None:
        @tool(permission="none")
        def inner(a: int) -> None:
            """Does."""

        type("Bad", (Toolset,), {"inner": kind(inner)})

    for kind in (staticmethod, classmethod):
        with pytest.raises(ToolDeclarationError, match=f"Bad.inner is a {kind.__name__}"):
            declare(kind)


@tool(permission="read", cache=60)
def draw(ctx: Context, count: int, size: int = 1) -> str:
    """Draws."""
    return " ".join(str(ctx.attach(f"{number}.svg", "x" * size)) for number in range(count))


async def test_files_of_a_call_are_kept_by_the_host_and_named_to_the_model() -> None:
    bench, kept = Bench(draw), list[tuple[str, list[FileContent]]]()

    async def keep(call_id: str, files: Sequence[FileContent]) -> Artifacts:
        kept.append((call_id, list(files)))
        return Artifacts((Artifact("art_1", "0.svg", 3, "image/svg+xml", 1),), ("1.svg is not kept: no room.",))

    alone = await bench.one("draw", count=1)
    assert (alone.result.text, alone.result.artifacts) == ("False", ())  # nobody keeps it
    bench.session.keep_files = keep
    made = await bench.one("draw", count=2)
    assert kept == [("c2", [FileContent("0.svg", b"x"), FileContent("1.svg", b"x")])]
    said = "True True\nFiles that the person sees: 0.svg (version 3, 1 bytes).\n1.svg is not kept: no room."
    assert made.result.text == said and made.result.artifacts[0].id == "art_1"
    again = await bench.one("draw", count=2)  # a result with files is another chat's too if it is kept
    assert not again.cached and len(kept) == 2
    replayed = await bench.executor.run([Call("c2", "draw", {"count": 2})], bench.session)
    assert replayed[0].replayed and replayed[0].result.artifacts == made.result.artifacts and len(kept) == 2


@pytest.mark.parametrize(("count", "size", "limit"), [(17, 1, "16 files"), (1, (8 << 20) + 1, "accepted: 8388608")])
async def test_a_call_with_too_much_to_attach_fails_with_the_limit(count: int, size: int, limit: str) -> None:
    bench = Bench(draw)

    async def keep(call_id: str, files: Sequence[FileContent]) -> Artifacts:
        raise AssertionError("nothing is kept of a call that failed")

    bench.session.keep_files = keep
    failed = await bench.one("draw", count=count, size=size)
    assert failed.kind == "error" and limit in failed.text
