"""One watched sandbox for the tests of a module; see `Watched`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.tools.sandbox.sandbox_traces import SMALL, Watched, groups_of_processes, homes, zombies
from tools.sandbox import Sandbox


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
