"""docs/sequences.md: its strategy runs against a real server as it stands, and its tables say what is so."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from app.api import sequences
from app.sequences.sequence_requests import (
    GENERATE_FIELDS,
    AppendRequest,
    ForkRequest,
    OpenRequest,
    ScoreRequest,
    TruncateRequest,
)
from engine import Sampling, Span
from tests.app.conftest import Server, all_is_back

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "sequences.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
QUESTION = "hi"


def program() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(PROGRAM, names)
    return names


def test_the_program_is_short() -> None:
    assert len(PROGRAM.strip().splitlines()) <= 40


def test_the_program_does_what_a_strategy_in_the_server_does(server: Server) -> None:
    async def here() -> tuple[float, str]:
        engine, encode = server.engine, server.engine.tokenizer.encode
        sampling = Sampling(temperature=0.8, top_k=40, seed=5)  # the model's own top_k
        made = []
        async with await engine.open(
            engine.tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])
        ) as root:
            for fork in root.fork(4):
                answer = (await fork.generate_all(Span(sampling, max_tokens=200))).text
                fork.append(encode("\nIs this right? Answer yes or no:\n"))
                yes, no = await fork.score([encode("yes"), encode("no")])
                made.append((sum(yes) - sum(no), answer))
        return max(made)

    gain, answer = asyncio.run(program()["best_of"](server.url, QUESTION, seed=5))
    expected = server.on_loop(here())
    assert answer == expected[1] and gain == pytest.approx(expected[0], abs=1e-4)
    all_is_back(server)


def test_the_program_leaves_nothing_behind_when_it_fails(server: Server) -> None:
    names = program()

    async def broken(client: Any, at: str, **fields: Any) -> str:
        raise RuntimeError("broken")

    names["generate"] = broken
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(names["best_of"](server.url, QUESTION))
    all_is_back(server)


def test_an_error_in_a_stream_reaches_the_program(server: Server, http: httpx.Client) -> None:
    names = program()

    async def closed_meanwhile() -> None:
        async with httpx.AsyncClient(base_url=f"{server.url}/api/sequences", timeout=None) as client:
            at = f"/{(await names['call'](client, f'{server.url}/api/sequences', prompt='0'))['id']}"
            writing = asyncio.create_task(names["generate"](client, at, max_tokens=1500, ignore_eos=True))
            while not (await client.get(at)).json()["length"] > 1:
                assert not writing.done()
            await client.delete(at)
            await writing

    with pytest.raises(RuntimeError, match="was closed while"):
        asyncio.run(closed_meanwhile())
    all_is_back(server)


@pytest.mark.parametrize(
    ("heading", "fields"),
    [
        ("Open", set(OpenRequest.model_fields)),
        ("Append", set(AppendRequest.model_fields)),
        ("Generate", set(GENERATE_FIELDS)),
        ("Fork", set(ForkRequest.model_fields)),
        ("Score", set(ScoreRequest.model_fields)),
        ("Truncate", set(TruncateRequest.model_fields)),
    ],
)
def test_the_fields_of_each_call_are_listed(heading: str, fields: set[str]) -> None:
    section = PAGE.split(f"\n**{heading}**")[1].split("\n**")[0].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \| works \|", section, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == fields


@pytest.mark.parametrize("page", ["api.md", "sequences.md"])
def test_every_route_is_listed(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for route in sequences.router.routes:
        assert isinstance(route, APIRoute) and route.methods is not None
        (method,) = route.methods
        assert f"`{method} {route.path.replace('sequence_id', 'id')}`" in text, route.path
