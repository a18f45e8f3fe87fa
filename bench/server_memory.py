"""Memory of an idle server by part, and after it has worked: `python -m bench.server_memory`. Linux only.

Reads the kernel's maps of a server of its own and of its children: files are mapped libraries and weights, anonymous
memory is the heap, the K/V pool as far as it was written, and libraries' caches.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench import hardware, report

Json = dict[str, Any]  # Any: plain JSON
SETTLE_S = 5.0  # after a server is ready: it opens its sandboxes then
_QUESTION = "Use 4, 6, 9 and 1 to make 24."


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.server_memory", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="models/pebble")
    model = parser.parse_args().model
    results: Json = {
        "date": datetime.date.today().isoformat(), "slug": f"memory-{hardware.slug()}",
        "command": "python -m bench.server_memory", "hardware": hardware.describe(), "model": model,
        **measure(model),
    }  # fmt: skip
    print(json.dumps(results, indent=1))
    print(report.save(results))


def measure(model: str) -> Json:
    """Megabytes of an idle server by part, and of one that has answered 64 questions and read a document."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "app.cli", "serve", "--port", "0", "--data-dir", folder, "--model", model]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                address = next(line for line in server.stdout if "ready at" in line).split()[-1]
                process = psutil.Process(server.pid)
                psutil.wait_procs([process], timeout=SETTLE_S)  # it does not end: this waits
                idle = parts(process)
                with httpx.Client(base_url=address, timeout=600) as http:
                    body = {"messages": [{"role": "user", "content": _QUESTION}], "n": 64, "max_tokens": 300}
                    http.post("/v1/chat/completions", json={"model": "default", **body}).raise_for_status()
                    answered = parts(process)
                    files = {"file": ("a.md", b"The dam was finished in 1936.")}
                    http.post("/api/documents", files=files).raise_for_status()
                    http.post("/api/search", json={"query": "When was the dam finished?"}).raise_for_status()
                return {"idle_mb": idle, "after_64_answers_mb": answered, "after_a_document_mb": parts(process)}
            finally:
                server.terminate()


def parts(process: psutil.Process) -> Json:
    """Megabytes (of 10^6 bytes, shared pages by their share) of a process by kind of mapping, and of its children."""
    found = Counter[str]()
    for path, size in mapped(process):
        found[kind_of(path)] += size
    children = sum(child.memory_full_info().pss for child in process.children(recursive=True))
    whole = sum(found.values()) + children
    by_part = {name: round(size / 1e6, 1) for name, size in found.most_common()}
    return {"whole": round(whole / 1e6, 1), **by_part, "other processes": round(children / 1e6, 1)}


def mapped(process: psutil.Process) -> list[tuple[str, int]]:
    """Returns the mapped paths, and their proportional share in bytes."""
    return [(each.path, each.pss) for each in process.memory_maps(grouped=True)]


def kind_of(path: str) -> str:
    """The part of a server that a mapping belongs to."""
    if path.endswith(".safetensors"):
        return "weights, mapped"
    if path == "[heap]":
        return "heap"
    if path.startswith("[anon"):
        return "anonymous: K/V pool, packed weights, arenas"
    if "/torch/" in path:
        return "torch's libraries"
    return "other libraries and files" if Path(path).suffix or path.startswith("/") else "stacks and the rest"


if __name__ == "__main__":
    main()
