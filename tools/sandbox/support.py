"""Probes this system for every layer of a sandbox, by starting one and looking around in it.

A layer that lacks turns the sandbox off with a reason; nothing is tried without it. Knows nothing of pools.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.sandbox import seccomp
from tools.sandbox.cgroups import Groups, NoCgroups
from tools.sandbox.interpreter import NoInterpreter, find, unreadable
from tools.sandbox.job_report import job
from tools.sandbox.sandbox_config import SandboxConfig, SandboxFailed, SandboxUnavailable, Support
from tools.sandbox.sandbox_process import Blueprint, SandboxProcess

_PROBE_S = 20.0
# Each line is a layer: a condition inside, worded as the missing layer where it is false.
_PROBE = """
import errno, os, socket, json
def fails(call, number):
    try:
        call()
    except OSError as error:
        return error.errno == number
    return False
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
interfaces = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
names = {each.split("=")[0] for each in open("/proc/1/environ").read().split("\\0") if each}
print(json.dumps({
    "system calls are not filtered (seccomp)": status["Seccomp"].strip() == "2",
    "sockets can be made": fails(lambda: socket.socket(socket.AF_INET), errno.EPERM),
    "privileges can be gained (no_new_privs)": status["NoNewPrivs"].strip() == "1",
    "capabilities are left": all(int(status[each], 16) == 0 for each in ("CapPrm", "CapEff", "CapInh", "CapAmb")),
    "the network is the host's": interfaces == ["lo"],
    "other processes are seen": len([each for each in os.listdir("/proc") if each.isdigit()]) == 1,
    "/ can be written to": fails(lambda: open("/x", "w"), errno.EROFS),
    "/dev can be written to": fails(lambda: open("/dev/x", "w"), errno.EROFS),
    "the system's folders can be written to": fails(lambda: open("/usr/x", "w"), errno.EROFS),
    "the environment is not clean": names <= {"HOME", "PATH", "LANG", "TMPDIR", "PWD"},
    "the private folder is not limited": os.statvfs("/tmp").f_blocks * os.statvfs("/tmp").f_frsize <= SCRATCH,
}))
"""


async def check(config: SandboxConfig | None = None) -> Support:
    """Starts one sandbox with these limits and looks at each of its layers from inside."""
    try:
        plan, notes = await asyncio.to_thread(plan_for, config or SandboxConfig())
    except SandboxUnavailable as missing:
        return Support(False, missing.reasons)
    try:
        lacking = await _probe(plan)
        return Support(not lacking, lacking, notes)
    finally:
        if plan.groups is not None:
            await asyncio.to_thread(plan.groups.close)


def plan_for(config: SandboxConfig) -> tuple[Blueprint, tuple[str, ...]]:
    """Returns the blueprint that all sandboxes of a pool share, and notes on it. Makes its cgroups, which the caller
    closes. Blocks.

    Raises:
        SandboxUnavailable: a layer lacks, as far as is known without starting a sandbox.
    """
    lacking, notes = list[str](), list[str]()
    root = os.geteuid() == 0
    bubblewrap = shutil.which(config.bubblewrap or "bwrap", path="/usr/local/bin:/usr/bin:/bin")
    if platform.system() != "Linux":
        raise SandboxUnavailable([f"Sandboxes need Linux; this is {platform.system()}."])
    if bubblewrap is None:
        where = f"not at {config.bubblewrap}" if config.bubblewrap else "not installed: apt install bubblewrap"
        lacking.append(f"bubblewrap is {where}.")
    try:
        rules = seccomp.program(one_process=not config.cgroups)
    except ValueError as error:
        lacking.append(str(error))
    try:
        interpreter = find(config.python, as_root=root)
        notes.append(f"Python in sandboxes is {interpreter.path}.")
    except NoInterpreter as error:
        lacking.append(str(error))
    lacking += [f"{reason} (packages)." for each in config.packages if (reason := unreadable(each, as_root=root))]
    if lacking:
        raise SandboxUnavailable(lacking)
    groups = None
    if config.cgroups:
        try:
            groups = Groups(config.cgroup)
        except NoCgroups as error:
            raise SandboxUnavailable([str(error)]) from error
    else:
        notes.append(
            "There are no cgroups: a sandbox has one process, and what the kernel holds for it is not limited."
        )
    assert bubblewrap is not None
    uids = _uids() if root else None
    return Blueprint(config, Path(bubblewrap), interpreter, rules, groups, uids), tuple(notes)


async def _probe(plan: Blueprint) -> tuple[str, ...]:
    """Returns the missing layers of a sandbox made like this."""
    with ThreadPoolExecutor(1, "ponder-sandbox") as thread:
        try:
            process = await SandboxProcess.start(plan, thread)
        except SandboxFailed as error:
            return (f"{error} {_hint(str(error))}".strip(),)
        code = _PROBE.replace("SCRATCH", str(plan.config.scratch_bytes))
        ended = await process.run(job(code, {}, plan.config), _PROBE_S)
    try:
        seen = json.loads(ended.stdout)
    except ValueError:
        said = ended.stderr.decode("utf-8", "replace").strip()
        return (f"A sandbox could not be looked at: {said or ended.how}.",)
    return tuple(f"In a sandbox {what}; it is not used." for what, held in seen.items() if held is not True)


def _hint(said: str) -> str:
    if "namespace" in said or "uid map" in said or "Operation not permitted" in said:
        return (
            "Unprivileged user namespaces seem to be forbidden: see kernel.unprivileged_userns_clone, "
            "kernel.apparmor_restrict_unprivileged_userns and user.max_user_namespaces; in a container, its runtime "
            "has to allow them."
        )
    return ""


def _uids() -> range:
    """User numbers that are no account's: high in the largest range that this user namespace has."""
    ranges = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    start, _, count = max(ranges, key=lambda each: each[2])
    end = min(start + count, 1 << 31)
    return range(end - (end - start) // 8, end)
