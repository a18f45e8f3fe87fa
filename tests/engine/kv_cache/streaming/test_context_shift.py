"""Endless sequences of real layers, held to attention over the kept tokens that is written out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from engine import (
    GREEDY,
    Engine,
    EngineConfig,
    InvalidParameter,
    Sampling,
    Sequence,
    Span,
    Speculation,
    StreamingWindow,
)
from engine.config import Fallback
from engine.model.loader import read_json
from engine.multimodal.image_input import FIRST_IMAGE_ID
from engine.span_checks import check_endless

SIZE = 8
WINDOW = StreamingWindow(sinks=SIZE, window=6 * SIZE)
TOTAL = 7 * SIZE
LONG = 24 * SIZE


class ByHand:
    """Qwen3 in plain torch, a token at a time: keys are kept before their rotation, and rotated by their place among
    those that are kept."""

    def __init__(self, path: Path, window: StreamingWindow) -> None:
        self.weights = load_file(path / "model.safetensors")
        config = read_json(path / "config.json")
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.kv_heads, self.dim, self.eps = config["num_key_value_heads"], config["head_dim"], config["rms_norm_eps"]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.frequencies = theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        self.window, self.length = window, 0
        self.keys: list[list[Tensor]] = [[] for _ in range(self.layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(self.layers)]
        self.forgotten = 0

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weights[name]

    def rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        """`heads` (tokens, heads, dim), Hugging Face's halves."""
        angles = torch.outer(positions.double(), self.frequencies)
        cos, sin = (torch.cat([f(angles)] * 2, -1).float()[:, None] for f in (torch.cos, torch.sin))
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat([-second, first], -1) * sin

    def forget(self) -> None:
        gone = self.window.forgotten(self.length) - self.forgotten
        if gone:
            first = self.window.sinks
            for kept in (*self.keys, *self.values):
                del kept[first : first + gone]
            self.forgotten += gone

    def next(self, token: int) -> Tensor:
        """Returns log-probabilities after `token`."""
        self.length += 1
        self.forget()
        x = self.weights["model.embed_tokens.weight"][token]
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            h = self.norm(x, name + "input_layernorm.weight")
            q, k, v = (
                (self.weights[f"{name}self_attn.{part}_proj.weight"] @ h).view(-1, self.dim) for part in ("q", "k", "v")
            )
            q = self.norm(q, name + "self_attn.q_norm.weight")
            self.keys[layer].append(self.norm(k, name + "self_attn.k_norm.weight"))
            self.values[layer].append(v)
            places = torch.arange(len(self.keys[layer]))
            keys = self.rotated(torch.stack(self.keys[layer]), places)
            q = self.rotated(q[None], places[-1:])[0]
            shared = self.heads // self.kv_heads
            keys, values = (
                each.repeat_interleave(shared, 1).transpose(0, 1) for each in (keys, torch.stack(self.values[layer]))
            )
            weights = torch.softmax((keys @ q[:, :, None])[..., 0] / self.dim**0.5, -1)
            x = x + self.weights[name + "self_attn.o_proj.weight"] @ (weights[:, None] @ values).flatten()
            h = self.norm(x, name + "post_attention_layernorm.weight")
            gate, up = (self.weights[f"{name}mlp.{part}_proj.weight"] @ h for part in ("gate", "up"))
            x = x + self.weights[name + "mlp.down_proj.weight"] @ (F.silu(gate) * up)
        logits = self.weights["lm_head.weight"] @ self.norm(x, "model.norm.weight")
        return torch.log_softmax(logits, -1)


def config_of(path: Path, **more: object) -> EngineConfig:
    config = EngineConfig(str(path), dtype="float32", kv_blocks=64, block_size=SIZE, context_shift=True)
    return replace(config, **more)  # type: ignore[arg-type]


def prompt_of(count: int) -> list[int]:
    return [3 + (7 * at * at + at) % 250 for at in range(count)]


