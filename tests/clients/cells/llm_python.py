"""Simon Willison's `llm`, as its users set it up: a row in `extra-openai-models.yaml`, then the command and its API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tests.clients import cell
from tests.clients.cell import Cells, PromptCache, assert_stops

HOME = Path(tempfile.mkdtemp())  # before `llm` is imported, which reads it once
os.environ |= {"LLM_USER_PATH": str(HOME), "OPENAI_API_KEY": "none"}

import llm  # noqa: E402

cells = Cells("llm", "llm")


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return cell.WEATHER[city]


def model(url: str, name: str = "default") -> Any:
    row = {
        "model_id": "ponder", "model_name": name, "api_base": f"{url}/v1", "supports_tools": True,
        "supports_schema": True, "reasoning": True,
    }  # fmt: skip
    (HOME / "extra-openai-models.yaml").write_text(json.dumps([row]))  # JSON is YAML
    return llm.get_model("ponder")


@cells("plain")
def plain(url: str) -> None:
    """Through the command, and a conversation through the API."""
    conversation = model(url).conversation()
    assert conversation.prompt(cell.SAYS_HELLO, stream=False).text() == cell.HELLO
    assert conversation.prompt("And?", stream=False).text() == "And again."
    command = [sys.executable, "-m", "llm", "-m", "ponder", "--no-stream", cell.SAYS_HELLO]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == cell.HELLO


@cells("stream")
def stream(url: str) -> None:
    chunks = list(model(url).prompt(cell.SAYS_HELLO))
    assert "".join(chunks) == cell.HELLO and len(chunks) > 3


@cells("tools")
def tools(url: str) -> None:
    assert model(url).chain(cell.ASKS_WEATHER, tools=[get_weather]).text().endswith(cell.SUMMARY)


@cells("parallel tools")
def parallel_tools(url: str) -> None:
    chain = model(url).chain(cell.ASKS_BOTH, tools=[get_weather])
    responses = list(chain.responses())
    assert [call.arguments["city"] for call in responses[0].tool_calls()] == ["Oslo", "Rome"]
    assert responses[1].text() == cell.BOTH


@cells("typed result")
def typed_result(url: str) -> None:
    assert json.loads(model(url).prompt(cell.WRITES_PERSON, schema=Person).text()) == cell.PERSON


@cells("reasoning")
def reasoning(url: str) -> None:
    response = model(url).prompt(cell.SAYS_HELLO, stream=False, reasoning_effort="low")
    assert response.text() == cell.HELLO
    assert response.response_json["usage"]["completion_tokens_details"]["reasoning_tokens"] > 3


@cells("errors")
def errors(url: str) -> None:
    for word, name, options in (("gpt-5", "gpt-5", {}), ("seed", "default", {"seed": 2**70})):
        try:
            model(url, name).prompt("hi", **options).text()
        except Exception as error:  # llm lets its client's errors through
            assert word in str(error)
        else:
            raise AssertionError(f"{name} with {options} was accepted")


@cells("disconnect")
def disconnect(url: str) -> str:
    """Interrupts the command, as Ctrl-C does."""
    model(url)

    def leave() -> None:
        command = [sys.executable, "-m", "llm", "-m", "ponder", cell.NEVER_ENDS]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
            assert running.stdout is not None and running.stdout.read(20)
            running.send_signal(signal.SIGINT)

    return assert_stops(url, leave)


@cells("long agent")
def long_agent(url: str) -> str:
    cache = PromptCache(url)

    def read_part(number: int) -> str:
        """Reads a part of the text."""
        cache.turn()
        return cell.part(number)

    chain = model(url).conversation().chain(cell.works_long(), tools=[read_part], chain_limit=20)
    assert chain.text().endswith(cell.FINISHED)
    cache.turn()
    return cache.remark()


if __name__ == "__main__":
    cells.main()
