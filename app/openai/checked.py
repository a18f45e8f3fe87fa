"""Answers whose mask holds a superset of their schema: each is checked as a whole, and generated once more if it fails.

Nothing of an answer is given away before it is found valid, so a stream has its text at once. Knows nothing of masks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from app.errors import ApiError, invalid
from app.openai.generation import Generation
from reasoning.thinking import Piece, Tally

TRIES = 2
WAIT_S = 20.0  # for the process that validates, on a busy machine
_SCRIPT = Path(__file__).with_name("validate_process.py")


@dataclass(slots=True)
class CheckedGeneration:
    """A `Generation` whose answers are valid against `schema` (JSON text), unless they were cut off."""

    first: Generation
    schema: str

    @property
    def tally(self) -> Tally:
        """All tries together."""
        return self.first.tally

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """As a `Generation` gives them, an answer's all together.

        Raises:
            ApiError: 422 `schema_not_met`: an answer was not valid the second time either.
        """
        held: dict[int, list[Piece]] = {}
        async with aclosing(self.first.pieces()) as pieces:
            async for index, piece in pieces:
                held.setdefault(index, []).append(piece)
                if piece.finish_reason is not None:
                    for each in await self._valid(index, held.pop(index)):
                        yield index, each

    async def _valid(self, index: int, pieces: list[Piece]) -> list[Piece]:
        wrong = await self._wrong(pieces)
        for at in range(1, TRIES):
            if wrong is None:
                return pieces
            pieces = await self._again(index, at)
            wrong = await self._wrong(pieces)
        if wrong is None:
            return pieces
        raise ApiError(
            422, f"The answer is not valid against its schema in {TRIES} tries: {wrong}. The schema cannot be held "
            'exactly and has "strict": false; accepted: asking again, or a schema that can be held.',
            param="response_format", code="schema_not_met", kind="schema_not_met",
        )  # fmt: skip

    async def _again(self, index: int, at: int) -> list[Piece]:
        """The answer anew. A greedy one would be the same, so it is drawn."""
        first, prompt = self.first, index // self.first.n
        span = first.spans[prompt]
        seed = span.sampling.seed
        sampling = replace(
            span.sampling, temperature=span.sampling.temperature or 1.0, seed=None if seed is None else seed ^ at
        )
        more = Tally()
        again = replace(
            first, prompts=[first.prompts[prompt]], n=1, spans=[replace(span, sampling=sampling)], tally=more
        )
        async with aclosing(again.pieces()) as found:
            pieces = [piece async for _, piece in found]
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"):
            setattr(first.tally, name, getattr(first.tally, name) + getattr(more, name))
        return pieces

    async def _wrong(self, pieces: Sequence[Piece]) -> str | None:
        """Tells what is wrong with an answer; None where nothing is, or where it was cut off."""
        if pieces[-1].finish_reason != "stop" or isinstance(pieces[-1].stop_reason, str):
            return None
        return await wrong_with(self.schema, "".join(piece.text for piece in pieces if piece.part == "answer"))


def not_routed() -> ApiError:
    """The refusal of an answer that has to be checked where several models may give it."""
    return invalid(
        "response_format", "response_format cannot be held exactly, and the model is 'auto'; "
        'accepted: one model\'s name together with "strict": false, or a schema that can be held.',
    )  # fmt: skip


async def wrong_with(schema: str, text: str) -> str | None:
    """Tells why a JSON text is not valid against a schema (both as text), in a process that may be killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", str(_SCRIPT),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        asked = json.dumps([json.loads(schema), text]).encode()
        answer, _ = await asyncio.wait_for(process.communicate(asked), WAIT_S)
        wrong: str | None = json.loads(answer)
        return wrong
    except (TimeoutError, ValueError):
        return "checking it takes too long, or too much memory"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
