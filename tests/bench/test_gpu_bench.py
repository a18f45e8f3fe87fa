"""The GPU's benchmark at toy sizes, on a device that is pretended: that all of it runs, with graphs and events, and
that the bytes and operations that figures are held to are those that a step moves and makes. What it runs in processes
of their own is run on the CPU."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu import __main__ as command
from bench.gpu import decoding, gpu_models, gpu_peers, rows, steps, timing, whole
from bench.gpu.matrices import copied_bytes, matmul_flops
from bench.gpu.setting import TOY, Setting
from bench.gpu.startup import GOAL_S
from bench.gpu.table import table
from bench.gpu.timing import ClockTimer, CudaTimer
from engine.core.step import Step
from engine.families import family_of
from engine.model.batch import KVCache
from engine.model.decoder import Decoder
from engine.model.gpu_runner import GpuRunner
from tests.pretended import DEVICE, pretended

pytest.importorskip("triton", reason="Triton is not installed: there is none for this system")
pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the benchmark itself"), pytest.mark.slow]

CPU = torch.device("cpu")
APART = ("startup", "peers")  # in processes of their own


def ticking() -> ClockTimer:
    """Each call takes a second."""
    ticks = count()
    return ClockTimer(lambda: float(next(ticks)))


@dataclass
class Run:
    """One run of every part but transformers'."""

    results: dict[str, Any] = field(default_factory=dict)  # Any: plain JSON
    caches: list[weakref.ref[KVCache]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)  # caches that there still were when one more was made
    batches: list[tuple[int, int]] = field(default_factory=list)  # blocks of a graph's step: laid, and meant


@pytest.fixture(scope="module")
def run() -> Run:
    made = Run({"date": "2026-01-01", "command": "a test"})
    made.results["hardware"] = {"gpu": "none", "cpu": "some", "torch": "2", "python": "3"}
    kept: list[str] = []

    def keep() -> None:
        kept.append(json.dumps(made.results))

    def measure(setting: Setting, *names: str) -> None:
        command.measure(setting, names, keep, lambda line: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "FLUSHED", 64)
        watch(patch, made)
        with pretended(patch):
            setting = Setting(DEVICE, CudaTimer(DEVICE), TOY, results=made.results)
            measure(setting, *(name for name in command.PARTS if name not in APART))
            made.left.append(living(setting, made))
    measure(Setting(CPU, ticking(), TOY, results=made.results), "startup")
    assert len(kept) > 30, "after every figure"
    made.results = json.loads(kept[-1])
    return made


def watch(patch: pytest.MonkeyPatch, made: Run) -> None:
    cache_for, graph_of = steps.cache_for, steps.graph_of

    def watched_cache(*given: Any) -> KVCache:
        made.left.append(sum(ref() is not None for ref in made.caches))
        kv = cache_for(*given)
        made.caches.append(weakref.ref(kv))
        return kv

    def watched_graph(runner: GpuRunner, step: Step) -> Callable[[], object]:
        graph = graph_of(runner, step)
        laid = runner._batching.lay(step)
        table = {int(block) for row in laid.tables for block in row if block}
        made.batches.append((len(table), len({block for row in step.rows for block in row.seq.table})))
        return graph

    patch.setattr(steps, "cache_for", watched_cache)
    patch.setattr(steps, "graph_of", watched_graph)


def living(setting: Setting, made: Run) -> int:
    setting.tidy()
    return sum(ref() is not None for ref in made.caches)


@pytest.fixture(scope="module")
def measured(run: Run) -> dict[str, Any]:  # Any: plain JSON
    return run.results


def test_every_part_runs(measured: dict[str, Any]) -> None:
    for name in command.PARTS:
        if name != "peers":
            assert "error" not in measured[name], measured[name]["error"]
            assert measured[name]["figures"], name
    for part in (measured[name] for name in command.PARTS if name != "peers"):
        for figure in part["figures"]:
            assert set(figure) >= {"what", "value", "unit", "least", "largest", "floor", "share", "goal", "met"}
            assert "error" not in figure["more"], figure
            assert figure["least"] <= figure["value"] <= figure["largest"]


def test_no_part_leaves_its_cache_to_the_next(run: Run) -> None:
    assert len(run.left) > 8 and not any(run.left), run.left


def test_a_graph_reads_as_many_blocks_as_are_counted(run: Run) -> None:
    assert len(run.batches) > 8
    assert all(laid == meant for laid, meant in run.batches), run.batches


def test_goals_stand_where_they_belong(measured: dict[str, Any]) -> None:
    def goals(part: str) -> set[float | None]:
        return {figure["goal"] for figure in measured[part]["figures"]}

    assert goals("decode") == {0.85, None}
    assert goals("attention") == {0.85, None} and goals("prefill") == {0.7}
    assert goals("sampling") == {0.02} and goals("overhead") == {0.05}
    assert goals("quantized") == {1.7, 2.8} and goals("matrices") == {1.7, 2.8, None}
    assert goals("forks") == {3.0, None} and goals("deterministic") == {None}


