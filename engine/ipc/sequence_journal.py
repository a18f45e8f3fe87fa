"""A journal of open sequences, their tokens and their requests, replayed to a fresh core after a crash.

It sees every command that is sent and every reply that comes, and keeps their outcome. A sequence's state is its
tokens and the numerics they were computed with: K/V is recomputed, and only numerics that are batch-invariant, and the
same, surely give the same tokens after it. A span's text and constraint follow from its tokens. Knows nothing of
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine.core import messages as m
from engine.core.sampling_types import children_of, mix64
from engine.model.numerics import Numerics
from engine.multimodal.image_input import image_tokens, key_of, lookup_keys
from engine.params import StreamingWindow

MAX_CRASHES = 2  # deaths in a row without a reply for a span: after that it may be the cause


@dataclass(slots=True, eq=False)
class _Running:
    """A span or score that is not over. `start` is the sequence's length before it."""

    command: m.Generate | m.Score
    start: int
    begun: bool = False
    crashes: int = 0


@dataclass(slots=True, eq=False)
class _Known:
    """A sequence as the core has it, except for outputs that no reply has reported."""

    id: int
    scope: int | None
    tokens: list[int]
    generated: bytearray
    tenant: str
    priority: int
    deadline: float | None
    stream: int = 0
    forks: int = 0
    adapter: str = ""
    streaming: StreamingWindow | None = None
    children: set[int] = field(default_factory=set)
    running: _Running | None = None
    followers: list[_Known] = field(default_factory=list)  # of the running span: they have its tokens once it is over


