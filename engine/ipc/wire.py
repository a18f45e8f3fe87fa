"""Encodes commands and replies as bytes and back: MessagePack, each value checked against its declared type.

A frame is a list of (kind, fields). A constraint is a tree whose nodes have no kind of their own, so it travels as
lists that begin with one. Knows nothing of sockets.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

import msgspec

from engine import errors
from engine.core import messages as m
from engine.params import Span
from engine.structured_output import spec
from engine.structured_output.layout import Constrained, Layout

T = TypeVar("T")
Plain = Any  # values of MessagePack: numbers, texts, lists

_encoder = msgspec.msgpack.Encoder()
_CONSTRAINTS: dict[str, type[spec.Constraint]] = {
    kind.__name__: kind
    for kind in (
        spec.Literal, spec.JsonSchema, spec.Regex, spec.Grammar, spec.Until, spec.Sequence, spec.OneOf, spec.Optional,
        spec.Repeat, spec.Substring, spec.ControlToken,
    )
}  # fmt: skip
_hints = get_type_hints(Span)
_span_fields = [each.name for each in fields(Span) if each.name != "constraint"]
_Span = msgspec.defstruct("_Span", [(name, _hints[name]) for name in _span_fields], array_like=True)


class _Generate(msgspec.Struct, array_like=True):
    """`messages.Generate`, its constraint apart."""

    # all fields but the span, in order
    rest: tuple[int, int, int, int, tuple[int, ...], bool, tuple[int, ...], tuple[float, ...]]
    span: _Span  # type: ignore[valid-type]  # made above, from the fields of `Span`
    layout: Layout | None
    parts: list[Plain]  # of the constraint, the body's first


class _Constraint(msgspec.Struct, array_like=True):
    """`messages.Compile`."""

    request: int
    tenant: str
    constraint: Plain


class Failure(msgspec.Struct, array_like=True):
    """An error of the engine that ended a process."""

    kind: str
    arguments: tuple[Any, ...]
    message: str


class Hello(msgspec.Struct, array_like=True):
    """The first command of every client: its reply is `messages.Loaded`."""


_COMMANDS: tuple[type, ...] = (
    Hello, m.Open, m.Warm, m.Restore, m.Append, _Generate, m.Score, m.Fork, m.Truncate, m.Hold, m.Snap, m.Cancel,
    m.Close, m.GetStats, _Constraint, m.Leave, m.Stop, m.AddImage, m.LoadAdapter, m.UnloadAdapter,
)  # fmt: skip
_REPLIES: tuple[type, ...] = (
    m.Loaded, Failure, m.PromptProgress, m.OutputPiece, m.Scored, m.Ready, m.RequestRefused, m.RequestFailed,
    m.Deferred, m.Closed, m.Snapped, m.StatsReply, m.AdapterReady,
)  # fmt: skip


class _Kinds:
    """The kinds of one direction, by number."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self.number = {kind: at for at, kind in enumerate(kinds)}
        self._frame = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]])
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = [msgspec.msgpack.Decoder(kind) for kind in kinds]

    def decode(self, data: bytes) -> list[Any]:
        return [self._decoders[kind].decode(raw) for kind, raw in self._frame.decode(data)]


_commands, _replies = _Kinds(_COMMANDS), _Kinds(_REPLIES)


def encode_command(command: m.Command | Hello) -> bytes:
    message: object = command
    match command:
        case m.Generate():
            message = _generate(command)
        case m.Compile():
            message = _Constraint(command.request, command.tenant, _lists(command.constraint))
    return _encoder.encode([(_commands.number[type(message)], message)])


def decode_commands(data: bytes) -> list[m.Command | Hello]:
    """Raises `msgspec.ValidationError`: a client of another version."""
    return [_command(message) for message in _commands.decode(data)]


def encode_replies(replies: list[m.Reply | m.Loaded | Failure]) -> bytes:
    return _encoder.encode([(_replies.number[type(reply)], reply) for reply in replies])


def decode_replies(data: bytes) -> list[Any]:
    """Returns a list of `messages.Reply`, `messages.Loaded` or `Failure`."""
    return _replies.decode(data)


def _command(message: object) -> m.Command | Hello:
    match message:
        case _Generate(rest, span, layout, parts):
            sequence, request, seed, max_tokens, delivered, begun, followers, log_weights = rest
            constraint = None
            if layout is not None:
                body, *answer = map(_constraint, parts)
                constraint = Constrained(body, layout, *answer)
            made = Span(**{name: getattr(span, name) for name in _span_fields}, constraint=constraint)
            return m.Generate(
                sequence, request, made, seed, max_tokens, delivered, begun, followers, log_weights
            )  # fmt: skip
        case _Constraint(request, tenant, constraint):
            return m.Compile(request, _constraint(constraint), tenant)
    return message  # type: ignore[return-value]  # the rest need no decoding


def _generate(command: m.Generate) -> _Generate:
    span, held = command.span, command.span.constraint
    rest = (
        command.sequence, command.request, command.seed, command.max_tokens, command.delivered, command.begun,
        command.followers, command.log_weights,
    )  # fmt: skip
    made = _Span(*(getattr(span, name) for name in _span_fields))
    if held is None:
        return _Generate(rest, made, None, [])
    return _Generate(rest, made, held.layout, [_lists(part) for part in held.parts])


def _lists(part: object) -> Plain:
    """Encodes a constraint, or a field of one, as lists."""
    if isinstance(part, tuple):
        return [_lists(each) for each in part]
    if type(part).__name__ in _CONSTRAINTS:
        return [type(part).__name__, *(_lists(getattr(part, name)) for name in type(part).__match_args__)]  # type: ignore[attr-defined]  # a dataclass has them
    return part


def _constraint(lists: Plain) -> spec.Constraint:
    kind, *parts = lists
    return _CONSTRAINTS[kind](*map(_part, parts))


def _part(part: Plain) -> Plain:
    if not isinstance(part, list):
        return part
    if part and isinstance(part[0], str):
        return _constraint(part)
    return tuple(each if isinstance(each, int) else _constraint(each) for each in part)


def failure(error: errors.EngineError) -> Failure:
    """Encodes the error that a core could not be started with."""
    name = getattr(error, "name", None)
    return Failure(type(error).__name__, () if name is None else (name,), str(error))


def error_of(failure: Failure) -> errors.EngineError:
    """Rebuilds the error on the client's side."""
    kind = getattr(errors, failure.kind, errors.EngineError)
    error: errors.EngineError = kind.__new__(kind)
    Exception.__init__(error, failure.message)
    if failure.arguments:
        error.name = failure.arguments[0]  # type: ignore[attr-defined]  # `InvalidParameter` has one
    return error
