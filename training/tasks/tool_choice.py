"""Choosing among tools never seen before: the right one, its arguments, several calls, none, and calls that go wrong.

Sample: tools count_parcels(site), getWeather(town, unit) and "weather in Oslo" → getWeather {"town": "Oslo"} → tool
{"temperature": 12, "sky": "rain"} → "Temperature: 12, sky: rain."; then "how many lamps are there?" → "None of my tools
can do that." One list of tools serves up to four questions. The tools come from `training.tool_bank`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from training.conversation import Case, Conversation, Message, ModelReply, Phrasing, SpokenCall, Tool, Verdict
from training.phrases import read
from training.text.framing import often_framed
from training.text.noise import casual
from training.tool_bank.offered import Offered, offer
from training.tool_bank.repairs import KINDS, Mishap, mishap
from training.tool_bank.requests import Request, request
from training.tool_bank.results import ToolOutcome, answer, result
from training.tool_bank.toolbox import missing, toolbox

Kind = Literal["call", "none", "several", "repair"]
_REFUSALS = (
    "None of my tools can do that.",
    "None of my tools can do that.",
    "None of my tools fits that.",
    "None of my tools is made for that.",
)
_CHAT = ("greeting", "thanks", "how are you", "goodbye", "praise")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A user's wishes of a list of tools: the calls in order, each with its result and the label to tell it under."""

    text: str
    calls: tuple[SpokenCall, ...]
    results: tuple[ToolOutcome, ...]
    labels: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        return answer(self.results, self.labels)


def _call(rng: Random, phrasing: Phrasing, tools: list[Offered]) -> tuple[Offered, Request]:
    while True:
        tool = rng.choice(tools)
        if asked := request(rng, tool, phrasing):
            return tool, asked


def sample_request(rng: Random, phrasing: Phrasing, tools: list[Offered]) -> tuple[Offered, str]:
    """Samples one of `tools` and the text of a request for it."""
    tool, asked = _call(rng, phrasing, tools)
    return tool, asked.text


def _one(rng: Random, phrasing: Phrasing, tools: list[Offered]) -> _Asked:
    tool, asked = _call(rng, phrasing, tools)
    return _Asked(asked.text, asked.calls, (result(rng, tool.concept, phrasing),))


def _several(rng: Random, phrasing: Phrasing, tools: list[Offered]) -> _Asked:
    """One request with several values of a parameter, or two requests in one message."""
    count = rng.choice((2, 2, 3))
    spreading = [tool for tool in tools if request(Random(0), tool, phrasing, several=2)]
    if spreading and rng.random() < 0.55:
        tool = rng.choice(spreading)
        asked = request(rng, tool, phrasing, several=count)
        if asked and len(asked.calls) > 1:
            results = tuple(result(rng, tool.concept, phrasing) for _ in asked.calls)
            labels = tuple(str(call.arguments[asked.spread]) for call in asked.calls)
            return _Asked(asked.text, asked.calls, results, labels)
    for _ in range(20):
        parts = [_call(rng, phrasing, tools) for _ in range(2)]
        if parts[0][1].calls != parts[1][1].calls:
            break
    else:  # the only tool takes nothing
        return _one(rng, phrasing, tools)
    (first, a), (second, b) = parts
    text_a = a.text if a.text[-1] in ".?!" else a.text + "."
    wording = read("tool_choice")["both"].ask(rng, phrasing)
    text = wording.replace("{a}", text_a, 1).replace("{b}", b.text, 1)
    results = (result(rng, first.concept, phrasing), result(rng, second.concept, phrasing))
    return _Asked(text, a.calls + b.calls, results)


def _none(rng: Random, phrasing: Phrasing, progress: float, tools: list[Offered]) -> str:
    """A request that no tool of the list can do."""
    while True:
        tool = offer(rng, missing(rng, phrasing, progress, tools), phrasing, progress, ask_for=True)
        if asked := request(rng, tool, phrasing):
            return asked.text


