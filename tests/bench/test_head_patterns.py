"""Policies of K/V heads: found in models whose heads are planted, and answers without what heads do not keep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.kv.head_patterns import (
    FULL,
    POLICIES,
    PUNCTUATION,
    HeadLayout,
    LayerAttention,
    PatternReader,
    Policy,
    TokenKinds,
    layout_of,
    profile,
    recovered,
    why_not,
)
from bench.kv.head_quality import CHOICES, AskedPrompt, ChoiceOutcomes, LayoutChoice, _greedy, ask, long_chat, summary
from engine.families import family_of
from engine.kv_cache.quality_gate import cache_for
from engine.model.batch import Batch
from engine.model.decoder import load_decoder
from engine.model.quantization.checkpoint import read_config
from engine.model.tokenizer import Tokenizer
from training.tasks import grounded

PEBBLE = Path(__file__).parents[2] / "models" / "pebble"
LOCAL, FREQUENT = (*PUNCTUATION, "local"), (*PUNCTUATION, "frequent")
PLANTED: tuple[Policy, ...] = (("special",), PUNCTUATION, LOCAL, FREQUENT, FULL, LOCAL)  # of the first layer's heads
RATIO = 0.3
HIDDEN, WIDTH, CLASSES, PAIRS = 48, 16, 5, 8  # channels, of a head, those that say a token's kind, rotated pairs
EACH = 30  # tokens of a kind
SPECIAL, COMMA, HEAVY, PLAIN = range(1, 5)  # channels
NEAR, FAR = 2, 7  # pairs that turn by 0.01 and by almost nothing a token


def _rows(kind: Policy | str) -> tuple[Tensor, Tensor]:
    """Returns the weights of two query heads and of the K/V head that they share, (2 * WIDTH, HIDDEN) and (WIDTH,
    HIDDEN)."""
    queries, keys = torch.zeros(2, WIDTH, HIDDEN), torch.zeros(WIDTH, HIDDEN)
    if kind == "shared":  # one query head attends to special tokens, the other nearby
        queries[0, FAR, 0], keys[FAR, SPECIAL] = 4.5, 4.5
        queries[1, NEAR, 0], keys[NEAR, 0] = 8.0, 8.0
    elif kind == LOCAL:
        queries[:, NEAR, 0], keys[NEAR, 0] = 8.0, 8.0
    elif kind != FULL:  # the query of the full head is nothing, so all keys count alike
        channel = {POLICIES[0]: SPECIAL, PUNCTUATION: COMMA, FREQUENT: HEAVY}[tuple(kind)]
        queries[:, FAR, 0], keys[FAR, channel] = 4.5, 4.5
    return queries.flatten(0, 1), keys


def _write_planted(path: Path) -> Path:
    """Writes a Llama of two layers whose heads attend as planted, in the second layer in the reverse order."""
    path.mkdir()
    generator = torch.Generator().manual_seed(0)
    vocabulary, heads = 4 * EACH, len(PLANTED)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": HIDDEN,
        "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2 * heads,
        "num_key_value_heads": heads, "head_dim": WIDTH, "hidden_act": "silu", "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6, "rope_theta": 1e8, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    embedding = torch.randn(vocabulary, HIDDEN, generator=generator)
    embedding[:, :CLASSES] = 0
    embedding /= embedding.norm(dim=1, keepdim=True)  # so that all tokens are normed alike
    embedding[:, 0] = 1
    for kind in (SPECIAL, COMMA, HEAVY, PLAIN):
        embedding[(kind - 1) * EACH : kind * EACH, kind] = 1
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": torch.randn(vocabulary, HIDDEN, generator=generator),
    }
    for layer in range(2):
        kinds: list[Policy | str] = [*PLANTED[:-1], "shared"]
        kinds = kinds[:: 1 - 2 * layer]
        rows = [_rows(kind) for kind in kinds]
        values = torch.randn(heads * WIDTH, HIDDEN, generator=generator)
        values[:, :CLASSES] = 0
        out = 0.001 * torch.randn(HIDDEN, 2 * heads * WIDTH, generator=generator)
        out[:CLASSES] = 0
        name = f"model.layers.{layer}."
        weights |= {
            f"{name}self_attn.q_proj.weight": torch.cat([queries for queries, _ in rows]),
            f"{name}self_attn.k_proj.weight": torch.cat([keys for _, keys in rows]),
            f"{name}self_attn.v_proj.weight": values,
            f"{name}self_attn.o_proj.weight": out,
            f"{name}mlp.gate_proj.weight": torch.zeros(16, HIDDEN),
            f"{name}mlp.up_proj.weight": torch.zeros(16, HIDDEN),
            f"{name}mlp.down_proj.weight": torch.zeros(HIDDEN, 16),
            f"{name}input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> PatternReader:
    return PatternReader(_write_planted(tmp_path_factory.mktemp("planted") / "model"), 512)


def _text(seed: int, length: int = 200) -> tuple[list[int], TokenKinds]:
    """Returns tokens of all kinds, and their kinds: of each, 4% special, 8% punctuation, 8% heavy."""
    rng = Random(seed)
    kinds = [SPECIAL, *rng.choices((SPECIAL, COMMA, HEAVY, PLAIN), (4, 8, 8, 80), k=length - 1)]
    tokens = [rng.randrange((kind - 1) * EACH, kind * EACH) for kind in kinds]
    found = torch.tensor(kinds)
    return tokens, TokenKinds(found == SPECIAL, found == COMMA)


def _profiled(reader: PatternReader, tokens: Sequence[int], kinds: TokenKinds, mass: float = 0.98) -> list[HeadLayout]:
    (end,) = reader.watch(tokens, 0, (slice(-32, None),))
    return [profile(layer, kinds, mass, RATIO) for layer in end]


@pytest.mark.parametrize("seed", range(3))
def test_finds_the_policy_of_each_planted_head(planted: PatternReader, seed: int) -> None:
    tokens, kinds = _text(seed)
    first, second = _profiled(planted, tokens, kinds)
    assert first.policies == PLANTED
    assert second.policies == PLANTED[::-1]
    special, punctuation = int(kinds.special.sum()), int(kinds.punctuation.sum())
    assert first.kept[:2].tolist() == [special, special + punctuation]
    assert int(first.kept[4]) == len(tokens)
    assert 60 < int(first.kept[2]) < 100 and 60 < int(first.kept[3]) < 100


@pytest.mark.parametrize("seed", range(3))
def test_planted_heads_answer_alike_without_the_rest(planted: PatternReader, seed: int) -> None:
    tokens, kinds = _text(seed)
    layouts = _profiled(planted, tokens, kinds)
    answer, _ = _text(seed + 100, 40)
    whole = planted.read([*tokens, *answer], len(tokens))
    assert (whole - planted.read([*tokens, *answer], len(tokens), layouts)).abs().max() < 1e-5
    begun = [*tokens, *answer[:20]]
    step = planted.read(begun, len(begun) - 1, layouts)
    assert (planted.read(begun, len(begun) - 1) - step).abs().max() < 1e-5


@pytest.mark.parametrize("head", range(len(PLANTED)))
def test_each_planted_head_needs_what_it_keeps(planted: PatternReader, head: int) -> None:
    tokens, kinds = _text(1)
    layouts = _profiled(planted, tokens, kinds)
    poorer: Policy = () if PLANTED[head] == ("special",) else POLICIES[POLICIES.index(PLANTED[head]) - 1]
    if PLANTED[head] == FREQUENT:
        poorer = LOCAL
    policies = [*PLANTED[:head], poorer, *PLANTED[head + 1 :]]
    (end,) = planted.watch(tokens, 0, (slice(-32, None),))
    changed = [layout_of(policies, kinds, end[0].received, RATIO), layouts[1]]
    answer, _ = _text(7, 20)
    whole = planted.read([*tokens, *answer], len(tokens))
    assert (whole - planted.read([*tokens, *answer], len(tokens), changed)).abs().max() > 1e-3


def test_a_head_shared_by_queries_keeps_what_the_neediest_attends_to() -> None:
    kinds = TokenKinds(torch.arange(10) == 0, torch.zeros(10, dtype=torch.bool))
    weights = torch.zeros(1, 2, 1, 10)
    weights[0, 0, 0, 0] = 1  # the first query head: the special token; the second: one in the middle
    weights[0, 1, 0, 4] = 1
    attention = LayerAttention(torch.tensor([9]), weights, torch.ones(1, 10))
    assert recovered(layout_of([POLICIES[0]], kinds, attention.received, 0.2), attention).tolist() == [0]
    assert profile(attention, kinds, 0.95, 0.2).policies == (FULL,)


def test_the_cheapest_policy_that_recovers_enough_is_chosen() -> None:
    kinds = TokenKinds(torch.arange(10) == 0, torch.arange(10) == 5)
    weights = torch.tensor([0.9, 0, 0, 0, 0, 0.06, 0, 0.02, 0, 0.02])[None, None, None]
    attention = LayerAttention(torch.tensor([9]), weights, weights[:, 0, 0])
    chosen = [profile(attention, kinds, mass, 0.1).policies[0] for mass in (0.85, 0.95, 0.975, 0.99)]
    assert chosen == [("special",), PUNCTUATION, LOCAL, FULL]


def test_windows_slide_and_generated_tokens_stay() -> None:
    kinds = TokenKinds(torch.arange(10) == 0, torch.zeros(10, dtype=torch.bool))
    layout = layout_of([LOCAL, FREQUENT], kinds, torch.tensor([[1.0, 2, 3, 9, 8, 7, 6, 5, 4, 3]]).expand(2, -1), 0.3)
    seen = layout.visible(torch.tensor([9, 12]), 13)
    first, later = seen[:, 0, :10], seen[:, 1, :10]
    assert first[0].nonzero().flatten().tolist() == [0, 7, 8, 9]
    assert later[0].nonzero().flatten().tolist() == [0]  # the window is past the prompt
    assert first[1].nonzero().flatten().tolist() == later[1].nonzero().flatten().tolist() == [0, 3, 4, 5]
    assert bool(seen[:, 1, 10:].all())
    assert layout.kept.tolist() == [4, 4]


def test_reads_the_bundled_model_as_the_engine_does() -> None:
    reader, decoder = PatternReader(PEBBLE, 128), load_decoder(PEBBLE, dtype=torch.float32, kernels="torch")
    tokens = Tokenizer.load(PEBBLE).apply_chat_template([{"role": "user", "content": "My dog is called Rex. " * 8}])
    n = len(tokens)
    read = torch.cat([reader.read(tokens[:40], 0), reader.read(tokens, 40)])
    at = torch.arange(n)
    table = torch.arange(1, -(-n // 16) + 1)[None]
    batch = Batch(torch.tensor(tokens), at, at + 16, (0, n), (n,), table, at)
    exact = decoder.forward(batch, cache_for(decoder, 1, n)).log_softmax(-1)
    assert (read - exact).abs().max() < 1e-3


def test_kinds_of_tokens_are_read_off_the_tokenizer() -> None:
    tokenizer = Tokenizer.load(PEBBLE)
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "well, is it so? (yes)"}])
    kinds = TokenKinds.of(tokenizer, tokens)
    of_kind = [
        {tokenizer.token_text(id).strip() for id, of in zip(tokens, kind.tolist(), strict=True) if of}
        for kind in (kinds.special, kinds.punctuation)
    ]
    assert {"<|im_start|>", "<|im_end|>"} <= of_kind[0] and "well" not in of_kind[0]
    assert {",", "?", "("} <= of_kind[1] and not any(text.isalnum() for text in of_kind[1])


def test_an_answer_is_the_same_where_each_likeliest_token_is() -> None:
    tokenizer, reader = Tokenizer.load(PEBBLE), PatternReader(PEBBLE, 1024)
    rng = Random(5)
    choices = [LayoutChoice(0.3, 0.95, judged=True), LayoutChoice(0.1, policy=("special",), judged=True), CHOICES[-1]]
    outcomes = [ChoiceOutcomes() for _ in choices]
    ends = frozenset(tokenizer.eos_token_ids)
    differing = 0
    for at in range(3):
        case = grounded.case(rng, passages=2)
        tokens = tokenizer.apply_chat_template(case.prompt.as_json(), enable_thinking=False)
        ask(reader, tokenizer, AskedPrompt(tokens, case), choices, outcomes, 16)
        kinds = TokenKinds.of(tokenizer, tokens)
        (end,) = reader.watch(tokens, 0, (slice(-32, None),))
        after = reader.read(tokens, len(tokens) - 1)[-1]
        exact = _greedy(reader, tokens, after, None, ends, 16)
        for choice, outcome in zip(choices[:2], outcomes, strict=False):
            policy = choice.policy
            layouts = [
                profile(layer, kinds, choice.mass, choice.ratio)
                if policy is None
                else layout_of([policy] * 3, kinds, layer.received, choice.ratio)
                for layer in end
            ]
            decoded = _greedy(reader, tokens, after, layouts, ends, 16)
            assert outcome.same[at] is (decoded == exact)
            differing += decoded != exact
    assert differing
    kept, poor, full = outcomes
    assert full.same == [True] * 3 and sum(full.kl) < 1e-6 and full.kept == [1.0] * 3
    assert max(kept.kept) < 1 and max(poor.kept) < 0.2 and sum(poor.kl) / sum(poor.tokens) > 0.02
    assert len(kept.right) == len(poor.right) == 3
    assert summary(choices[2], full, 0.6)["let_through"] and not summary(choices[1], poor, 0.6)["let_through"]


def test_long_chats_ask_for_what_was_told_first() -> None:
    for exchanges in (0, 8):
        case = long_chat(Random(3), exchanges)
        told, answer = case.prompt.messages[0].content, case.wanted[0].content
        value = answer.rstrip(".").split()[-1]
        assert value.lower() in told.lower()
        assert all(case.judge(case.wanted).values())
        assert len(case.prompt.messages) >= 2 * exchanges + 3


def test_refuses_models_whose_heads_it_does_not_measure(tmp_path: Path) -> None:
    config = read_config(PEBBLE)
    spec = family_of(config).spec(config)
    assert why_not(spec) is None
    windowed = replace(spec, windows=(64, *spec.windows[1:]))
    assert "windows" in str(why_not(windowed))
    assert "sinks" in str(why_not(replace(spec, sinks=True)))
