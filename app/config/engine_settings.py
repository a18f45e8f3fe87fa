"""The engine's section of the settings: where it runs, its number format, memory and policy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ByteSize, field_validator

from app.config.kv_settings import KVEventsSettings, KVTransferSettings
from app.config.model_settings import find_model
from app.config.names import BadSetting, setting

if TYPE_CHECKING:
    from engine import EngineConfig
    from engine.config import ChunkReuseConfig, Fallback


class EngineSettings(BaseModel):
    device: str = setting(
        "auto",
        "the device: `cpu`, `cuda` or `cuda:N`",
        accepts="auto, cpu, cuda or cuda:N",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "the number format of weights and activations",
        more="`auto` is the checkpoint's where the device is fast in it; `float32`, `bfloat16` or `float16`",
        accepts="auto, float32, bfloat16 or float16",
    )
    max_model_len: int | None = setting(
        None, "tokens of context", accepts="tokens of context, 16 or more", unset="the model's own", ge=16
    )
    kv_bytes: ByteSize | None = setting(
        None,
        "size of the KV cache, such as `2GiB`; of all models together",
        accepts="a size of 64KiB or more, such as 512MiB or 2GiB",
        unset="chosen by the machine's memory",
        ge=1 << 16,
    )
    kv_blocks: int | None = setting(
        None,
        "size of the KV cache in blocks",
        accepts="a number of KV blocks, 2 or more",
        unset="from `kv_bytes`",
        ge=2,
    )
    state_bytes: ByteSize | None = setting(
        None,
        "size of the recurrent states and their checkpoints, of each model that has them",
        more="see [recurrent states](#recurrent-states)",
        accepts="a size of 64KiB or more, such as 512MiB or 2GiB",
        unset="a quarter of the KV cache's",
        ge=1 << 16,
    )
    kv_dtype: Literal["auto", "int8", "fp8", "int4"] = setting(
        "auto",
        "the KV cache's number format: the model's, or `int8` or `fp8` for twice as many tokens, `int4` for 3 times",
        more="as many as of a 16-bit model in the same memory, and "
        "[less exact](performance.md#keys-and-values-in-8-or-4-bits). `int4` is for a CPU, for heads of a multiple of "
        "32 components, and refused where it costs more than `kv_max_kl`",
        accepts="auto (the model's), int8, fp8 or int4",
    )
    kv_max_kl: float = setting(
        0.02,
        'nats a token that `kv_dtype = "int4"` may cost',
        more="the KL divergence from the same model with K/V of its own format, measured when it is first loaded so; "
        "above it the server refuses to start",
        accepts="nats a token, above 0",
        gt=0,
    )
    chunk_reuse: bool = setting(
        False,
        "retrieved passages are read once, and their K/V used again beside other passages",
        more="[approximate](performance.md#chunks-in-any-order), for questions that one passage answers; a model is "
        "measured when it is first loaded so, and refused where it moves too far; beside neither `deterministic`, "
        "K/V of 8 or 4 bits, `kv_events`, `kv_transfer` nor several ranks",
        accepts="true or false",
    )
    chunk_recompute_tokens: int = setting(
        16,
        "tokens at the beginning of a reused passage that are computed all the same",
        accepts="a number of tokens, 1 or more",
        ge=1,
    )
    chunk_max_kl: float = setting(
        0.02,
        "nats a token that `chunk_reuse` may cost",
        more="the KL divergence from the same model with exact K/V; above it the server refuses to start",
        accepts="nats a token, above 0",
        gt=0,
    )
    chunk_min_agreement: float = setting(
        0.99,
        "share of greedy answers that stay the same with `chunk_reuse`, as measured",
        more="below it the server refuses to start",
        accepts="a share, 0 to 1",
        ge=0,
        le=1,
    )
    context_shift: bool = setting(
        False,
        "chats may be endless: the model sees a chat's system prompt and a window of what was said last",
        more="in the page always, over the API [where a request asks for it](api.md#endless-chats); beside "
        "neither `deterministic`, K/V of 8 or 4 bits, `kv_events`, `kv_transfer`, `fallback_model` nor several ranks",
        accepts="true or false",
    )
    kv_tenant_share: float = setting(
        1.0,
        "the share of the KV cache that one user may have when others want it",
        more="of each offload tier, too",
        accepts="a share above 0, up to 1 for no limit",
        gt=0,
        le=1,
    )
    kv_host_bytes: ByteSize = setting(
        ByteSize(0),
        "host memory that a GPU's KV cache offloads to",
        more="see [where keys and values lie](#where-keys-and-values-lie)",
        accepts="a size such as 8GiB, or 0 for none",
        ge=0,
    )
    kv_disk_bytes: ByteSize = setting(
        ByteSize(0),
        "disk that the KV cache offloads to, kept over restarts",
        more="in `kv` of the data directory",
        accepts="a size such as 50GiB, or 0 for none",
        ge=0,
    )
    block_size: int = setting(16, "tokens in a KV block", accepts="tokens in a KV block, 1 to 256", ge=1, le=256)
    max_batch_tokens: int | None = setting(
        None,
        "tokens through the model in one step; longer prompts are prefilled in chunks",
        accepts="tokens in a step, 1 or more",
        unset="512, on a GPU 8,192, with `deterministic` 2,048",
        ge=1,
    )
    max_running: int = setting(64, "sequences in one step", accepts="sequences in a batch, 1 or more", ge=1)
    max_waiting: int = setting(
        1024, "sequences that may wait beyond those; then 429", accepts="sequences that may wait, 1 or more", ge=1
    )
    policy: Literal["decode-first", "prefill-first", "fcfs", "shortest-first", "priority", "fair"] = setting(
        "decode-first",
        "the scheduling policy",
        more="see [who runs in a step](#who-runs-in-a-step)",
        accepts="decode-first, prefill-first, fcfs, shortest-first, priority or fair",
    )
    itl_goal_s: float | None = setting(
        None,
        "seconds between two tokens that prefilling other prompts must not exceed",
        accepts="seconds between two tokens, above 0",
        gt=0,
    )
    kernels: Literal["auto", "torch", "triton"] = setting(
        "auto",
        "the kernels: our own where they run the model, or torch's",
        more="our own are in Triton on CUDA, which wants a C compiler and Python's headers, and says so where they are "
        "missing; on a CPU in C++, where the processor has AVX2 or NEON and the wheel brought them or there is a C++ "
        "compiler. `triton` refuses to start where those cannot run",
        accepts="auto, torch or triton",
    )
    cpu_offload_gb: float = setting(
        0.0,
        "GiB of host memory for experts of a mixture that a GPU does not hold",
        more="see [experts in host memory](#experts-in-host-memory); of each model and replica",
        accepts="GiB of host memory, or 0 for none",
        ge=0,
    )
    quantization: Literal["none", "int8", "int4"] = setting(
        "none",
        "rounds the weights at load to `int8` or `int4`",
        more="`int8` takes half the memory and about half the time of few requests. `int4` has a scale for 32 weights "
        "(on CUDA 64) and takes a bit more than a quarter; the logits' matrix is in 8 bits. On a CPU both are for "
        "our own kernels in `bfloat16`, which `dtype: auto` then is; where those do not run, `int8` is torch's and "
        "`int4` is refused. On a GPU in `bfloat16` or `float16`, where neither has been measured yet",
        accepts="none, int8 or int4",
    )
    fallback_model: str | None = setting(
        None,
        "[fallback weights](#fallback-weights): a model of the same tokenizer that goes on where the first is not sure",
        more="often `model` itself, without its `quantization`",
        accepts="a model directory, a .gguf file, or a Hugging Face Hub name",
        min_length=1,
    )
    fallback_quantization: Literal["none", "int8"] = setting(
        "none", "rounds the fallback weights at load, as `quantization` does the first", accepts="none or int8"
    )
    fallback_confidence: float = setting(
        0.3,
        "the probability of the likeliest token below which the fallback weights go on",
        more="0 leaves every answer to the first weights but those of the strategy `fallback`",
        accepts="a probability, 0 to 1",
        ge=0,
        le=1,
    )
    speculation: str | None = setting(
        None,
        "the [speculative decoding](speculation.md) of answers: the proposer of drafts, `auto` or `off`",
        more="`suffix`, `ngram`, `mtp` of a checkpoint that has it, `draft` or `medusa` with `draft_model`, or a "
        "plugin's. A request may ask for another",
        accepts="auto, off, or a proposer: suffix or ngram, some models' mtp, with draft_model also draft or medusa",
        unset="on a CPU `auto`, on a GPU `off`",
        min_length=1,
    )
    speculation_tokens: int = setting(
        16, "tokens of the longest draft", accepts="tokens of a draft, 1 to 32", ge=1, le=32
    )
    draft_model: str | None = setting(
        None,
        "a small model of the same vocabulary that proposes drafts, or Medusa heads of `model`",
        accepts="a model directory, a .gguf file, or a Hugging Face Hub name",
        min_length=1,
    )
    deterministic: bool = setting(
        False, "a request gets the same bits [whatever else runs](#the-same-tokens)", accepts="true or false"
    )
    prefix_cache: bool = setting(True, "reuses the KV of equal prompt beginnings", accepts="true or false")
    kv_events: KVEventsSettings | None = setting(
        None,
        "[K/V events](#kv-events): sockets at which the first model's prefix cache tells what it holds",
        more="`[kv_events]`, or as JSON, with vLLM's names: `endpoint`, `replay_endpoint`, `buffer_steps`, `hwm`, "
        "`topic`, `publisher` and `enable_kv_cache_events`. Needs `prefix_cache`",
        accepts=f"a table, or JSON, of {', '.join(KVEventsSettings.model_fields)}",
        flag="--kv-events-config",
    )
    kv_transfer: KVTransferSettings | None = setting(
        None,
        "[disaggregated prefill](#disaggregated-prefill), or [K/V stores](#kv-stores): the first model's engine "
        "exchanges K/V with other servers'",
        more="`[kv_transfer]`, or as JSON, with vLLM's names: `kv_connector`, `kv_role`, `kv_ip`, `kv_port`, "
        "`kv_buffer_size`, `kv_load_failure_policy` and `kv_connector_extra_config`. Needs `prefix_cache`",
        accepts=f"a table, or JSON, of {', '.join(KVTransferSettings.model_fields)}",
        flag="--kv-transfer-config",
    )
    encoder_cache_bytes: ByteSize = setting(
        ByteSize(256 << 20),
        "memory for encoded images of a model that sees, kept for the next question about them",
        accepts="a size such as 256MiB, or 0 for none",
        ge=0,
    )
    warm_next_turn: bool = setting(
        True,
        "prefills a chat's next prompt after an answer, when the engine is idle",
        more="as far as it is known: see [the next turn](performance.md#the-next-turn). Needs `prefix_cache`",
        accepts="true or false",
    )
    tensor_parallel_size: int = setting(
        1,
        "processes that divide each layer of the model",
        more="on CPUs, see [several ranks](#several-ranks)",
        accepts="a number of processes, 1 or more, that divides the model's heads",
        ge=1,
    )
    pipeline_parallel_size: int = setting(
        1,
        "stages of the model's layers, each of as many processes",
        more="on CPUs, see [several ranks](#several-ranks)",
        accepts="a number of stages, 1 or more, up to the model's layers",
        ge=1,
    )
    enable_expert_parallel: bool = setting(
        False,
        "the processes of `tensor_parallel_size` divide a mixture's experts, not each expert's columns",
        more="see [several ranks](#several-ranks)",
        accepts="true or false",
    )
    prefill_context_parallel_size: int = setting(
        1,
        "processes that divide the tokens of each sequence and their K/V",
        more="on CPUs, each with all weights, see [several ranks](#several-ranks)",
        accepts="a number of processes, 1 or more, that divides block_size",
        ge=1,
    )
    data_parallel_size: int = setting(
        1,
        "replicas of the model, which share the K/V memory that is set, each with all that makes one engine",
        more="see [replicas](#replicas)",
        accepts="a number of replicas, 1 or more",
        ge=1,
    )
    threads: int | None = setting(
        None,
        "CPU threads of the model",
        accepts="CPU threads, 1 or more",
        unset="one for a small model, else torch's choice",
        ge=1,
    )
    loop: Literal["auto", "plain", "overlapped"] = setting(
        "auto",
        "the engine's loop: `overlapped` makes a step's replies while the device runs the next one",
        more="see [performance](performance.md#overhead); a GPU is launched into that one before the tokens of the "
        "first are known, where that is possible. `plain`: one after the other. `auto`: `overlapped` on a GPU",
        accepts="auto, plain or overlapped",
    )
    engine: Literal["thread", "process"] = setting(
        "thread",
        "where the engine runs: in a thread of the server, or in a process of its own",
        more="see [below](#the-engines-process)",
        accepts="thread or process: where the engine runs",
    )
    api_workers: int = setting(
        1,
        'processes that answer `/v1`; more than 1 need `engine = "process"`',
        more="up to 64, see [below](#api-workers)",
        accepts="processes that answer /v1, 1 to 64",
        ge=1,
        le=64,
    )
    engine_hang_s: float = setting(
        60.0,
        "seconds of silence after which a busy engine's process is killed and started again",
        more="more than a step ever takes",
        accepts="seconds without a word from the engine's process, 1 or more",
        ge=1,
    )

    @field_validator("kv_events", "kv_transfer", mode="before")
    @classmethod
    def _parse_json(cls, value: object) -> object:
        return json.loads(value) if isinstance(value, str) else value

    def check_processes(self) -> None:
        """
        Raises:
            BadSetting: several processes are to share an engine that lives in one of them, or its replicas.
        """
        if self.api_workers > 1 and self.engine != "process":
            raise BadSetting(
                f"api_workers is {self.api_workers}, and the engine runs in a thread of one process, where others "
                "cannot reach it; accepted: --engine process beside it, or 1."
            )
        if self.api_workers > 1 and self.data_parallel_size > 1:
            raise BadSetting(
                f"api_workers is {self.api_workers}, and the {self.data_parallel_size} replicas of data_parallel_size "
                "are one process's; accepted: 1 of either."
            )

    def check_chunks(self) -> None:
        """
        Raises:
            BadSetting: a limit of reused chunks is set, and `chunk_reuse` is off.
        """
        given = sorted(name for name in self.model_fields_set - {"chunk_reuse"} if name.startswith("chunk_"))
        if given and not self.chunk_reuse:
            raise BadSetting(f"{given[0]} is set and chunk_reuse is off; accepted: both, or neither.")

    def fallback_of(self, config: EngineConfig) -> Fallback | None:
        """Returns the fallback weights beside those of `config`; None where there are none.

        Raises:
            BadSetting: they are the same weights, or several processes are to share them.
        """
        from engine.config import Fallback

        if self.fallback_model is None:
            given = sorted(name for name in self.model_fields_set if name.startswith("fallback_"))
            if given:
                raise BadSetting(f"{given[0]} is set and fallback_model is not; accepted: both, or neither.")
            return None
        if self.api_workers > 1:
            raise BadSetting(
                f"api_workers is {self.api_workers}, and fallback weights are one process's; accepted: 1 with "
                "fallback_model."
            )
        if self.data_parallel_size > 1:
            raise BadSetting(
                f"data_parallel_size is {self.data_parallel_size}, and fallback weights are beside one replica; "
                "accepted: 1 with fallback_model."
            )
        path = find_model(self.fallback_model)
        if (path, self.fallback_quantization) == (config.model, config.quantization):
            raise BadSetting(
                f"fallback_model is {self.fallback_model!r} in the quantization of model, so it has the same weights; "
                'accepted: another model, or quantization "int8" or "int4".'
            )
        kv_dir = None if config.kv_dir is None else f"{config.kv_dir}-fallback"  # the same tokens have other K/V
        bare = replace(config, draft_model=None, adapters=(), pinned_adapters=(), kv_events=None, kv_transfer=None)
        bare = replace(bare, chunk_reuse=None)  # it goes on with sequences of the first weights
        other = replace(bare, model=path, quantization=self.fallback_quantization, kv_dir=kv_dir)
        return Fallback(other, self.fallback_confidence)

    def chunk_config(self) -> ChunkReuseConfig | None:
        """Returns the engine's part of reused chunks."""
        from engine.config import ChunkReuseConfig

        if not self.chunk_reuse:
            return None
        return ChunkReuseConfig(self.chunk_recompute_tokens, self.chunk_max_kl, self.chunk_min_agreement)

    def config_of(self, model: str, data_dir: Path, draft_model: str | None) -> EngineConfig:
        """The engine's part of the settings, for one model and its draft model. Imports the engine, and so torch."""
        from engine import EngineConfig

        return EngineConfig(
            model=find_model(model),
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            kv_blocks=self.kv_blocks,
            kv_bytes=None if self.kv_bytes is None else int(self.kv_bytes),
            state_bytes=None if self.state_bytes is None else int(self.state_bytes),
            kv_dtype=self.kv_dtype,
            kv_max_kl=self.kv_max_kl,
            probe_dir=str(data_dir),
            chunk_reuse=self.chunk_config(),
            context_shift=self.context_shift,
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
            cpu_offload_gb=self.cpu_offload_gb,
            quantization=self.quantization,
            speculation=self.speculation,
            speculation_tokens=self.speculation_tokens,
            draft_model=None if draft_model is None else find_model(draft_model),
            deterministic=self.deterministic,
            prefix_cache=self.prefix_cache,
            encoder_cache_bytes=int(self.encoder_cache_bytes),
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            enable_expert_parallel=self.enable_expert_parallel,
            prefill_context_parallel_size=self.prefill_context_parallel_size,
            data_parallel_size=self.data_parallel_size,
            threads=self.threads,
            loop=self.loop,
            runs_in=self.engine,
            hang_s=self.engine_hang_s,
        )
