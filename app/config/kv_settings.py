"""Settings in vLLM's names and JSON: the K/V events of an engine, and its exchange of K/V with others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.config.names import BadSetting

if TYPE_CHECKING:
    from engine.config import KVEventsConfig, KVTransferConfig

_ENDPOINT = r"^(tcp|ipc)://.+$"


class KVEventsSettings(BaseModel):
    """vLLM's `KVEventsConfig`, in its names: what `--kv-events-config` takes as JSON, and `[kv_events]` in the file.

    A queue of a bounded size (`max_queue_size`) is not among them: a batch is never dropped before it has a number.
    """

    model_config = ConfigDict(extra="forbid")

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = Field("tcp://127.0.0.1:5557", pattern=_ENDPOINT)
    replay_endpoint: str | None = Field(None, pattern=_ENDPOINT)
    buffer_steps: int = Field(10_000, ge=1)
    hwm: int = Field(100_000, ge=1)
    topic: str = ""

    def config(self) -> KVEventsConfig | None:
        """Returns the engine's part; None where nothing is published. Imports the engine, and so torch."""
        from engine.config import KVEventsConfig

        if not self.enable_kv_cache_events or self.publisher == "null":
            return None
        return KVEventsConfig(self.endpoint, self.replay_endpoint, self.buffer_steps, self.hwm, self.topic)


class KVTransferExtra(BaseModel):
    """`kv_connector_extra_config`: what the connector wants beside vLLM's names."""

    model_config = ConfigDict(extra="forbid")

    secret_file: str = Field(min_length=1)
    peers: list[str] = []
    timeout_s: float | None = Field(None, gt=0)
    stores: list[str] = []
    lookup_timeout_s: float = Field(0.5, gt=0)
    use_layerwise: bool = True
    layerwise_min_tokens: int = Field(384, ge=1)


class KVTransferSettings(BaseModel):
    """vLLM's `KVTransferConfig`, in its names: what `--kv-transfer-config` takes as JSON, and `[kv_transfer]` in the
    file. Of its `kv_load_failure_policy`, `recompute` alone is here: a load that fails costs time, and no answer."""

    model_config = ConfigDict(extra="forbid")

    kv_connector: Literal["TcpConnector", "NixlConnector", "KVStoreConnector"] = "TcpConnector"
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    kv_ip: str = Field("127.0.0.1", min_length=1)
    kv_port: int = Field(14579, ge=1, le=65535)
    kv_buffer_size: int = Field(64 << 20, ge=1)
    kv_load_failure_policy: Literal["recompute"] = "recompute"
    kv_connector_extra_config: KVTransferExtra

    def config(self) -> KVTransferConfig:
        """Returns the engine's part. Imports the engine, and so torch.

        Raises:
            BadSetting: a consumer has no peers, or there are no stores.
        """
        from engine.config import KVTransferConfig
        from engine.errors import InvalidParameter

        extra = self.kv_connector_extra_config
        try:
            return KVTransferConfig(
                self.kv_role, extra.secret_file, self.kv_ip, self.kv_port, self.kv_buffer_size, tuple(extra.peers),
                extra.timeout_s, extra.use_layerwise, extra.layerwise_min_tokens, self.kv_connector,
                tuple(extra.stores), extra.lookup_timeout_s,
            )  # fmt: skip
        except InvalidParameter as error:
            raise BadSetting(str(error)) from None
