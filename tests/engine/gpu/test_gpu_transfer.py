"""Disaggregated prefill between engines on a GPU, or a pretended one: layers leave as they are queued."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine import EngineConfig
from engine.config import KVTransferConfig
from engine.kv_cache import kv_connector
from tests.engine.kv_apart import FIRST, answer, apart, connector, exchanged, free_port, prompt, together, until
from tests.engine.model import tiny
from tests.tiny import byte_tokenizer

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.slow]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, model, overrides = tiny.MODELS["qwen3"]
    sizes = {"num_hidden_layers": 2, "tie_word_embeddings": False}
    path = tiny.save(tiny.build(config, model, {**overrides, **sizes}), tmp_path_factory.mktemp("gpu"))
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("by_layer", [True, False], ids=["by layer", "by chunk"])
def test_the_answer_is_the_same_together_and_apart(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_layer: bool
) -> None:
    (tmp_path / "secret").write_text("sixteen bytes or more\n")
    monkeypatch.setattr(kv_connector, "MIN_LAYERS_BYTES", 1)
    monkeypatch.setattr(kv_connector, "GRACE_S", 120.0)
    transfer = KVTransferConfig(
        "kv_both", str(tmp_path / "secret"), kv_port=free_port(), peers=("127.0.0.1",), use_layerwise=by_layer,
        layerwise_min_tokens=16, timeout_s=300.0,
    )  # fmt: skip
    plain = EngineConfig(
        str(checkpoint), device="cuda", dtype="float16", kernels="triton", block_size=4, kv_blocks=40, max_running=2,
        graphs=False, max_batch_tokens=24,
    )  # fmt: skip

    async def exchange() -> None:
        expected = await together(plain, prompt(42))
        async with apart(plain, transfer) as (prefill, decode, remote):
            answering = asyncio.create_task(answer(decode, prompt(42), remote_prefill=remote))
            async with asyncio.timeout(120):
                await until(lambda: bool(connector(prefill)._requests))
                await answer(prefill, prompt(42), FIRST)
                assert await answering == expected
            sent, received = await exchanged(prefill), await exchanged(decode)
            nbytes = connector(prefill)._nbytes
        assert (received.received_blocks, received.failed_loads) == (42 // 4, 0)
        assert sent.sent_bytes == 42 // 4 * nbytes
        assert sent.layerwise_blocks == (42 // 4 if by_layer else 0), "chunks of 24 and 18 tokens"

    asyncio.run(exchange())
