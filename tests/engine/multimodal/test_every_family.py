"""Sequences with images of every family but SmolVLM's, see `test_image_sequences`: cached, forked, cut, preempted,
restored and run in chunks, they go on as a fresh run would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine import GREEDY, Engine, Span
from engine.errors import InvalidParameter
from engine.multimodal.image_input import FIRST_IMAGE_ID
from tests.engine.multimodal import seeing_gemma3, seeing_gemma4, seeing_pixtral, seeing_qwen35
from tests.engine.multimodal.seeing import (
    KEPT,
    SPAN,
    answer,
    config,
    first_of_image,
    fresh_logprobs,
    next_logprobs,
    png,
    prompt,
    same_logprobs,
)


@dataclass(frozen=True, slots=True)
class SeeingFamily:
    """`whole` says that a sequence has all of an image or none, as its tokens attend to each other. `few` blocks hold
    three prompts with an image, and not their answers."""

    build: Callable[[], Any]  # Any: a model of transformers
    write: Callable[[Path, Any], Path]
    whole: bool
    few: int


FAMILIES = {
    "gemma3": SeeingFamily(seeing_gemma3.build, seeing_gemma3.write, True, 14),
    "gemma4-small": SeeingFamily(seeing_gemma4.build, seeing_gemma4.write, False, 28),
    "gemma4-large": SeeingFamily(lambda: seeing_gemma4.build(large=True), seeing_gemma4.write, True, 28),
    "mistral3": SeeingFamily(seeing_pixtral.build, seeing_pixtral.write, False, 28),
    "qwen3_5": SeeingFamily(seeing_qwen35.build, seeing_qwen35.write, False, 28),
}


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def path(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = FAMILIES[name]
    return family.write(tmp_path_factory.mktemp("models") / name, family.build())


@pytest.fixture
async def engine(path: Path) -> AsyncIterator[Engine]:
    async with await Engine.start(config(path)) as engine:
        yield engine


def end_of_image(tokens: list[int]) -> int:
    return 1 + max(at for at, token in enumerate(tokens) if token >= FIRST_IMAGE_ID)


async def test_a_second_question_about_an_image_finds_it_cached(engine: Engine) -> None:
    lead = "A long text before it. " * 20
    first, second = [await prompt(engine, [lead, text], [(64, 40)], 3) for text in ("What is it?", "How large?")]
    await answer(engine, first)
    encoded = (await engine.stats()).encoded_tokens
    top, cached = await next_logprobs(engine, second)
    assert cached >= 0.95 * (end_of_image(second) - 1)
    assert (await engine.stats()).encoded_tokens == encoded
    assert same_logprobs(top, await fresh_logprobs(engine, second))
    changed = await prompt(engine, [lead, "What is it?"], [(64, 40)], 4)
    assert (await next_logprobs(engine, changed))[1] <= first_of_image(changed)


async def test_a_prefix_that_ends_within_an_image_is_gone_on_from(engine: Engine) -> None:
    """Blocks have 16 tokens: with each lead the cached prefix ends at another row of the image."""
    size = engine.config.block_size
    ends = set()
    async with await Engine.start(config(engine.model_path, prefix_cache=False)) as fresh:
        for lead in range(8):
            tokens = await prompt(engine, ["x" * (5 + lead), "What is it?"], [(50, 40)], lead)
            fresh._register(KEPT)
            end = end_of_image(tokens)
            await next_logprobs(engine, tokens[:end])
            top, cached = await next_logprobs(engine, tokens)
            assert cached == end // size * size > first_of_image(tokens)
            ends.add(end - cached)
            assert same_logprobs(top, (await next_logprobs(fresh, tokens))[0])
    assert len(ends) == 8


async def test_forks_cuts_and_scores_go_on_from_an_image(name: str, engine: Engine) -> None:
    tokens = await prompt(engine, ["Now ", "tell."], [(30, 60)], 5)
    reference = await answer(engine, tokens)
    first = first_of_image(tokens)
    cuts = (end_of_image(tokens), first) if FAMILIES[name].whole else (first + 7,)  # behind and before it; within it
    async with await engine.open(tokens) as seq:
        kids = seq.fork(2)
        assert [(await kid.generate_all(SPAN)).token_ids for kid in kids] == [reference, reference]
        scores = await seq.score([reference[:2], reference[:1]])
        assert abs(scores[0][0] - scores[1][0]) < 1e-4
        await seq.generate_all(SPAN)
        for cut in cuts:
            seq.truncate(cut)
            await seq.generate_all(SPAN)
            seq.truncate(cut)
            seq.append(tokens[cut:])
            assert (await seq.generate_all(SPAN)).token_ids == reference


async def test_a_snapshot_brings_its_image(engine: Engine) -> None:
    tokens = await prompt(engine, ["Now ", "tell."], [(30, 60)], 6)
    async with await engine.open(tokens) as seq:
        await seq.generate_all(SPAN)
        saved = await seq.snapshot()
        rest = (await seq.generate_all(SPAN)).token_ids
    async with await Engine.start(config(engine.model_path)) as other, await other.resume(saved) as seq:
        assert (await seq.generate_all(SPAN)).token_ids == rest
        assert (await other.stats()).encoded_tokens > 0


async def test_a_part_of_an_image_is_refused_where_its_tokens_attend_to_each_other(name: str, engine: Engine) -> None:
    tokens = await prompt(engine, ["Now ", "tell."], [(30, 60)], 7)
    first, end = first_of_image(tokens), end_of_image(tokens)
    if not FAMILIES[name].whole:
        async with await engine.open(tokens[: first + 5]) as seq:
            assert len((await seq.generate_all(SPAN)).token_ids) == 8
        return
    words = f"tokens {first} to {first + 4} are a part of an image.*accepted: all {end - first} of an image, or none"
    with pytest.raises(InvalidParameter, match=words):
        await engine.open(tokens[: first + 5])
    async with await engine.open(tokens) as seq:
        with pytest.raises(InvalidParameter, match=words):
            seq.truncate(first + 5)
        with pytest.raises(InvalidParameter, match="tokens 0 to 2 are a part"):
            seq.append(tokens[end - 3 :])
        assert len(seq) == len(tokens) and (await seq.generate_all(SPAN)).token_ids == await answer(engine, tokens)


@pytest.mark.slow
async def test_preempted_and_mixed_sequences_answer_as_alone(name: str, path: Path) -> None:
    settings = {"kv_blocks": FAMILIES[name].few, "prefix_cache": False, "max_batch_tokens": 32}
    async with await Engine.start(config(path, **settings)) as engine:
        sizes = [[(40, 40 + 9 * seed)] for seed in range(3)]
        prompts = [await prompt(engine, ["Why ", "so?"], each, seed) for seed, each in enumerate(sizes)]
        prompts += [engine.tokenizer.encode(text * 9) for text in ("Once upon ", "no pictures ")]
        alone = [await answer(engine, each) for each in prompts]
        long = Span(GREEDY, max_tokens=110, ignore_eos=True)
        sequences = [await engine.open(each) for each in prompts]
        out = await asyncio.gather(*(seq.generate_all(long) for seq in sequences))
        assert [each.token_ids[:8] for each in out] == alone
        assert (await engine.stats()).preemptions > 0


async def test_no_chunk_of_a_prompt_changes_a_bit(path: Path) -> None:
    found = []
    for tokens in (7, 19, 512):
        settings = {"deterministic": True, "kernels": "torch", "max_batch_tokens": tokens}
        async with await Engine.start(config(path, **settings)) as engine:
            asked = await prompt(engine, ["Look ", "and ", "what?"], [(40, 30), (9, 50)], 8)
            async with await engine.open(asked) as seq:
                out = await seq.generate_all(Span(GREEDY, max_tokens=6, logprobs=4, ignore_eos=True))
            found.append([each.top for each in out.logprobs])
    assert found[0] == found[1] == found[2]


async def test_without_a_processor_the_text_is_read(name: str, tmp_path: Path) -> None:
    path = FAMILIES[name].write(tmp_path, FAMILIES[name].build())
    (path / "preprocessor_config.json").unlink()
    async with await Engine.start(config(path)) as engine:
        with pytest.raises(InvalidParameter, match="reads no images; accepted: text"):
            await engine.image(png(9, 9))
        assert len(await answer(engine, engine.tokenizer.encode("Only text"))) == 8
