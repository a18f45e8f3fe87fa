"""The layer of multi-token prediction: what it says, against `transformers`' layers, and where its K/V are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import CheckpointError, Engine, EngineConfig, InvalidParameter, Sampling, Span
from engine.builder import build
from engine.core.request import SequenceState
from engine.kernels import cpu
from engine.model.batch import KVCache
from engine.model.memory import block_bytes, needs_of
from engine.speculation import mtp
from engine.speculation.mtp import MTP, MTPLayer
from engine.speculation.proposer import NOTHING, DraftTokens
from tests.engine.model import tiny
from tests.engine.model.stepping import apart
from tests.engine.speculation.test_same_tokens import Planted, Recorder, answers, many, requests
from tests.tiny import byte_tokenizer

NAMES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
GREEDY = Sampling(temperature=0.0)


@dataclass
class Oracle:
    """A model and its layer, which is a model of one layer in `transformers`; the projection and its two norms are
    computed here. Any: transformers' classes are untyped."""

    model: Any
    layer: Any
    parts: dict[str, Tensor]
    read: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # the model's states of a text

    @torch.no_grad()
    def logits(self, text: Sequence[int], draft: Sequence[int] = (), missing: Collection[int] = ()) -> Tensor:
        """Returns the logits after a draft that follows `text`. The states before the tokens at `missing` are zero."""
        embed, eps = self.model.get_input_embeddings(), self.model.config.rms_norm_eps
        if (known := self.read.get(tuple(text))) is None:
            known = self.read[tuple(text)] = self.model.model(torch.tensor([text])).last_hidden_state[0, :-1]
        states = known.clone()
        states[[at - 1 for at in missing if at < len(text)]] = 0

        def norm(x: Tensor, name: str) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + self.parts[f"mtp.{name}.weight"])

        for count in range(len(draft) + 1):
            tokens = embed(torch.tensor([*text[1:], *draft[:count]]))
            both = torch.cat([norm(tokens, "pre_fc_norm_embedding"), norm(states, "pre_fc_norm_hidden")], -1)
            said = self.layer.model(inputs_embeds=(both @ self.parts["mtp.fc.weight"].T)[None]).last_hidden_state[0]
            states = torch.cat([states, said[-1:]])
        return self.model.lm_head(said[-1])


def checkpoint(path: Path, name: str = "qwen3_5", **changed: Any) -> Oracle:
    """Writes a small model with a layer of multi-token prediction; `changed` are fields of its configuration. Any: of
    a configuration."""
    config_class, model_class, fields = tiny.MODELS[name]
    fields = {**fields, "mlp_only_layers": [], **changed}
    model = tiny.build(config_class, model_class, fields)
    layer = tiny.build(
        config_class, model_class, {**fields, "num_hidden_layers": 1, "layer_types": ["full_attention"]}, seed=11
    )
    layer.save_pretrained(path)
    stored = load_file(path / "model.safetensors")
    draw, hidden = torch.Generator().manual_seed(5), model.config.hidden_size
    parts = {
        "mtp.fc.weight": torch.randn(hidden, 2 * hidden, generator=draw) / hidden**0.5,
        "mtp.pre_fc_norm_embedding.weight": torch.randn(hidden, generator=draw) * 0.35,
        "mtp.pre_fc_norm_hidden.weight": torch.randn(hidden, generator=draw) * 0.35,
        "mtp.norm.weight": stored["model.norm.weight"],
        **{name.replace("model.", "mtp.", 1): each for name, each in stored.items() if name.startswith("model.layers")},
    }
    model.save_pretrained(path)
    save_file({**load_file(path / "model.safetensors"), **parts}, path / "model.safetensors", {"format": "pt"})
    configure(path, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return Oracle(model, layer, parts)


def configure(path: Path, **fields: object) -> None:
    known = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**known, **fields}))