async def written(seq: Sequence, count: int, sampling: Sampling = GREEDY) -> tuple[list[int], list[float], int]:
    """Returns the tokens of a span, all its log-probabilities, and the tokens forgotten at its end."""
    result = await seq.generate_all(Span(sampling, max_tokens=count, ignore_eos=True, logprobs=5))
    return list(result.token_ids), [top[1] for each in result.logprobs for top in each.top], result.forgotten_tokens


@pytest.mark.parametrize("sinks", [0, SIZE])
@pytest.mark.parametrize("loop", ["plain", "overlapped"])
async def test_logits_are_those_of_attention_by_hand(random_model: Path, sinks: int, loop: str) -> None:
    window, prompt = replace(WINDOW, sinks=sinks), prompt_of(20)
    async with (
        await Engine.start(config_of(random_model, loop=loop)) as engine,
        await engine.open(prompt, streaming=window) as seq,
    ):
        result = await seq.generate_all(Span(GREEDY, max_tokens=LONG, ignore_eos=True, logprobs=5))
        blocks = (await engine.stats()).blocks_used
    assert result.forgotten_tokens == window.forgotten(len(prompt) + LONG - 1) > 0
    assert blocks <= window.total // SIZE
    by_hand = ByHand(random_model, window)
    with torch.inference_mode():
        for token in prompt[:-1]:
            by_hand.next(token)
        worst, last = 0.0, prompt[-1]
        for token, logprob in zip(result.token_ids, result.logprobs, strict=True):
            right = by_hand.next(last)
            for id, found in logprob.top:
                worst = max(worst, abs(float(right[id]) - found))
            last = token
    assert worst < 1e-4, worst


@pytest.mark.parametrize("kernels", ["auto", "triton"])
async def test_other_kernels_move_keys_alike(wide_model: Path, kernels: str) -> None:
    """Their layers are in 16 bits, so the first token after a shift is compared, with torch's of the same format."""
    found = []
    for each in ("torch", kernels):
        config = config_of(wide_model, kernels=each, dtype="bfloat16", kv_blocks=24)
        async with await Engine.start(config) as engine, await engine.open(prompt_of(TOTAL), streaming=WINDOW) as seq:
            found.append(await seq.generate_all(Span(GREEDY, max_tokens=2, ignore_eos=True, logprobs=20)))
    right, other = found
    assert other.forgotten_tokens == right.forgotten_tokens == WINDOW.window // 2
    assert other.token_ids[0] == right.token_ids[0]
    likeliest = dict(right.logprobs[1].top)
    near = [abs(likeliest[id] - value) for id, value in other.logprobs[1].top if id in likeliest]
    assert len(near) >= 15 and max(near) < 0.1


@pytest.mark.slow
async def test_blocks_stay_constant_over_thousands_of_tokens(random_model: Path) -> None:
    async with await Engine.start(config_of(random_model)) as engine:
        async with await engine.open(prompt_of(5), streaming=WINDOW) as seq:
            used = []
            for _ in range(6):
                _, _, forgotten = await written(seq, 500)
                used.append((await engine.stats()).blocks_used)
            assert forgotten == WINDOW.forgotten(5 + 3000 - 1) > 2900
            assert max(used) <= TOTAL // SIZE
        assert (await engine.stats()).blocks_used == 0


async def test_nothing_of_what_is_forgotten_is_read(random_model: Path) -> None:
    """Two texts that differ in what a prompt's cut leaves out are answered alike, to the bit."""
    first, other = prompt_of(4 * TOTAL + 5), prompt_of(4 * TOTAL + 5)
    gone = WINDOW.forgotten(len(first))
    other[SIZE : SIZE + gone] = reversed(other[SIZE : SIZE + gone])
    async with await Engine.start(config_of(random_model, prefix_cache=False)) as engine:
        found = []
        for prompt in (first, other):
            async with await engine.open(prompt, streaming=WINDOW) as seq:
                found.append(await written(seq, 30))
        assert first != other and found[0] == found[1]
        kept = [*first[:SIZE], *first[SIZE + gone :]]
        async with await engine.open(kept) as seq:  # and as the kept text alone is
            assert (await written(seq, 4))[1] == found[0][1][:20]


