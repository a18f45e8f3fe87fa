"""An assistant's turn made of pieces: however they were split, the message is the same, and so is its stream."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from engine.outputs import TokenLogprob
from engine.tool_parsers import TOOL_PARSERS, ToolSpec
from engine.tool_parsers.json_calls import list_of_calls, one_call
from reasoning.thinking import Part, Piece
from reasoning.turn import CallMore, CallStart, Content, Delta, Reasoning, Turn, WholeTurn
from tests.engine.tool_parsers.samples import tool_parser

CALL = '\n{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}\n'
OTHER = '\n{"name": "nobody.knows-me", "arguments": {"text": "Ü \\n \\"🚲\\" \\ud83d\\ude00"}}\n'
EMPTY = '{"arguments": null, "name": "add"}'
QUOTED = '{"arguments": "{\\"a\\": 1}", "name": "add"}'
NO_CALL = '\n{"name": 5, "arguments": {}}\n'
NO_JSON = "\nI call add(1, 2) \n"
CUT = '\n{"name": "add", "arguments": {"a": 1, "b": "two'


@dataclass(frozen=True)
class Stretch:
    """Text of one part of an answer, before it is split."""

    part: Part
    text: str
    section: int = 0


def stretches(*texts: str | tuple[Part, str]) -> list[Stretch]:
    """A plain text is a body; each stretch is a section of its own."""
    parts: list[tuple[Part, str]] = [("call", text) if isinstance(text, str) else text for text in texts]
    return [Stretch(part, text, at) for at, (part, text) in enumerate(parts)]


def think(text: str) -> tuple[Part, str]:
    return "thinking", text


def say(text: str) -> tuple[Part, str]:
    return "answer", text


def split(script: list[Stretch], draw: random.Random) -> list[Piece]:
    """The script in pieces of random sizes, empty ones among them; the last has the finish reason."""
    pieces: list[Piece] = []
    for stretch in script:
        text = stretch.text
        while text:
            size = draw.choice((0, 1, 1, 2, 3, 5, 8, 40))
            pieces.append(Piece(stretch.part, text[:size], 1, section=stretch.section))
            text = text[size:]
        if draw.random() < 0.3:  # a marker's token
            pieces.append(Piece("answer", "", 1, section=stretch.section))
    return [*pieces, Piece("answer", "", 0, finish_reason="stop")]


def run(pieces: list[Piece], parser: Any = one_call) -> tuple[dict[str, Any], str | None, list[Delta]]:
    """The whole message, its calls' ids left out; the finish reason; the deltas of a stream."""
    turn, whole, deltas = Turn(parser), WholeTurn(may_call=parser is not None), []
    for piece in pieces:
        assert turn.finish_reason is None
        for delta in turn.take(piece):
            whole.add(delta)
            deltas.append(delta)
    message = whole.message()
    for call in message.get("tool_calls", []):
        assert len(call.pop("id")) == 9
    return message, turn.finish_reason, deltas


