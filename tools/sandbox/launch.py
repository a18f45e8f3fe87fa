"""The program between the server and bubblewrap: it enters the sandbox's cgroups, gives up root and becomes bwrap.

A small process of its own, because a server with a model in memory is slow to fork, and because only the process that
will become the sandbox can enter its cgroups before anything runs. Standard library only. Knows nothing of Python in
the sandbox.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main(settings: dict[str, Any]) -> None:
    for folder in settings["cgroups"]:
        with open(os.path.join(folder, "cgroup.procs"), "w") as file:
            file.write("0")  # the writer itself
    # The first to go when the machine's memory runs out, and the last to be scheduled when it is busy.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.nice(settings["nice"])
    uid = settings["uid"]
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    command = settings["command"]
    os.execve(command[0], command, {})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