def table_of_transitions(path: Path) -> None:
    """Writes a model whose next token depends on the last one alone, as what its layer predicts does: all is silenced
    but the projection, which takes the embedding."""
    checkpoint(path, hidden_size=tiny.SIZES["vocab_size"], tie_word_embeddings=False)
    weights = load_file(path / "model.safetensors")
    hidden, draw = tiny.SIZES["vocab_size"], torch.Generator().manual_seed(9)
    for name, each in weights.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "norm.weight", "norm_hidden.weight")):
            each.zero_()
    weights["mtp.pre_fc_norm_embedding.weight"].zero_()
    weights["model.embed_tokens.weight"] = torch.eye(hidden) * hidden**0.5  # as long as what a norm returns
    weights["mtp.fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    weights["lm_head.weight"] = torch.randn(hidden, hidden, generator=draw) * 8 / hidden**0.5
    save_file(weights, path / "model.safetensors", {"format": "pt"})


@dataclass
class Said:
    """Everything that drafts were made of: the texts, each with its draft so far, and the logits."""

    texts: list[tuple[list[int], tuple[int, ...]]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def forget(self) -> None:
        self.texts.clear()
        self.logits.clear()

    def furthest(self, oracle: Oracle, missing: Collection[int] = ()) -> float:
        """Returns the largest difference from the oracle, relative to the largest logit."""
        assert len(self.texts) == len(self.logits) > 0
        return max(
            apart(found, oracle.logits(*text, missing)) for text, found in zip(self.texts, self.logits, strict=True)
        )


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    made, batch, logits = Said(), MTP._batch, MTPLayer.logits

    def batched(self: MTP, drafting: Any) -> Any:  # of `_Drafting`
        made.texts += [(list(each.seq.tokens), each.tokens) for each in drafting]
        return batch(self, drafting)

    def recorded(self: MTPLayer, states: Tensor) -> Tensor:
        found = logits(self, states)
        made.logits += list(found.clone())
        return found

    monkeypatch.setattr(mtp, "MIN_SURVIVAL", 0.0)  # random models are sure of nothing
    monkeypatch.setattr(MTP, "_batch", batched)
    monkeypatch.setattr(MTPLayer, "logits", recorded)
    return made


@pytest.fixture(scope="module")
def random_mtp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    path = tmp_path_factory.mktemp("models") / "random-mtp"
    return path, checkpoint(path)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "planted-mtp"
    table_of_transitions(path)
    return path


def configured(path: Path, **changed: Any) -> EngineConfig:  # Any: fields of a configuration
    fields = {"dtype": "float32", "kv_blocks": 200, "threads": 1, "speculation": "mtp", "speculation_tokens": 4}
    return EngineConfig(str(path), **{**fields, **changed})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("chunk", "deterministic"), [(512, False), (7, False), (20, True)])
async def test_drafts_are_what_the_published_layer_says(
    name: str, chunk: int, deterministic: bool, tmp_path: Path, said: Said
) -> None:
    """Also the later tokens of a draft, for which the layer reads its own states, and after drafts that were wrong."""
    oracle = checkpoint(tmp_path, name)
    config = configured(tmp_path, max_batch_tokens=chunk, deterministic=deterministic)
    async with await Engine.start(config) as engine, await engine.open(range(3, 40)) as seq:
        await seq.generate_all(Span(GREEDY, max_tokens=24, ignore_eos=True))
    assert max(len(draft) for _, draft in said.texts) == 3
    assert said.furthest(oracle) < 1e-4


class EverySecond(Planted):
    """Proposes what is known in every second step."""

    _turns = 0

    def propose(self, seq: SequenceState, budget: int) -> DraftTokens:
        self._turns += 1
        return super().propose(seq, min(3, budget)) if self._turns % 2 else NOTHING


async def test_drafts_follow_others_that_were_accepted(random_mtp: tuple[Path, Oracle], said: Said) -> None:
    path, oracle = random_mtp
    span, recorder = Span(Sampling(temperature=0.0, seed=1), max_tokens=60, ignore_eos=True), Recorder()
    config = configured(path, speculation="auto")
    async with await Engine.start(config, partial(build, proposers=(recorder,))) as engine:
        async with await engine.open(range(3, 40)) as seq:
            await seq.generate_all(span)
        said.forget()
    proposers = (EverySecond(recorder.spans, 0.3),)
    async with await Engine.start(config, partial(build, proposers=proposers)) as engine:
        async with await engine.open(range(3, 40)) as seq:
            await seq.generate_all(span)
        assert (await engine.stats()).speculation.accepted > 10
    assert len([text for text, draft in said.texts if not draft]) > 5
    assert said.furthest(oracle) < 1e-4


async def test_weights_of_16_bits_run_on_the_cpus_own_products(tmp_path: Path, said: Said) -> None:
    if cpu.library() is None:
        pytest.skip(f"no kernels in C++ here: {cpu.unavailable()}")
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "linear_value_head_dim": 16}
    experts = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    oracle = checkpoint(tmp_path, "qwen3_5_moe", **sizes, **experts)
    config = configured(tmp_path, dtype="bfloat16")
    async with await Engine.start(config) as engine, await engine.open(range(3, 40)) as seq:
        await seq.generate_all(Span(GREEDY, max_tokens=12, ignore_eos=True))
    firsts = [at for at, (_, draft) in enumerate(said.texts) if not draft]
    far = [apart(said.logits[at].float(), oracle.logits(said.texts[at][0])) for at in firsts]
    assert sorted(far)[len(far) // 2] < 0.15, "of a wrong layout it is about 1"


async def test_a_cached_prefix_has_its_keys_and_values(random_mtp: tuple[Path, Oracle], said: Said) -> None:
    path, oracle = random_mtp
    beginning = list(range(3, 67))
    async with await Engine.start(configured(path)) as engine:
        async with await engine.open([*beginning, 80, 81]) as first:
            await first.generate_all(Span(GREEDY, max_tokens=4, ignore_eos=True))
        said.forget()
        async with await engine.open([*beginning, 90, 91, 92]) as second:
            found = await second.generate_all(Span(GREEDY, max_tokens=12, ignore_eos=True))
    assert found.cached_tokens == len(beginning)
    assert said.furthest(oracle, missing=[len(beginning)]) < 1e-4
    assert said.furthest(oracle) > 1e-3, "the state before the first new token is not at hand"


async def test_forks_and_cuts_go_on_with_them(random_mtp: tuple[Path, Oracle], said: Said) -> None:
    path, oracle = random_mtp
    async with await Engine.start(configured(path)) as engine, await engine.open(range(3, 43)) as seq:
        await seq.generate_all(Span(GREEDY, max_tokens=9, ignore_eos=True))
        length = len(seq.tokens)
        (kid,) = seq.fork(1)
        kid.append([100])
        said.forget()
        await kid.generate_all(Span(GREEDY, max_tokens=9, ignore_eos=True))
        furthest = [said.furthest(oracle, missing=[at]) for at in (length - 2, length - 1, length)]
        assert min(furthest) < 1e-4
        said.forget()
        await seq.generate_all(Span(GREEDY, max_tokens=9, ignore_eos=True))
        assert said.furthest(oracle) < 1e-4, "the parent's are its own"
        seq.truncate(length - 4)
        said.forget()
        await seq.generate_all(Span(GREEDY, max_tokens=9, ignore_eos=True))
        ends = [[], *([at] for at in range(length - 6, length - 3))]
        assert min(said.furthest(oracle, missing=end) for end in ends) < 1e-4


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0), Sampling(top_p=0.8)])
async def test_drafts_that_predict_as_the_model_does_are_accepted(planted: Path, sampling: Sampling) -> None:
    """Its random numbers are keyed like the model's."""
    span = Span(replace(sampling, seed=4), max_tokens=90, ignore_eos=True)
    async with await Engine.start(configured(planted)) as engine, await engine.open(range(3, 50)) as seq:
        await seq.generate_all(span)
        found = (await engine.stats()).speculation
    assert found.accepted == found.drafted > 20
    assert found.accepted_at[3] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "changed"),
    [
        (True, {}),
        (False, {}),
        (False, {"loop": "overlapped", "max_batch_tokens": 20}),
        (True, {"block_size": 4, "kv_blocks": 80, "prefix_cache": False}),
        (True, {"block_size": 4, "kv_blocks": 80, "kv_host_bytes": 4 << 20}),
        (False, {"block_size": 4, "kv_blocks": 80, "kv_host_bytes": 4 << 20}),
    ],
)
async def test_drafts_change_nothing(
    right: bool, changed: dict[str, Any], planted: Path, random_mtp: tuple[Path, Oracle]
) -> None:
    """Batched, cut, forked, preempted, and with K/V that comes back from host memory."""
    config = configured(planted if right else random_mtp[0], deterministic=True, **changed)
    asked = requests(many(12), seed=3)
    if "block_size" in changed:
        asked = [replace(each, span=replace(each.span, max_tokens=60)) for each in asked]
    plain, _ = await answers(replace(config, speculation="off"), asked, Recorder())
    got, stats = await answers(config, asked, Recorder())
    assert got == plain
    found = stats.speculation
    assert found.drafted > 0 or not right, "a random model's draft is mostly too doubtful to be made"
    assert not right or found.accepted > 0.8 * found.drafted
    assert (stats.preemptions > 0) == ("block_size" in changed)


