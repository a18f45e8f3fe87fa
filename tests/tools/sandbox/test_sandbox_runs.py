"""Tests what a sandbox is for: code runs, is given files and gives some back, and says how it ended; and the pool
around it."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import typing_extensions

import tools
from tests.tools.sandbox.sandbox_traces import SMALL, homes, needs_sandboxes, processes
from tools.sandbox import Sandbox, SandboxConfig, SandboxFailed, SandboxUnavailable, check

pytestmark = pytest.mark.slow

together = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    async with await Sandbox.open(replace(SMALL, file_bytes=1 << 20, files=4, value_chars=100)) as made:
        yield made


@needs_sandboxes
@together
@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", "2"),
        ("x = 3\nx * 2", "6"),
        ("x = 3", None),
        ("None", None),
        ("", None),
        ("'é\\n'", "'é\\n'"),
        ("import sys\nsys.exit(0)", None),
        ("__name__", "'__main__'"),
        ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nA(1)", "A(x=1)"),
    ],
)
async def test_the_last_expression_is_the_value(sandbox: Sandbox, code: str, value: str | None) -> None:
    finished = await sandbox.run(code)
    assert (finished.exit, finished.value, finished.reason) == ("ok", value, "")


@needs_sandboxes
@together
async def test_output_and_errors_come_back_apart(sandbox: Sandbox) -> None:
    finished = await sandbox.run("import sys\nprint('é')\nprint('w', file=sys.stderr)\nprint('\\udcff', end='')")
    assert (finished.stdout, finished.stderr) == ("é\n\\udcff", "w\n")


@needs_sandboxes
@together
async def test_an_exception_is_told_with_the_codes_own_lines(sandbox: Sandbox) -> None:
    finished = await sandbox.run("def f():\n    return 1 / 0\nprint('before')\nf()")
    assert (finished.exit, finished.reason) == ("error", "ZeroDivisionError: division by zero")
    assert finished.stdout == "before\n"
    assert "line 2, in f\n    return 1 / 0" in finished.stderr and "line 4" in finished.stderr
    assert "worker" not in finished.stderr and "_evaluate" not in finished.stderr


@needs_sandboxes
@together
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def (", "SyntaxError"),
        ("import sys\nsys.exit('no')", "SystemExit: no"),
        ("import os\nos._exit(3)", "status 3"),
        ("class A:\n    def __repr__(self): raise OSError('mine')\nA()", "OSError: mine"),
        ("class E(Exception):\n    def __str__(self): raise OSError\nraise E", "E"),
        ("'\\0'.encode('x')", "LookupError"),
        ("\0", "null bytes"),
    ],
)
async def test_code_that_fails_says_why(sandbox: Sandbox, code: str, reason: str) -> None:
    finished = await sandbox.run(code)
    assert finished.exit == "error" and reason in finished.reason, finished


@needs_sandboxes
@together
async def test_a_long_value_is_cut_and_says_so(sandbox: Sandbox) -> None:
    finished = await sandbox.run("'a' * 1000")
    assert finished.value is not None and finished.value.endswith("… (cut from 1002 characters)")


@needs_sandboxes
@together
async def test_what_was_printed_before_a_limit_was_met_is_kept(sandbox: Sandbox) -> None:
    finished = await sandbox.run("print('kept')\nwhile True: pass", timeout_s=0.3)
    assert (finished.exit, finished.stdout) == ("timeout", "kept\n")
    assert "0.3 s" in finished.reason


@needs_sandboxes
@together
async def test_given_files_are_there_and_new_and_changed_ones_come_back(sandbox: Sandbox) -> None:
    given = {"same.txt": b"same", "data/change.bin": bytes(range(256))}
    finished = await sandbox.run(
        "content = open('data/change.bin', 'rb').read()\n"
        "open('data/change.bin', 'wb').write(content[::-1])\n"
        "kept_open = open('made.txt', 'w')\n"
        "kept_open.write('made')\n"
        "open('same.txt').read()",
        files=given,
    )
    assert (finished.exit, finished.value) == ("ok", "'same'")
    assert finished.files == {"data/change.bin": bytes(range(256))[::-1], "made.txt": b"made"}


@needs_sandboxes
@together
async def test_files_come_back_after_an_error_too(sandbox: Sandbox) -> None:
    finished = await sandbox.run("open('half.txt', 'w').write('half')\n1 / 0")
    assert (finished.exit, finished.files) == ("error", {"half.txt": b"half"})


@needs_sandboxes
@together
async def test_files_beyond_the_limits_are_named(sandbox: Sandbox) -> None:
    many = await sandbox.run("for n in range(6): open(f'{n}.txt', 'w').write('x')")
    assert sorted(many.files) == ["0.txt", "1.txt", "2.txt", "3.txt"]
    assert many.left_out == dict.fromkeys(["4.txt", "5.txt"], "more than 4 files")
    large = await sandbox.run("open('a', 'wb').write(bytes(1 << 20))\nopen('b', 'wb').write(b'x')")
    assert list(large.files) == ["a"] and len(large.files["a"]) == 1 << 20
    assert large.left_out == {"b": "more than 1048576 bytes in all"}


@needs_sandboxes
@together
@pytest.mark.parametrize(
    "files",
    [
        {"../up": b""},
        {"/etc/passwd": b""},
        {"": b""},
        {"a//b": b""},
        {"a\0b": b""},
        {"a\\b": b""},
        {"./a": b""},
        {"x" * 256: b""},
        {"/".join("abcdefghi"): b""},
        {"large": bytes((1 << 20) + 1)},
        {str(n): b"" for n in range(5)},
    ],
)
async def test_files_that_are_not_acceptable_are_refused(sandbox: Sandbox, files: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match="accepted"):
        await sandbox.run("1", files=files)


@needs_sandboxes
@together
@pytest.mark.parametrize("timeout_s", [0, -1, 3601, float("nan")])
async def test_a_timeout_out_of_its_range_is_refused(sandbox: Sandbox, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="accepted: more than 0"):
        await sandbox.run("1", timeout_s=timeout_s)


@needs_sandboxes
@together
@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 5\nasyncio.run(f())", "5"),
        ("import subprocess\nsubprocess.run(['echo', 'hi'], capture_output=True).stdout", "b'hi\\n'"),
        (
            "from concurrent.futures import ThreadPoolExecutor\n"
            "with ThreadPoolExecutor(3) as pool: x = list(pool.map(abs, [-1, -2]))\nx",
            "[1, 2]",
        ),
        ("import sqlite3\nsqlite3.connect('x.db').execute('select 7').fetchone()", "(7,)"),
        ("import tempfile\nwith tempfile.TemporaryFile() as f: n = f.write(b'abc')\nn", "3"),
        ("import sys\nsys.stdin.read()", "''"),
        ("import os\nos.getcwd()", "'/tmp/work'"),
        ("import zoneinfo\nzoneinfo.ZoneInfo('Europe/Berlin').key", "'Europe/Berlin'"),
    ],
)
async def test_ordinary_python_works(sandbox: Sandbox, code: str, value: str) -> None:
    finished = await sandbox.run(code)
    assert (finished.exit, finished.value) == ("ok", value), finished


@needs_sandboxes
@together
async def test_runs_at_once_do_not_meet(sandbox: Sandbox) -> None:
    runs = [sandbox.run(f"open('x', 'w').write('{n}')\nimport os\n(os.listdir('.'), {n})") for n in range(8)]
    assert [each.value for each in await asyncio.gather(*runs)] == [f"(['x'], {n})" for n in range(8)]


@needs_sandboxes
async def test_a_run_that_is_cancelled_leaves_nothing() -> None:
    sandbox = await Sandbox.open(SMALL)
    (home, *_) = homes(sandbox)
    run = asyncio.create_task(sandbox.run("while True: pass", timeout_s=60))
    while not sandbox._runs:
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not (home / "jail-1").exists() and "jail-1" not in processes(home).values()
    assert (await sandbox.run("1")).exit == "ok"
    await sandbox.close()
    assert processes(home) == {}


@needs_sandboxes
async def test_closing_ends_what_runs_and_what_waits_for_its_turn() -> None:
    sandbox = await Sandbox.open(replace(SMALL, running=1))
    (home, *_) = homes(sandbox)
    runs = [asyncio.create_task(sandbox.run("while True: pass", timeout_s=60)) for _ in range(3)]
    while not sandbox._runs:
        await asyncio.sleep(0)
    await sandbox.close()
    for run in runs:
        with pytest.raises(SandboxFailed, match="closed"):
            await run
    assert processes(home) == {} and not home.exists()
    await sandbox.close()
    with pytest.raises(SandboxFailed, match="closed"):
        await sandbox.run("1")


@needs_sandboxes
async def test_closing_while_sandboxes_are_being_started_leaves_nothing() -> None:
    sandbox = await Sandbox.open(replace(SMALL, warm=3))
    (home, *_) = homes(sandbox)
    await sandbox.close()
    assert processes(home) == {} and not home.exists()


@needs_sandboxes
async def test_a_sandbox_that_died_while_it_waited_is_replaced() -> None:
    async with await Sandbox.open(SMALL) as sandbox:
        (waiting,) = sandbox._warm
        process = await waiting
        signal.pidfd_send_signal(process._first, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PIDFD, process._outer, os.WEXITED | os.WNOWAIT)
        assert (await sandbox.run("1 + 1")).value == "2"


@needs_sandboxes
async def test_without_cgroups_a_sandbox_has_one_process_and_its_address_space_is_limited() -> None:
    config = replace(SMALL, cgroups=False)
    assert any("one process" in note for note in (await check(config)).notes)
    async with await Sandbox.open(config) as sandbox:
        forked = await sandbox.run("import os\nos.fork()")
        assert forked.exit == "error" and "PermissionError" in forked.reason
        spawned = await sandbox.run("import subprocess\nsubprocess.run(['true'])")
        assert spawned.exit == "error" and "PermissionError" in spawned.reason
        threaded = await sandbox.run(
            "import threading\nx = []\nt = threading.Thread(target=x.append, args=(1,))\nt.start()\nt.join()\nx"
        )
        assert threaded.value == "[1]"
        for hungry in ("x = bytearray(200 << 20)", "import mmap\nmmap.mmap(-1, 200 << 20)"):
            finished = await sandbox.run(hungry)
            assert finished.exit == "memory" or "Cannot allocate memory" in finished.reason, finished


@needs_sandboxes
async def test_code_imports_from_the_packages_it_was_given_and_cannot_change_them(public: Path) -> None:
    (public / "greeting.py").write_text("WORDS = 'hello'")
    async with await Sandbox.open(replace(SMALL, packages=(public,))) as sandbox:
        assert (await sandbox.run("import greeting\ngreeting.WORDS")).value == "'hello'"
        written = await sandbox.run("import greeting\nopen(greeting.__file__, 'w')")
        assert written.exit == "error" and "Read-only file system" in written.reason


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user can read: pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@needs_sandboxes
@pytest.mark.parametrize(
    ("without", "instead", "reason"),
    [
        ("--unshare-all", "--unshare-all --share-net", "the network is the host's"),
        ("--seccomp", "--sync-fd", "system calls are not filtered"),
        ("--as-pid-1", "", "other processes are seen"),
        ("--remount-ro", "--chdir", "can be written to"),
        ("--clearenv", "--setenv SECRET 1 --chdir /", "the environment is not clean"),
        ("--size", "--setenv SIZE", "the private folder is not limited"),
    ],
)
async def test_a_sandbox_that_lacks_a_layer_is_not_used(public: Path, without: str, instead: str, reason: str) -> None:
    weaker = public / "bwrap"
    weaker.write_text(
        '#!/bin/bash\nargs=()\nfor each in "$@"; do\n'
        f'  if [ "$each" = {without} ]; then args+=({instead}); else args+=("$each"); fi\ndone\n'
        'exec -c /usr/bin/bwrap "${args[@]}"\n'
    )
    weaker.chmod(0o755)
    support = await check(replace(SMALL, bubblewrap=weaker))
    assert not support.ok
    assert any(reason in each for each in support.reasons), support


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (SandboxConfig(bubblewrap=Path("/nowhere/bwrap")), "bubblewrap is not at /nowhere/bwrap"),
        (SandboxConfig(python=Path("/nowhere/python")), "/nowhere/python is not there"),
        (SandboxConfig(python=Path("/usr/bin/env")), "does not run"),
        (SandboxConfig(packages=(Path("/nowhere"),)), "/nowhere is not there"),
        (SandboxConfig(cgroup=Path("/nowhere")), "/nowhere is no cgroup v2 folder"),
    ],
)
async def test_what_lacks_is_said(config: SandboxConfig, reason: str) -> None:
    support = await check(config)
    assert not support.ok
    assert any(reason in each for each in support.reasons), support
    with pytest.raises(SandboxUnavailable, match="The Python sandbox is off"):
        await Sandbox.open(config)


@needs_sandboxes
async def test_a_folder_that_the_sandboxes_user_cannot_read_is_named(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root's sandboxes have another user than the server")
    tmp_path.chmod(0o700)
    support = await check(replace(SMALL, packages=(tmp_path,)))
    assert not support.ok and "closed to other users" in support.reasons[0]


_NEEDED = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "pydantic_monty", "opentelemetry")
_AS_NOBODY = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.path.insert(0, os.getcwd())
import asyncio
from tools.sandbox import Sandbox, SandboxConfig, check
async def main():
    print((await check()).reasons or "cgroups")
    async with await Sandbox.open(SandboxConfig(cgroups=False)) as sandbox:
        print((await sandbox.run("import os; os.getuid()")).value)
        print((await sandbox.run("open('/etc/shadow')")).reason)
asyncio.run(main())
"""


