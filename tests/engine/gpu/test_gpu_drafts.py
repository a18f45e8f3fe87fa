"""Steps with drafts on the Triton kernels, on a GPU or a pretended one: they come from CUDA graphs, with the same
tokens as without drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine import Engine, EngineConfig, Sampling, Span, SpanResult
from engine.builder import build
from engine.core.request import SequenceState
from engine.core.step import Step
from engine.model.gpu_runner import GpuRunner
from engine.params import Speculation
from engine.speculation import speculator
from engine.speculation.proposer import NOTHING, DraftTokens, Proposer
from tests.engine.model import tiny
from tests.engine.speculation.test_same_tokens import Planted, Recorder, Spans
from tests.engine.speculation.test_trees import PlantedTrees
from tests.tiny import byte_tokenizer

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.slow]

PROMPTS = [[(text * 131 + i * i * 7 + i) % 300 + 3 for i in range(length)] for text, length in ((0, 5), (2, 21))]
DRAFTED = 3  # tokens of a draft at most


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("gpu"))


def written(path: Path, **changed: object) -> Path:
    config, model, overrides = tiny.MODELS["qwen3"]
    sizes = {"num_hidden_layers": 1, "tie_word_embeddings": False}
    path = tiny.save(tiny.build(config, model, {**overrides, **sizes, **changed}), path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(autouse=True)
def everything_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        speculator, "chosen_lengths", lambda survival, rows, times: {id: len(each) for id, each in survival.items()}
    )
    monkeypatch.setattr(speculator.Speculator, "_worth", lambda *_: 0.0)


@dataclass
class Drafted:
    """Steps with drafts by what ran them, and graphs by the tokens of each."""

    replayed: list[Step] = field(default_factory=list)
    eager: list[Step] = field(default_factory=list)
    graphs: list[tuple[int, bool]] = field(default_factory=list)


@contextmanager
def watched() -> Iterator[Drafted]:
    found, run, begin = Drafted(), GpuRunner.run, GpuRunner.__init__

    def running(runner: GpuRunner, step: Step) -> Tensor:
        before = runner.replayed
        logits = run(runner, step)
        if any(row.draft for row in step.rows):
            (found.replayed if runner.replayed > before else found.eager).append(step)
        return logits

    def beginning(runner: GpuRunner, *of_all: Any, **options: Any) -> None:
        begin(runner, *of_all, **options)
        found.graphs = [(each.packed.capacity.tokens, each.branched) for each in runner._graphs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuRunner, "run", running)
        patch.setattr(GpuRunner, "__init__", beginning)
        yield found


def config(path: Path, **more: Any) -> EngineConfig:  # Any: fields of EngineConfig
    settings: dict[str, Any] = {
        "device": "cuda", "dtype": "float16", "kernels": "triton", "kv_blocks": 40, "max_running": 2,
        "speculation": "planted", "speculation_tokens": DRAFTED, "deterministic": True, **more,
    }  # fmt: skip
    return EngineConfig(str(path), **settings)


SPANS = (
    Span(Sampling(temperature=0.0, seed=1), max_tokens=8, ignore_eos=True, logprobs=1),
    Span(Sampling(temperature=0.9, presence_penalty=0.7, seed=4), max_tokens=7, ignore_eos=True),
)


def answers(config: EngineConfig, proposer: Proposer, spans: tuple[Span, ...] = SPANS) -> list[SpanResult]:
    """Both prompts at once."""

    async def ask() -> list[SpanResult]:
        async with await Engine.start(config, partial(build, proposers=(proposer,))) as engine:
            opened = [await engine.open(prompt) for prompt in PROMPTS]
            found = await asyncio.gather(*(s.generate_all(span) for s, span in zip(opened, spans, strict=True)))
            stats = (await engine.stats()).speculation
            assert isinstance(proposer, Recorder) or stats.accepted > 3
            engine._core.check()
            return list(found)

    return asyncio.run(ask())


def said(results: list[SpanResult]) -> list[object]:
    return [(each.token_ids, each.logprobs) for each in results]


_plain: dict[Path, tuple[list[object], Spans]] = {}


@pytest.fixture
def plain(checkpoint: Path) -> tuple[list[object], Spans]:
    """Without graphs or drafts, on the same device, whose random numbers are its own."""
    if checkpoint not in _plain:
        recorder = Recorder()
        _plain[checkpoint] = said(answers(config(checkpoint, graphs=False), recorder)), recorder.spans
    return _plain[checkpoint]


class SecondBranch(Planted):
    """Proposes what is right behind a branch that is not, so that its K/V is never where a chain's would be."""

    def propose(self, seq: SequenceState, budget: int) -> DraftTokens:
        right = super().propose(seq, budget - 1).tokens
        if not right:
            return NOTHING
        wrong, confidence = (right[0] + 1) % 300, (0.9, *[0.8] * len(right))
        return DraftTokens((wrong, *right), confidence, (-1, -1, *range(1, len(right))))


