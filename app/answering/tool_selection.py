"""Chooses the tool for a question by embeddings, for models too small to choose well, and decides that none fits.

A tool is scored by the nearness of the question to its name, description and parameters, and by late interaction
(MaxSim, Khattab and Zaharia 2020) of the words of its name with those of the question. A tool that needs more numbers
than the question has is unlikely. The weights are a logistic regression on half of the questions of BFCL; the other
half and the tools of `training/tasks/tool_choice.py` decided nothing. The model's own probability of each name was
worth nothing beside this, nor its yes or no to whether a tool fits (`docs/tools.md`). Nearness does not tell when to
call a calculator or a search: with such a tool the model decides. Knows nothing of HTTP or of how calls are written.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from app.answering.copied_arguments import held_to_question
from app.answering.served_model import ServedModel
from app.config import Settings
from engine.tool_parsers import ToolSpec
from retrieval.embedding import Embedder, SentenceEmbedder, Vectors
from retrieval.query_rewriting import resolve

Policy = Literal["auto", "embedding", "model"]
Arguments = Literal["auto", "copied", "free"]

TINY_BELOW = 100_000_000  # weights; a smaller model chooses badly, and garbles what it copies

WEIGHTS, INTERCEPT = (4.5, 5.5, -3.2), -3.7  # of `ToolRanker.features`; `python -m bench.tool_calls` fits them anew
FITS = 0.6  # the least probability of a tool that is called; from `bench.tool_calls.by_threshold`
MAX_CACHED = 1024  # tools
_MAX_LENGTH = 2_000  # characters of a tool or a question that are looked at
_NUMBER_WORDS = (
    "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|fifty|hundred|thousand|half|quarter|"
    "third|double|twice"
)
_NUMBER = re.compile(rf"\d+(?:[.,]\d+)*|\b(?:{_NUMBER_WORDS})\b", re.IGNORECASE)
_OPERATOR = r"plus|minus|times|divided by|multiplied by"
# Words for things that a question has without naming them.
_HINTS = (
    (
        re.compile(
            rf"\d\s*(?:[-+*/×÷^]|{_OPERATOR})\s*\(?\s*\d|\d\s*%\s*of\b|√|\b(?:{_NUMBER_WORDS})\s+(?:{_OPERATOR})\b",
            re.IGNORECASE,
        ),
        "calculate an arithmetic expression",
    ),
    (re.compile(r"https?://"), "fetch a web page by its URL"),
)
# Words in the names of parameters whose text is written for the call, not copied from the question: those of
# calculators, then all.
_EXPRESSIONS = frozenset({"calculation", "equation", "expr", "expression", "formula", "input", "statement"})
_WRITTEN = _EXPRESSIONS | {"program", "query", "question", "script", "search", "sql"}


@dataclass(frozen=True, slots=True)
class RankedTool:
    """`probability`: that the tool is the one to call."""

    tool: ToolSpec
    probability: float


@dataclass(frozen=True, slots=True)
class _Embedded:
    whole: Vectors  # (size,)
    name: Vectors  # (tokens, size)


class ToolRanker:
    """Safe in threads. Vectors of tools stay in memory; the least recently used are evicted first."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._cached: OrderedDict[tuple[str, str], _Embedded] = OrderedDict()
        self._lock = threading.Lock()

    def rank(self, question: str, tools: Sequence[ToolSpec]) -> list[RankedTool]:
        """Returns all tools, the likeliest first."""
        scores = self.features(question, tools) @ np.array(WEIGHTS, np.float32) + INTERCEPT
        ranked = [RankedTool(tool, 1.0 / (1.0 + math.exp(-score))) for tool, score in zip(tools, scores, strict=True)]
        return sorted(ranked, key=lambda each: -each.probability)

    def features(self, question: str, tools: Sequence[ToolSpec]) -> Vectors:
        """Returns (tools, 3): the cosine, MaxSim of the name's words, and 1 where the question lacks numbers."""
        asked = " ".join([question[:_MAX_LENGTH], *(f"({hint})" for sign, hint in _HINTS if sign.search(question))])
        (whole,), (words,) = self._embedder.embed_query(asked), self._words([asked])
        numbers = len(_NUMBER.findall(question))
        made = list[tuple[float, float, float]]()
        for tool, each in zip(tools, self._vectors(tools), strict=True):
            named = float((each.name @ words.T).max(axis=1).mean()) if len(each.name) and len(words) else 0.0
            made.append((float(whole @ each.whole), named, float(numbers < required_numbers(tool))))
        return np.array(made, np.float32)

    def _vectors(self, tools: Sequence[ToolSpec]) -> list[_Embedded]:
        keys = [(described(tool), spoken(tool.name)) for tool in tools]
        with self._lock:
            known = {key: self._cached[key] for key in keys if key in self._cached}
        missing = [key for key in dict.fromkeys(keys) if key not in known]
        if missing:
            wholes = self._embedder.embed([text for text, _ in missing])
            names = self._words([name for _, name in missing])
            for key, whole, name in zip(missing, wholes, names, strict=True):
                known[key] = _Embedded(whole, name)
        with self._lock:
            for key in keys:
                self._cached[key] = known[key]
                self._cached.move_to_end(key)
            while len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        return [known[key] for key in keys]

    def _words(self, texts: Sequence[str]) -> list[Vectors]:
        """Returns the vectors of each text's own tokens, without those that the embedder adds."""
        lead = self._embedder.leading
        pieces = self._embedder.pieces(texts)
        found = self._embedder.tokens(texts)
        return [np.asarray(made[lead : lead + len(own)]) for made, own in zip(found, pieces, strict=True)]


