"""Tests that messages survive the wire, and nothing else is accepted."""

from __future__ import annotations

import dataclasses
import typing

import msgspec
import pytest

from engine.core import messages as m
from engine.errors import CheckpointError, InvalidParameter, UnsupportedArchitecture
from engine.ipc import wire
from engine.outputs import Prefill, SpanOutput, SpeculationStats, Stats, TokenLogprob
from engine.params import RepetitionDetection, Sampling, Span, Speculation
from engine.structured_output.layout import Constrained, Layout
from engine.structured_output.spec import (
    JSON_OBJECT,
    ControlToken,
    Grammar,
    JsonSchema,
    Literal,
    OneOf,
    Optional,
    Regex,
    Repeat,
    Sequence,
    Until,
    choice,
)

BODY = Sequence(
    (
        Literal("call "), JsonSchema('{"type":"integer"}', compact=True), OneOf(()), Optional(Regex("a|b")),
        Repeat(Until("\n"), ", "), choice(["yes", "no"]), Grammar("start: /a/"), JSON_OBJECT,
        ControlToken(300), Grammar("start: <[300]> <[301]>", (300, 301)),
    )
)  # fmt: skip
SPAN = Span(
    Sampling(0.5, 3, 0.9, 0.1, 1.1, 0.2, 0.3, {7: -1.5}, -(2**62)), 9, 2, ("stop", "é"), (1, 2), True, False, 3, 0,
    Constrained(BODY, Layout(5, 6, several=True, breaks=frozenset({10, 13}), think=(3, 4), shows_control=True)),
    RepetitionDetection(32, 2, 6), 0.25, Speculation("suffix", 4, (7, 8)),
)  # fmt: skip
BIG = m.first_id(3)
COMMANDS: list[m.Command] = [
    m.Open(BIG, (1, 2), "tenant", -1, 2.5, "sql"),
    m.Warm((1, 2), "tenant", 7, "sql"),
    m.Restore(BIG, None, (1, 2), b"\0\1", "", 0, None, 2**64 - 1, 4, 2, "sql"),
    m.Append(BIG, ()),
    m.Append(BIG, (5,), generated=True),
    m.Generate(BIG, BIG + 1, SPAN, -5, 9, (4, 5), True),
    m.Generate(BIG, BIG + 1, Span(), 2**63 - 1, 9),
    m.Generate(BIG, BIG + 1, Span(constraint=Constrained(BODY, Layout(begin=5, free=True), JSON_OBJECT)), 1, 9),
    m.Generate(BIG, BIG + 1, Span(), 2**63 - 1, 9, followers=(BIG + 2, BIG + 3), log_weights=(-0.5, -1.25, -2.0)),
    m.Score(BIG, 2, ((1,), (2, 3))),
    m.Fork(BIG, (4, 5), BIG),
    m.Truncate(BIG, 0),
    m.Hold(BIG, 1.5, ("search",)),
    m.Snap(BIG, 2),
    m.Cancel(BIG, 2),
    m.Close(BIG),
    m.GetStats(3),
    m.Compile(4, BODY, "alice"),
    m.LoadAdapter(5, "sql", "/adapters/sql", True),
    m.UnloadAdapter(6, "sql"),
    m.Leave(3),
    m.AddImage(bytes(18), 1, 2, bytes(range(12))),
    m.Stop(),
]
LOGPROB = TokenLogprob(4, -0.5, ((4, -0.5), (5, -1.0)))
REPLIES: list[m.Reply] = [
    m.PromptProgress(1, Prefill(1, 2, 3)),
    m.OutputPiece(
        1, SpanOutput((1, 2), "text\ufffd", (LOGPROB,), (None, LOGPROB), "stop", "stop", 3, 2, "body", 1, True, True)
    ),
    m.OutputPiece(1, SpanOutput(stop_reason=5, finish_reason="deadline")),
    m.Scored(1, ((-1.0, -2.0), (float("-inf"),))),
    m.Ready(1),
    m.AdapterReady(1, "sql", "00ff"),
    m.RequestRefused(1, ("why",), True),
    m.RequestFailed(1, "why"),
    m.Deferred(1),
    m.Closed(1, "why"),
    m.Snapped(2, b"\0\xff"),
    m.StatsReply(1, Stats(waiting=3, step_seconds=1.5, speculation=SpeculationStats(3, 2, accepted_at=(1, 1)))),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_is_read_as_it_was_written(command: m.Command) -> None:
    (read,) = wire.decode_commands(wire.encode_command(command))
    assert read == command and repr(read) == repr(command)


def test_replies_of_a_step_are_read_as_they_were_written() -> None:
    assert wire.decode_replies(wire.encode_replies([*REPLIES])) == REPLIES


def test_no_command_and_no_reply_was_left_out() -> None:
    internal = {m.CompileDone, m.AdapterDone, m.TransferDone}  # from threads of the core itself
    assert {type(each) for each in COMMANDS} == set(typing.get_args(m.Command)) - internal
    assert {type(each) for each in REPLIES} == set(typing.get_args(m.Reply))
    assert all(
        getattr(SPAN, field.name) != field.default for field in dataclasses.fields(Span) if field.name != "ignore_eos"
    )


def test_a_value_of_another_type_is_not_accepted() -> None:
    frame = wire.encode_command(m.Truncate(1, "all"))  # type: ignore[arg-type]  # what the types forbid
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        wire.decode_commands(frame)


def test_an_error_of_the_other_side_is_raised_as_it_was() -> None:
    for error in (
        CheckpointError("gone"),
        InvalidParameter("kv_bytes", "too few"),
        UnsupportedArchitecture("x", ["y"]),
    ):
        (failure,) = wire.decode_replies(wire.encode_replies([wire.failure(error)]))
        again = wire.error_of(failure)
        assert type(again) is type(error) and str(again) == str(error)
        assert getattr(again, "name", None) == getattr(error, "name", None)