@pytest.mark.parametrize("kind", [Planted, PlantedTrees, SecondBranch])
def test_steps_with_drafts_come_from_graphs(
    kind: type[Planted | PlantedTrees], checkpoint: Path, plain: tuple[list[object], Spans]
) -> None:
    """Chains of any length beside each other, and trees; every token and log-probability is that of the plain run."""
    with watched() as found:
        assert said(answers(config(checkpoint), kind(plain[1], 0.0 if kind is SecondBranch else 0.2))) == plain[0]
    widths = {tuple(row.width for row in step.rows) for step in found.replayed}
    assert found.replayed and not found.eager and len(widths) > 1
    trees = [step for step in found.replayed if any(row.parents for row in step.rows)]
    assert bool(trees) == (kind is not Planted)
    assert {tokens for tokens, _ in found.graphs} == {1, 2, 4, 8}, "2 rows of 4 tokens at most"


@pytest.mark.parametrize("changed", [{"graphs": False}, {"speculation": "off"}], ids=str)
def test_without_graphs_for_them_drafts_say_the_same(
    changed: dict[str, Any], checkpoint: Path, plain: tuple[list[object], Spans]
) -> None:
    """A request that names a proposer where the setting is off: none were recorded then for its steps."""
    spans = tuple(replace(span, speculation=Speculation("planted")) for span in SPANS)
    with watched() as found:
        assert said(answers(config(checkpoint, **changed), Planted(plain[1], 0.2), spans)) == plain[0]
    assert found.eager
    assert max((tokens for tokens, _ in found.graphs), default=0) == (2 if "speculation" in changed else 0)


def test_steps_with_windows_and_8_bit_caches_come_from_graphs(tmp_path: Path) -> None:
    """An engine that is not deterministic cuts attention by what else runs: its tokens alone are compared."""
    path = written(tmp_path, sliding_window=24, use_sliding_window=True, max_window_layers=0)
    spans, prompt = tuple(replace(span, logprobs=None) for span in SPANS), [i * 7 % 300 + 3 for i in range(150)]
    settings = config(path, deterministic=False, kv_dtype="int8")

    async def ask(proposer: Proposer) -> list[tuple[int, ...]]:
        made = partial(build, proposers=(proposer,))
        async with await Engine.start(settings, made) as engine, await engine.open(prompt) as seq:
            kids = seq.fork(2)
            found = await asyncio.gather(*(kid.generate_all(span) for kid, span in zip(kids, spans, strict=True)))
            return [each.token_ids for each in found]

    recorder = Recorder()
    expected = asyncio.run(ask(recorder))
    with watched() as found:
        assert asyncio.run(ask(Planted(recorder.spans, 0.1))) == expected
    assert found.replayed and not found.eager


def test_a_draft_model_has_graphs_for_its_own_steps(checkpoint: Path, tmp_path: Path) -> None:
    """Begins with two tokens after a draft that was right as a whole, as all of this one are."""
    steps: list[tuple[int, bool]] = []
    run = GpuRunner.run

    def running(runner: GpuRunner, step: Step) -> Tensor:
        before = runner.replayed
        logits = run(runner, step)
        if not any(row.draft for row in step.rows) and step.tokens < 5:
            steps.append((step.tokens, runner.replayed > before))
        return logits

    settings = config(checkpoint, speculation="draft", draft_model=str(checkpoint), deterministic=True)
    expected = said(answers(replace(settings, speculation="off", graphs=False), Recorder()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuRunner, "run", running)
        assert said(answers(settings, Recorder())) == expected
    assert {tokens for tokens, _ in steps} >= {1, 2}
    assert all(replayed for _, replayed in steps)
