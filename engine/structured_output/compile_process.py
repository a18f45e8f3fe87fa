"""Tries constraints, each in a fork of its own: the program of a `Probe`'s process beside the engine.

Run as a script, never imported there. Every message on stdin hands over a connection: the first one carries the
vocabulary and the limits, each other one a constraint. A constraint is answered by its fork, with its Lark source or
the reasons against it; where the fork dies, by the process that watches it, with the number of the signal. So a
constraint that ends its fork does not affect the next one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

CROWDED = 1.5  # processes for each core, of late
STACK_BYTES = 4 << 20  # half of an engine thread's: a constraint that fits here fits there
WALKS, STEPS = 3, 12  # of random tokens
STRING = ("pattern", "minLength", "maxLength")


def load() -> Any:
    """Imports llguidance and the engine's Lark writer, without the engine itself, which would load torch. Any: a
    module."""
    package = ModuleType("engine")
    root = Path(__file__).parents[1]
    package.__path__ = [str(root)]
    sys.modules["engine"] = package
    sys.path.append(str(root.parent))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # threads would be lost in a fork
    from engine.structured_output import llguidance_backend

    return llguidance_backend


def serve() -> None:
    control = socket.socket(fileno=sys.stdin.fileno())
    first = received(control)
    if first is None:
        return
    llguidance_backend = load()
    from engine.structured_output.vocabulary import Vocabulary

    with first, first.makefile("rwb") as stream:
        (tokens, eos), deadline_s, memory_bytes, load_s, mask_s = pickle.load(stream)
        # Compiling needs no encoder of text.
        backend = llguidance_backend.Guidance(Vocabulary(tokens, eos, lambda text: []))
        pickle.dump("ready", stream)
    limit(resource.RLIMIT_AS, memory_bytes)
    limit(resource.RLIMIT_CORE, 0)
    os.nice(10)  # the engine's steps come first
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    while (job := received(control)) is not None:
        if os.fork() == 0:
            control.close()
            step_aside()
            watch(job, backend, deadline_s, load_s, mask_s)
            os._exit(0)
        job.close()


def step_aside() -> None:
    """Runs at the lowest priority. On a busy machine a tenth of a processor is kept: with none, nothing would ever
    compile."""
    if os.getloadavg()[0] > CROWDED * (os.cpu_count() or 1):
        return
    os.nice(9)
    if hasattr(os, "SCHED_IDLE"):  # niceness alone would still let a slice of some milliseconds run to its end
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def received(control: socket.socket) -> socket.socket | None:
    """Returns the next connection; None when there will be no more."""
    message, handed, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=handed[0]) if message else None


def watch(job: socket.socket, backend: Any, deadline_s: float, load_s: float, mask_s: float) -> None:
    """Any: a `Guidance`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker = os.fork()
    if worker == 0:
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=work, args=(job, backend, deadline_s, load_s, mask_s))
        thread.start()
        thread.join()
        os._exit(0)
    _, status = os.waitpid(worker, 0)
    if os.WIFSIGNALED(status):
        job.sendall(pickle.dumps(os.WTERMSIG(status)))


def work(job: socket.socket, backend: Any, deadline_s: float, load_s: float, mask_s: float) -> None:
    """Any: a `Guidance`."""
    from engine.structured_output.llguidance_backend import lark
    from engine.structured_output.matcher import ConstraintRefused

    with job.makefile("rwb") as stream:
        constraint = pickle.load(stream)
        signal.setitimer(signal.ITIMER_REAL, deadline_s)  # unhandled: the kernel ends the process
        answer: str | list[str]
        try:
            answer = lark(constraint)
            began = time.thread_time()
            compiled = backend.load(answer)
            if (taken := time.thread_time() - began) > load_s:
                answer = [f"compiling it takes {taken:.1f} s of processor time; at most {load_s:g} s are accepted"]
            elif (taken := median([*masks(compiled), *strings(constraint, backend)])) > mask_s:
                answer = [f"its masks take {1e3 * taken:.1f} ms; at most {1e3 * mask_s:g} ms are accepted"]
        except ConstraintRefused as refused:
            answer = list(refused.reasons)
        except MemoryError:
            os.abort()
        except Exception as error:  # a library's failure must be reported like any other
            answer = [f"{type(error).__name__}: {error}"]
        signal.setitimer(signal.ITIMER_REAL, 0)
        pickle.dump(answer, stream)


def masks(compiled: Any) -> list[float]:
    """Returns the seconds of processor time that masks take along walks of random tokens. Any: a `Compiled`.

    Raises:
        ConstraintRefused: no walk gets far without meeting a limit of the library's.
    """
    import numpy as np

    from engine.structured_output.matcher import ConstraintFailed, ConstraintRefused, words

    chosen, taken = random.Random(0), []
    row = np.zeros(words(compiled.vocabulary.size), dtype=np.int32)
    failures: list[str] = []
    for _ in range(WALKS):
        matcher = compiled.matcher()
        try:
            for _ in range(STEPS):
                start = time.thread_time()
                matcher.fill(row)
                taken.append(time.thread_time() - start)
                ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
                if not ids.size:
                    break
                if not matcher.accept(int(chosen.choice(ids))):
                    matcher.fill(row)  # a limit was met, which shows now
                    break
        except ConstraintFailed as failed:
            failures.append(str(failed))
    # A dead end in one part leaves the rest usable, and is reported where it is reached.
    if len(failures) == WALKS and not any(failure.startswith("no token fits") for failure in failures):
        raise ConstraintRefused([f"{failures[0]} (within {STEPS} random tokens)"])
    return taken


def strings(constraint: Any, backend: Any) -> list[float]:
    """Returns the seconds of the masks of every string with a pattern by itself: an answer may come to it late, and a
    mask's cost there hardly depends on the text before. Any: a `Constraint` and a `Guidance`.

    Raises:
        ConstraintRefused: one of them meets a limit of the library's at once.
    """
    import json

    from engine.structured_output.llguidance_backend import lark
    from engine.structured_output.matcher import ConstraintRefused
    from engine.structured_output.schema_rewrite import schemas
    from engine.structured_output.spec import JsonSchema, parts

    taken = []
    found = {
        json.dumps({"type": "string"} | {name: part[name] for name in STRING if name in part})
        for each in parts(constraint)
        if isinstance(each, JsonSchema)
        for part in schemas(json.loads(each.source))
        if isinstance(part.get("pattern"), str)
    }
    for source in sorted(found):
        try:
            taken += masks(backend.load(lark(JsonSchema(source))))
        except ConstraintRefused as refused:
            raise ConstraintRefused([f"pattern in {source:.200}: {reason}" for reason in refused.reasons]) from None
    return taken


def limit(what: int, max_value: int) -> None:
    with contextlib.suppress(ValueError):  # a lower limit may be set already
        resource.setrlimit(what, (max_value, max_value))


if __name__ == "__main__":
    serve()
