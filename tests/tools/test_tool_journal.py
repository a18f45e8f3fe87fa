"""A side effect happens at most once per call id, wherever the process is killed and however often it is resumed."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import tools.executor
from ponder import Context, tool
from tools.call_policy import CallPolicy, Decision, NeedsApproval
from tools.errors import JournalConflict
from tools.executor import Executor
from tools.journal import Entry, SqliteJournal
from tools.outcome import Call
from tools.registry import Registry
from tools.session import Session

TOOLS = str(Path(tools.executor.__file__).parent)
FOLDER: Path  # the child's, set when it starts


def _append(name: str, line: str) -> None:
    """One write to the end of a file: whole or not there, also when the next instruction is the last."""
    file = os.open(FOLDER / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{line}\n".encode())
    os.close(file)


@tool(permission="write", approval="never")
def deposit(ctx: Context, amount: int) -> str:
    """Has an effect that must not happen twice."""
    _append("effects", ctx.call_id)
    return f"deposited {amount}"


@tool(permission="write", approval="never", idempotent=True)
async def store(ctx: Context, amount: int) -> str:
    """Has an effect that may happen twice."""
    _append("stores", ctx.call_id)
    return f"stored {amount}"


CALLS = [Call(f"d{n}", "deposit", {"amount": n}) for n in range(3)] + [Call("s", "store", {"amount": 1})]


def _run(folder: Path) -> None:
    """Returns what a server does with a run, from the start or after a crash; what it came to believe is in a file."""
    global FOLDER
    FOLDER = folder
    registry = Registry()
    registry.add(deposit, store)
    executor = Executor(registry, CallPolicy(default=["write"]), SqliteJournal(folder / "journal.db"))

    async def approve(asked: NeedsApproval) -> Decision:
        return Decision("once", asked.arguments_hash)

    session = Session("ana", "run-1", approve=approve)

    async def go_on() -> None:
        for call in CALLS:
            (outcome,) = await executor.run([call], session)
            _append("believed", json.dumps([call.id, outcome.kind, outcome.text, outcome.replayed]))

    asyncio.run(go_on())
    _append("ended", "")


def _killed_at_line(folder: Path, at: int, count: Any) -> None:
    """Runs, and dies by SIGKILL as the `at`-th line of ours begins, in whichever thread that is."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith((TOOLS, __file__)):
            return None
        if event == "line":
            lines += 1
            if lines == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    _run(folder)
    sys.settrace(None)
    count.value = lines


def _lines(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text().splitlines() if (folder / name).exists() else []


def _check(folder: Path) -> Counter[str]:
    """No effect twice, nothing believed that is not so, and no belief that changes; returns how often each end was."""
    effects = Counter(_lines(folder, "effects"))
    assert all(count == 1 for count in effects.values()), effects
    ends, known = Counter[str](), dict[str, tuple[str, str]]()
    for line in _lines(folder, "believed"):
        call_id, kind, text, replayed = json.loads(line)
        assert known.setdefault(call_id, (kind, text)) == (kind, text)
        ends["replayed" if replayed else kind] += 1
        if call_id != "s":
            assert kind in ("ok", "interrupted")
            assert effects[call_id] == 1 or kind == "interrupted"
        else:
            assert kind == "ok"
    return ends


def any_line(root: Path) -> None:
    """Kills at lines drawn by chance until there were 60 kills, resuming until each run is through."""
    processes, chance = multiprocessing.get_context("fork"), random.Random(6)
    count = processes.Value("i", 0)
    (root / "whole").mkdir()
    whole = processes.Process(target=_killed_at_line, args=(root / "whole", 0, count))
    whole.start()
    whole.join()
    total = count.value
    assert whole.exitcode == 0 and total > 300, "an unharmed run passes many lines of ours"
    kills, number, ends = 0, 0, Counter[str]()
    while kills < 60:
        folder, number = root / str(number), number + 1
        folder.mkdir()
        while not _lines(folder, "ended"):
            at = chance.randint(1, total)  # a resumed run passes fewer lines, so it gets through before long
            process = processes.Process(target=_killed_at_line, args=(folder, at, count))
            process.start()
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
            kills += process.exitcode != 0
        ends += _check(folder)
    assert min(ends["ok"], ends["replayed"], ends["interrupted"]) > 0, f"each end was seen: {ends}"


def any_moment(root: Path) -> None:
    """Kills after times drawn by chance, so that SQLite's own work is cut too."""
    processes, chance = multiprocessing.get_context("fork"), random.Random(7)
    kills, number, ends = 0, 0, Counter[str]()
    while min(kills, number) < 20:
        folder, number, attempts = root / str(number), number + 1, 0
        folder.mkdir()
        while not _lines(folder, "ended"):
            attempts += 1
            process = processes.Process(target=_run, args=(folder,))
            process.start()
            process.join(chance.uniform(0, 0.03 * attempts))  # longer and longer, so that it gets through
            process.kill()
            process.join()
            kills += process.exitcode != 0
        ends += _check(folder)
    assert ends["ok"] > 0, f"some got through: {ends}"


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["any_line", "any_moment"])
def test_killed_and_resumed_no_effect_happens_twice(tmp_path: Path, killed: str) -> None:
    # In a process of its own, without threads, so that its children can be forked: they start in a millisecond.
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, __file__, killed, tmp_path],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def journal(tmp_path: Path) -> SqliteJournal:
    return SqliteJournal(tmp_path / "journal.db")


def test_of_two_that_begin_a_call_one_may_run_it(journal: SqliteJournal, tmp_path: Path) -> None:
    other = SqliteJournal(tmp_path / "journal.db")
    assert [each.begin("run", "c1", "print") for each in (journal, other, journal)] == [True, False, False]


def test_the_first_outcome_stands(journal: SqliteJournal) -> None:
    journal.begin("run", "c1", "print")
    assert journal.look("run", "c1", "print") == Entry("print", None)
    assert [journal.finish("run", "c1", "print", text) for text in ("first", "second")] == ["first", "first"]
    assert journal.look("run", "c1", "print") == Entry("print", "first")


def test_a_call_id_is_bound_to_its_call(journal: SqliteJournal) -> None:
    journal.finish("run", "c1", "print", "done")

    def finish(run: str, call_id: str, call: str) -> str:
        return journal.finish(run, call_id, call, "other")

    for asked in (journal.look, journal.begin, finish):
        with pytest.raises(JournalConflict, match="'c1' was already used in this run"):
            asked("run", "c1", "other print")
    assert journal.look("run 2", "c1", "other print") is None


def test_what_was_finished_is_there_after_a_restart_until_it_is_forgotten(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.db")
    journal.finish("run", "c1", "print", "done")
    journal.finish("other", "c1", "print", "done")
    journal.close()
    journal = SqliteJournal(tmp_path / "journal.db")
    assert journal.look("run", "c1", "print") == Entry("print", "done")
    assert journal.forget("run") == 1
    assert journal.look("run", "c1", "print") is None and journal.look("other", "c1", "print") is not None


if __name__ == "__main__":
    {"any_line": any_line, "any_moment": any_moment}[sys.argv[1]](Path(sys.argv[2]))