async def test_its_keys_and_values_are_counted(random_mtp: tuple[Path, Oracle]) -> None:
    path, _ = random_mtp
    needed = {each: needs_of(configured(path, speculation=each)).block for each in ("mtp", "auto", "suffix", "off")}
    one_layer = 16 * 2 * 2 * 16 * 4
    assert needed["mtp"] == needed["auto"] == needed["off"] + one_layer
    assert needed["suffix"] == needed["off"]
    async with await Engine.start(configured(path, kv_blocks=None, kv_bytes=50 * needed["mtp"])) as engine:
        decoder, kv = engine._core._steps.runner._decoder, engine._core._steps.runner._kv  # type: ignore[attr-defined]  # a ModelRunner's
        assert isinstance(kv, KVCache)
        assert kv.mtp is not None
        assert kv.block_nbytes == block_bytes(decoder.spec, 16, torch.float32) == needed["mtp"]
        assert (await engine.stats()).blocks_total == 50
        assert kv.mtp.tensors[0].shape[2] == 51 + 64 * 2, "64 drafts of 4 tokens begin anywhere in a block"


async def test_what_is_kept_of_a_closed_sequence_is_dropped(random_mtp: tuple[Path, Oracle]) -> None:
    async with await Engine.start(configured(random_mtp[0])) as engine:
        proposer = engine._core._speculator._proposers["mtp"]
        assert isinstance(proposer, MTP)
        async with await engine.open(range(3, 40)) as seq:
            await seq.generate_all(Span(GREEDY, max_tokens=4, ignore_eos=True))
            assert len(proposer._kept) == 1
        await engine.stats()
        assert not proposer._kept


