"""A run's results: as JSON under bench/results/, as the tables of docs/performance.md, and as a picture."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "img" / "throughput.png"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # at 95%, of 1, 2, … degrees of freedom

Results = dict[str, Any]  # Any: plain JSON


def save(results: Results) -> Path:
    """Write the JSON, named by date and hardware."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{results['date']}-{results['slug']}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return path


def show(results: Results, table: str, *, keep: bool) -> None:
    """Prints a table and the JSON, and saves that where it is to be kept."""
    print(table)
    print(json.dumps(results))
    if keep:
        save(results)


def newest(slug: str) -> Results:
    """The last results that were kept under a name, or none."""
    found = sorted(RESULTS.glob(f"????-??-??-{slug}.json"))
    return dict(json.loads(found[-1].read_text("utf-8"))) if found else {}


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Returns the 95% interval of the mean, by bootstrap."""
    pick = random.Random(1)
    means = sorted(statistics.fmean(pick.choices(values, k=len(values))) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws)]


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95% interval of the mean of two values or more, by Student's t; past ten wider than needed."""
    mean, t = statistics.fmean(values), _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1]
    half = t * statistics.stdev(values) / len(values) ** 0.5
    return mean - half, mean + half


def tables(results: Results) -> str:
    """Markdown of everything that was measured."""
    hw = results["hardware"]
    lines = [
        f"Measured on {results['date']} with `{results['command']}`: {hw['gpu'] or hw['cpu']}, {hw['cores']} cores, "
        f"{hw['cpu_capability']}, torch {hw['torch']}, Python {hw['python']}. "
        f"Memory reads at {results['bandwidth_gb_per_s']:.1f} GB/s (all threads, a sum over 0.5 GiB).",
        "",
    ]
    for run in results["throughput"]:
        lines += [
            f"### {run['model']}, {run['dtype']}: tokens/s, requests of up to {run['longest_request']} tokens",
            "",
            "| requests at once | Ponder | transformers, one batch | ratio (min–max) "
            "| transformers, one by one | ratio (min–max) |",
            "|---|---|---|---|---|---|",
        ]
        for r in run["rows"]:
            b, s = r["ratio_to_batched"], r["ratio_to_one_at_a_time"]
            lines.append(
                f"| {r['concurrency']} | {r['engine_tokens_per_s']:.0f} | {r['transformers_batched_tokens_per_s']:.0f} "
                f"| **{b['median']:.2f}×** ({b['min']:.2f}–{b['max']:.2f}) | "
                f"{r['transformers_one_at_a_time_tokens_per_s']:.0f} "
                f"| **{s['median']:.2f}×** ({s['min']:.2f}–{s['max']:.2f}) |"
            )
        lines += [
            "",
            f"Threads: {run['engine_threads']} (Ponder's own choice) and {run['transformers_threads']} (the faster for "
            "transformers).",
            f"A decode step of one sequence takes {run['decode_step_ms']:.2f} ms. Its floor, the weights' bytes over "
            f"the measured bandwidth, is {run['floor_ms']:.2f} ms: {run['step_over_floor']:.1f} times the limit.",
            "",
        ]
    lines += ["### Prefix cache, forks, idling", "", "| what | measured | goal |", "|---|---|---|"]
    for p in results["prefix"]:
        c = p["cost_at_no_hits"]
        lines += [
            f"| {p['model']}: time with the cache on over off, no hits "
            f"| {c['median']:.3f} ({c['min']:.3f}–{c['max']:.3f}) | ≤ 1.01 |",
            f"| {p['model']}: TTFT of a repeated {p['prompt_tokens']}-token prompt over cold "
            f"| {p['ttft_ratio'] * 100:.1f}% ({p['ttft_repeated_ms']:.1f} of {p['ttft_cold_ms']:.1f} ms) | ≤ 15% |",
        ]
    f, i = results["fork"], results["idle"]
    lines += [
        "| fork of a live 1,000-token sequence: the call / with the core's part "
        f"| {f['call_us']:.0f} / {f['with_core_us']:.0f} µs | < 100 µs |",
        "| CPU time of an idle server "
        f"| {i['cpu_seconds'] * 1e3:.0f} ms in {i['seconds']:.0f} s ({i['cpu_share'] * 100:.2f}%) | none |",
    ]
    return "\n".join(lines) + "\n"


def between(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace the measured part of a page."""
    head, rest = page.read_text(encoding="utf-8").split(begin)
    _, tail = rest.split(end)
    page.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}", encoding="utf-8")


def write_page(results: Results) -> None:
    """Replace the measured part of docs/performance.md, and its picture."""
    between(PAGE, tables(results))
    _draw(results)


def _draw(results: Results) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = results["throughput"]
    figure, axes = pyplot.subplots(1, len(runs), figsize=(5.2 * len(runs), 3.6), squeeze=False)
    for axis, run in zip(axes[0], runs, strict=True):
        x = [r["concurrency"] for r in run["rows"]]
        for key, label, style in (
            ("engine_tokens_per_s", "Ponder", "o-"),
            ("transformers_batched_tokens_per_s", "transformers, one batch", "s--"),
            ("transformers_one_at_a_time_tokens_per_s", "transformers, one by one", "^:"),
        ):
            axis.plot(x, [r[key] for r in run["rows"]], style, label=label)
        axis.set(xscale="log", yscale="log", xticks=x, xticklabels=x, xlabel="requests at once", ylabel="tokens/s")
        axis.set_title(f"{run['model']}, {run['dtype']}", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
