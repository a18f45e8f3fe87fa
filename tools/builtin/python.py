"""Python for a model: in a sandbox of its own, or, where it is small and pure, in an interpreter that knows part of it.

The host provides the sandbox where the system has every layer of it: elsewhere only the second tool is offered. Knows
nothing of how code is isolated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from ponder import Context, ToolError, tool
from tools.sandbox import Finished, Pure, Sandbox

MAX_CODE = 100_000  # characters

Code = Annotated[str, Field(min_length=1, max_length=MAX_CODE)]


@tool(permission="execute", approval="never", idempotent=True, timeout=120)
async def python(ctx: Context, code: Code) -> str:
    """Run Python 3 with its standard library, without network, in a fresh place each time: nothing is kept.

    The last expression's value and what is printed come back. Files that it writes in its folder, such as a CSV, SVG
    or HTML file, are shown to the person.

    Args:
        code: the program; print what you need, or end with an expression.
    """
    return attached(ctx, await ctx.get(Sandbox).run(code))


@tool(permission="none", timeout=30)
async def small_python(ctx: Context, code: Code) -> str:
    """Run a small pure computation in a part of Python, for at most 2 seconds and 64 MB; nothing is kept.

    There are no files, no network, no generators, no class that inherits; of modules there are math, re, json,
    datetime, decimal, itertools, functools, collections and random. The last expression's value and what
    is printed come back.

    Args:
        code: the program; print what you need, or end with an expression.
    """
    return rendered(await ctx.get(Pure).run(code))


def attached(ctx: Context, finished: Finished) -> str:
    """Attaches the files that a run made, and returns how it ended: `rendered`, with the files that nobody keeps."""
    left = dict[str, bytes]()
    left_out = dict(finished.left_out)
    for name, content in finished.files.items():
        try:
            if not ctx.attach(name, content):
                left[name] = content
        except ToolError as error:
            left_out[name] = str(error)
    return rendered(replace(finished, files=left, left_out=left_out))


def rendered(finished: Finished) -> str:
    """Returns how a run ended, as a model reads it: the failure first, for the text may be cut behind it."""
    parts = list[str]()
    if finished.exit != "ok":
        parts.append(f"It did not end well ({finished.exit}): {finished.reason}")
    if finished.value is not None:
        parts.append(f"Value: {finished.value}")
    if finished.stdout:
        parts.append(f"Printed:\n{finished.stdout.rstrip()}")
    if finished.stderr:
        parts.append(f"Errors:\n{finished.stderr.rstrip()}")
    if finished.files:
        made = ", ".join(f"{name} ({len(content)} bytes)" for name, content in finished.files.items())
        parts.append(f"Files that it made, gone with it: {made}")
    parts += [f"Not collected: {name}: {why}" for name, why in finished.left_out.items()]
    return "\n".join(parts) or "It ran, and neither printed anything nor ended with a value."