def test_the_table_has_a_line_for_each_figure(measured: dict[str, Any]) -> None:
    written = table(measured)
    for name in command.PARTS:
        for figure in measured.get(name, {}).get("figures", ()):
            assert f"| {figure['what']} |" in written
    assert "Not measured" not in written and "goals are met" in written


def test_floors_are_bytes_over_the_copys_rate(measured: dict[str, Any]) -> None:
    copy = measured["ceilings"]["figures"][0]
    assert copy["more"]["moved_or_made"] == 2 * TOY.copied_bytes, "read and written"
    for figure, batch in zip(measured["decode"]["figures"], TOY.batches, strict=True):
        numbers = toy_numbers()
        wanted = 2 * (numbers + batch * TOY.context * 2 * 2 * 16)  # keys and values, heads, components, of one layer
        assert figure["more"]["bytes"] == wanted
        assert figure["floor"] == pytest.approx(1e3 * wanted / copy["more"]["a_second"])
        assert figure["share"] == pytest.approx(figure["floor"] / figure["value"])


def toy_numbers() -> int:
    """Of the weights that a step reads, by the tensors that a checkpoint would have."""
    taken: list[tuple[str, int]] = []

    class Counted(gpu_models.RandomWeights):
        def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
            taken.append((name, 0 if len(shape) == 1 else shape[0] * shape[1]))
            return super().take(name, shape)

    shape = gpu_models.SHAPES["toy"]
    names = family_of(shape).names(shape)
    Decoder(gpu_models.spec_of("toy"), names, Counted(CPU, torch.float32), dtype=torch.float32, device=CPU)
    return sum(size for name, size in taken if "embed" not in name)


def test_weights_of_published_shapes_are_as_many_as_are_known() -> None:
    billions = {"llama-3-8b": 8.030e9 - 128_256 * 4096, "qwen3-0.6b": 0.596e9, "qwen3-4b": 4.022e9}
    for name, wanted in billions.items():
        assert gpu_models.weight_bytes(gpu_models.spec_of(name)) / 2 == pytest.approx(wanted, rel=2e-3)
    assert gpu_models.kv_bytes(gpu_models.spec_of("llama-3-8b"), 1) == 131_072


def test_operations_of_a_prompt_are_those_that_torch_counts() -> None:
    """Of its matrix products, without attention, which torch computes with a mask over all pairs."""
    from torch.utils.flop_counter import FlopCounterMode

    spec, tokens = gpu_models.spec_of("toy"), 24
    shape = gpu_models.SHAPES["toy"]
    weights = gpu_models.RandomWeights(CPU, torch.float32)
    kept = Decoder(spec, family_of(shape).names(shape), weights, dtype=torch.float32, device=CPU)
    with FlopCounterMode(display=False) as counter:
        states = torch.randn(tokens, spec.hidden_size)
        for layer in kept._layers:
            joined, gates = layer.qkv(states), layer.gate_up(states)
            layer.o(joined[:, : spec.heads * spec.head_dim])
            layer.down(gates[:, : spec.intermediate_size])
        kept.logits(states[-1:])
    attention = sum(4 * spec.layers * spec.heads * spec.head_dim * (at + 1) for at in range(tokens))
    assert gpu_models.prefill_flops(spec, tokens) == counter.get_total_flops() + attention
    assert matmul_flops(2, 3, 5) == 60 and copied_bytes(7) == 14


def test_packed_weights_are_counted_as_they_are_kept() -> None:
    from engine.kernels.quantized import quantize

    spec = gpu_models.spec_of("llama-3-8b")
    of_one = {
        bits: quantize(torch.randn(8, 4096), bits, group).nbytes / (8 * 4096) for bits, group in ((8, 0), (4, 64))
    }
    head = spec.vocab_size * spec.hidden_size
    rest = gpu_models.weight_bytes(spec) // 2 - head
    assert decoding.held_bytes(spec, "int8") == pytest.approx((head + rest) * of_one[8], rel=2e-3)
    assert decoding.held_bytes(spec, "int4") == pytest.approx(head * of_one[8] + rest * of_one[4], rel=2e-3)


def test_contexts_are_cut_to_what_fits() -> None:
    assert decoding.context_for(4, 2048, 10_000) == 2048
    assert decoding.context_for(64, 2048, 6400) == 1600


def test_branches_share_their_prefix_and_nothing_else() -> None:
    seqs = steps.sequences(3, 100, 50, shared=64)
    assert all(seq.table[:4] == seqs[0].table[:4] for seq in seqs)
    own = [block for seq in seqs for block in seq.table[4:]]
    assert sorted({*own, *seqs[0].table[:4]}) == list(range(1, steps.blocks_of(3, 100, 64) + 1))
    assert len(own) == len(set(own)) == 9