def spoken(name: str) -> str:
    """Returns a name's words: `getWeather.by_city` is "get Weather by city"."""
    return re.sub(r"[._-]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)).strip()


def described(tool: ToolSpec) -> str:
    """Returns the text that stands for a tool: its name, its description, its parameters."""
    parameters = "; ".join(
        f"{spoken(name)}: {each['description']}" if each.get("description") else spoken(name)
        for name, each in _parameters(tool).items()
    )
    return f"{spoken(tool.name)}: {tool.description or ''} {parameters}"[:_MAX_LENGTH].strip()


def required_numbers(tool: ToolSpec) -> int:
    """Returns how many numbers a call needs."""
    schema, parameters = tool.parameters or {}, _parameters(tool)
    required = schema.get("required")
    wanted = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return sum(parameters.get(name, {}).get("type") in ("integer", "number") for name in wanted)


def is_open(tool: ToolSpec, said: str) -> bool:
    """Returns whether a tool may answer a question that it is not near to: all that it requires is one text that is
    written for the call, such as a query. An expression counts where the text of the chat, `said`, has a number."""
    parameters = _parameters(tool)
    required = (tool.parameters or {}).get("required", list(parameters))
    if not isinstance(required, list) or len(required) != 1 or str(required[0]) not in parameters:
        return False
    name = str(required[0])
    words = {*spoken(name).lower().split()}
    if parameters[name].get("type") != "string" or (words.isdisjoint(_WRITTEN) and words != {"code"}):
        return False
    return words.isdisjoint(_EXPRESSIONS) or _NUMBER.search(said) is not None


def _parameters(tool: ToolSpec) -> Mapping[str, Mapping[str, Any]]:  # Any: JSON
    found = (tool.parameters or {}).get("properties")
    if not isinstance(found, Mapping):
        return {}
    return {str(name): each if isinstance(each, Mapping) else {} for name, each in found.items()}


@dataclass(slots=True)
class ToolSelector:
    """Selects the tools of an answer's first turn, by the setting `tool_selection`."""

    policy: Policy
    ranker: ToolRanker
    arguments: Arguments = "auto"
    guided_parameters: Callable[[str], Awaitable[Mapping[str, Any] | None]] | None = None  # Any: JSON; of the server's

    @classmethod
    def of_settings(cls, settings: Settings) -> ToolSelector:
        """Returns one with the settings' embedder, which is loaded at its first text."""
        return cls(settings.tool_selection, ToolRanker(SentenceEmbedder(settings.embedder)), settings.tool_arguments)

    def selects(self, served: ServedModel) -> bool:
        """Returns whether the tool is chosen here, not by the model."""
        return self.policy == "embedding" or (self.policy == "auto" and served.parameters < TINY_BELOW)

    def copies(self, served: ServedModel) -> bool:
        """Returns whether the arguments of a call are held to the question, or to what its tool has."""
        return self.arguments == "copied" or (self.arguments == "auto" and served.parameters < TINY_BELOW)

    async def held(self, served: ServedModel, tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        """Returns tools of the server with the parameters to which a model's calls are held: narrower than those it is
        shown where a tool has such, and arguments are held."""
        if self.guided_parameters is None or not self.copies(served):
            return tuple(tools)
        found = [await self.guided_parameters(tool.name) for tool in tools]
        return tuple(
            tool if narrower is None else replace(tool, parameters=narrower)
            for tool, narrower in zip(tools, found, strict=True)
        )

    async def select(
        self, served: ServedModel, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec]
    ) -> tuple[ToolSpec, ...] | None:
        """Returns the tools of which the answer to `messages` has to call one, none where none fits; None where the
        model is free, as after a tool's result, and where no tool is near and one is open. Any: JSON of a chat
        template."""
        if not tools or not messages or messages[-1]["role"] != "user" or not self.selects(served):
            return None
        *earlier, question = [str(each.get("content") or "") for each in messages if each["role"] == "user"]
        asked = resolve(question, [(text, "") for text in earlier]).text
        best = (await asyncio.to_thread(self.ranker.rank, asked, tools))[0]
        said = "\n".join(str(each.get("content") or "") for each in messages)
        if best.probability < FITS:
            return None if any(is_open(tool, said) for tool in tools) else ()
        if is_open(best.tool, said) or not self.copies(served):
            return (best.tool,)
        return (held_to_question(best.tool, question),)
