"""From a configuration to the tiers below a pool."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.batch import KVCache
from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.kv.blocks import BlockPool
from engine.kv.coded import CodedCache
from engine.kv.copies import BlockStore
from engine.kv.disk import DiskTier
from engine.kv.host import HostTier
from engine.kv.image import HEADER_BYTES, layout_of
from engine.kv.tiers import Tiers
from engine.kv.worker import ThreadWorker
from engine.numerics import Numerics

STAGED_BYTES = 64 << 20  # of blocks on their way to a disk, where there is no host memory to keep them
STAGED_ROWS = (8, 256)  # at least and at most


def tiers_of(
    config: EngineConfig,
    model: bytes,
    numerics: Numerics,
    pool: BlockPool,
    kv: KVCache | CodedCache,
    store: BlockStore,
    device: torch.device,
) -> Tiers | None:
    """The tiers that `config` asks for, with what an earlier engine left on the disk; None: none. `model` is the
    fingerprint of the model's files.

    Raises:
        InvalidParameter: there is no room for a block, or the directory cannot be used.
    """
    if not config.kv_host_bytes and not config.kv_disk_bytes:
        return None
    nbytes = kv.block_nbytes
    files = config.kv_disk_bytes // (HEADER_BYTES + nbytes)
    rows = config.kv_host_bytes // nbytes if config.kv_host_bytes else _staged(nbytes)
    for name, count in (("kv_host_bytes", rows), ("kv_disk_bytes", files)):
        value = getattr(config, name)
        if value and not count:
            message = f"{name} is {value}; accepted: 0, or at least {HEADER_BYTES + nbytes}, one block of this model."
            raise InvalidParameter(name, message)
    disk = None
    if files and config.kv_dir is not None:
        layout = layout_of(model, config, numerics, kv.block_shape)
        disk = DiskTier(Path(config.kv_dir), layout, nbytes)
    host = HostTier(rows, nbytes, pinned=device.type == "cuda", share=config.kv_tenant_share)
    return Tiers(
        pool,
        store,
        host,
        ThreadWorker(),
        disk=disk,
        files=files,
        keep=bool(config.kv_host_bytes),
        share=config.kv_tenant_share,
    )


def _staged(nbytes: int) -> int:
    least, most = STAGED_ROWS
    return max(least, min(most, STAGED_BYTES // nbytes))
