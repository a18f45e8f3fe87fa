"""Builds the connector that a configuration asks for, and keys the digests by which engines name blocks alike."""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.disk_tier import kept_secret
from engine.kv_cache.kv_connector import KVConnector
from engine.kv_cache.kv_store.connector import build_store_connector
from engine.kv_cache.quantized_cache import QuantizedCache
from engine.kv_cache.snapshot import layout_of
from engine.kv_cache.tcp_transport import TcpTransport
from engine.kv_cache.transfers import LayerStore
from engine.kv_cache.transport.nixl_transport import NixlTransport
from engine.kv_cache.transport.peer_handshake import shared_secret
from engine.model.numerics import Numerics

if TYPE_CHECKING:
    from engine.model.batch import KVCache


def digest_key(config: EngineConfig) -> bytes:
    """Returns the key of an engine's block digests: made of the secret that it shares, so that peers name blocks alike;
    else kept with its blocks on the disk, or made anew.

    Raises:
        InvalidParameter: the secret or the directory cannot be used.
    """
    if config.kv_transfer is not None:
        return hmac.digest(shared_secret(config.kv_transfer.secret_file), b"digests", "sha256")
    return kept_secret(Path(config.kv_dir)) if config.kv_dir is not None else secrets.token_bytes(32)


def build_connector(
    config: EngineConfig,
    model: bytes,
    numerics: Numerics,
    pool: BlockPool,
    kv: KVCache | QuantizedCache,
    store: LayerStore,
    device: torch.device,
) -> KVConnector | None:
    """Builds the connector that `config` asks for; None: none. `model` is the fingerprint of the model's files.

    Raises:
        InvalidParameter: the buffer is too small for one block, the secret cannot be used, the address is taken, or a
            prompt of the model cannot go on from the blocks of one table alone.
    """
    if (transfer := config.kv_transfer) is None:
        return None
    if kv.states is not None or kv.groups is not None:
        why = "recurrent layers" if kv.groups is None else "sliding windows in K/V groups of their own"
        message = f"kv_transfer is set, and {config.model} has {why}; accepted: a model whose layers share one block"
        raise InvalidParameter("kv_transfer", f"{message} table.")
    nbytes = kv.block_nbytes
    if transfer.kv_buffer_size < nbytes:
        message = f"kv_transfer.kv_buffer_size is {transfer.kv_buffer_size}; accepted: at least {nbytes}, one block of"
        raise InvalidParameter("kv_transfer", f"{message} this model.")
    layout = layout_of(model, config, numerics, kv.block_shape)
    if transfer.uses_stores:
        pinned = device.type == "cuda"
        return build_store_connector(transfer, layout, pool, store, config.block_size, nbytes, pinned=pinned)
    address = (transfer.kv_ip, transfer.kv_port) if transfer.produces else None
    kind = NixlTransport if transfer.kv_connector == "NixlConnector" else TcpTransport
    transport = kind(
        shared_secret(transfer.secret_file),
        layout,
        store.parts.nbytes,
        address=address,
        timeout_s=transfer.load_timeout_s,
    )
    connector = KVConnector(
        pool,
        store,
        transport,
        config.block_size,
        nbytes,
        rows=transfer.kv_buffer_size // nbytes,
        listening=transfer.produces,
        pinned=device.type == "cuda",
        layerwise_tokens=transfer.layerwise_min_tokens if transfer.use_layerwise else None,
    )
    if transfer.produces:
        transport.listen(connector)
    return connector
