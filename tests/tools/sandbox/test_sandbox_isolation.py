"""Code that reaches for sockets, files, secrets, processes or an earlier run gets none; a forged report is no use."""

from __future__ import annotations

import asyncio
import os
import pwd
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.sandbox.sandbox_traces import COLUMN, SMALL, SYSCALL, Watched, needs_sandboxes, processes
from tools.sandbox import Sandbox

pytestmark = [needs_sandboxes, pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


async def test_tcp_does_not_reach_a_server_on_this_machine(sandbox: Watched, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), timeout=5):  # it is there
        listener.accept()[0].close()
    finished = await sandbox.run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))")
    assert finished.exit == "error" and "PermissionError" in finished.reason
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()


async def test_an_abstract_socket_of_this_machine_is_not_reached(sandbox: Watched) -> None:
    name = f"\0ponder-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        finished = await sandbox.run(f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})")
    assert finished.exit == "error" and "PermissionError" in finished.reason


async def test_the_apps_database_is_not_there(sandbox: Watched, tmp_path: Path) -> None:
    database = tmp_path / "ponder.db"
    database.write_text("everybody's chats")
    database.chmod(0o666)
    parents = [str(parent) for parent in database.parents][:-1]
    finished = await sandbox.run(
        f"import os\nprint([each for each in {[str(database), *parents]!r} if each != '/tmp' and os.path.exists(each)])"
    )
    assert finished.stdout == "[]\n"


async def test_secrets_of_the_server_are_found_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hunter2-c0ffee"
    monkeypatch.setenv("PONDER_SECRET", secret)
    async with await Sandbox.open(SMALL) as sandbox:
        finished = await sandbox.run(
            "import os\n"
            "seen = [repr(dict(os.environ))]\n"
            "for folder, folders, files in os.walk('/proc'):\n"
            "    if folder == '/proc': folders[:] = [each for each in folders if each.isdigit()]\n"
            "    for name in ('environ', 'cmdline', 'mountinfo', 'maps', 'cgroup'):\n"
            "        if name in files:\n"
            "            try: seen.append(open(os.path.join(folder, name), errors='replace').read())\n"
            "            except OSError: pass\n"
            "print(len(seen) > 5, sorted(os.environ))\n"
            "print(''.join(seen))"
        )
    assert finished.exit == "ok"
    first, _, all_of_it = finished.stdout.partition("\n")
    assert first == "True ['HOME', 'LANG', 'PATH', 'PWD', 'TMPDIR']"
    # The code itself is not among what was read, so this can only be the server's.
    assert secret not in all_of_it and "PONDER" not in all_of_it


async def test_descriptors_of_the_server_are_not_inherited(tmp_path: Path) -> None:
    (tmp_path / "open").write_text("a secret in an open file")
    with open(tmp_path / "open") as file:
        os.set_inheritable(file.fileno(), True)
        async with await Sandbox.open(SMALL) as sandbox:
            finished = await sandbox.run(
                "import os\n"
                "links = [f'/proc/self/fd/{each}' for each in os.listdir('/proc/self/fd')]\n"
                "print(sorted(os.readlink(each).split(':')[0] for each in links if os.path.lexists(each)))"
            )
    # Input, output, errors and the pipe of the report.
    assert finished.stdout == "['/dev/null', 'pipe', 'pipe', 'pipe']\n"


async def test_processes_of_this_machine_get_no_signals(sandbox: Watched) -> None:
    with subprocess.Popen(["sleep", "600"]) as outside:
        finished = await sandbox.run(
            f"import os\nreached = []\nfor pid in ({outside.pid}, {os.getpid()}, {os.getppid()}):\n"
            "    try: os.kill(pid, 9); reached.append(pid)\n    except OSError: pass\n"
            "try: os.kill(-1, 9)\nexcept OSError: pass\nprint(reached)"
        )
        alive = outside.poll() is None
        outside.kill()
    assert alive and finished.stdout == "[]\n"


async def test_only_regular_files_are_collected(sandbox: Watched) -> None:
    finished = await sandbox.run(
        "import os\n"
        "os.symlink('/etc/passwd', 'passwords.txt')\n"
        "os.symlink('/usr', 'folder')\n"
        "os.symlink('/proc/self/environ', 'environment')\n"
        "os.mkfifo('pipe')\n"
        "os.mkdir('real')\n"
        "with open('real/kept.txt', 'w') as file: file.write('kept')\n"
        "open(b'\\xff', 'w').close()"
    )
    assert finished.files == {"real/kept.txt": b"kept"}
    assert {name for name in finished.left_out if "\\" not in name} == {
        "passwords.txt",
        "environment",
        "pipe",
        "folder",
    }
    assert "not a regular file" in finished.left_out["passwords.txt"]


