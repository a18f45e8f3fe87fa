"""The interpreter for small pure code: what it computes, what it refuses, and its limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tools.sandbox import Pure, PureConfig, SandboxFailed

pytestmark = pytest.mark.slow

SMALL = PureConfig(timeout_s=0.3, memory_bytes=16 << 20, recursion=100, output_bytes=1000, value_chars=100)
together = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pure() -> AsyncIterator[Pure]:
    async with await Pure.open(SMALL) as made:
        yield made


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", "2"),
        ("x = [n * n for n in range(4)]\nx", "[0, 1, 4, 9]"),
        ("'a\\n'", "'a\\n'"),
        ("None", None),
        ("x = 1", None),
        ("def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nf(30)", str(265252859812191058636308480000000)),
    ],
)
@together
async def test_the_last_expression_is_the_value(pure: Pure, code: str, value: str | None) -> None:
    finished = await pure.run(code)
    assert (finished.exit, finished.value) == ("ok", value)


@together
async def test_what_is_printed_comes_back(pure: Pure) -> None:
    finished = await pure.run("print('one')\nprint('two')")
    assert finished.stdout == "one\ntwo\n"


@pytest.mark.parametrize(
    ("code", "exit_", "reason"),
    [
        ("while True: pass", "timeout", "0.3 s"),
        ("x = []\nwhile True: x.append('a' * 1000)", "memory", "16777216 bytes"),
        ("'a' * 10**10", "memory", "16777216 bytes"),
        ("9**9**9", "memory", "16777216 bytes"),
        ("def f(): return f()\nf()", "error", "RecursionError"),
        ("print('a' * 2000)", "output", "1000 bytes"),
        ("while True: print('a')", "output", "1000 bytes"),
        ("x = 10**1000\nwhile True: x * x", "timeout", "0.3 s"),
        ("def f():\n    while True:\n        try: f()\n        except BaseException: pass\nf()", "timeout", "0.3 s"),
        ("x = []\nwhile True:\n    try: x.append('a' * 10**5)\n    except BaseException: pass", "memory", "bytes"),
        ("f'{1:1000000000d}'", "memory", "16777216 bytes"),
        ("-" * 50_000 + "1", "error", "too deeply nested"),
        ("raise ValueError('a' * 10**6)", "error", "ValueError: aaa"),
        ("1 / 0", "error", "ZeroDivisionError: division by zero"),
        ("def (", "error", "SyntaxError"),
        ("import socket", "error", "ModuleNotFoundError"),
        ("import subprocess", "error", "ModuleNotFoundError"),
        ("open('/etc/passwd').read()", "error", "PermissionError"),
        ("import os\nos.environ['HOME']", "error", "not supported"),
    ],
)
@together
async def test_what_it_does_not_do_is_said(pure: Pure, code: str, exit_: str, reason: str) -> None:
    finished = await pure.run(code)
    assert finished.exit == exit_ and reason in finished.reason, finished
    assert finished.value is None and len(finished.stdout + finished.stderr) <= 1000


@together
async def test_a_long_value_is_cut_and_says_so(pure: Pure) -> None:
    finished = await pure.run("'a' * 1000")
    assert finished.value is not None and finished.value.endswith("… (cut from 1002 characters)")


@together
async def test_a_value_that_has_no_text_says_why(pure: Pure) -> None:
    assert "not shown: ValueError: Exceeds the limit" in ((await pure.run("10**5000")).value or "")


GROWING = "x = [0] * 1000\ny = [x] * 1000\nz = [y] * 1000\n"  # a few kilobytes, and a billion numbers once written out


@pytest.mark.parametrize("code", [GROWING + "z", "x = []\nfor _ in range(60): x = [x, x]\nx"])
@together
async def test_a_value_that_grows_when_it_is_taken_out_ends_its_own_process_alone(pure: Pure, code: str) -> None:
    finished = await pure.run(code)
    assert finished.exit in ("timeout", "memory") and "give a smaller one" in finished.reason
    assert (await pure.run("6 * 7")).value == "42"


@together
async def test_such_a_value_is_no_harm_where_it_stays(pure: Pure) -> None:
    assert (await pure.run(GROWING + "len(z)")).value == "1000"


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
async def test_no_process_is_left() -> None:
    before = family()
    async with await Pure.open(SMALL) as pure:
        assert (await pure.run("1")).value == "1" and (await pure.run("while True: pass")).exit == "timeout"
        ours = family() - before
        assert ours, "there is something to be left"
    async with asyncio.timeout(20):  # the interpreter itself goes when whom it works for has gone
        while any(Path(f"/proc/{each}").exists() for each in ours):
            await asyncio.sleep(0.01)


def family() -> set[int]:
    """The processes that descend from this one."""
    parents = dict[int, int]()
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(each.name)] = int((each / "stat").read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


@together
async def test_one_run_knows_nothing_of_the_one_before(pure: Pure) -> None:
    await pure.run("mark = 1")
    assert "NameError" in (await pure.run("mark")).reason


async def test_after_close_nothing_runs() -> None:
    pure = await Pure.open(SMALL)
    await pure.close()
    await pure.close()
    with pytest.raises(SandboxFailed, match="closed"):
        await pure.run("1")


@pytest.mark.parametrize("wrong", [{"timeout_s": 0}, {"timeout_s": 61}, {"running": 0}, {"output_bytes": 0}])
def test_limits_out_of_their_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="accepted"):
        PureConfig(**wrong)