def _mishap(rng: Random, phrasing: Phrasing, tools: list[Offered], first: bool = True) -> tuple[Offered, Mishap]:
    """Returns the way a call goes wrong; a schema that says the wrong type does not follow calls of the right type."""
    kinds = [kind for kind in KINDS if first or kind != "number"]
    wanted = rng.choices(kinds, [read("tool_choice")[kind].weight for kind in kinds])[0]
    for attempt in range(1000):
        tool, asked = _call(rng, phrasing, tools)
        if found := mishap(rng, tool, asked, phrasing, wanted if attempt < 20 else rng.choice(kinds)):
            return tool, found
    raise AssertionError("a call can always be repeated")


def _count(rng: Random, progress: float) -> int:
    """Returns the number of tools: one at first, then more; long lists stay rarer, as they cost the most tokens."""
    most = 1 if progress < 0.06 else 2 if progress < 0.15 else 4 if progress < 0.35 else 8
    return rng.choices(range(1, most + 1), [4, 6, 5, 5, 3, 3, 2, 2][:most])[0]


def _system(rng: Random, phrasing: Phrasing) -> list[Message]:
    return [Message("system", read("tool_choice")["system"].ask(rng, phrasing))] if rng.random() < 0.2 else []


def _answered(rng: Random, asked: _Asked) -> list[Message]:
    framed = 0.5 if rng.random() < 0.5 else 0.0
    found = zip(asked.calls, asked.results, strict=True)
    return [
        Message("user", asked.text),
        Message("assistant", calls=asked.calls),
        *(Message("tool", often_framed(rng, one.content, call.name, framed)) for call, one in found),
        Message("assistant", asked.told),
    ]


def _repaired(rng: Random, phrasing: Phrasing, tool: Offered, gone_wrong: Mishap) -> list[Message]:
    messages = [
        Message("user", gone_wrong.text),
        Message("assistant", calls=(gone_wrong.failed,)),
        Message("tool", gone_wrong.error),
    ]
    if not gone_wrong.repaired:
        return [*messages, Message("assistant", gone_wrong.told, thinking=gone_wrong.thinking)]
    outcome = result(rng, tool.concept, phrasing)
    return [
        *messages,
        Message("assistant", thinking=gone_wrong.thinking, calls=gone_wrong.repaired[:1]),
        Message("tool", often_framed(rng, outcome.content, tool.tool["function"]["name"], 0.3)),
        Message("assistant", answer((outcome,))),
    ]


def _schemas(tools: list[Offered]) -> tuple[Tool, ...]:
    return tuple(offered.tool for offered in tools)


