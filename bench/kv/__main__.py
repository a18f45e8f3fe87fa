"""`python -m bench.kv`: measure, show tables, draw, keep the JSON. `--only` measures one part, and keeps the others."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
from pathlib import Path
from typing import Any

from bench import hardware, report
from bench.kv import (
    attention_cost,
    cache_quality,
    chunk_reuse,
    disaggregation,
    event_cost,
    head_quality,
    held,
    hits,
    int4_ways,
    layerwise,
    restart,
    routing,
    store,
    streaming,
)

ROUTED_SIZES = (12_000, 30_000)
SIZES = (500, 1000, 2000, 4000, 8000, 12_000, 16_000, 20_000, 24_000, 32_000)
PICTURE = report.ROOT / "docs" / "img" / "kv-hits.png"
MIXES = ((8, 18), (20, 6))  # agents, and prompts beside them at any time
WAYS: tuple[dict[str, Any], ...] = (  # Any: arguments
    {"hold": False},
    {"hold": True},
    {"hold": False, "disk_bytes": 1 << 30},
    {"hold": True, "disk_bytes": 1 << 30},
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kv", description="What is kept, and where.")
    parser.add_argument(
        "--only",
        choices=[
            "hits",
            "held",
            "quality",
            "int4",
            "attention",
            "restart",
            "events",
            "routing",
            "disaggregation",
            "store",
            "chunks",
            "heads",
            "streaming",
        ],
        help="this part alone",
    )
    material = Path(os.environ.get("PONDER_SHARED", report.ROOT.parent / "shared"))
    trace = material / "data" / "traces" / "mooncake_synthetic.jsonl"
    parser.add_argument("--trace", type=Path, default=trace, help="a Mooncake trace, of PONDER_SHARED unless told")
    parser.add_argument("--model", type=Path, default=report.ROOT / "models" / "pebble", help="for the agents")
    today = datetime.date.today().isoformat()
    parser.add_argument("--out", type=Path, default=report.RESULTS / f"{today}-kv-{hardware.slug()}.json")
    options = parser.parse_args()
    if options.only in (None, "hits", "events", "routing") and not options.trace.is_file():
        parser.error(f"there is no trace {options.trace}; set PONDER_SHARED or --trace")
    made: dict[str, Any] = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    made |= {"date": today, "hardware": hardware.describe()}
    if options.only in (None, "hits"):
        made["hits"] = hits.measure(options.trace, SIZES)
        draw(made["hits"])
    if options.only in (None, "held"):
        made["held"] = [
            asyncio.run(held.measure(options.model, agents, others, **way)) for agents, others in MIXES for way in WAYS
        ]
    if options.only in (None, "quality"):
        made["quality"] = cache_quality.measure(options.model)
    if options.only in (None, "int4"):
        made["int4"] = int4_ways.measure(options.model)
    if options.only in (None, "attention"):
        made["attention"] = attention_cost.measure(options.model)
    if options.only in (None, "restart"):
        made["restart"] = asyncio.run(restart.measure(options.model))
    if options.only in (None, "events"):
        made["events"] = event_cost.measure(options.trace)
    if options.only in (None, "routing"):
        made["routing"] = routing.measure(options.trace, ROUTED_SIZES)
    if options.only in (None, "disaggregation"):
        made["disaggregation"] = asyncio.run(disaggregation.measure(options.model))
        made["disaggregation"]["single_chunk"] = asyncio.run(layerwise.measure(options.model))
    if options.only in (None, "store"):
        made["store"] = asyncio.run(store.measure(options.model))
    if options.only in (None, "chunks"):
        made["chunks"] = asyncio.run(chunk_reuse.measure(options.model))
    if options.only in (None, "heads"):
        made["heads"] = head_quality.measure(options.model)
    if options.only in (None, "streaming"):
        made["streaming"] = asyncio.run(streaming.measure(options.model))
    options.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(tables(made))


def tables(made: dict[str, Any]) -> str:  # Any: plain JSON
    lines = chunk_reuse.tables(made["chunks"]) if "chunks" in made else []
    lines += head_quality.tables(made["heads"]) if "heads" in made else []
    lines += streaming.tables(made["streaming"]) if "streaming" in made else []
    if "hits" in made:
        lines += [
            "| blocks | of all | ideal | least recent first | engine | of the ideal | with tiers |",
            "|" + "---|" * 7,
        ]
        for row in made["hits"]["rows"]:
            tiered = row["engine_with_tiers"]
            lines.append(
                f"| {row['blocks']:,} | {row['share_of_distinct']:.0%} | {row['ideal']:.1%} "
                f"| {row['least_recent_first']:.1%} | {row['engine']:.1%} | **{row['engine'] / row['ideal']:.0%}** "
                f"| {'–' if tiered is None else f'{tiered:.1%}'} |"
            )
        lines.append("")
    if "held" in made:
        lines += ["| agents | leases | disk | reused | worst wait |", "|" + "---|" * 5]
        for row in made["held"]:
            lines.append(
                f"| {row['agents']} | {'yes' if row['hold'] else 'no'} | {'yes' if row['disk_bytes'] else 'no'} "
                f"| **{row['reused']:.1%}** | {row['worst_reused']:.0%} |"
            )
        lines.append("")
    if "quality" in made:
        head = (
            "| model in | K/V in | perplexity | with that | KL, nats | KL, p99 | same likeliest token | bytes of K/V |"
        )
        lines += [head, "|" + "---|" * 8]
        for row in made["quality"]["rows"]:
            lines.append(
                f"| {row['dtype']} | {row['kv_dtype']} | {row['perplexity']:.4f} | {row['perplexity_quantized']:.4f} | "
                f"{row['kl_nats']:.1e} | {row['kl_p99']:.1e} | {row['same_likeliest']:.2%} | {row['bytes_ratio']:.2f} |"
            )
        lines.append("")
    if "int4" in made:
        times = made["int4"]["outliers"]
        lines += [
            "| 4 bits | bits a number | " + " | ".join(f"KL, keys × {each}" for each in times) + " |",
            "|" + "---|" * (2 + len(times)),
        ]
        for row in made["int4"]["rows"]:
            cells = (f"{each['kl_nats']:.1e}, {each['same_likeliest']:.1%}" for each in row["found"])
            lines.append(f"| {row['way']} | {row['bits']} | {' | '.join(cells)} |")
        lines.append("")
    if "attention" in made:
        lines += ["| K/V in | MB read by a layer | kernels | ms a layer | ratio |", "|" + "---|" * 5]
        for row in made["attention"]["rows"]:
            size, ms, ratio = f"{row['bytes'] / 1e6:.1f}", f"{row['ms']:.2f}", f"{row['ratio']:.2f}"
            lines.append(f"| {row['kv_dtype']} | {size} | {row['kernels']} | {ms} | {ratio} |")
        lines.append("")
    if "restart" in made:
        row = made["restart"]
        lines += [f"| first token of {row['prompt_tokens']:,} | never read | in the pool | after a restart |"]
        seconds = (row[f"{key}_s"] for key in ("cold", "warm", "after_restart"))
        lines += ["|" + "---|" * 4, "| | " + " | ".join(f"{1000 * each:.0f} ms" for each in seconds) + " |"]
    if "events" in made:
        row = made["events"]
        lines += ["| a step of the scheduler | µs |", "|" + "---|" * 2]
        lines += [f"| without events | {row['step_us']:.0f} |", f"| with events | {row['step_with_events_us']:.0f} |"]
    if "routing" in made:
        lines += ["", "| blocks in all | policy | found | of one cache | largest share of requests |", "|" + "---|" * 5]
        for row in made["routing"]["rows"]:
            lines.append(
                f"| {row['blocks']:,} | {row['policy']} | {row['found']:.1%} | **{row['of_one_cache']:.0%}** "
                f"| {row['largest_share']:.0%} |"
            )
    if "disaggregation" in made:
        found = made["disaggregation"]
        beside = f"{found['streams']} streams, prompts of {found['prompt_tokens']:,} tokens"
        lines += ["", f"| {beside} | gap p50 | gap p99 | TTFT |"]
        lines.append("|" + "---|" * 4)
        for row in found["rows"]:
            gaps = f"{1000 * row['gap_p50_s']:.1f} ms | **{1000 * row['gap_p99_s']:.1f} ms**"
            lines.append(f"| {row['way']} | {gaps} | {row['ttft_s']:.2f} s |")
        moved = f"{found['bytes_moved'] / 1e6:,.1f} MB moved, {found['bytes_expected'] / 1e6:,.1f} MB by the formula"
        told = f"{found['overlapped']:.0%} of the sending beside computing, same answers: {found['same_answers']}"
        lines += ["", f"{moved}; {told}."]
        lines += _layerwise(found["single_chunk"])
    if "store" in made:
        found = made["store"]
        lines += ["", "| prompt | TTFT from the store | computed | ratio, least to most | looked up in vain |"]
        lines.append("|" + "---|" * 5)
        for row in found["rows"]:
            times = [f"{1000 * row[name]:.0f} ms" for name in ("store_ttft_s", "computed_ttft_s", "missed_ttft_s")]
            ratios = sorted(row["ratios"])
            middle = f"{ratios[len(ratios) // 2]} ({ratios[0]} to {ratios[-1]})"
            lines.append(f"| {row['prompt_tokens']:,} tokens | {times[0]} | {times[1]} | {middle} | {times[2]} |")
        told = f"{found['received_bytes'] / 1e6:,.1f} MB loaded, {found['failed_loads']} loads failed"
        lines += ["", f"{told}, {found['lookup_ms']:.1f} ms a lookup, same answers: {found['same_answers']}."]
    return "\n".join(lines)


def _layerwise(made: dict[str, Any]) -> list[str]:
    lines = [
        "",
        f"| one chunk, {made['pairs']} pairs | waited after the last layer | worst | TTFT | step | overlapped |",
    ]
    lines.append("|" + "---|" * 6)
    for row in made["rows"]:
        waited = f"**{1000 * row['waited_s']:.1f} ms** | {1000 * row['waited_max_s']:.1f} ms"
        times = f"{1000 * row['ttft_s']:.0f} ms | {1000 * row['step_s']:.0f} ms"
        lines.append(f"| {row['prompt_tokens']:,} tokens {row['way']} | {waited} | {times} | {row['overlapped']:.0%} |")
    lines.append("")
    for row in made["rows"][1::2]:
        moved = f"{row['bytes_moved'] / 1e6:.2f} MB moved each way, {row['bytes_expected'] / 1e6:.2f} by the formula"
        told = f"by layer less was waited in {row['waited_less']} pairs; same answers: {row['same_answers']}"
        lines.append(f"{row['prompt_tokens']:,} tokens: {moved}; {told}.")
    return lines


def draw(made: dict[str, Any]) -> None:  # Any: plain JSON
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 3.6))
    x = [row["blocks"] for row in made["rows"]]
    for key, label, style in (
        ("ideal", "clairvoyant (Belady)", "k--"),
        ("engine", "engine, pool alone", "o-"),
        ("engine_with_tiers", "engine, an eighth in the pool, all on disk", "s:"),
        ("least_recent_first", "least recent first", "^-."),
    ):
        points = [(at, row[key]) for at, row in zip(x, made["rows"], strict=True) if row[key] is not None]
        axis.plot([at for at, _ in points], [100 * share for _, share in points], style, label=label, markersize=4)
    axis.set(xlabel="blocks in the cache", ylabel="blocks found, %", ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
