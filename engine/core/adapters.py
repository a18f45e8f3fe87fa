"""Adapters of a core by name: loaded in a thread beside the steps, and unloaded when the last sequence closes.

Knows names, slots and sequences' use of them; nothing of matrices. A slot is what rows carry (`SequenceState.adapter`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from engine.core import messages as m
from engine.core.request import NO_ADAPTER, SequenceState
from engine.errors import EngineError, InvalidParameter


class AdaptedModel(Protocol):
    """A model that runs adapters (`engine.model.decoder.Decoder`). Any: its adapters and sets of them are its own."""

    def read_adapter(self, adapter: str, base: str = "") -> Any: ...

    def with_adapters(self, adapters: Mapping[int, Any]) -> Any: ...

    def use_adapters(self, adapters: Any) -> None: ...


@dataclass(slots=True)
class _Loaded:
    """An adapter with a name. `digest` is empty until it is read; `path` is the one that it was loaded from."""

    slot: int
    path: str
    digest: str = ""
    sequences: int = 0  # open ones that use it
    leaving: bool = False


class CoreAdapters:
    """The adapters of one model, at most `limit` at once. Without a model every load is refused."""

    def __init__(self, model: AdaptedModel | None = None, limit: int = 0, base: str = "") -> None:
        """`base` is the model's name."""
        self._model, self._limit, self._base = model, limit, base
        self._names: dict[str, _Loaded] = {}
        self._worker = ThreadPoolExecutor(1, "adapters")
        self._read: dict[int, Any] = {}  # by slot; the worker's own, once it runs

    def load_all(self, adapters: Mapping[str, str]) -> None:
        """Loads adapters by name before any step.

        Raises:
            InvalidParameter: one cannot be loaded; the message says which, and why.
        """
        for name, path in adapters.items():
            assert self._model is not None, "a configuration with adapters has a model"
            try:
                read = self._model.read_adapter(path, self._base)
            except EngineError as error:
                raise InvalidParameter("adapters", f"The adapter {name!r} cannot be loaded: {error}") from error
            slot = self._free_slot()
            self._names[name] = _Loaded(slot, path, read.digest)
            self._read[slot] = read
        if adapters and self._model is not None:
            self._model.use_adapters(self._model.with_adapters(self._read))

    @property
    def digests(self) -> tuple[tuple[str, str], ...]:
        """Returns the names that sequences may open with, and the digests of their files."""
        return tuple((name, each.digest) for name, each in self._names.items() if each.digest and not each.leaving)

    @property
    def sequences(self) -> tuple[tuple[str, int], ...]:
        """Returns the open sequences of each adapter, by name, those of adapters that leave included."""
        return tuple((name, each.sequences) for name, each in self._names.items())

    def handle(
        self,
        command: m.LoadAdapter | m.AdapterDone | m.UnloadAdapter,
        post: Callable[[m.Command], None],
        leaving: Callable[[int], None],
    ) -> list[m.Reply]:
        """Handles a command; returns its reply, if it has one yet. `leaving` gets the slot of an adapter that no new
        sequence uses. No step may be running."""
        match command:
            case m.LoadAdapter():
                reply = self._load(command, post)
            case m.AdapterDone():
                reply = self._take(command)
            case m.UnloadAdapter():
                reply = self._unload(command, post, leaving)
        return [] if reply is None else [reply]

    def find(self, name: str) -> tuple[int, str] | None:
        """Returns the slot and the digest for a new sequence: no slot and nothing for no name, None where the adapter
        is not loaded."""
        if not name:
            return NO_ADAPTER, ""
        loaded = self._names.get(name)
        return None if loaded is None or loaded.leaving or not loaded.digest else (loaded.slot, loaded.digest)

    def name_of(self, seq: SequenceState) -> tuple[str, str]:
        """Returns the name and the digest of a sequence's adapter, both empty where it has none."""
        return next(((name, each.digest) for name, each in self._names.items() if each.slot == seq.adapter), ("", ""))

    def opened(self, seq: SequenceState) -> None:
        """Counts a sequence that is open now."""
        if seq.adapter != NO_ADAPTER:
            self._names[self.name_of(seq)[0]].sequences += 1

    def closed(self, seq: SequenceState, post: Callable[[m.Command], None]) -> None:
        """Counts one that is open no more."""
        if seq.adapter != NO_ADAPTER:
            name, _ = self.name_of(seq)
            self._names[name].sequences -= 1
            self._drop_unused(name, post)

    def unknown(self, name: str) -> str:
        """Returns the error that a name is none of those loaded."""
        known = ", ".join(each for each, _ in self.digests) or "none"
        return f"adapter is {name!r:.200}, which is not loaded; accepted: {known}."

    def close(self) -> None:
        """Ends the worker."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    # -- parts

    def _load(self, command: m.LoadAdapter, post: Callable[[m.Command], None]) -> m.Reply | None:
        """Begins to load an adapter; None: `post` gets an `AdapterDone` for `handle`. With `wait` it is done here."""
        if refused := self._refusal(command):
            return m.RequestRefused(command.request, (refused,), timed_out=False)
        slot = self._free_slot()
        self._names[command.name] = _Loaded(slot, command.path)
        if command.wait:
            return self._take(self._made(command, slot))
        self._worker.submit(lambda: post(self._made(command, slot)))
        return None

    def _take(self, done: m.AdapterDone) -> m.Reply | None:
        """Takes what the worker made. No step may be running."""
        if done.resident is not None and self._model is not None:
            self._model.use_adapters(done.resident)
        if done.request is None:
            return None
        loaded = self._names[done.name]
        if done.refused:
            del self._names[done.name]
            return m.RequestRefused(done.request, (done.refused,), timed_out=False)
        loaded.digest = done.digest
        return m.AdapterReady(done.request, done.name, done.digest)

    def _unload(
        self, command: m.UnloadAdapter, post: Callable[[m.Command], None], leaving: Callable[[int], None]
    ) -> m.Reply:
        """Refuses the name from now on; its memory is free when the last sequence with it closes."""
        loaded = self._names.get(command.name)
        if loaded is None or not loaded.digest or loaded.leaving:
            return m.RequestRefused(command.request, (self.unknown(command.name),), timed_out=False)
        loaded.leaving = True
        leaving(loaded.slot)
        self._drop_unused(command.name, post)
        return m.Ready(command.request)

    def _refusal(self, command: m.LoadAdapter) -> str:
        if self._model is None:
            return "adapters are loaded, but this engine's model takes none."
        held = self._names.get(command.name)
        if held is not None and held.leaving:
            return f"The adapter {command.name!r} is unloaded once its last sequence closes; accepted: another name."
        if held is not None:
            return f"An adapter {command.name!r} is loaded already; accepted: another name, or unload it first."
        if len(self._names) >= self._limit:
            return f"{len(self._names)} adapters are loaded, and max_adapters is {self._limit}; unload one first."
        return ""

    def _free_slot(self) -> int:
        used = {each.slot for each in self._names.values()}
        return next(slot for slot in range(len(used) + 1) if slot not in used)

    def _made(self, command: m.LoadAdapter, slot: int) -> m.AdapterDone:
        """Reads an adapter and makes the next resident set; in the worker."""
        assert self._model is not None, "see `_refusal`"
        try:
            read = self._model.read_adapter(command.path, self._base)
            self._read[slot] = read
            resident = self._model.with_adapters(self._read)
        except Exception as error:  # of any kind that memory or files raise: its waiter must hear
            self._read.pop(slot, None)
            said = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            return m.AdapterDone(command.request, command.name, None, refused=said or type(error).__name__)
        return m.AdapterDone(command.request, command.name, resident, digest=read.digest)

    def _drop_unused(self, name: str, post: Callable[[m.Command], None]) -> None:
        loaded = self._names[name]
        if loaded.leaving and not loaded.sequences:
            del self._names[name]
            self._worker.submit(lambda: post(self._without(loaded.slot)))

    def _without(self, slot: int) -> m.AdapterDone:
        """In the worker."""
        assert self._model is not None, "one was loaded"
        self._read.pop(slot, None)
        return m.AdapterDone(None, "", self._model.with_adapters(self._read))