def test_a_figure_is_held_to_its_goal() -> None:
    assert rows.time_of("a", [2.0, 1.0, 3.0], floor_s=1.8, goal=0.85).met is True
    assert rows.time_of("a", [2.0], floor_s=1.0, goal=0.85).met is False
    assert rows.time_of("a", [2.0]).met is None
    faster = rows.times_faster("a", [3.0], [1.0, 1.0, 9.0], goal=2.8)
    assert (faster.share, faster.met, faster.floor, faster.value) == (3.0, True, 3000.0, 1000.0)
    beside = whole.step_figure("a", [0.022, 0.020, 0.021], [0.020])
    assert beside.value == pytest.approx(1.0) and beside.share == pytest.approx(1 / 21) and beside.met is True
    assert whole.step_figure("a", [0.022], [0.020]).met is False
    assert rows.rate_of("a", 10.0, [2.0], "x/s", limit=10.0).share == 0.5
    assert GOAL_S > 0


def test_a_part_that_fails_or_has_no_time_left_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(setting: Setting) -> Any:
        yield rows.time_of("first", [1.0])
        raise RuntimeError("CUDA error")

    monkeypatch.setitem(command.PARTS, "decode", broken)
    setting = Setting(CPU, ticking(), TOY)
    command.measure(setting, ["decode", "attention"], lambda: None, lambda line: None)
    assert setting.results["decode"]["figures"][0]["what"] == "first"
    assert setting.results["decode"]["error"] == "RuntimeError: CUDA error"
    assert setting.results["attention"]["error"].startswith("missing: the part ceilings")
    late = Setting(CPU, ticking(), TOY, until=0.0)
    command.measure(late, ["ceilings"], lambda: None, lambda line: None)
    assert late.results["ceilings"] | {"seconds": 0} == {
        "figures": [],
        "error": "missing: time, it was over",
        "seconds": 0,
    }


def test_transformers_is_measured_on_the_same_shapes() -> None:
    pytest.importorskip("transformers")
    setting = Setting(CPU, ClockTimer(), replace(TOY, context=60), until=float("inf"))
    setting.results["whole"] = {"figures": [rows.time_of("toy, 2 rows", [0.5]).json()]}
    found = list(gpu_peers.peers(setting))
    assert [figure.what.partition(" transformers ")[::2] for figure in found] == [
        ("toy, 17 tokens,", gpu_peers.PROMPT),
        ("toy, 2 rows,", gpu_peers.STATIC),
        ("toy, 2 rows,", gpu_peers.CONTINUOUS),
    ]
    assert not any("error" in figure.more for figure in found), found
    for figure in found[1:]:
        assert figure.floor == 500.0 and figure.share == pytest.approx(figure.value / 500.0)


def test_a_peer_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    job = {"models": ["none"], "batches": [2], "context": 60, "prompt": 17, "device": "cpu"}
    gpu_peers.measure(tmp_path / "peers.json", job)
    told = json.loads((tmp_path / "peers.json").read_text())
    assert [each["error"] for each in told] == ["KeyError('none')"] * 2
    figure = gpu_peers.beside(Setting(CPU, ticking(), TOY), told[0])
    assert figure.what == f"none, transformers {gpu_peers.STATIC}" and figure.more["error"] == "KeyError('none')"


def test_transformers_is_ended_when_the_time_is_over() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(rows.Missing, match="time"):
        list(gpu_peers.peers(Setting(CPU, ClockTimer(), TOY, until=0.0)))


def test_a_model_without_room_for_one_row_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setting, "free_bytes", lambda setting: 1000)
    with pytest.raises(rows.Missing, match="memory for one row of toy"):
        next(whole.overhead(Setting(CPU, ticking(), TOY)))


def test_a_figure_is_found_by_its_name_whatever_its_context() -> None:
    figures = [rows.time_of(what, [1e-3 * ms]).json() for what, ms in (("a, 25 rows", 1), ("a, 2 rows of 48", 2))]
    setting = Setting(CPU, ticking(), TOY, results={"decode": {"figures": figures}})
    assert setting.value("decode", "a, 2 rows") == 2 and setting.value("decode", "a, 25 rows") == 1


def test_only_what_could_have_been_measured_is_a_failure() -> None:
    assert not command.failed({"figures": []}) and not command.failed({"error": "missing: time, it was over"})
    assert command.failed({"error": "RuntimeError: CUDA error"})


def test_a_part_alone_is_held_to_ceilings_too() -> None:
    assert command.parts([], {}) == list(command.PARTS)
    assert command.parts(["quantized"], {}) == ["ceilings", "quantized"]
    assert command.parts(["quantized"], {"ceilings": {}}) == ["quantized"]
    assert command.parts(["quantized", "ceilings"], {}) == ["quantized", "ceilings"]


def test_where_there_is_no_device_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert command.main(["--out", str(out)]) == 0
    assert "no CUDA device" in capsys.readouterr().out and not out.exists()
