"""The work of small pure code, in a worker's process: runs it in monty's interpreter and says how it ended, as JSON.

Monty has a process of its own, so this one only turns the value into text. That is where a few bytes of code can become
gigabytes (a list of lists of one list): it ends this process, and nothing else. Knows nothing of its callers.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any, Literal

import pydantic_monty
from pydantic_monty import Monty, ResourceLimits

from tools.sandbox.sandbox_config import Exit

GRACE_S = 1.0  # past its limit, before the interpreter's process is ended
_REASON = 1000  # characters


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`request` has the `code` and the fields of a PureConfig; the reply has those of a Finished."""
    printed = _Printed(request["output_bytes"])
    limits: ResourceLimits = {
        "max_feed_duration_secs": request["timeout_s"],
        "max_memory": request["memory_bytes"],
        "max_recursion_depth": request["recursion"],
        "max_total_sleep_secs": 0.0,
    }
    kind: Exit = "ok"
    value, reason, trace = None, "", ""
    with _interpreters(request["timeout_s"]).checkout(limits=limits, os_policy={"sleep": "zero"}) as session:
        started = time.monotonic()
        try:
            value = session.feed_run(request["code"], print_callback=printed)
        except pydantic_monty.MontyRuntimeError as error:
            kind, reason = _judged(error, request)
            trace = error.display()
        except pydantic_monty.MontySyntaxError as error:
            kind, reason, trace = "error", error.display("type-msg"), error.display()
        except pydantic_monty.MontyCrashedError as error:
            kind, reason = ("timeout" if error.timed_out else "killed"), str(error)
            if error.timed_out:
                reason = _over(request)
        except pydantic_monty.MontyError as error:
            kind, reason = "error", str(error)
        seconds = time.monotonic() - started
    if printed.full:
        kind, reason = "output", f"It wrote more than {request['output_bytes']} bytes, the limit; the rest is cut."
    printed("stderr", trace)
    return {
        "exit": kind, "stdout": printed.text["stdout"], "stderr": printed.text["stderr"],
        "value": None if value is None else _shown(value, request["value_chars"]), "seconds": seconds,
        "reason": reason[:_REASON],
    }  # fmt: skip


@cache
def _interpreters(timeout_s: float) -> Monty:
    """Interpreters for as long as this process lives; each is used once, and the next is started meanwhile."""
    made = Monty(max_processes=1, max_checkouts_per_worker=1, request_timeout=timeout_s + GRACE_S)
    return made.__enter__()


class _Printed:
    """The printed text, up to a limit in bytes of both streams together."""

    def __init__(self, most: int) -> None:
        self.text = {"stdout": "", "stderr": ""}
        self.full = False
        self._left = most

    def __call__(self, stream: Literal["stdout", "stderr"], text: str) -> None:
        content = text.encode("utf-8", "replace")
        self.full |= len(content) > self._left
        self.text[stream] += content[: self._left].decode("utf-8", "ignore")
        self._left = max(0, self._left - len(content))


def _judged(error: pydantic_monty.MontyRuntimeError, request: dict[str, Any]) -> tuple[Exit, str]:
    match error.exception():
        case TimeoutError():
            return "timeout", _over(request)
        case MemoryError():
            return "memory", f"It needed more than {request['memory_bytes']} bytes of memory, the limit."
        case _:
            return "error", error.display("type-msg")


def _over(request: dict[str, Any]) -> str:
    return f"It was stopped after {request['timeout_s']:g} s, the limit."


def _shown(value: object, most: int) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError) as error:
        return f"(not shown: {type(error).__name__}: {error})"
    return text if len(text) <= most else f"{text[:most]}… (cut from {len(text)} characters)"
