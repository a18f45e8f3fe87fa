"""Sequences with images: whatever happens to their K/V and the encoder's rows, greedy ids are those of a fresh run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine import GREEDY, Engine, Sampling, Span
from engine.core.messages import AddImage
from engine.errors import BadSnapshot, ContextLengthExceeded, InvalidImage, InvalidParameter
from engine.ipc.data_parallel_link import DataParallelLink
from engine.ipc.supervisor import SupervisedLink
from engine.kernels import cpu
from engine.multimodal.image_input import FIRST_IMAGE_ID, key_of, offset_of, placeholder
from tests.engine.multimodal import seeing
from tests.engine.multimodal.seeing import SPAN, answer, asked, config, png


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changed = {"tie_word_embeddings": False}
    return seeing.write(tmp_path_factory.mktemp("models") / "seeing", seeing.build(text=changed))


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[Engine]:
    async with await Engine.start(config(model)) as engine:
        yield engine


def test_ids_of_an_image_lead_back_to_it() -> None:
    digest = bytes(range(18))
    ids = [placeholder(digest, at) for at in range(5000)]
    assert len(set(ids)) == 5000 and all(FIRST_IMAGE_ID <= id < 1 << 63 for id in ids)
    assert [offset_of(id) for id in ids] == list(range(5000)) and len(set(map(key_of, ids))) == 3
    for at in range(17):  # each byte of a digest (138 bits count) shows in any three ids in a row
        other = bytes([*digest[:at], digest[at] ^ 8, *digest[at + 1 :]])
        assert [placeholder(other, each) for each in range(100, 103)] != ids[100:103]


async def test_a_second_question_about_an_image_finds_it_cached(engine: Engine) -> None:
    first, second = await asked(engine, "What is it?", 1), await asked(engine, "How large is it?", 1)
    await answer(engine, first)
    before = await engine.stats()
    async with await engine.open(second) as seq:
        out = await seq.generate_all(SPAN)
    after = await engine.stats()
    images = sum(token >= FIRST_IMAGE_ID for token in second)
    assert out.cached_tokens >= images and after.encoded_tokens == before.encoded_tokens == images


async def test_the_same_question_about_another_image_finds_nothing_of_it(engine: Engine) -> None:
    first, second = await asked(engine, "What is it?", 1), await asked(engine, "What is it?", 2)
    found = await answer(engine, first)
    async with await engine.open(second) as seq:
        out = await seq.generate_all(SPAN)
    place = next(at for at, token in enumerate(second) if token >= FIRST_IMAGE_ID)
    assert out.cached_tokens <= place and out.token_ids != found


@pytest.mark.parametrize(
    "changed",
    [
        {"max_batch_tokens": 7},
        pytest.param({"prefix_cache": False}, marks=pytest.mark.slow),
        {"deterministic": True, "kernels": "torch"},
        pytest.param({"loop": "overlapped"}, marks=pytest.mark.slow),
    ],
)
async def test_chunks_and_loops_give_the_same_answer(engine: Engine, model: Path, changed: dict[str, object]) -> None:
    tokens = await asked(engine, "And now?", 3, 4)
    expected = await answer(engine, tokens)
    images = list({id(each): each for each in engine._images.values()}.values())
    async with await Engine.start(config(model, **changed)) as other:
        other._register(images)
        assert await answer(other, tokens) == expected


async def test_a_replica_gets_the_images_of_its_own_sequences(engine: Engine, model: Path) -> None:
    questions = [await asked(engine, "What is it?", seed) for seed in (1, 2)]
    expected = [await answer(engine, tokens) for tokens in questions]
    images = list({id(each): each for each in engine._images.values()}.values())
    async with await Engine.start(config(model, data_parallel_size=2)) as other:
        other._register(images)
        assert isinstance(other._link, DataParallelLink)
        seqs = [await other.open(tokens) for tokens in questions]
        assert len({id(other._link._of[seq._id]) for seq in seqs}) == 2
        assert [(await seq.generate_all(SPAN)).token_ids for seq in seqs] == expected
        encoded = [token for tokens in questions for token in tokens if token >= FIRST_IMAGE_ID]
        assert (await other.stats()).encoded_tokens == len(encoded)
        for seq in seqs:
            seq.close()


async def test_forks_truncation_and_scores_go_on_from_an_image(engine: Engine, model: Path) -> None:
    tokens = await asked(engine, "Now tell.", 5)
    expected = await answer(engine, tokens)
    cut = 3 + next(at for at, token in enumerate(tokens) if token >= FIRST_IMAGE_ID)  # inside the image
    async with await engine.open(tokens) as seq:
        kids = seq.fork(2)
        assert [(await kid.generate_all(SPAN)).token_ids for kid in kids] == [expected, expected]
        scores = await seq.score([expected[:2], expected[:1]])
        assert len(scores[0]) == 2 and abs(scores[0][0] - scores[1][0]) < 1e-4
        seq.truncate(cut)
        await seq.generate_all(SPAN)  # after a part of an image, which stands last
        seq.truncate(cut)
        seq.append(tokens[cut:])
        assert (await seq.generate_all(SPAN)).token_ids == expected


@pytest.mark.slow
async def test_preempted_sequences_read_their_images_again(model: Path) -> None:
    async with await Engine.start(config(model, kv_blocks=14, prefix_cache=False)) as engine:
        prompts = [await asked(engine, "Why?", seed) for seed in range(4)]
        alone = [await answer(engine, prompt) for prompt in prompts]
        assert await asyncio.gather(*(answer(engine, prompt) for prompt in prompts)) == alone
        long = Span(GREEDY, max_tokens=110, ignore_eos=True)
        sequences = [await engine.open(prompt) for prompt in prompts]
        out = await asyncio.gather(*(seq.generate_all(long) for seq in sequences))
        assert [each.token_ids[:8] for each in out] == alone
        assert (await engine.stats()).preemptions > 0


async def test_rows_that_were_evicted_are_encoded_again(model: Path) -> None:
    async with await Engine.start(config(model, encoder_cache_bytes=1, prefix_cache=False)) as engine:
        first, second = await asked(engine, "Who?", 1, 2), await asked(engine, "Who?", 3)
        expected = (await answer(engine, first), await answer(engine, second))
        encoded = (await engine.stats()).encoded_tokens
        assert tuple(await asyncio.gather(answer(engine, first), answer(engine, second))) == expected
        assert (await engine.stats()).encoded_tokens == 2 * encoded
        cache = engine._core._images
        assert sum(image.rows is not None for image in cache._by_digest.values()) <= 2  # those pinned last


async def test_what_no_sequence_has_is_let_go(model: Path) -> None:
    async with await Engine.start(config(model, encoder_cache_bytes=0)) as engine:
        image = await engine.image(png(50, 50))
        assert await answer(engine, list(image.token_ids))
        async with await engine.open([1, *image.token_ids]):
            pass
        await engine.stats()
        cache = engine._core._images
        assert all(each.pixels is None for each in cache._by_digest.values()) and not cache._held
        ids = image.token_ids
        del image
        with pytest.raises(InvalidParameter, match="of no image known here"):
            await engine.open(ids)


async def test_a_snapshot_brings_its_images(engine: Engine, model: Path) -> None:
    tokens = await asked(engine, "Go on.", 6)
    async with await engine.open(tokens) as seq:
        half = await seq.generate_all(Span(GREEDY, max_tokens=3, ignore_eos=True))
        saved = await seq.snapshot()
        rest = await seq.generate_all(SPAN)
    async with await Engine.start(config(model)) as other, await other.resume(saved) as seq:
        assert seq.tokens == [*tokens, *half.token_ids]
        assert (await seq.generate_all(SPAN)).token_ids == rest.token_ids
        assert (await other.stats()).encoded_tokens > 0
    with pytest.raises(BadSnapshot):
        await engine.resume(saved[:-1] + bytes([saved[-1] ^ 1]))


async def test_streams_go_on_while_an_image_is_encoded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.multimodal.encoder_cache.IDLE_S", 0.0)
    monkeypatch.setattr("engine.multimodal.encoder_cache.DECODE_SHARE", 0.0)
    tokens = await asked(engine, "What?", *range(6), size=(64, 64))
    kept = engine.tokenizer.encode("Once upon a time")
    arrived: list[str] = []

    async def stream(seq_tokens: list[int], name: str, count: int) -> None:
        async with await engine.open(seq_tokens) as seq:
            async for _ in seq.generate(Span(GREEDY, max_tokens=count, ignore_eos=True)):
                arrived.append(name)  # noqa: PERF401  # while the other stream appends, too

    async with asyncio.timeout(60):
        await asyncio.gather(stream(kept, "text", 60), stream(tokens, "image", 2))
    assert arrived.index("image") > 30  # a unit of encoding came between two tokens, many times


async def test_a_cancelled_request_stops_its_encoding(engine: Engine) -> None:
    tokens = await asked(engine, "What?", *range(20, 28), size=(64, 64))
    async with await engine.open(tokens) as seq:
        stream = seq.generate(SPAN)
        stream.close()
    await engine.stats()
    assert not engine._core._images.pending


async def test_penalties_and_logprobs_pass_over_images(engine: Engine) -> None:
    tokens = await asked(engine, "Say it.", 7)
    async with await engine.open(tokens) as seq:
        penalised = Sampling(temperature=0.0, repetition_penalty=1.3)
        out = await seq.generate_all(Span(penalised, max_tokens=4, prompt_logprobs=2, ignore_eos=True))
    assert out.prompt_logprobs is not None and len(out.token_ids) == 4
    assert [each is None for each in out.prompt_logprobs[1:]] == [token >= FIRST_IMAGE_ID for token in tokens[1:]]


async def test_ids_of_images_are_no_tokens_of_spans(engine: Engine) -> None:
    tokens = await asked(engine, "No.", 8)
    image = next(token for token in tokens if token >= FIRST_IMAGE_ID)
    async with await engine.open(tokens) as seq:
        with pytest.raises(InvalidParameter):
            seq.generate(Span(GREEDY, stop_token_ids=(image,)))
        with pytest.raises(InvalidParameter):
            await seq.score([[image]])
        with pytest.raises(InvalidParameter, match="no image known"):
            seq.append([image + 40_000])
    with pytest.raises(InvalidParameter):
        await engine.open([engine.vocab_size])


async def test_prompts_that_images_make_too_long_are_refused(engine: Engine) -> None:
    image = await engine.image(png(64, 64))
    parts = [{"type": "image", "image": image}] * 3
    with pytest.raises(ContextLengthExceeded, match="of 3 images"):
        engine.tokenizer.encode_chat([{"role": "user", "content": parts}], None, {}, max_tokens=100)


async def test_text_that_spells_a_mark_is_text(engine: Engine) -> None:
    image = await engine.image(png(64, 64))
    parts = [{"type": "text", "text": "An <image> is"}, {"type": "image", "image": image}]
    tokens = engine.tokenizer.encode_chat([{"role": "user", "content": parts}], None, {})
    assert sum(token >= FIRST_IMAGE_ID for token in tokens) == image.features
    mark = engine.tokenizer.token_id("<image>")
    assert mark not in tokens and "An <image> is" in engine.tokenizer.decode(tokens)


async def test_low_detail_is_one_tile(engine: Engine) -> None:
    whole, low = await engine.image(png(64, 64)), await engine.image(png(64, 64), split=False)
    assert (whole.tiles, low.tiles) == (5, 1) and low.digest != whole.digest


async def test_a_model_without_an_encoder_takes_no_image(random_model: Path) -> None:
    async with await Engine.start(config(random_model)) as engine:
        with pytest.raises(InvalidParameter, match="reads no images"):
            await engine.image(png(9, 9))


async def test_a_broken_file_is_no_image(engine: Engine) -> None:
    with pytest.raises(InvalidImage, match="cannot be read"):
        await engine.image(png(64, 64)[:200])


@pytest.mark.slow
async def test_a_core_that_is_killed_gets_its_images_again(model: Path) -> None:
    async with await Engine.start(config(model, runs_in="process")) as engine:
        link = engine._link
        assert isinstance(link, SupervisedLink)
        tokens = await asked(engine, "Far away?", 9)
        long = Span(GREEDY, max_tokens=300, ignore_eos=True)
        async with await engine.open(tokens) as seq:
            expected = (await seq.generate_all(long)).token_ids
        async with await engine.open(tokens) as seq:
            found: list[int] = []
            async for piece in seq.generate(long):
                if not found:
                    os.kill(link.pid, signal.SIGKILL)
                found += piece.token_ids
        assert tuple(found) == expected


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{}, {"quantization": "int8"}])
async def test_the_cpus_own_layers_read_the_rows_of_images(tmp_path: Path, changed: dict[str, object]) -> None:
    if cpu.library() is None:
        pytest.skip(f"no kernels in C++ here: {cpu.unavailable()}")
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 160}
    path = seeing.write(tmp_path, seeing.build(text={**sizes, "tie_word_embeddings": False}))
    found = []
    for settings in ({"kernels": "torch"}, {"dtype": "bfloat16", **changed}):
        async with await Engine.start(config(path, **settings)) as engine:
            tokens = await asked(engine, "What?", 11, 12)
            async with await engine.open(tokens) as seq:
                out = await seq.generate_all(Span(GREEDY, max_tokens=1, logprobs=64, ignore_eos=True))
            found.append(dict(out.logprobs[0].top))
    assert engine.numerics.kernels != "torch"
    shared = found[0].keys() & found[1].keys()
    likeliest = sorted(shared, key=lambda token: -found[0][token])[:5]
    assert len(shared) > 40 and max(abs(found[0][each] - found[1][each]) for each in likeliest) < 0.35


async def test_pixels_that_no_sequence_claims_are_let_go(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [await engine.image(png(9, 9, seed), split=False) for seed in range(70)]
    prompt = [token for image in many for token in image.token_ids]
    assert await answer(engine, prompt)  # all of them came before the sequence
    for image in many:
        engine.post(AddImage(image.digest, image.tiles, image.size, image.pixels))
    monkeypatch.setattr("engine.multimodal.encoder_cache.UNCLAIMED_S", -1.0)
    engine.post(AddImage(bytes(18), 1, seeing.TILE, bytes(3 * seeing.TILE**2)))
    await engine.stats()
    left = engine._core._images._by_digest.values()
    assert [image.digest for image in left if image.pixels is not None] == [bytes(18)]
