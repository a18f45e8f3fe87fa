"""The engine's one configuration object: made at the edge, passed in, read by all parts. Knows nothing of HTTP."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from engine.errors import InvalidParameter

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoopName = Literal["auto", "plain", "overlapped"]
KvDType = Literal["auto", "int8", "fp8", "int4"]
RunsIn = Literal["thread", "process"]
KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
KVConnectorName = Literal["TcpConnector", "NixlConnector", "KVStoreConnector"]
KV_STORE_PORT = 14580
_STORE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:\s]+)(?::(\d{1,5}))?")
QuantizationName = Literal["none", "int8", "int4"]
KernelName = Literal["auto", "torch", "triton"]
PolicyName = Literal[
    "decode-first", "prefill-first", "fcfs", "shortest-first", "priority", "fair", "exclusive", "static"
]  # the last two are older ways, to measure against


MAX_DRAFT = 32  # tokens
STEP_TOKENS = 512  # a chunk of a prompt on a CPU: it bounds a decode's wait
DETERMINISTIC_STEP_TOKENS = 2048  # on a GPU, where every 1,024 keys of each token then leave a part to be merged
GPU_STEP_TOKENS = 8192  # fills a GPU's matrix units; policies make chunks smaller where decodes wait


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Sockets at which the prefix cache's changes are published (vLLM's `KVEventsConfig`). Whoever can reach them reads
    the token ids of all prompts.

    Raises:
        InvalidParameter: a value is out of range.
    """

    endpoint: str = "tcp://127.0.0.1:5557"  # of a ZeroMQ PUB socket
    replay_endpoint: str | None = None  # of a ZeroMQ ROUTER socket; None: no replay
    buffer_steps: int = 10_000  # batches that can be replayed
    hwm: int = 100_000  # batches queued for a slow subscriber; it misses more, and sees a gap
    topic: str = ""

    def __post_init__(self) -> None:
        for name in ("buffer_steps", "hwm"):
            if (value := getattr(self, name)) < 1:
                raise InvalidParameter("kv_events", f"kv_events.{name} is {value}; accepted: a positive integer.")


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """Exchange of K/V with other engines of the same model (vLLM's `KVTransferConfig`).

    TcpConnector, for disaggregated prefill: a producer listens at `kv_ip` and `kv_port` and serves the blocks of its
    pool; a consumer loads those of a prompt that one of its `peers` prefills. KVStoreConnector: a producer saves blocks
    to `stores` that are apart from the engines, a consumer loads from them.

    Raises:
        InvalidParameter: a value is out of range.
    """

    kv_role: KVRole
    secret_file: str  # whoever knows what it holds is a peer
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_buffer_size: int = 64 << 20  # bytes of host memory, for blocks on their way to peers
    peers: tuple[str, ...] = ()  # HOST or HOST:PORT: those that a request may name
    timeout_s: float | None = None  # of a load; what is missing then is computed. None: 60, and 5 from a store
    use_layerwise: bool = True  # a producer's: layers are sent while later ones are computed (LMCache's name)
    layerwise_min_tokens: int = 384  # of a prompt in one step; blocks of fewer are sent once all layers are computed
    kv_connector: KVConnectorName = "TcpConnector"
    stores: tuple[str, ...] = ()  # HOST or HOST:PORT, in any order
    lookup_timeout_s: float = 0.5  # in which the stores say what they have; one that does not is left alone

    def __post_init__(self) -> None:
        if self.kv_connector not in get_args(KVConnectorName):
            accepted = ", ".join(get_args(KVConnectorName))
            message = f"kv_transfer.kv_connector is {self.kv_connector!r}; accepted: {accepted}."
            raise InvalidParameter("kv_transfer", message)
        if self.kv_role not in get_args(KVRole):
            accepted = ", ".join(get_args(KVRole))
            raise InvalidParameter("kv_transfer", f"kv_transfer.kv_role is {self.kv_role!r}; accepted: {accepted}.")
        if not 0 < self.kv_port < 1 << 16:
            message = f"kv_transfer.kv_port is {self.kv_port}; accepted: 1 to 65535."
            raise InvalidParameter("kv_transfer", message)
        if self.kv_buffer_size < 1:
            message = f"kv_transfer.kv_buffer_size is {self.kv_buffer_size}; accepted: a positive number of bytes."
            raise InvalidParameter("kv_transfer", message)
        for name in ("timeout_s", "lookup_timeout_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                message = f"kv_transfer.{name} is {value}; accepted: more than 0 seconds."
                raise InvalidParameter("kv_transfer", message)
        if self.layerwise_min_tokens < 1:
            message = f"kv_transfer.layerwise_min_tokens is {self.layerwise_min_tokens}; accepted: a positive integer."
            raise InvalidParameter("kv_transfer", message)
        if self.uses_stores:
            self._check_stores()
            return
        if self.stores:
            message = f"kv_transfer.stores is set and kv_connector is {self.kv_connector}; accepted: KVStoreConnector,"
            raise InvalidParameter("kv_transfer", f"{message} or none.")
        if self.consumes and not self.peers:
            message = f"kv_transfer.kv_role is {self.kv_role} and there are no peers; accepted: HOST or HOST:PORT of "
            raise InvalidParameter("kv_transfer", f"{message}each engine that prefills, or kv_producer.")

    def _check_stores(self) -> None:
        """Refuses what a store does not have. Raises InvalidParameter."""
        if self.peers:
            message = "kv_transfer.peers is set and kv_connector is KVStoreConnector; accepted: TcpConnector, or none."
            raise InvalidParameter("kv_transfer", message)
        if not self.stores:
            message = (
                "kv_transfer.kv_connector is KVStoreConnector and there are no stores; accepted: HOST or HOST:PORT"
            )
            raise InvalidParameter("kv_transfer", f"{message} of each `ponder kv-store`.")
        addresses = self.store_addresses
        if twice := [each for each in addresses if addresses.count(each) > 1]:
            message = f"kv_transfer.stores has {twice[0][0]}:{twice[0][1]} twice; accepted: each once."
            raise InvalidParameter("kv_transfer", message)

    @property
    def uses_stores(self) -> bool:
        return self.kv_connector == "KVStoreConnector"

    @property
    def store_addresses(self) -> list[tuple[str, int]]:
        """Returns host and port of each store.

        Raises:
            InvalidParameter: one has neither form.
        """
        found = []
        for each in self.stores:
            parts = _STORE.fullmatch(each.strip())
            port = KV_STORE_PORT if parts is None or parts[2] is None else int(parts[2])
            if parts is None or not 0 < port < 1 << 16:
                message = (
                    f"kv_transfer.stores has {each!r}; accepted: HOST or HOST:PORT, with an IPv6 address as [::1]."
                )
                raise InvalidParameter("kv_transfer", message)
            found.append((parts[1].strip("[]"), port))
        return found

    @property
    def load_timeout_s(self) -> float:
        """Returns the seconds that a load may take."""
        return self.timeout_s or (5.0 if self.uses_stores else 60.0)

    @property
    def produces(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        return self.kv_role != "kv_producer"


@dataclass(frozen=True, slots=True)
class ChunkReuseConfig:
    """Reuse of the K/V of a prompt's named chunks after other text than they were computed after (EPIC's LegoLink, Hu
    et al. 2024, arXiv 2410.15332). Approximate: a model is measured when it is first loaded so, and refused where its
    distributions move too far.

    Raises:
        InvalidParameter: a value is out of range.
    """

    recompute_tokens: int = 16  # at a chunk's beginning, computed as usual
    max_kl: float = 0.02  # nats a token
    min_agreement: float = 0.99  # share of greedy answers that stay the same

    def __post_init__(self) -> None:
        if self.recompute_tokens < 1:
            message = f"chunk_reuse.recompute_tokens is {self.recompute_tokens}; accepted: a positive integer."
            raise InvalidParameter("chunk_reuse", message)
        if not self.max_kl > 0:
            message = f"chunk_reuse.max_kl is {self.max_kl}; accepted: more than 0 nats a token."
            raise InvalidParameter("chunk_reuse", message)
        if not 0 <= self.min_agreement <= 1:
            message = f"chunk_reuse.min_agreement is {self.min_agreement}; accepted: a share, 0 to 1."
            raise InvalidParameter("chunk_reuse", message)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The model to load, and the resources that it may use.

    Raises:
        InvalidParameter: a value is out of range.
    """

    model: str  # a directory in Hugging Face format, a GGUF file, or a hub name
    dtype: DType = "auto"  # auto: bfloat16 where the device computes in it, else float32
    device: str = "auto"  # auto: cuda where there is one, else cpu
    max_model_len: int | None = None  # tokens; None: the checkpoint's, at most 32,768
    block_size: int = 16  # tokens per KV block
    kv_blocks: int | None = None  # size of the KV pool; None: from kv_bytes
    kv_bytes: int | None = None  # None: a quarter of the free memory, but not more than could be used at once
    state_bytes: int | None = None  # of recurrent states and their checkpoints; None: a quarter of K/V's memory
    kv_dtype: KvDType = (
        "auto"  # auto: the model's; int8, fp8: twice as many tokens as in 16 bits; int4, on a CPU: 3 times
    )
    kv_max_kl: float = 0.02  # nats a token that kv_dtype int4 may cost; a model that it costs more is refused
    probe_dir: str | None = (
        None  # a directory that keeps what a model was measured to lose; None: measured at each start
    )
    kv_host_bytes: int = 0  # of memory outside of the pool, for offloaded blocks; on a CPU kv_bytes is better
    kv_disk_bytes: int = 0  # of files in kv_dir, below both; they are found again after a restart
    kv_dir: str | None = None  # a directory of this engine's own
    kv_tenant_share: float = 1.0  # of the pool and of each tier, that a tenant may have while others want it too
    max_batch_tokens: int | None = None  # tokens through the model in one step: None: 512, on a GPU 8,192
    max_running: int = 64  # sequences in one step
    max_waiting: int = 1024  # spans queued beyond the running ones before QueueFull
    policy: PolicyName = "decode-first"  # sets the order and the budget of a step, see engine/core/policies
    itl_goal_s: float | None = None  # seconds of a step with decodes; None: 1.8 times that of the decodes alone
    fixed_chunks: bool = False  # steps have max_batch_tokens tokens, whether sequences decode or not
    reserve_tokens: int | None = None  # K/V reserved for each sequence from the start, to measure against; None: none
    kernels: KernelName = "auto"  # auto: our own, Triton's on CUDA, where they run the model; else torch
    graphs: bool = True  # decodes are replayed from CUDA graphs; without effect but for the Triton kernels
    cpu_offload_gb: float = (
        0.0  # GiB of host memory for experts of a mixture on a GPU; those in use come to slots there
    )
    quantization: QuantizationName = "none"  # of weights; int4 on CUDA and our own CPU kernels, int8 on torch's, too
    deterministic: bool = False  # a request's bits depend on nothing else that runs
    prefix_cache: bool = True
    chunk_reuse: ChunkReuseConfig | None = None  # None: K/V is exact, and found by whole prefixes alone
    context_shift: bool = False  # sequences may be endless: `StreamingWindow`
    kv_events: KVEventsConfig | None = None  # None: what the prefix cache holds is not published
    kv_transfer: KVTransferConfig | None = None  # None: no K/V is exchanged with other engines
    encoder_cache_bytes: int = 256 << 20  # of encoded images, kept for the next request with them
    ageing_s: float = 10.0  # a waiting sequence gains one class of priority in this time
    speculation: str | None = "off"  # proposer of drafts, or off, or auto; None: auto on a CPU, elsewhere off
    speculation_tokens: int = 16  # the most tokens of a draft
    draft_model: str | None = None  # a small model of the same vocabulary, or Medusa heads of this one, as `model`
    adapters: tuple[tuple[str, str], ...] = ()  # names and directories, or hub names, of LoRA adapters
    max_adapters: int = 16  # that are resident at once, so that steps can use them; others come in when asked for
    max_host_adapters: int | None = None  # kept in memory as they were read; None: as many; others are read again
    pinned_adapters: tuple[str, ...] = ()  # names of those that stay resident
    tensor_parallel_size: int = 1  # ranks that divide each layer's heads and columns: processes, on CPUs
    pipeline_parallel_size: int = 1  # stages, each of some layers, of as many ranks
    enable_expert_parallel: bool = False  # ranks divide the experts of a layer, not each expert's columns
    prefill_context_parallel_size: int = 1  # contexts: ranks that divide each sequence's tokens and K/V
    data_parallel_size: int = 1  # replicas, each of as many ranks, with a scheduler of its own; memory is of all
    threads: int | None = None  # CPU threads of the model; None: one for a small model, else torch's choice
    loop: LoopName = (
        "auto"  # plain; overlapped: async scheduling, replies are made while the next step runs; auto: that on CUDA
    )
    runs_in: RunsIn = "thread"  # of this process, or a process of its own, restarted when it dies
    hang_s: float = 60.0  # a process that owes a reply and is silent for so long counts as hung

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "kv_blocks",
            "kv_bytes",
            "state_bytes",
            "max_batch_tokens",
            "reserve_tokens",
            "max_host_adapters",
            "threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParameter(name, f"{name} is {value}; accepted: a positive integer.")
        for name in (
            *("block_size", "max_running", "max_waiting", "max_adapters"),
            *("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"),
            "data_parallel_size",
        ):
            value = getattr(self, name)
            if value < 1:
                raise InvalidParameter(name, f"{name} is {value}; accepted: a positive integer.")
        self._check_tiers()
        self._check_moves()
        self._check_ranks()
        names = [name for name, _ in self.adapters]
        if not all(names) or len(set(names)) < len(names):
            message = f"adapters are called {', '.join(map(repr, names))}; accepted: each with a name of its own."
            raise InvalidParameter("adapters", message)
        pinned = set(self.pinned_adapters)
        if not pinned <= set(names) or len(pinned) > self.max_adapters - (len(names) > len(pinned)):
            message = f"pinned_adapters is {', '.join(self.pinned_adapters)}; accepted: names of adapters, fewer than "
            raise InvalidParameter("pinned_adapters", f"{message}max_adapters, {self.max_adapters}, or all of them.")
        if self.encoder_cache_bytes < 0:
            message = f"encoder_cache_bytes is {self.encoder_cache_bytes}; accepted: 0 or more bytes."
            raise InvalidParameter("encoder_cache_bytes", message)
        if not 0 <= self.cpu_offload_gb < float("inf"):
            message = f"cpu_offload_gb is {self.cpu_offload_gb}; accepted: 0 for none, or GiB of host memory."
            raise InvalidParameter("cpu_offload_gb", message)
        if not 1 <= self.speculation_tokens <= MAX_DRAFT:
            message = f"speculation_tokens is {self.speculation_tokens}; accepted: 1 to {MAX_DRAFT}."
            raise InvalidParameter("speculation_tokens", message)
        if not self.ageing_s > 0:
            raise InvalidParameter("ageing_s", f"ageing_s is {self.ageing_s}; accepted: more than 0 seconds.")
        if self.policy not in get_args(PolicyName):
            accepted = ", ".join(get_args(PolicyName))
            raise InvalidParameter("policy", f"policy is {self.policy!r}; accepted: {accepted}.")
        if self.itl_goal_s is not None and not self.itl_goal_s > 0:
            raise InvalidParameter("itl_goal_s", f"itl_goal_s is {self.itl_goal_s}; accepted: more than 0 seconds.")
        if self.loop not in get_args(LoopName):
            raise InvalidParameter("loop", f"loop is {self.loop!r}; accepted: auto, plain, overlapped.")
        if self.runs_in not in get_args(RunsIn):
            raise InvalidParameter("runs_in", f"runs_in is {self.runs_in!r}; accepted: thread, process.")
        if not self.hang_s > 0:
            raise InvalidParameter("hang_s", f"hang_s is {self.hang_s}; accepted: more than 0 seconds.")
        if self.quantization not in get_args(QuantizationName):
            raise InvalidParameter(
                "quantization", f"quantization is {self.quantization!r}; accepted: none, int8, int4."
            )
        if self.kernels not in get_args(KernelName):
            raise InvalidParameter("kernels", f"kernels is {self.kernels!r}; accepted: auto, torch, triton.")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise InvalidParameter("dtype", f"dtype is {self.dtype!r}; accepted: auto, float32, bfloat16, float16.")

    def check_peer(self, host: str, port: int) -> None:
        """Raises InvalidParameter for an engine that a request may not name as its remote prefill: K/V is loaded from
        no address that a client makes up."""
        transfer = self.kv_transfer
        if transfer is None or not transfer.consumes or transfer.uses_stores:
            why = "kv_transfer is not set" if transfer is None else "kv_transfer.kv_role is kv_producer"
            why = why if transfer is None or not transfer.uses_stores else "kv_transfer is of K/V stores, not of peers"
            message = f"{why}, and a remote prefill's K/V is to be loaded; accepted: on a kv_consumer or kv_both."
            raise InvalidParameter("kv_transfer", message)
        if not {host, f"{host}:{port}"} & set(transfer.peers):
            message = f"the remote prefill is at {host}:{port}; accepted: the peers {', '.join(transfer.peers)}."
            raise InvalidParameter("kv_transfer", message)

    @property
    def step_tokens(self) -> int:
        """Returns the maximum tokens of a step."""
        return self.max_batch_tokens or STEP_TOKENS

    @property
    def ranks(self) -> int:
        """Returns the number of processes that run a replica of the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size

    def _check_ranks(self) -> None:
        """Refuses what several ranks do not support. Raises InvalidParameter."""
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            message = "enable_expert_parallel is set and tensor_parallel_size is 1; accepted: 2 or more beside it."
            raise InvalidParameter("enable_expert_parallel", message)
        for name in ("kv_events", "kv_transfer"):
            if getattr(self, name) is not None and self.data_parallel_size > 1:
                message = f"{name} is set and data_parallel_size is {self.data_parallel_size}; accepted: 1, or none."
                raise InvalidParameter(name, message)
        if self.ranks == 1:
            return
        if self.block_size % (contexts := self.prefill_context_parallel_size):
            message = (
                f"block_size is {self.block_size}, and prefill_context_parallel_size {contexts} divides each block; "
            )
            raise InvalidParameter("block_size", f"{message}accepted: a multiple of {contexts}.")
        plain: dict[str, tuple[object, ...]] = {
            "device": ("auto", "cpu"),
            "kernels": ("auto", "torch"),
            "quantization": ("none",),
            "cpu_offload_gb": (0,),
            "kv_dtype": ("auto",),
            "kv_host_bytes": (0,),
            "kv_disk_bytes": (0,),
            "draft_model": (None,),
            "adapters": ((),),
            "kv_transfer": (None,),
        }
        for name, accepted in plain.items():
            value = getattr(self, name)
            if value not in accepted:
                said = ", ".join("none" if each in (None, ()) else str(each) for each in accepted)
                message = f"{name} is {value}, and the model is divided among {self.ranks} ranks; accepted: {said}."
                raise InvalidParameter(name, message)
        if self.speculation in ("draft", "medusa", "mtp"):
            message = f"speculation is {self.speculation}, and the model is divided among {self.ranks} ranks; "
            raise InvalidParameter("speculation", f"{message}accepted: auto, off, suffix, ngram or a plugin's.")

    def _check_moves(self) -> None:
        """Refuses what has no place beside K/V that moves. Raises InvalidParameter."""
        plain: dict[str, object] = {
            "deterministic": False,
            "kv_dtype": "auto",
            "kv_events": None,
            "kv_transfer": None,
            "ranks": 1,
        }
        if self.chunk_reuse is not None:
            self._check_beside("chunk_reuse", "None", {"prefix_cache": True, **plain})
        if self.context_shift:
            self._check_beside("context_shift", "False", plain)

    def _check_beside(self, of: str, unset: str, plain: dict[str, object]) -> None:
        """Refuses another value than the one in `plain` beside a field that is set. Raises InvalidParameter."""
        for name, accepted in plain.items():
            if (value := getattr(self, name)) != accepted:
                message = f"{of} is set and {name} is {value}; accepted: {accepted} beside it, or {of} {unset}."
                raise InvalidParameter(of, message)

    def _check_tiers(self) -> None:
        if not 0 < self.kv_tenant_share <= 1:
            message = f"kv_tenant_share is {self.kv_tenant_share}; accepted: more than 0, up to 1 for no limit."
            raise InvalidParameter("kv_tenant_share", message)
        if self.kv_tenant_share < 1 and not self.prefix_cache:
            message = "kv_tenant_share is set and prefix_cache is off; accepted: prefix_cache on, or kv_tenant_share 1."
            raise InvalidParameter("kv_tenant_share", message)
        if self.kv_dtype not in get_args(KvDType):
            raise InvalidParameter("kv_dtype", f"kv_dtype is {self.kv_dtype!r}; accepted: auto, int8, fp8, int4.")
        if not self.kv_max_kl > 0:
            raise InvalidParameter("kv_max_kl", f"kv_max_kl is {self.kv_max_kl}; accepted: more than 0 nats a token.")
        if self.kv_events is not None and not self.prefix_cache:
            message = "kv_events is set and prefix_cache is off; accepted: prefix_cache on, or kv_events None."
            raise InvalidParameter("kv_events", message)
        if self.kv_transfer is not None and not self.prefix_cache:
            message = "kv_transfer is set and prefix_cache is off; accepted: prefix_cache on, or kv_transfer None."
            raise InvalidParameter("kv_transfer", message)
        for name in ("kv_host_bytes", "kv_disk_bytes"):
            value = getattr(self, name)
            if value < 0:
                raise InvalidParameter(name, f"{name} is {value}; accepted: 0 for none, or a number of bytes.")
            if value and not self.prefix_cache:
                message = f"{name} is set and prefix_cache is off; accepted: prefix_cache on."
                raise InvalidParameter(name, message)
        if self.kv_disk_bytes and self.kv_dir is None:
            message = "kv_disk_bytes is set and kv_dir is not; accepted: a directory to write to, or kv_disk_bytes 0."
            raise InvalidParameter("kv_disk_bytes", message)


@dataclass(frozen=True, slots=True)
class Fallback:
    """More exact weights of the same vocabulary, which take a sequence over where the first ones are not sure (Kim et
    al. 2023, BiLD's fallback policy). `min_confidence` is a span's, where it names none; 0 defers nothing.

    Raises:
        InvalidParameter: `min_confidence` is no probability.
    """

    config: EngineConfig
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_confidence <= 1:
            raise InvalidParameter(
                "min_confidence", f"min_confidence is {self.min_confidence}; accepted: a probability, 0 to 1."
            )
