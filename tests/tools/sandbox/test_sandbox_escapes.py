"""Code that tries to get out of its sandbox, to hurt the machine or to stay: each is contained, within limits of
processes, memory and time, and nothing is left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tools.sandbox.sandbox_traces import COLUMN, SMALL, SYSCALL, Watched, needs_sandboxes
from tools.sandbox import Sandbox

pytestmark = [needs_sandboxes, pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

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
