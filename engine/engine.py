"""The engine's async front: opens sequences, sends commands to the core and delivers its replies.

The core may run in a thread of this process or in a process of its own, behind a `Link`. Knows nothing of scheduling,
tensors, threads or sockets.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from weakref import WeakValueDictionary

from engine.config import EngineConfig, Fallback
from engine.core import messages as m
from engine.errors import (
    BadSnapshot,
    ContextLengthExceeded,
    EngineError,
    EngineRestarting,
    EngineStopped,
    InvalidParameter,
    QueueFull,
    unknown_adapter,
)
from engine.handle import Sequence
from engine.ipc.data_parallel_link import link_to
from engine.ipc.link import Link, PendingRequest, State
from engine.kv_cache.snapshot import unpacked
from engine.model.loader import name_of, read_json
from engine.model.tokenizer import Tokenizer
from engine.multimodal.image_file import LIMITS, ImageLimits, read_image
from engine.multimodal.image_input import (
    FIRST_IMAGE_ID,
    ImageInput,
    has_images,
    image_tokens,
    key_of,
    lookup_keys,
    offset_of,
    placeholder,
    restored_image,
    without_images,
)
from engine.multimodal.processors import Processor, load_processor
from engine.multimodal.prompt_images import check_whole
from engine.outputs import Stats
from engine.params import RemotePrefill, Speculation, StreamingWindow, check_chunks
from engine.span_checks import check_endless, check_speculation, deadline_of
from engine.structured_output.matcher import CompileTimeout, ConstraintRefused
from engine.structured_output.spec import Constraint

if TYPE_CHECKING:  # the core's parts are loaded only by its own process
    from engine.builder import EngineParts
    from engine.core.engine_core import EngineCore


class Engine:
    """A running engine. Get one from `Engine.start`; stop it with `stop` or by leaving `async with`."""

    tokenizer: Tokenizer
    model_path: Path
    model_name: str
    vocab_size: int
    max_model_len: int  # tokens that a sequence can have: bounded by the model's positions and the KV pool
    device: str
    dtype: str
    threads: int  # CPU threads of the model
    fallback: Fallback | None = None  # its weights are in a core of their own
    image_processor: Processor | None = None  # of a model that reads images
    proposers: tuple[str, ...] = ()  # of drafts, that a span may name
    speculation: str = "off"  # of spans that name none
    adapters: dict[str, str]  # digests of their files by the names that a sequence may be opened with

    def __init__(self, config: EngineConfig, link: Callable[[Engine], Link], client: int = 0) -> None:
        """`link` makes the link to the core, which knows this engine as client `client`."""
        self.config = config
        self.fingerprint, self.adapters = b"", {}
        self._requests: dict[int, PendingRequest] = {}
        self._queued: set[int] = set()  # of those, spans and scores
        self._ids = itertools.count(m.first_id(client))
        self._images: WeakValueDictionary[int, ImageInput] = WeakValueDictionary()  # by each of their keys
        self._stopped: EngineError | None = None
        self._tell_end: Callable[[EngineError], None] = lambda error: None
        self._link = link(self)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        assemble: Callable[[EngineConfig], EngineParts] | None = None,
        fallback: Fallback | None = None,
    ) -> Engine:
        """Loads the model and starts the core; with `fallback` also that of its weights.

        Both cores then share the K/V memory of `config`, as `engine.model.memory.divided` divides it.

        `assemble` makes the core's parts, if not `engine.builder.build`; for a core in a process of its own it is a
        function of a module, which that process imports.

        Raises:
            CheckpointError: the model cannot be found or read.
            UnsupportedArchitecture: it can be read, but not run exactly.
            InvalidParameter: the configuration does not fit the model or this machine, or the vocabulary of `fallback`
                is another.
            EngineStopped: the core's process ended before it was ready.
        """
        if fallback is None:
            return await cls(config, partial(link_to, config, assemble))._begun()
        if (replicas := max(config.data_parallel_size, fallback.config.data_parallel_size)) > 1:
            message = f"data_parallel_size is {replicas}, and there are fallback weights; accepted: 1 beside them."
            raise InvalidParameter("data_parallel_size", message)
        if config.context_shift:
            message = "context_shift is set, and there are fallback weights; accepted: False beside them."
            raise InvalidParameter("context_shift", message)
        from engine.ipc.fallback_link import FallbackLink
        from engine.model.memory import divided, needs_of  # torch comes with it

        configs = [config, fallback.config]
        first, second = divided(configs, [await asyncio.to_thread(needs_of, each) for each in configs])
        links = partial(link_to, first, assemble), partial(link_to, second, assemble)
        engine = cls(first, lambda engine: FallbackLink(*links, fallback.min_confidence, engine))
        engine.fallback = replace(fallback, config=second)
        return await engine._begun()

    @classmethod
    async def join(cls, config: EngineConfig, client: int, places: AsyncIterator[str | None]) -> Engine:
        """Joins a core that another process keeps running, and shares, as a further client.

        `client` is a number above 0 that no other one has or had. `places` gives the announcements of that process's
        `share`: the core's address, and None while it is gone; when it ends or raises an `EngineError`, so does this
        engine. That process has to `forget_client` when this one is gone.

        Raises:
            CheckpointError: the model's tokenizer cannot be read.
            EngineError: raised by `places` before there is a core.
        """
        from engine.ipc.attached_client import AttachedLink  # ZeroMQ comes with it

        return await cls(config, lambda engine: AttachedLink(client, places, engine), client)._begun()

    async def _begun(self) -> Engine:
        """Returns itself, once its core runs."""
        loaded = await self._link.start()
        self.model_path = Path(loaded.path)
        self.model_name = name_of(self.config.model)
        self.vocab_size = loaded.vocab_size
        self.max_model_len = loaded.max_model_len
        self.fingerprint = loaded.fingerprint
        self.numerics = loaded.numerics
        self.device, self.dtype, self.threads = loaded.device, loaded.dtype, loaded.threads
        self.proposers, self.speculation, self.value_head = loaded.proposers, loaded.speculation, loaded.value_head
        self.adapters = dict(loaded.adapters)
        try:
            self.tokenizer = await asyncio.to_thread(Tokenizer.load, self.model_path)
            if loaded.vision:
                config = read_json(self.model_path / "config.json")
                self.image_processor = load_processor(self.model_path, config)
                self.tokenizer.image_mark = self.image_processor.mark, self.image_processor.around
        except BaseException:
            await self.stop()
            raise
        return self

    async def open(
        self, tokens: Iterable[int], *, tenant: str = "", priority: int = 0, adapter: str | None = None,
        deadline_s: float | None = None, remote_prefill: RemotePrefill | None = None,
        chunks: Iterable[tuple[int, int]] = (), streaming: StreamingWindow | None = None,
    ) -> Sequence:  # fmt: skip
        """Opens a sequence. Nothing is computed until it generates or scores.

        `tenant` separates prefix caches: tenants never share blocks, and neither do adapters. `adapter` names one of
        `adapters`, which all of the sequence is computed with. Lower `priority` runs first. After `deadline_s` seconds
        only its tokens stay: spans end with the finish reason "deadline", scores raise `DeadlineExceeded`. With
        `remote_prefill` the first span waits for the K/V of whole blocks from there; what does not come is computed.
        `chunks` are spans of the tokens, such as retrieved passages, whose K/V may be taken from another prompt of the
        tenant's, with `chunk_reuse`. With `streaming` it has no end: the model sees its first tokens and a window of
        the last.

        Raises:
            ContextLengthExceeded: the context cannot hold the tokens and one more, and there is no window.
            InvalidParameter: a token id is outside the vocabulary, the adapter is not loaded, no K/V is loaded from
                that peer, the chunks are no spans of the tokens or `chunk_reuse` is not set, the window does not fit
                the context or `context_shift` is not set.
            QueueFull: too many spans wait already.
            EngineStopped: see there.
        """
        self.check_adapter(adapter)
        deadline = deadline_of(deadline_s)
        given = list(tokens)
        self.check_prompt(given)
        self.check_length(len(given) + 1 if streaming is None else 0)
        self.check_queue()
        if remote_prefill is not None:
            self.config.check_peer(remote_prefill.host, remote_prefill.port)
        reuses = self.config.chunk_reuse is not None
        spans, id = check_chunks(chunks, len(given), reuses=reuses), self.next_id()
        if streaming is not None:
            check_endless(given, streaming, self.config, spans)
            streaming = streaming.in_blocks(self.config.block_size, self.max_model_len)
        images = self.add_images(given)
        self.post(
            m.Open(id, tuple(given), tenant, priority, deadline_s, adapter or "", remote_prefill, spans, streaming)
        )
        return Sequence(self, id, given, None, images, adapter, streaming, deadline)

    def warm(self, tokens: Iterable[int], *, tenant: str = "", priority: int = 0, adapter: str | None = None) -> None:
        """Prefills whole blocks of these tokens into the tenant's prefix cache, once the engine has nothing else to do.

        A hint, with no reply: nothing is generated, and a request that comes first halts it within a step. It takes
        only blocks that are empty, or that the eviction policy values less; it is given up where there are none, when
        a sequence of the tenant's goes on from these tokens, and when too many others come after it. Of a prompt with
        images only the tokens before the first one are prefilled.

        Raises:
            ContextLengthExceeded: the context cannot hold the tokens and one more.
            InvalidParameter: a token id is outside the vocabulary, the cache is off, or the adapter is not loaded.
        """
        self.check_adapter(adapter)
        if not self.config.prefix_cache:
            raise InvalidParameter("prefix_cache", "prefix_cache is off; accepted: on, to have a prefix warmed.")
        given = tuple(takewhile(lambda token: token < FIRST_IMAGE_ID, tokens))
        self.check_tokens(given)
        self.check_length(len(given) + 1)
        self.post(m.Warm(given, tenant, priority, adapter or ""))

    async def image(self, data: bytes, *, split: bool = True, limits: ImageLimits = LIMITS) -> ImageInput:
        """Reads and processes an image file, for a chat message or a prompt's tokens (`ImageInput.token_ids`).

        It is known to this engine while the result, or a sequence with it, is kept. Without `split` it is one tile, or
        has few tokens where a model's images keep their shape.

        Raises:
            InvalidImage: the file is too large, damaged or of another format.
            InvalidParameter: the model reads no images.
        """
        if self.image_processor is None:
            raise InvalidParameter("image", f"{self.model_name} reads no images; accepted: text.")
        image = await asyncio.to_thread(self._processed, self.image_processor, data, split, limits)
        self._register([image])
        return image

    def _processed(self, processor: Processor, data: bytes, split: bool, limits: ImageLimits) -> ImageInput:
        encode = partial(self.tokenizer.encode, special=True)
        return processor.process(read_image(data, limits), encode, split=split)

    def _register(self, images: Iterable[ImageInput]) -> None:
        for image in images:
            self._images.update(dict.fromkeys(lookup_keys(image.digest), image))

    def add_images(self, tokens: Tokens[int]) -> tuple[ImageInput, ...]:
        """Sends the core the images whose placeholders are among `tokens`; returns them."""
        if not has_images(tokens):
            return ()
        images = tuple(dict.fromkeys(self._images[key_of(token)] for token in image_tokens(tokens)))
        for each in images:
            self.post(m.AddImage(each.digest, each.tiles, each.size, each.pixels))
        return images

    async def resume(
        self, snapshot: bytes, *, tenant: str = "", priority: int = 0, deadline_s: float | None = None
    ) -> Sequence:
        """Opens a sequence that continues from a `Sequence.snapshot`, of this or another engine.

        Raises:
            BadSnapshot: the bytes are damaged, cut short, of another model, of another tenant, or of an adapter that
                is not loaded under its name.
            EngineError: of `open`.
        """
        kept = unpacked(snapshot, self.fingerprint)
        if kept.tenant != tenant:
            raise BadSnapshot("The snapshot is of another tenant; accepted: the tenant that the sequence had.")
        adapter, digest = kept.adapter
        if adapter and self.adapters.get(adapter) != digest:
            why = "is not loaded" if adapter not in self.adapters else "has other files now"
            raise BadSnapshot(f"The snapshot is of the adapter {adapter!r}, which {why}; accepted: with that adapter.")
        deadline = deadline_of(deadline_s)
        features = 0 if self.image_processor is None else self.image_processor.features
        images = tuple(restored_image(*each, features) for each in kept.images)
        self._register(images)
        self.check_prompt(kept.tokens)
        self.check_length(len(kept.tokens) + 1)
        self.check_queue()
        id = self.next_id()
        self.add_images(kept.tokens)
        self.post(
            m.Restore(
                id, None, kept.tokens, kept.generated, tenant, priority, deadline_s, kept.stream, kept.forks, kept.tail,
                adapter,
            )
        )  # fmt: skip
        return Sequence(self, id, list(kept.tokens), None, images, adapter or None, deadline=deadline)

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter that PEFT saved, from a directory or a hub name, as `name`. Other sequences go on.

        Raises:
            InvalidParameter: the name is taken, all of `max_adapters` are pinned, or the files are no adapter of this
                model; the message says why, and what would be accepted.
        """
        if not name:
            raise InvalidParameter("name", "name is empty; accepted: a name of its own.")
        reply = await self._asked(lambda request: m.LoadAdapter(request, name, path))
        if isinstance(reply, m.RequestRefused):
            raise InvalidParameter("adapter", "; ".join(reply.reasons))
        assert isinstance(reply, m.AdapterReady)
        self.adapters[name] = reply.digest

    async def unload_adapter(self, name: str) -> None:
        """Refuses an adapter from now on. Sequences that use it go on, and its memory is free once they are closed.

        Raises:
            InvalidParameter: it is not loaded.
        """
        self.check_adapter(name)
        del self.adapters[name]
        reply = await self._asked(lambda request: m.UnloadAdapter(request, name))
        if isinstance(reply, m.RequestRefused):
            raise InvalidParameter("adapter", "; ".join(reply.reasons))

    async def compile(self, constraint: Constraint, *, tenant: str = "") -> None:
        """Compiles a constraint before a span of the same tenant's needs it; the span then finds it ready.

        Raises:
            ConstraintRefused: no backend can enforce it exactly; `CompileTimeout`: not in time.
        """
        reply = await self._asked(lambda request: m.Compile(request, constraint, tenant))
        if isinstance(reply, m.RequestRefused):
            raise CompileTimeout("; ".join(reply.reasons)) if reply.timed_out else ConstraintRefused(reply.reasons)

    async def stats(self) -> Stats:
        """Returns statistics, taken between two steps. Raises `EngineStopped`, or `EngineRestarting` without waiting
        for the restart."""
        if self.state == "restarting":
            raise EngineRestarting("The engine is being restarted.", retry_after_s=1.0)
        reply = await self._asked(m.GetStats)
        assert isinstance(reply, m.StatsReply)
        return reply.stats

    async def _asked(self, command: Callable[[int], m.Command]) -> m.Reply:
        """Sends a command that has one reply; returns that."""
        request = self.request(queued=False)
        try:
            self.post(command(request.id))
            (reply,) = await request.replies()
        finally:
            self.forget(request)
        return reply

    # -- sharing one core between processes

    def share(self, moved: Callable[[str | None], None], ended: Callable[[EngineError], None]) -> str | None:
        """Returns the address at which others can `join` the core, which must run in a process of its own: None while
        there is none. `moved` gets each new place, and None when the core is gone for a moment; `ended` gets the error
        when it is gone for good."""
        from engine.ipc.supervisor import SupervisedLink

        assert isinstance(self._link, SupervisedLink), "the core runs in a thread of this process"
        self._link.hear_places(moved)
        self._tell_end = ended
        return self._link.place

    def forget_client(self, client: int) -> None:
        """Closes the sequences of a client that is gone."""
        self.post(m.Leave(client))

    @property
    def state(self) -> State:
        """Returns whether the core runs, is being started again, or has ended for good."""
        return self._link.state if self._stopped is None else "stopped"

    @property
    def healthy(self) -> bool:
        """Returns whether the core is running."""
        return self.state == "running"

    @property
    def busy(self) -> bool:
        """Returns whether spans or scores of this client's run or wait."""
        return bool(self._queued)

    async def stop(self) -> None:
        """Closes every sequence and ends the core. Idempotent."""
        await self._link.close()
        self.ended(EngineStopped("The engine was stopped."))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # -- for handles

    def next_id(self) -> int:
        return next(self._ids)

    def post(self, command: m.Command) -> None:
        """Sends a command to the core; commands keep their order. Without effect once the engine has stopped."""
        if self._stopped is None:
            self._link.send(command)

    def request(self, *, queued: bool = True) -> PendingRequest:
        """Registers a request for replies; `queued` counts it towards the limit of spans. Raises `EngineStopped`."""
        if self._stopped is not None:
            raise self._stopped
        request = PendingRequest(self.next_id())
        self._requests[request.id] = request
        if queued:
            self._queued.add(request.id)
        return request

    def forget(self, request: PendingRequest) -> None:
        """Drops the replies still to come for this request."""
        self._requests.pop(request.id, None)
        self._queued.discard(request.id)

    def check_adapter(self, adapter: str | None) -> None:
        if adapter is not None and adapter not in self.adapters:
            raise InvalidParameter("adapter", unknown_adapter(adapter, self.adapters))

    def check_tokens(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise InvalidParameter(
                    "tokens", f"token id {token} is outside the vocabulary; accepted: 0 to {self.vocab_size - 1}."
                )

    def check_prompt(self, tokens: Tokens[int]) -> None:
        """Raises `InvalidParameter` for a token that is neither of the vocabulary nor of an image known here."""
        self.check_tokens(without_images(tokens))
        for token in image_tokens(tokens) if has_images(tokens) else ():
            image = self._images.get(key_of(token))
            offset = offset_of(token)
            if image is None or offset >= image.features or placeholder(image.digest, offset) != token:
                message = f"token id {token} is of no image known here; accepted: those of `Engine.image`, while kept."
                raise InvalidParameter("tokens", message)
        self.check_whole(tokens)

    def check_whole(self, tokens: Tokens[int]) -> None:
        if self.image_processor is not None and self.image_processor.whole and has_images(tokens):
            check_whole(tokens, lambda token: self._images[key_of(token)].features)

    def check_length(self, length: int) -> None:
        if length > self.max_model_len:
            raise ContextLengthExceeded(
                f"{length} tokens are needed; the context holds {self.max_model_len}, "
                "of which at least one is generated."
            )

    def check_queue(self) -> None:
        limit = self.config.data_parallel_size * self.config.max_running + self.config.max_waiting
        if len(self._queued) >= limit:
            raise QueueFull(f"{len(self._queued)} spans run or wait already; the limit is {limit}.", retry_after_s=1.0)

    def check_speculation(self, speculation: Speculation | None) -> None:
        """Raises `InvalidParameter` for a proposer that the engine does not have, or a prediction outside the
        vocabulary or longer than the context."""
        if speculation is not None:
            check_speculation(speculation, self.proposers, self.max_model_len)
            self.check_tokens(speculation.prediction)

    # -- replies of the core, on the event loop

    def deliver(self, replies: list[m.Reply]) -> None:
        for reply in replies:
            request = self._requests.get(reply.request)
            if request is not None:
                request.deliver(reply)

    def given_up(self, request: int, error: EngineError) -> None:
        """Fails a request that will have no more replies."""
        if (waiting := self._requests.get(request)) is not None:
            waiting.fail(error)

    def ended(self, error: EngineError) -> None:
        """Fails all requests: no more replies will come."""
        if self._stopped is None:
            self._stopped = error
            self._tell_end(error)
            for request in self._requests.values():
                request.fail(error)

    @property
    def _core(self) -> EngineCore:
        """The core of an engine that runs in a thread; for tests."""
        from engine.ipc.thread_link import ThreadLink

        assert isinstance(self._link, ThreadLink)
        return self._link.core
