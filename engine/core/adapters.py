"""Adapters of a core by name: read in a thread beside the steps, and unloaded when the last sequence closes.

Knows names and sequences' use of them; nothing of matrices. `AdapterCache` has those that are resident for steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import count

from engine.core import messages as m
from engine.core.adapter_cache import AdapterCache, KnownAdapter
from engine.core.request import NO_ADAPTER, SequenceState
from engine.errors import EngineError, InvalidParameter, unknown_adapter
from engine.kv_cache.block_pool import BlockPool
from engine.outputs import AdapterStats


@dataclass(slots=True, eq=False)
class _Named:
    """An adapter with a name."""

    name: str
    known: KnownAdapter
    sequences: int = 0  # open ones that use it
    opened: int = 0  # since it was loaded
    leaving: bool = False


class CoreAdapters:
    """The adapters of one model. Without a model every load is refused."""

    def __init__(self, cache: AdapterCache | None = None, pinned: Collection[str] = ()) -> None:
        """`pinned` names stay resident."""
        self.cache, self._pinned = cache or AdapterCache(), frozenset(pinned)
        self._names: dict[str, _Named] = {}
        self._by_number: dict[int, _Named] = {}
        self._numbers = count()

    def load_all(self, adapters: Mapping[str, str]) -> None:
        """Loads adapters by name before any step.

        Raises:
            InvalidParameter: one cannot be loaded; the message says which, and why.
        """
        given = [self._named(name, path) for name, path in adapters.items()]
        for each in sorted(given, key=lambda each: not each.known.pinned):
            try:
                self._known(each, *self.cache.read(each.known.number, each.known.path))
                self.cache.fill(each.known)
            except EngineError as error:
                raise InvalidParameter("adapters", f"The adapter {each.name!r} cannot be loaded: {error}") from error

    def share(self, pool: BlockPool, block_bytes: int) -> int:
        """Has adapters take their memory from a K/V pool, before any step; returns the blocks that a sequence may have
        beside the largest of them.

        Raises:
            InvalidParameter: one has no room; the message says which, with both sizes.
        """
        self.cache.share(pool, block_bytes)
        largest_first = sorted(self._names.values(), key=lambda each: each.known.nbytes, reverse=True)
        for named in largest_first[:1]:
            if refused := self.cache.too_large(named.known):
                raise InvalidParameter("adapters", f"The adapter {named.name!r} {refused}")
        return pool.total - self.cache.reserved_blocks

    @property
    def digests(self) -> tuple[tuple[str, str], ...]:
        """Returns the names that sequences may open with, and the digests of their files."""
        usable = ((name, each) for name, each in self._names.items() if not each.leaving)
        return tuple((name, each.known.digest) for name, each in usable if each.known.digest)

    def stats(self, generated: Mapping[int, int]) -> tuple[AdapterStats, ...]:
        """Returns the counts of each adapter, those that leave included. `generated` are tokens by its number."""
        return tuple(
            AdapterStats(
                name,
                sequences=each.sequences,
                opened=each.opened,
                resident=each.known.slot != NO_ADAPTER and not each.known.loading,
                loading=each.known.loading,
                loads=each.known.loads,
                evictions=each.known.evictions,
                prompt_tokens=each.known.prompt_tokens,
                generated_tokens=generated.get(each.known.number, 0),
            )
            for name, each in self._names.items()
        )

    def handle(
        self, command: m.LoadAdapter | m.AdapterDone | m.UnloadAdapter, gone: Callable[[int, str], None]
    ) -> list[m.Reply]:
        """Handles a command; returns its reply, if it has one yet. `gone` gets the number of an adapter that no new
        sequence uses, and why those that wait for it cannot go on, if they cannot. No step may be running."""
        match command:
            case m.LoadAdapter():
                reply = self._load(command)
            case m.AdapterDone():
                reply = self._take(command, gone)
            case m.UnloadAdapter():
                reply = self._unload(command, gone)
        return [] if reply is None else [reply]

    def find(self, name: str) -> tuple[int, str] | None:
        """Returns the number and the digest for a new sequence: no number and nothing for no name, None where the
        adapter is not loaded."""
        if not name:
            return NO_ADAPTER, ""
        named = self._names.get(name)
        if named is None or named.leaving or not named.known.digest:
            return None
        return named.known.number, named.known.digest

    def name_of(self, seq: SequenceState) -> tuple[str, str]:
        """Returns the name and the digest of a sequence's adapter, both empty where it has none."""
        named = self._by_number.get(seq.adapter)
        return ("", "") if named is None else (named.name, named.known.digest)

    def name(self, number: int) -> str | None:
        """Returns an adapter's name, None where there is none of that number."""
        named = self._by_number.get(number)
        return None if named is None else named.name

    def opened(self, seq: SequenceState) -> None:
        """Counts a sequence that is open now."""
        if (named := self._by_number.get(seq.adapter)) is not None:
            named.sequences += 1
            named.opened += 1

    def closed(self, seq: SequenceState) -> None:
        """Counts one that is open no more."""
        if (named := self._by_number.get(seq.adapter)) is not None:
            named.sequences -= 1
            self._drop_unused(named)

    def unknown(self, name: str) -> str:
        """Returns the error that a name is none of those loaded."""
        return unknown_adapter(name, dict(self.digests))

    # -- parts

    def _named(self, name: str, path: str) -> _Named:
        named = _Named(name, KnownAdapter(next(self._numbers), path, pinned=name in self._pinned))
        self._names[name] = named
        return named

    def _known(self, named: _Named, digest: str, nbytes: int) -> None:
        """Has sequences use an adapter whose files were read."""
        named.known.digest, named.known.nbytes = digest, nbytes
        self._by_number[named.known.number] = named
        self.cache.add(named.known)

    def _load(self, command: m.LoadAdapter) -> m.Reply | None:
        """Begins to read an adapter; None: `handle` gets an `AdapterDone`. With `wait` it is done here."""
        if refused := self._refusal(command):
            return m.RequestRefused(command.request, (refused,), timed_out=False)
        known = self._named(command.name, command.path).known

        def read() -> m.AdapterDone:
            try:
                digest, nbytes = self.cache.read(known.number, command.path)
            except Exception as error:  # of any kind that memory or files raise: its waiter must hear
                said = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
                return m.AdapterDone(command.request, command.name, None, refused=said or type(error).__name__)
            return m.AdapterDone(command.request, command.name, None, digest=digest, nbytes=nbytes)

        if command.wait:
            return self._take(read(), lambda number, why: None)
        self.cache.submit(read)
        return None

    def _take(self, done: m.AdapterDone, gone: Callable[[int, str], None]) -> m.Reply | None:
        """Takes what the worker made. No step may be running."""
        if done.request is None:
            if why := self.cache.take(done):
                gone(done.number, f"the adapter {self._by_number[done.number].name!r} cannot be loaded: {why}")
            return None
        named = self._names[done.name]
        if done.refused:
            del self._names[done.name]
            return m.RequestRefused(done.request, (done.refused,), timed_out=False)
        self._known(named, done.digest, done.nbytes)
        if refused := self.cache.too_large(named.known):
            self._forget(named)
            return m.RequestRefused(done.request, (f"The adapter {done.name!r} {refused}",), timed_out=False)
        return m.AdapterReady(done.request, done.name, done.digest)

    def _unload(self, command: m.UnloadAdapter, gone: Callable[[int, str], None]) -> m.Reply:
        """Refuses the name from now on; its memory is free when the last sequence with it closes."""
        named = self._names.get(command.name)
        if named is None or not named.known.digest or named.leaving:
            return m.RequestRefused(command.request, (self.unknown(command.name),), timed_out=False)
        named.leaving = True
        gone(named.known.number, "")
        self._drop_unused(named)
        return m.Ready(command.request)

    def _refusal(self, command: m.LoadAdapter) -> str:
        if not self.cache.slots:
            return "adapters are loaded, but this engine's model takes none."
        held = self._names.get(command.name)
        if held is not None and held.leaving:
            return f"The adapter {command.name!r} is unloaded once its last sequence closes; accepted: another name."
        if held is not None:
            return f"An adapter {command.name!r} is loaded already; accepted: another name, or unload it first."
        pinned = sum(each.known.pinned for each in self._names.values())
        if pinned == self.cache.slots and command.name not in self._pinned:
            return f"{pinned} adapters are pinned, and max_adapters is {pinned}; unload one first."
        return ""

    def _drop_unused(self, named: _Named) -> None:
        if named.leaving and not named.sequences:
            self._forget(named)

    def _forget(self, named: _Named) -> None:
        del self._names[named.name], self._by_number[named.known.number]
        self.cache.remove(named.known)
