"""The tools `python` and `small_python`: what a model reads of a run."""

from __future__ import annotations

import pytest

from ponder import BadArguments, FakeContext, call_tool
from tests.tools.sandbox.sandbox_traces import SMALL, needs_sandboxes
from tools.builtin.python import MAX_CODE, python, small_python
from tools.sandbox import Pure, Sandbox


@needs_sandboxes
async def test_python_tells_value_output_errors_and_files() -> None:
    async with await Sandbox.open(SMALL) as sandbox:
        ctx = FakeContext(provided={Sandbox: sandbox})
        good = await call_tool(python, ctx, code="print('hi')\nopen('a.txt', 'w').write('abc')\n6 * 7")
        assert good.text.count("Value: 42\nPrinted:\nhi\nFiles that it made, gone with it: a.txt (3 bytes)") == 1
        bad = await call_tool(python, ctx, code="1 / 0")
        assert "It did not end well (error): ZeroDivisionError: division by zero\nErrors:\nTraceback" in bad.text
        silent = await call_tool(python, ctx, code="x = 1")
        assert "neither printed anything nor ended with a value" in silent.text
        assert good.untrusted  # it may print what a document that it was given says


@needs_sandboxes
async def test_files_that_python_writes_are_attached_where_they_are_kept() -> None:
    code = "import os\nos.mkdir('out')\nopen('out/t.csv', 'w').write('a\\n1\\n')\nopen('p.svg', 'w').write('<svg/>')"
    async with await Sandbox.open(SMALL) as sandbox:
        ctx = FakeContext(provided={Sandbox: sandbox}, keeps_files=True)
        made = await call_tool(python, ctx, code=code)
    assert {file.name: file.content for file in ctx.files} == {"out/t.csv": b"a\n1\n", "p.svg": b"<svg/>"}
    assert "gone with it" not in made.text


async def test_small_python_computes_without_a_sandbox() -> None:
    async with await Pure.open() as pure:
        result = await call_tool(small_python, FakeContext(provided={Pure: pure}), code="sum(range(10))")
        assert "Value: 45" in result.text
        refused = await call_tool(small_python, FakeContext(provided={Pure: pure}), code="open('/etc/passwd')")
        assert "PermissionError" in refused.text


@pytest.mark.parametrize("code", ["", "x" * (MAX_CODE + 1)])
async def test_code_that_is_none_or_too_long_is_refused(code: str) -> None:
    with pytest.raises(BadArguments, match="code"):
        await call_tool(python, FakeContext(), code=code)