def conversation(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    """One to five requests over one list of tools; only the last may go wrong, as thoughts are kept only there."""
    tools = toolbox(rng, phrasing, progress, _count(rng, progress))
    turns = 1 if rng.random() < 0.25 else rng.randint(2, 5)
    messages = _system(rng, phrasing)
    for turn in range(turns):
        roll = rng.random()
        if roll < 0.25:
            messages += [
                Message("user", _none(rng, phrasing, progress, tools)),
                Message("assistant", rng.choice(_REFUSALS)),
            ]
        elif roll < 0.29:
            kind = read("smalltalk")[rng.choice(_CHAT)]
            messages += [
                Message("user", casual(rng, kind.ask(rng, phrasing))),
                Message("assistant", rng.choice(kind.answers)),
            ]
        elif roll < 0.42 and progress > 0.2:
            messages += _answered(rng, _several(rng, phrasing, tools))
        elif turn == turns - 1 and roll < 0.58 and progress > 0.25:
            tool, gone_wrong = _mishap(rng, phrasing, tools, first=turn == 0)
            tools = [replace(other, tool=gone_wrong.tool) if other is tool else other for other in tools]
            messages += _repaired(rng, phrasing, tool, gone_wrong)
        else:
            messages += _answered(rng, _one(rng, phrasing, tools))
    return Conversation(tuple(messages), _schemas(tools))


def same(a: Any, b: Any) -> bool:
    """JSON equality in which 3 is 3.0 but 1 is not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    return type(a) is type(b) and bool(a == b)


class _Match:
    """Compares two calls of these tools; an argument may be left out or given when it is the default."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._properties = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools}

    def _without_defaults(self, call: SpokenCall) -> dict[str, Any]:
        properties = self._properties.get(call.name, {})
        return {
            key: value
            for key, value in call.arguments.items()
            if not ("default" in properties.get(key, {}) and same(properties[key]["default"], value))
        }

    def __call__(self, a: SpokenCall, b: SpokenCall) -> bool:
        return a.name == b.name and same(self._without_defaults(a), self._without_defaults(b))

    def all_of(self, calls: Sequence[SpokenCall], wanted: Sequence[SpokenCall]) -> bool:
        """Each wanted call once, in any order, and no other."""
        left = list(wanted)
        for call in calls:
            found = next((other for other in left if self(call, other)), None)
            if found is None:
                return False
            left.remove(found)
        return not left


def _tells(replies: Sequence[ModelReply], facts: Sequence[str]) -> bool:
    last = replies[-1]
    held = last.content.casefold()
    return not last.broken and not last.calls and bool(held) and all(fact.casefold() in held for fact in facts)


def _plain(reply: ModelReply) -> bool:
    return not reply.broken and not reply.calls and bool(reply.content.strip()) and "<tool_call>" not in reply.content


def case(rng: Random, tools: int, kind: Kind, phrasing: Phrasing = "held_out") -> Case:
    """One question over `tools` tools, by default ones that were never trained on."""
    offered = toolbox(rng, phrasing, 1, tools)
    opening = _system(rng, phrasing)
    schemas = _schemas(offered)
    if kind == "none":
        text = _none(rng, phrasing, 1, offered)
        prompt = Conversation((*opening, Message("user", text)), schemas)
        wanted = (ModelReply("", _REFUSALS[0], ()),)
        return Case(prompt, lambda replies: {"no call": bool(replies) and _plain(replies[0])}, wanted)
    if kind == "repair":
        return _repair_case(rng, phrasing, opening, offered)
    asked = (_several if kind == "several" else _one)(rng, phrasing, offered)
    match = _Match(schemas)
    facts = [fact for one in asked.results for fact in one.facts] if asked.told != "Done." else []

    def judge(replies: Sequence[ModelReply]) -> Verdict:
        calls = replies[0].calls if replies and not replies[0].broken else ()
        told = len(replies) > 1 and _tells(replies, facts)
        if kind == "several":
            return {"all calls": match.all_of(calls, asked.calls), "result told": told}
        right_tool = len(calls) == 1 and calls[0].name == asked.calls[0].name
        return {
            "right tool": right_tool,
            "right arguments": right_tool and match(calls[0], asked.calls[0]),
            "result told": told,
        }

    def answer_call(call: SpokenCall) -> str:
        for wanted_call, one in zip(asked.calls, asked.results, strict=True):
            if match(call, wanted_call):
                return one.content
        return '{"error": "wrong call"}'

    return Case(
        Conversation((*opening, Message("user", asked.text)), schemas),
        judge,
        (ModelReply("", "", asked.calls), ModelReply("", asked.told, ())),
        answer_call,
    )


def _repair_case(rng: Random, phrasing: Phrasing, opening: list[Message], offered: list[Offered]) -> Case:
    """A call that has already failed: the model is to repair it, or to say that it can't be done."""
    tool, gone_wrong = _mishap(rng, phrasing, offered)
    schemas = tuple(gone_wrong.tool if other is tool else other.tool for other in offered)
    match = _Match(())
    outcome = result(rng, tool.concept, phrasing)
    error = gone_wrong.told.removeprefix("That did not work: ").rstrip(".")

    def judge(replies: Sequence[ModelReply]) -> Verdict:
        if not replies or replies[0].broken:
            return {"repaired": False}
        if not gone_wrong.repaired:
            return {"repaired": _plain(replies[0]) and error in replies[0].content}
        calls = replies[0].calls
        return {"repaired": len(calls) == 1 and any(match(calls[0], call) for call in gone_wrong.repaired)}

    def answer_call(call: SpokenCall) -> str:
        return outcome.content if any(match(call, other) for other in gone_wrong.repaired) else gone_wrong.error

    prompt = Conversation(
        (
            *opening,
            Message("user", gone_wrong.text),
            Message("assistant", calls=(gone_wrong.failed,), learned=False),
            Message("tool", gone_wrong.error),
        ),
        schemas,
    )
    wanted = (
        (ModelReply(gone_wrong.thinking, "", gone_wrong.repaired[:1]), ModelReply("", answer((outcome,)), ()))
        if gone_wrong.repaired
        else (ModelReply(gone_wrong.thinking, gone_wrong.told, ()),)
    )
    return Case(prompt, judge, wanted, answer_call)
