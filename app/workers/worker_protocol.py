"""Messages between the primary and a worker, over a socket of this machine.

MessagePack with the length in front, each message checked against its type. Knows nothing of their effects.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from app.admission.rate_limits import Counts
from app.errors import ApiError

LENGTH = 4  # bytes

M = TypeVar("M")


class Start(msgspec.Struct):
    """The first message to a worker's process, on its stdin. `client` is its number at the engines, `listener` a
    socket's file; the primary's own sockets lie in `directory`."""

    settings: str  # as JSON
    client: int
    directory: str
    listener: int


# -- from a worker


class WorkerHello(msgspec.Struct, tag=True):
    """Of the worker with this number. The primary sends the engines' places."""

    client: int


class WorkerReady(msgspec.Struct, tag=True):
    """It accepts connections."""


class AdmissionRequest(msgspec.Struct, tag=True):
    """Asks for admission of the sender of these headers. An `Admitted` or an `AdmissionDenied` of the same number
    follows.
    """

    number: int
    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    address: str


class WorkerEvents(msgspec.Struct, tag=True, omit_defaults=True):
    """Events since the last such message, in order within each list."""

    came: list[str] = []  # endpoints
    worked: list[tuple[int, str, str, int, int, int]] = []  # its number; the arguments of `Counting.admit`
    first: list[tuple[str, float]] = []
    gaps: list[tuple[str, float]] = []
    got: list[tuple[int, int, int]] = []  # of a work: tokens, and cached ones
    done: list[tuple[int, bool]] = []  # of a work: whether whole
    ended: list[tuple[str, str, float, bool | None]] = []
    spent: list[tuple[int, int]] = []  # by number of the `AdmissionRequest`
    left: list[tuple[int, int]] = []  # with the tokens that all of it took
    refused: list[str] = []  # reasons
    errors: list[str] = []  # codes
    routed: list[tuple[str, bool]] = []  # answers for `auto`, by model, and whether each was given


# -- from the primary


class Admitted(msgspec.Struct, tag=True, omit_defaults=True):
    """`waits` is each model's load: seconds of waiting, and answers."""

    number: int
    id: str
    name: str
    role: str
    key_id: str | None
    models: list[str] | None = None  # that the key is for; None: all
    metered: bool = False
    key: str = ""
    limits: tuple[int | None, int | None, int | None] = (None, None, None)
    counts: Counts | None = None  # of the key's tokens, where they are limited
    terms: tuple[int, float | None, int | None, bool] = (0, None, None, False)
    windows: list[tuple[str, int, int, float]] = []
    waits: dict[str, tuple[float, int]] = {}


class AdmissionDenied(msgspec.Struct, tag=True):
    number: int
    status: int
    message: str
    param: str | None
    code: str | None
    kind: str
    headers: dict[str, str]

    @classmethod
    def of(cls, number: int, error: ApiError) -> AdmissionDenied:
        return cls(number, error.status, error.message, error.param, error.code, error.kind, error.headers)

    def error(self) -> ApiError:
        return ApiError(
            self.status, self.message, param=self.param, code=self.code, kind=self.kind, headers=self.headers
        )


class EngineMoved(msgspec.Struct, tag=True):
    """A model's engine is there now, or (None) gone for a moment."""

    model: str
    directory: str | None


class EngineEnded(msgspec.Struct, tag=True):
    """A model's engine is gone for good."""

    model: str
    message: str


class Draining(msgspec.Struct, tag=True):
    """Take on nothing new."""


class End(msgspec.Struct, tag=True):
    """End open requests and exit."""


FromWorker = WorkerHello | WorkerReady | AdmissionRequest | WorkerEvents
FromPrimary = Admitted | AdmissionDenied | EngineMoved | EngineEnded | Draining | End

_encoder = msgspec.msgpack.Encoder()
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
from_primary: msgspec.msgpack.Decoder[FromPrimary] = msgspec.msgpack.Decoder(FromPrimary)


def framed(message: FromWorker | FromPrimary | Start) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(LENGTH, "big") + data


async def heard(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
    """The next message; None when the other side is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH), "big")
        return decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