class SequenceJournal:
    """See the module. `clock` counts the seconds of deadlines."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sequences: dict[int, _Known] = {}  # a scope comes before its members
        self._asked: dict[int, m.GetStats | m.Compile | m.Snap | m.LoadAdapter | m.UnloadAdapter] = {}
        self._adapters: dict[str, m.LoadAdapter] = {}  # by name: those loaded since the start, also while one leaves
        self._unloaded: set[str] = set()  # names that a fresh core may not have, though its configuration does
        self._owners: dict[int, _Known] = {}  # by request id
        self._images: dict[bytes, m.AddImage] = {}  # by digest, of the open sequences
        self.numerics: Numerics | None = None  # of the core that computed the tokens

    @property
    def waiting(self) -> bool:
        """Returns whether a reply is owed."""
        return bool(self._owners or self._asked)

    def __len__(self) -> int:
        """Counts the open sequences."""
        return len(self._sequences)

    # -- commands and replies

    def sent(self, command: m.Command) -> None:
        match command:
            case m.AddImage():
                self._images[command.digest] = command
            case m.Open():
                self._open(command)
            case m.Restore():
                self._reopen(command)
            case m.GetStats() | m.Compile() | m.Snap() | m.LoadAdapter() | m.UnloadAdapter():
                self._asked[command.request] = command
            case m.Close():
                self._drop(command.sequence)
            case m.Append() | m.Truncate() | m.Fork() | m.Generate() | m.Score() | m.Cancel():
                if (known := self._sequences.get(command.sequence)) is not None:
                    self._sent_to(known, command)
                elif isinstance(command, m.Fork):
                    pass  # its children are as unknown as it is

    def heard(self, reply: m.Reply) -> None:
        known = self._owners.get(reply.request)
        if known is None or known.running is None:
            self._answered(self._asked.pop(reply.request, None), reply)
            return
        match reply:
            case m.OutputPiece(_, output):
                tokens = output.token_ids
                known.tokens.extend(tokens)
                known.generated.extend(b"\1" * len(tokens))
                known.running.begun, known.running.crashes = True, 0
                if output.finish_reason is not None:
                    self._over(known)
                if output.finish_reason == "deadline":
                    self._drop(known.id)
            case m.Closed():
                self._drop(known.id)
            case m.Scored() | m.RequestRefused() | m.RequestFailed() | m.Deferred():
                self._over(known)

    # -- replay to a fresh core

    def loaded(self, numerics: Numerics) -> list[str]:
        """Records the numerics of a running core. Returns the differences from the one before: with any, replayed spans
        may go on with other tokens."""
        before, self.numerics = self.numerics, numerics
        return [] if before is None else numerics.differences(before)

    def crashed(self) -> dict[int, str]:
        """Handles the core's death. Returns the requests given up, and why: those that seem to kill it, and requests
        for statistics."""
        suspects = []
        for known in self._sequences.values():
            if known.running is not None:
                known.running.crashes += 1
                if known.running.crashes > MAX_CRASHES:
                    suspects.append(known)
        given_up = dict[int, str]()
        for known in suspects:
            assert known.running is not None
            given_up[known.running.command.request] = "The engine's process died again and again while this ran."
            self._over(known)
        for request in [each.request for each in self._asked.values() if isinstance(each, m.GetStats)]:
            given_up[request] = "The engine's process died, and is being started again."
            del self._asked[request]
        return given_up

    def commands(self) -> Iterator[m.Command]:
        """Yields the commands for a fresh core, in the order in which they must come."""
        now = self._clock()
        yield from self._images.values()
        used = {known.adapter for known in self._sequences.values()}
        for load in self._adapters.values():
            if load.name not in self._unloaded or load.name in used:
                yield load
        for known in self._sequences.values():
            yield _restored(known, now)
        yield from (m.UnloadAdapter(m.NOBODY, name) for name in sorted(self._unloaded))
        for known in self._sequences.values():
            if known.running is not None:
                yield _resumed(known, known.running)
        yield from self._asked.values()

    # -- another core

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._sequences

    def images(self, tokens: Sequence[int]) -> list[m.AddImage]:
        """Returns the images whose placeholders are among the tokens."""
        keys = {key_of(token) for token in image_tokens(tokens)}
        return [each for each in self._images.values() if not keys.isdisjoint(lookup_keys(each.digest))]

    def handover(self, request: int) -> tuple[m.Restore, m.Generate] | None:
        """Returns the commands by which another core goes on with a running span, on a copy of its sequence in no
        scope; None where the span is over."""
        known = self._owners.get(request)
        if known is None or known.running is None:
            return None
        span = _resumed(known, known.running)
        assert isinstance(span, m.Generate)
        return replace(_restored(known, self._clock()), scope=None), span

    def alone(self, sequence: int) -> m.Restore | None:
        """Returns the command by which another core takes an open sequence over; None where forks or a request tie it
        to its own."""
        known = self._sequences[sequence]
        tied = known.scope is not None or known.children or known.running is not None
        return None if tied else _restored(known, self._clock())

    def adapter_of(self, sequence: int) -> str:
        """Returns the name of an open sequence's adapter; nothing where it has none."""
        known = self._sequences.get(sequence)
        return "" if known is None else known.adapter

    # -- parts

    def _answered(self, asked: m.Command | None, reply: m.Reply) -> None:
        match asked, reply:
            case m.LoadAdapter(_, name), m.AdapterReady():
                self._adapters[name] = replace(asked, request=m.NOBODY, wait=True)
                self._unloaded.discard(name)
            case m.UnloadAdapter(_, name), m.Ready():
                self._unloaded.add(name)

    def _open(self, command: m.Open) -> None:
        deadline = None if command.deadline_s is None else self._clock() + command.deadline_s
        tokens = list(command.tokens)
        self._sequences[command.sequence] = _Known(
            command.sequence, None, tokens, bytearray(len(tokens)), command.tenant, command.priority, deadline,
            adapter=command.adapter, streaming=command.streaming,
        )  # fmt: skip

    def _reopen(self, command: m.Restore) -> None:
        deadline = None if command.deadline_s is None else self._clock() + command.deadline_s
        self._sequences[command.sequence] = _Known(
            command.sequence, None, list(command.tokens), bytearray(command.generated), command.tenant,
            command.priority, deadline, command.stream, command.forks, command.adapter, command.streaming,
        )  # fmt: skip

    def _sent_to(self, known: _Known, command: m.Command) -> None:
        match command:
            case m.Append(_, tokens, generated):
                known.tokens.extend(tokens)
                known.generated.extend(bytes([generated]) * len(tokens))
            case m.Truncate(_, length):
                del known.tokens[length:], known.generated[length:]
            case m.Fork(_, children, scope):
                for child in children:
                    self._fork(known, child, scope)
            case m.Generate() | m.Score():
                if isinstance(command, m.Score):
                    known.forks += children_of(command.candidates)
                else:
                    known.followers = [self._sequences[id] for id in command.followers if id in self._sequences]
                known.running = _Running(command, len(known.tokens))
                self._owners[command.request] = known
                if isinstance(command, m.Generate):  # of another core, perhaps: it may be under way
                    known.running.begun = command.begun
                    known.tokens.extend(command.delivered)
                    known.generated.extend(b"\1" * len(command.delivered))
            case m.Cancel(_, request):
                if known.running is not None and known.running.command.request == request:
                    self._over(known)

    def _fork(self, known: _Known, child: int, scope: int) -> None:
        if (owner := self._sequences.get(scope)) is None:
            return
        known.forks += 1
        owner.children.add(child)
        self._sequences[child] = replace(
            known, id=child, scope=scope, tokens=known.tokens.copy(), generated=known.generated.copy(),
            stream=mix64(known.stream, known.forks), forks=0, children=set(), running=None, followers=[],
        )  # fmt: skip

    def _over(self, known: _Known) -> None:
        if known.running is not None:
            del self._owners[known.running.command.request]
            for each in known.followers:
                tokens = known.tokens[known.running.start :]
                each.tokens.extend(tokens)
                each.generated.extend(b"\1" * len(tokens))
            known.running, known.followers = None, []

    def _drop(self, sequence: int) -> None:
        known = self._sequences.pop(sequence, None)
        if known is None:
            return
        self._over(known)
        for child in list(known.children):
            self._drop(child)
        if known.scope is not None and (owner := self._sequences.get(known.scope)) is not None:
            owner.children.discard(sequence)
        if self._images:
            rest = [self.images(each.tokens) for each in self._sequences.values()]
            self._images = {each.digest: each for images in rest for each in images}


def _restored(known: _Known, now: float) -> m.Restore:
    """Restores a sequence as it was before its running request."""
    length, forks = len(known.tokens), known.forks
    if known.running is not None:
        length = known.running.start
        if isinstance(known.running.command, m.Score):
            forks -= children_of(known.running.command.candidates)
    left = None if known.deadline is None else known.deadline - now
    return m.Restore(
        known.id, known.scope, tuple(known.tokens[:length]), bytes(known.generated[:length]), known.tenant,
        known.priority, left, known.stream, forks, adapter=known.adapter, streaming=known.streaming,
    )  # fmt: skip


def _resumed(known: _Known, running: _Running) -> m.Generate | m.Score:
    if isinstance(running.command, m.Score):
        return running.command
    return replace(running.command, delivered=tuple(known.tokens[running.start :]), begun=running.begun)