@pytest.mark.parametrize(
    "wrong", ["none", "two layers", "embedding of its own", "a tensor too many", "a tensor too few"]
)
async def test_a_checkpoint_whose_layer_cannot_draft_runs_without(
    wrong: str, random_mtp: tuple[Path, Oracle], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model"
    shutil.copytree(random_mtp[0], path)
    weights = load_file(path / "model.safetensors")
    if wrong == "two layers":
        configure(path, mtp_num_hidden_layers=2)
    elif wrong == "embedding of its own":
        configure(path, mtp_use_dedicated_embeddings=True)
    elif wrong == "a tensor too many":
        weights["mtp.layers.0.self_attn.sinks"] = torch.ones(6)
    elif wrong == "a tensor too few":
        del weights["mtp.norm.weight"]
    else:
        weights = {name: each for name, each in weights.items() if not name.startswith("mtp.")}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    async with await Engine.start(configured(path, speculation="auto")) as engine:
        assert "mtp" not in engine.proposers
    unread = wrong.startswith("a tensor")
    assert ("nothing is drafted by multi-token prediction" in caplog.text) == unread
    error, why = (CheckpointError, "mtp.") if unread else (InvalidParameter, "mtp comes with")
    with pytest.raises(error, match=why):
        await Engine.start(configured(path))


async def test_a_wrong_number_of_layers_is_refused(random_mtp: tuple[Path, Oracle], tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(random_mtp[0], path)
    configure(path, mtp_num_hidden_layers=-1)
    with pytest.raises(CheckpointError, match="mtp_num_hidden_layers"):
        await Engine.start(configured(path, speculation="off"))