@needs_sandboxes
async def test_a_server_that_is_not_root_has_sandboxes_too(public: Path) -> None:
    system = Path("/usr/bin/python3")
    asked: list[str | Path] = [system, "-c", "import sys; print(sys.version_info[:2])"]
    if os.geteuid() != 0 or not system.exists():
        pytest.skip("it takes root to become another user, and a Python that this user can read")
    if subprocess.run(asked, capture_output=True, text=True).stdout.strip() != str(sys.version_info[:2]):
        pytest.skip("the system's Python is of another version than the packages here")
    for name in _NEEDED:
        for folder in importlib.import_module(name).__path__:
            shutil.copytree(folder, public / name, dirs_exist_ok=True)
    shutil.copy(typing_extensions.__file__, public)
    shutil.copytree(Path(tools.__file__).parent, public / "tools")
    told = subprocess.run([system, "-c", _AS_NOBODY], cwd=public, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    first, uid, reason = told.stdout.splitlines()
    assert first == "cgroups" or "systemd-run --user --scope" in first
    assert uid == "1000" and "FileNotFoundError" in reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"warm": 0},
        {"memory_bytes": 1},
        {"timeout_s": 0},
        {"timeout_s": 4000},
        {"processes": 0},
        {"file_bytes": 1 << 40},
    ],
)
def test_limits_out_of_their_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="accepted"):
        SandboxConfig(**wrong)
