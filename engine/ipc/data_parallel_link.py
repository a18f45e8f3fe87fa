"""Link to several cores of one model, the replicas: data parallel (vLLM's `data_parallel_size`).

A sequence, its forks and the requests on them stay on one replica, which is chosen when it opens: the one that has most
of the prompt in its prefix cache, while its load allows it, else the least loaded. What a replica has cached is known
by the prompts that it was sent. A replica that ends for good fails its requests, and the others go on. Knows nothing of
threads, processes or tensors.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.core import messages as m
from engine.errors import EngineError
from engine.ipc.link import CoreListener, Link, Listener, State
from engine.ipc.sequence_journal import SequenceJournal
from engine.outputs import Stats

if TYPE_CHECKING:
    from engine.builder import EngineParts

LOAD_FACTOR = 1.25  # a replica's load, times the average (bounded loads, Mirrokni et al. 2018)
_Shared = m.GetStats | m.Compile | m.LoadAdapter | m.UnloadAdapter  # of all replicas; each has one reply


def core_link(config: EngineConfig, assemble: Callable[[EngineConfig], EngineParts] | None, listener: Listener) -> Link:
    """Returns the link to one core, in a thread or in a process of its own."""
    if config.runs_in == "thread":
        from engine.ipc.thread_link import ThreadLink  # torch comes with it

        return ThreadLink(config, assemble, listener)
    from engine.ipc.supervisor import SupervisedLink  # ZeroMQ comes with it

    return SupervisedLink(config, assemble, listener)


def link_to(config: EngineConfig, assemble: Callable[[EngineConfig], EngineParts] | None, listener: Listener) -> Link:
    """Returns the link to the core of a configuration, or to all of its replicas. `assemble` makes a core's parts, if
    not `engine.builder.build`."""
    if config.data_parallel_size == 1:
        return core_link(config, assemble, listener)
    return DataParallelLink(config, lambda each, heard: core_link(each, assemble, heard), listener)


def choose_replica(loads: Mapping[int, int], matched: Mapping[int, int], held: Mapping[int, int]) -> int:
    """Returns the replica with most of a prompt cached, of those below the load cap; of equals that of least load, then
    of least blocks.

    `loads` are requests, `matched` leading blocks of the prompt, `held` all blocks. The cap is a replica's share of all
    requests, times `LOAD_FACTOR`, and at least one more than the average.
    """
    average = (1 + sum(loads.values())) / len(loads)
    cap = max(math.ceil(LOAD_FACTOR * average), math.ceil(average) + 1)
    below = [each for each, load in loads.items() if load < cap] or list(loads)
    return min(below, key=lambda each: (-matched[each], loads[each], held[each], each))


class SentPrefixes:
    """The leading blocks of the prompts that a replica was sent, as many as its pool holds: the last ones used."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._digests = OrderedDict[bytes, None]()

    def __len__(self) -> int:
        return len(self._digests)

    def matched(self, digests: Iterable[bytes]) -> int:
        """Counts the leading blocks that are known."""
        return sum(1 for _ in itertools.takewhile(self._digests.__contains__, digests))

    def add(self, digests: Sequence[bytes]) -> None:
        for digest in reversed(digests):  # so that a prefix is forgotten from its end
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._capacity:
            self._digests.popitem(last=False)


def block_digests(tokens: Sequence[int], block_size: int, root: str) -> list[bytes]:
    """Returns a digest of each prefix of whole blocks. `root` tells prefixes apart that no cache shares."""
    digest, found = root.encode(), list[bytes]()
    for first in range(0, len(tokens) - block_size + 1, block_size):
        block = array("q", tokens[first : first + block_size]).tobytes()
        digest = hashlib.blake2b(digest + block, digest_size=16).digest()
        found.append(digest)
    return found


@dataclass(slots=True, eq=False)
class _Replica:
    number: int
    link: Link
    prefixes: SentPrefixes
    requests: dict[int, int] = field(default_factory=dict)  # that run, with their sequences
    opened: set[int] = field(default_factory=set)  # sequences that have had no request yet
    error: EngineError | None = None  # it has ended

    @property
    def state(self) -> State:
        return self.link.state if self.error is None else "stopped"


@dataclass(slots=True)
class _Shares:
    """A request to all replicas: those that have still to reply, and the replies."""

    command: _Shared
    waiting: set[int]
    replies: dict[int, m.Reply] = field(default_factory=dict)


