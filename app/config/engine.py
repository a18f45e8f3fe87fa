"""Settings of the engine: where it runs, in which numbers, with how much memory, and its scheduling policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ByteSize, Field

from app.config.models import find_model
from app.config.names import BadSetting

if TYPE_CHECKING:
    from engine import EngineConfig


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