async def test_moved_kv_is_found_by_no_other_prompt(random_model: Path) -> None:
    async with await Engine.start(config_of(random_model)) as engine:
        prompt = prompt_of(20)
        async with await engine.open(prompt, streaming=WINDOW) as seq:
            await written(seq, 2 * TOTAL)
            text = seq.tokens
        gone = WINDOW.forgotten(len(text) - 1)
        kept = [*text[:SIZE], *text[SIZE + gone : -1]]
        async with await engine.open(kept) as seq:
            found = await seq.generate_all(Span(GREEDY, max_tokens=1, logprobs=5))
        assert found.cached_tokens == SIZE  # the sinks' block is the text's own
    async with await Engine.start(config_of(random_model)) as fresh, await fresh.open(kept) as seq:
        right = await seq.generate_all(Span(GREEDY, max_tokens=1, logprobs=5))
    near = [value for _, value in right.logprobs[0].top]
    assert [value for _, value in found.logprobs[0].top] == pytest.approx(near, abs=1e-4)


async def test_forks_share_and_move_copies(random_model: Path) -> None:
    """A child that shares every block shifts on copies, and both go on as each would alone."""
    async with await Engine.start(config_of(random_model)) as engine:
        async with await engine.open(prompt_of(20), streaming=WINDOW) as alone:
            await written(alone, TOTAL - 22)
            right = await written(alone, 4 * TOTAL)
        async with await engine.open(prompt_of(20), streaming=WINDOW) as seq:
            await written(seq, TOTAL - 22)
            (child,) = seq.fork()
            assert child.streaming == seq.streaming
            assert await written(child, 4 * TOTAL) == right
            assert await written(seq, 4 * TOTAL) == right


async def test_random_numbers_go_on_with_the_text(random_model: Path) -> None:
    """Positions repeat after a shift, and random numbers are keyed by the text's, which do not."""
    hot = Sampling(temperature=100.0, seed=1)  # nearly uniform: the numbers alone decide
    async with (
        await Engine.start(config_of(random_model)) as engine,
        await engine.open(prompt_of(20), streaming=WINDOW) as seq,
    ):
        text, _, _ = await written(seq, 10 * TOTAL, hot)
    step = WINDOW.window // 2
    again = [
        sum(a == b for a, b in zip(text[at : at + step], text[at + step :], strict=False)) for at in range(40, 200)
    ]
    assert max(again) < step // 2


async def test_a_text_cut_back_is_seen_as_before(random_model: Path) -> None:
    async with await Engine.start(config_of(random_model)) as engine:
        async with await engine.open(prompt_of(20), streaming=WINDOW) as seq:
            first = await written(seq, 30)
            await written(seq, 3 * TOTAL)
            seq.truncate(20)
            again = await written(seq, 30)
        assert again[0] == first[0] and again[1] == pytest.approx(first[1], abs=1e-4) and again[2] == 0


async def test_stats_and_pieces_say_what_is_forgotten(random_model: Path) -> None:
    async with await Engine.start(config_of(random_model)) as engine:
        async with await engine.open(prompt_of(3 * TOTAL), streaming=WINDOW) as seq:
            with seq.generate(Span(GREEDY, max_tokens=SIZE, ignore_eos=True)) as stream:
                pieces = [piece async for piece in stream]
        assert pieces[0].prompt_tokens == 3 * TOTAL
        assert {piece.forgotten_tokens for piece in pieces} == {WINDOW.forgotten(3 * TOTAL)}
        async with await engine.open(prompt_of(3)) as seq:
            assert (await written(seq, 2))[2] == 0


