"""Masked-diffusion decoding: kept K/V, the order in which places are filled, seeds, ends and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import Engine, EngineConfig
from engine.diffusion import BlockDiffusion, MaskedDiffusionModel, Unmasking, UnmaskStep, load_masked_diffusion
from engine.diffusion.block_decoder import KV_BLOCK, BlockRun
from engine.diffusion.unmasking import predict
from engine.errors import CheckpointError, ContextLengthExceeded, InvalidParameter
from engine.model.batch import Batch, KVCache
from tests.engine.diffusion.conftest import random_model

END, MASK = 0, 1
PROMPT = "27+5-4+9 ="


def ids(model: MaskedDiffusionModel, text: str) -> list[int]:
    return model.tokenizer.encode(text)


class Recorded:
    """The model's own forward, whose logits are kept."""

    def __init__(self, model: MaskedDiffusionModel) -> None:
        self.model, self.logits, self.queries = model, list[Tensor](), list[int]()

    def __call__(self, batch: Batch, kv: KVCache) -> Tensor:
        logits = self.model.decoder.forward(batch, kv)
        self.logits.append(logits.clone())
        self.queries.append(len(batch.token_ids))
        return logits


class Planted:
    """A look-up in place of the model: each position's token, and the probability that it is given."""

    def __init__(self, answer: Mapping[int, tuple[int, float]]) -> None:
        self.answer = answer

    def __call__(self, batch: Batch, kv: KVCache) -> Tensor:
        assert batch.rotary is not None
        logits = torch.zeros(len(batch.logits_at), 257)
        for row, position in enumerate(batch.rotary[batch.logits_at].tolist()):
            token, probability = self.answer[position]
            logits[row] = torch.tensor((1 - probability) / 255).log()
            logits[row, MASK] = float("-inf")
            logits[row, token] = torch.tensor(probability).log()
        return logits


