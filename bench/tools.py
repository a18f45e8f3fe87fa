"""Measures how soon a plugin that was changed is the one that is called: `python -m bench.tools`.

A folder is watched as a server watches it, and edited as an editor does: a new file takes the old one's place. Measured
is the time from that moment to the first call that the new code answers, where calls are made one after another all the
while; and the same to the event that says the plugin was loaded. Edits fall between two looks at the folder.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import hardware, report
from bench.sandbox import spread
from tools.call_policy import CallPolicy
from tools.executor import Executor
from tools.options import PERMISSIONS
from tools.outcome import Call
from tools.plugins import POLL_S, PluginFolder
from tools.registry import Registry
from tools.session import Session

_PLUGIN = '''
from ponder import tool

@tool(permission="none")
def number() -> int:
    """Tell a number."""
    return {}
'''


async def measure(edits: int, others: int) -> dict[str, Any]:  # Any: plain JSON
    """Milliseconds of `edits` edits of one plugin, beside `others` that stay as they are."""
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in range(others):
            (folder / f"other_{each}.py").write_text(_PLUGIN.replace("def number", f"def other_{each}").format(0))
        _save(folder, 0)
        registry = Registry()
        plugins, executor = PluginFolder(folder, registry), Executor(registry, CallPolicy(default=PERMISSIONS))
        await plugins.scan()
        heard = asyncio.Queue[float]()
        watching = asyncio.create_task(plugins.watch(lambda _: heard.put_nowait(time.perf_counter())))
        used, loaded = list[float](), list[float]()
        try:
            for edit in range(1, edits + 1):
                await asyncio.sleep(POLL_S * random.random())
                saved = time.perf_counter()
                _save(folder, edit)
                while await _called(executor, edit) != edit:
                    await asyncio.sleep(0.001)
                used.append((time.perf_counter() - saved) * 1e3)
                loaded.append((await heard.get() - saved) * 1e3)
        finally:
            watching.cancel()
    return {
        "date": datetime.date.today().isoformat(),
        "command": f"python -m bench.tools --edits {edits} --others {others}",
        "slug": f"tools-{hardware.slug()}",
        "hardware": hardware.describe(),
        "load": {"before": before, "after": os.getloadavg()},
        "edits": edits,
        "other_plugins": others,
        "write_to_use_ms": spread(used),
        "write_to_loaded_ms": spread(loaded),
    }


def _save(folder: Path, number: int) -> None:
    (folder / "_new").write_text(_PLUGIN.format(number))
    (folder / "_new").rename(folder / "edited.py")


async def _called(executor: Executor, run: int) -> Any:
    (outcome,) = await executor.run([Call(f"c{time.perf_counter_ns()}", "number", {})], Session("ana", f"run-{run}"))
    return outcome.result.value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--edits", type=int, default=50)
    parser.add_argument("--others", type=int, default=20, help="plugins beside the one that is edited")
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results")
    given = parser.parse_args()
    if given.edits < 10:
        parser.error(f"--edits is {given.edits}; accepted: 10 and more, for a spread to mean something.")
    results = asyncio.run(measure(given.edits, given.others))
    print(json.dumps(results, indent=1))
    if given.write:
        print(f"Kept in {report.save(results).relative_to(report.ROOT)}.")


if __name__ == "__main__":
    main()
