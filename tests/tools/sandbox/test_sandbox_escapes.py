"""Code that tries to get out of its sandbox, to hurt the machine or to stay: each is contained, and nothing is left."""

from __future__ import annotations

import os
import pwd
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.tools.sandbox.sandbox_traces import SMALL, groups_of_processes, homes, needs_sandboxes, processes, zombies
from tools.sandbox import Finished, Sandbox

pytestmark = [needs_sandboxes, pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@dataclass
class Watched:
    """A pool with one warm sandbox, of which every run must have left nothing when it returns."""

    sandbox: Sandbox
    runs: int = 0

    async def run(self, code: str, timeout_s: float = 10) -> Finished:
        finished = await self.sandbox.run(code, timeout_s=timeout_s)
        self.runs += 1
        # Sandboxes are numbered as they are started, and used in that order.
        used = {f"jail-{number}" for number in range(1, self.runs + 1)}
        for home in homes(self.sandbox):
            assert {folder.name for folder in home.glob("jail-*")} & used == set()
        assert set(groups_of_processes(homes(self.sandbox)[0])) & used == set()
        assert zombies() == []
        return finished


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Watched]:
    mounts = Path("/proc/self/mountinfo").read_text()
    made = await Sandbox.open(SMALL)
    folders = homes(made)
    try:
        yield Watched(made)
    finally:
        await made.close()
    assert [each for folder in folders for each in groups_of_processes(folder)] == []
    assert [folder for folder in folders if folder.exists()] == []
    assert zombies() == []
    assert Path("/proc/self/mountinfo").read_text() == mounts