async def test_one_run_knows_nothing_of_the_one_before(sandbox: Watched) -> None:
    marked = await sandbox.run(
        "import builtins, json, os, sys\n"
        "builtins.mark = json.mark = sys.mark = 1\n"
        "open('mark', 'w').write('mark'); open('/tmp/mark', 'w').write('mark')\n"
        "mark = 1"
    )
    assert marked.exit == "ok"
    for _ in range(3):
        looked = await sandbox.run(
            "import builtins, json, os, sys\n"
            "print([hasattr(each, 'mark') for each in (builtins, json, sys)], 'mark' in globals(),"
            " os.listdir('/tmp'), os.listdir('.'))"
        )
        assert looked.stdout == "[False, False, False] False ['work'] []\n"


FORGERIES = {
    "nonsense": b"\xff" * 100,
    "an enormous head": b"\xff\xff\xff\xff",
    "deep nesting": (5000).to_bytes(4, "big") + b"[" * 5000,
    "a name that leads out": None,
    "two of one name": None,
    "a file larger than allowed": None,
    "wrong types": None,
}
HEADS = {
    "a name that leads out": '{"exit":"ok","value":null,"reason":"","files":[["../../etc/passwd",0]],"left_out":[]}',
    "two of one name": '{"exit":"ok","value":null,"reason":"","files":[["a",0],["a",0]],"left_out":[]}',
    "a file larger than allowed": '{"exit":"ok","value":null,"reason":"","files":[["a",99999999999]],"left_out":[]}',
    "wrong types": '{"exit":"ok","value":7,"reason":"","files":[],"left_out":[]}',
}


@pytest.mark.parametrize("name", list(FORGERIES))
async def test_a_forged_report_is_not_believed(sandbox: Watched, name: str) -> None:
    head = HEADS.get(name, "").encode()
    letter = FORGERIES[name] or len(head).to_bytes(4, "big") + head
    finished = await sandbox.run(
        "import os, sys\n"
        "(out,) = [int(each) for each in os.listdir('/proc/self/fd')\n"
        "          if int(each) > 2 and os.path.exists(f'/proc/self/fd/{each}')\n"
        "          and os.readlink(f'/proc/self/fd/{each}').startswith('pipe')]\n"
        f"os.write(out, {letter!r})\n"
        "import time; time.sleep(60)"
    )
    assert finished.exit == "killed" and finished.files == {}
    assert "can't be read" in finished.reason


_SERVER = """
import asyncio, sys
from tools.sandbox import Sandbox, SandboxConfig
async def main():
    sandbox = await Sandbox.open(SandboxConfig(warm=2))
    run = asyncio.create_task(sandbox.run({code!r}, timeout_s=600))
    while not sandbox._runs or any(not each.done() for each in sandbox._warm):
        await asyncio.sleep(0)
    print(sandbox._plan.groups._homes[0].name, flush=True)
    await run
asyncio.run(main())
"""


async def test_a_server_that_is_killed_takes_its_sandboxes_with_it_and_the_next_one_cleans_up() -> None:
    code = SYSCALL + f"call({(157, 167)[COLUMN]}, 1, 0)\nimport os\nos.fork()\nwhile True: pass"
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER.format(code=code)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert server.stdout is not None
    name = server.stdout.readline().strip()
    deadline = time.monotonic() + 20  # the place of the sandbox that took the code is filled meanwhile
    while len(processes(Path(name))) < 6 and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    inside = [os.pidfd_open(pid) for pid in processes(Path(name))]
    assert len(inside) >= 6  # two sandboxes that wait and one with code: bubblewrap and Python in each
    server.kill()
    server.wait()
    server.stdout.close()
    for each in inside:
        assert _ends(each), "a process of a sandbox outlived the server"
        os.close(each)
    left = [Path(path) for path in _folders(name)]
    assert left
    async with await Sandbox.open(SMALL):
        assert [path for path in left if path.exists()] == []


def _ends(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 10)[0])


def _folders(name: str) -> list[str]:
    found = list[str]()
    for folder, folders, _ in os.walk("/sys/fs/cgroup"):
        found += [os.path.join(folder, each) for each in folders if each == name]
    return found


async def test_the_users_of_sandboxes_are_nobodys(sandbox: Watched) -> None:
    uids = sandbox.sandbox._plan.uids
    if uids is None:
        pytest.skip("the server is not root, so its sandboxes run as its own user")
    assert not [each for each in pwd.getpwall() if each.pw_uid in uids]