def block_ends(known: int, places: int, size: int) -> list[int]:
    """The end of the block of each token, in the cache's order."""
    ends = [known] * known
    for at in range(places):
        ends.append(min(known + places, known + (at // size + 1) * size))
    return ends


def oracle(tokens: Sequence[int], positions: Sequence[int], ends: Sequence[int]) -> Tensor:
    """Logits of the trained module itself, with the mask of blocks, and nothing kept."""
    visible = torch.arange(len(tokens))[None] < torch.tensor(ends)[:, None]
    with torch.inference_mode():
        trained = random_model()
        states = trained.states(torch.tensor([tokens]), torch.tensor([positions]), visible[None])
        logits = states[0] @ trained.model.embed_tokens.weight.T
        logits[:, MASK] = float("-inf")
    return logits


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_kept_kv_is_what_recomputing_gives(model: MaskedDiffusionModel, size: int) -> None:
    prompt = ids(model, PROMPT)
    recorded = Recorded(model)
    run = BlockDiffusion(replace(model, eos_token_ids=(300,)), recorded).generate(prompt, 14, Unmasking(size))
    steps = list(run)
    ends = block_ends(len(prompt), 14, size)
    tokens = [*prompt, *[MASK] * 14]
    for at, step in enumerate(steps):  # every pass, beside a pass of all that is before the block's end
        end = ends[step.positions[0]]
        masked = [place for place in range(len(prompt), end) if tokens[place] == MASK]
        fresh = oracle(tokens[:end], range(end), ends[:end])[masked]
        assert torch.allclose(recorded.logits[at][:, 2:], fresh[:, 2:], atol=1e-4), step  # of logits of about 10
        for position, token in zip(step.positions, step.tokens, strict=True):
            tokens[position] = token
    last = ends[-1] - (14 - 1) % size - 1  # the last block's K/V was written with masks
    kv = KVCache.of(model.decoder.spec, run.kv.data.shape[2], KV_BLOCK, torch.float32, "cpu")
    order = torch.arange(len(tokens))
    whole = Batch(
        torch.tensor(tokens), order, KV_BLOCK + order, (0, len(tokens)), (len(tokens),),
        torch.arange(1, run.kv.data.shape[2])[None], order[-1:], last_keys=torch.tensor(ends) - 1,
    )  # fmt: skip
    model.decoder.forward(whole, kv)
    mine, anew = (each.data.flatten(2, 3)[:, :, KV_BLOCK : KV_BLOCK + last] for each in (run.kv, kv))
    assert last >= len(prompt) and torch.allclose(mine, anew, atol=1e-5)


def test_a_pass_computes_one_block_alone(model: MaskedDiffusionModel) -> None:
    prompt = ids(model, PROMPT)
    recorded = Recorded(model)
    list(BlockDiffusion(replace(model, eos_token_ids=(300,)), recorded).generate(prompt, 12, Unmasking(4)))
    # the first pass of a block has what became final before it, too
    assert recorded.queries == [len(prompt) + 4, 4, 4, 4, 8, 4, 4, 4, 8, 4, 4, 4]


def test_a_gap_is_filled_from_both_sides_at_its_own_positions(model: MaskedDiffusionModel) -> None:
    text = ids(model, "one two th______ur five")
    recorded = Recorded(model)
    run = BlockDiffusion(model, recorded).infill(text, Unmasking(16))
    step = next(iter(run))
    known = [at for at, token in enumerate(text) if token != MASK]
    places = [at for at, token in enumerate(text) if token == MASK]
    order = known + places
    tokens = [text[at] for at in order]
    fresh = oracle(tokens, order, block_ends(len(known), len(places), 16))[len(known) :]
    assert torch.allclose(recorded.logits[0][:, 2:], fresh[:, 2:], atol=1e-4)
    sure = fresh.softmax(-1).max(-1)
    assert step.positions == (places[int(sure.values.argmax())],)
    assert step.confidences == pytest.approx((float(sure.values.max()),), abs=1e-5)


@pytest.mark.parametrize("params", [Unmasking(16), Unmasking(3, 2), Unmasking(4, threshold=0.02), Unmasking(5, 5)])
def test_only_masked_places_change_and_each_once(model: MaskedDiffusionModel, params: Unmasking) -> None:
    text = ids(model, "al__a br_vo ______e delta")
    run = BlockDiffusion(model).infill(text, params)
    before = list(run.text)
    filled = set[int]()
    for step in run:
        after = list(run.text)
        changed = {at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new}
        assert changed == set(step.positions) and all(before[at] == MASK for at in changed)
        assert list(step.tokens) == [after[at] for at in step.positions]
        filled |= changed
        before = after
    assert filled == {at for at, token in enumerate(text) if token == MASK} and MASK not in run.text


def steps_of(model: MaskedDiffusionModel, params: Unmasking) -> list[UnmaskStep]:
    unending = replace(model, eos_token_ids=(300,))
    return list(BlockDiffusion(unending).generate(ids(model, PROMPT), 12, params))


def test_a_seed_gives_the_same_text_again(model: MaskedDiffusionModel) -> None:
    params = Unmasking(6, 2, temperature=1.0, seed=7)
    assert steps_of(model, params) == steps_of(model, params)
    assert steps_of(model, params) != steps_of(model, replace(params, seed=8))
    assert steps_of(model, replace(params, temperature=0.0)) != steps_of(model, params)


def test_the_highest_threshold_is_one_place_a_pass_surest_first(model: MaskedDiffusionModel) -> None:
    recorded = Recorded(model)
    unending = replace(model, eos_token_ids=(300,))
    run = BlockDiffusion(unending, recorded).generate(ids(model, PROMPT), 10, Unmasking(10, threshold=1.0))
    masked = list(range(len(ids(model, PROMPT)), len(ids(model, PROMPT)) + 10))
    for at, step in enumerate(run):
        logits = recorded.logits[at]
        logits[:, MASK] = float("-inf")
        sure = logits.softmax(-1).max(-1)
        best = int(sure.values.argmax())
        assert (step.positions, step.tokens) == ((masked[best],), (int(sure.indices[best]),))
        masked.remove(step.positions[0])
    assert not masked
    assert steps_of(model, Unmasking(10, threshold=1.0)) == steps_of(model, Unmasking(10, 1))


def planted(
    model: MaskedDiffusionModel, answer: str, sure: Sequence[float], params: Unmasking, length: int
) -> tuple[BlockRun, list[UnmaskStep]]:
    tokens = [*ids(model, answer), *[END] * (length - len(answer))]
    lookup = Planted({4 + at: (token, p) for at, (token, p) in enumerate(zip(tokens, sure, strict=True))})
    run = BlockDiffusion(model, lookup).generate(ids(model, "3+4="), length, params)
    return run, list(run)


def test_a_planted_answer_is_decoded_in_the_order_of_its_confidence(model: MaskedDiffusionModel) -> None:
    sure = [0.5, 0.9, 0.7, 0.95, 0.6, 0.99]
    run, steps = planted(model, "abcdef", sure, Unmasking(6, 2), 6)
    assert model.tokenizer.decode(run.answer) == "abcdef" and not run.ended
    assert [[p - 4 for p in step.positions] for step in steps] == [[5, 3], [1, 2], [4, 0]]
    assert steps[0].confidences == pytest.approx((0.99, 0.95), abs=1e-4)
    run, steps = planted(model, "abcdef", sure, Unmasking(6, threshold=0.7 - 1e-6), 6)
    assert [[p - 4 for p in step.positions] for step in steps] == [[5, 3, 1, 2], [4], [0]] and run.passes == 3
    _, steps = planted(model, "abcdef", sure, Unmasking(4, 4), 6)
    assert [[p - 4 for p in step.positions] for step in steps] == [[3, 1, 2, 0], [5, 4]]


def test_a_text_ends_once_nothing_before_its_end_is_masked(model: MaskedDiffusionModel) -> None:
    run, steps = planted(model, "abc", [0.9, 0.8, 0.7, 0.85, 0.5, 0.4, 0.3, 0.2], Unmasking(8, 1), 8)
    assert [step.positions[0] - 4 for step in steps] == [0, 3, 1, 2]  # the places behind the end are left
    assert (model.tokenizer.decode(run.answer), run.ended) == ("abc", True)
    assert model.tokenizer.decode(run.text) == "3+4=abc"
    run, steps = planted(model, "abc", [0.9] * 12, Unmasking(4, 4), 12)
    assert len(steps) == 1 and run.passes == 1  # later blocks are not begun


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_size": 0}, "block_size is 0; accepted: 1 to"),
        ({"tokens_per_step": 0}, "tokens_per_step is 0; accepted: 1 to"),
        ({"threshold": 1.5}, "threshold is 1.5; accepted: 0 to 1"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"threshold": 0.5, "tokens_per_step": 2}, "exclude each other"),
        ({"temperature": -1.0}, "temperature"),
        ({"seed": 1 << 70}, "seed"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        Unmasking(**fields)  # type: ignore[arg-type]  # as a caller may


def test_texts_that_cannot_be_filled_are_refused(model: MaskedDiffusionModel) -> None:
    diffusion = BlockDiffusion(model)
    with pytest.raises(InvalidParameter, match="no masked place; write '_'"):
        diffusion.infill(ids(model, "whole"), Unmasking())
    with pytest.raises(InvalidParameter, match="length is 0"):
        diffusion.generate(ids(model, "1+1="), 0, Unmasking())
    with pytest.raises(InvalidParameter, match="the prompt has masked places"):
        diffusion.generate(ids(model, "1+_="), 4, Unmasking())
    with pytest.raises(ContextLengthExceeded, match="65 tokens; this model accepts at most 64"):
        diffusion.generate([5] * 61, 4, Unmasking())
    assert len(list(diffusion.generate([5] * 60, 4, Unmasking(4, 4)))) >= 1


async def test_the_engine_that_decodes_in_order_refuses_the_model(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"any order.*ponder diffuse"):
        await Engine.start(EngineConfig(str(checkpoint), device="cpu"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, r"no masked-diffusion model.*Qwen3MaskedDiffusionLM"),
        ({"mask_token_id": 257}, "mask_token_id is 257; accepted: 0 to 256"),
        ({"mask_token_id": None}, "mask_token_id is None"),
        ({"diffusion": {"mask": "_", "answer_tokens": 0, "block_sizes": [4]}}, "answer_tokens is 0"),
        ({"diffusion": {"mask": "_", "answer_tokens": 4, "block_sizes": []}}, r"block_sizes is \[\]"),
        ({"diffusion": None}, "diffusion.mask is None"),
    ],
)
def test_checkpoints_of_another_kind_are_refused(
    checkpoint: Path, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    copy = tmp_path / "other"
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=words):
        load_masked_diffusion(str(copy), device="cpu")


def test_each_place_and_each_pass_has_a_random_number_of_its_own() -> None:
    params = Unmasking(temperature=1.0, seed=3)
    drawn = [[each.token for each in predict(torch.zeros(8, 257), range(8), range(8), n, params)] for n in (1, 2)]
    assert len(set(drawn[0])) > 4 and len(set(drawn[1])) > 4 and drawn[0] != drawn[1]