SYSCALL = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return errno.errorcode.get(ctypes.get_errno(), "fine") if result < 0 else "fine"
"""
NUMBERS = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "memfd_create": (319, 279),
    "open_by_handle_at": (304, 265),
    "kexec_load": (246, 104),
    "finit_module": (313, 273),
}
COLUMN = 0 if os.uname().machine == "x86_64" else 1

ATTACKS: list[tuple[str, str, set[str], str]] = [  # name, code, how it may end, what its output must begin with
    (
        "fork bomb",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        {"timeout", "memory"},  # whichever limit so many processes reach first
        "",
    ),
    ("memory hog", "x = []\nwhile True: x.append(bytearray(1 << 20))", {"memory"}, ""),
    ("one huge allocation", "x = bytearray(1 << 40)", {"memory"}, ""),
    ("endless loop", "while True: pass", {"timeout"}, ""),
    ("regex bomb", "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')", {"timeout"}, ""),
    ("9**9**9", "n = 9\nprint(n**n**n)", {"timeout", "memory"}, ""),
    ("deep recursion", "def f(): f()\nf()", {"error"}, ""),
    (
        "deeper recursion",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return [f()]\nf()",
        {"memory", "killed", "timeout"},
        "",
    ),
    (
        "recursion in C",
        "x = []\nfor _ in range(10**6): x = [x]\nprint(repr(x)[:1])",
        {"error", "killed", "timeout"},
        "",
    ),
    (
        "ignored signals",
        "import signal\n"
        "for each in signal.valid_signals() - {9, 19}:\n"
        "    try: signal.signal(each, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "print('deaf', flush=True)\n"
        "while True: pass",
        {"timeout"},
        "deaf",
    ),
    (
        "daemonise",
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for each in range(64):\n"
        "            try: os.close(each)\n"
        "            except OSError: pass\n"
        "        time.sleep(3600)\n"
        "    os._exit(0)\n"
        "print('gone')",
        {"ok"},
        "gone",
    ),
    (
        "daemonise and end at once",
        "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(3600)\nos._exit(0)",
        {"error"},
        "",
    ),
    ("1 GB of output", "for _ in range(1 << 10): print('x' * (1 << 20))", {"output"}, "xxxx"),
    ("1 GB of errors", "import sys\nfor _ in range(1 << 10): sys.stderr.write('x' * (1 << 20))", {"output"}, ""),
    ("a value of 1 GB", "'x' * (1 << 30)", {"memory"}, ""),
    (
        "tmpfs fill",
        "import os\n"
        "try:\n"
        "    for number in range(1000):\n"
        "        with open(f'/tmp/{number}', 'wb') as file: file.write(bytes(1 << 20))\n"
        "except OSError as error:\n"
        "    print('ENOSPC' if error.errno == 28 else error, number < 17)",
        {"ok"},
        "ENOSPC True",
    ),
    (
        "a file without end",
        "try:\n"
        "    with open('x', 'wb') as file:\n"
        "        while True: file.write(bytes(1 << 20))\n"
        "except OSError as error: print(error.errno in (27, 28))",
        {"ok"},
        "True",
    ),
    (
        "a million empty files",
        "try:\n    for each in range(10**6): open(f'/tmp/{each}', 'w').close()\nexcept OSError: print('full')",
        {"timeout", "memory", "killed", "ok"},
        "",
    ),
    (
        "descriptors without end",
        "kept = []\ntry:\n    while True: kept.append(open('/dev/null'))\nexcept OSError as error: print(error.errno)",
        {"ok"},
        "24",
    ),
    (
        "threads without end",
        "import threading, time\n"
        "try:\n"
        "    for count in range(1000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "except RuntimeError: print(count < 16)",
        {"ok"},
        "True",
    ),
    (
        "UDP",
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
        {"error"},
        "",
    ),
    ("IPv6", "import socket\nsocket.socket(socket.AF_INET6)", {"error"}, ""),
    ("netlink", "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", {"error"}, ""),
    ("raw packets", "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)", {"error"}, ""),
    ("virtual machine sockets", "import socket\nsocket.socket(40, socket.SOCK_STREAM)", {"error"}, ""),
    ("DNS", "import socket\nsocket.getaddrinfo('example.org', 80)", {"error"}, ""),
    (
        "a pair of datagram sockets",
        "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        {"error"},
        "",
    ),
    ("/etc/shadow", "open('/etc/shadow').read()", {"error"}, ""),
    (
        "/etc/shadow by other ways",
        "import os\n"
        "found = []\n"
        "for way in ('/etc/shadow', '/proc/1/root/etc/shadow', '/proc/self/root/etc/shadow', '/proc/../etc/shadow',\n"
        "            '/dev/fd/../../../etc/shadow', '/usr/../etc/shadow', '/proc/1/cwd/../../etc/shadow'):\n"
        "    try: found.append(open(way).read())\n"
        "    except OSError: pass\n"
        "print(found)",
        {"ok"},
        "[]",
    ),
    (
        "writes outside",
        "import os\n"
        "written = []\n"
        "for folder in ('/', '/usr', '/usr/lib', '/bin/', '/lib/', '/dev', '/dev/shm', '/etc', '/root', '/home',\n"
        "               '/var', '/proc', '/proc/sys/kernel', '/sys', '/run', '/packages', '/var/tmp'):\n"
        "    try:\n"
        "        open(os.path.join(folder, 'x'), 'w').close(); written.append(folder)\n"
        "    except OSError: pass\n"
        "    try:\n"
        "        os.mkdir(os.path.join(folder, 'y')); written.append(folder)\n"
        "    except OSError: pass\n"
        "print(written)",
        {"ok"},
        "[]",
    ),
    (
        "the kernel's settings",
        "import os\n"
        "written = []\n"
        "for file in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/sys/vm/drop_caches',\n"
        "             '/proc/1/oom_adj', '/proc/sys/kernel/hostname', '/proc/self/uid_map', '/proc/1/setgroups'):\n"
        "    try: os.write(os.open(file, os.O_WRONLY), b'1'); written.append(file)\n"
        "    except OSError: pass\n"
        "print([each for each in written if 'oom' not in each])",
        {"ok"},
        "[]",
    ),
    (
        "devices",
        "import os\n"
        "harmless = 'console core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero'\n"
        "print(set(os.listdir('/dev')) - set(harmless.split()), flush=True)\n"
        "os.mknod('/tmp/disk', 0o60600, os.makedev(8, 0))",
        {"error"},
        "set()",
    ),
    (
        "higher limits",
        "import resource\n"
        "raised = []\n"
        "for name in ('RLIMIT_NPROC', 'RLIMIT_NOFILE', 'RLIMIT_FSIZE', 'RLIMIT_CPU', 'RLIMIT_DATA', 'RLIMIT_CORE'):\n"
        "    try: resource.setrlimit(getattr(resource, name), (-1, -1)); raised.append(name)\n"
        "    except (ValueError, OSError): pass\n"
        "print(raised)",
        {"ok"},
        "[]",
    ),
    (
        "another user",
        "import os\n"
        "became = []\n"
        "for uid in (0, 1, 65534):\n"
        "    try: os.setuid(uid); became.append(uid)\n"
        "    except OSError: pass\n"
        "print(became, os.getresuid(), os.getgroups())",
        {"ok"},
        "[] (1000, 1000, 1000) []",
    ),
    (
        "to outlive the server",
        SYSCALL + f"print(call({(157, 167)[COLUMN]}, 1, 0))",
        {"ok"},
        "EPERM",
    ),
    (
        "the second ABI",
        SYSCALL + "print(call(0x40000000 + 39))",
        {"killed"} if COLUMN == 0 else {"ok"},
        "",
    ),
    ("the end of its process", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\nos._exit(7)", {"error"}, ""),
    ("a crash", "import ctypes\nctypes.string_at(0)", {"killed"}, ""),
    *[
        (name, SYSCALL + f"print(call({numbers[COLUMN]}, 0x10000000, 0, 0, 0, 0))", {"ok"}, "EPERM")
        for name, numbers in NUMBERS.items()
    ],
    ("clone3", SYSCALL + "print(call(435, 0, 0))", {"ok"}, "ENOSYS"),
    (
        "clone of a namespace",
        SYSCALL + f"print(call({(56, 220)[COLUMN]}, 0x10000011, 0, 0, 0, 0))",
        {"ok"},
        "EPERM",
    ),
]


@pytest.mark.parametrize(("code", "ends", "output"), [each[1:] for each in ATTACKS], ids=[each[0] for each in ATTACKS])
async def test_an_attack_is_contained(sandbox: Watched, code: str, ends: set[str], output: str) -> None:
    finished = await sandbox.run(code, timeout_s=0.4 if "timeout" in ends else 20)  # what ends by itself may take long
    assert finished.exit in ends, finished
    assert finished.stdout.startswith(output), finished
    assert finished.exit == "ok" or finished.reason
    after = await sandbox.run("6 * 7")
    assert (after.exit, after.value) == ("ok", "42")


async def test_processes_are_counted(sandbox: Watched) -> None:
    finished = await sandbox.run(
        "import os, time\n"
        "count = 1\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0: time.sleep(60)\n"
        "        count += 1\n"
        "except OSError: print(count)"
    )
    assert finished.stdout == f"{SMALL.processes}\n"


async def test_the_processes_of_a_sandbox_share_one_limit_of_memory(sandbox: Watched) -> None:
    finished = await sandbox.run(
        "import os, time\n"
        "children = []\n"
        "for _ in range(6):\n"
        "    reading, writing = os.pipe()\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        kept = bytearray(b'x' * (1 << 20)) * 60  # less than the limit alone, but not three of them\n"
        "        os.write(writing, b'x')\n"
        "        time.sleep(60)\n"
        "    os.close(writing)\n"
        "    os.read(reading, 1)  # it has its memory, or has been ended\n"
        "    children.append(child)\n"
        "print(sum(os.waitpid(each, os.WNOHANG) == (0, 0) for each in children))"
    )
    # The kernel ends whichever it likes: the first process with all others, or as many as it takes.
    assert finished.exit == "memory" or (finished.exit == "ok" and int(finished.stdout) <= 2), finished


async def test_files_in_the_private_folder_count_as_memory() -> None:
    roomy = await Sandbox.open(replace(SMALL, memory_bytes=64 << 20, scratch_bytes=512 << 20, file_bytes=1 << 20))
    async with roomy:
        finished = await roomy.run(
            "for number in range(500):\n    with open(f'/tmp/{number}', 'wb') as file: file.write(bytes(1 << 20))"
        )
    assert finished.exit == "memory"


async def test_time_on_the_processor_is_limited() -> None:
    async with await Sandbox.open(replace(SMALL, cpu_s=1)) as sandbox:
        finished = await sandbox.run("while True: pass", timeout_s=10)
    assert finished.exit == "timeout" and "1 s of the processor" in finished.reason


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
