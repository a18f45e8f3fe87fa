"""Messages between an engine's clients and its core: commands in, replies out. Plain data, nothing else.

Either side may live in another thread or another process: no object is shared, and order is kept. Ids are a client's
own: each begins with the client's number.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.numerics import Numerics
from engine.outputs import Prefill, SpanOutput, Stats
from engine.params import RemotePrefill, Span, StreamingWindow
from engine.structured_output.compiler import Outcome
from engine.structured_output.spec import Constraint


@dataclass(frozen=True, slots=True)
class Open:
    sequence: int
    tokens: tuple[int, ...]
    tenant: str
    priority: int
    deadline_s: float | None
    adapter: str = ""  # its name
    remote_prefill: RemotePrefill | None = None
    chunks: tuple[tuple[int, int], ...] = ()  # spans of its tokens whose K/V may be reused
    streaming: StreamingWindow | None = None  # in whole blocks


@dataclass(frozen=True, slots=True)
class AddImage:
    """Brings the pixels of an image, (tiles, size, size, 3) uint8, before the first command whose tokens have it."""

    digest: bytes
    tiles: int
    size: int
    pixels: bytes


@dataclass(frozen=True, slots=True)
class Warm:
    """Prefills tokens into a tenant's prefix cache when nothing else runs. Nothing replies, and a core that is lost
    takes it with it."""

    tokens: tuple[int, ...]
    tenant: str
    priority: int
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Restore:
    """Restores a sequence of another core, as its client knows it; `scope` was restored before, if it has one.

    `generated` has a byte for each token, 1 where it was sampled. `stream` and `forks` key the random numbers.
    """

    sequence: int
    scope: int | None
    tokens: tuple[int, ...]
    generated: bytes
    tenant: str
    priority: int
    deadline_s: float | None
    stream: int
    forks: int
    tail: int = 0  # tokens that had K/V, perhaps in a tier
    adapter: str = ""
    streaming: StreamingWindow | None = None


@dataclass(frozen=True, slots=True)
class Append:
    sequence: int
    tokens: tuple[int, ...]
    generated: bool = False  # sampled by another core


@dataclass(frozen=True, slots=True)
class Generate:
    """Starts a span. One that another core began goes on after its `delivered` tokens, which the sequence does not have
    yet; `begun`: its first piece was sent. With `followers` these sequences are a mixture with this one, of
    `log_weights`, its own first; they get the span's tokens, too."""

    sequence: int
    request: int
    span: Span
    seed: int
    max_tokens: int
    delivered: tuple[int, ...] = ()
    begun: bool = False
    followers: tuple[int, ...] = ()
    log_weights: tuple[float, ...] = ()
    fallback: bool = False  # to be run by the fallback weights from its start; for the link alone


@dataclass(frozen=True, slots=True)
class Score:
    """Scores candidate continuations; without candidates, reads the value head."""

    sequence: int
    request: int
    candidates: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """Forks new sequences that continue as `sequence`, and close when `scope` closes."""

    sequence: int
    children: tuple[int, ...]
    scope: int


@dataclass(frozen=True, slots=True)
class Truncate:
    sequence: int
    length: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Pins the K/V of a sequence that waits for something: for tools of these names, where they are known."""

    sequence: int
    ttl_s: float
    waiting_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Snap:
    """Returns the sequence as a snapshot, and puts its K/V where the next engine finds it, if there is a disk for
    that."""

    sequence: int
    request: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends the sequence's span or score; the generated tokens stay."""

    sequence: int
    request: int


@dataclass(frozen=True, slots=True)
class Close:
    sequence: int


@dataclass(frozen=True, slots=True)
class GetStats:
    request: int


@dataclass(frozen=True, slots=True)
class Compile:
    """Compiles a constraint before a tenant's span needs it."""

    request: int
    constraint: Constraint
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Loads an adapter from `path` as `name`. With `wait` before any other command: where a fresh core has to have it.
    Its reply is `AdapterReady` or `RequestRefused`."""

    request: int
    name: str
    path: str
    wait: bool = False


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Has no new sequence use an adapter; those that do go on. Its reply is `Ready` or `RequestRefused`."""

    request: int
    name: str


