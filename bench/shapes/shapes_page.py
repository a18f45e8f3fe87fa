"""Sums up an ablation's runs, paired by held-out case, and writes its tables into docs/performance.md.

Differences are from attention alone, of the same seed, or from the first shape where attention alone was not run. A
seed's interval is the bootstrap's over cases; that of the mean over seeds is Student's, which knows of nothing but the
seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from bench import report
from bench.report import interval, student_interval
from bench.shapes.ablation import BASELINE
from training.alignment import ROLES
from training.evaluate import wilson
from training.torch_model import ModelConfig

BEGIN, END = "<!-- shapes: begin -->", "<!-- shapes: end -->"
LOSS, LIKELIEST, EXACT = "loss of an answer's token", "tokens that are the likeliest", "all tokens the likeliest"
_SHOWN = (LIKELIEST, "right sentence with its label", "right tool", "right arguments")
_OF_RUNS = ("tokens", "tokens_per_cpu_second", "seconds", "missed")
Row = dict[str, Any]  # Any: plain JSON
Runs = Mapping[tuple[str, int], Row]  # of a shape and a seed


def of_cases(run: Row, ability: str) -> dict[str, list[float] | list[bool]]:
    """Returns for each measure the value of each case: the mean loss of a token, the share of
    tokens that are the likeliest, or whether the answer is right."""
    made = run["abilities"][ability]
    found: dict[str, list[float] | list[bool]] = {
        LOSS: [case["loss"] for case in made["cases"]],
        LIKELIEST: [case["right"] / case["tokens"] for case in made["cases"]],
        EXACT: [case["right"] == case["tokens"] for case in made["cases"]],
    }
    for measure in made["verdicts"][0]:
        found[measure] = [case[measure] for case in made["verdicts"]]
    return found


def _summed(values: Sequence[float], baseline: Sequence[float] | None, *, counted: bool) -> Row:
    """Returns the mean and its interval, by Wilson of what is `counted`, and those of the differences by case."""
    row: Row = {"n": len(values), "mean": fmean(values), "interval": interval(values)}
    if counted:
        row |= {"right": int(sum(values)), "interval": wilson(int(sum(values)), len(values))}
    if baseline is not None:
        differences = [one - other for one, other in zip(values, baseline, strict=True)]
        row |= {"difference": fmean(differences), "difference_interval": interval(differences)}
    return row


def _compared(runs: Runs, shape: str, baseline: str, ability: str, measure: str) -> Row:
    """Returns a measure of a shape by seed, and the mean over seeds of the differences from the baseline."""
    seeds = dict[str, Row]()
    for seed in (seed for of_shape, seed in runs if of_shape == shape):
        other = runs.get((baseline, seed)) if shape != baseline else None
        compared = None if other is None else of_cases(other, ability)[measure]
        seeds[str(seed)] = _summed(
            of_cases(runs[shape, seed], ability)[measure], compared, counted=measure not in (LOSS, LIKELIEST)
        )
    differences = [row["difference"] for row in seeds.values() if "difference" in row]
    if not differences:
        return {"seeds": seeds}
    over_seeds = student_interval(differences) if len(differences) > 1 else None
    return {"seeds": seeds, "difference": fmean(differences), "difference_interval": over_seeds}


def _size(rows: Sequence[Row], config: ModelConfig) -> Row:
    return {
        "layers": len(config.layer_types), "convolutions": config.layer_types.count("conv"),
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        **{key: rows[0][key] for key in ("parameters", "embedding")},
        **{key: {str(row["seed"]): row[key] for row in rows} for key in _OF_RUNS},
    }  # fmt: skip


def summed_up(rows: Sequence[Row], shapes: Mapping[str, ModelConfig]) -> Row:
    """Returns sizes and speeds of the shapes, and for each ability all measures beside the baseline's of the same seed.

    Raises ValueError where there is no run, or where two shapes of a seed read different numbers of tokens.
    """
    if not rows:
        raise ValueError("No run is kept: leave out --kept, or name the folder of the runs with --work.")
    runs = {(row["shape"], row["seed"]): row for row in rows}
    names = list(dict.fromkeys(shape for shape, _ in runs))
    baseline = BASELINE if BASELINE in names else names[0]
    for (shape, seed), row in runs.items():
        read = runs.get((baseline, seed), row)["tokens"]
        if row["tokens"] != read:
            raise ValueError(
                f"From seed {seed} {shape} read {row['tokens']:,} tokens and {baseline} {read:,}; runs are compared on "
                "the same data alone. Remove the older of the two."
            )
    return {
        "shapes": {name: _size([row for row in rows if row["shape"] == name], shapes[name]) for name in names},
        "abilities": {
            ability: {
                measure: {name: _compared(runs, name, baseline, ability, measure) for name in names}
                for measure in of_cases(rows[0], ability)
            }
            for ability in rows[0]["abilities"]
        },
    }


def _loss_cell(row: Row) -> str:
    if "difference" not in row:
        return f"{row['mean']:.3f}"
    low, high = row["difference_interval"]
    return f"{row['mean']:.3f} ({row['difference']:+.3f}: {low:+.3f} … {high:+.3f})"


def _right_cell(row: Row) -> str:
    low, high = row["interval"]
    return f"{row.get('right', format(row['mean'], '.0%'))} ({low:.0%} – {high:.0%})"


def _mean(found: Row, form: str, scale: float) -> str:
    """Writes the mean difference over seeds and its interval, bold where that leaves out 0; nothing of the baseline."""
    if "difference" not in found:
        return ""
    mean, ends = form.format(found["difference"] * scale), found["difference_interval"]
    if ends is None:
        return mean
    shown = f"**{mean}**" if ends[0] > 0 or ends[1] < 0 else mean
    return f"{shown} ({' … '.join(form.format(end * scale) for end in ends)})"


def _range(found: Mapping[str, float | None], scale: float, form: str) -> str:
    values = [value / scale for value in found.values() if value is not None]
    return "–".join(dict.fromkeys(form.format(value) for value in (min(values), max(values)))) if values else ""


def tables(results: report.Results) -> str:
    """Returns Markdown of the shapes, of the losses by ability, and of the right answers."""
    hw, shapes, abilities = results["hardware"], results["shapes"], results["abilities"]
    seeds = list(dict.fromkeys(seed for size in shapes.values() for seed in size["tokens"]))
    lines = [
        f"Measured on {results['date']} with `{results['command']}`: {hw['cpu']}, {hw['cores']} cores, "
        f"{hw['cpu_capability']}, torch {hw['torch']}; one thread a run.",
        "",
        "| shape | layers, of which convolutions | width | feed-forward | parameters, of which embedding "
        "| million tokens | tokens per second of CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, size in shapes.items():
        lines.append(
            f"| {name} | {size['layers']}, {size['convolutions']} | {size['hidden_size']} "
            f"| {size['intermediate_size']} | {size['parameters'] / 1e6:.2f}M, {size['embedding'] / 1e6:.2f}M "
            f"| {_range(size['tokens'], 1e6, '{:.2f}')} | {_range(size['tokens_per_cpu_second'], 1, '{:.0f}')} |"
        )
    lines += ["", "−ln of the attention that falls where it should, at the end of training, by seed:", ""]
    lines += [f"| shape | {' | '.join(ROLES)} |", "|---|" + "---|" * len(ROLES)]
    for name, size in shapes.items():
        of_roles = (", ".join(f"{of[role]:.2f}" for of in size["missed"].values() if of) for role in ROLES)
        lines.append(f"| {name} | {' | '.join(of_roles)} |")
    head = "".join(f" seed {seed} |" for seed in seeds)
    for ability, measures in abilities.items():
        n = next(iter(next(iter(measures[LOSS].values()))["seeds"].values()))["n"]
        lines += ["", f"**{ability}**, {n} held-out cases, the same of all runs: {LOSS} in nats", ""]
        lines += [f"| |{head} over seeds |", "|---|" + "---|" * (len(seeds) + 1)]
        for name, found in measures[LOSS].items():
            cells = (_loss_cell(found["seeds"][seed]) if seed in found["seeds"] else "" for seed in seeds)
            lines.append(f"| {name} | {' | '.join(cells)} | {_mean(found, '{:+.3f}', 1)} |")
    lines += ["", f"Tokens of wanted answers, and right answers of {n}; differences in points:", ""]
    lines += [f"| cases | measure | shape |{head} over seeds |", "|---|---|---|" + "---|" * (len(seeds) + 1)]
    for ability, measures in abilities.items():
        for measure in (measure for measure in _SHOWN if measure in measures):
            for name, found in measures[measure].items():
                cells = (_right_cell(found["seeds"][seed]) if seed in found["seeds"] else "" for seed in seeds)
                lines.append(
                    f"| {ability} | {measure} | {name} | {' | '.join(cells)} | {_mean(found, '{:+.1f}', 100)} |"
                )
    return "\n".join(lines) + "\n"


def write_page(results: report.Results) -> None:
    """Replaces the measured part of the section on shapes."""
    report.between(report.PAGE, tables(results), BEGIN, END)
