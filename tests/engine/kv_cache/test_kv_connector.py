"""Disaggregated prefill: the same tokens for a prompt that another engine read, and what cannot be exchanged."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import GREEDY, Engine, EngineConfig, InvalidParameter, Sampling, Span
from engine.config import KVTransferConfig
from engine.kv_cache import kv_connector, tcp_transport
from engine.params import RemotePrefill
from engine.structured_output.layout import Constrained
from engine.structured_output.spec import Regex
from tests.engine.kv_apart import FIRST, SIZE, SPAN, answer, apart, connector, exchanged, prompt, together, until


@pytest.mark.parametrize(
    "span",
    [SPAN, Span(Sampling(temperature=1.0, seed=5), max_tokens=12, ignore_eos=True)],
    ids=["greedy", "seeded"],
)
async def test_a_prompt_that_another_engine_read_has_the_same_answer(
    plain: EngineConfig, transfer: KVTransferConfig, span: Span
) -> None:
    expected = await together(plain, prompt(), span)
    async with apart(plain, transfer) as (prefill, decode, remote):
        await answer(prefill, prompt(), FIRST)
        assert await answer(decode, prompt(), span, remote_prefill=remote) == expected
        sent, received, stats = await exchanged(prefill), await exchanged(decode), await decode.stats()
        nbytes = connector(decode)._nbytes
    whole_blocks = 150 // SIZE
    assert (received.received_blocks, sent.sent_blocks, received.failed_loads) == (whole_blocks, whole_blocks, 0)
    assert received.received_bytes == sent.sent_bytes == whole_blocks * nbytes
    assert stats.prompt_tokens == 150 - whole_blocks * SIZE  # the rest alone was computed there


@pytest.mark.parametrize("served", [True, False], ids=["", "host memory not served"])
async def test_blocks_that_left_the_pool_are_sent_from_host_memory(
    plain: EngineConfig, transfer: KVTransferConfig, served: bool
) -> None:
    small = replace(plain, kv_blocks=64, kv_host_bytes=8 << 20)
    expected = await together(plain, prompt())
    async with apart(small, replace(transfer, timeout_s=20.0)) as (prefill, decode, remote):
        for text in (0, 1, 2, 3):  # 37 blocks each, of 64
            await answer(prefill, prompt(text=text), FIRST)
        if not served:
            connector(prefill).offloaded = lambda digest: None
        assert await answer(decode, prompt(), remote_prefill=remote) == expected
        received = await exchanged(decode)
    assert (received.received_blocks == 150 // SIZE) == served
    assert received.failed_loads == int(not served)


async def test_blocks_are_sent_while_later_chunks_of_the_prompt_are_computed(
    plain: EngineConfig, transfer: KVTransferConfig
) -> None:
    expected = await together(plain, prompt(600))
    async with apart(plain, transfer) as (prefill, decode, remote):
        answering = asyncio.create_task(answer(decode, prompt(600), remote_prefill=remote))
        await until(lambda: bool(connector(prefill)._requests))  # before there is anything
        assert (await exchanged(prefill)).sent_blocks == 0
        await answer(prefill, prompt(600), FIRST)
        assert await answering == expected
        sent = await exchanged(prefill)
    assert sent.sent_blocks == 600 // SIZE
    assert 0 < sent.overlapped_seconds <= sent.send_seconds


async def test_forks_and_structured_output_go_on_from_loaded_blocks(
    plain: EngineConfig, transfer: KVTransferConfig
) -> None:
    held = Span(GREEDY, max_tokens=24, constraint=Constrained(Regex("[a-z]{6}")))

    async def answers(engine: Engine, **options: Any) -> list[tuple[int, ...]]:
        async with await engine.open(prompt(), **options) as seq:
            first = (await seq.generate_all(FIRST)).token_ids
            kids = seq.fork(2)
            drawn = Span(Sampling(temperature=1.0, seed=3), max_tokens=12, ignore_eos=True)
            rest = await asyncio.gather(
                *(kid.generate_all(span) for kid, span in zip(kids, (drawn, held), strict=True))
            )
            return [first, *(each.token_ids for each in rest)]

    async with await Engine.start(plain) as engine:
        expected = await answers(engine)
    async with apart(plain, transfer) as (prefill, decode, remote):
        await answer(prefill, prompt(), FIRST)
        assert await answers(decode, remote_prefill=remote) == expected
        assert (await exchanged(decode)).received_blocks == 150 // SIZE


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("random_model", {"kv_dtype": "int8"}),
        pytest.param(
            "wide_model", {"kv_dtype": "int4", "dtype": "bfloat16", "kv_max_kl": 100.0}, marks=pytest.mark.slow
        ),
        pytest.param("random_latent", {}, marks=pytest.mark.slow),
        pytest.param("random_hybrid", {}, marks=pytest.mark.slow),
    ],
    ids=["8 bits", "4 bits", "latents", "short convolutions"],
)
async def test_blocks_of_any_layout_are_exchanged(
    plain: EngineConfig, transfer: KVTransferConfig, request: pytest.FixtureRequest, model: str, options: dict[str, Any]
) -> None:
    config = replace(plain, model=str(request.getfixturevalue(model)), **options)
    expected = await together(config, prompt())
    async with apart(config, transfer) as (prefill, decode, remote):
        await answer(prefill, prompt(), FIRST)
        assert await answer(decode, prompt(), remote_prefill=remote) == expected
        assert (await exchanged(decode)).received_blocks == 150 // SIZE


async def test_others_run_while_a_sequence_waits_for_its_blocks(
    plain: EngineConfig, transfer: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_connector, "GRACE_S", 30.0)
    async with apart(plain, transfer) as (prefill, decode, remote):
        waiting = asyncio.create_task(answer(decode, prompt(), remote_prefill=remote))
        await until(lambda: bool(connector(decode)._loads))
        await answer(decode, prompt(40, text=1))
        assert not waiting.done() and (await decode.stats()).waiting == 1
        await answer(prefill, prompt(), FIRST)
        await waiting


async def test_twins_wait_for_one_load(plain: EngineConfig, transfer: KVTransferConfig) -> None:
    expected = await together(plain, prompt())
    async with apart(plain, transfer) as (prefill, decode, remote):
        twins = [asyncio.create_task(answer(decode, prompt(), remote_prefill=remote)) for _ in range(3)]
        await until(lambda: [len(load.sequences) for load in connector(decode)._loads] == [3])
        await until(lambda: bool(connector(prefill)._requests))
        await answer(prefill, prompt(), FIRST)
        assert await asyncio.gather(*twins) == [expected] * 3
        assert (await exchanged(decode)).received_blocks == 150 // SIZE


async def test_a_prompt_longer_than_the_buffer_is_sent_in_parts(
    plain: EngineConfig, transfer: KVTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_transport, "HEARTBEAT_S", 30.0)  # rows that are free again have more sent at once
    async with await Engine.start(replace(plain, kv_transfer=transfer)) as engine:
        nbytes = connector(engine)._nbytes
    async with apart(plain, replace(transfer, kv_buffer_size=2 * nbytes)) as (prefill, decode, remote):
        await answer(prefill, prompt(), FIRST)
        await answer(decode, prompt(), remote_prefill=remote)
        assert (await exchanged(decode)).received_blocks == 150 // SIZE
        sent = await exchanged(prefill)
        assert sent.overlapped_seconds == 0  # all was computed before it was asked for
        assert len(connector(prefill)._free) == 2


# -- what is refused


async def test_a_request_names_peers_alone(plain: EngineConfig, transfer: KVTransferConfig) -> None:
    async with apart(plain, replace(transfer, peers=("127.0.0.1:1", "prefill"))) as (prefill, decode, _):
        with pytest.raises(InvalidParameter, match=r"at 127\.0\.0\.1:2; accepted: the peers 127\.0\.0\.1:1, prefill"):
            await decode.open(prompt(), remote_prefill=RemotePrefill("127.0.0.1", 2))
        with pytest.raises(InvalidParameter, match="kv_role is kv_producer.*accepted: on a kv_consumer or kv_both"):
            await prefill.open(prompt(), remote_prefill=RemotePrefill("127.0.0.1", 1))
    async with await Engine.start(plain) as engine:
        with pytest.raises(InvalidParameter, match="kv_transfer is not set"):
            await engine.open(prompt(), remote_prefill=RemotePrefill("127.0.0.1", 1))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"kv_role": "producer"}, "accepted: kv_producer, kv_consumer, kv_both"),
        ({"kv_port": 0}, "accepted: 1 to 65535"),
        ({"kv_buffer_size": 0}, "accepted: a positive number"),
        ({"timeout_s": 0.0}, "accepted: more than 0"),
        ({"layerwise_min_tokens": 0}, "layerwise_min_tokens is 0; accepted: a positive integer"),
        ({"peers": ()}, "there are no peers; accepted: HOST or HOST:PORT"),
    ],
)
def test_values_out_of_range_are_refused(transfer: KVTransferConfig, changed: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidParameter, match=told):
        replace(transfer, **changed)


async def test_what_cannot_be_exchanged_is_refused_by_name(
    plain: EngineConfig,
    transfer: KVTransferConfig,
    tmp_path: Path,
    random_recurrent: Path,
    random_windows: Path,
) -> None:
    with pytest.raises(InvalidParameter, match="prefix_cache is off; accepted: prefix_cache on"):
        replace(plain, kv_transfer=transfer, prefix_cache=False)
    with pytest.raises(InvalidParameter, match="divided among 2 ranks; accepted: none"):
        replace(plain, kv_transfer=transfer, tensor_parallel_size=2)
    (tmp_path / "short").write_text("short")
    refused: list[tuple[EngineConfig, str]] = [
        (replace(plain, model=str(random_recurrent), kv_transfer=transfer), "has recurrent layers; accepted: a model"),
        (replace(plain, model=str(random_windows), kv_transfer=transfer), "sliding windows in K/V groups"),
        (replace(plain, kv_transfer=replace(transfer, secret_file=str(tmp_path / "short"))), "has 5 bytes; accepted"),
        (replace(plain, kv_transfer=replace(transfer, secret_file=str(tmp_path / "none"))), "cannot be read.*accepted"),
        (replace(plain, kv_transfer=replace(transfer, kv_buffer_size=1)), "kv_buffer_size is 1; accepted: at least"),
    ]
    for config, told in refused:
        with pytest.raises(InvalidParameter, match=told):
            await Engine.start(config)
    with socket.create_server(("127.0.0.1", transfer.kv_port)), pytest.raises(InvalidParameter, match="cannot listen"):
        await Engine.start(replace(plain, kv_transfer=transfer))