@dataclass(frozen=True, slots=True)
class AdapterDone:
    """Reports a new set of resident adapters, or why there is none. From the core's own worker, not from a client.
    `request` is that of a load by name, None of one that came in or left. `resident` is the model's own, and `number`
    is the adapter that came in; `nbytes` are those that it takes while it is resident."""

    request: int | None
    name: str
    resident: object
    digest: str = ""
    nbytes: int = 0
    refused: str = ""
    number: int = -1


@dataclass(frozen=True, slots=True)
class Leave:
    """Closes all sequences of a client that is gone."""

    client: int


@dataclass(frozen=True, slots=True)
class CompileDone:
    """The outcome of compiling a constraint. From the core's own compiler, not from a client. `sequence` has the
    waiting span, None where only a `Compile` waits."""

    sequence: int | None
    request: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class TransferDone:
    """Reports that a copy between K/V tiers is done. From the core's own worker, not from a client."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the core's loop; running spans are cancelled."""


Command = (
    AddImage | Open | Warm | Restore | Append | Generate | Score | Fork | Truncate | Hold | Snap | Cancel | Close
    | GetStats | Compile | LoadAdapter | UnloadAdapter | AdapterDone | Leave | CompileDone | TransferDone | Stop
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loaded:
    """Describes a core that can run, and its model."""

    path: str  # the model's directory
    vocab_size: int
    max_model_len: int  # tokens that a sequence can have: bounded by the model's positions and the KV pool
    device: str
    dtype: str
    threads: int  # CPU threads of the model
    numerics: Numerics
    fingerprint: bytes = b""  # of the model's files
    vision: bool = False  # whether it reads images
    proposers: tuple[str, ...] = ()  # of drafts, that a span may name
    speculation: str = "off"  # of spans that name none
    adapters: tuple[tuple[str, str], ...] = ()  # their names, and digests of their files
    value_head: bool = False  # whether it says how likely a sequence ends right


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Prefill progress of a span whose prompt takes several steps."""

    request: int
    prefill: Prefill


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Progress of a span. The request is over when the output has a finish reason."""

    request: int
    output: SpanOutput


@dataclass(frozen=True, slots=True)
class Scored:
    request: int
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """Reports that the sequence closed while the request ran on it: by its owner, a scope around it, or its
    deadline."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Reports that the constraint is compiled, or the adapter unloaded."""

    request: int


@dataclass(frozen=True, slots=True)
class AdapterReady:
    """Reports that sequences may use an adapter. `digest` is of its files."""

    request: int
    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """Reports that the constraint cannot be compiled exactly, or not in time, a span's sequence being as it was; or
    that an adapter cannot be loaded or unloaded."""

    request: int
    reasons: tuple[str, ...]
    timed_out: bool


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Reports that the span's constraint could not go on, or that a follower of its mixture closed. The sequences may
    have tokens that no piece had: truncate them."""

    request: int
    reason: str
    follower_closed: bool = False


@dataclass(frozen=True, slots=True)
class Deferred:
    """Reports that a span ended before a token of which the model was not surer than its `min_confidence`."""

    request: int


@dataclass(frozen=True, slots=True)
class Snapped:
    request: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StatsReply:
    request: int
    stats: Stats


Reply = (
    PromptProgress | OutputPiece | Scored | Ready | RequestRefused | RequestFailed | Deferred | Closed | Snapped
    | StatsReply | AdapterReady
)  # fmt: skip

_CLIENT_SHIFT = 48
NOBODY = 0  # a request whose reply is ignored


def first_id(client: int) -> int:
    """Returns the smallest of a client's ids."""
    return (client << _CLIENT_SHIFT) + 1


def client_of(id: int) -> int:
    """Returns the client that an id belongs to."""
    return id >> _CLIENT_SHIFT