class DataParallelLink:
    """A `Link` made of `config.data_parallel_size`, of which `link` makes each. All share the K/V memory of `config`,
    in equal parts."""

    def __init__(
        self,
        config: EngineConfig,
        link: Callable[[EngineConfig, Listener], Link],
        listener: Listener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._link, self._listener = config, link, listener
        self._journal = SequenceJournal(clock)
        self._replicas: list[_Replica] = []
        self._of: dict[int, _Replica] = {}  # by sequence; some may be closed
        self._shared: dict[int, _Shares] = {}  # by request
        self._images: list[m.AddImage] = []  # for the next sequence with them

    @property
    def state(self) -> State:
        states = {each.state for each in self._replicas}
        return next((state for state in ("running", "restarting") if state in states), "stopped")

    async def start(self) -> m.Loaded:
        """Starts the replicas one after the other, as each has to see the memory that is left. Raises as they do."""
        loaded = []
        try:
            for number, config in enumerate(await asyncio.to_thread(self._divided)):
                heard = CoreListener(
                    partial(self._hear, number), partial(self._given_up, number), partial(self._ended, number)
                )
                assert config.kv_blocks is not None, "see `memory.divided`"
                replica = _Replica(number, self._link(config, heard), SentPrefixes(config.kv_blocks))
                self._replicas.append(replica)
                loaded.append(await replica.link.start())
        except BaseException:
            await self.close()
            raise
        return replace(loaded[0], max_model_len=min(each.max_model_len for each in loaded))

    def send(self, command: m.Command) -> None:
        match command:
            case m.AddImage():
                self._images.append(command)
                self._journal.sent(command)
            case m.Open() | m.Restore():
                self._open(command)
            case m.Warm():
                self._chosen(command).link.send(command)
            case m.GetStats() | m.Compile() | m.LoadAdapter() | m.UnloadAdapter():
                self._ask_all(command)
            case m.Leave():
                for each in self._replicas:
                    each.link.send(command)
            case m.Stop() | m.AdapterDone() | m.CompileDone() | m.TransferDone():
                raise AssertionError("a core's own")
            case _:
                if self._send_on(command):
                    self._journal.sent(command)
        if len(self._of) > 2 * len(self._journal) + 64:
            self._of = {id: replica for id, replica in self._of.items() if id in self._journal}

    async def close(self) -> None:
        await asyncio.gather(*(each.link.close() for each in self._replicas))

    # -- parts

    def _divided(self) -> list[EngineConfig]:
        """Returns the configurations of the replicas."""
        from engine.model.memory import divided, needs_of  # torch comes with it

        count = self._config.data_parallel_size
        needs = needs_of(replace(self._config, data_parallel_size=1))
        configs = divided([self._config] * count, [needs] * count)
        kept = self._config.kv_dir
        return [
            each if kept is None or not number else replace(each, kv_dir=f"{kept}-{number}")
            for number, each in enumerate(configs)
        ]

    def _chosen(self, command: m.Open | m.Restore | m.Warm) -> _Replica:
        """Returns the replica for these tokens, which it is taken to have cached from now on."""
        digests = block_digests(command.tokens, self._config.block_size, f"{command.tenant}\0{command.adapter}")
        by_state: dict[State, list[_Replica]] = {"running": [], "restarting": [], "stopped": []}
        for each in self._replicas:
            by_state[each.state].append(each)
        able = by_state["running"] or by_state["restarting"] or by_state["stopped"]
        number = choose_replica(
            {each.number: len(each.requests) + len(each.opened) for each in able},
            {each.number: each.prefixes.matched(digests) for each in able},
            {each.number: len(each.prefixes) for each in able},
        )
        replica = self._replicas[number]
        replica.prefixes.add(digests)
        return replica

    def _open(self, command: m.Open | m.Restore) -> None:
        replica = self._of[command.sequence] = self._chosen(command)
        replica.opened.add(command.sequence)
        self._deliver_images(replica)
        replica.link.send(command)
        self._journal.sent(command)

    def _deliver_images(self, replica: _Replica) -> None:
        for image in self._images:
            replica.link.send(image)
        self._images.clear()

    def _send_on(
        self,
        command: m.Append | m.Generate | m.Score | m.Fork | m.Truncate | m.Hold | m.Snap | m.Cancel | m.Close,
    ) -> bool:
        """Sends a command to the replica that has its sequence. Returns whether it was sent; a request that was not has
        failed."""
        replica = self._of.get(command.sequence)
        if replica is None:
            if isinstance(command, m.Generate | m.Score | m.Snap):
                self._listener.deliver([m.Closed(command.request, "the sequence is closed")])
            return False
        match command:
            case m.Append():
                self._deliver_images(replica)
            case m.Fork():
                self._of.update(dict.fromkeys(command.children, replica))
            case m.Generate() | m.Score() | m.Snap():
                replica.opened.discard(command.sequence)
                if replica.error is not None:
                    self._listener.given_up(command.request, replica.error)
                    return False
                if isinstance(command, m.Generate) and not self._together(command, replica):
                    why = "its sequences are forks on several replicas; accepted: sequences without forks"
                    self._listener.deliver([m.RequestFailed(command.request, why)])
                    return False
                replica.requests[command.request] = command.sequence
            case m.Close():
                replica.opened.discard(command.sequence)
        replica.link.send(command)
        return True

    def _together(self, command: m.Generate, replica: _Replica) -> bool:
        """Moves the followers of a mixture to its first sequence's replica, whose K/V they then compute anew. Returns
        whether all are there: one with forks, or that is a fork itself, does not move."""
        away = [id for id in command.followers if id in self._journal and self._of[id] is not replica]
        moves = [self._journal.alone(id) for id in away]
        if None in moves:
            return False
        for restore in moves:
            assert restore is not None
            self._of[restore.sequence].opened.discard(restore.sequence)
            self._of[restore.sequence].link.send(m.Close(restore.sequence))
            self._of[restore.sequence] = replica
            for image in self._journal.images(restore.tokens):
                replica.link.send(image)
            replica.link.send(restore)
        return True

    def _ask_all(self, command: _Shared) -> None:
        able = [each for each in self._replicas if each.error is None]
        if isinstance(command, m.GetStats):  # it does not wait for one that is started again
            able = [each for each in able if each.state == "running"] or able
        self._shared[command.request] = _Shares(command, {each.number for each in able})
        for each in able:
            each.link.send(command)

    def _hear(self, number: int, replies: list[m.Reply]) -> None:
        heard = list[m.Reply]()
        for reply in replies:
            shares = self._shared.get(reply.request)
            if shares is not None:
                shares.replies[number] = reply
                heard += self._share_came(number, shares)
                continue
            self._journal.heard(reply)
            heard.append(reply)
            ongoing = isinstance(reply, m.PromptProgress) or (
                isinstance(reply, m.OutputPiece) and reply.output.finish_reason is None
            )
            if not ongoing:
                self._replicas[number].requests.pop(reply.request, None)
        self._listener.deliver(heard)

    def _share_came(self, number: int, shares: _Shares) -> list[m.Reply]:
        """Returns the reply to a request once all replicas have answered: statistics added up, or one that refused."""
        shares.waiting.discard(number)
        if shares.waiting:
            return []
        command, replies = shares.command, list(shares.replies.values())
        del self._shared[command.request]
        if isinstance(command, m.GetStats):
            parts = [each.stats for each in replies if isinstance(each, m.StatsReply)]
            return [m.StatsReply(command.request, Stats.total(parts))]
        refused = next((each for each in replies if isinstance(each, m.RequestRefused)), replies[0])
        if isinstance(command, m.LoadAdapter) and isinstance(refused, m.RequestRefused):
            for each, reply in shares.replies.items():
                if isinstance(reply, m.AdapterReady):  # all have it, or none
                    self._replicas[each].link.send(m.UnloadAdapter(m.NOBODY, command.name))
        return [refused]

    def _given_up(self, number: int, request: int, error: EngineError) -> None:
        sequence = self._replicas[number].requests.pop(request, None)
        if sequence is not None:
            self._journal.sent(m.Cancel(sequence, request))  # it is over here, too
        shares = self._shared.get(request)
        if shares is None:
            self._listener.given_up(request, error)
            return
        if shares.waiting == {number} and not shares.replies:
            del self._shared[request]
            self._listener.given_up(request, error)
            return
        self._listener.deliver(self._share_came(number, shares))

    def _ended(self, number: int, error: EngineError) -> None:
        """Fails the requests of a replica that is gone for good; with the last one, all of them."""
        replica = self._replicas[number]
        replica.error = error
        if all(each.error is not None for each in self._replicas):
            self._listener.ended(error)
            return
        for request in [*replica.requests, *(at for at, each in self._shared.items() if number in each.waiting)]:
            self._given_up(number, request, error)
