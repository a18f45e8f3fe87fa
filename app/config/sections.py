"""The sections of the settings: access, answers, limits, observability and the engine.

Access: where the server listens, who may reach it, and how much one user may take. Answers: thinking, strategies, tools
and documents, and how far each may go. Limits: for each key in a minute, and for the whole server. Observability: the
log, and the metrics' goals and price. Engine: where it runs, its number format, memory and policy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ByteSize, Field, field_validator

from app.config.efforts import BudgetFields, Thinking
from app.config.model_settings import find_model
from app.config.names import BadSetting, CommaSeparated
from tools.mcp.mcp_settings import McpSettings

if TYPE_CHECKING:
    from engine import EngineConfig


STORAGE_PER_USER = 4 << 30  # bytes, where there are several


class AccessSettings(BaseModel):
    host: str = Field("127.0.0.1", min_length=1, description="an address or host name to listen on")
    port: int = Field(8000, ge=0, le=65535, description="0 (any free port) to 65535")
    auth: Literal["off", "keys"] = Field(
        "off", description="off (whoever reaches the server may use it) or keys (who shows an API key)"
    )
    cors_origins: CommaSeparated = Field((), description="origins such as https://chat.example.org, comma-separated")
    allowed_hosts: CommaSeparated = Field((), description="host names such as chat.example.org, comma-separated")
    max_connections: int | None = Field(None, ge=16, description="connections at the same time, 16 or more")
    max_upload: ByteSize = Field(
        ByteSize(200 << 20), ge=1, description="a size such as 200MiB, of all files of a request together"
    )
    storage_per_user: ByteSize | None = Field(
        None, ge=1, description="a size such as 4GiB, of all files of a user's documents together"
    )
    sequences_per_user: int = Field(256, ge=1, description="open sequences of one user, 1 or more")
    sequence_tokens_per_user: int = Field(
        262_144, ge=1, description="tokens of a user's open sequences together, 1 or more"
    )
    sequence_lease_s: float = Field(600.0, gt=0, le=86_400, description="seconds of the longest lease, up to 86400")
    mcp_idle_s: float = Field(
        1800.0, gt=0, le=86_400, description="seconds after which an MCP session without a request ends, up to 86400"
    )
    drain_s: float = Field(
        5.0, ge=0, le=86_400, description="seconds that what runs may go on after SIGTERM, up to 86400"
    )

    @property
    def resolved_storage_per_user(self) -> int | None:
        """Bytes; None: without a limit."""
        if self.storage_per_user is not None:
            return int(self.storage_per_user)
        return STORAGE_PER_USER if self.auth == "keys" else None

    @field_validator("cors_origins")
    @classmethod
    def _is_origin(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [o for o in value if o != "*" and (not o.startswith(("http://", "https://")) or o.count("/") != 2)]:
            raise ValueError(f"{bad[0]!r} is not an origin")
        return value


class AnswerSettings(BaseModel):
    plugins: Path | None = Field(None, description="a directory with tool plugins")
    databases: dict[str, Path] = Field({}, description="SQLite files that tools may read, by name")
    mcp: dict[str, McpSettings] = Field({}, description="MCP servers by name, each a table with command or url")
    searxng: str = Field("", description="the address of a SearXNG server, for searching the web")
    web: bool = Field(True, description="true or false: whether tools may fetch public pages")
    sandbox: bool = Field(True, description="true or false: whether a tool may run Python in a jail")
    tool_steps: int = Field(8, ge=1, le=100, description="turns of an answer that may call tools, 1 to 100")
    tool_seconds: float = Field(300.0, gt=0, le=86_400, description="seconds of an answer with tools, up to 86400")
    efforts: dict[Thinking, BudgetFields] = Field(
        {}, description="budgets of thinking by effort (minimal, low, medium, high, xhigh), each a table"
    )
    thinking_text: Literal["shown", "summarised", "hidden"] = Field(
        "shown", description="shown, summarised or hidden: what people see of the thinking"
    )
    summary_model: str | None = Field(
        None, min_length=1, description="the name of a served model that writes the summaries; the first, by default"
    )
    strategy_branches: int = Field(64, ge=1, le=4096, description="sequences side by side of a strategy, 1 to 4096")
    strategy_nodes: int = Field(2_000, ge=2, le=100_000, description="nodes of a strategy's search, 2 to 100000")
    strategy_seconds: float = Field(600.0, gt=0, le=86_400, description="seconds of an answer's strategy, up to 86400")
    embedder: str = Field(
        "all-MiniLM-L6-v2", min_length=1, description="a sentence-transformers model, by name or directory"
    )


class LimitSettings(BaseModel):
    requests_per_minute: int | None = Field(None, ge=1, description="requests of one key in a minute, 1 or more")
    tokens_per_minute: int | None = Field(
        None, ge=1, description="tokens of one key in a minute, read and written together, 1 or more"
    )
    concurrent_requests: int | None = Field(
        None, ge=1, description="requests of one key that are answered at the same time, 1 or more"
    )
    max_output_tokens: int | None = Field(None, ge=1, description="tokens of one answer, thinking included, 1 or more")
    deadline_s: float | None = Field(
        None, gt=0, le=86_400, description="seconds that one answer may take, above 0 up to 86400"
    )
    max_wait_s: float = Field(
        60.0, gt=0, le=86_400, description="seconds that a request may have to wait for others, above 0 up to 86400"
    )
    reduce: bool = Field(True, description="true or false: whether answers are made shorter before any is refused")
    reduce_wait_s: float | None = Field(
        None, ge=0, le=86_400, description="seconds of waiting, less than max_wait_s, from which on answers are shorter"
    )
    reduced_thinking: int = Field(256, ge=2, description="tokens of thinking that are left of more, 2 or more")

    @property
    def reduce_from_s(self) -> float:
        """The wait from which on answers are made shorter."""
        return self.max_wait_s / 4 if self.reduce_wait_s is None else self.reduce_wait_s

    def check_limits(self) -> None:
        """
        Raises:
            BadSetting: nothing would ever be made shorter, as it would be refused before.
        """
        if self.reduce_wait_s is not None and self.reduce_wait_s >= self.max_wait_s:
            raise BadSetting(
                f"reduce_wait_s is {self.reduce_wait_s:g}, and from max_wait_s = {self.max_wait_s:g} on requests are "
                "refused; accepted: less than that."
            )


class ObservingSettings(BaseModel):
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="debug, info, warning or error"
    )
    log_format: Literal["text", "json"] = Field("text", description="text or json (a line of JSON each)")
    slo_ttft_ms: float = Field(2000.0, gt=0, description="milliseconds to the first token, above 0")
    slo_itl_ms: float = Field(200.0, gt=0, description="milliseconds between two tokens on average, above 0")
    price_per_hour: float | None = Field(None, ge=0, allow_inf_nan=False, description="what an hour costs, 0 or more")


class EngineSettings(BaseModel):
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto, float32, bfloat16 or float16"
    )
    max_model_len: int | None = Field(None, ge=16, description="tokens of context, 16 or more")
    kv_bytes: ByteSize | None = Field(None, ge=1 << 16, description="a size of 64KiB or more, such as 512MiB or 2GiB")
    kv_blocks: int | None = Field(None, ge=2, description="a number of KV blocks, 2 or more")
    kv_dtype: Literal["auto", "int8", "fp8"] = Field("auto", description="auto (the model's), int8 or fp8")
    kv_host_bytes: ByteSize = Field(ByteSize(0), ge=0, description="a size such as 8GiB, or 0 for none")
    kv_disk_bytes: ByteSize = Field(ByteSize(0), ge=0, description="a size such as 50GiB, or 0 for none")
    kv_tenant_share: float = Field(1.0, gt=0, le=1, description="a share above 0, up to 1 for no limit")
    block_size: int = Field(16, ge=1, le=256, description="tokens in a KV block, 1 to 256")
    max_batch_tokens: int | None = Field(None, ge=1, description="tokens in a step, 1 or more")
    max_running: int = Field(64, ge=1, description="sequences in a batch, 1 or more")
    max_waiting: int = Field(1024, ge=1, description="sequences that may wait, 1 or more")
    policy: Literal["decode-first", "prefill-first", "fcfs", "shortest-first", "priority", "fair"] = Field(
        "decode-first", description="decode-first, prefill-first, fcfs, shortest-first, priority or fair"
    )
    itl_goal_s: float | None = Field(None, gt=0, description="seconds between two tokens, above 0")
    kernels: Literal["auto", "torch", "triton"] = Field("auto", description="auto, torch or triton")
    quantization: Literal["none", "int8", "int4"] = Field("none", description="none, int8 or int4")
    deterministic: bool = Field(False, description="true or false")
    prefix_cache: bool = Field(True, description="true or false")
    threads: int | None = Field(None, ge=1, description="CPU threads, 1 or more")
    loop: Literal["auto", "plain", "overlapped"] = Field("auto", description="auto, plain or overlapped")
    engine: Literal["thread", "process"] = Field("thread", description="thread or process: where the engine runs")
    engine_hang_s: float = Field(60.0, ge=1, description="seconds without a word from the engine's process, 1 or more")

    api_workers: int = Field(1, ge=1, le=64, description="processes that answer /v1, 1 to 64")

    def check_processes(self) -> None:
        """
        Raises:
            BadSetting: several processes are to share an engine that lives in one of them.
        """
        if self.api_workers > 1 and self.engine != "process":
            raise BadSetting(
                f"api_workers is {self.api_workers}, and the engine runs in a thread of one process, where others "
                "cannot reach it; accepted: --engine process beside it, or 1."
            )

    def config_of(self, model: str, data_dir: Path) -> EngineConfig:
        """The engine's part of the settings, for one model. Imports the engine, and so torch."""
        from engine import EngineConfig

        return EngineConfig(
            model=find_model(model),
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            kv_blocks=self.kv_blocks,
            kv_bytes=None if self.kv_bytes is None else int(self.kv_bytes),
            kv_dtype=self.kv_dtype,
            kv_tenant_share=self.kv_tenant_share,
            kv_host_bytes=int(self.kv_host_bytes),
            kv_disk_bytes=int(self.kv_disk_bytes),
            kv_dir=str(data_dir / "kv") if self.kv_disk_bytes else None,
            max_batch_tokens=self.max_batch_tokens,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            policy=self.policy,
            itl_goal_s=self.itl_goal_s,
            kernels=self.kernels,
            quantization=self.quantization,
            deterministic=self.deterministic,
            prefix_cache=self.prefix_cache,
            threads=self.threads,
            loop=self.loop,
            runs_in=self.engine,
            hang_s=self.engine_hang_s,
        )
