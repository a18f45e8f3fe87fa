"""instructor: typed results by tools, by the answer's form and by JSON mode, from OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import anthropic
import instructor
import openai
from instructor import Mode
from pydantic import BaseModel, field_validator

from tests.clients import cell
from tests.clients.cell import Cells, assert_stops
from tests.clients.script import Turn, play

cells = Cells("instructor", "instructor")


class Person(BaseModel):
    name: str
    age: int


CALLS_PERSON = play(Turn(calls=[("Person", cell.PERSON)]))


def client(url: str, mode: Mode = Mode.TOOLS) -> Any:
    made = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(made, mode=mode)


def ask(made: Any, text: str, kind: Any = Person, **fields: Any) -> Any:
    given = {"model": "default", "max_retries": 0, **fields}
    return made.create(response_model=kind, messages=[{"role": "user", "content": text}], **given)


@cells("plain")
def plain(url: str) -> None:
    assert ask(client(url), cell.SAYS_HELLO, None).choices[0].message.content == cell.HELLO


@cells("stream")
def stream(url: str) -> None:
    """Streams a result that grows, and a list of results."""
    grows = play(Turn(calls=[("PartialPerson", cell.PERSON)]))
    seen = list(client(url).create_partial(
        model="default", response_model=Person, messages=[{"role": "user", "content": grows}]
    ))  # fmt: skip
    assert seen[-1].model_dump() == cell.PERSON and len(seen) > 3
    several = play(Turn(calls=[("IterablePerson", {"tasks": [cell.PERSON, {"name": "Bo", "age": 3}]})]))
    made = client(url).create_iterable(
        model="default", response_model=Person, messages=[{"role": "user", "content": several}]
    )
    assert [person.name for person in made] == ["Ada", "Bo"]


@cells("tools")
def tools(url: str) -> None:
    """Gives the tool's result back where it fails its check, and asks anew."""

    class Adult(BaseModel):
        name: str
        age: int

        @field_validator("age")
        @classmethod
        def _of_age(cls, value: int) -> int:
            if value < 18:
                raise ValueError("too young")
            return value

    twice = play(Turn(calls=[("Adult", {"name": "Bo", "age": 3})]), Turn(calls=[("Adult", cell.PERSON)]))
    assert ask(client(url), twice, Adult, max_retries=2).model_dump() == cell.PERSON


@cells("parallel tools")
def parallel_tools(url: str) -> None:
    two = play(Turn(calls=[("Person", cell.PERSON), ("Person", {"name": "Bo", "age": 3})]))
    made = ask(client(url, Mode.PARALLEL_TOOLS), two, Iterable[Person])
    assert [person.name for person in made] == ["Ada", "Bo"]


@cells("typed result")
def typed_result(url: str) -> None:
    fenced = play(Turn('```json\n{"name": "Ada", "age": 36}\n```'))
    for mode, text in (
        (Mode.TOOLS, CALLS_PERSON), (Mode.TOOLS_STRICT, CALLS_PERSON), (Mode.JSON, cell.WRITES_PERSON),
        (Mode.JSON_SCHEMA, cell.WRITES_PERSON), (Mode.MD_JSON, fenced),
    ):  # fmt: skip
        assert ask(client(url, mode), text).model_dump() == cell.PERSON, mode
    theirs = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    for mode, text in ((Mode.ANTHROPIC_TOOLS, CALLS_PERSON), (Mode.ANTHROPIC_JSON, cell.WRITES_PERSON)):
        made = ask(instructor.from_anthropic(theirs, mode=mode), text, max_tokens=2000)
        assert made.model_dump() == cell.PERSON, mode


@cells("errors")
def errors(url: str) -> None:
    for word, fields in (("gpt-5", {"model": "gpt-5"}), ("temperature", {"temperature": 9})):
        try:
            ask(client(url), "hi", **fields)
        except Exception as error:  # instructor wraps what its client raises
            assert word in str(error)
        else:
            raise AssertionError(f"{fields} was accepted")


@cells("disconnect")
def disconnect(url: str) -> str:
    """Leaves an asynchronous stream of partial results: the synchronous client collects them all first."""
    long = play(Turn(calls=[("PartialPerson", {"name": "word " * 3000, "age": 1})]))

    async def leave() -> None:
        made = instructor.from_openai(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
        seen = made.create_partial(
            model="default", response_model=Person, messages=[{"role": "user", "content": long}]
        )  # fmt: skip
        for _ in range(20):
            await anext(seen)
        await seen.aclose()

    return assert_stops(url, lambda: asyncio.run(leave()))


if __name__ == "__main__":
    cells.main()