async def test_what_has_no_place_in_an_endless_sequence_is_refused(random_model: Path) -> None:
    async with await Engine.start(config_of(random_model)) as engine:
        prompt = prompt_of(10)
        for window, why in (
            (
                StreamingWindow(8, 1000),
                "streaming.window is 1000 beside 8 sinks.*context holds 512.*accepted: 16 to 496",
            ),
            (StreamingWindow(8, 8), "accepted: 16 to 496 tokens"),
            (StreamingWindow(500, 16), "accepted: fewer sinks than 500"),
        ):
            with pytest.raises(InvalidParameter, match=why):
                await engine.open(prompt, streaming=window)
        async with await engine.open(prompt, streaming=WINDOW) as seq, await engine.open(prompt) as other:
            refused = "the sequence has a streaming window, and .*accepted: without one"
            with pytest.raises(InvalidParameter, match=refused):
                await seq.score([[3]])
            with pytest.raises(InvalidParameter, match=refused):
                await seq.snapshot()
            with pytest.raises(InvalidParameter, match=refused):
                other.generate_mixed([seq], [1.0, 1.0], Span(GREEDY, max_tokens=1))
            with pytest.raises(InvalidParameter, match=refused):
                seq.generate(Span(GREEDY, max_tokens=1, prompt_logprobs=0))
            assert not seq._busy
    async with await Engine.start(config_of(random_model, context_shift=False)) as engine:
        with pytest.raises(InvalidParameter, match="context_shift is not set"):
            await engine.open(prompt, streaming=WINDOW)


async def test_a_named_proposer_is_refused(random_model: Path) -> None:
    async with await Engine.start(config_of(random_model, speculation="suffix")) as engine:
        async with await engine.open(prompt_of(10), streaming=WINDOW) as seq:
            with pytest.raises(InvalidParameter, match="an endless sequence verifies no drafts"):
                seq.generate(Span(GREEDY, max_tokens=1, speculation=Speculation("suffix")))
            assert len((await written(seq, 100))[0]) == 100  # and the engine's own choice is passed over
        assert (await engine.stats()).speculation.drafted == 0


@pytest.mark.parametrize(
    "beside",
    [{"kv_dtype": "int8"}, {"deterministic": True}, {"tensor_parallel_size": 2}],
    ids=("8 bits", "same bits", "ranks"),
)  # fmt: skip
def test_configurations_that_cannot_move_kv_are_refused(beside: dict[str, object]) -> None:
    with pytest.raises(InvalidParameter, match="context_shift is set and .* accepted"):
        EngineConfig("fake", context_shift=True, **beside)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "why"),
    [("random_recurrent", "recurrent layers"), ("random_latent", "latents"), ("random_windows", "windows")],
)
async def test_models_whose_kv_cannot_move_are_refused(
    model: str, why: str, request: pytest.FixtureRequest
) -> None:  # fmt: skip
    with pytest.raises(InvalidParameter, match=f"context_shift is set, but .*{why}.*accepted: False"):
        await Engine.start(config_of(request.getfixturevalue(model)))


async def test_chunks_and_fallback_weights_are_refused(random_model: Path) -> None:
    config = config_of(random_model)
    with pytest.raises(InvalidParameter, match="fallback weights; accepted: False"):
        await Engine.start(config, fallback=Fallback(config))
    with pytest.raises(InvalidParameter, match="chunks are at places of the text"):
        check_endless(prompt_of(3), WINDOW, config, ((1, 2),))
    with pytest.raises(InvalidParameter, match="an image would be forgotten in part"):
        check_endless([FIRST_IMAGE_ID], WINDOW, config)


@pytest.mark.parametrize(
    ("length", "gone"),
    [(0, 0), (TOTAL, 0), (TOTAL + 1, 24), (TOTAL + 24, 24), (TOTAL + 25, 48), (100_000, 99_960)],
)  # fmt: skip
def test_half_of_the_window_is_forgotten_at_once(length: int, gone: int) -> None:
    assert WINDOW.forgotten(length) == gone


def test_windows_are_whole_blocks() -> None:
    assert StreamingWindow(5, 100).in_blocks(8, 504) == StreamingWindow(8, 96)
    with pytest.raises(InvalidParameter, match=r"streaming\.sinks is -1; accepted: 0 or more"):
        StreamingWindow(-1, 100)