def joined(deltas: list[Delta]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning and calls, put together as a client does it."""
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        match delta:
            case Content(text, _):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(index, _, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallMore(index, arguments):
                assert index == len(calls) - 1 and arguments
                calls[index] = (calls[index][0], calls[index][1] + arguments)
    return content, reasoning, calls


def test_content_is_drafted_as_its_piece_is() -> None:
    for parser in (None, one_call):
        turn = Turn(parser)
        pieces = [Piece("answer", "a", 1), Piece("answer", "b ", 2, drafted=2), Piece("answer", "c", 1)]
        deltas = [delta for piece in pieces for delta in turn.take(piece)]
        assert [delta.drafted for delta in deltas if isinstance(delta, Content)] == [False, True, False]


# What an answer may be made of -> its content, its calls, as it must come out
SCRIPTS: list[tuple[list[Stretch], str | None, list[tuple[str, str]]]] = [
    (stretches(), None, []),
    (stretches(say("Hello, \n\n you. \n")), "Hello, \n\n you. \n", []),
    (stretches(say("  \n ")), "  \n ", []),
    (stretches(think("Hm. "), say("Yes.")), "Yes.", []),
    (stretches(CALL), None, [("add", '{"a": 1, "b": [2, "}"]}')]),
    (stretches(say(" \n\n"), CALL), None, [("add", '{"a": 1, "b": [2, "}"]}')]),
    (stretches(say("I look. \n\n"), CALL), "I look.", [("add", '{"a": 1, "b": [2, "}"]}')]),
    (
        stretches(think("a"), say("b \t"), CALL, say("\n"), OTHER, say("\n\n"), EMPTY, QUOTED),
        "b",
        [
            ("add", '{"a": 1, "b": [2, "}"]}'), ("nobody.knows-me", '{"text": "Ü \\n \\"🚲\\" \\ud83d\\ude00"}'),
            ("add", "{}"), ("add", '{"a": 1}'),
        ],
    ),
    (stretches(CALL, think("more?"), CALL), None, [("add", '{"a": 1, "b": [2, "}"]}')] * 2),
    (stretches(NO_CALL, CALL), NO_CALL.rstrip(), [("add", '{"a": 1, "b": [2, "}"]}')]),
    (stretches(CALL, NO_JSON), NO_JSON, [("add", '{"a": 1, "b": [2, "}"]}')]),
    (stretches(say("So: "), NO_JSON, say(" Sorry.")), "So: " + NO_JSON + " Sorry.", []),
    (stretches(say("x"), CUT), "x", [("add", '{"a": 1, "b": "two')]),
    (stretches('{"name', say("Sorry.")), '{"nameSorry.', []),
    (
        stretches(NO_CALL, NO_JSON, EMPTY, CUT),
        NO_CALL.rstrip() + NO_JSON,
        [("add", "{}"), ("add", '{"a": 1, "b": "two')],
    ),
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: " ".join(each.part for each in s[0]) or "nothing")
def test_every_split_gives_the_same_message(
    script: tuple[list[Stretch], str | None, list[tuple[str, str]]],
) -> None:
    parts, content, calls = script
    for seed in range(1000):
        message, finish, deltas = run(split(parts, random.Random(seed)))
        assert message["content"] == content, seed
        assert [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])] == calls
        assert message.get("reasoning_content", "") == "".join(s.text for s in parts if s.part == "thinking")
        assert finish == ("tool_calls" if calls else "stop")
        assert joined(deltas) == (content or "", message.get("reasoning_content", ""), calls)


def test_random_scripts_in_a_thousand_splits_each() -> None:
    draw = random.Random(5)
    bodies = [CALL, OTHER, EMPTY, QUOTED, NO_CALL, NO_JSON]
    for _ in range(6):
        texts: list[str | tuple[Part, str]] = [think("Let me see. ")] * draw.randint(0, 1)
        texts += draw.choices([*bodies, say("text "), say(" \n"), say("more")], k=draw.randint(1, 6))
        script = stretches(*texts, *([CUT] * draw.randint(0, 1)))
        # All in one piece for each stretch: what the splits are held to.
        lumps = [Piece(s.part, s.text, 1, section=s.section) for s in script]
        expected = run([*lumps, Piece("answer", "", 0, finish_reason="stop")])
        for seed in range(1000):
            message, finish, deltas = run(split(script, random.Random(seed)))
            assert (message, finish) == expected[:2], (script, seed)
            assert joined(deltas) == joined(expected[2])


def test_a_list_of_calls_in_one_body_is_several_calls() -> None:
    body = stretches(say("Two:"), f'[{EMPTY}, {{"name": "b", "arguments": {{"x": ["]"]}}}}]')
    for seed in range(200):
        message, finish, _ = run(split(body, random.Random(seed)), list_of_calls)
        assert [c["function"]["name"] for c in message["tool_calls"]] == ["add", "b"]
        assert finish == "tool_calls" and message["content"] == "Two:"


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_a_call_is_known_by_its_name_before_its_arguments_end(name: str) -> None:
    """The first fragment is sent while the body goes on, by every tool-call parser."""
    parser = (
        tool_parser(name).plan([ToolSpec("add", parameters={"properties": {"a": {"type": "string"}}})], "auto").parser
    )
    written = {
        "gemma4": 'call:add{a:<|"|>x',
        "harmony": ' to=functions.add json{"a": "x',
        "hermes": '\n{"name": "add", "arguments": {"a": "x',
        "llama3_json": '{"name": "add", "parameters": {"a": "x',
        "llama4_json": '{"name": "add", "parameters": {"a": "x',
        "mistral": '[{"name": "add", "arguments": {"a": "x',
        "qwen3_coder": "\n<function=add>\n<parameter=a>\nx",
    }[name]
    turn = Turn(parser)
    deltas = [d for character in written for d in turn.take(Piece("call", character, 1, section=1))]
    assert isinstance(deltas[0], CallStart) and deltas[0].name == "add"
    ((_, arguments),) = joined(deltas)[2]
    assert arguments.startswith('{"a":')
    assert turn.finish_reason is None


def test_a_cut_answer_says_length_also_when_it_has_calls() -> None:
    turn = Turn(one_call)
    turn.take(Piece("call", CALL, 9, section=1))
    turn.take(Piece("answer", "", 1, finish_reason="length"))
    assert turn.finish_reason == "length"


def test_without_tools_what_looks_like_a_call_is_text() -> None:
    message, finish, _ = run([Piece("answer", CALL, 9), Piece("answer", " \n", 1, finish_reason="stop")], None)
    assert (message["content"], finish) == (CALL + " \n", "stop") and "tool_calls" not in message


def test_logprobs_stay_with_the_text_they_are_of() -> None:
    one, two, three = (TokenLogprob(id, -0.5) for id in (1, 2, 3))
    spoken = [Piece("answer", "Hi", 1, logprobs=(one,)), Piece("answer", "\n", 1, logprobs=(two,))]
    more = Piece("answer", "you", 1, logprobs=(three,))
    marker = Piece("answer", "", 1, logprobs=(three,), section=1)
    call = Piece("call", CALL, 9, logprobs=(three, three), section=1)
    end = Piece("answer", "", 0, finish_reason="stop")
    for pieces, expected in (
        ([*spoken, end], [one, two]),
        ([*spoken, more, end], [one, two, three]),
        ([*spoken, marker, call, end], [one]),  # the line break before a call is nobody's
        ([marker, call, marker, end], []),
    ):
        turn, whole = Turn(one_call), WholeTurn(may_call=True)
        for delta in (delta for piece in pieces for delta in turn.take(piece)):
            whole.add(delta)
        assert whole.logprobs == expected
